"""The real thing: saving while somebody kills the process, and onto a disk that is full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import syncline as sl
from failure_rows import record
from forks import Forks
from syncline.transport import run_ranks


@pytest.mark.real
def test_whenever_a_process_is_killed_its_last_save_is_there(tmp_path: Path, forks: Forks) -> None:
    program = Path(__file__).with_name("killed_while_saving.py")
    (tmp_path / "saves").mkdir()
    done = forks.start(tmp_path, program, tmp_path / "saves", 50, 0).wait()
    assert done.returncode == 0, done.stderr
    num_saves, num_met = (int(word) for word in done.stdout.split() if word.isdigit())
    assert num_saves >= 3
    assert num_met >= 3, "it is hardly ever killed in the middle of a save"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """2.5 MB of a file system in memory."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2500k", "syncline", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("may not mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_full_keeps_what_it_has(small_disk: Path) -> None:
    model = torch.nn.Linear(500, 500)  # 1 MB
    state = sl.TrainState(model=model)

    def program(t: Any) -> None:
        checkpointer = sl.Checkpointer(small_disk, keep=5, group=t)
        assert checkpointer.save(state, 1) is not None
        assert checkpointer.save(state, 2, blocking=False).result() is not None
        with pytest.warns(
            RuntimeWarning, match=r"step 3 could not be saved: .*No space left on device"
        ) as warned:
            assert checkpointer.save(state, 3) is None
        record("full disk", "", f"RuntimeWarning: {warned[0].message}")
        assert checkpointer.load(state) == 2
        assert sorted(path.name for path in small_disk.iterdir()) == [
            "save-000001-step-1",
            "save-000002-step-2",
        ]

    run_ranks(1, program)
