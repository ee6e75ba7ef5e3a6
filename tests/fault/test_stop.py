"""Ranks that are asked to stop: all after the same step, saved, exit code 75; and they go on as if nothing had been."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from test_resume import report_of

import syncline as sl

PROGRAM = Path(__file__).with_name("resumable.py")
NUM_STEPS = 14
"""Almost three epochs of 5 steps each; a multiple of 4 is saved in any case."""


def run(
    folder: Path,
    strategy: str,
    *events: str,
    options: Sequence[str] = (),
    to_launcher: signal.Signals | None = None,
) -> tuple[int, list[str]]:
    """Exit code and stderr of a run of three ranks; `to_launcher` is sent when a rank pauses."""
    launcher = [sys.executable, "-m", "syncline.cli", "run", "-n", "3", *options]
    arguments = [PROGRAM, folder / "saves", folder / "report", strategy, NUM_STEPS, *events]
    command = [*launcher, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        if to_launcher is not None:
            assert process.stdout is not None
            assert process.stdout.readline() == "[rank 0] pauses\n"
            os.kill(process.pid, to_launcher)
        _, errors = process.communicate(timeout=120)
    return process.returncode, errors.splitlines()


def saves_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "saves").iterdir())


def assert_stopped(folder: Path, ended: tuple[int, list[str]], told: str, step: int) -> None:
    """All ranks ended with 75, after one step, which was saved once, and nobody said more than that."""
    code, errors = ended
    assert code == sl.EXIT_STOPPED == 75, errors
    *_, newest = saves_in(folder)
    assert [name for name in saves_in(folder) if name.endswith(f"-step-{step}")] == [newest]
    first, *rest = errors
    ending = (
        f"stopped after step {step}, saved in {folder}/saves/{newest} (exit code 75: start again to go on)"
    )
    assert re.fullmatch(rf"\[rank 0\] syncline: {told}: {re.escape(ending)}", first)
    assert rest == ["syncline run: all ranks on this host have stopped, exit code 75: start again to go on"]


def test_a_run_that_is_stopped_again_and_again_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir()
    stopped.mkdir()
    assert run(whole, "every-step") == (0, [])

    ended = run(stopped, "every-step", "SIGTERM@1@1", options=["--max-restarts", "2"])
    assert_stopped(stopped, ended, "rank 1 got SIGTERM", 2)
    ended = run(stopped, "workers", "SIGUSR1@3@0", "SIGTERM@3@2")  # a step that is saved anyway
    assert_stopped(stopped, ended, "rank 0 got SIGUSR1, rank 2 got SIGTERM", 4)
    ended = run(stopped, "workers", "PAUSE@6@0", to_launcher=signal.SIGTERM)
    assert_stopped(stopped, ended, r"ranks? 0\S* got SIGTERM", 7)
    ended = run(stopped, "every-step", "PAUSE@9@0", to_launcher=signal.SIGUSR1)
    assert_stopped(stopped, ended, r"ranks? 0\S* got SIGUSR1", 10)

    assert run(stopped, "every-step") == (0, [])
    assert len(report_of(whole)) == NUM_STEPS + 1
    assert report_of(stopped) == report_of(whole)


def test_replicas_that_drift_stop_between_two_meetings(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    whole.mkdir()
    stopped.mkdir()
    assert run(whole, "local-sgd") == (0, [])
    ended = run(stopped, "local-sgd", "SIGTERM@6@1")
    assert_stopped(stopped, ended, "rank 1 got SIGTERM", 7)
    assert run(stopped, "local-sgd") == (0, [])
    assert report_of(stopped) == report_of(whole)


def test_what_could_not_be_saved_is_another_end(tmp_path: Path) -> None:
    code, errors = run(tmp_path, "every-step", "FULL@9@0", "SIGTERM@9@1")
    assert code == 1
    text = "\n".join(errors)
    assert re.search(r"the state at step 10 could not be saved: .*No space left on device", text)
    assert (
        "SynclineError: rank 1 got SIGTERM: stopped after step 10, but the state could not be saved (a warning says "
        f"why). Saved before: {tmp_path}/saves/save-000002-step-8"
    ) in text
    assert saves_in(tmp_path) == ["save-000001-step-4", "save-000002-step-8"]


@pytest.mark.parametrize(("strategy", "num_stops"), [("every-step", 3), ("local-sgd", 2)])
def test_whenever_any_ranks_are_asked_all_stop(strategy: str, num_stops: int, tmp_path: Path) -> None:
    program = PROGRAM.with_name("asked_to_stop.py")
    command = [sys.executable, str(program), str(tmp_path), strategy, str(num_stops), "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("exit code 75") == num_stops
    assert len(done.stderr.splitlines()) == num_stops


@pytest.mark.parametrize(
    ("signals", "code"),
    [
        (["SIGTERM"], 75),
        (["SIGTERM", "SIGTERM"], 75),  # one wish that arrives twice
        (["SIGTERM", "later", "SIGTERM"], -signal.SIGTERM),
        (["SIGUSR1", "later", "SIGTERM"], 75),
        (["SIGUSR1", "later", "SIGUSR1"], 75),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(int(value)),
)
def test_the_second_sigterm_ends_at_once(signals: list[str], code: int) -> None:
    """Without torch, which takes longer to load than this."""
    module = Path(sl.__file__).with_name("stopping.py")
    program = (
        "import importlib.util, os, signal, sys\n"
        f"spec = importlib.util.spec_from_file_location('stopping', {str(module)!r})\n"
        "stopping = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(stopping)\n"
        "now = 0.0\n"
        "stopping.time.monotonic = lambda: now\n"
        "request = stopping.StopRequest()\n"
        "assert stopping.listen(request, stopping.checked_signals(stopping.STOP_SIGNALS))\n"
        f"for what in {signals!r}:\n"
        "    if what == 'later':\n"
        "        now += 2.5\n"
        "    else:\n"
        "        os.kill(os.getpid(), signal.Signals[what])\n"
        f"assert request.why == 'got {signals[0]}'\n"
        "raise stopping.Stopped\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (code, "")
