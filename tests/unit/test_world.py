"""Joining, adopting, leaving."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import syncline as sl
from syncline import ContractMismatch, SynclineError, init, shutdown
from syncline.session import transport_of
from syncline.session.session import Session
from syncline.session.world import world
from syncline.transport import ThreadGroup


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


def test_a_second_init_returns_the_same_world_and_other_arguments_are_refused_until_shutdown() -> None:
    first = init(timeout=30)
    assert init(timeout=30) is first
    assert world() is first
    with pytest.raises(SynclineError, match=r"pass the same arguments, or call sl\.shutdown"):
        init(timeout=60)
    shutdown()
    shutdown()
    init(timeout=60)


def test_arguments_that_make_no_sense_are_refused_by_name() -> None:
    nonsense: dict[str, list[Any]] = {
        "transport": ["carrier pigeon", "SHM", None, 3, True],
        "timeout": [
            *(0, -1.0, 1e300, float("inf"), float("nan"), timedelta(0), timedelta.max, None, "60", True)
        ],
        "device": ["meta", "nonsense", "cpu:x", 99, -1, True, 1.5, torch.device("meta")],
    }
    for name, values in nonsense.items():
        for value in values:
            with pytest.raises((TypeError, ValueError), match=f"^expected {name} to be .*, got ") as caught:
                init(**{name: value})
            assert repr(value) in str(caught.value)
    with pytest.raises(ValueError, match="got 'c10': did you mean 'c10d'"):
        init("c10")


# ---------------------------------------------------------------------- the ranks compare what init was given

GIVEN: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *(
        ({"transport": mine}, {"transport": other})
        for mine in ("shm", "c10d", "auto")
        for other in ("shm", "c10d", "auto")
    ),
    ({"timeout": 30}, {"timeout": 60}),
    ({"timeout": 30}, {"timeout": timedelta(seconds=30)}),
]
"""What rank 0 is given and what rank 1 is."""


def assert_compared(when_joined: Callable[[], None], when_refused: Callable[[], None]) -> None:
    """Different arguments are one ContractMismatch in init; equal ones choose the transport there."""
    rank, texts = int(os.environ["RANK"]), []
    for given in GIVEN:
        is_same = given[0] == given[1] or given == GIVEN[-1]
        try:
            init(**given[rank])
        except ContractMismatch as error:
            assert not is_same
            texts.append(str(error))
            when_refused()
        else:
            assert is_same, given
            assert transport_of(None) is not None
            when_joined()
            shutdown()
    if not dist.is_initialized():
        init()
    everyone = transport_of(None).all_gather_bytes("\n\n".join(texts).encode())
    assert everyone[0] == everyone[1]
    assert len(texts) == 7
    assert texts[0].startswith(
        "sl.init: the ranks do not agree. The expected values are those of rank 0.\nrank 1 against"
    )
    assert "  transport\n    expected 'shm' (rank 0)\n    got      'c10d' (rank 1)" in texts[0]
    assert "  timeout\n    expected 30 s (rank 0)\n    got      60 s (rank 1)" in texts[-1]


@pytest.mark.ranks(2)
def test_different_arguments_are_refused_before_any_group_exists() -> None:
    dist.destroy_process_group()

    def nothing_is_left() -> None:
        assert not dist.is_initialized()

    assert_compared(lambda: sl.barrier(), nothing_is_left)


@pytest.mark.ranks(2)
def test_different_arguments_are_refused_over_a_group_of_somebody_else() -> None:
    def it_still_works() -> None:
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor == 2

    assert_compared(it_still_works, it_still_works)


@pytest.mark.ranks(2)
def test_an_argument_that_makes_no_sense_on_one_rank_is_an_error_on_both() -> None:
    """Wherever the ranks meet; and they can try again."""
    rank = dist.get_rank()
    for _ in range(2):
        for given, kind, words in (
            ({"transport": "shmm"}, ValueError, "transport .* did you mean 'shm'"),
            ({"timeout": None}, TypeError, "timeout .*, got None"),
            ({"device": "meta"}, ValueError, "device .*'meta'"),
        ):
            with pytest.raises(kind, match=rf"sl\.init: refused, .*\nrank 1: expected {words}"):
                init(**(given if rank == 1 else {}))
        init()
        assert sl.mean(float(rank)) == 0.5
        shutdown()
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.ranks(2)
def test_a_transport_that_is_in_use_is_not_changed() -> None:
    sl.barrier()
    with pytest.raises(SynclineError, match=r"already selected shared memory.* sl\.init\('c10d'\) before"):
        init("c10d")
    assert init().size == 2


@pytest.mark.ranks(2)
def test_the_excepthook_is_replaced_by_init_only_and_restored() -> None:
    before = sys.excepthook
    sl.barrier()
    assert sys.excepthook is before
    init()
    assert sys.excepthook is not before
    shutdown()
    assert sys.excepthook is before


def test_several_ranks_that_nobody_joined_or_that_have_left_are_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    init()
    shutdown()
    launched = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    fresh = Session()
    for call in (fresh.world, lambda: fresh.transport_of(None)):
        with pytest.raises(
            SynclineError, match=r"rank 1 of 2 .* has not joined .* Call sl\.init\(\) or torch"
        ):
            call()
    for call in (world, transport_of):
        with pytest.raises(SynclineError, match=r"rank 1 of 2 .* left the other ranks by sl\.shutdown\(\)"):
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


def test_an_argument_that_all_ranks_refuse_is_printed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused_by_all(session: Session, fault: Exception) -> None:
        raise ValueError(f"ranks 0, 1: {fault}")

    monkeypatch.setattr(Session, "_refuse", refused_by_all)
    with pytest.raises(ValueError, match=r"^ranks 0, 1: expected transport") as caught:
        init("smh")
    assert caught.value.__context__ is None


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
