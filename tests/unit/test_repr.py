"""The `repr` of what users meet is one line of at most 100 columns that says what matters."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import syncline as sl
from syncline.records import LateRank, RankTimes, StepTiming
from syncline.transport import Transport, run_ranks

LONG = tuple(f"encoder.layers.{index}.self_attention.query_key_value.weight" for index in range(50))


def bucket() -> sl.BucketRecord:
    return sl.BucketRecord(
        index=0,
        payload_bytes=423_000,
        parameters=LONG,
        trigger=LONG[-1],
        launched_seconds=0.0123456789,
        waited_seconds=0.0023456789,
    )


def times(total: float) -> RankTimes:
    return RankTimes(
        update_seconds=0.001, data_seconds=total, forward_seconds=total / 3, backward_seconds=2 / 3
    )


CHAIN = sl.compression.Chain(
    sl.compression.PowerSGD(2, seed=123456), sl.compression.Quantize(4, block_numel=64)
)

SHORT: list[tuple[Any, str]] = [
    (bucket(), "<BucketRecord: 0, 423 kB, 50 parameters, waited 2.3 ms>"),
    (
        sl.NonFiniteRecord(found={0: LONG, 3: LONG}, in_mean=LONG, outcome="discarded", num_steps=2),
        "<NonFiniteRecord: not finite on ranks 0, 3, discarded, 2 steps so far>",
    ),
    (times(0.1), "<RankTimes: update 1.0 ms, data 100.0 ms, forward 33.3 ms, backward 666.7 ms>"),
    (
        StepTiming(step_seconds=0.5, waited_seconds=0.1 / 3, of_ranks=(times(0.1), times(0.2 / 3))),
        "<StepTiming: step 500.0 ms, waited 33.3 ms, rank 0 was late>",
    ),
    (
        LateRank(3, 0.0412 / 3, "data", 0.041 / 7, 0.002),
        "<LateRank: rank 3 by 13.7 ms: data took 5.9 ms, 2.0 ms on the others>",
    ),
    (
        sl.BufferRecord(
            num_tensors=6, payload_bytes=400, sent=False, reason="no forward has run under no_sync"
        ),
        "<BufferRecord: 6 tensors, 400 B, not sent: no forward has run under no_sync>",
    ),
    (
        sl.EvolutionRecord(step=7, losses=(1 / 3,) * 500, mean_loss=1 / 3, best_loss=1 / 7, num_nonfinite=0),
        "<EvolutionRecord: step 7, mean 0.333333, best 0.142857, 500 members, 0 not finite>",
    ),
    (sl.Row(what="buffers", size="-", when="never", how="-", drift_allowed="-"), "<Row: buffers, never, ->"),
    (CHAIN, "Chain(PowerSGD(rank=2, seed=123456), Quantize(bits=4, block_numel=64))"),
    (
        sl.DiLoCo(500, compression=sl.compression.Quantize(4)),
        "DiLoCo(every=500, compression=Quantize(bits=4))",
    ),
    (sl.DistributedSampler(range(10), 3, 1), "<DistributedSampler: 4 of 10 samples, rank 1 of 3, epoch 0>"),
    (sl.TrainState(model=nn.Linear(1, 1)), "<TrainState: step 0, model>"),
]


@pytest.mark.parametrize(("value", "text"), SHORT, ids=lambda one: type(one).__name__)
def test_a_repr_says_what_matters(value: Any, text: str) -> None:
    assert repr(value) == text


@pytest.mark.parametrize("name", ["a" * 300, "long name " * 40, "two\nlines"])
def test_a_repr_is_one_line_and_marks_what_it_leaves_out(name: str) -> None:
    world = dataclasses.replace(sl.world(), host=name)
    values: list[Any] = [
        world,
        sl.Contract(title=name, rows=()),
        sl.Row(what=name, size=name, when=name, how=name, drift_allowed=name),
        sl.BufferRecord(num_tensors=1, payload_bytes=1, sent=False, reason=name),
        sl.RoundRecord(
            step=1, what=(name,) * 9, num_calls=1, payload_bytes=1, waited_seconds=1, duration_seconds=1
        ),
    ]
    for value in values:
        text = repr(value)
        assert len(text) <= 100
        assert "\n" not in text
        assert ("..." in text) == (len(name) > 90 or isinstance(value, sl.RoundRecord))


def test_the_parts_of_a_run_have_short_reprs(tmp_path: Path) -> None:
    def rank(t: Transport) -> list[str]:
        ddp = sl.DistributedDataParallel(nn.Linear(2, 1), process_group=t, strategy=sl.LocalSGD(1))
        optimizer = ddp.attach(torch.optim.SGD(ddp.parameters()))
        ddp(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        with sl.Checkpointer(tmp_path, group=t) as checkpointer:
            checkpointer.save(sl.TrainState(model=ddp), 3)
            found = [t, ddp.last_step, ddp.last_round, ddp.statistics(), ddp.contract, checkpointer]
            return [
                *map(repr, found),
                repr(sl.check_replicas(torch.ones(3), group=t)),
            ]

    torch.manual_seed(0)
    for rank_number, texts in enumerate(run_ranks(2, rank)):
        assert all(len(text) <= 100 and "\n" not in text for text in texts)
        assert texts[0] == f"<ThreadsTransport: threads, rank {rank_number} of 2>"
        assert texts[1].startswith("<BackwardRecord: step 1: 2 gradients, not reduced")
        assert texts[2].startswith("<RoundRecord: after step 1, ")
        assert texts[3].startswith("<Statistics: ")
        assert texts[4].startswith("<Contract: 6 rows, DistributedDataParallel(Linear), 2")
        assert texts[5].startswith("<Checkpointer: newest save at step 3, ")


def test_statistics_print_a_line_for_each_operation() -> None:
    def rank(t: Transport) -> str:
        before = t.statistics()
        t.all_reduce(torch.ones(4)).wait()
        t.barrier().wait()
        return str(t.statistics() - before)

    first, *lines = run_ranks(2, rank)[0].splitlines()
    assert first.startswith("2 calls, 16 B, waited ")
    assert lines == ["  all_reduce: 1 call, 16 B", "  barrier: 1 call, 0 B"]
