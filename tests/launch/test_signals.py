"""Signals at the launcher, and nobody left behind: with real processes that import no torch."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import termios
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hangs
from failure_rows import record
from forks import Forks, Process, is_running
from support.states import wait_until
from syncline import environment
from syncline.tools.launch.guardian import Guardian
from syncline.tools.launch.stopping import Interruption

# Each prints its pid; told to end, it says so and ends, or (with "stubborn") goes on. It says so with os.write, because
# a `print` in a handler is an error if the signal arrives inside of the other `print`.
PROGRAM = """
import os, signal, sys, time
def told(number, frame):
    os.write(1, f"told {signal.Signals(number).name}\\n".encode())
    if "stubborn" not in sys.argv:
        sys.exit(0)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, told)
print("pid", os.getpid(), flush=True)
time.sleep(3000)
"""
KEEPS_DEFAULTS = "import os, time\nprint('pid', os.getpid(), flush=True)\ntime.sleep(60)\n"


def started(forks: Forks, folder: Path, *arguments: str, code: str = PROGRAM) -> tuple[Process, list[int]]:
    """A job of two workers, and their pids."""
    (folder / "program.py").write_text(code)
    launcher = forks.launch(folder, "-n", "2", *arguments)
    return launcher, [int(line.split()[-1]) for line in launcher.wait_for_lines(2)]


def assert_gone(pids: list[int]) -> None:
    wait_until(lambda: not any(map(is_running, pids)), lambda: f"still running: {pids}")


def test_a_signal_is_passed_on_and_the_launcher_says_so_and_how_it_ended(
    forks: Forks, tmp_path: Path
) -> None:
    for number, code, said in (
        (signal.SIGTERM, PROGRAM, "got SIGTERM: the ranks have 30 s to save and end; a second signal"),
        (signal.SIGHUP, PROGRAM, "got SIGHUP: the ranks have 5 s to end; a second signal kills them"),
        # A rank that Python interrupts shows no traceback either.
        (signal.SIGINT, KEEPS_DEFAULTS, "interrupted: the ranks have 5 s to end; press Ctrl-C again"),
    ):
        launcher, pids = started(forks, tmp_path, "program.py", code=code)
        os.kill(launcher.pid, number)
        done = launcher.wait()
        assert done.returncode == 128 + number
        assert done.stdout.count(f"told {number.name}") == (2 if code == PROGRAM else 0)
        first, last = done.stderr.splitlines()
        assert first.startswith(f"syncline run: {said}")
        assert last == f"syncline run: stopped by {number.name}, all ranks on this host have ended"
        assert_gone(pids)


def test_a_second_ctrl_c_kills_at_once(forks: Forks, tmp_path: Path) -> None:
    launcher, pids = started(forks, tmp_path, "--shutdown-timeout", "3000", "program.py", "stubborn")
    os.kill(launcher.pid, signal.SIGINT)
    launcher.wait_for_lines(4)
    assert all(is_running(pid) for pid in pids)
    os.kill(launcher.pid, signal.SIGINT)
    done = launcher.wait()
    assert done.returncode == 130
    assert_gone(pids)


def test_sigterms_within_two_seconds_are_one_signal() -> None:
    """A scheduler can send it to the launcher in two ways. Another signal is never a part of the same request."""
    done: list[str] = []
    workers: Any = SimpleNamespace(
        are_running=False,
        pass_on=lambda number: done.append(number.name) or True,
        kill=lambda: done.append("kill"),
    )
    with Interruption(workers, ["SIGTERM", "SIGINT"], None) as interruption:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert done == ["SIGTERM"]
        interruption._received_at -= 2.0
        signal.raise_signal(signal.SIGTERM)
        assert done == ["SIGTERM", "kill"]
    done.clear()
    with Interruption(workers, ["SIGTERM", "SIGINT"], None):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert done == ["SIGTERM", "kill"]


@pytest.mark.real
@pytest.mark.parametrize(("number", "host"), [(signal.SIGTERM, ()), (signal.SIGINT, ("--host", "127.0.0.1"))])
def test_a_signal_ends_a_launcher_that_waits_for_another_host(
    tmp_path: Path, number: signal.Signals, host: tuple[str, ...]
) -> None:
    (tmp_path / "program.py").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    where = ["--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    launcher = subprocess.Popen(
        [sys.executable, "-m", "syncline", "run", *where, *host, "program.py"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        # as in what a shell script starts with `&`
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    # it listens before it handles signals
    wait_until(lambda: (listens(port) and hangs.handles(launcher.pid, number)) or launcher.poll() is not None)
    launcher.send_signal(number)
    try:
        _, error = hangs.communicate(launcher)  # it used to wait for ten minutes
    finally:
        launcher.kill()
    assert launcher.returncode == 128 + number, error
    assert f"stopped by {number.name}, all ranks on this host have ended" in error


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.real
def test_a_host_without_a_loopback_interface_is_named(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("")
    command = ["unshare", "-rn", sys.executable, "-m", "syncline", "run", "-n", "2", "program.py"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*command[:2], "true"], capture_output=True).returncode
    ):
        pytest.skip("no network namespaces here")
    done = hangs.run(command, cwd=tmp_path)
    assert done.returncode == 1
    assert "this host cannot connect to its own port" in done.stderr
    assert "ip link set lo up" in done.stderr


def test_workers_that_do_not_end_are_killed_when_their_time_is_up(forks: Forks, tmp_path: Path) -> None:
    launcher, pids = started(forks, tmp_path, "--shutdown-timeout", "3", "program.py", "stubborn")
    os.kill(launcher.pid, signal.SIGTERM)
    done = launcher.wait()
    assert done.returncode == 143
    assert done.stdout.count("told SIGTERM") == 2
    assert_gone(pids)


def test_nohup_is_respected(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import os, time\nprint('ready', flush=True)\nwhile not os.path.exists('end'):\n    time.sleep(0.01)\n"
    )
    launcher = forks.launch(tmp_path, "-n", "2", "program.py", ignored=[signal.SIGHUP])
    launcher.wait_for_lines(2)
    os.kill(launcher.pid, signal.SIGHUP)
    (tmp_path / "end").touch()
    assert launcher.wait().returncode == 0


# Starts programs in several ways, and prints what should go when the launcher is killed, and what should stay. It heeds
# no other signal.
PARENT = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
def sleeps(**how):
    return subprocess.Popen(["sleep", "60"], **how).pid
forked = os.fork()
if not forked:
    grandchild = sleeps()
    open(f"grandchild {os.getppid()}", "w").write(str(grandchild))
    time.sleep(60)
name = f"grandchild {os.getpid()}"
while not os.path.exists(name) or not open(name).read():
    time.sleep(0.01)
goes = [os.getpid(), forked, int(open(name).read()), sleeps(), sleeps(process_group=0), sleeps(env={})]
folder = os.path.dirname(os.path.dirname(os.path.dirname(os.environ["TORCHELASTIC_ERROR_FILE"])))
print("started", folder, sleeps(start_new_session=True), *goes, flush=True)
time.sleep(60)
"""


def test_ranks_what_they_started_and_the_folder_go_when_the_launcher_is_killed(
    forks: Forks, tmp_path: Path
) -> None:
    (tmp_path / "program.py").write_text(PARENT)
    for options in ((), ("--no-python", "python3")):
        launcher = forks.launch(tmp_path, "-n", "2", *options, "program.py")
        lines = [line.split("started ")[1].split() for line in launcher.wait_for_lines(2)]
        folder = Path(lines[0][0])
        assert folder.name.startswith("syncline_")
        assert folder.is_dir()
        detached = [int(line[1]) for line in lines]
        began = time.monotonic()
        os.kill(launcher.pid, signal.SIGKILL)
        launcher.wait()
        try:
            assert_gone([int(pid) for line in lines for pid in line[2:]])
            record("launcher", "", "all ranks end", time.monotonic() - began)
            wait_until(lambda folder=folder: not folder.exists())
            assert all(is_running(pid) for pid in detached)
        finally:
            for pid in detached:
                os.kill(pid, signal.SIGKILL)


def test_the_guardian_ends_with_its_launcher_and_takes_nobody_else() -> None:
    """A rank that ended earlier may have left its number to others: of its session only what bears the mark goes."""
    command = ["sh", "-c", "sleep 60 & echo $!"]
    ours = subprocess.Popen(["sleep", "60"], start_new_session=True, env={"MARK": "the-mark"})
    another = subprocess.Popen(["sleep", "60"], start_new_session=True)
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, text=True) as ended:
        assert ended.stdout is not None
        stranger = int(ended.stdout.readline())
        ended.wait()
    try:
        with Guardian(environment.for_child({})) as guardian:
            guardian.watch("the-mark", [ours.pid, ended.pid])
            guardian._process.stdin.close()  # type: ignore[union-attr]  # as by the end of the launcher
            assert guardian._process.wait() == 0
            assert not guardian.folder.exists()
        assert ours.wait() == -signal.SIGKILL
        assert is_running(another.pid)
        assert is_running(stranger)
    finally:
        for pid in (another.pid, stranger):
            os.kill(pid, signal.SIGKILL)
        another.wait()


def test_what_an_interrupted_worker_started_is_not_left_behind(forks: Forks, tmp_path: Path) -> None:
    launcher, pids = started(
        forks,
        tmp_path,
        "program.py",
        code=(
            "import os, signal, subprocess, sys, time\n"
            "ignore = 'import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(0, flush=True); '\n"
            "child = subprocess.Popen([sys.executable, '-c', ignore + 'import time; time.sleep(60)'],\n"
            "                         stdout=subprocess.PIPE)\n"
            "child.stdout.readline()\n"
            "print('pid', child.pid, flush=True)\n"
            "time.sleep(60)\n"
        ),
    )
    os.kill(launcher.pid, signal.SIGTERM)
    assert launcher.wait().returncode == 143
    assert_gone(pids)


def test_the_third_signal_ends_a_launcher_whose_output_nobody_reads(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("print('x\\n' * 1_000_000)\n")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    launcher = forks.launch(tmp_path, "-n", "1", "program.py", terminal=str(pipe))
    try:
        wait_until(lambda: is_full(reader))
        while not (launcher.folder / "code").exists():
            with contextlib.suppress(ProcessLookupError):
                os.kill(launcher.pid, signal.SIGTERM)
            time.sleep(0.5)
        assert launcher.wait().returncode == 143
    finally:
        os.close(reader)


def is_full(pipe_fd: int) -> bool:
    """Whether a pipe holds as much as it can (its writer waits)."""
    held = array.array("i", [0])
    fcntl.ioctl(pipe_fd, termios.FIONREAD, held)
    return held[0] > fcntl.fcntl(pipe_fd, fcntl.F_GETPIPE_SZ) - 4096


def test_what_a_failed_worker_started_is_not_left_behind(forks: Forks, tmp_path: Path) -> None:
    launcher, pids = started(
        forks,
        tmp_path,
        "program.py",
        code=(
            "import os, subprocess, time\n"
            "child = subprocess.Popen(['sleep', '60'])\n"
            "print('pid', child.pid, flush=True)\n"
            "while os.environ['RANK'] == '0' or not os.path.exists('end'):\n"
            "    time.sleep(0.01)\n"
            "os._exit(7)\n"
        ),
    )
    (tmp_path / "end").touch()
    assert launcher.wait().returncode == 7
    assert_gone(pids)


# ---------------------------------------------------------------------- ranks that stop because they are asked to

# Told to stop, each ends with 75: rank 0 at once, the others when there is a file "end"; "fails" ends with 3 instead.
STOPS = """
import os, signal, sys, time
def told(number, frame):
    os.write(1, f"told {signal.Signals(number).name}\\n".encode())
    while os.environ["RANK"] != "0" and not os.path.exists("end"):
        time.sleep(0.01)
    sys.exit(3 if os.environ["RANK"] != "0" and "fails" in sys.argv else 75)
signal.signal(signal.SIGTERM, told)
signal.signal(signal.SIGUSR1, told)
print("pid", os.getpid(), flush=True)
time.sleep(60)
"""


def test_ranks_that_stop_are_waited_for_and_are_no_failure(forks: Forks, tmp_path: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGUSR1):
        (tmp_path / "end").unlink(missing_ok=True)
        launcher, pids = started(forks, tmp_path, "--max-restarts", "3", "program.py", code=STOPS)
        os.kill(launcher.pid, number)
        launcher.wait_for_lines(4)
        assert_gone(pids_of_rank_0(launcher))
        assert sum(is_running(pid) for pid in pids) == 1
        (tmp_path / "end").touch()
        done = launcher.wait()
        assert done.returncode == 75
        assert (done.stdout.count("pid"), done.stdout.count(f"told {number.name}")) == (2, 2)
        assert "all ranks on this host have stopped, exit code 75" in done.stderr.splitlines()[-1]


def pids_of_rank_0(launcher: Process) -> list[int]:
    return [int(line.split()[-1]) for line in launcher.wait_for_lines(2) if line.startswith("[rank 0] pid")]


def test_a_rank_that_fails_while_others_stop_is_a_failure(forks: Forks, tmp_path: Path) -> None:
    for is_later in (True, False):
        (tmp_path / "end").unlink(missing_ok=True)
        launcher, _ = started(forks, tmp_path, "program.py", "fails", code=STOPS)
        if not is_later:
            (tmp_path / "end").touch()
        os.kill(launcher.pid, signal.SIGUSR1)
        if is_later:
            assert_gone(pids_of_rank_0(launcher))
            (tmp_path / "end").touch()
        done = launcher.wait()
        assert done.returncode == 3
        assert "rank 1 " in done.stderr.splitlines()[0]


def test_sigusr1_changes_nothing_for_ranks_that_go_on(forks: Forks, tmp_path: Path) -> None:
    code = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b'told\\n'))\n"
        "print('pid', os.getpid(), flush=True)\n"
        "while not os.path.exists('end'):\n"
        "    time.sleep(0.01)\n"
    )
    launcher, _ = started(forks, tmp_path, "program.py", code=code)
    os.kill(launcher.pid, signal.SIGUSR1)
    launcher.wait_for_lines(4)
    (tmp_path / "end").touch()
    done = launcher.wait()
    assert (done.returncode, done.stderr) == (0, "")


def test_ranks_that_do_not_listen_end_by_the_signal(forks: Forks, tmp_path: Path) -> None:
    for number, options in ((signal.SIGTERM, ("--max-restarts", "3")), (signal.SIGUSR1, ())):
        launcher, pids = started(forks, tmp_path, *options, "program.py", code=KEEPS_DEFAULTS)
        os.kill(launcher.pid, number)
        done = launcher.wait()
        assert done.returncode == 128 + number
        assert done.stdout.count("pid") == 2
        assert_gone(pids)


def test_only_of_a_command_all_processes_are_told(forks: Forks, tmp_path: Path) -> None:
    """Those that a Python program has started, such as workers of a DataLoader, would end too early."""
    (tmp_path / "program.py").write_text(
        "import os, signal, sys, time\n"
        "child = os.fork()\n"
        "def told(number, frame):\n"
        "    os.write(1, b'told rank\\n' if child else b'told child\\n')\n"
        "    while child and not os.path.exists('end'):\n"
        "        time.sleep(0.01)\n"
        "    os._exit(75)\n"
        "signal.signal(signal.SIGTERM, told)\n"
        "os.write(1, b'pid\\n')\n"
        "time.sleep(60)\n"
    )
    for command, num_lines in ((["program.py"], 3), (["--no-python", "python3", "program.py"], 4)):
        (tmp_path / "end").unlink(missing_ok=True)
        launcher = forks.launch(tmp_path, "-n", "1", *command)
        launcher.wait_for_lines(2)
        os.kill(launcher.pid, signal.SIGTERM)
        lines = launcher.wait_for_lines(num_lines)
        (tmp_path / "end").touch()
        done = launcher.wait()
        assert done.returncode == 75
        assert ("[rank 0] told child" in done.stdout) == (num_lines == 4), lines
