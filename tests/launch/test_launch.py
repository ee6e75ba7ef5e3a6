"""`sl.launch`: a function on several ranks, results, failures, signals, and what is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import syncline as sl
from forks import is_running
from syncline import PeerFailed, PeerLost, SynclineError
from syncline.tools.launch import function
from syncline.tools.launch.guardian import Guardian

if TYPE_CHECKING:
    from forks import Forks


def total(start: float) -> float:
    world = sl.init()
    return float(sl.all_reduce_(torch.tensor(start + world.rank)))


def use_torch() -> None:
    """Start the threads of OpenMP, if there is more than one core."""
    x = torch.randn(600, 600, requires_grad=True)
    (x @ x).relu().sum().backward()


@contextlib.contextmanager
def several_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def test_the_result_of_rank_0_comes_back_and_all_ranks_print(capsys: pytest.CaptureFixture[str]) -> None:
    def program(name: str, *, end: str) -> dict[str, Any]:  # a closure
        world = sl.init()
        print(f"{name} {world.rank} of {world.size}{end}")
        print("to stderr", file=sys.stderr)
        x = sl.gather(torch.full((world.rank,), 1.5))
        return {"x": x, "pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0)}

    found = sl.launch(program, ranks=3, args=("rank",), kwargs={"end": "!"})
    assert torch.equal(found["x"], torch.full((3,), 1.5))
    assert found["parent"] == os.getpid()
    assert found["session"] == found["pid"] != os.getpid()
    printed = capsys.readouterr()
    assert sorted(printed.out.splitlines()) == [f"[rank {n}] rank {n} of 3!" for n in range(3)]
    assert sorted(printed.err.splitlines()) == [f"[rank {n}] to stderr" for n in range(3)]
    assert not Path(f"/proc/{found['pid']}").exists()


def test_ranks_compute_with_several_threads_after_the_parent_has() -> None:
    """A fork of the thread that has computed would hang here."""

    def program() -> tuple[int, float]:
        torch.set_num_threads(2)
        use_torch()
        model = torch.nn.Linear(600, 600)
        ddp = sl.DistributedDataParallel(model) if sl.init() else None
        assert ddp is not None
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        ddp(torch.ones(300, 600)).sum().backward()
        optimizer.step()
        return torch.get_num_threads(), total(1.0)

    with several_threads():
        use_torch()
        assert sl.launch(program, timeout=60) == (2, 3.0)


def test_threads_per_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    num_cores = len(os.sched_getaffinity(0))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert sl.launch(torch.get_num_threads, ranks=1) == num_cores
    assert sl.launch(torch.get_num_threads, ranks=2) == max(1, num_cores // 2)
    assert "OMP_NUM_THREADS" not in os.environ
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert sl.launch(torch.get_num_threads, ranks=2) == torch.get_num_threads()  # as the parent has


def test_one_rank_also_where_the_parent_has_called_init() -> None:
    def program() -> tuple[int, int, float]:
        world = sl.init()
        return world.rank, world.size, total(2.0)

    sl.init()
    try:
        assert sl.mean(1.0) == 1.0
        assert sl.launch(program, ranks=1) == (0, 1, 2.0)
        assert sl.launch(program, ranks=2) == (0, 2, 5.0)
    finally:
        sl.shutdown()


def test_a_spawned_function_of_a_module() -> None:
    assert sl.launch(total, ranks=1, args=(4.0,), method="spawn") == 4.0


def test_from_a_thread() -> None:
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(sl.launch(total, args=(1.0,))))
    thread.start()
    thread.join()
    assert found == [3.0]


def test_an_exit_without_a_result() -> None:
    assert sl.launch(sys.exit, args=(0,)) is None


# ---------------------------------------------------------------------- failures


def failure_of(program: Callable[..., Any], error: type[Exception], **how: Any) -> str:
    with pytest.raises(error) as caught:
        sl.launch(program, **how)
    assert type(caught.value) is error
    return str(caught.value)


def test_the_error_shows_the_rank_that_failed_first_and_its_traceback() -> None:
    def inner() -> None:
        raise KeyError("no such column")

    def program() -> None:
        world = sl.init()
        if world.rank == 1:
            inner()
        sl.barrier()

    text = failure_of(program, PeerFailed)
    assert text.startswith("sl.launch: rank 1 (pid ")
    assert "\nTraceback (most recent call last):\n" in text
    assert "in inner\n" in text
    assert "\nKeyError: 'no such column'" in text
    assert "function_rank.py" not in text


def fail_on_rank_1(not_ended: Path) -> None:
    if os.environ["RANK"] == "1":
        sys.exit("no data")
    threading.Event().wait(60)
    not_ended.touch()


def test_a_rank_that_hangs_after_another_has_failed_is_ended(tmp_path: Path) -> None:
    text = failure_of(fail_on_rank_1, PeerFailed, args=(tmp_path / "not ended",))
    assert "called sys.exit, exit code 1" in text
    assert "no data" in text
    assert not list(tmp_path.iterdir())


def test_a_rank_that_fails_before_the_launcher_waits_for_it_ends_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def watch(guardian: Guardian, mark: str, sessions: Sequence[int]) -> None:
        os.waitid(os.P_PID, sessions[1], os.WEXITED | os.WNOWAIT)

    monkeypatch.setattr(Guardian, "watch", watch)
    assert "no data" in failure_of(fail_on_rank_1, PeerFailed, args=(tmp_path / "not ended",))
    assert not list(tmp_path.iterdir())


def test_a_killed_rank_is_named() -> None:
    def program() -> None:
        world = sl.init()
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        sl.barrier()

    text = failure_of(program, PeerLost)
    assert text.startswith("sl.launch: rank 1 (pid ")
    assert "was killed by SIGKILL" in text


def let_time_be_up_when_one_rank_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the others take to start and to end."""
    running, passed_seconds = function.FunctionRanks._running, 0.0

    def looked(ranks: function.FunctionRanks) -> list[int]:
        nonlocal passed_seconds
        found = running(ranks)
        passed_seconds = 3000.0 if len(found) == 1 else passed_seconds
        return found

    monkeypatch.setattr(function.FunctionRanks, "_running", looked)
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed_seconds)
    monkeypatch.setattr(function, "time", clock)


def test_a_timeout_names_the_ranks_and_shows_their_stacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(function, "_STACKS_SECONDS", 3.0)
    let_time_be_up_when_one_rank_is_left(monkeypatch)

    def waits_forever() -> None:
        (tmp_path / "waits").touch()
        threading.Event().wait()

    def program() -> None:
        if os.environ["RANK"] == "1":
            waits_forever()
        while not (tmp_path / "waits").exists():
            time.sleep(0.001)

    text = failure_of(program, TimeoutError, timeout=2000.0)
    assert text.startswith("sl.launch: expected all ranks to end within 2000 s, but rank 1 of 2 did not.")
    lines = [line for line in capsys.readouterr().err.splitlines() if "in waits_forever" in line]
    assert len(lines) == 1
    assert lines[0].startswith("[rank 1] ")


def test_a_result_that_cannot_be_pickled_says_what_to_return() -> None:
    text = failure_of(lambda: lambda: None, PeerFailed, ranks=1)
    assert "return numbers, text, tensors on the CPU or state dicts" in text


def test_a_local_function_cannot_be_spawned_without_cloudpickle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncline.tools.launch.function.find_spec", lambda name: None)
    text = failure_of(lambda: None, TypeError, method="spawn")
    assert "install cloudpickle, or define the function in a module" in text


def test_inside_of_its_own_rank_it_is_refused() -> None:
    text = failure_of(lambda: sl.launch(total, ranks=1), PeerFailed, ranks=1)
    assert "already rank 0 of 1" in text


def test_fork_is_refused_where_a_process_group_is_initialised(tmp_path: Path) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        text = failure_of(total, SynclineError, method="fork")
        assert "has initialised torch.distributed" in text
    finally:
        dist.destroy_process_group()


# ---------------------------------------------------------------------- the end of the parent

PROGRAM = """
import os, subprocess, tempfile, time
import syncline as sl

tempfile.tempdir = os.environ["TMPDIR"]

def program():
    world = sl.init()
    child = subprocess.Popen(["sleep", "300"])
    try:
        print(os.getpid(), child.pid, flush=True)  # the signal may come as soon as this is read
        time.sleep(300)
    finally:
        print("cleaned up", flush=True)

try:
    sl.launch(program)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_the_parent_ends(number: signal.Signals, forks: Forks, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    parent = forks.start(tmp_path, script, variables={"TMPDIR": str(tmp_path)})
    pids = [int(pid) for line in parent.wait_for_lines(2) for pid in line.split()[2:]]
    assert len(pids) == 4
    assert all(map(is_running, pids))
    assert len(list(tmp_path.glob("syncline_*"))) == 1
    os.kill(parent.pid, number)
    ended = parent.wait()
    if number == signal.SIGINT:
        assert ended.returncode == 0
        *of_ranks, last = ended.stdout.splitlines()[2:]
        assert sorted(of_ranks) == ["[rank 0] cleaned up", "[rank 1] cleaned up"]
        assert last == "interrupted"
    else:
        assert ended.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 30
    while (left := [pid for pid in pids if is_running(pid)] + list(tmp_path.glob("syncline_*"))) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.01)  # the guardian works on
    assert left == []
