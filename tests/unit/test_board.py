"""Who is where, in words and as text that travels."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from syncline.errors import SynclineError
from syncline.liveness import Board, Place, Wait
from syncline.liveness.board import StepPhase, describe_late, describe_places
from syncline.liveness.calls import remedy_for_left
from syncline.liveness.health import Health, Lane
from syncline.liveness.notices import Notices


def test_a_place_says_step_phase_bucket_call_and_line_of_the_time_when_it_was_taken() -> None:
    board = Board()
    first = Place.of(board)
    board.phase = StepPhase.FORWARD
    assert str(Place.of(board)) == "before the first step, forward"
    board.step, board.phase, board.bucket = 12, StepPhase.BACKWARD, 0
    wait = Wait(lane="gradients", call=7, words="all_reduce(sum) of 1000 elements, torch.float32")
    assert str(Place.of(board, wait=wait, code="train.py:34 in main")) == (
        "step 12, backward, bucket 0, waiting in all_reduce(sum) of 1000 elements, torch.float32 "
        "(call 7 on the gradients lane), at train.py:34 in main"
    )
    assert str(first) == "before the first step"
    message = Wait(lane="main", call=None, words="recv(from rank 1)")
    assert str(message) == "recv(from rank 1) (a message on the main lane)"


FORWARD, BACKWARD = StepPhase.FORWARD, StepPhase.BACKWARD

LATE = [
    (Place(step=4), Place(step=5, phase=FORWARD), "forward of step 5"),
    (Place(step=5, phase=FORWARD), Place(step=5, phase=BACKWARD, bucket=1), "backward of step 5"),
    (None, Place(step=5, phase=BACKWARD), "backward of step 5"),
    (Place(step=5, phase=FORWARD), Place(step=5, phase=FORWARD), "all_reduce(sum) (step 5, forward)"),
    (Place(step=6), Place(step=5, phase=FORWARD), "all_reduce(sum) (step 5, forward)"),
    (Place(step=4), Place(step=5, phase=StepPhase.PARAMETER_SYNC), "the parameter sync of step 5"),
    (Place(), Place(opening="sl.mean"), "sl.mean"),
    (Place(), Place(), "all_reduce(sum)"),
    (Place(step=4), Place(step=5, opening="sl.mean", phase=FORWARD), "sl.mean (step 5, forward)"),
]


def test_a_late_rank_has_missed_the_phase_unless_it_may_have_reached_it() -> None:
    for late, here, expected in LATE:
        places = {0: here} if late is None else {0: here, 1: late}
        words = describe_late([1], places, here, "all_reduce(sum) of 4 elements, torch.float32", 20.02)
        seen = "it has reported nothing" if late is None else f"last seen: {late}"
        assert words == f"rank 1 did not reach {expected} within 20 s; {seen}"


def test_the_remedy_for_a_rank_that_has_left_is_few_bullets_and_the_likeliest_comes_first() -> None:
    wait = Wait(lane="buffers of Net", call=5, words="all_reduce(sum)")
    for here, bullets in (
        (Place(step=4, phase=BACKWARD), ["as many batches", "ddp.join()"]),
        (Place(step=4, phase=FORWARD, wait=wait), ["as many batches", "ddp.join()", "ddp.module(x)"]),
        (Place(step=4, phase=StepPhase.EVAL_FORWARD), ["ddp.module(x)", "ddp.sync_buffers_()"]),
    ):
        _, *found = remedy_for_left(here, [Place(step=3)]).split("\n  - ")
        assert len(found) == len(bullets), here
        assert all(expected in bullet for expected, bullet in zip(bullets, found, strict=True)), here


def test_a_place_travels_as_text() -> None:
    place = Place(
        step=3,
        phase=FORWARD,
        bucket=1,
        wait=Wait(lane="main", call=2, words="barrier", number=5, blocks_rank=False),
        num_started={"main": 2, "gradients": 0},
        code="train.py:1",
        has_left=True,
        seen=12.5,
    )
    assert Place.from_json(place.to_json()) == place
    assert Place.from_json(Place().to_json()) == Place()
    with pytest.raises(
        SynclineError, match=r"the place of a rank: expected .*different versions of Syncline"
    ):
        Place.from_json(place.to_json().replace('"forward"', '"a phase of another version"'))


def test_who_has_left_waits_nowhere_and_stays_where_it_was_seen() -> None:
    wait = Wait(lane="main", call=2, words="barrier")
    place = Place(step=3, phase=StepPhase.AFTER_BACKWARD, wait=wait, code="a.py:1", has_left=True)
    assert str(place) == "step 3, after backward, has shut down normally"
    places = {0: Place(step=3, has_left=True), 1: Place(step=3)}
    left, other = describe_places(places, size=2, ages={0: "1.0 s ago", 1: "10.0 s ago"}).splitlines()
    assert left == "  rank 0: step 3, has shut down normally"
    assert other == "  rank 1: at its last report, 10.0 s ago: step 3"


def test_many_ranks_are_not_all_listed() -> None:
    lines = describe_places({}, size=1000).splitlines()
    assert lines[31:] == ["  rank 31: it has reported nothing", "  and 968 more ranks"]


def test_ages_are_differences_of_one_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system clock is set back while a place is published and read, and that of another host is an hour ahead."""
    lane, now = Lane("main", group=None), [100.0]
    health = Health(lane, Board(), rank=0, size=3, backend="none", timeout_seconds=1.0)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "time", lambda: 1e9 - 1000 * now[0])
    here = health.place()
    elsewhere = replace(here, clock="that of another host", seen=here.seen + 3600)
    health.notices = FixedNotices({1: here, 2: elsewhere})
    health.places()
    now[0] = 102.5
    assert health.ages(health.places()) == {1: "2.5 s ago", 2: "which this rank read 2.5 s ago"}


class FixedNotices(Notices):
    def __init__(self, places: dict[int, Place]) -> None:
        super().__init__(rank=0, size=3)
        self._fixed = places

    def places(self) -> dict[int, Place]:
        return self._fixed
