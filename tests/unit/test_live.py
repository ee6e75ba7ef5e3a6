"""The picture of `syncline run --live`: how it is drawn on a terminal, and which ranks it shows until when."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from made_traces import MadeRank, MadeRun, rows

from syncline.tools.watch import follow
from syncline.tools.watch.follow import Follower
from syncline.tools.watch.live import Terminal, picture
from syncline.tools.watch.ranks import have_hung
from terminals import SeenTerminal, seen

# ---------------------------------------------------------------------- the terminal


def test_lines_appear_above_the_picture() -> None:
    with SeenTerminal(columns=20) as shown:
        terminal = Terminal(shown.fd)
        terminal.draw(["--- 1 ---", "first"])
        terminal.print(b"a line\nanother one that is longer than the terminal\n")
        terminal.draw(["--- 2 ---", "a picture that is longer than the terminal", ""])
        terminal.print(b"the last line\n")
        assert shown.lines() == [
            *("a line", "another one that is ", "longer than the term", "inal", "the last line"),
            *("--- 2 ---", "a picture that is l", "", ""),
        ]
        terminal.draw([])
        terminal.print(b"after\n")
        assert shown.lines()[4:] == ["the last line", "after", ""]


def test_wide_characters_take_two_columns() -> None:
    with SeenTerminal() as shown:
        terminal = Terminal(shown.fd)
        terminal.draw(["abcd" + "\N{HIRAGANA LETTER A}" * 60])
        (line, _) = shown.lines()
        assert line.count("\N{HIRAGANA LETTER A}") == 47  # 99 columns, of which each takes two


def test_a_terminal_whose_size_is_not_known() -> None:
    ours, theirs = os.openpty()
    try:
        assert Terminal(theirs).size == (80, 24)
    finally:
        os.close(ours)
        os.close(theirs)
    assert Terminal(theirs).size == (80, 24)
    Terminal(theirs).draw(["a terminal that was closed"])


def test_threads_do_not_mix_lines_and_pictures() -> None:
    with SeenTerminal() as shown:
        terminal = Terminal(shown.fd)

        def printing(number: int) -> None:
            for line in range(100):
                terminal.print(f"{number} {line}\n".encode())

        threads = [threading.Thread(target=printing, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for number in range(100):
            terminal.draw([f"picture {number}"] * (1 + number % 3))
        for thread in threads:
            thread.join()
        found = shown.lines()
    assert found[300:] == ["picture 99", ""]
    assert sorted(found[:300]) == sorted(f"{number} {line}" for number in range(3) for line in range(100))


def test_what_is_seen_of_a_text() -> None:
    assert seen("a\r\nb\r\n\033[1A\r\033[Jc") == ["a", "c"]
    assert seen("abcde", columns=2) == ["ab", "cd", "e"]
    with pytest.raises(AssertionError, match=r"\[2J"):
        seen("\033[2J")


# ---------------------------------------------------------------------- the ranks of a launcher

START = "before its first step"

END = rows.EndRow(2 * 10**9, "KeyboardInterrupt")


class Clock:
    """Both clocks of this process, as far as what follows a trace knows them."""

    now = 0.0

    def time(self) -> float:
        return self.now

    monotonic = time


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "time", Clock())


def recorded(num_ranks: int) -> list[list[rows.Row]]:
    return MadeRun(ranks=[MadeRank()] * num_ranks).rows()


def record(directory: Path, number: int, found: Sequence[rows.Row], *, at: float, host: str = "a") -> None:
    """Append rows to the file of a process, as at a time."""
    path = directory / f"rank-{number:05d}.{host}.{number}.000000.trace.jsonl"
    with path.open("ab") as file:
        file.write(b"".join(map(rows.encode, found)))
    os.utime(path, (at, at))


def started(directory: Path) -> Follower:
    ranks = Follower(directory, host="host one")
    ranks.start([0, 1], 90.0)
    return ranks


def looked(ranks: Follower, now: float) -> str:
    Clock.now = now
    return "\n".join(picture(ranks.present(), now, 100, 24))


def test_the_picture_follows_the_ranks(tmp_path: Path) -> None:
    directory = tmp_path / "trace"
    ranks = started(directory)
    assert looked(ranks, 91.0).count(START) == 2
    directory.mkdir()
    for number, found in enumerate(recorded(2)):
        record(directory, number, found, at=100.0)
        assert looked(ranks, 101.0).count(START) == 1 - number
    text = looked(ranks, 101.0)
    assert text.startswith("--- the ranks ---")
    assert "Training" in text
    assert not have_hung(ranks.present(), 101.0)


def test_the_ranks_of_another_attempt_replace_the_first(tmp_path: Path) -> None:
    ranks = started(tmp_path)
    for number, found in enumerate(recorded(2)):
        record(tmp_path, number, [*found, rows.EndRow(10**9, "ValueError: bad")], at=100.0)
    assert "ValueError" in looked(ranks, 101.0)
    ranks.start([0, 1], 102.0)
    assert looked(ranks, 103.0).count(START) == 2
    forward = rows.ForwardRow("Net", 21, 10**9, 10**9, 10**9, True, 0)
    record(tmp_path, 0, [forward], at=103.0)  # of the former process 0
    record(tmp_path, 7, recorded(2)[1], at=104.0)
    assert looked(ranks, 105.0).count(START) == 1


def hanging(directory: Path) -> Follower:
    """Two ranks that have been shown as ranks that hang."""
    ranks = started(directory)
    for number, found in enumerate(recorded(2)):
        record(directory, number, found, at=100.0)
        place = rows.PlaceRow(10**9, 21, f"step 21, waiting in all_reduce, at train.py:{number}")
        record(directory, number, [place], at=130.0)
    assert "at train.py:1" in looked(ranks, 131.0)
    return ranks


def test_where_ranks_stood_stays_when_they_are_ended(tmp_path: Path) -> None:
    ranks = hanging(tmp_path)
    assert have_hung(ranks.present(), 131.0)
    for number in range(2):
        record(tmp_path, number, [END], at=132.0 + 2 * number)
        text = looked(ranks, 133.0 + 2 * number)
        assert "at train.py:1" in text
        assert "All of them wait" in text
    assert have_hung(ranks.present(), 136.0)


def test_ranks_that_went_on_or_ended_by_themselves_did_not_hang(tmp_path: Path) -> None:
    """After their last step, ranks may for example evaluate for long, which is not recorded."""
    ranks = hanging(tmp_path)
    for number in range(2):
        record(tmp_path, number, [END._replace(error="")], at=132.0)
    assert "All ranks have ended." in looked(ranks, 133.0)
    assert not have_hung(ranks.present(), 133.0)
    other = tmp_path / "other"
    other.mkdir()
    ranks = hanging(other)
    for number in range(2):
        went_on = [rows.CallRow("mean", 10**9, 2 * 10**9), END._replace(error="ValueError: bad")]
        record(other, number, went_on, at=132.0)
    assert "All ranks have ended, ranks 0, 1 with an error." in looked(ranks, 133.0)
    assert not have_hung(ranks.present(), 133.0)


def test_ranks_that_record_nothing_do_not_hang(tmp_path: Path) -> None:
    """They import packages for long, or make no step with Syncline."""
    ranks = started(tmp_path)
    for number, found in enumerate(recorded(2)):
        record(tmp_path, number, found[:1], at=100.0)
    assert "No rank has ended a step yet" in looked(ranks, 200.0)
    record(tmp_path, 0, [END._replace(error="ValueError: bad")], at=201.0)
    assert not have_hung(ranks.present(), 201.0)


def test_only_the_ranks_of_this_host_are_shown(tmp_path: Path) -> None:
    ranks = Follower(tmp_path, host="host one")
    ranks.start([2, 3], 90.0)
    for number, (process, *found) in enumerate(recorded(4)):
        assert isinstance(process, rows.ProcessRow)
        host = "host one" if number > 1 else "other"
        record(tmp_path, number, [process._replace(host=host), *found], at=100.0, host=host)
    text = looked(ranks, 101.0)
    assert text.startswith("--- the ranks of this host (2 of 4) ---")
    assert [line.split()[0] for line in text.splitlines()[2:4]] == ["2", "3"]
