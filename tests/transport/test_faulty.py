"""Faults happen where they were planned, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from support.cases import case
from syncline import CollectiveTimeout, PeerFailed, PeerLost, SynclineError
from syncline.transport import Fault, FaultyTransport, ThreadGroup, ThreadsTransport, Transport, run_ranks


def alone(*faults: Fault) -> FaultyTransport:
    return FaultyTransport(ThreadGroup(1).transport(0), faults)


ERRORS: list[tuple[Any, type[Exception]]] = [
    ("lost", PeerLost),
    ("timeout", CollectiveTimeout),
    ("raise", RuntimeError),
    (KeyError("mine"), KeyError),
]


def test_the_rank_gets_the_planned_error_and_its_peers_a_named_one() -> None:
    def program(t: ThreadsTransport, error: Any) -> Exception:
        faulty = FaultyTransport(t, [Fault(rank=1, operation="all_reduce", call=1, error=error)])
        faulty.all_reduce(torch.zeros(1)).wait()
        faulty.barrier().wait()
        with pytest.raises(Exception) as caught:  # noqa: PT011  # the kinds are compared below
            faulty.all_reduce(torch.zeros(1)).wait()
        with pytest.raises(SynclineError):
            faulty.barrier()
        return caught.value

    for error, expected in ERRORS:
        with case(error):
            peer, own = run_ranks(2, lambda t, error=error: program(t, error))
            assert type(own) is expected
            if not isinstance(error, Exception):
                assert str(own) == "a fault planned for call 1 of all_reduce on rank 1"
            assert type(peer) is PeerFailed
            assert f"rank 1 aborted the group: {expected.__name__}: " in str(peer)


def test_a_call_is_counted_within_its_step_where_a_step_is_given() -> None:
    t = alone(Fault(rank=0, operation="barrier", call=1, step=0))
    t.barrier()
    t.barrier()  # call 1, but before any step
    t.board.step = 0
    t.barrier()
    t.board.step = 1
    t.barrier()
    t.barrier()
    t.board.step = 0
    t.barrier()
    with pytest.raises(PeerLost, match="call 1 of barrier in step 0 on rank 0"):
        t.barrier()


CALLS: dict[str, Callable[[Transport], object]] = {
    "all_reduce": lambda t: t.all_reduce(torch.zeros(1)),
    "reduce_scatter": lambda t: t.reduce_scatter(torch.zeros(1), torch.zeros(1)),
    "all_gather": lambda t: t.all_gather(torch.zeros(1), torch.zeros(1)),
    "broadcast": lambda t: t.broadcast(torch.zeros(1)),
    "barrier": lambda t: t.barrier(),
    "split": lambda t: t.split(0),
}


def test_every_operation_can_fail() -> None:
    for operation in CALLS:
        with case(operation):
            t = alone(Fault(rank=0, operation=operation))
            for name, call in CALLS.items():
                if name != operation:
                    call(t)
            with pytest.raises(PeerLost):
                CALLS[operation](t)


def test_messages_can_fail() -> None:
    def program(t: ThreadsTransport, fault: Fault) -> str:
        faulty = FaultyTransport(t, [fault])
        with pytest.raises((PeerLost, PeerFailed)) as caught:
            (faulty.send(torch.zeros(1), 1) if t.rank == 0 else faulty.recv(torch.zeros(1), 0)).wait()
        return type(caught.value).__name__

    for rank, operation in enumerate(("send", "recv")):
        fault = Fault(rank=rank, operation=operation)
        assert run_ranks(2, lambda t, fault=fault: program(t, fault))[rank] == "PeerLost", operation


def test_a_fault_of_another_rank_is_not_ours() -> None:
    alone(Fault(rank=1, operation="barrier")).barrier()


def test_a_fault_that_cannot_happen_is_refused() -> None:
    with pytest.raises(ValueError, match=r"operation to be one of all_reduce, .*; got 'allreduce'"):
        Fault(rank=0, operation="allreduce")
    with pytest.raises(
        ValueError, match="error to be one of lost, timeout, raise, or an exception object; got 'gone'"
    ):
        Fault(rank=0, operation="barrier", error="gone")  # type: ignore[arg-type]


def test_a_lane_has_the_same_faults_and_counts_its_calls_with_the_others() -> None:
    def program(t: ThreadsTransport) -> None:
        faulty = FaultyTransport(t, [Fault(rank=0, operation="barrier", call=2)])
        lane = faulty.lane("gradients")
        faulty.barrier().wait()
        lane.barrier().wait()
        if t.rank == 0:
            with pytest.raises(PeerLost, match="call 2 of barrier"):
                lane.barrier()
        else:
            with pytest.raises(PeerFailed):
                lane.barrier().wait()

    run_ranks(2, program)
