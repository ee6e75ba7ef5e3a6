"""Checkpointer.stop_if_asked: when ranks agree to stop, what it sends, what it saves. Ranks are threads."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_files import FaultyFiles
from torch import nn

import syncline as sl
from support.cases import case
from syncline import ContractMismatch, SynclineError
from syncline.gradients import Stop, StopVote, Words
from syncline.session import process
from syncline.session import stop_request as stopping
from syncline.session.stop_request import Stopped, StopRequest
from syncline.transport import ThreadGroup, Transport, run_ranks


class Run:
    """A training run of one rank that never listens to signals."""

    def __init__(self, t: Transport, files: Any, **wrapping: Any):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
        self.transport = t
        self.ddp = sl.DistributedDataParallel(model, process_group=t, **wrapping)
        self.optimizer = self.ddp.attach(torch.optim.SGD(model.parameters(), lr=0.1))
        self.state = sl.TrainState(model=self.ddp, optimizer=self.optimizer)
        self.checkpointer = sl.Checkpointer("/runs/one", group=t, files=files, stop_signals=())

    def step(self) -> None:
        self.ddp(torch.full((2, 4), 1.0 + self.transport.rank)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.state.commit()

    def stop_if_asked(self) -> None:
        self.checkpointer.stop_if_asked(self.state)

    def stops(self) -> None:
        with pytest.raises(SystemExit) as stopped:
            self.stop_if_asked()
        assert stopped.value.code == sl.EXIT_STOPPED

    def until_stopped(self, at: int, limit: int = 20) -> int:
        """Rank 1 is asked before step `at` + 1; after how many steps all stop."""
        with pytest.raises(SystemExit) as stopped:
            for _ in range(limit):
                if self.state.step == at and self.transport.rank == 1:
                    self.checkpointer.ask_to_stop("met its deadline")
                self.step()
                self.stop_if_asked()
        assert stopped.value.code == sl.EXIT_STOPPED
        return self.state.step


def of_runs(program: Callable[[Run], Any], size: int = 2, **wrapping: Any) -> tuple[list[Any], list[str]]:
    """What a program returns on each rank, and the names of the saves."""
    files = FaultyFiles()
    return run_ranks(size, lambda t: program(Run(t, files, **wrapping))), files.names("/runs/one")


STRATEGIES: dict[str, dict[str, Any]] = {
    "every step": {},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "compressed": {"compression": sl.compression.Quantize(8)},
    "sharded": {"sharded": True},
    "LocalSGD": {"strategy": sl.LocalSGD(3)},
    "DiLoCo": {"strategy": sl.DiLoCo(4, fragments=2, delay=1)},
    "Gossip": {"strategy": sl.Gossip("ring")},
    "Manual": {"strategy": sl.Manual()},
}


def test_one_rank_is_asked_and_all_stop_after_the_step_under_way(capsys: pytest.CaptureFixture[str]) -> None:
    for (kind, wrapping), at in itertools.product(STRATEGIES.items(), (1, 4)):
        files = FaultyFiles()

        def program(t: Transport, files: Any = files, wrapping: Any = wrapping, at: int = at) -> None:
            assert Run(t, files, **wrapping).until_stopped(at) == at + 1
            again = Run(t, files, **wrapping)
            assert again.checkpointer.load(again.state) == at + 1

        with case(kind, at):
            run_ranks(3, program)
            assert files.names("/runs/one") == [f"save-000001-step-{at + 1}"]
            assert capsys.readouterr().err == (
                f"syncline: rank 1 met its deadline: stopped after step {at + 1}, saved in "
                f"/runs/one/save-000001-step-{at + 1} (exit code 75: start again to resume)\n"
            )


def test_without_a_wrapper_the_ranks_ask_each_other() -> None:
    def program(t: Transport) -> int:
        state = sl.TrainState(model=nn.Linear(2, 1))
        checkpointer = sl.Checkpointer("/runs/one", group=t, files=files, stop_signals=(), stop_every=4)
        with pytest.raises(SystemExit):
            for _ in range(20):
                if state.step == 5 and t.rank == 2:
                    checkpointer.ask_to_stop()
                state.commit()
                checkpointer.stop_if_asked(state)
        return state.step

    files = FaultyFiles()
    assert run_ranks(3, program) == [9, 9, 9]  # asked after steps 1, 5, 9


def test_backwards_that_are_reduced_tell_it_and_nothing_else_is_sent() -> None:
    def program(run: Run) -> None:
        run.step()
        run.stop_if_asked()  # the first one has heard of no backward yet
        for _ in range(3):
            run.step()
            before = run.transport.statistics()
            run.stop_if_asked()
            assert (run.transport.statistics() - before).total_calls == 0

    of_runs(program)


def test_asked_after_the_backward_is_told_with_the_next() -> None:
    def program(run: Run) -> int:
        run.stop_if_asked()
        run.step()
        if run.transport.rank == 0:
            run.checkpointer.ask_to_stop()
        run.stop_if_asked()
        return run.until_stopped(-1)

    assert of_runs(program)[0] == [2, 2]


def test_backwards_that_are_not_reduced_tell_nothing_so_the_ranks_ask() -> None:
    def program(run: Run) -> None:
        run.step()
        run.stop_if_asked()
        if run.transport.rank == 1:
            run.checkpointer.ask_to_stop()
        with run.ddp.no_sync():
            run.ddp(torch.ones(2, 4)).sum().backward()
        run.stops()

    of_runs(program)


def test_a_module_that_changes_goes_on_telling() -> None:
    def program(run: Run) -> int:
        run.step()
        run.stop_if_asked()
        run.ddp.module[0].weight = nn.Parameter(torch.ones(3, 4))
        return run.until_stopped(3)

    assert of_runs(program)[0] == [4, 4]


def test_a_step_that_is_saved_or_loaded_is_not_saved_again() -> None:
    files = FaultyFiles()

    def program(t: Transport) -> None:
        run, again = Run(t, files), Run(t, files)
        run.step()
        run.checkpointer.save(run.state, blocking=False)
        run.checkpointer.ask_to_stop()
        run.stops()
        again.checkpointer.load(again.state)
        again.checkpointer.ask_to_stop()
        again.stops()

    run_ranks(2, program)
    assert files.names("/runs/one") == ["save-000001-step-1"]


def test_the_save_under_way_is_waited_for_even_if_it_fails() -> None:
    files = FaultyFiles()

    def program(t: Transport) -> None:
        run = Run(t, files)
        run.step()
        run.checkpointer.save(run.state)
        run.step()
        t.barrier().wait()
        if t.rank == 0:
            files.full_at = files.num_done
        t.barrier().wait()
        run.checkpointer.save(run.state, blocking=False)
        run.step()
        run.checkpointer.ask_to_stop("met their deadline")
        said = (
            r"ranks 0, 1 met their deadline: .* stopped after step 3, but the state could not be saved .* "
            r"The last save is /runs/one/save-000001-step-1$"
        )
        with pytest.raises(SynclineError, match=said):
            run.stop_if_asked()

    with pytest.warns(RuntimeWarning, match="could not be saved") as warned:
        run_ranks(2, program)
    assert len(warned) == 2


def test_under_a_parameter_server_only_where_all_ranks_have_met() -> None:
    def program(run: Run) -> None:
        run.stop_if_asked()  # nothing is under way yet
        run.step()
        with pytest.raises(SynclineError, match=r"Call ddp.sync_parameters_\(\) right before it"):
            run.stop_if_asked()
        run.ddp.sync_parameters_()
        if run.transport.rank == 1:
            run.checkpointer.ask_to_stop()
        run.stops()

    of_runs(program, strategy=sl.ParameterServer(1))


def test_alone_whoever_catches_it_and_goes_on_is_told_again() -> None:
    def program(run: Run) -> None:
        run.stop_if_asked()
        run.checkpointer.ask_to_stop()
        for _ in range(2):
            run.stops()

    assert of_runs(program, 1)[1] == ["save-000001-step-0"]


def test_signals_that_make_no_sense_are_refused() -> None:
    refused: list[tuple[Any, type[Exception], str]] = [
        (("SIGTRAM",), ValueError, "contain names of signals, such as 'SIGUSR1', got 'SIGTRAM'"),
        (("SIGKILL",), ValueError, "signals that a program can handle, got SIGKILL"),
        ("SIGTERM", TypeError, r"write \('SIGTERM',\)"),
        ((1.5,), TypeError, "expected stop_signals to contain names of signals"),
        (("sigtem",), ValueError, "got 'sigtem': did you mean 'SIGTERM'"),
    ]
    for signals, error, words in refused:
        with case(signals), pytest.raises(error, match=words):
            sl.Checkpointer("/runs/one", files=FaultyFiles(), stop_signals=signals)


def test_ranks_have_to_ask_each_other_equally_often() -> None:
    def program(t: Transport) -> None:
        with pytest.raises(ContractMismatch, match=r"stop_every\n.*expected 2"):
            sl.Checkpointer("/runs/one", group=t, files=FaultyFiles(), stop_every=2 + t.rank)

    run_ranks(2, program)


def test_a_rank_without_inputs_cannot_stop_so_it_is_told_again() -> None:
    alone = ThreadGroup(1).transport(0)
    rider, vote = Stop(), StopVote(StopRequest())
    rider.carry(vote)
    rider.receive_nothing(1)
    rider.receive(Words((1, None), 2, alone))
    assert (vote.asked_ranks, vote.num_received) == ((), 2)
    rider.receive(Words((1, 0), 3, alone))
    rider.receive(Words((0, 1), 4, alone))
    assert vote.asked_ranks == (0,)


def test_a_stop_is_no_failure_for_launcher_and_peers(tmp_path: Path) -> None:
    path = tmp_path / "words.json"
    process.record_failure(Stopped(), str(path))
    assert not path.exists()
    assert process.exit_code_of(Stopped()) == 75
    process.record_failure(SystemExit(75), str(path))  # somebody else's 75 is
    assert path.exists()


# ---------------------------------------------------------------------- signals


@pytest.fixture
def usr1() -> Iterator[list[str]]:
    """What a handler of the program's own notes of SIGUSR1."""
    noted: list[str] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: noted.append("SIGUSR1"))
    yield noted
    signal.signal(signal.SIGUSR1, before)


def handler() -> Any:
    return signal.getsignal(signal.SIGUSR1)


def test_nobody_listens_before_the_first_call_and_after_the_checkpointer_is_gone(
    usr1: list[str], tmp_path: Path
) -> None:
    own, state = handler(), sl.TrainState()
    checkpointer = sl.Checkpointer(tmp_path, stop_signals=("usr1",))
    assert handler() is own
    checkpointer.stop_if_asked(state)
    assert handler() is not own
    os.kill(os.getpid(), signal.SIGUSR1)
    assert usr1 == ["SIGUSR1"]  # it is called as well
    with pytest.raises(SystemExit):
        checkpointer.stop_if_asked(state)
    del checkpointer
    gc.collect()
    assert handler() is own
    with sl.Checkpointer(tmp_path, stop_signals=("usr1",)) as checkpointer:
        checkpointer.stop_if_asked(state)
        assert handler() is not own
    assert handler() is own, "it was closed"
    with pytest.raises(ValueError, match="is closed"):
        checkpointer.stop_if_asked(state)


def test_between_a_stop_and_the_end_of_the_process_a_signal_does_no_harm(
    usr1: list[str], tmp_path: Path
) -> None:
    own = handler()
    with pytest.raises(SystemExit), sl.Checkpointer(tmp_path, stop_signals=("usr1",)) as checkpointer:
        checkpointer.ask_to_stop()
        checkpointer.stop_if_asked(sl.TrainState())
    assert handler() is not own
    del checkpointer
    gc.collect()
    assert handler() is own


def test_who_else_listens_goes_on(usr1: list[str]) -> None:
    own, one, other = handler(), StopRequest(), StopRequest()
    signals = stopping.checked_signals([signal.SIGUSR1])
    assert one.listen(signals)
    assert other.listen(signals)
    one.forget()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert (one.why, other.why) == (None, "got SIGUSR1")
    other.forget()
    assert handler() is own


def test_forgotten_in_another_thread_the_signal_does_what_it_did(usr1: list[str]) -> None:
    request = StopRequest()
    request.listen(stopping.checked_signals(["SIGUSR1"]))
    thread = threading.Thread(target=request.forget)
    thread.start()
    thread.join()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert (usr1, request.is_asked) == (["SIGUSR1"], False)


def test_what_is_ignored_stays_ignored(usr1: list[str]) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    request = StopRequest()
    request.listen(stopping.checked_signals(["SIGUSR1"]))
    os.kill(os.getpid(), signal.SIGUSR1)
    assert not request.is_asked
    assert handler() == signal.SIG_IGN


def exit_code_of_child(fn: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            fn()
            os._exit(0)
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.real
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_worker_of_a_dataloader_outlives_sigusr1_and_ends_by_sigterm() -> None:
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    request = StopRequest()
    request.listen(stopping.checked_signals(stopping.STOP_SIGNALS))
    try:
        assert exit_code_of_child(lambda: os.kill(os.getpid(), signal.SIGUSR1)) == 0
        assert exit_code_of_child(lambda: os.kill(os.getpid(), signal.SIGTERM)) == -signal.SIGTERM
    finally:
        request.forget()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_only_the_main_thread_listens_and_the_others_are_told_so(tmp_path: Path) -> None:
    def program(t: Transport) -> None:
        sl.Checkpointer(tmp_path, group=t).stop_if_asked(sl.TrainState())

    with pytest.warns(RuntimeWarning, match="only the main thread can handle") as warned:
        run_ranks(1, program)
    assert len(warned) == 1
    assert warned[0].filename == __file__


def test_after_a_stop_a_signal_counts_as_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that ends what is left must not make it another end."""
    now = [0.0]
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now[0])
    calls: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    request = StopRequest()
    try:
        request.listen(stopping.checked_signals(["SIGTERM"]))
        for seconds in (0, 1, 3):
            now[0] = seconds
            os.kill(os.getpid(), signal.SIGTERM)
        assert len(calls) == 3  # the program's own is called each time
        installed: Any = signal.getsignal(signal.SIGTERM)
        assert installed.first_at == 0
        request.rearm()
        os.kill(os.getpid(), signal.SIGTERM)
        assert installed.first_at == 3
    finally:
        request.forget()
        signal.signal(signal.SIGTERM, before)
