"""`@pytest.mark.ranks(n)`: what a test sees in its ranks, and what its author is told when one of them fails."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hangs
from forks import is_running
from support.states import wait_until

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
@pytest.mark.parametrize("nth", [0, 1])
def test_what_is_patched_is_so_in_one_test(nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert dist.is_available()
    if nth == 0:
        monkeypatch.setattr(dist, "is_available", lambda: False)


@pytest.mark.ranks(2)
def test_warnings_are_errors_as_configured() -> None:
    import warnings

    with pytest.raises(UserWarning, match="careful"):
        warnings.warn("careful", stacklevel=1)


@pytest.mark.ranks(3, killed=[1])
def test_a_rank_may_be_killed_when_that_is_the_test() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


# ---------------------------------------------------------------------- what the author is told

_FAILING = """
import os, pathlib, signal, time
import pytest
import torch.distributed as dist

@pytest.mark.ranks(2)
def test_one_rank_fails():
    print("printed on", dist.get_rank())
    assert [1, 2] == [1, 3 - dist.get_rank()]

@pytest.mark.ranks(3)
def test_all_ranks_fail_alike():
    raise KeyError("the same everywhere")

@pytest.mark.ranks(4, timeout=5)
def test_ranks_end_in_many_ways():
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if dist.get_rank() == 1:
        os._exit(7)
    if dist.get_rank() == 2:
        sleeping_beauty()

def sleeping_beauty():
    time.sleep(1000)

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

@pytest.mark.ranks(2, killed=[2])
def test_a_rank_that_is_none():
    pass

@pytest.mark.ranks(2)
def test_a_rank_may_skip():
    if dist.get_rank() == 1:
        pytest.skip("rank 1 has no time")

@pytest.mark.ranks(2)
def test_a_rank_may_fail_as_expected():
    if dist.get_rank() == 1:
        pytest.xfail("rank 1 is young")

@pytest.mark.ranks(2)
def test_that_passes_and_a_rank_dies_in_the_end():
    def die():
        os.write(2, b"last words")
        os._exit(3)

    if dist.get_rank() == 1:
        dist.destroy_process_group = die

@pytest.mark.ranks(2)
def test_for_which_a_rank_has_died():
    pass

@pytest.mark.ranks(2)
@pytest.mark.parametrize("folder", [pathlib.Path(__file__).parent])
def test_the_pool_goes_on(folder):
    dist.barrier()
    folder.joinpath(f"pid-{dist.get_rank()}").write_text(str(os.getpid()))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pytest has run the tests above."""
    folder = tmp_path_factory.mktemp("failing")
    (folder / "test_failing.py").write_text(_FAILING)
    (folder / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-ra", "-p", "no:cacheprovider"]
    ended = hangs.run(command, cwd=folder)
    (folder / "report.txt").write_text(ended.stdout)
    return folder


@pytest.fixture
def report(folder: Path) -> str:
    """What pytest has printed for them."""
    return (folder / "report.txt").read_text()


def _section(report: str, test: str) -> str:
    """The report of one failed test."""
    found = re.search(rf"^_+ {test}(\[.*\])? _+$(.*?)^(_+ test_|=+ )", report, re.DOTALL | re.MULTILINE)
    assert found, report
    return found.group(2)


@pytest.mark.real
def test_a_failing_rank_is_named_with_its_assertion_and_its_output(report: str) -> None:
    text = _section(report, "test_one_rank_fails")
    assert "rank 0 failed" in text
    assert "AssertionError: assert [1, 2] == [1, 3]" in text
    assert "At index 1 diff: 2 != 3" in text, "assertions are rewritten in the ranks, too"
    assert "printed on 0" in text
    assert "rank 1 passed" in text


@pytest.mark.real
def test_equal_failures_are_printed_once(report: str) -> None:
    text = _section(report, "test_all_ranks_fail_alike")
    assert "ranks 0-2 failed" in text
    assert text.count("KeyError: 'the same everywhere'") == 1


@pytest.mark.real
def test_each_rank_is_named_with_its_end(report: str) -> None:
    text = _section(report, "test_ranks_end_in_many_ways")
    assert "rank 0 failed\nthe process ended by signal SIGKILL" in text
    assert "rank 1 failed\nthe process ended with exit code 7" in text
    assert "rank 2 stuck\n" in text
    assert "in sleeping_beauty" in text
    assert "rank 3 passed" in text
    lives = _section(report, "test_a_rank_that_was_to_be_killed_lives")
    assert "rank 0 failed\nexpected the process to be killed (SIGKILL), but the test ended normally" in lives


@pytest.mark.real
def test_a_rank_that_has_died_since_the_last_test_has_its_last_words(report: str) -> None:
    text = _section(report, "test_for_which_a_rank_has_died")
    assert "rank 1 failed\nthe process ended with exit code 3" in text
    assert "last words" in text


@pytest.mark.real
def test_misuse_is_explained(report: str) -> None:
    assert "the argument 'value' (function) cannot be sent" in report
    assert "expected at least 1 rank, got 0" in report
    assert "ranks(2, killed=[2]): expected ranks between 0 and 1" in report


@pytest.mark.real
def test_a_rank_may_skip_or_fail_as_expected(report: str) -> None:
    assert re.search(r"SKIPPED \[1\] test_failing.py:\d+: rank 1 has no time", report)
    assert "XFAIL test_failing.py::test_a_rank_may_fail_as_expected - rank 1 is young" in report


@pytest.mark.real
def test_the_pool_goes_on_after_failures(report: str) -> None:
    assert "8 failed, 2 passed, 1 skipped, 1 xfailed" in report


# ---------------------------------------------------------------------- no process is left behind


def _wait_until_gone(folder: Path) -> None:
    pids = [int(path.read_text()) for path in folder.glob("pid-*")]
    assert len(pids) == 2
    wait_until(lambda: not any(map(is_running, pids)), lambda: f"processes left behind: {pids}")


_ENDLESS = """
import os, pathlib, time
import pytest

@pytest.mark.ranks(2)
@pytest.mark.parametrize("folder", [pathlib.Path(__file__).parent])
def test_endless(folder):
    draft = folder / f"draft-{os.environ['RANK']}"
    draft.write_text(str(os.getpid()))
    draft.rename(folder / f"pid-{os.environ['RANK']}")
    time.sleep(1000)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.real
def test_no_process_is_left_behind_at_the_end(folder: Path) -> None:
    _wait_until_gone(folder)


@pytest.mark.real
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_is_left_behind_by_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_endless.py").write_text(_ENDLESS)
    # A shell starts what runs in its background with SIGINT ignored, and processes inherit that.
    code = "import pytest, signal; signal.signal(2, signal.default_int_handler); pytest.main(['-q'])"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) as pytest_process:
        wait_until(lambda: len(list(tmp_path.glob("pid-*"))) == 2 or pytest_process.poll() is not None)
        assert pytest_process.poll() is None
        pytest_process.send_signal(number)
    _wait_until_gone(tmp_path)
