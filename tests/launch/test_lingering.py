"""Ranks whose program has ended, but whose process goes on to run."""

from __future__ import annotations

from pathlib import Path

from forks import Forks
from support.states import wait_until

PROGRAM = """
import atexit, os, time
from pathlib import Path

def wait():
    while not Path("go").exists():
        time.sleep(0.01)

atexit.register(wait)
Path(f"pid{os.environ['RANK']}").write_text(str(os.getpid()))
"""

LAUNCHER = """
import sys
from syncline.tools.cli import main
from syncline.tools.launch import stopping

stopping._LINGERING_SECONDS = 1.5
sys.exit(main(["run", "-n", "2", "program.py"]))
"""


def test_a_rank_that_lingers_is_named_once_and_not_ended(forks: Forks, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    launcher = forks.start(tmp_path, tmp_path / "launcher.py", warm_ranks=True)
    wait_until(lambda: launcher.error().count("\n") >= 2 or launcher.has_ended)
    assert not launcher.has_ended, launcher.error()
    (tmp_path / "go").touch()
    done = launcher.wait()
    assert done.returncode == 0, done.stderr
    pids = [(tmp_path / f"pid{rank}").read_text() for rank in range(2)]
    assert sorted(done.stderr.splitlines()) == [  # one program may have ended before the other
        f"syncline run: rank {rank} (pid {pid}) ended its program 1.5 s ago, but its process still runs: a thread, "
        f"an exit handler or a destructor has not ended. To see where: py-spy dump --pid {pid}"
        for rank, pid in enumerate(pids)
    ]
