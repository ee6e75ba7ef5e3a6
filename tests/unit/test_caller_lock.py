"""How ranks recognize each other's threads."""

from __future__ import annotations

import threading

from syncline.transport.caller_lock import Turn


def callers(turn: Turn, num_threads: int) -> list[str]:
    """Who calls in threads that come one after the other, each when the one before is gone."""
    found: list[str] = []

    def call() -> None:
        with turn:
            found.append(turn.caller)
            with turn:
                found.append(turn.caller)

    for _ in range(num_threads):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    return found


def test_the_main_thread_has_no_name_and_nobody_has_none() -> None:
    turn = Turn()
    with turn:
        assert turn.caller == ""
    assert callers(turn, 1)[0] != ""
    assert turn.caller == ""


def test_no_thread_is_taken_for_one_that_has_ended() -> None:
    names = callers(Turn(), 3)
    assert names[::2] == names[1::2]
    assert len(set(names)) == 3
    assert names == callers(Turn(), 3)


def test_threads_are_numbered_as_they_were_started_whoever_calls_first() -> None:
    turn, may_call, found = Turn(), [threading.Event(), threading.Event()], {}

    def call(nth: int) -> None:
        may_call[nth].wait()
        with turn:
            found[nth] = turn.caller

    threads = [threading.Thread(target=call, args=(nth,)) for nth in range(2)]
    for thread in threads:
        thread.start()
    for nth in (1, 0):
        may_call[nth].set()
        threads[nth].join()
    assert ["number 1" in found[0], "number 2" in found[1]] == [True, True]


def test_ranks_that_are_threads_are_main_threads() -> None:
    assert callers(Turn(first_is_main=True), 2)[::2][0] == ""
