"""Over Gloo in processes: what happens when ranks are late, fail, or are killed."""

from __future__ import annotations

import gc
import re
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meeting import end_by_sigkill, group_store, meet_at_the_store, texts_of_all_ranks
from support.cases import case
from support.inside import without_wait_for_causes
from syncline import CollectiveMismatch, CollectiveTimeout, PeerFailed, PeerLost, SynclineError
from syncline.liveness import (
    Board,
    FailedWait,
    Failure,
    Health,
    Lane,
    Notices,
    Place,
    StepPhase,
    StoreConnection,
    StoreMedium,
)
from syncline.transport import C10dTransport, C10dWork, c10d


def met() -> C10dTransport:
    """A transport over which all ranks have met."""
    t = C10dTransport()
    t.barrier().wait()
    meet_at_the_store()
    return t


@pytest.mark.ranks(3, killed=[2])
def test_survivors_of_a_killed_rank_raise_peer_lost_long_before_the_deadline() -> None:
    t = met()
    if t.rank == 2:
        end_by_sigkill()
    with pytest.raises(PeerLost) as caught:
        t.all_reduce(torch.zeros(100)).wait()
    text = str(caught.value)
    assert "all_reduce(sum) of 100 elements, torch.float32" in text
    assert "Look at the log of the rank that ended first" in text
    error = caught.value
    # The closed connection, if that was noticed before the end of the process.
    if error.__context__ is not None:
        assert error.__suppress_context__, "a user sees one traceback"
        assert isinstance(error.__context__, RuntimeError)
        assert error.__context__.__context__ is None
    assert "rank 2: its process has ended" in text
    with pytest.raises(PeerLost):
        t.barrier()


@pytest.mark.ranks(3, killed=[2])
def test_of_ranks_whose_connections_close_one_after_the_other_the_first_is_named() -> None:
    t = met()
    if t.rank == 2:
        end_by_sigkill()
    # Rank 0 waits for rank 1 alone, whose connection closes when it has met the end of rank 2.
    with pytest.raises(PeerLost, match="rank 2: its process has ended"):
        t.recv(torch.zeros(5), t.rank + 1).wait()
    dist.destroy_process_group()


@pytest.mark.ranks(3, killed=[2])
def test_a_lost_rank_is_noticed_in_a_wait_for_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a look at the processes, long before `LongWait` looks at the places."""
    t = met()
    t.health.notices.processes_here()
    meet_at_the_store("processes are known")
    if t.rank == 2:
        end_by_sigkill()
    monkeypatch.setattr(Health, "ended_ranks", lambda health: [])
    if t.rank == 0:
        with pytest.raises(PeerLost, match="rank 2: its process has ended"):
            t.recv(torch.zeros(5), 1).wait()


@pytest.mark.ranks(3, killed=[2])
def test_a_lost_rank_is_named_without_the_store() -> None:
    t = met()
    assert len(t.health.notices.processes_here()) == 2
    meet_at_the_store("processes are known")
    if t.rank == 2:
        end_by_sigkill()
    none: Any = {}.get
    t.health.notices.use(SimpleNamespace(write=none, write_first=none, read=none, read_all=lambda _: {}))
    with pytest.raises(PeerLost, match="rank 2: its process has ended"):
        t.all_reduce(torch.zeros(100)).wait()


@pytest.mark.ranks(2, killed=[1])
def test_a_message_from_a_killed_rank_is_a_lost_peer() -> None:
    t = met()
    if t.rank == 1:
        end_by_sigkill()
    with pytest.raises(PeerLost, match=r"recv\(from rank 1\) of 5 elements"):
        t.recv(torch.zeros(5), 1).wait()


def others_are_seen(t: C10dTransport) -> bool:
    """Whether rank 1 has published its step and its line, and rank 2 that it waits."""
    places = t.health.places()
    second, third = places.get(1, Place()), places.get(2, Place())
    return second.step == 3 and second.code is not None and third.wait is not None


@pytest.mark.ranks(3)
def test_a_timeout_names_who_is_absent_and_where_everybody_was_seen() -> None:
    t = C10dTransport(timeout_seconds=3000)
    store = group_store()
    if t.rank == 1:
        t.board.step, t.board.phase = 3, StepPhase.FORWARD
        store.wait(["rank 0 gave up"])
        with pytest.raises(SynclineError):
            t.barrier().wait()
        return
    t.board.step, t.board.phase, t.board.bucket = 3, StepPhase.BACKWARD, 0
    while t.rank == 0 and not others_are_seen(t):
        time.sleep(0.01)
    with pytest.raises(CollectiveTimeout) as caught:
        # Rank 2 would wait for longer, so that it is still waiting when rank 0 gives up and tells it.
        t.all_reduce(torch.zeros(4), "max").wait(1.5 if t.rank == 0 else 2000)
    if t.rank == 0:
        store.set("rank 0 gave up", "")
    first, *lines = str(caught.value).splitlines()
    call = re.escape("all_reduce(max) of 4 elements, torch.float32 (call 1 on the main lane)")
    absent = r"rank 1 did not reach backward of step 3 within \d+(\.\d)? s; last seen at test_gloo.py:\d+ in "
    assert re.search(absent, first)
    assert re.fullmatch(rf"{call} failed after \d+\.\d s on rank 0 of 3 over gloo", lines.pop(0))
    report = r"at its last report, \d+\.\d s ago: "
    assert re.fullmatch(rf"  rank 1: {report}step 3, forward, at test_gloo.py:\d+ in .*", lines[1])
    for rank in (0, 2):
        age = "" if rank == 0 else f"(?:{report})?"  # rank 2 shows its own words, or those of rank 0
        place = f"step 3, backward, bucket 0, waiting in {call}, at test_gloo.py:"
        assert re.match(f"  rank {rank}: {age}{place}", lines[rank])


@pytest.mark.ranks(2)
def test_different_calls_of_one_number_are_a_mismatch_long_before_the_deadline() -> None:
    t = C10dTransport(timeout_seconds=3000)
    work = t.all_reduce(torch.zeros(4)) if t.rank == 0 else t.barrier()
    with pytest.raises(CollectiveMismatch) as caught:
        work.wait()
    texts = texts_of_all_ranks(str(caught.value))
    assert texts[0] == texts[1]
    lines = texts[0].splitlines()
    assert lines[0] == "the ranks made different calls:"
    assert "rank 0: before the first step, waiting in all_reduce(sum) of 4 elements" in lines[1]
    assert "rank 1: before the first step, waiting in barrier (call 1 on the main lane)" in lines[2]


@pytest.mark.ranks(2)
def test_a_wait_ends_at_its_own_deadline_or_at_that_of_the_transport() -> None:
    for of_transport, of_wait, told in (
        (3000, 0.0, "0"),
        (3000, 0.0001, "0"),
        (3000, 0.2501, "0.25"),
        (0.5, None, "0.5"),
    ):
        t = C10dTransport(dist.new_group(), timeout_seconds=of_transport)
        if t.rank == 0:
            with case(of_transport, of_wait):
                with pytest.raises(CollectiveTimeout, match=f"within {told} s") as caught:
                    t.all_reduce(torch.zeros(1)).wait(of_wait)
                took = re.search(r"failed after ([\d.]+) s", str(caught.value))
                assert took is not None
                assert float(took[1]) > float(told) - 0.1


@pytest.mark.ranks(2)
def test_who_gives_up_may_leave_at_once() -> None:
    store = group_store()
    if dist.get_rank() == 1:
        store.wait(["rank 0 has left"])  # its connections stay open so long
        return

    def give_up() -> None:
        with pytest.raises(CollectiveTimeout):
            C10dTransport().all_reduce(torch.zeros(1)).wait(0.1)

    give_up()
    dist.destroy_process_group()
    gc.collect()  # Gloo waits for what is under way when the last reference to the group goes
    store.set("rank 0 has left", "")


@pytest.mark.ranks(3)
def test_an_abort_reaches_waiting_ranks_with_its_reason() -> None:
    t = C10dTransport(timeout_seconds=3000)
    t.barrier().wait()
    if t.rank == 1:
        t.abort("ValueError: the loss is gone")
        with pytest.raises(SynclineError, match="aborted on rank 1: ValueError: the loss is gone"):
            t.barrier()
        return
    with pytest.raises(PeerFailed, match="rank 1 aborted the group: ValueError: the loss is gone"):
        t.all_reduce(torch.zeros(3)).wait()
    with pytest.raises(PeerFailed):
        t.all_reduce(torch.zeros(3))


@pytest.mark.ranks(2)
def test_an_abort_ends_what_is_only_polled_and_what_another_thread_waits_for() -> None:
    """As the messages of sl.ParameterServer are polled."""
    t = C10dTransport()
    if t.rank == 0:
        polled, waited_for = t.recv(torch.zeros(3), 1), t.recv(torch.zeros(3), 1)
        errors: list[SynclineError] = []

        def wait() -> None:
            started.set()
            try:
                waited_for.wait()
            except SynclineError as error:
                errors.append(error)

        started, thread = threading.Event(), threading.Thread(target=wait)
        thread.start()
        started.wait()
        assert not polled.is_completed()
        t.abort("it is enough")
        assert polled.is_completed()
        with pytest.raises(SynclineError, match="it is enough"):
            polled.wait()
        thread.join()
        assert "it is enough" in str(errors[0])
    meet_at_the_store()


@pytest.mark.ranks(2, killed=[1])
def test_the_reason_of_a_peer_is_told_rather_than_its_lost_connection() -> None:
    t = met()
    if t.rank == 1:
        t.abort("KeyError: 7")
        group_store().set("told", "")
        end_by_sigkill()
    group_store().wait(["told"])
    with pytest.raises(PeerFailed, match="KeyError: 7"):
        t.all_reduce(torch.zeros(3)).wait()


@pytest.mark.ranks(2, killed=[1])
def test_the_timeout_that_a_peer_gave_up_for_is_told_rather_than_its_lost_connection() -> None:
    t, store = met(), group_store()
    if t.rank == 1:
        with pytest.raises(CollectiveTimeout):
            t.all_reduce(torch.zeros(3)).wait(0.1)
        store.set("told", "")
        end_by_sigkill()
    store.wait(["told"])
    with pytest.raises(
        CollectiveTimeout, match=r"rank 1 aborted the group: rank 0 did not reach all_reduce\(sum\) within 0"
    ):
        t.all_reduce(torch.zeros(3)).wait()


def test_of_two_ranks_that_tell_at_once_the_first_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    first, second = (Notices(rank=rank, size=2) for rank in range(2))
    for rank, notices in enumerate((first, second)):
        notices.use(StoreMedium(StoreConnection(store), rank=rank, size=2))
    monkeypatch.setattr(second, "failure", lambda: None)  # it looked just before the first one told
    first.publish(Failure(PeerFailed, "the cause"))
    second.publish(Failure(PeerLost, "the consequence"))
    told = first.failure()
    assert told is not None
    assert (told.kind, told.text) == (PeerFailed, "the cause")


def of_nccl(words: str) -> SynclineError:
    """The error for a barrier over NCCL that NCCL ended with these words."""
    lane = Lane("main", None, barrier_device="cuda")
    health = Health(lane, Board(), rank=0, size=2, backend="nccl", timeout_seconds=0)
    transport = SimpleNamespace(health=health, own_lane=lane, timeout_seconds=1.0)
    work = C10dWork(transport, "barrier", "", None)  # type: ignore[arg-type]
    raised = RuntimeError(f"{words}\nException raised from wait at x.cpp:1\nframe #0: y")
    return FailedWait(health, work).broken_by(raised)


@without_wait_for_causes()
def test_what_nccl_says_is_told_with_its_cause_but_not_torchs_own_stack() -> None:
    words = "NCCL error, unhandled system error\nLast error:\nsocketStartConnect: refused"
    assert str(of_nccl(words)).endswith(f"nccl reported: {words}")
    on_one_gpu = of_nccl("Last error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 4b000")
    assert "several ranks use one GPU" in str(on_one_gpu)
    assert "sl.init()" in str(on_one_gpu)
    lost = of_nccl("ncclRemoteError: A call failed possibly due to a remote process exiting prematurely.")
    assert isinstance(lost, PeerLost)
    assert "a peer's process has ended, or the network" in str(lost)


@pytest.mark.ranks(2)
def test_an_old_abort_is_forgotten_when_the_group_is_made_again() -> None:
    store = group_store()
    for late in (0, 1):
        old = C10dTransport()
        old.barrier().wait()
        if old.rank == 0:
            old.abort("long ago")
        store.set(f"aborted {old.rank} {late}", "")
        store.wait([f"aborted 0 {late}", f"aborted 1 {late}"])
        if old.rank == late:
            time.sleep(0.6)  # the other rank looks around meanwhile
        C10dTransport().barrier().wait()


@pytest.mark.ranks(3)
def test_a_transport_over_a_subgroup_speaks_of_its_own_ranks() -> None:
    group = dist.new_group([2, 0])
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match="expected a process group of which this process is a member"):
            C10dTransport(group)
        return
    t = C10dTransport(group)
    assert (t.rank, t.size) == (dist.get_rank(group), 2)
    x = torch.tensor([float(dist.get_rank())])
    t.broadcast(x, 1).wait()
    assert x.item() == dist.get_global_rank(group, 1)
    if t.rank == 0:
        t.send(torch.ones(2), 1).wait()
    else:
        received = torch.zeros(2)
        t.recv(received, 0).wait()
        assert received.tolist() == [1, 1]
    lone = t.split(t.rank)
    assert lone is not None
    assert lone.size == 1


@pytest.mark.ranks(1)
def test_the_timeout_is_the_groups_unless_given() -> None:
    assert C10dTransport().timeout_seconds == 60.0
    assert C10dTransport(timeout_seconds=7).timeout_seconds == 7


@pytest.mark.ranks(1)
def test_each_device_has_a_backend_in_the_name() -> None:
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers the backend "fake"

    dist.destroy_process_group()
    dist.init_process_group("cpu:gloo,cuda:fake", store=dist.HashStore(), rank=0, world_size=1)
    t = C10dTransport()
    assert t.name == "gloo (cpu), fake (cuda)"
    assert t.control_device == torch.device("cpu")


@pytest.mark.ranks(3)
def test_a_backend_without_a_mean_is_given_the_sum_to_divide() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(c10d, "_BACKENDS_WITH_MEAN", {"another backend"})
        t = C10dTransport()
    real, imaginary = torch.tensor([3.0 * t.rank]), torch.tensor([3.0j * t.rank])
    part = torch.zeros(1)
    t.all_reduce(real, "mean").wait()
    t.all_reduce(imaginary, "mean").wait()
    t.reduce_scatter(part, torch.full((3,), 3.0 * t.rank), "mean").wait()
    assert (real.item(), imaginary.item(), part.item()) == (3.0, 3.0j, 3.0)
    total = torch.tensor([t.rank])
    t.all_reduce(total, "sum").wait()
    assert total.item() == 3


def test_without_torch_distributed_the_remedy_is_named() -> None:
    with pytest.raises(ValueError, match=r"call torch\.distributed\.init_process_group"):
        C10dTransport()


def test_the_callers_context_stays_out_of_an_operation_started_in_a_backward() -> None:
    """A thread of Gloo that dropped it while Python shuts down would abort the process."""
    key = "context"
    seen: list[tuple[bool, bool]] = []

    def hook(_: torch.Tensor) -> None:
        transport = SimpleNamespace(health=None, own_lane=Lane("main", None), timeout_seconds=1.0)
        work = C10dWork(transport, "barrier", "", None)  # type: ignore[arg-type]
        before = torch._C._is_key_in_tls(key)
        work.start(lambda: seen.append((before, torch._C._is_key_in_tls(key))), None)
        assert torch._C._is_key_in_tls(key) == before

    parameter = torch.ones(1, requires_grad=True)
    parameter.register_post_accumulate_grad_hook(hook)
    (2 * parameter).backward()
    holds_context = hasattr(torch._C, "_remove_obj_from_tls")  # since torch 2.12
    assert seen == [(holds_context, False)]


@pytest.mark.ranks(2)
def test_a_connection_that_takes_longer_than_the_ranks_wait_is_opened_once_and_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the DNS does not answer, the store serves the connections of many ranks one after the other."""
    clone_of, connections = vars(c10d)["clone_of"], []

    def slow_clone_of(store: Any, timeout: timedelta) -> Any:
        if dist.get_rank() == 1:
            time.sleep(5.0)
        connections.append(store)
        return clone_of(store, timeout)

    monkeypatch.setattr(c10d, "_CONNECT_SECONDS", 4.0)
    monkeypatch.setattr(c10d, "clone_of", slow_clone_of)
    transport = C10dTransport(timeout_seconds=300)
    for lane in (transport.lane("first"), transport.lane("second"), transport.split(0)):
        assert lane is not None
        lane.close()
    assert len(connections) == 1
    transport.close()
