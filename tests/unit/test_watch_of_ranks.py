"""The watch of a process over the next member: unreadable signs of life, and a store that fails for a while."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from support.states import wait_until
from syncline.liveness import StoreSilent
from syncline.resilience import watch as watches
from syncline.resilience.membership import Membership
from syncline.resilience.register import Entry
from syncline.resilience.watch import Pulse, Watch


class Line:
    """A line to a register: it answers with `found`, or raises what `error` returns for the number of the request."""

    def __init__(self, found: dict[str, str] | None = None, error: Any = lambda number: None) -> None:
        self.found, self.error = found or {}, error
        self.num_asked = 0
        self.has_changed = threading.Condition()

    def ask(self, question: object) -> Any:
        with self.has_changed:
            self.num_asked += 1
            self.has_changed.notify_all()
        if (error := self.error(self.num_asked)) is not None:
            raise error
        return self.found

    def lost(self, names: list[str]) -> set[str]:
        return set()

    def wait_for(self, number: int) -> None:
        with self.has_changed:
            assert self.has_changed.wait_for(lambda: self.num_asked >= number, 20)


def watched() -> tuple[Watch, list[str]]:
    failures: list[str] = []
    transport: Any = SimpleNamespace(
        health=SimpleNamespace(fail=lambda failure: failures.append(failure.text))
    )
    watch = Watch()
    members = ("a", "b")
    watch.begin(Membership(0, members, step=0, sources=members), Entry(name="b", host="host b"), transport)
    return watch, failures


def test_a_missing_or_unreadable_pulse_counts_as_no_pulse(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(watches.time, "monotonic", lambda: now)
    watch, failures = watched()
    line: Any = Line({"pulse b": "7"})
    watch.look(line)
    line.found = {}
    watch.look(line)
    line.found = {"pulse b": "8"}
    watch.look(line)
    assert failures == []
    line.found = {}
    now += watches.SILENT_SECONDS + 1
    watch.look(line)
    assert failures == [f"rank 1 on host b has shown no sign of life for {watches.SILENT_SECONDS:g} s"]


def test_the_thread_survives_errors_and_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watches, "_PULSE_SECONDS", 0.001)
    watch, failures = watched()
    errors: dict[int, Exception] = {1: KeyError("pulse b"), 2: StoreSilent("no answer")}
    line: Any = Line(error=errors.get)
    pulse = Pulse(line, "a", watch)
    line.wait_for(6)
    pulse.close()
    assert failures == []


def test_an_error_that_stays_is_named_as_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watches, "_PULSE_SECONDS", 0.001)
    monkeypatch.setattr(watches, "SILENT_SECONDS", 0.01)
    watch, failures = watched()
    line: Any = Line(error=lambda number: KeyError("pulse b"))
    pulse = Pulse(line, "a", watch)
    wait_until(lambda: bool(failures))
    pulse.close()
    assert failures == ["the watch over the next rank fails: KeyError('pulse b')"]
