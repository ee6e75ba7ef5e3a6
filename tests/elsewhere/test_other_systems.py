"""macOS and Windows, as far as they show without such a machine: what Syncline's own code asks of the system.

`other_system.py` hides what the system lacks; the type checker knows it from the standard library's stubs.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import hangs
from syncline.testing import held_port

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("other_system.py")

NEEDS_LINUX_OR_MACOS = ("tools/", "testing/")
"""The launcher, the benchmarks and the rank pool."""
NEEDS_LINUX = ("native/", "transport/shared_memory/")


def outputs_of(processes: list[subprocess.Popen[str]]) -> list[str]:
    """What the processes print."""
    outputs = [output for output, _ in hangs.communicate_with_all(processes)]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
    return outputs


def parameters_in(output: str) -> str:
    [found] = [line for line in output.splitlines() if line.startswith("trained:")]
    return found


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", str(PROGRAM), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.real
def test_every_module_is_imported_and_one_process_trains(tmp_path: Path) -> None:
    systems = ("linux", "darwin", "win32")
    linux, darwin, win32 = outputs_of([start(system, tmp_path / system) for system in systems])
    assert parameters_in(darwin) == parameters_in(win32) == parameters_in(linux)
    assert (
        "sl.launch needs Linux or macOS, but this system is Windows: start the ranks with torchrun" in win32
    )


@pytest.mark.real
@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_two_ranks_train_over_gloo(system: str, tmp_path: Path) -> None:
    with held_port() as port:
        first, second = outputs_of([start(system, tmp_path, rank, 2, port) for rank in range(2)])
    assert parameters_in(first) == parameters_in(second)


@pytest.mark.real
@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_the_type_checker_finds_every_name_on_the_other_system(system: str, tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    switches = (
        "--follow-imports",
        "skip",
        "--cache-dir",
        str(tmp_path),
    )  # the standard library is still read
    command = [sys.executable, "-m", "mypy", "--platform", system, *switches, "src"]
    output = hangs.run(command, cwd=ROOT, timeout_seconds=600).stdout
    files = set(re.findall(r"^src/syncline/(.+?):\d+: error: Module has no attribute", output, re.MULTILINE))
    assert any(name.startswith(NEEDS_LINUX) for name in files), output  # else this test cannot fail
    allowed = NEEDS_LINUX if system == "darwin" else (*NEEDS_LINUX, *NEEDS_LINUX_OR_MACOS)
    assert not [name for name in files if not name.startswith(allowed)], output
