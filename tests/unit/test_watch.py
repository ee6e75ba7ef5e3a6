"""`syncline watch`: the present state of each rank, and where a run hangs."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from made_traces import MadeRank, MadeRun, rows

from syncline.tools.cli import main
from syncline.tools.watch import follow
from syncline.tools.watch.follow import Follower
from syncline.tools.watch.ranks import RankState, meaning, present, screen

SUFFIX = ".000000.trace.jsonl"


def states(made: MadeRun, at: float = 100.0) -> list[RankState]:
    """The states of ranks whose last row was written at a time."""
    found = []
    for recorded in made.rows():
        found.append(RankState())
        found[-1].add(recorded, at)
    return found


def hang(one: RankState, words: str, *, after_seconds: float) -> None:
    """Let a rank record nothing more but where it is."""
    last = one.changed_at
    one.add([rows.PlaceRow(int(1e12), one.step + 1, words)], last + after_seconds)


def test_steps_times_and_waits_of_ranks_that_train() -> None:
    found = states(MadeRun(ranks=[MadeRank(), MadeRank(data=5100)]))
    assert [one.step for one in found] == [20, 20]
    assert found[0].step_seconds == pytest.approx(0.00861, abs=1e-4)
    assert found[0].waiting_share == pytest.approx(0.58, abs=0.01)
    assert found[1].waiting_share < 0.01
    text = screen(found, now=100.5)
    assert "before the forward" in text
    assert "Training; the others wait 58 % of the time, rank 1 0 % (medians): they wait for it." in text


def test_ranks_that_wait_alike() -> None:
    found = states(MadeRun(ranks=[MadeRank(), MadeRank()]))
    assert meaning(found, 100.5) == "Training; no rank waits much longer than the others."


def test_a_run_that_hangs_names_the_rank_that_does_not_wait() -> None:
    found = states(MadeRun(ranks=[MadeRank()] * 3))
    for rank in (0, 2):
        hang(
            found[rank], "step 21, backward, bucket 0, waiting in all_reduce, at train.py:7", after_seconds=30
        )
    hang(found[1], "step 20, after backward, at train.py:6 in load", after_seconds=30)
    text = screen(found, now=131.0)
    assert "step 20, after backward, at train.py:6 in load" in text
    assert "No rank has made progress for 31 s. Ranks 0, 2 wait for others; rank 1 does not" in text


def test_a_run_that_hangs_in_different_calls() -> None:
    found = states(MadeRun(ranks=[MadeRank()] * 2))
    for one in found:
        hang(one, "step 21, waiting in sl.mean", after_seconds=30)
    assert "All of them wait: compare the calls" in meaning(found, 131.0)


def test_a_long_step_is_no_hang() -> None:
    found = states(MadeRun(ranks=[MadeRank(backward=3_000_000)] * 2))
    assert "Training" in meaning(found, 125.0)
    assert "No rank has made progress" in meaning(found, 135.0)


def test_ranks_that_have_ended() -> None:
    found = states(MadeRun(ranks=[MadeRank()] * 2))
    found[0].add([rows.EndRow(1, "")], 101.0)
    found[1].add([rows.EndRow(1, "PeerLost: rank 3")], 101.0)
    assert meaning(found, 200.0) == "All ranks have ended, rank 1 with an error."
    assert "ended: PeerLost: rank 3" in screen(found, 200.0)


def test_a_rank_whose_number_changes() -> None:
    (one,) = states(MadeRun(ranks=[MadeRank()]))
    one.add([rows.RanksRow(4, 5, 21, "rank 1 of 6 was lost", 1, 2)], 101.0)
    assert one.rank == 4


def test_ranks_that_start_are_said_to_start() -> None:
    found = [RankState(rank, started_at=100.0) for rank in range(2)]
    assert meaning(found, 105.1) == "No rank has ended a step yet: starting, 5 s."


def test_ranks_that_ctrl_c_has_stopped() -> None:
    found = states(MadeRun(ranks=[MadeRank()] * 2))
    for one in found:
        one.add([rows.EndRow(1, "KeyboardInterrupt: ")], 101.0)
    text = screen(found, 200.0)
    assert text.count("stopped by Ctrl-C") == 3
    assert "KeyboardInterrupt" not in text


def test_few_steps_say_nothing_about_who_waits() -> None:
    ranks = [MadeRank(), MadeRank(data=5100)]
    assert meaning(states(MadeRun(ranks=ranks, num_steps=5)), 100.5) == "Training."


# ---------------------------------------------------------------------- files


def test_an_age_grows_by_a_clock_that_is_never_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (recorded,) = MadeRun(ranks=[MadeRank()]).rows()
    path = tmp_path / f"rank-00000.host.1{SUFFIX}"
    lines = [rows.encode(row) for row in recorded]
    path.write_bytes(b"".join(lines[:10]))
    os.utime(path, (1000.0, 1000.0))
    clock = SimpleNamespace(time=lambda: 1030.0, monotonic=lambda: 50.0)
    monkeypatch.setattr(follow, "time", clock)
    follower = Follower(tmp_path)
    assert [at for _, _, at in follower.new_rows()] == [20.0]
    clock.time, clock.monotonic = lambda: 9000.0, lambda: 60.0  # the system clock was set
    path.write_bytes(b"".join(lines[:12]))
    assert [at for _, _, at in follower.new_rows()] == [60.0]


def test_only_what_is_new_is_read(tmp_path: Path) -> None:
    (recorded,) = MadeRun(ranks=[MadeRank()]).rows()
    lines = [rows.encode(row) for row in recorded]
    path = tmp_path / f"rank-00000.host.1{SUFFIX}"
    follower = Follower(tmp_path)
    assert list(follower.new_rows()) == []
    path.write_bytes(b"".join(lines[:10]) + lines[10][:5])
    ((name, found, _),) = follower.new_rows()
    assert name == "rank-00000.host.1"
    assert found == list(rows.decode(lines[:10]))
    assert list(follower.new_rows()) == []
    path.write_bytes(b"".join(lines[:12]))
    ((_, found, _),) = follower.new_rows()
    assert found == list(rows.decode(lines[10:12]))


def test_the_next_part_is_followed(tmp_path: Path) -> None:
    (recorded,) = MadeRun(ranks=[MadeRank()]).rows()
    lines = [rows.encode(row) for row in recorded]
    first, second = (tmp_path / f"rank-00000.host.1.{number:06d}.trace.jsonl" for number in range(2))
    follower = Follower(tmp_path)
    first.write_bytes(b"".join(lines[:4]))
    list(follower.new_rows())
    first.write_bytes(b"".join(lines[:6]))
    second.write_bytes(b"".join(lines[6:8]))
    ((_, found, _),) = follower.new_rows()
    assert found == list(rows.decode(lines[4:8]))


def test_of_a_long_file_the_beginning_and_the_end_are_read(tmp_path: Path) -> None:
    (recorded,) = MadeRun(ranks=[MadeRank()], num_steps=4000).rows()
    lines = [rows.encode(row) for row in recorded]
    (tmp_path / f"rank-00000.host.1{SUFFIX}").write_bytes(b"".join(lines))
    ((_, found, _),) = Follower(tmp_path).new_rows()
    assert isinstance(found[0], rows.ProcessRow)
    assert list(rows.decode(lines[-1:])) == found[-1:]
    assert len(found) < len(recorded)


def test_watch_ends_with_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank, recorded in enumerate(MadeRun(ranks=[MadeRank()] * 2).rows()):
        recorded.append(rows.EndRow(10**9, ""))
        path = tmp_path / f"rank-{rank:05d}.host.{rank}{SUFFIX}"
        path.write_bytes(b"".join(rows.encode(row) for row in recorded))
    assert main(["watch", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "All ranks have ended." in out
    assert "\033" not in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "expected the directory"),
        (["x", "--every", "0"], "--every"),
        (["x", "--onse"], "did you mean --once"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_once_needs_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, words in ((tmp_path, "has no trace"), (tmp_path / "missing", "does not exist")):
        assert main(["watch", "--once", str(folder)]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith(f"syncline watch: {folder} {words}: expected the directory of a trace")


def test_a_process_without_a_sign_of_life_and_one_that_replaces_it() -> None:
    found = states(MadeRun(ranks=[MadeRank()] * 2))
    for one in found:
        hang(one, "step 21, waiting in all_reduce", after_seconds=1)
    hang(found[0], "step 21, waiting in all_reduce", after_seconds=40)
    text = screen(found, now=141.0)
    assert "Rank 1 shows no sign of life." in text
    assert "its process was killed, or is stopped" in " ".join(text.split())
    newer = states(MadeRun(ranks=[MadeRank()] * 2), at=140.0)[1]
    assert newer.process is not None
    newer.process = newer.process._replace(unix_seconds=2e9)
    assert present([*found, newer]) == [found[0], newer]


def test_micro_batches_are_one_step() -> None:
    one = RankState()
    for step in range(1, 6):
        for micro in range(4):
            at = 1_000_000 * step + 100_000 * micro
            buckets = [(0, at, at, at + 50_000)] if micro == 3 else []
            one.add([rows.BackwardRow("Net", step, at, at + 50_000, 1, micro == 3, buckets, {}, [])], 100.0)
    assert one.step_seconds == pytest.approx(1.0)
    assert one.waiting_share == pytest.approx(0.05)
