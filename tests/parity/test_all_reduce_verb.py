"""sl.all_reduce_: over ranks as threads, over shared memory and over Gloo."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from torch import nn

import syncline as sl
from syncline import CollectiveMismatch, ContractMismatch
from syncline.session import transport_of
from syncline.transport import C10dTransport, Transport, run_ranks


def reduces_trees(t: Transport) -> None:
    ranks = range(t.size)
    tree = {
        "large": torch.full((300_000,), float(t.rank)),
        "small": [torch.tensor([t.rank + 1.0], dtype=torch.float64), torch.full((3, 2), float(t.rank)).t()],
        "empty": torch.zeros(0),
    }
    same = sl.all_reduce_(tree, "mean", group=t)
    assert same is tree
    assert tree["large"].unique().tolist() == [sum(ranks) / t.size]
    assert tree["small"][0].item() == sum(rank + 1 for rank in ranks) / t.size
    assert tree["small"][1].unique().tolist() == [sum(ranks) / t.size]
    counts = torch.tensor([t.rank, 5])
    work = sl.all_reduce_([counts], "max", group=t, async_op=True)
    work.wait()
    work.wait()
    assert work.is_completed()
    assert counts.tolist() == [t.size - 1, 5]
    single = torch.full((4,), t.rank + 1.0)
    assert sl.all_reduce_(single, "product", group=t) is single
    assert single[0].item() == torch.arange(1.0, t.size + 1).prod().item()
    pending = torch.tensor([1 + 2j])
    pending = pending.conj() if t.rank % 2 else pending  # the memory holds what it is conjugated from
    sl.all_reduce_(pending, "sum", group=t)
    num_odd = t.size // 2
    assert pending.item() == complex(t.size, 2 * (t.size - 2 * num_odd))
    module = nn.Linear(3, 2)
    nn.init.constant_(module.weight, float(t.rank))
    sl.all_reduce_(module, "mean", group=t)
    assert module.weight.requires_grad
    assert module.weight.unique().tolist() == [sum(ranks) / t.size]
    sl.all_reduce_(module, group=t)  # torch's default: the sum
    assert module.weight.unique().tolist() == [sum(ranks)]


def writing_is_seen_by_autograd(t: Transport) -> None:
    for target, asynchronous in itertools.product((lambda x: x, lambda x: [x]), (False, True)):
        x = torch.ones(3)
        weight = torch.ones(3, requires_grad=True)
        y = (x * weight).sum()
        if asynchronous:
            sl.all_reduce_(target(x), "sum", group=t, async_op=True).wait()
        else:
            sl.all_reduce_(target(x), "sum", group=t)
        if t.size > 1:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.backward()


def refuses_on_every_rank(t: Transport) -> None:
    with pytest.raises(ValueError, match=r"op='mean' is not defined for b, which has dtype torch\.int64"):
        sl.all_reduce_({"a": torch.ones(1), "b": torch.ones(1).long()}, "mean", group=t)
    with pytest.raises(ValueError, match="one of sum, mean, max, min, product; got 'avg'"):
        sl.all_reduce_(torch.ones(1), "avg", group=t)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="expected the target to be a Module"):
        sl.all_reduce_([1.0], group=t)
    if t.size > 1:
        with pytest.raises(ContractMismatch):
            sl.all_reduce_([torch.ones(2 + t.rank)], group=t)


def all_of_it(t: Transport) -> None:
    reduces_trees(t)
    writing_is_seen_by_autograd(t)
    refuses_on_every_rank(t)


def test_threads() -> None:
    for size in (1, 2, 3):
        run_ranks(size, all_of_it, timeout_seconds=30)


@pytest.mark.ranks(2)
def test_shared_memory_and_gloo() -> None:
    t = transport_of(None)
    assert t.name == "shared memory"
    all_of_it(t)
    all_of_it(C10dTransport(timeout_seconds=30))


@pytest.mark.ranks(2)
def test_different_verbs_are_an_error_with_every_ranks_line_of_code() -> None:
    t = transport_of(None)
    with pytest.raises(CollectiveMismatch) as caught:
        if t.rank == 0:
            sl.barrier()
        else:
            sl.all_reduce_(torch.ones(2))
    line = r"at test_all_reduce_verb\.py:\d+ in test_different_verbs"
    text = str(caught.value)
    assert re.search(rf"rank 0: sl\.barrier, before the first step, {line}", text), text
    assert re.search(rf"rank 1: sl\.all_reduce_, before the first step, {line}", text), text
