"""Trace files: nothing is lost if the process is killed, their size is bounded, and training goes on without them."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hangs
import syncline as sl
from syncline.events import (
    OBSERVERS,
    BackwardEnded,
    CallEnded,
    ForwardEnded,
    OptimizerStepped,
    PlaceSeen,
    RanksChanged,
    Source,
)
from syncline.records import BufferRecord
from syncline.tools.cli import main
from syncline.tracing import recorder, rows
from syncline.tracing.file import NUM_PARTS, TraceFile
from syncline.tracing.lines import Event, Lines, row_of
from syncline.tracing.trace import Trace
from syncline.transport import Transport, run_ranks


def call(number: int) -> rows.CallRow:
    return rows.CallRow("mean", number, number + 1)


def rows_in(directory: Path) -> dict[str, list[rows.Row]]:
    """The rows of each file, by the name of the file."""
    return {
        path.name: list(rows.decode(path.read_bytes().splitlines(keepends=True)))
        for path in sorted(directory.iterdir())
    }


def test_a_row_comes_back_whatever_follows_it() -> None:
    row = rows.BackwardRow("Net", 3, 1, 9, 2, True, [[0, 2, 3, 4]], {"loss": 0.5}, ["head.weight"])
    for end in (b"", b"\n", b'[["call","mea', b'[["later",1,2]]\n', b"\xff\n", b"3\n", b"[]\n"):
        assert list(rows.decode([rows.encode(row), end])) == [row], end
    newer = b'[["call","mean",5,9,"a field of a newer version"]]\n'
    assert list(rows.decode([newer])) == [rows.CallRow("mean", 5, 9)]


@pytest.mark.real
def test_a_row_is_in_the_file_as_soon_as_it_is_written_and_no_fork_writes(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    first = TraceFile(folder, "rank-0", 1 << 20)
    first.write(call(1))
    assert rows_in(folder) == {"rank-0.000000.trace.jsonl": [call(1)]}
    if (pid := os.fork()) == 0:
        first.write(call(2))
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    first.write(call(3))
    first.close()
    second = TraceFile(folder, "rank-0", 1 << 20)  # another trace of the same process
    second.write(call(4))
    second.close()
    assert [*rows_in(folder).items()] == [
        ("rank-0-2.000000.trace.jsonl", [call(4)]),
        ("rank-0.000000.trace.jsonl", [call(1), call(3)]),
    ]


def test_of_a_file_that_grows_too_large_the_beginning_and_the_end_stay(tmp_path: Path) -> None:
    file = TraceFile(tmp_path, "rank-0", 4000)
    process = rows.EndRow(0, "needed to read the others")
    file.write(process, repeat_as="process")
    for number in range(2000):
        file.write(call(number))
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 4000
    file.close()
    found = rows_in(tmp_path)
    assert len(found) <= NUM_PARTS
    numbers = [[row.began for row in part if isinstance(row, rows.CallRow)] for part in found.values()]
    assert numbers[0][0] == 0
    assert numbers[-1][-1] == 1999
    assert all(part[0] == process for part in found.values())
    later = [number for part in numbers[1:] for number in part]
    assert later == list(range(later[0], 2000))


# ---------------------------------------------------------------------- the lines of events

NET = Source(0, 'a 100% "Net"')


def _not_needed() -> Any:
    pytest.fail("not needed")


def forward(**changes: Any) -> ForwardEnded:
    times = 1.0000019, 1.25, 2.5
    event = ForwardEnded(NET, 7, *times, True, None, contract=_not_needed, explain=_not_needed)
    return event._replace(**changes)


def backward(**changes: Any) -> BackwardEnded:
    event = BackwardEnded(
        *(NET, 7, 2.75, 9.0, True, ((0, 3.0, 4.0, 5.0), (2, 3.5, 5.0, 6.0000012)), 3),
        *({"loss": 0.1, "%s": math.nan}, False, (), _not_needed, 2, True),
    )
    return event._replace(**changes)


STEP = OptimizerStepped(NET, "SGD", 2**40, 9.5, 10.0, False)
BUFFERS = BufferRecord(num_tensors=2, payload_bytes=2**40, sent=True, reason="")


EVENTS: list[list[Event]] = [
    [forward()],
    [forward(is_training=False, buffers=BUFFERS)],
    [backward()],
    [backward(buckets=(), is_synchronized=False, metrics={})],
    [backward(unused=("head.weight",))],
    [STEP, STEP._replace(is_discarded=True), STEP._replace(optimizer="Adam")],
    [CallEnded(0, "mean", 0.5, 1.5)],
    [forward(), CallEnded(0, "mean", 0.5, 1.5), backward(), STEP, forward(step=8), backward(step=8)],
    [forward(source=Source(1, "Net 2")), backward(layout=4), backward(metrics={"accuracy": 1.0})],
]


def test_the_short_rows_of_a_line_come_back_as_rows() -> None:
    for events in EVENTS:
        lines = Lines()
        for _ in range(2):  # the second time, the texts are known
            found = list(rows.decode([lines.of(events)]))
            assert repr(found) == repr([row._replace(**in_lists(row)) for row in map(row_of, events)])


def in_lists(row: rows.Row) -> dict[str, Any]:
    """The fields of a row as they are after it was encoded as a row, or in short form."""
    if not isinstance(row, rows.BackwardRow):
        return {}
    return {"unused": [*row.unused], "buckets": [[*one] for one in row.buckets]} if row.unused else {}


def test_a_line_whose_numbers_are_damaged_has_no_short_rows() -> None:
    for numbers in ("", "AAAA", "%", None, "AAAAAAAA8D8="):
        line = json.dumps([["call", "mean", 5, 9], ["optimizer#", "Net", "SGD", False], ["numbers", numbers]])
        found = [row for row in rows.decode([line.encode()]) if not isinstance(row, rows.CallRow)]
        assert found == [], numbers


def test_texts_of_events_are_not_kept_without_bound() -> None:
    lines = Lines()
    for number in range(2000):
        assert len(list(rows.decode([lines.of([backward(layout=number)])]))) == 1
    assert len(lines._texts) <= 256


# ---------------------------------------------------------------------- sl.trace


def train(transport: Transport, num_steps: int = 3, **settings: Any) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3), nn.Linear(3, 1))
    ddp = sl.DistributedDataParallel(net, process_group=transport, bucket_cap_mb=1e-5, **settings)
    optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1))
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = ddp(torch.full((2, 2), 1.0 + step + transport.rank)).square().mean()
        ddp.report(loss=loss)
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("is_attached", [False, True])
def test_each_step_of_an_optimizer_is_recorded_once(tmp_path: Path, is_attached: bool) -> None:
    with sl.trace(tmp_path):
        ddp = sl.DistributedDataParallel(nn.Linear(2, 1))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        if is_attached:
            ddp.attach(optimizer)
        for _ in range(3):
            ddp(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    torch.optim.SGD(ddp.parameters(), lr=0.1).step()  # after the trace
    (recorded,) = rows_in(tmp_path).values()
    steps = [row for row in recorded if isinstance(row, rows.OptimizerRow)]
    assert [row.optimizer for row in steps] == ["SGD"] * 3
    assert all(row.began < row.ended for row in steps)


def test_each_rank_records_its_steps(tmp_path: Path) -> None:
    with sl.trace(tmp_path):
        run_ranks(2, train)
    found = rows_in(tmp_path)
    assert [name[:10] for name in found] == ["rank-00000", "rank-00001"]
    for rank, recorded in enumerate(found.values()):
        process, *others, end = recorded
        assert isinstance(process, rows.ProcessRow)
        assert (process.rank, process.pid) == (rank, os.getpid())
        assert end == rows.EndRow(end.at, "")  # type: ignore[union-attr]
        kinds = [type(row).__name__.removesuffix("Row") for row in others]
        assert kinds.count("Forward") == kinds.count("Backward") == kinds.count("Optimizer") == 3
        backwards = [row for row in others if isinstance(row, rows.BackwardRow)]
        assert [row.step for row in backwards] == [1, 2, 3]
        assert all(row.metrics.keys() == {"loss"} for row in backwards)
        modules = {row.layout: row for row in others if isinstance(row, rows.ModuleRow)}
        assert {row.layout for row in backwards} == modules.keys()
        last = modules[backwards[-1].layout]
        names = [name for _, _, parameters in last.buckets for name in parameters]
        assert sorted(names) == sorted(["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"])
        assert "Sequential" in last.contract["title"]
        forwards = [row for row in others if isinstance(row, rows.ForwardRow)]
        assert forwards[1].buffer_bytes > 0


def test_replicas_that_differ_are_recorded_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def rank(transport: Transport) -> None:
        check = sl.ReplicaCheck(every=1)
        ddp = sl.DistributedDataParallel(nn.Linear(2, 1), process_group=transport, replica_check=check)
        with torch.no_grad():
            ddp.module.bias.data += float(transport.rank == 1)
        ddp(torch.full((1, 2), 1.0 + transport.rank)).sum().backward()

    with sl.trace(tmp_path), pytest.raises(sl.ReplicaDivergence):
        run_ranks(3, rank)
    recorded = rows_in(tmp_path)
    assert len(recorded) == 3
    for found in recorded.values():
        (row,) = [one for one in found if isinstance(one, rows.DivergenceRow)]
        assert row[:-1] == ("replica check of Linear", 1, "bias", 1, [1], 0, "raised")
        assert rows.time_of(row) == row.at
    assert main(["report", str(tmp_path), "--format", "text"]) == 0
    assert (
        "Step 1: the replicas differ in bias; the error was raised on all ranks." in capsys.readouterr().out
    )


def test_nothing_is_recorded_after_stop(tmp_path: Path) -> None:
    trace = sl.trace(tmp_path)
    run_ranks(1, train)
    receivers = OBSERVERS.place_seen
    trace.stop()
    trace.stop()
    recorded = rows_in(tmp_path)
    for receive in receivers:  # of another thread
        receive(PlaceSeen(0, 3, "step 3", 1.5))
    run_ranks(1, train)
    assert rows_in(tmp_path) == recorded
    assert [type(found[-1]) for found in recorded.values()] == [rows.EndRow]
    assert OBSERVERS.backward_ended == ()


def test_an_error_that_ends_the_block_is_recorded(tmp_path: Path) -> None:
    def failing() -> None:
        with sl.trace(tmp_path):
            run_ranks(1, train)
            raise ZeroDivisionError("a defect\nof the program")

    with pytest.raises(ZeroDivisionError):
        failing()
    ((*_, end),) = rows_in(tmp_path).values()
    assert isinstance(end, rows.EndRow)
    assert (end.error, end.kind) == ("ZeroDivisionError: a defect", "ZeroDivisionError")


def test_a_full_disk_is_warned_of_once_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, line: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with sl.trace(tmp_path):
        monkeypatch.setattr("syncline.tracing.file.os.write", full)
        with pytest.warns(RuntimeWarning, match="No space left on device") as warned:
            run_ranks(1, train)
    assert len(warned) == 1


@pytest.mark.real
def test_what_was_recorded_before_a_kill_can_be_read(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, sys, torch, syncline as sl\n"
        "from syncline.tracing import recorder\n"
        "recorder._LONGEST_SECONDS = 0.0\n"
        "sl.trace(sys.argv[1])\n"
        "ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1))\n"
        "for step in range(5):\n"
        "    ddp(torch.ones(1, 2)).sum().backward()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = hangs.run([sys.executable, program, tmp_path / "trace"])
    assert done.returncode == -signal.SIGKILL
    (found,) = rows_in(tmp_path / "trace").values()
    assert [row.step for row in found if isinstance(row, rows.BackwardRow)] == [1, 2, 3, 4, 5]
    assert not isinstance(found[-1], rows.EndRow)


def test_where_a_rank_is_comes_from_another_thread_and_not_before_the_first_event(tmp_path: Path) -> None:
    """A rank that hangs records nothing more by itself. In `init`, the main thread may wait for the other thread."""
    place = PlaceSeen(0, 3, "step 3, forward, at train.py:9 in main", 1.5)
    with sl.trace(tmp_path):
        for receive in OBSERVERS.place_seen:
            receive(place)
        assert list(tmp_path.iterdir()) == []
        run_ranks(1, train)
        for receive in OBSERVERS.place_seen:
            receive(place)
        for receive in OBSERVERS.ranks_changed:
            receive(RanksChanged(0, 1, 4, "rank 0 of 2 was lost", 1.0, 2.0))
    ((*_, seen, changed, process, _),) = rows_in(tmp_path).values()
    assert seen == rows.PlaceRow(1_500_000, 3, "step 3, forward, at train.py:9 in main")
    assert (type(changed), type(process)) == (rows.RanksRow, rows.ProcessRow)  # the file says the new rank


def test_a_process_that_is_one_rank_records_places_before_its_first_event(tmp_path: Path) -> None:
    trace = Trace(tmp_path, 1 << 20, rank=3, num_ranks=4)
    for receive in OBSERVERS.place_seen:
        receive(PlaceSeen(3, None, "before the first step, at train.py:9", 1.0))
    trace.stop()
    ((name, (process, place, _)),) = rows_in(tmp_path).items()
    assert name.startswith("rank-00003.")
    assert isinstance(process, rows.ProcessRow)
    assert (process.rank, process.num_ranks) == (3, 4)
    assert place == rows.PlaceRow(1_000_000, None, "before the first step, at train.py:9")


def test_a_directory_that_cannot_be_written_is_warned_of_before_the_first_event(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.warns(RuntimeWarning, match="rank 3: the trace in .* ends here"):
        Trace(tmp_path / "file", 1 << 20, rank=3, num_ranks=4)
    assert OBSERVERS.backward_ended == ()


def test_if_the_next_part_cannot_be_opened_no_other_file_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = TraceFile(tmp_path, "rank-0", 400)
    file.write(call(1))

    def refuse(*args: Any, **kwargs: Any) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch, pytest.raises(OSError, match="Too many open files"):
        patch.setattr("syncline.tracing.file.os.open", refuse)
        for number in range(10):
            file.write(call(number))
    other = os.open(tmp_path / "other", os.O_WRONLY | os.O_CREAT)
    file.write(call(99))
    file.close()
    os.write(other, b"mine")
    os.close(other)
    assert (tmp_path / "other").read_bytes() == b"mine"


def test_forwards_without_a_backward_are_written_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "_LONGEST_SECONDS", 0.0)
    with sl.trace(tmp_path):
        ddp = sl.DistributedDataParallel(nn.Linear(2, 1)).eval()
        with torch.no_grad():
            ddp(torch.ones(1, 2))
        ((_, forward),) = rows_in(tmp_path).values()
    assert isinstance(forward, rows.ForwardRow)
