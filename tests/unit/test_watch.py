"""`syncline watch`: the present state of each rank, where a run hangs, and how the picture of it is drawn."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_traces import MadeRank, MadeRun, rows, written

from support.goldens import assert_golden
from syncline.tools.cli import main
from syncline.tools.watch import follow
from syncline.tools.watch.follow import Follower
from syncline.tools.watch.ranks import RankState, have_hung, meaning, present, screen

FILE = "rank-00000.host.1.000000.trace.jsonl"

LATE = [MadeRank(), MadeRank(data=5100)]


def states(*ranks: MadeRank, at: float = 100.0, **settings: Any) -> list[RankState]:
    """The states of ranks whose last row was written at a time."""
    found = []
    for recorded in MadeRun(ranks=ranks, **settings).rows():
        found.append(RankState())
        found[-1].add(recorded, at)
    return found


def hang(words: str, *ranks: RankState, at: float = 130.0) -> None:
    """Let ranks record nothing more but where they are."""
    for one in ranks:
        one.add([rows.PlaceRow(int(1e12), one.step + 1, words)], at)


def end(error: str, *ranks: RankState, at: float = 130.0) -> None:
    for one in ranks:
        one.add([rows.EndRow(1, error)], at)


# ---------------------------------------------------------------------- what a run means


def test_steps_times_and_waits_of_ranks_that_train() -> None:
    found = states(*LATE)
    assert [one.step for one in found] == [20, 20]
    assert found[0].step_seconds == pytest.approx(0.00861, abs=1e-4)
    assert found[0].waiting_share == pytest.approx(0.58, abs=0.01)
    assert found[1].waiting_share < 0.01
    assert "the others wait 58 % of the time, rank 1 0 % (medians)" in meaning(found, 100.5)
    assert "no rank waits much longer" in meaning(states(MadeRank(), MadeRank()), 100.5)
    assert meaning(states(*LATE, num_steps=5), 100.5) == "Training.", "few steps say nothing"
    long = states(*[MadeRank(backward=3_000_000)] * 2)
    assert "Training" in meaning(long, 125.0), "a long step is no hang"
    assert "No rank has made progress" in meaning(long, 135.0)


def test_a_run_that_hangs_names_the_rank_that_does_not_wait() -> None:
    found = states(*[MadeRank()] * 3)
    hang("step 21, backward, bucket 0, waiting in all_reduce, at train.py:7", found[0], found[2])
    hang("step 20, after backward, at train.py:6 in load", found[1])
    assert_golden("watch", screen(found, now=131.0))
    hang("step 21, waiting in sl.mean", *found)
    assert "All of them wait: compare the calls" in meaning(found, 131.0)


def test_ranks_that_have_ended() -> None:
    found = states(MadeRank(), MadeRank())
    end("", found[0], at=101.0)
    end("PeerLost: rank 3", found[1], at=101.0)
    assert meaning(found, 200.0) == "All ranks have ended, rank 1 with an error."
    assert "ended: PeerLost: rank 3" in screen(found, 200.0)
    found = states(MadeRank(), MadeRank())
    end("KeyboardInterrupt: ", *found, at=101.0)
    text = screen(found, 200.0)
    assert text.count("stopped by Ctrl-C") == 2
    assert "KeyboardInterrupt" not in text


def test_ranks_that_have_not_ended_a_step_yet() -> None:
    found = [RankState(rank, started_at=100.0) for rank in range(2)]
    assert meaning(found, 101.0) == "No rank has ended two steps yet."
    assert "before its first step" in screen(found, 101.0)
    assert meaning(found, 105.1) == "No rank has ended a step yet: starting, 5 s."
    hang("before the first step, waiting in sl.mean, at a.py:3", found[0])
    text = meaning(found, 131.0)
    assert text.startswith(
        "No rank has ended a step yet: starting, 31 s. Waiting for others: rank 0. Not waiting, so look there"
    )


def test_a_rank_whose_number_changes() -> None:
    (one,) = states(MadeRank())
    one.add([rows.RanksRow(4, 5, 21, "rank 1 of 6 was lost", 1, 2)], 101.0)
    assert one.rank == 4


def test_a_process_without_a_sign_of_life_and_one_that_replaces_it() -> None:
    found = states(MadeRank(), MadeRank())
    hang("step 21, waiting in all_reduce", *found, at=101.0)
    hang("step 21, waiting in all_reduce", found[0], at=140.0)
    text = screen(found, now=141.0)
    assert "No sign of life: rank 1." in text
    assert "its process was killed, or is stopped" in " ".join(text.split())
    newer = states(MadeRank(), MadeRank(), at=140.0)[1]
    assert newer.process is not None
    newer.process = newer.process._replace(unix_seconds=2e9)
    assert present([*found, newer]) == [found[0], newer]


def test_a_rank_that_was_lost_is_no_longer_there_once_the_others_know() -> None:
    found = states(*[MadeRank()] * 3)
    assert present(found) == found
    for one in (found[0], found[1]):
        assert one.process is not None
        one.add([one.process._replace(num_ranks=2, unix_seconds=2e9)], 101.0)
    assert present(found) == found[:2]


def test_a_run_hangs_if_all_do_that_have_not_ended_by_themselves() -> None:
    found = states(*[MadeRank()] * 3)
    assert not have_hung(found, 101.0)
    assert have_hung(found, 131.0)
    found[0].add([rows.CallRow("mean", 10**9, 10**9)], 131.0)
    assert not have_hung(found, 132.0)
    end("", found[0], at=132.0)
    assert have_hung(found, 133.0)
    end("KeyboardInterrupt: ", found[1], at=134.0)
    end("", found[2], at=134.0)
    assert have_hung(found, 200.0)
    assert "before the forward; stopped by Ctrl-C" in screen(found, 200.0)


def test_micro_batches_are_one_step() -> None:
    one = RankState()
    for step in range(1, 6):
        for micro in range(4):
            at = 1_000_000 * step + 100_000 * micro
            buckets = [(0, at, at, at + 50_000)] if micro > 1 else []
            one.add([rows.BackwardRow("Net", step, at, at + 50_000, 1, micro > 1, buckets, {}, [])], 100.0)
    assert one.step_seconds == pytest.approx(1.0)
    assert one.waiting_share == pytest.approx(0.1)


# ---------------------------------------------------------------------- the picture


def test_long_lines_are_wrapped_below_their_beginning() -> None:
    found = states(MadeRank(), MadeRank())
    hang("step 21, backward, bucket 0, waiting in all_reduce(sum) of 10184 elements, at train.py:7", found[0])
    hang("step 20, at train.py:6 in load", found[1])
    lines = screen(found, 131.0, columns=80).splitlines()
    assert all(len(line) < 80 for line in lines)
    assert lines[2].startswith(" " * 38 + "all_reduce")
    assert "train.py:7" in lines[3]
    assert all(len(line) < 40 for line in screen(found, 131.0, columns=40).splitlines()[1:])


def test_if_not_all_ranks_fit_those_are_shown_that_say_most() -> None:
    found = states(*[MadeRank()] * 12)
    hang("step 21, waiting in all_reduce", *found)
    hang("step 20, at train.py:6 in load", found[9])
    end("ValueError: bad", found[10])
    end("", found[0])
    lines = screen(found, 131.0, columns=100, lines=9).splitlines()
    assert [line.split()[0] for line in lines[1:6]] == ["1", "2", "9", "10", "and"]
    assert "and 8 more ranks" in lines[5]
    assert len(lines) <= 9
    assert "look there: rank 9." in " ".join(" ".join(lines).split())


# ---------------------------------------------------------------------- files


def made_lines(num_steps: int = 20) -> list[bytes]:
    (recorded,) = MadeRun(ranks=[MadeRank()], num_steps=num_steps).rows()
    return [rows.encode(row) for row in recorded]


def test_an_age_grows_by_a_clock_that_is_never_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, lines = tmp_path / FILE, made_lines()
    path.write_bytes(b"".join(lines[:10]))
    os.utime(path, (1000.0, 1000.0))
    clock = SimpleNamespace(time=lambda: 1030.0, monotonic=lambda: 50.0)
    monkeypatch.setattr(follow, "time", clock)
    follower = Follower(tmp_path)
    assert [at for _, _, at in follower.new_rows()] == [20.0]
    clock.time, clock.monotonic = lambda: 9000.0, lambda: 60.0  # the system clock was set
    path.write_bytes(b"".join(lines[:12]))
    assert [at for _, _, at in follower.new_rows()] == [60.0]


def test_only_what_is_new_is_read_and_the_next_part_is_followed(tmp_path: Path) -> None:
    path, lines = tmp_path / FILE, made_lines()
    follower = Follower(tmp_path)
    assert list(follower.new_rows()) == []
    path.write_bytes(b"".join(lines[:10]) + lines[10][:5])
    ((name, found, _),) = follower.new_rows()
    assert (name, found) == ("rank-00000.host.1", list(rows.decode(lines[:10])))
    assert list(follower.new_rows()) == []
    path.write_bytes(b"".join(lines[:12]))
    (tmp_path / FILE.replace("000000", "000001")).write_bytes(b"".join(lines[12:14]))
    ((_, found, _),) = follower.new_rows()
    assert found == list(rows.decode(lines[10:14]))


def test_of_a_long_file_the_beginning_and_the_end_are_read(tmp_path: Path) -> None:
    lines = made_lines(num_steps=4000)
    (tmp_path / FILE).write_bytes(b"".join(lines))
    ((_, found, _),) = Follower(tmp_path).new_rows()
    assert isinstance(found[0], rows.ProcessRow)
    assert list(rows.decode(lines[-1:])) == found[-1:]
    assert len(found) < len(lines)


def test_watch_ends_with_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = MadeRun(ranks=[MadeRank()] * 2).rows()
    assert main(["watch", str(written(tmp_path, [[*one, rows.EndRow(10**9, "")] for one in recorded]))]) == 0
    out = capsys.readouterr().out
    assert "All ranks have ended." in out
    assert "\033" not in out


def test_a_mistake_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        ("", "required: DIR"),
        ("x --onse", "did you mean --once"),
        ("x --x", "unknown option --x: see syncline watch --help"),
        (f"--once {tmp_path}", f"{tmp_path} has no trace: expected the directory of a trace"),
        (f"--once {tmp_path}/missing", f"{tmp_path}/missing does not exist: expected the directory of a"),
    ):
        assert main(["watch", *arguments.split()]) == 2, arguments
        shown = capsys.readouterr()
        assert words in shown.err, arguments
        assert (shown.out, len(shown.err.splitlines())) == ("", 1), arguments
