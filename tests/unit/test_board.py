"""Who is where, in words and as text that travels."""

from __future__ import annotations

from syncline.liveness import Board, Place, Wait
from syncline.liveness.board import describe_places


def test_a_board_begins_before_the_first_step() -> None:
    assert str(Place.of(Board())) == "before the first step"


def test_the_forward_of_the_first_step_is_before_it() -> None:
    board = Board()
    board.phase = "forward"
    assert str(Place.of(board)) == "before the first step, forward"


def test_a_place_says_step_phase_bucket_call_and_line() -> None:
    board = Board()
    board.step, board.phase, board.bucket = 12, "backward", 0
    wait = Wait(lane="gradients", call=7, words="all_reduce(sum) of 1000 elements, torch.float32")
    assert str(Place.of(board, wait=wait, code="train.py:34 in main")) == (
        "step 12, backward, bucket 0, waiting in all_reduce(sum) of 1000 elements, torch.float32 "
        "(call 7 on the gradients lane), at train.py:34 in main"
    )


def test_a_message_has_no_number() -> None:
    assert str(Wait(lane="main", call=None, words="recv(from rank 1)")) == (
        "recv(from rank 1) (a message on the main lane)"
    )


def test_a_snapshot_stays_when_the_board_goes_on() -> None:
    board = Board()
    board.step = 1
    place = Place.of(board)
    board.step = 2
    assert place.step == 1


def test_a_place_travels_as_text() -> None:
    place = Place(
        step=3,
        phase="forward",
        bucket=1,
        wait=Wait(lane="main", call=2, words="barrier", number=5, blocks_rank=False),
        num_started={"main": 2, "gradients": 0},
        code="train.py:1",
        has_left=True,
        seen=12.5,
    )
    assert Place.from_json(place.to_json()) == place
    assert Place.from_json(Place().to_json()) == Place()


def test_who_has_left_waits_nowhere() -> None:
    wait = Wait(lane="main", call=2, words="barrier")
    place = Place(step=3, phase="after backward", wait=wait, code="a.py:1", has_left=True)
    assert str(place) == "step 3, after backward, has shut down normally"


def test_many_ranks_are_not_all_listed() -> None:
    lines = describe_places({}, size=1000).splitlines()
    assert lines[31:] == ["  rank 31: it has reported nothing", "  and 968 more ranks"]


def test_who_has_left_stays_where_it_was_seen() -> None:
    places = {0: Place(step=3, has_left=True), 1: Place(step=3)}
    left, other = describe_places(places, size=2, now=10.0).splitlines()
    assert left == "  rank 0: step 3, has shut down normally"
    assert other == "  rank 1: at its last report, 10.0 s ago: step 3"


def test_a_clock_that_goes_behind_gives_no_negative_age() -> None:
    assert describe_places({0: Place(seen=11.0)}, size=1, now=10.0).startswith(
        "  rank 0: at its last report, 0.0 s ago: "
    )
