"""Expanded tensors, of which several elements use the same memory. Other ranks' values cannot be written into them.

Only a rank that receives would notice, so all ranks check before anything is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import syncline as sl
from support.cases import case
from support.threads import on_threads
from syncline import DistributedDataParallel as DDP
from syncline.transport import Transport, run_ranks


def net_with(buffer: torch.Tensor) -> nn.Module:
    net = nn.Linear(1, 2)
    net.register_buffer("pe", buffer)
    return net


def expanded() -> torch.Tensor:
    return torch.ones(1, 2).expand(3, 2)


def error_of_each(program: Callable[[Transport], object]) -> Exception:
    """The error that two ranks raise alike. They stay in step."""

    def rank(t: Transport) -> Exception:
        with pytest.raises((RuntimeError, ValueError)) as caught:
            program(t)
        t.barrier().wait()
        return caught.value

    error, other = run_ranks(2, rank)
    assert (type(error), str(error)) == (type(other), str(other))
    return error


def test_an_expanded_buffer_or_parameter_is_the_same_error_on_every_rank() -> None:
    """It is a RuntimeError, as with torch's class."""

    def wraps(t: Transport, on_ranks: tuple[int, ...]) -> None:
        DDP(net_with(expanded() if t.rank in on_ranks else torch.ones(3, 2)), process_group=t)

    def wraps_a_parameter(t: Transport) -> None:
        net = nn.Linear(1, 2)
        net.weight = nn.Parameter(torch.ones(1, 1).expand(2, 1))
        DDP(net, process_group=t)

    def replaces(t: Transport) -> None:
        ddp = DDP(net_with(torch.ones(3, 2)), process_group=t)
        ddp(torch.ones(1, 1)).sum().backward()
        ddp.module.pe = expanded()
        ddp(torch.ones(1, 1))

    for on_ranks in ((0, 1), (0,), (1,)):
        error = error_of_each(partial(wraps, on_ranks=on_ranks))
        with case(on_ranks):
            assert isinstance(error, RuntimeError)
            assert "of pe use the same memory" in str(error)
            assert "Register pe.clone()" in str(error)
    assert "weight.clone()" in str(error_of_each(wraps_a_parameter))
    error = error_of_each(replaces)
    assert isinstance(error, RuntimeError)
    assert "pass pe.clone()" in str(error)


@on_threads(1, 2)
def test_what_is_never_written_may_be_expanded(t: Transport) -> None:
    if t.size == 1:
        DDP(net_with(expanded()), process_group=t)
        return
    for kwargs in ({"ignore": ["pe"]}, {"buffers": "none", "init_sync": False, "replica_check": None}):
        DDP(net_with(expanded()), process_group=t, **kwargs)(torch.ones(1, 1)).sum().backward()


def test_verbs_refuse_it_on_every_rank() -> None:
    verbs: dict[str, Callable[[Any, Transport], object]] = {
        "broadcast_": lambda net, t: sl.broadcast_(net, group=t),
        "average_": lambda net, t: sl.average_(net, group=t),
        "all_reduce_": lambda net, t: sl.all_reduce_([net.pe], group=t),
        "keep_best_": lambda net, t: sl.keep_best_(net, t.rank, group=t),
    }

    def program(t: Transport, name: str, on_rank: int) -> None:
        verbs[name](net_with(expanded() if t.rank == on_rank else torch.ones(3, 2)), t)

    for name, on_rank in product(verbs, (0, 1)):
        with case(name, on_rank):
            assert ".clone()" in str(error_of_each(partial(program, name=name, on_rank=on_rank)))
