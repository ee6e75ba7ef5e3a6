"""Faults of `support/faulty.py` happen where they were planned, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from support.faulty import Fault, FaultyTransport
from syncline import PeerFailed, PeerLost, SynclineError
from syncline.transport import ThreadGroup, Transport, run_ranks


def alone(*faults: Fault) -> FaultyTransport:
    return FaultyTransport(ThreadGroup(1).transport(0), faults)


def test_the_rank_gets_the_planned_error_and_its_peers_a_named_one() -> None:
    def program(t: Transport) -> Exception:
        faulty = FaultyTransport(t, [Fault(rank=1, operation="all_reduce", call=1)])
        faulty.all_reduce(torch.zeros(1)).wait()
        faulty.barrier().wait()
        with pytest.raises(SynclineError) as caught:
            faulty.all_reduce(torch.zeros(1)).wait()
        with pytest.raises(SynclineError):
            faulty.barrier()
        return caught.value

    peer, own = run_ranks(2, program)
    assert (type(peer), type(own)) == (PeerFailed, PeerLost)
    assert str(own) == "a fault planned for call 1 of all_reduce on rank 1"
    assert f"rank 1 aborted the group: PeerLost: {own}" in str(peer)


def test_a_call_is_counted_within_its_step_where_a_step_is_given() -> None:
    t = alone(Fault(rank=0, operation="barrier", call=1, step=0, error=KeyError("mine")))
    for step in (None, None, 0, 1, 1):
        t.board.step = step
        t.barrier()
    t.board.step = 0
    with pytest.raises(KeyError, match="mine"):
        t.barrier()


def test_a_lane_has_the_same_faults_and_counts_its_calls_with_the_others() -> None:
    def program(t: Transport) -> None:
        faulty = FaultyTransport(t, [Fault(rank=0, operation="barrier", call=2)])
        lane = faulty.lane("gradients")
        faulty.barrier().wait()
        lane.barrier().wait()
        with pytest.raises(PeerLost if t.rank == 0 else PeerFailed):
            lane.barrier().wait()

    run_ranks(2, program)
