"""Ranks as threads: exact arithmetic, and an error with everybody's calls on every rank."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from support.cases import case
from support.states import wait_until
from syncline import CollectiveMismatch, CollectiveTimeout, PeerFailed, SynclineError, UnevenInputs
from syncline.liveness import StepPhase
from syncline.transport import ThreadGroup, ThreadsTransport, Transport, Work, run_ranks, threads


def errors_of(size: int, program: Any, timeout_seconds: float = 20.0) -> list[SynclineError]:
    """What each rank's program raises."""

    def catch(t: ThreadsTransport) -> SynclineError:
        with pytest.raises(SynclineError) as caught:
            program(t)
        return caught.value

    return run_ranks(size, catch, timeout_seconds=timeout_seconds)


# ---------------------------------------------------------------------- arithmetic


def test_reductions_run_in_rank_order() -> None:
    # In fp32, (1e8 + -1e8) + 1 is 1, and any order that begins elsewhere gives 0.
    def program(t: Transport) -> float:
        x = torch.tensor([[1e8, -1e8, 1.0][t.rank]])
        t.all_reduce(x).wait()
        return x.item()

    assert run_ranks(3, program) == [1.0, 1.0, 1.0]


def test_halves_are_added_up_in_fp32_and_rounded_once() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        # 1 + 16 times a quarter of the last place: rounding after each addition would lose every one of them.
        quarter = torch.finfo(dtype).eps / 4

        def program(t: Transport, dtype: torch.dtype = dtype, quarter: float = quarter) -> float:
            x = torch.tensor([1.0 if t.rank == 0 else quarter], dtype=dtype)
            t.all_reduce(x).wait()
            return x.item()

        assert run_ranks(17, program) == [1.0 + 16 * quarter] * 17, dtype


def test_the_result_is_written_by_wait_and_the_input_is_read_by_the_start() -> None:
    started = threading.Barrier(2)

    def program(t: Transport) -> tuple[float, float, float]:
        mine = torch.tensor([1.0 + t.rank])
        copy = torch.tensor([1.0 + t.rank])
        work, copied = t.all_reduce(mine), t.broadcast(copy, 0)
        before = mine.item()
        if t.rank == 0:
            copy.zero_()  # rank 1 must still receive what rank 0 had when it started
        started.wait(10)
        work.wait()
        copied.wait()
        return before, mine.item(), copy.item()

    assert run_ranks(2, program) == [(1.0, 3.0, 0.0), (2.0, 3.0, 1.0)]


# ---------------------------------------------------------------------- ranks that do different things


def test_a_different_operation_is_named_on_all_ranks() -> None:
    def program(t: Transport) -> None:
        t.barrier().wait()
        (t.broadcast(torch.zeros(3), 0) if t.rank == 1 else t.all_reduce(torch.zeros(3))).wait()
        t.barrier().wait()

    for error in errors_of(2, program):
        assert type(error) is CollectiveMismatch
        assert "rank 0: all_reduce(sum) of 3 elements, torch.float32" in str(error)
        assert "rank 1: broadcast(from rank 0) of 3 elements, torch.float32" in str(error)
        assert "collective number 1 of this group of 2" in str(error)


DIFFERENT: dict[str, Callable[[Transport], Work]] = {
    "numel": lambda t: t.all_reduce(torch.zeros(3 + t.rank)),
    "dtype": lambda t: t.all_reduce(torch.zeros(3, dtype=torch.float64 if t.rank else torch.float32)),
    "operation": lambda t: t.all_reduce(torch.zeros(3), "max" if t.rank else "sum"),
    "source": lambda t: t.broadcast(torch.zeros(3), t.rank),
    "message": lambda t: t.recv(torch.zeros(4), 0) if t.rank else t.send(torch.zeros(3), 1),
}


def test_different_arguments_are_a_mismatch_on_all_ranks_and_end_the_group() -> None:
    def program(t: Transport, call: Callable[[Transport], Work]) -> None:
        with pytest.raises(CollectiveMismatch):
            call(t).wait()
        t.barrier()

    for name, call in DIFFERENT.items():
        with case(name):
            errors = errors_of(2, lambda t, call=call: program(t, call))
            assert [type(error) for error in errors] == [CollectiveMismatch] * 2


def test_ranks_that_wait_on_different_lanes_are_told_at_once_who_is_where() -> None:
    def program(t: Transport) -> None:
        lane = t.lane("gradients")
        t.board.step, t.board.phase = 4 + t.rank, StepPhase.BACKWARD
        (t.barrier() if t.rank == 0 else lane.all_reduce(torch.zeros(3))).wait()

    for error in errors_of(2, program):
        assert type(error) is CollectiveMismatch
        assert "rank 0: step 4, backward, waiting in barrier (call 2 on the main lane)" in str(error)
        assert "rank 1: step 5, backward, waiting in all_reduce(sum) of 3 elements" in str(error)


def test_a_lane_is_closed_without_a_lock_for_a_garbage_collector_may_hold_it() -> None:
    def program(t: ThreadsTransport) -> None:
        lane = t.lane("gradients")
        with t._matcher._lock:
            lane.close()

    run_ranks(2, program)


# ---------------------------------------------------------------------- ranks that do not come


def test_a_timeout_names_the_absent_ranks_on_all_ranks() -> None:
    given_up, ready = threading.Event(), threading.Event()

    def program(t: Transport) -> None:
        if t.rank == 1:
            t.board.step, t.board.phase = 7, StepPhase.FORWARD
            ready.set()
            given_up.wait(10)
        ready.wait(10)
        try:
            t.all_reduce(torch.zeros(4)).wait(0.05)
        finally:
            given_up.set()

    for error in errors_of(3, program):
        assert type(error) is CollectiveTimeout
        assert "rank 1: has not called yet" in str(error)
        assert "rank 1: step 7, forward" in str(error)
        first = "rank 1 did not reach all_reduce(sum) within 0.05 s; last seen: step 7, forward"
        assert str(error).splitlines()[0] == first


def test_a_rank_that_has_returned_is_lost_at_once_and_in_its_parts_too() -> None:
    def program(t: Transport) -> str:
        part = t.split(0)
        assert part is not None
        if t.rank == 2:
            return "early"
        words = "needs rank 2, which makes no more calls, because its function has returned"
        for transport in (t, part):
            with pytest.raises(UnevenInputs, match=words):
                transport.barrier().wait()
        return "late"

    assert run_ranks(3, program, timeout_seconds=20) == ["late", "late", "early"]


def test_a_closed_transport_is_lost_for_its_peers() -> None:
    def program(t: Transport) -> None:
        if t.rank == 0:
            t.close()
            t.close()
        t.barrier().wait()

    own, peer = errors_of(2, program)
    assert "it had already closed its transport" in str(own)
    assert type(peer) is UnevenInputs


# ---------------------------------------------------------------------- ranks that fail


def test_an_exception_reaches_the_peers_with_its_traceback_and_the_caller_as_it_is() -> None:
    seen: list[PeerFailed] = []

    def this_goes_wrong() -> None:
        raise KeyError("a key of rank 1")

    def program(t: Transport) -> None:
        if t.rank == 1:
            this_goes_wrong()
        try:
            t.all_reduce(torch.zeros(1)).wait()
        except PeerFailed as error:
            seen.append(error)
            raise

    with pytest.raises(KeyError, match="a key of rank 1") as caught:
        run_ranks(3, program)
    assert caught.value.__notes__ == ["raised on rank 1 of 3"]
    assert len(seen) == 2
    for error in seen:
        assert str(error) == "rank 1 failed: KeyError: 'a key of rank 1'"
        assert "in this_goes_wrong" in error.__notes__[0]


def test_an_abort_ends_waits_and_later_calls_in_the_group_and_in_its_parts() -> None:
    waiting = threading.Barrier(3)

    def program(t: Transport) -> None:
        part = t.split(0)
        assert part is not None
        nested = part.split(0)
        assert nested is not None
        if t.rank == 2:
            waiting.wait(10)
            t.abort("the disk is full")
        else:
            work = nested.barrier()
            waiting.wait(10)
            with pytest.raises(PeerFailed, match="rank 2 aborted the group: the disk is full"):
                work.wait()
        t.barrier()

    errors = errors_of(3, program)
    assert [type(error) for error in errors] == [PeerFailed, PeerFailed, SynclineError]
    assert "rank 2 aborted the group: the disk is full" in str(errors[0])
    assert "aborted on rank 2: the disk is full" in str(errors[2])


def test_a_result_that_cannot_be_computed_is_an_error_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(parts: list[torch.Tensor], op: str) -> torch.Tensor:
        raise MemoryError("too large")

    monkeypatch.setattr(threads, "_reduced", no_memory)

    def program(t: Transport) -> str:
        try:
            t.all_reduce(torch.zeros(2)).wait()
        except (MemoryError, PeerFailed) as error:
            return f"{type(error).__name__}: {error}"
        return "no error"

    first, second = sorted(run_ranks(2, program))
    assert first == "MemoryError: too large"
    assert second.startswith(
        "PeerFailed: collective number 0 could not be computed: MemoryError('too large')"
    )


def test_sizes_and_ranks_are_checked() -> None:
    with pytest.raises(ValueError, match="at least 1 rank, got 0"):
        ThreadGroup(0)
    with pytest.raises(ValueError, match="a rank from 0 to 1; got 2"):
        ThreadGroup(2).transport(2)
    with pytest.raises(ValueError, match="finite timeout"):
        ThreadGroup(2, timeout_seconds=0.0)


def test_a_thread_that_waits_elsewhere_holds_no_rank_up() -> None:
    def program(transport: ThreadsTransport) -> None:
        lane = transport.lane("saves")
        transport.barrier().wait()
        saving = threading.Thread(target=lambda: lane.barrier().wait())
        if transport.rank == 0:
            # It waits for rank 1's thread, which comes later, and rank 1 for us, who come now.
            saving.start()
            wait_until(lambda: len(transport._matcher._common.waiting) >= 2)
            transport.barrier().wait()
        else:
            transport.barrier().wait()
            saving.start()
        saving.join()

    run_ranks(2, program)


def test_the_backward_of_a_rank_runs_in_its_own_thread_on_all_devices() -> None:
    assert torch.autograd.is_multithreading_enabled()
    assert run_ranks(2, lambda t: torch.autograd.is_multithreading_enabled()) == [False, False]
    assert torch.autograd.is_multithreading_enabled()
