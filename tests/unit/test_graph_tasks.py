"""Graph tasks of one backward, told in the order in which an engine would, without an engine."""

from __future__ import annotations

from syncline.gradients.graph_tasks import Entry, Turns


class Nesting:
    """Answers whether the task that runs now is inside of another."""

    def __init__(self) -> None:
        self.is_inside = False

    def __call__(self) -> bool:
        return self.is_inside


def test_an_ordinary_backward_is_one_task() -> None:
    turns = Turns(is_inside=lambda: False)
    assert turns.enter(3) is Entry.BEGINS
    turns.join(3)
    assert turns.current == 3
    assert turns.is_running
    assert turns.ends_backward(3, is_complete=True)
    turns.forget()
    assert not turns.is_running
    assert turns.current != 3
    assert turns.enter(4) is Entry.BEGINS


def test_a_checkpoint_inside_of_a_backward_does_not_end_it() -> None:
    nesting = Nesting()
    turns = Turns(is_inside=nesting)
    assert turns.enter(3) is Entry.BEGINS
    turns.join(3)
    nesting.is_inside = True
    assert turns.enter(4) is Entry.GOES_ON
    assert not turns.knows(4)
    turns.join(4)
    assert not turns.ends_backward(4, is_complete=True)
    nesting.is_inside = False
    assert turns.enter(3) is Entry.GOES_ON
    assert turns.current == 3
    assert turns.ends_backward(3, is_complete=True)


def test_a_backward_that_shows_itself_in_a_checkpoint_first_ends_with_the_outer_task() -> None:
    nesting = Nesting()
    turns = Turns(is_inside=nesting)
    nesting.is_inside = True
    assert turns.enter(8) is Entry.BEGINS
    turns.join(8)
    assert not turns.ends_backward(8, is_complete=False), "something is still missing"
    nesting.is_inside = False
    assert turns.enter(7) is Entry.GOES_ON, "ids grow: 7 is older, so 8 ran inside of it"
    turns.join(7)
    assert turns.ends_backward(7, is_complete=True)


def test_a_gradient_after_all_were_there_is_too_late() -> None:
    nesting = Nesting()
    nesting.is_inside = True
    turns = Turns(is_inside=nesting)
    turns.enter(8)
    turns.join(8)
    assert turns.ends_backward(8, is_complete=True)
    turns.forget()
    assert turns.enter(9) is Entry.TOO_LATE
    turns.forward_begins()
    assert turns.enter(9) is Entry.BEGINS, "a forward lies between"


def test_a_backward_that_never_ended_is_interrupted_by_the_next() -> None:
    turns = Turns(is_inside=lambda: False)
    turns.enter(3)
    turns.join(3)
    assert turns.enter(5) is Entry.INTERRUPTS
    turns.forget()
    assert not turns.ends_backward(3, is_complete=True), "its end, should it come, is nobody's"


def test_who_is_known_to_be_outermost_ends_the_backward() -> None:
    turns = Turns(is_inside=lambda: True)
    turns.outermost = 7
    turns.join(7)
    turns.join(8)
    assert not turns.ends_backward(8, is_complete=True)
    assert turns.ends_backward(7, is_complete=False)
