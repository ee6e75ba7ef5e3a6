"""The pages of docs/start: the first run prints what its page shows, and the scripts of the other page run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hangs

START = Path(__file__).parents[2] / "docs" / "start"
PAGE = (START / "first-run.md").read_text()
TEN_LINES = (START / "ten-lines.md").read_text()
TWO_RANKS, ALONE, WITH_AN_ERROR = re.findall(r"^```console\n\$ (.*?)\n(.*?)^```", PAGE, re.M | re.S)


def words_of(printed: str) -> list[str]:
    """The words of each rank, without what differs from run to run: times, and the conclusion at the end."""
    of_rank: dict[str, list[str]] = {}
    for line in printed.splitlines():
        prefix, text = re.match(r"(\[rank \d\] )?(.*)", line).groups("")  # type: ignore[union-attr]
        of_rank.setdefault(prefix, []).append(text)
    changing = r"[\d.]+ ms|pid \d+ on \S+|\"[^\"]*/train\.py\"|(?<=averages loss with the gradients ).*"
    texts = (f"{prefix}{' '.join(' '.join(lines).split())} " for prefix, lines in sorted(of_rank.items()))
    return [re.sub(changing, "_", text) for text in texts]


def program_of(page: str) -> str:
    """The first program of a page."""
    code = re.search(r"^```python\n(.*?)^```", page, re.M | re.S)
    assert code is not None
    return code[1]


def diffs_of(page: str) -> list[tuple[str, str]]:
    """Each diff of a page: the text before the change, and the text after it."""
    diffs = [
        block.splitlines(keepends=True) for block in re.findall(r"^```diff\n(.*?)^```", page, re.M | re.S)
    ]
    assert all(line[0] in " +-\n" for diff in diffs for line in diff)
    return [
        ("".join(line[1:] or line for line in diff if line[0] != "+"),
         "".join(line[1:] or line for line in diff if line[0] != "-"))
        for diff in diffs
    ]  # fmt: skip


COMMANDS = {
    "python": [sys.executable],
    "syncline": [sys.executable, "-m", "syncline"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone"],
}


def run(directory: Path, command: str, code: str) -> subprocess.CompletedProcess[str]:
    (directory / "train.py").write_text(code)
    program, *arguments = command.split()
    return hangs.run(
        [*COMMANDS[program], *arguments],
        cwd=directory,
    )


@pytest.mark.real
@pytest.mark.parametrize("shown", [TWO_RANKS, ALONE], ids=["two ranks", "alone"])
def test_the_first_run_prints_what_the_page_shows(shown: tuple[str, str], tmp_path: Path) -> None:
    command, output = shown
    done = run(tmp_path, command, program_of(PAGE))
    assert (done.returncode, done.stderr) == (0, "")
    assert words_of(done.stdout) == words_of(output)


@pytest.mark.real
def test_an_error_on_one_rank_ends_the_output_as_the_page_shows(tmp_path: Path) -> None:
    command, output = WITH_AN_ERROR
    [(before, after)] = diffs_of(PAGE)
    assert program_of(PAGE).count(before) == 1
    done = run(tmp_path, command, program_of(PAGE).replace(before, after))
    assert done.returncode == 1
    shown = output.removeprefix("...\n")
    assert words_of("\n".join(done.stderr.splitlines()[-len(shown.splitlines()) :])) == words_of(shown)


def test_the_loop_of_ten_lines_is_the_result_of_its_diff() -> None:
    [(_, after), _] = diffs_of(TEN_LINES)
    end = "if world.rank == 0:\n"
    assert program_of(TEN_LINES).partition(end)[0] == after.partition(end)[0]


@pytest.mark.real
def test_the_scripts_of_ten_lines_run_before_and_after_each_change(tmp_path: Path) -> None:
    one_process, with_torch = diffs_of(TEN_LINES)
    saved = []
    for code, command in zip(one_process, ("python train.py", "syncline run -n 2 train.py"), strict=True):
        done = run(tmp_path, command, code)
        assert done.returncode == 0, done.stderr
        saved.append(torch.load(tmp_path / "model.pt").keys())
        (tmp_path / "model.pt").unlink()
    assert saved == [{"weight", "bias"}] * 2
    for code in with_torch:
        for _ in range(3):
            done = run(tmp_path, "torchrun --nproc-per-node 2 train.py", code)
            if "terminate called without an active exception" not in done.stderr:
                break  # otherwise a thread of Gloo has outlived the interpreter: seen with torch's own class, too
        assert done.returncode == 0, f"{code}\n{done.stderr}"
