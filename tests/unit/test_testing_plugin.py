"""`@pytest.mark.ranks(n)`: what a test sees in its ranks, and what its author is told when one of them fails."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest_plugins = ["pytester"]


# ---------------------------------------------------------------------- what a rank sees


@pytest.mark.ranks(3)
def test_a_rank_has_its_environment_and_a_process_group() -> None:
    rank = dist.get_rank()
    assert os.environ["RANK"] == os.environ["LOCAL_RANK"] == str(rank)
    assert os.environ["WORLD_SIZE"] == os.environ["LOCAL_WORLD_SIZE"] == "3"
    assert os.environ["MASTER_ADDR"] == "127.0.0.1"
    assert int(os.environ["MASTER_PORT"]) > 0
    assert torch.get_num_threads() == 1
    ranks = torch.tensor([float(rank)])
    dist.all_reduce(ranks)
    assert ranks.item() == 3


@pytest.mark.ranks(2)
@pytest.mark.parametrize("value", [torch.arange(3), {"dtype": torch.bfloat16}], ids=["tensor", "dict"])
def test_parameters_and_fixtures_reach_the_ranks(value: object, tmp_path: Path) -> None:
    assert tmp_path.is_dir(), "made by pytest's own process"
    if isinstance(value, torch.Tensor):
        assert value.tolist() == [0, 1, 2]
    else:
        assert value == {"dtype": torch.bfloat16}


class TestInAClass:
    @pytest.mark.ranks(2)
    def test_a_method_works_too(self) -> None:
        assert type(self).__name__ == "TestInAClass"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("nth", [0, 1])
def test_a_broken_group_does_not_reach_the_next_test(nth: int) -> None:
    if nth == 0:
        dist.destroy_process_group()
        return
    dist.barrier()


@pytest.mark.ranks(2)
def test_warnings_are_errors_as_configured() -> None:
    import warnings

    with pytest.raises(UserWarning, match="careful"):
        warnings.warn("careful", stacklevel=1)


@pytest.mark.ranks(2)
def test_a_rank_may_skip() -> None:
    if dist.get_rank() == 1:
        pytest.skip("rank 1 has no time")


@pytest.mark.ranks(3, killed=[1])
def test_a_rank_may_be_killed_when_that_is_the_test() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


# ---------------------------------------------------------------------- what the author is told

_FAILING = """
    import os, signal, time
    import pytest
    import torch.distributed as dist

    @pytest.mark.ranks(2)
    def test_one_rank_fails():
        print("printed on", dist.get_rank())
        assert [1, 2] == [1, 3 - dist.get_rank()]

    @pytest.mark.ranks(3)
    def test_all_ranks_fail_alike():
        raise KeyError("the same everywhere")

    @pytest.mark.ranks(2, timeout=1)
    def test_one_rank_hangs():
        if dist.get_rank() == 1:
            sleeping_beauty()

    def sleeping_beauty():
        time.sleep(1000)

    @pytest.mark.ranks(2)
    def test_one_rank_dies():
        if dist.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    @pytest.mark.ranks(2)
    def test_one_rank_leaves():
        if dist.get_rank() == 0:
            os._exit(7)

    @pytest.mark.ranks(2, killed=[0])
    def test_a_rank_that_was_to_be_killed_lives():
        pass

    @pytest.mark.ranks(2)
    @pytest.mark.parametrize("value", [lambda: 0])
    def test_a_value_that_cannot_be_sent(value):
        pass

    @pytest.mark.ranks(0)
    def test_no_ranks():
        pass

    @pytest.mark.ranks(2)
    def test_the_pool_goes_on():
        dist.barrier()
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What pytest prints for the failing tests above."""
    folder = tmp_path_factory.mktemp("failing")
    lines = [line.removeprefix("    ") for line in _FAILING.splitlines()]
    (folder / "test_failing.py").write_text("\n".join(lines))
    (folder / "pytest.ini").write_text("[pytest]\n")
    return _pytest(folder).stdout


def _pytest(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def _section(report: str, test: str) -> str:
    """The report of one failed test."""
    found = re.search(rf"^_+ {test}(\[.*\])? _+$(.*?)^(_+ test_|=+ )", report, re.DOTALL | re.MULTILINE)
    assert found, report
    return found.group(2)


def test_a_failing_rank_is_named_with_its_assertion_and_its_output(report: str) -> None:
    text = _section(report, "test_one_rank_fails")
    assert "rank 1 failed" in text
    assert (
        "assert [1, 2] == [1, 3 - dist.get_rank()]" not in text.replace("    ", "")
        or "At index 1 diff" in text
    )
    assert "AssertionError: assert [1, 2] == [1, 3]" in text.replace("rank 1", "") or "rank 0 failed" in text
    assert "printed on" in text


def test_equal_failures_are_printed_once(report: str) -> None:
    text = _section(report, "test_all_ranks_fail_alike")
    assert "ranks 0, 1, 2 failed" in text
    assert text.count("KeyError: 'the same everywhere'") == 1


def test_a_rank_that_hangs_is_named_with_its_stack(report: str) -> None:
    text = _section(report, "test_one_rank_hangs")
    assert "rank 1 stuck" in text
    assert "in sleeping_beauty" in text
    assert "rank 0 passed" in text


def test_a_rank_that_ends_is_named_with_its_end(report: str) -> None:
    assert "rank 0 failed\nthe process ended by signal SIGKILL" in _section(report, "test_one_rank_dies")
    assert "rank 0 failed\nthe process ended with exit code 7" in _section(report, "test_one_rank_leaves")
    lives = _section(report, "test_a_rank_that_was_to_be_killed_lives")
    assert "rank 0 failed\nended by itself, but was to be killed" in lives


def test_misuse_is_explained(report: str) -> None:
    assert "the argument 'value' (function) cannot be sent" in report
    assert "expected at least 1 rank, got 0" in report


def test_the_pool_goes_on_after_failures(report: str) -> None:
    assert "1 passed" in report


# ---------------------------------------------------------------------- no process is left behind


def _is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False


def _wait_until_gone(pids: list[int], timeout_seconds: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_seconds
    while alive := [pid for pid in pids if _is_alive(pid)]:
        assert time.monotonic() < deadline, f"processes left behind: {alive}"
        time.sleep(0.01)


_ENDLESS = """
import os, pathlib, time
import pytest

@pytest.mark.ranks(2)
def test_endless(tmp_path_factory):
    pass

@pytest.mark.ranks(2)
@pytest.mark.parametrize("folder", [os.environ["PIDS"]])
def test_pids(folder):
    path = pathlib.Path(folder, os.environ["RANK"])
    path.with_suffix(".draft").write_text(str(os.getpid()))
    path.with_suffix(".draft").rename(path)
    if "ENDLESS" in os.environ:
        time.sleep(1000)
    assert "FAIL" not in os.environ
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("end", ["normal", "failed with -x", signal.SIGINT, signal.SIGKILL], ids=str)
def test_no_process_is_left_behind(tmp_path: Path, end: str | signal.Signals) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_ranks.py").write_text(
        _ENDLESS.replace("def test_endless(tmp_path_factory)", "def test_first()")
    )
    env = {**os.environ, "PIDS": str(tmp_path)}
    if isinstance(end, signal.Signals):
        env["ENDLESS"] = "1"
    if end == "failed with -x":
        env["FAIL"] = "1"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    process = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL)
    paths = [tmp_path / "0", tmp_path / "1"]
    deadline = time.monotonic() + 100
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    pids = [int(path.read_text()) for path in paths]
    if isinstance(end, signal.Signals):
        process.send_signal(end)
    process.wait(30)
    _wait_until_gone(pids)
