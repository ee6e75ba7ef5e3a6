"""Contracts, timelines and tables have at most 100 columns, whatever the module and the options are called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import syncline as sl
from syncline.contract import table
from syncline.transport import Transport, run_ranks
from syncline.words import MAX_COLUMNS, wrapped

CHAIN = sl.compression.After(
    1000,
    sl.compression.Chain(
        sl.compression.PowerSGD(16, seed=123456789), sl.compression.Quantize(4, block_numel=64)
    ),
)

MODULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chain": {"compression": CHAIN},
    "diloco": {"strategy": sl.DiLoCo(500, fragments=2, compression=sl.compression.Quantize(4))},
    "local": {"strategy": sl.LocalSGD(1, warmup=3)},
    "sharded": {"sharded": True, "on_nonfinite": "skip"},
    "checked": {"replica_check": sl.ReplicaCheck(every=100), "on_nonfinite": "zero"},
    "unused": {"find_unused_parameters": True, "gradient_as_bucket_view": True, "buffers": "average"},
}

LONG = "a_layer_whose_name_is_" + "very_" * 20 + "long"


def net(name: str) -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    for nth in range(6):
        module.add_module(f"{name}{nth}", nn.Linear(2, 2))
    return module


def assert_fits(text: str) -> None:
    for line in text.splitlines():
        assert len(line) <= MAX_COLUMNS, line


@pytest.mark.parametrize("options", MODULES.values(), ids=MODULES)
@pytest.mark.parametrize("name", ["layer", LONG], ids=["short names", "long names"])
def test_all_that_a_wrapper_prints_has_at_most_100_columns(options: dict[str, Any], name: str) -> None:
    def rank(t: Transport) -> list[str]:
        ddp = sl.DistributedDataParallel(net(name), process_group=t, bucket_cap_mb=60 / 2**20, **options)
        optimizer = ddp.attach(torch.optim.AdamW(ddp.parameters()))
        found = [str(ddp.contract), ddp.explain()]
        for _ in range(3):
            ddp(torch.randn(3, 2)).sum().backward()
            if "sharded" not in options and "strategy" not in options:
                ddp.report(**{f"{name}_{nth}": 1.0 for nth in range(12)})
            optimizer.step()
            optimizer.zero_grad()
            found += [str(ddp.contract), ddp.explain(), str(ddp.last_step), str(ddp.statistics())]
        words = ddp.contract.long().split()
        shown = set(str(ddp.contract).split())
        missing = [word for word in words if word not in shown and len(word) < 20]
        assert not missing, "what the long form shows, the short form shows, too"
        return found

    for text in run_ranks(2, rank)[0]:
        assert_fits(text)


cells = st.text(st.sampled_from("ab ,;"), max_size=150).map(str.strip)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6).flatmap(lambda width: st.lists(st.tuples(*[cells] * width), min_size=1, max_size=5)))
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
