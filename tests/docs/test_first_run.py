"""The first page of the documentation shows what its program prints: on two ranks, alone, and with an error."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs/start/first-run.md").read_text()
TWO_RANKS, ALONE, WITH_AN_ERROR = re.findall(r"^```console\n\$ (.*?)\n(.*?)^```", PAGE, re.M | re.S)


def words_of(printed: str) -> list[str]:
    """The words of each rank, without what differs from run to run: times, and the conclusion at the end."""
    of_rank: dict[str, list[str]] = {}
    for line in printed.splitlines():
        prefix, text = re.match(r"(\[rank \d\] )?(.*)", line).groups("")  # type: ignore[union-attr]
        of_rank.setdefault(prefix, []).append(text)
    changing = r"[\d.]+ ms|pid \d+ on \S+|\"[^\"]*/train\.py\"|(?<=averages loss behind the gradients ).*"
    texts = (f"{prefix}{' '.join(' '.join(lines).split())} " for prefix, lines in sorted(of_rank.items()))
    return [re.sub(changing, "_", text) for text in texts]


def run(directory: Path, command: str, *, added: str = "") -> subprocess.CompletedProcess[str]:
    code = re.search(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    assert code is not None
    (directory / "train.py").write_text(code[1].replace("sl.shutdown()", f"{added}sl.shutdown()"))
    program, *arguments = command.split()
    start = [sys.executable] if program == "python" else [sys.executable, "-m", "syncline.tools.cli"]
    return subprocess.run(
        [*start, *arguments], cwd=directory, text=True, capture_output=True, timeout=300, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize("shown", [TWO_RANKS, ALONE], ids=["two ranks", "alone"])
def test_the_first_run_prints_what_the_page_shows(shown: tuple[str, str], tmp_path: Path) -> None:
    command, output = shown
    done = run(tmp_path, command)
    assert (done.returncode, done.stderr) == (0, "")
    assert words_of(done.stdout) == words_of(output)


@pytest.mark.slow
def test_an_error_on_one_rank_ends_the_output_as_the_page_shows(tmp_path: Path) -> None:
    command, output = WITH_AN_ERROR
    (added,) = re.findall(r"^```text\n(if .*?)^```", PAGE, re.M | re.S)
    done = run(tmp_path, command, added=added)
    assert done.returncode == 1
    shown = output.removeprefix("...\n")
    assert words_of("\n".join(done.stderr.splitlines()[-len(shown.splitlines()) :])) == words_of(shown)
