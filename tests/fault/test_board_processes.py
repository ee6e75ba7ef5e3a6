"""Over Gloo in processes: ranks that wait for each other, that are late, and that have left."""

from __future__ import annotations

import re
import time

import pytest
import torch
import torch.distributed as dist

import syncline as sl
from meeting import tell, texts_of_all_ranks, wait_for
from syncline import CollectiveMismatch, CollectiveTimeout, UnevenInputs
from syncline.liveness import StepPhase
from syncline.session import transport_of
from syncline.transport import C10dTransport


@pytest.mark.ranks(2)
def test_ranks_that_wait_on_different_lanes_are_told_who_is_where() -> None:
    t = transport_of(None)
    lane = t.lane("gradients")
    t.board.step, t.board.phase = 3, StepPhase.BACKWARD if t.rank else StepPhase.AFTER_BACKWARD
    t.timeout_seconds = lane.timeout_seconds = 3000.0  # who waits so long hangs
    with pytest.raises(CollectiveMismatch) as caught:
        if t.rank == 0:
            sl.mean(1.0)
        else:
            lane.all_reduce(torch.zeros(1000)).wait()
    texts = texts_of_all_ranks(str(caught.value))
    assert texts[0] == texts[1]
    lines = texts[0].splitlines()
    assert lines[0] == "the ranks wait for each other in different calls, and none of them can ever continue:"
    assert lines[1].startswith("  rank 0: step 3, after backward, waiting in sl.mean (call 2 ")
    assert "on the main lane), at test_board_processes.py:" in lines[1]
    assert lines[2].startswith(
        "  rank 1: step 3, backward, waiting in all_reduce(sum) of 1000 elements, torch.float32"
    )
    assert "on the gradients lane), at test_board_processes.py:" in lines[2]
    with pytest.raises(CollectiveMismatch):
        t.barrier()


@pytest.mark.ranks(3)
def test_a_third_rank_that_waits_for_those_who_are_stuck_is_told_as_well() -> None:
    t = C10dTransport()
    lane = t.lane("gradients")
    with pytest.raises(CollectiveMismatch, match="rank 2: before the first step, waiting in all_reduce"):
        (t.barrier() if t.rank == 0 else lane.all_reduce(torch.zeros(2))).wait()


@pytest.mark.ranks(2)
@pytest.mark.real
def test_a_slow_rank_on_another_lane_is_waited_for() -> None:
    t = C10dTransport()
    lane = t.lane("gradients")
    for _ in range(2):
        work = lane.all_reduce(torch.zeros(2))
        if t.rank == 1:
            deadline = time.monotonic() + 1.6  # three times as long as it takes to look
            while time.monotonic() < deadline:
                pass
        t.barrier().wait()
        work.wait()


@pytest.mark.ranks(2)
def test_lanes_that_are_waited_for_in_different_orders_are_no_deadlock() -> None:
    t = C10dTransport()
    lane = t.lane("gradients")
    wait_for_both = [t.barrier(), lane.barrier()]
    if t.rank == 1:
        wait_for_both.reverse()
    for work in wait_for_both:
        work.wait()


@pytest.mark.ranks(2)
def test_a_timeout_names_the_absent_rank_its_step_its_phase_and_its_line() -> None:
    t = C10dTransport(timeout_seconds=1.5)
    if t.rank == 1:
        t.board.step, t.board.phase = 12, StepPhase.FORWARD
        wait_for("rank 0 gave up")
        with pytest.raises(CollectiveTimeout, match="rank 0 aborted the group"):
            for _ in range(2):  # rank 0 came to the first one, which may be completed by that
                t.barrier().wait()
        return
    while (place := t.health.places().get(1)) is None or "in wait_for" not in (place.code or ""):
        time.sleep(0.01)
    with pytest.raises(CollectiveTimeout) as caught:
        t.barrier().wait()
    tell("rank 0 gave up")
    first, call, _, about_rank_1, *_ = str(caught.value).splitlines()
    line = r"meeting\.py:\d+ in wait_for"
    assert re.fullmatch(rf"rank 1 did not reach barrier within 1\.5 s; last seen at {line}", first)
    assert re.fullmatch(
        r"barrier \(call 1 on the main lane\) failed after \d+\.\d s on rank 0 of 2 over gloo", call
    )
    where = rf"step 12, forward, at {line}"
    assert re.fullmatch(rf"  rank 1: at its last report, \d+\.\d s ago: {where}", about_rank_1)


@pytest.mark.ranks(2)
def test_who_waits_for_a_rank_that_has_left_in_good_order_is_told_so() -> None:
    t = C10dTransport()
    t.barrier().wait()
    if t.rank == 1:
        t.board.step, t.board.phase = 7, StepPhase.AFTER_BACKWARD
        t.leave()
        wait_for("told")  # its connections stay open meanwhile
        return
    with pytest.raises(UnevenInputs) as caught:
        t.barrier().wait()
    tell("told")
    text = str(caught.value)
    assert "rank 1 has shut down normally and will not make this call" in text
    assert "rank 1: step 7, after backward, has shut down normally" in text
    for remedy in ("DistributedSampler", "drop_last=True", "ddp.join()"):
        assert remedy in text


@pytest.mark.ranks(2)
@pytest.mark.parametrize("over", ["gloo", "shared memory"])
def test_a_rank_that_has_freed_its_wrapper_when_it_leaves_is_not_waited_for(over: str) -> None:
    """As one whose training is a function that has returned: its process may live on, and save something, say."""
    t = C10dTransport() if over == "gloo" else transport_of(None)
    ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1), process_group=t)
    for _ in range(2):
        ddp(torch.ones(1, 2)).sum().backward()
    if t.rank == 1:
        del ddp
        t.leave()
        wait_for("told")
        return
    with pytest.raises(UnevenInputs, match="rank 1 has shut down normally"):
        ddp(torch.ones(1, 2)).sum().backward()
    tell("told")


@pytest.mark.ranks(2)
def test_who_calls_something_that_another_rank_has_left_out_is_told_so() -> None:
    t = C10dTransport()
    t.barrier().wait()
    t.board.step, t.board.phase = 7, StepPhase.AFTER_BACKWARD
    if t.rank == 1:
        t.leave()
        wait_for("told")
        return
    with pytest.raises(UnevenInputs, match="rank 1 has shut down normally") as caught:
        sl.check_replicas(torch.ones(1), group=t)
    tell("told")
    assert "all ranks must call sl.check_replicas equally often" in str(caught.value)
    assert "batches" not in str(caught.value)


@pytest.mark.ranks(2)
def test_a_rank_that_leaves_after_its_last_call_harms_nobody() -> None:
    t = C10dTransport()
    work = t.barrier()
    if t.rank == 1:
        work.wait()
        t.leave()
        tell("left")
    else:
        wait_for("left")
        work.wait()


@pytest.mark.ranks(2)
def test_a_connection_that_closes_after_its_rank_has_left_is_uneven_inputs() -> None:
    t = C10dTransport()
    t.barrier().wait()
    if t.rank == 1:
        t.leave()
        dist.destroy_process_group()
        return
    with pytest.raises(UnevenInputs, match="rank 1 has shut down normally"):
        t.all_reduce(torch.zeros(10)).wait()
