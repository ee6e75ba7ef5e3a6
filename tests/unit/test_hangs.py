"""Programs that hang, and what is told of them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hangs
from forks import Forks, is_running
from support.states import wait_until
from syncline.testing import pool

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

_HANG = """
import os, pathlib, subprocess, sys, threading

def {name}_waits_for_ever():
    name = "{name}" + os.environ.get("RANK", "")
    pathlib.Path(f"{{name}}.part").write_text(str(os.getpid()))
    pathlib.Path(f"{{name}}.part").rename(name)
    threading.Event().wait()
"""

CHILD = _HANG.format(name="child") + "child_waits_for_ever()"
STARTS_CHILD = _HANG.format(name="parent") + (
    f"subprocess.Popen([sys.executable, '-c', {CHILD!r}], start_new_session=True)\n"
)
PARENT = STARTS_CHILD + "parent_waits_for_ever()"


def started(folder: Path, program: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=folder,
        env=os.environ | hangs.FAULTHANDLER | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def hung(folder: Path, *names: str) -> list[int]:
    """Wait until these processes hang, and return their numbers."""
    wait_until(lambda: all((folder / name).exists() for name in names), lambda: list(folder.iterdir()))
    return [int((folder / name).read_text()) for name in names]


def test_the_error_has_the_stacks_of_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hangs, "_HANDING_ON_SECONDS", 0.0)  # the parent hangs, too
    with started(tmp_path, PARENT) as process:
        pids = hung(tmp_path, "parent", "child")
        with pytest.raises(TimeoutError, match=r"no end after 0\.1 s") as raised:
            hangs.communicate(process, 0.1)
    assert "in parent_waits_for_ever" in str(raised.value)
    assert "in child_waits_for_ever" in str(raised.value)
    assert not any(map(is_running, pids))


def test_a_process_whose_parent_has_ended_is_found_by_its_mark(tmp_path: Path) -> None:
    with started(tmp_path, STARTS_CHILD, MARK="of-this-test") as process:
        pids = hung(tmp_path, "child")
        with pytest.raises(TimeoutError, match="in child_waits_for_ever"):
            hangs.communicate(process, 0.1, mark="MARK=of-this-test")
    assert not any(map(is_running, pids))


def test_what_ends_in_time_has_its_output_and_exit_code() -> None:
    program = "import os, sys; print(input()); print('error', file=sys.stderr); sys.exit(os.environ['CODE'])"
    done = hangs.run([sys.executable, "-c", program], input="a\n", env=os.environ | {"CODE": "b"})
    assert (done.returncode, done.stdout, done.stderr) == (1, "a\n", "error\nb\n")
    both = hangs.run([sys.executable, "-c", "import sys; sys.exit('b')"], stderr=subprocess.STDOUT)
    assert (both.stdout, both.stderr) == ("b\n", None)
    with pytest.raises(subprocess.CalledProcessError):
        hangs.run(["false"], check=True)


@pytest.mark.parametrize("warm_ranks", [False, True])
def test_a_launcher_hands_on_the_stacks_of_its_ranks(
    forks: Forks, tmp_path: Path, warm_ranks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hangs, "_HANDING_ON_SECONDS", hangs.HANG_SECONDS)  # the launcher does not hang
    (tmp_path / "program.py").write_text(CHILD)
    launcher = forks.launch(tmp_path, "-n", 2, "program.py", warm_ranks=warm_ranks)
    pids = hung(tmp_path, "child0", "child1")
    with pytest.raises(TimeoutError) as raised:
        launcher.wait(0.1)
    lines = str(raised.value).splitlines()
    for rank in range(2):
        assert any(line.startswith(f"[rank {rank}]") and "in child_waits_for_ever" in line for line in lines)
    assert not any(map(is_running, [*pids, launcher.pid]))


def test_the_pool_shows_where_a_process_hangs_that_does_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hanging.py").write_text(CHILD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pool, "WORKER", "hanging")
    monkeypatch.setattr(pool, "_START_SECONDS", 0.1)
    with contextlib.closing(pool.Template(tmp_path / "output")) as template:
        hung(tmp_path, "child")
        with pytest.raises(RuntimeError, match=r"(?s)did not answer within 0\.1 s.*in child_waits_for_ever"):
            template.ask(0)
