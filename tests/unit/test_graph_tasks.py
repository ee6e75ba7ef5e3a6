"""Graph tasks of one backward, told in the order in which an engine would, without an engine."""

from __future__ import annotations

from syncline.gradients.backward import Entry, GraphTasks


class Nesting:
    """Answers whether the task that runs now is inside of another."""

    def __init__(self) -> None:
        self.is_inside = False

    def __call__(self) -> bool:
        return self.is_inside


def test_an_ordinary_backward_is_one_task() -> None:
    tasks = GraphTasks(is_inside=lambda: False)
    assert tasks.enter(3) is Entry.BEGINS
    tasks.join(3)
    assert tasks.current == 3
    assert tasks.is_running
    assert tasks.ends_backward(3, is_complete=True)
    tasks.forget()
    assert not tasks.is_running
    assert tasks.current != 3
    assert tasks.enter(4) is Entry.BEGINS


def test_a_checkpoint_inside_of_a_backward_does_not_end_it() -> None:
    nesting = Nesting()
    tasks = GraphTasks(is_inside=nesting)
    assert tasks.enter(3) is Entry.BEGINS
    tasks.join(3)
    nesting.is_inside = True
    assert tasks.enter(4) is Entry.CONTINUES
    assert not tasks.knows(4)
    tasks.join(4)
    assert not tasks.ends_backward(4, is_complete=True)
    nesting.is_inside = False
    assert tasks.enter(3) is Entry.CONTINUES
    assert tasks.current == 3
    assert tasks.ends_backward(3, is_complete=True)


def test_a_backward_that_shows_itself_in_a_checkpoint_first_ends_with_the_outer_task() -> None:
    nesting = Nesting()
    tasks = GraphTasks(is_inside=nesting)
    nesting.is_inside = True
    assert tasks.enter(8) is Entry.BEGINS
    tasks.join(8)
    assert not tasks.ends_backward(8, is_complete=False), "something is still missing"
    nesting.is_inside = False
    assert tasks.enter(7) is Entry.CONTINUES, "ids grow: 7 is older, so 8 ran inside of it"
    tasks.join(7)
    assert tasks.ends_backward(7, is_complete=True)


def test_all_gradients_come_from_checkpoints_one_after_the_other() -> None:
    tasks = GraphTasks(is_inside=lambda: True)
    assert tasks.enter(8) is Entry.BEGINS
    tasks.join(8)
    assert not tasks.ends_backward(8, is_complete=False)
    assert tasks.is_unfinished
    assert tasks.enter(9) is Entry.CONTINUES
    tasks.join(9)
    assert not tasks.is_unfinished
    assert tasks.enter(10) is Entry.CONTINUES, "inside of 9"
    tasks.join(10)
    assert not tasks.ends_backward(10, is_complete=True)
    assert tasks.ends_backward(9, is_complete=True)
    assert not tasks.is_unfinished


def test_a_gradient_after_all_were_there_is_too_late() -> None:
    nesting = Nesting()
    nesting.is_inside = True
    tasks = GraphTasks(is_inside=nesting)
    tasks.enter(8)
    tasks.join(8)
    assert tasks.ends_backward(8, is_complete=True)
    tasks.forget()
    assert tasks.enter(9) is Entry.TOO_LATE
    tasks.forward_begins()
    assert tasks.enter(9) is Entry.BEGINS, "a forward lies between"


def test_a_backward_that_never_ended_is_interrupted_by_the_next() -> None:
    tasks = GraphTasks(is_inside=lambda: False)
    tasks.enter(3)
    tasks.join(3)
    assert tasks.enter(5) is Entry.INTERRUPTS
    tasks.forget()
    assert not tasks.ends_backward(3, is_complete=True), "its end, should it come, is nobody's"


def test_who_is_known_to_be_outermost_ends_the_backward() -> None:
    tasks = GraphTasks(is_inside=lambda: True)
    tasks.outermost = 7
    tasks.join(7)
    tasks.join(8)
    assert not tasks.ends_backward(8, is_complete=True)
    assert tasks.ends_backward(7, is_complete=False)
