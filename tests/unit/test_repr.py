"""What users print of records, contracts and options: at most 100 columns, and short, however large the module."""

from __future__ import annotations

import dataclasses
import pprint
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import syncline as sl
from syncline.contract import table
from syncline.records import LateRank, RankTimes, StepTiming
from syncline.transport import Transport, run_ranks
from syncline.words import MAX_COLUMNS, wrapped


def assert_fits(text: str) -> None:
    for line in text.splitlines():
        assert len(line) <= MAX_COLUMNS, line


# ---------------------------------------------------------------------- a backward in words


def bucket(index: int = 0, num_parameters: int = 2, **changes: Any) -> sl.BucketRecord:
    record = sl.BucketRecord(
        index=index,
        payload_bytes=1000,
        parameters=tuple(f"layers.{index}.p{nth}" for nth in range(num_parameters)),
        trigger=f"layers.{index}.p{num_parameters - 1}",
        launched_seconds=0.001 * index,
        waited_seconds=0.002,
    )
    return dataclasses.replace(record, **changes)


def backward(num_layers: int, *, num_parameters: int = 2, **changes: Any) -> sl.BackwardRecord:
    """As of a module of layers with a bucket for each."""
    record = sl.BackwardRecord(
        step=3,
        synchronized=True,
        num_gradients=num_layers * num_parameters,
        unused=(),
        divisor=2,
        counted_items=False,
        reduced_afterwards=False,
        num_reduced=5000,
        buckets=tuple(bucket(index, num_parameters) for index in range(num_layers)),
        duration_seconds=0.25,
    )
    return dataclasses.replace(record, **changes)


def test_of_a_small_module_everything_is_there() -> None:
    assert str(backward(2)).splitlines() == [
        "step 3: 4 gradients, mean over 2 ranks, 5,000 elements in 2 buckets, 250.0 ms",
        "  bucket 0, 1.00 kB, 2 parameters: sent when layers.0.p1 was ready, at 0.0 ms, waited 2.0 ms",
        "  bucket 1, 1.00 kB, 2 parameters: sent when layers.1.p1 was ready, at 1.0 ms, waited 2.0 ms",
    ]
    assert "and " not in str(backward(7)), "seven buckets are shown rather than six and one more"
    assert "and 2 more buckets" in str(backward(8))


def test_of_a_large_module_the_rest_is_counted_and_kept() -> None:
    names = tuple(f"layers.{index}.p0" for index in range(200))
    found = dict.fromkeys(range(64), names)
    nonfinite = sl.NonFiniteRecord(found=found, in_mean=names, outcome="discarded", num_steps=1)
    record = backward(200, num_parameters=5, unused=names, nonfinite=nonfinite)
    lines = str(record).splitlines()
    assert len(lines) <= 16
    assert_fits(str(record))
    assert lines[1].startswith("  bucket 0, 1.00 kB, 5 parameters: sent when layers.0.p4 was ready")
    assert lines[7] == "  and 194 more buckets, 194 kB, waited 388.0 ms in all"
    rest = " ".join(line.strip() for line in lines[8:])
    unused = (
        "no gradient on this rank: layers.0.p0, layers.1.p0, layers.2.p0, ..., layers.199.p0 (200 parameters)"
    )
    assert rest.startswith(f"{unused} not finite on rank 0: layers.0.p0, ")
    for words in ("; on rank 1: ", "; and on 62 more ranks; in the mean of finite gradients: "):
        assert words in rest
    assert rest.endswith(" -> discarded (1 step so far)")
    in_full = pprint.pformat(dataclasses.asdict(record))
    assert all(f"'layers.{index}.p3'" in in_full for index in range(200))
    assert len(in_full.splitlines()) > 1000


def test_what_became_of_a_backward() -> None:
    last = bucket(payload_bytes=8, parameters=("a",), trigger=None, waited_seconds=0.0)
    assert "1 parameter: sent at the end of backward, at 0.0 ms" in str(backward(1, buckets=(last,)))
    assert "mean over 7 items, " in str(backward(1, divisor=7, counted_items=True))
    alone = backward(0, num_gradients=2, synchronized=False)
    assert str(alone) == "step 3: 2 gradients, not reduced: .grad holds the gradients of this rank"
    later = dataclasses.replace(alone, reduced_afterwards=True)
    assert str(later) == "step 3: 2 gradients, reduced after this backward: mean over 2 ranks"
    nobody = sl.NonFiniteRecord(found={}, in_mean=(), outcome="finite", num_steps=0)
    assert str(nobody) == "all gradients are finite (not finite in 0 steps so far)"


# ---------------------------------------------------------------------- reprs

LONG = tuple(f"encoder.layers.{index}.self_attention.query_key_value.weight" for index in range(50))


def times(data: float) -> RankTimes:
    parts = {"data_seconds": data, "forward_seconds": data / 3, "backward_seconds": 2 / 3}
    return RankTimes(update_seconds=0.001, **parts)


QUANTIZED = sl.compression.Quantize(4, block_numel=64)

SHORT: dict[str, Any] = {
    "<BucketRecord: 0, 423 kB, 50 parameters, waited 2.3 ms>": bucket(
        payload_bytes=423_000, parameters=LONG, trigger=LONG[-1], waited_seconds=0.0023456789
    ),
    "<NonFiniteRecord: not finite on ranks 0, 3, discarded, 2 steps so far>": sl.NonFiniteRecord(
        found={0: LONG, 3: LONG}, in_mean=LONG, outcome="discarded", num_steps=2
    ),
    "<RankTimes: update 1.0 ms, data 100.0 ms, forward 33.3 ms, backward 666.7 ms>": times(0.1),
    "<StepTiming: step 500.0 ms, waited 33.3 ms, rank 0 was late>": StepTiming(
        step_seconds=0.5, waited_seconds=0.1 / 3, of_ranks=(times(0.1), times(0.2 / 3))
    ),
    "<LateRank: rank 3 by 13.7 ms: data took 5.9 ms, 2.0 ms on the others>": LateRank(
        3, 0.0412 / 3, "data", 0.041 / 7, 0.002
    ),
    "<BufferRecord: 6 tensors, 400 B, not sent: under no_sync>": sl.BufferRecord(
        num_tensors=6, payload_bytes=400, sent=False, reason="under no_sync"
    ),
    "<EvolutionRecord: step 7, mean 0.333333, best 0.142857, 500 members, 0 not finite>": sl.EvolutionRecord(
        step=7, losses=(1 / 3,) * 500, mean_loss=1 / 3, best_loss=1 / 7, num_nonfinite=0
    ),
    "<Row: buffers, never, ->": sl.Row(what="buffers", size="-", when="never", how="-", drift_allowed="-"),
    "Chain(PowerSGD(rank=2, seed=123456), Quantize(bits=4, block_numel=64))": sl.compression.Chain(
        sl.compression.PowerSGD(2, seed=123456), QUANTIZED
    ),
    "DiLoCo(every=500, compression=Quantize(bits=4))": sl.DiLoCo(500, compression=sl.compression.Quantize(4)),
    "<DistributedSampler: 4 of 10 samples, rank 1 of 3, epoch 0>": sl.DistributedSampler(range(10), 3, 1),
    "<TrainState: step 0, model>": sl.TrainState(model=nn.Linear(1, 1)),
}


def test_a_repr_says_what_matters() -> None:
    assert [repr(value) for value in SHORT.values()] == [*SHORT]


def test_a_repr_is_one_line_and_marks_what_it_leaves_out() -> None:
    for name in ("a" * 300, "long name " * 40, "two\nlines"):
        took = {"payload_bytes": 1, "waited_seconds": 1, "duration_seconds": 1}
        for value in (
            dataclasses.replace(sl.world(), host=name),
            sl.Contract(title=name, rows=()),
            sl.Row(what=name, size=name, when=name, how=name, drift_allowed=name),
            sl.BufferRecord(num_tensors=1, payload_bytes=1, sent=False, reason=name),
            sl.RoundRecord(step=1, what=(name,) * 9, num_calls=1, **took),
        ):
            text = repr(value)
            assert len(text) <= 100
            assert "\n" not in text
            assert ("..." in text) == (len(name) > 90 or isinstance(value, sl.RoundRecord)), text


def test_the_parts_of_a_run_have_short_reprs(tmp_path: Path) -> None:
    def rank(t: Transport) -> list[str]:
        ddp = sl.DistributedDataParallel(nn.Linear(2, 1), process_group=t, strategy=sl.LocalSGD(1))
        optimizer = ddp.attach(torch.optim.SGD(ddp.parameters()))
        ddp(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        before = t.statistics()
        t.all_reduce(torch.ones(4)).wait()
        t.barrier().wait()
        first, *lines = str(t.statistics() - before).splitlines()
        assert first.startswith("2 calls, 16 B, waited ")
        assert lines == ["  all_reduce: 1 call, 16 B", "  barrier: 1 call, 0 B"]
        with sl.Checkpointer(tmp_path, group=t) as checkpointer:
            checkpointer.save(sl.TrainState(model=ddp), 3)
            found = [t, ddp.last_step, ddp.last_round, ddp.statistics(), ddp.contract, checkpointer]
            return [*map(repr, found), repr(sl.check_replicas(torch.ones(3), group=t))]

    torch.manual_seed(0)
    for rank_number, texts in enumerate(run_ranks(2, rank)):
        assert all(len(text) <= 100 and "\n" not in text for text in texts)
        for text, beginning in zip(
            texts,
            (
                f"<ThreadsTransport: threads, rank {rank_number} of 2>",
                "<BackwardRecord: step 1: 2 gradients, not reduced",
                "<RoundRecord: after step 1, ",
                "<Statistics: ",
                "<Contract: 6 rows, DistributedDataParallel(Linear), 2",
                "<Checkpointer: newest save at step 3, ",
            ),
            strict=False,
        ):
            assert text.startswith(beginning)


# ---------------------------------------------------------------------- contracts and tables

MODULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chain": {
        "compression": sl.compression.After(
            1000, sl.compression.Chain(sl.compression.PowerSGD(16, seed=123456789), QUANTIZED)
        )
    },
    "diloco": {"strategy": sl.DiLoCo(500, fragments=2, compression=sl.compression.Quantize(4))},
    "local": {"strategy": sl.LocalSGD(1, warmup=3)},
    "sharded": {"sharded": True, "on_nonfinite": "skip"},
    "checked": {"replica_check": sl.ReplicaCheck(every=100), "on_nonfinite": "zero"},
    "unused": {"find_unused_parameters": True, "gradient_as_bucket_view": True, "buffers": "average"},
}


@pytest.mark.parametrize("options", MODULES.values(), ids=MODULES)
def test_all_that_a_wrapper_prints_has_at_most_100_columns(options: dict[str, Any]) -> None:
    def rank(t: Transport, name: str) -> list[str]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        for nth in range(6):
            module.add_module(f"{name}{nth}", nn.Linear(2, 2))
        ddp = sl.DistributedDataParallel(module, process_group=t, bucket_cap_mb=60 / 2**20, **options)
        optimizer = ddp.attach(torch.optim.AdamW(ddp.parameters()))
        found = [str(ddp.contract), ddp.explain()]
        for _ in range(3):
            ddp(torch.randn(3, 2)).sum().backward()
            if "sharded" not in options and "strategy" not in options:
                ddp.report(**{f"{name}_{nth}": 1.0 for nth in range(12)})
            optimizer.step()
            optimizer.zero_grad()
            found += [str(ddp.contract), ddp.explain(), str(ddp.last_step), str(ddp.statistics())]
        shown = set(str(ddp.contract).split())
        missing = [word for word in ddp.contract.long().split() if word not in shown and len(word) < 20]
        assert not missing, "what the long form shows, the short form shows, too"
        return found

    for name in ("layer", "a_layer_whose_name_is_" + "very_" * 20 + "long"):
        for text in run_ranks(2, lambda t, name=name: rank(t, name))[0]:
            assert_fits(text)


CELLS = st.text(st.sampled_from("ab ,;"), max_size=150).map(str.strip)


@given(st.integers(1, 6).flatmap(lambda width: st.lists(st.tuples(*[CELLS] * width), min_size=1, max_size=5)))
def test_a_table_fits_and_leaves_nothing_out(rows: list[tuple[str, ...]]) -> None:
    text = table(rows, MAX_COLUMNS)
    assert_fits(text)
    assert sorted("".join(text.split())) == sorted("".join("".join(row).replace(" ", "") for row in rows))


def test_a_table_divides_no_word_and_gets_few_lines() -> None:
    rows = [
        ("what", "size", "how"),
        ("the loss", "none yet: call(optimizer)", "every rank applies it"),
        ("b", "-", "-"),
    ]
    assert table(rows, 45).splitlines() == [
        "what      size             how",
        "the loss  none yet:        every rank applies",
        "          call(optimizer)  it",
        "b         -                -",
    ]


@given(st.text(st.sampled_from("abc -"), max_size=300), st.integers(20, 100))
def test_a_wrapped_line_fits_and_leaves_nothing_out(text: str, columns: int) -> None:
    text = text[:10] + "x" + text[10:]
    if len(text) - len(text.lstrip()) > 10:
        return
    lines = wrapped(text, columns)
    assert all(len(line) <= columns for line in lines)
    assert "".join("".join(lines).split()) == "".join(text.split())
