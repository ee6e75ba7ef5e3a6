"""The process of a rank, as the kernel knows it."""

from __future__ import annotations

import dataclasses
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.states import wait_until
from syncline.liveness import RankProcess, processes

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="a system without /proc")


def test_a_process_ends_when_it_is_killed_though_nobody_has_waited_for_it() -> None:
    own = RankProcess.own()
    assert own is not None
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = dataclasses.replace(own, pid=child.pid, started=processes._state_and_start(child.pid)[1])
    assert not process.has_ended()
    assert not process.is_stopped()
    child.send_signal(signal.SIGSTOP)
    wait_until(process.is_stopped)
    assert not process.has_ended()
    child.kill()
    wait_until(process.has_ended)
    assert not process.is_stopped()
    child.communicate()
    assert process.has_ended()


def test_another_process_with_the_same_number_is_not_the_rank() -> None:
    own = RankProcess.own()
    assert own is not None
    assert dataclasses.replace(own, started=own.started - 2).has_ended()


def test_a_process_that_is_hidden_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden(pid: int) -> tuple[str, int]:
        raise FileNotFoundError

    own = RankProcess(host="", pid=os.getpid(), started=0)
    monkeypatch.setattr(processes, "_state_and_start", hidden)
    assert not own.has_ended()
    assert not own.is_stopped()
    assert RankProcess.own() is None


def test_numbers_of_another_container_are_not_taken_for_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "readlink", lambda path: "1" if os.getpid() != 1 else "2")
    assert RankProcess.own() is None


def test_an_end_is_seen_where_no_more_files_can_be_opened() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = RankProcess.here(child.pid)
    assert process is not None
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.open("/proc/self/stat", os.O_RDONLY)
        had_ended = process.has_ended()
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        has_ended = process.has_ended()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    child.communicate()
    assert (had_ended, has_ended) == (False, True)


_IN_ANOTHER_TIME = """
import sys
from syncline.liveness import RankProcess
seen = RankProcess.from_json(sys.argv[1])
print(seen.has_ended(), RankProcess.here(seen.pid) == seen, RankProcess.own().to_json(), flush=True)
input()
"""


def test_a_process_in_another_time_namespace_has_not_ended() -> None:
    """There /proc shows start times that are an hour later, and so do those of this process seen from there."""
    own = RankProcess.own()
    assert own is not None
    # `exec` without a fork would stay in this namespace, so `unshare` forks.
    enter = ["unshare", "--time", "--boottime", "3600", "--monotonic", "3600", "--fork", "--kill-child"]
    try:
        subprocess.run([*enter, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this user cannot create time namespaces here")
    other = subprocess.Popen(
        [*enter, sys.executable, "-c", _IN_ANOTHER_TIME, own.to_json()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None
    has_ended, is_same, theirs = other.stdout.readline().split(maxsplit=2)
    assert (has_ended, is_same) == ("False", "True")
    process = RankProcess.from_json(theirs)
    assert not process.has_ended()
    other.communicate("\n")
    assert process.has_ended()
