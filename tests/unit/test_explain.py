"""`syncline explain` without processes: the picture, the steps that are found in the events, and the report."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import syncline as sl
from support.goldens import assert_golden
from syncline.tools.explain.ranks import StepObserver, StepShown
from syncline.tools.explain.report import (
    Options,
    Report,
    Row,
    Style,
    legend,
    nothing_shown,
    picture,
    text_of,
)
from syncline.transport import ThreadsTransport, run_ranks

ROWS = [
    Row("forward", "forward", [(0.0, 0.004)], "4.0 ms"),
    Row("backward", "backward", [(0.005, 0.009)], "4.0 ms"),
    Row("bucket", "  bucket 0, 1 kB", [(0.005, 0.006)], "sent at 6.0 ms", "head.weight, head.bias"),
    Row("bucket", "  bucket 1, 9 MB", [(0.006, 0.009)], "sent at 9.0 ms", "a.very.long.name." * 5),
    Row("wait", "  wait", [(0.008, 0.009)], "1.0 ms"),
    Row("optimizer", "optimizer SGD", [(0.009, 0.010)], "1.0 ms"),
]

# ---------------------------------------------------------------------- the picture


def test_a_picture_fits_into_the_columns() -> None:
    lines = picture(ROWS, 0.010, Style(columns=76, has_blocks=False))
    assert_golden("explain", "\n".join([*lines, legend(Style(has_blocks=False))]))
    for columns in (60, 76, 100, 140):
        for has_blocks in (False, True):
            lines = picture(ROWS, 0.010, Style(columns=columns, has_blocks=has_blocks))
            assert max(map(len, lines)) <= columns
            assert "\x1b" not in "".join(lines)
            assert "".join(lines).isascii() == (not has_blocks)
            assert len(legend(Style(has_blocks=has_blocks))) < 80


def test_bars_are_proportional_and_every_span_is_seen() -> None:
    rows = [
        Row("forward", "f", [(0.0, 0.25)]),
        Row("forward", "g", [(0.5, 1.0)]),
        Row("call", "h", [(0.3, 0.3)]),
    ]
    lines = picture(rows, 1.0, Style(columns=100))
    short, long, point = (line.count("█") for line in lines[1:])
    assert abs(long - 2 * short) <= 1
    assert point == 1
    assert picture([Row("forward", "f", [(0.0, 0.0)])], 0.0, Style())[1].count("█") == 1


def test_colours_only_where_they_are_wanted() -> None:
    plain = picture(ROWS, 0.010, Style())
    coloured = picture(ROWS, 0.010, Style(has_colours=True))
    assert "\x1b[34m" in coloured[1]
    assert coloured[1].replace("\x1b[34m", "").replace("\x1b[0m", "").rstrip() == plain[1].rstrip()


# ---------------------------------------------------------------------- the report


def test_a_report_comes_back_and_is_printed() -> None:
    modules = ["the contract\n\nthe words"]
    report = Report(step=3, num_ranks=4, seconds=0.010, modules=modules, rows=ROWS, meets_others=True)
    found = Report.decode(report.encode())
    assert [list(row.spans[0]) for row in found.rows] == [list(row.spans[0]) for row in ROWS]
    text = text_of(found, Options(num_ranks=4, step=None, report=""), Style())
    assert text.startswith("the contract\n\nthe words\n\nStep 3 on rank 0, 10.0 ms from")
    assert "The 4 ranks shared this host" in text
    assert "before step" not in text


def test_notes_say_what_is_missing() -> None:
    report = Report(step=2, num_ranks=2, rows=ROWS)
    text = text_of(report, Options(num_ranks=2, step=9, report=""), Style())
    assert "The script ended after 2 steps, before step 9." in text
    text = text_of(report, Options(num_ranks=2, step=None, report=""), Style())
    assert "sent neither gradients nor parameters" in text
    alone = text_of(Report(step=3, rows=ROWS), Options(num_ranks=1, step=None, report=""), Style())
    assert "shared this host" not in alone


def test_why_nothing_can_be_shown() -> None:
    assert "sl.DistributedDataParallel in training mode" in nothing_shown(Report(step=0), "a.py")
    assert "replace this class by" in nothing_shown(Report(step=0, uses_torch_class=True), "a.py")


# ---------------------------------------------------------------------- the steps


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "report"


class Net(nn.Linear):
    pass


class Training:
    """Ranks that are threads, of which an observer sees the steps of rank 0."""

    def __init__(self, path: Path, *, step: int | None = None, size: int = 2, **arguments: object) -> None:
        self.path = path
        self.observer = StepObserver(Options(num_ranks=size, step=step, report=str(path)))
        for name in (*(name for name in vars(sl.Observer) if name in vars(StepObserver)), *UPDATE):
            setattr(self.observer, name, on_rank_0(getattr(self.observer, name)))
        self._size, self._arguments = size, arguments

    def run(self, num_steps: int, num_micro_batches: int = 1) -> Report:
        """Train until the observer ends it, or for so many steps, and return the report."""
        update = (
            register_optimizer_step_pre_hook(self.observer.before_update),
            register_optimizer_step_post_hook(self.observer.after_update),
        )
        try:
            with self.observer, suppress(StepShown):
                run_ranks(self._size, lambda transport: self.train(transport, num_steps, num_micro_batches))
        finally:
            for hook in update:
                hook.remove()
        self.observer.end_of_script()
        return Report.decode(self.path.read_text())

    def train(self, transport: ThreadsTransport, num_steps: int, num_micro_batches: int) -> None:
        ddp = sl.DistributedDataParallel(Net(4, 4), process_group=transport, **self._arguments)  # type: ignore[arg-type]
        optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1))
        for _ in range(num_steps):
            optimizer.zero_grad()
            for _ in range(num_micro_batches - 1):
                with ddp.no_sync():
                    ddp(torch.ones(2, 4)).sum().backward()
            ddp(torch.ones(2, 4)).sum().backward()
            optimizer.step()


UPDATE = ("before_update", "after_update")


def on_rank_0(method: Callable[..., None]) -> Callable[..., None]:
    """Return a method that does nothing on the threads of the other ranks."""

    def call(*args: Any) -> None:
        if threading.current_thread().name == "rank 0":
            method(*args)

    return call


def kinds(report: Report) -> list[str]:
    return [row.kind for row in report.rows]


def test_the_third_step_is_shown_or_that_which_is_asked_for_or_the_last_one(path: Path) -> None:
    report = Training(path).run(10)
    assert (report.step, report.num_ranks, report.meets_others) == (3, 2, True)
    assert kinds(report) == ["forward", "backward", "bucket", "wait", "optimizer"]
    assert report.rows[2].detail == "bias, weight"
    assert [row.label for row in report.rows][-1] == "optimizer SGD"
    assert 0.0 <= report.rows[0].spans[0][0] < report.rows[-1].spans[-1][1] <= report.seconds
    assert "step 3" in report.modules[0]
    assert "Net" in report.modules[0]
    for asked, num_steps, shown in ((1, 5, 1), (4, 9, 4), (9, 4, 4), (None, 0, 0)):
        assert Training(path, step=asked).run(num_steps).step == shown


def test_micro_batches_belong_to_one_step(path: Path) -> None:
    report = Training(path).run(10, num_micro_batches=3)
    assert report.step == 3
    assert [len(row.spans) for row in report.rows] == [3, 3, 1, 1, 1]


def test_a_strategy_is_run_until_its_first_round_or_up_to_the_last_step(path: Path) -> None:
    report = Training(path, strategy=sl.LocalSGD(5)).run(20)
    assert report.step == 5
    assert kinds(report) == ["forward", "backward", "optimizer", "round"]
    assert "averaged parameters" in report.rows[-1].detail
    assert "next after step 10" in report.modules[0]
    report = Training(path, strategy=sl.LocalSGD(500)).run(200)
    assert (report.step, report.meets_others) == (100, False)
    assert "next after step 500" in " ".join(report.modules[0].split())


def test_one_rank_sends_nothing_and_is_shown(path: Path) -> None:
    report = Training(path, size=1).run(10)
    assert report.step == 3
    assert "bucket" not in kinds(report)


def test_a_script_that_catches_the_end_is_ended_again(path: Path) -> None:
    training = Training(path, step=1)
    training.run(3)
    with training.observer, pytest.raises(StepShown):
        run_ranks(2, lambda transport: training.train(transport, 1, 1))
