"""Joining, adopting, leaving."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from syncline.errors import SynclineError
from syncline.transport.threads import ThreadGroup
from syncline.world import init, shutdown, transport_of, world


@pytest.fixture(autouse=True)
def _no_world_left() -> Iterator[None]:
    shutdown()
    yield
    shutdown()


def test_alone_needs_no_process_group() -> None:
    found = init()
    assert (found.rank, found.size, found.local_rank, found.local_size) == (0, 1, 0, 1)
    assert found.device.type in ("cpu", "cuda")
    assert not dist.is_initialized()
    assert transport_of().size == 1
    assert transport_of() is transport_of()


def test_a_second_init_returns_the_same_world_and_other_arguments_are_refused() -> None:
    first = init(timeout=30)
    assert init(timeout=30) is first
    assert world() is first
    with pytest.raises(SynclineError, match="use the same arguments, or call shutdown"):
        init(timeout=60)


def test_after_shutdown_init_is_new() -> None:
    init(timeout=30)
    shutdown()
    shutdown()
    init(timeout=60)


@pytest.mark.parametrize("timeout", [0, -1.0, float("inf"), timedelta(0)])
def test_a_timeout_that_is_not_positive_and_finite_is_refused(timeout: float) -> None:
    with pytest.raises(ValueError, match="finite timeout above 0"):
        init(timeout=timeout)


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(ValueError, match="one of auto, c10d, shm; got 'carrier pigeon'"):
        init("carrier pigeon")


@pytest.mark.ranks(2)
def test_the_excepthook_is_restored() -> None:
    before = sys.excepthook
    init()
    shutdown()
    assert sys.excepthook is before


def test_several_ranks_that_nobody_joined_are_an_error_not_a_silent_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    for call in (world, transport_of):
        with pytest.raises(SynclineError, match=r"rank 1 of 2 .* call sl\.init\(\) first"):
            call()


def test_a_transport_is_its_own() -> None:
    transport = ThreadGroup(1).transport(0)
    assert transport_of(transport) is transport


@pytest.mark.ranks(2)
def test_a_group_that_somebody_else_made_is_adopted_and_left_alone() -> None:
    found = init()
    assert (found.rank, found.size) == (dist.get_rank(), 2)
    assert transport_of().name == "shared memory"
    shutdown()
    assert dist.is_initialized()
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x == 2


@pytest.mark.ranks(2)
def test_each_group_has_one_transport_and_ranks_of_its_own() -> None:
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    assert (transport_of(alone).rank, transport_of(alone).size) == (0, 1)
    assert transport_of(alone) is transport_of(alone)
    assert transport_of(dist.group.WORLD) is transport_of()


@pytest.mark.ranks(2)
def test_a_transport_does_not_outlive_its_default_group() -> None:
    first = transport_of()
    rank, size = first.rank, first.size
    store = dist.group.WORLD.get_group_store()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=size)
    second = transport_of()
    assert second is not first
    second.barrier().wait()
