"""Ranks that are asked to stop: all after the same step, saved, exit code 75; and they go on as if nothing had been."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from test_resume import report_of

import hangs
import syncline as sl
from forks import Forks

PROGRAM = Path(__file__).with_name("resumable.py")
NUM_STEPS = 14
"""Almost three epochs of 5 steps each; a multiple of 4 is saved in any case."""


GETS_SIGNALS = """
import importlib.util, os, signal, sys
spec = importlib.util.spec_from_file_location("stopping", sys.argv[1])
stopping = importlib.util.module_from_spec(spec)
spec.loader.exec_module(stopping)
now = 0.0
stopping.time.monotonic = lambda: now
request = stopping.StopRequest()
assert request.listen(stopping.checked_signals(stopping.STOP_SIGNALS))
for what in sys.argv[2:]:
    if what == "later":
        now += 2.5
    else:
        os.kill(os.getpid(), signal.Signals[what])
assert request.why == "got " + sys.argv[2]
raise stopping.Stopped
"""


def arguments(folder: Path, strategy: str, *events: str) -> list[object]:
    return [folder / "saves", folder / "report", strategy, NUM_STEPS, *events]


def saves_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "saves").iterdir())


def assert_saved_once(folder: Path, line: str, told: str, step: int) -> None:
    """The line says why it stopped, after which step, and where that was saved, which is so."""
    *_, newest = saves_in(folder)
    assert [name for name in saves_in(folder) if name.endswith(f"-step-{step}")] == [newest]
    ending = (
        f"stopped after step {step}, saved in {folder}/saves/{newest} (exit code 75: start again to resume)"
    )
    assert re.fullmatch(rf"syncline: {told}: {re.escape(ending)}", line)


class Runs:
    """Runs of three ranks in one folder."""

    def __init__(self, forks: Forks, folder: Path, strategy: str) -> None:
        self._forks = forks
        self.folder = folder
        self.strategy = strategy
        folder.mkdir()

    def run(self, *events: str, strategy: str = "") -> tuple[list[int], str]:
        given = arguments(self.folder, strategy or self.strategy, *events)
        return self._forks.run(3, PROGRAM, *given)

    def ends(self) -> dict[str, str]:
        """Run it to its end, and return what it has reported."""
        assert self.run() == ([0] * 3, "")
        return report_of(self.folder)

    def stops(self, *events: str, told: str, step: int, strategy: str = "") -> None:
        """All ranks end with 75, after one step, which was saved once, and nobody says more than that."""
        codes, printed = self.run(*events, strategy=strategy)
        assert codes == [sl.EXIT_STOPPED] * 3 == [75] * 3, printed
        (line,) = printed.splitlines()
        assert_saved_once(self.folder, line, told, step)

    def stops_under_the_launcher(
        self,
        *events: str,
        told: str,
        step: int,
        to_launcher: signal.Signals,
        options: Sequence[str] = (),
        warm_ranks: bool = True,
    ) -> None:
        """A signal to the launcher, when a rank pauses."""
        given = arguments(self.folder, self.strategy, *events)
        line = ["-n", "3", *options, PROGRAM, *given]
        launcher = self._forks.launch(self.folder, *line, warm_ranks=warm_ranks)
        assert launcher.wait_for_lines(1) == ["[rank 0] pauses"]
        os.kill(launcher.pid, to_launcher)
        done = launcher.wait()
        assert done.returncode == sl.EXIT_STOPPED, done.stderr
        lines = done.stderr.splitlines()
        if to_launcher == signal.SIGTERM:  # after SIGUSR1, the ranks have no time limit
            seconds = "the ranks have 30 s to save and end; a second signal kills them"
            lines.remove(f"syncline run: got SIGTERM: {seconds}")
        first, last = lines
        assert first.startswith("[rank 0] ")
        assert_saved_once(self.folder, first.removeprefix("[rank 0] "), told, step)
        assert (
            last == "syncline run: all ranks on this host have stopped, exit code 75: start again to resume"
        )


def test_a_run_that_is_stopped_again_and_again_ends_as_if_it_had_not_been(
    tmp_path: Path, forks: Forks
) -> None:
    whole = Runs(forks, tmp_path / "whole", "every-step")
    stopped = Runs(forks, tmp_path / "stopped", "every-step")
    stopped.stops_under_the_launcher(
        "PAUSE@1@0",
        told=r"ranks? 0\S* got SIGTERM",
        step=2,
        to_launcher=signal.SIGTERM,
        options=["--max-restarts", "2"],  # which are for failures
        warm_ranks=False,
    )
    stopped.stops(  # at a step that is saved anyway, in a process that has workers
        "SIGUSR1@3@0",
        "SIGTERM@3@2",
        told="rank 0 got SIGUSR1, rank 2 got SIGTERM",
        step=4,
        strategy="workers",
    )
    stopped.stops_under_the_launcher(
        "PAUSE@6@0", told=r"ranks? 0\S* got SIGUSR1", step=7, to_launcher=signal.SIGUSR1
    )
    stopped.stops("SIGTERM@9@1", told="rank 1 got SIGTERM", step=10)
    report = whole.ends()
    assert len(report) == NUM_STEPS + 1
    assert stopped.ends() == report


def test_replicas_that_drift_stop_between_two_meetings(tmp_path: Path, forks: Forks) -> None:
    whole = Runs(forks, tmp_path / "whole", "local-sgd")
    stopped = Runs(forks, tmp_path / "stopped", "local-sgd")
    stopped.stops("SIGTERM@6@1", told="rank 1 got SIGTERM", step=7)
    assert stopped.ends() == whole.ends()


def test_what_could_not_be_saved_is_another_end(tmp_path: Path, forks: Forks) -> None:
    full = Runs(forks, tmp_path / "full", "every-step")
    codes, text = full.run("FULL@9@0", "SIGTERM@9@1")
    assert codes == [1, 1, 1]
    assert re.search(r"the state at step 10 could not be saved: .*No space left on device", text)
    assert (
        "SynclineError: rank 1 got SIGTERM: all ranks stopped after step 10, but the state could not be saved (a "
        f"warning has the reason). The last save is {full.folder}/saves/save-000002-step-8"
    ) in text
    assert saves_in(full.folder) == ["save-000001-step-4", "save-000002-step-8"]


@pytest.mark.parametrize(("strategy", "num_stops"), [("every-step", 3), ("local-sgd", 2)])
def test_whenever_any_ranks_are_asked_all_stop(
    strategy: str, num_stops: int, tmp_path: Path, forks: Forks
) -> None:
    program = PROGRAM.with_name("asked_to_stop.py")
    done = forks.start(tmp_path, program, tmp_path, strategy, num_stops, 0).wait()
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("exit code 75") == num_stops
    assert len(done.stderr.splitlines()) == num_stops


def test_the_second_sigterm_ends_at_once() -> None:
    """Without torch, which takes longer to load than this."""
    module = Path(sl.__file__).parent / "session" / "stop_request.py"
    for signals, code in (
        (["SIGTERM"], 75),
        (["SIGTERM", "SIGTERM"], 75),  # one wish that arrives twice
        (["SIGTERM", "later", "SIGTERM"], -signal.SIGTERM),
        (["SIGUSR1", "later", "SIGTERM"], 75),
        (["SIGUSR1", "later", "SIGUSR1"], 75),
    ):
        done = hangs.run([sys.executable, "-c", GETS_SIGNALS, str(module), *signals])
        assert (done.returncode, done.stderr) == (code, ""), signals
