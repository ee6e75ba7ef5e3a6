"""What verbs do with arguments that differ or make no sense: the same on every engine, which can be used afterwards."""

from __future__ import annotations

import faulthandler
import gc
import os
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engines import can_still_be_used, on_every_engine

import syncline as sl
from support.cases import case
from syncline import CollectiveMismatch, ContractMismatch, SynclineError
from syncline.transport import C10dTransport, ThreadGroup, Transport, run_ranks
from syncline.transport.shared_memory import SharedMemoryTransport

# ---------------------------------------------------------------------- what differs, and what makes no sense


def what_differs_is_shown_and_nothing_is_written(t: Transport) -> None:
    six = torch.arange(6.0)
    cases: list[tuple[torch.Tensor, str, str]] = [
        (six.reshape((2, 3) if t.rank else (3, 2)).clone(), "sum", r"(3, 2)"),
        (six.reshape((1, 6) if t.rank else (6,)).clone(), "sum", r"(1, 6)"),
        (torch.ones(70_000 if t.rank else 3), "sum", r"(70000,)"),
        (torch.ones(3, dtype=torch.float64 if t.rank else torch.float32), "sum", "torch.float64"),
        (torch.ones(3), "max" if t.rank else "min", "operation"),
        (torch.ones(3) if t.rank else torch.ones(4, 3).t()[:, :2], "sum", r"(3, 2)"),
    ]
    for tensor, op, words in cases:
        before = tensor.clone()
        for async_op in (False, True):
            with pytest.raises(ContractMismatch) as caught:
                result = sl.all_reduce_(tensor, op, group=t, async_op=async_op)  # type: ignore[call-overload]
                result.wait()
            assert words in str(caught.value)
            assert len(set(t.all_gather_bytes(str(caught.value).encode()))) == 1
        assert torch.equal(tensor, before)
        can_still_be_used(t)


def what_one_rank_cannot_do_all_are_told_of(t: Transport) -> None:
    good = torch.ones(3)
    cases: list[tuple[Any, str, type[Exception]]] = [
        (torch.ones(3, dtype=torch.int64), "mean", ValueError),
        (torch.ones(3, dtype=torch.bool), "sum", ValueError),
        (torch.ones(3).to(torch.float8_e4m3fn), "sum", ValueError),
        (torch.ones(3), "median", ValueError),
        (torch.ones(1).expand(3), "sum", ValueError),
        (torch.ones(3, device="meta"), "sum", ValueError),
        ("a tensor", "sum", TypeError),
        (None, "sum", TypeError),
    ]
    for bad, op, error in cases:
        is_bad = t.rank == 1
        with pytest.raises(error) as caught:
            sl.all_reduce_(bad if is_bad else good, op if is_bad else "sum", group=t)  # type: ignore[type-var, arg-type]
        assert "rank 1: " in str(caught.value)
        can_still_be_used(t)
    assert good.tolist() == [1, 1, 1]


def how_a_tensor_lies_in_memory_is_its_ranks_affair(t: Transport) -> None:
    for async_op in (False, True):
        mine = torch.ones(2, 3)
        if t.rank == 0:
            mine = torch.ones(3, 2).t()
        elif t.rank == 1:
            mine = torch.nn.Parameter(mine, requires_grad=False)
        work: Any = sl.all_reduce_(mine, "sum", group=t, async_op=async_op)
        if async_op:
            work.wait()
            work.wait()
            assert work.is_completed()
        assert mine.tolist() == [[t.size] * 3] * 2


def ranks_in_different_verbs_are_told_so(t: Transport) -> None:
    line = r".* at test_collectives\.py:\d+ in ranks_in_different"
    with pytest.raises(
        CollectiveMismatch, match=rf"rank 0: sl\.barrier{line}.*\n.*rank 1: sl\.all_reduce_{line}"
    ):
        sl.barrier(group=t) if t.rank == 0 else sl.all_reduce_(torch.ones(2), group=t)
    can_still_be_used(t)


# ---------------------------------------------------------------------- NaN


def a_nan_is_the_maximum_and_the_minimum(t: Transport) -> None:
    inf, nan = float("inf"), float("nan")
    mine = [[nan, 1.0, -2.0, -inf, inf], [1.0, nan, 3.0, nan, nan], [2.0, 5.0, -3.0, 0.0, 7.0]][t.rank]
    expected = {"max": [nan, nan, 3.0, nan, nan, -0.5, 0.0], "min": [nan, nan, -3.0, nan, nan, -2.5, -1.0]}
    mine += [-0.5 - t.rank, -0.5 * t.rank]
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        for op, result in expected.items():
            here = torch.tensor(mine, dtype=dtype)
            torch.testing.assert_close(
                sl.all_reduce_(here, op, group=t),  # type: ignore[call-overload]
                torch.tensor(result, dtype=dtype),
                equal_nan=True,
                rtol=0,
                atol=0,
            )
            part = torch.zeros(7, dtype=dtype)
            t.reduce_scatter(part, torch.tensor(mine * t.size, dtype=dtype), op).wait()  # type: ignore[arg-type]
            assert torch.equal(part.nan_to_num(99), here.nan_to_num(99))


def what_was_made_in_inference_mode_is_reduced(t: Transport) -> None:
    with torch.inference_mode():
        made = torch.full((3, 2), float(t.rank))
    mean = (t.size - 1) / 2
    for op, expected in {"mean": mean, "sum": t.size * mean}.items():
        sl.all_reduce_(made, op, group=t)  # type: ignore[call-overload]
        assert made.unique().tolist() == [expected]
    can_still_be_used(t)


PROGRAMS = (
    what_was_made_in_inference_mode_is_reduced,
    what_differs_is_shown_and_nothing_is_written,
    what_one_rank_cannot_do_all_are_told_of,
    how_a_tensor_lies_in_memory_is_its_ranks_affair,
    ranks_in_different_verbs_are_told_so,
    a_nan_is_the_maximum_and_the_minimum,
)


@pytest.mark.ranks(3)
def test_processes() -> None:
    on_every_engine(*PROGRAMS)


def test_threads() -> None:
    for program in PROGRAMS:
        with case(program.__name__):
            run_ranks(3, program)


# ---------------------------------------------------------------------- forks, and groups that were destroyed


def in_a_fork(check: Callable[[], None]) -> int:
    """How a fork of this process ends that runs `check`."""
    gc.collect()  # groups of Gloo that wait for the garbage collection have threads, which a fork has not
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of any fork beside threads
        pid = os.fork()
    if pid == 0:
        code = 1
        gc.disable()
        faulthandler.dump_traceback_later(30, exit=True)
        try:
            check()
            code = 0
        except BaseException as error:
            print(repr(error), flush=True)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def a_fork_is_refused_and_its_parent_goes_on(t: Transport) -> None:
    lane = t.lane("a test")

    def is_refused() -> None:
        for call in (lambda: sl.mean(1.0, group=t), lambda: t.all_reduce(torch.ones(1)), lane.barrier):
            with pytest.raises(SynclineError, match="this process was forked from a rank"):
                call()

    assert in_a_fork(is_refused) == 0
    can_still_be_used(t)
    lane.close()


@pytest.mark.real
@pytest.mark.ranks(3)
def test_forks() -> None:
    def is_refused() -> None:
        for call in (lambda: sl.mean(1.0), lambda: C10dTransport()):
            with pytest.raises(SynclineError, match="this process was forked from a rank"):
                call()

    assert in_a_fork(is_refused) == 0  # of which nothing was used yet
    on_every_engine(a_fork_is_refused_and_its_parent_goes_on)


@pytest.mark.real
@pytest.mark.ranks(2)
def test_a_fork_frees_no_group_that_its_parent_has_destroyed() -> None:
    """The end of a Gloo group waits for threads, which a fork has not."""
    group = dist.new_group()
    assert sl.mean(1.0, group=group) == 1.0
    dist.destroy_process_group(group)
    del group

    def is_refused() -> None:
        with pytest.raises(SynclineError, match="this process was forked from a rank"):
            sl.mean(1.0)

    assert in_a_fork(is_refused) == 0
    assert sl.mean(1.0) == 1.0


@pytest.mark.real
def test_a_fork_of_ranks_that_are_threads() -> None:
    group, room = ThreadGroup(2), threading.Barrier(2)

    def program(t: Transport) -> None:
        room.wait()
        if t.rank == 0:
            a_fork_is_refused(t)
        t.barrier().wait()

    def a_fork_is_refused(t: Transport) -> None:
        def is_refused() -> None:
            with pytest.raises(SynclineError, match="this process was forked from a rank"):
                t.barrier()

        with group._matcher._lock:  # as a thread may that does not exist in the fork
            assert in_a_fork(is_refused) == 0

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(program, group.transport(rank)) for rank in range(2)]:
            done.result()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_what_used_a_group_that_was_destroyed_says_so(transport: Any) -> None:
    part = dist.new_group()
    whole = C10dTransport()
    others = [SharedMemoryTransport.over(C10dTransport(part)), C10dTransport(part)]
    used = others[transport == "c10d"]
    ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1), process_group=part)
    ddp(torch.ones(1, 2)).sum().backward()
    assert sl.mean(1.0, group=used) == sl.mean(1.0, group=part) == sl.mean(1.0) == 1.0
    whole.barrier().wait()
    dist.destroy_process_group(part)
    for call in (
        lambda: sl.mean(1.0, group=used),
        lambda: sl.all_reduce_(torch.ones(1), group=used),
        lambda: sl.mean(1.0, group=part),
        lambda: ddp(torch.ones(1, 2)).sum().backward(),
    ):
        with pytest.raises((SynclineError, ValueError), match="process group was destroyed"):
            call()
    whole.barrier().wait()
    dist.destroy_process_group()
    with pytest.raises(SynclineError, match="the program destroyed the default process group"):
        sl.mean(1.0)


# ---------------------------------------------------------------------- threads


def in_two_threads(program: Callable[[int], None], order: tuple[int, int]) -> list[Exception]:
    """Run a program in two threads that are made in one order, and begin in one that may differ from rank to rank."""
    begun, errors = threading.Event(), []

    def run(nth: int) -> None:
        if nth == order[1]:
            begun.wait()
        else:
            begun.set()
        try:
            program(nth)
        except SynclineError as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(nth,)) for nth in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def two_threads_never_get_each_others_values(t: Transport) -> None:
    big = 70_000

    def program(nth: int) -> None:
        for _ in range(5):
            assert sl.mean(float(nth * 10 + t.rank), group=t) == nth * 10 + 1
            assert sl.all_reduce_(torch.full((2,), float(nth)), "sum", group=t).tolist() == [nth * t.size] * 2
            tree = {"a": torch.full((big,), float(nth)), "b": torch.tensor([t.rank])}
            sl.broadcast_(tree, src=1, group=t)
            assert tree["a"].unique().tolist() == [nth]
            assert tree["b"].item() == 1

    for order in [(0, 1), (1, 0)[:: 1 if t.rank else -1]]:
        for error in in_two_threads(program, order):
            assert isinstance(error, ContractMismatch | CollectiveMismatch), error
        t.barrier().wait()
        can_still_be_used(t)


def threads_that_cross_are_refused_by_name(t: Transport) -> None:
    """On rank 0 the first thread comes first, on the others the second, and nobody else calls."""
    is_over = threading.Event()

    def program(nth: int) -> None:
        if nth == (t.rank > 0):
            try:
                sl.mean(float(nth), group=t)
            finally:
                is_over.set()
        is_over.wait()

    (error,) = in_two_threads(program, (0, 1))
    assert isinstance(error, ContractMismatch)
    assert "thread" in str(error)
    assert "torch.distributed.new_group" in str(error)
    can_still_be_used(t)


def one_thread_after_the_other_may_call(t: Transport) -> None:
    results = []
    for _ in range(3):
        thread = threading.Thread(target=lambda: results.append(sl.mean(float(t.rank), group=t)))
        thread.start()
        thread.join()
        results.append(sl.mean(float(t.rank), group=t))
    with ThreadPoolExecutor(1) as pool:
        results += [pool.submit(sl.mean, float(t.rank), group=t).result() for _ in range(3)]
    assert results == [(t.size - 1) / 2] * 9


@pytest.mark.ranks(3)
def test_two_threads_of_a_rank() -> None:
    on_every_engine(
        one_thread_after_the_other_may_call,
        threads_that_cross_are_refused_by_name,
        two_threads_never_get_each_others_values,
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("transport", ["shm", "c10d"])
def test_a_thread_may_call_a_verb_while_another_trains(transport: Any) -> None:
    """On rank 0 amid each backward, on rank 1 after it."""
    world = sl.init(transport=transport, timeout=60)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    ddp = sl.DistributedDataParallel(model, bucket_cap_mb=0.0001)
    turns = [threading.Event() for _ in range(10)]
    heard = []

    def log() -> None:
        for number, turn in enumerate(turns):
            turn.wait()
            heard.append(sl.mean(float(number + world.rank)))

    amid = model[2].weight.register_hook(lambda gradient: turns[step].set()) if world.rank == 0 else None
    logger = threading.Thread(target=log)
    logger.start()
    for step in range(10):
        ddp.zero_grad()
        ddp(torch.full((1, 8), float(world.rank))).sum().backward()
        turns[step].set()
        mine = model[0].weight.grad.clone()  # type: ignore[union-attr, operator]
        if step == 0:
            first = mine
        assert torch.equal(mine, first)
    logger.join()
    assert heard == [number + 0.5 for number in range(10)]
    if amid is not None:
        amid.remove()
