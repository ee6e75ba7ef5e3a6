"""A backward as it is printed: a summary that stays short, however large the module."""

from __future__ import annotations

import dataclasses
import pprint

import torch
from torch import nn

import syncline as sl
from syncline import BackwardRecord, BucketRecord, NonFiniteRecord
from syncline.transport import Transport, run_ranks


def record_of(num_layers: int, *, num_parameters: int = 2, **changes: object) -> BackwardRecord:
    """As of a module of layers with a bucket for each."""
    buckets = tuple(
        BucketRecord(
            index=index,
            payload_bytes=1000,
            parameters=tuple(f"layers.{index}.p{nth}" for nth in range(num_parameters)),
            trigger=f"layers.{index}.p{num_parameters - 1}",
            launched_seconds=0.001 * index,
            waited_seconds=0.002,
        )
        for index in range(num_layers)
    )
    fields: dict[str, object] = {
        "step": 3,
        "synchronized": True,
        "num_gradients": num_layers * num_parameters,
        "unused": (),
        "divisor": 2,
        "counted_items": False,
        "reduced_afterwards": False,
        "num_reduced": 5000,
        "buckets": buckets,
        "duration_seconds": 0.25,
    }
    return BackwardRecord(**(fields | changes))  # type: ignore[arg-type]


def test_of_a_small_module_everything_is_there() -> None:
    assert str(record_of(2)).splitlines() == [
        "step 3: 4 gradients, mean over 2 ranks, 5,000 elements in 2 buckets, 250.0 ms",
        "  bucket 0, 1.00 kB, 2 parameters: sent when layers.0.p1 was ready, at 0.0 ms, waited 2.0 ms",
        "  bucket 1, 1.00 kB, 2 parameters: sent when layers.1.p1 was ready, at 1.0 ms, waited 2.0 ms",
    ]


def test_of_a_large_one_the_rest_is_counted_and_kept() -> None:
    names = tuple(f"layers.{index}.p0" for index in range(200))
    nonfinite = NonFiniteRecord(
        found=dict.fromkeys(range(64), names), in_mean=names, outcome="discarded", num_steps=1
    )
    record = record_of(200, num_parameters=5, unused=names, nonfinite=nonfinite)
    lines = str(record).splitlines()
    assert len(lines) <= 16
    assert all(len(line) <= 100 for line in lines)
    assert lines[1].startswith("  bucket 0, 1.00 kB, 5 parameters: sent when layers.0.p4 was ready")
    assert lines[7] == "  and 194 more buckets, 194 kB, waited 388.0 ms in all"
    rest = " ".join(line.strip() for line in lines[8:])
    assert rest.startswith(
        "no gradient on this rank: layers.0.p0, layers.1.p0, layers.2.p0, ..., layers.199.p0 (200 parameters) "
        "not finite on rank 0: layers.0.p0, "
    )
    assert "; on rank 1: " in rest
    assert "; and on 62 more ranks; in the mean of finite gradients: " in rest
    assert rest.endswith(" -> discarded (1 step so far)")
    assert len(record.buckets) == 200
    in_full = pprint.pformat(dataclasses.asdict(record))
    assert all(f"'layers.{index}.p3'" in in_full for index in range(200))
    assert len(in_full.splitlines()) > 1000


def test_seven_buckets_are_shown_rather_than_six_and_one_more() -> None:
    assert "and " not in str(record_of(7))
    assert "and 2 more buckets" in str(record_of(8))


def test_what_became_of_it() -> None:
    at_the_end = record_of(
        1,
        buckets=(
            BucketRecord(
                index=0,
                payload_bytes=8,
                parameters=("a",),
                trigger=None,
                launched_seconds=0.0,
                waited_seconds=0.0,
            ),
        ),
    )
    assert "1 parameter: sent at the end of backward, at 0.0 ms" in str(at_the_end)
    by_items = record_of(1, divisor=7, counted_items=True)
    assert "mean over 7 items, " in str(by_items)
    later = record_of(0, num_gradients=2, synchronized=False, reduced_afterwards=True)
    assert str(later) == "step 3: 2 gradients, reduced after this backward: mean over 2 ranks"
    alone = record_of(0, num_gradients=2, synchronized=False)
    assert str(alone) == "step 3: 2 gradients, not reduced: .grad holds the gradients of this rank"
    nobody = NonFiniteRecord(found={}, in_mean=(), outcome="finite", num_steps=0)
    assert str(nobody) == "all gradients are finite (not finite in 0 steps so far)"


def test_as_it_was_recorded() -> None:
    def program(t: Transport) -> str:
        ddp = sl.DistributedDataParallel(nn.Linear(2, 1), process_group=t)
        ddp(torch.ones(1, 2)).sum().backward()
        return str(ddp.last_step)

    for text in run_ranks(2, program):
        first, bucket = text.splitlines()
        assert first.startswith("step 1: 2 gradients, mean over 2 ranks, 3 elements in 1 bucket, ")
        assert bucket.startswith("  bucket 0, ")
        assert "B, 2 parameters: sent when weight was ready, at " in bucket
