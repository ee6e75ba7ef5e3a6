"""What a process concludes of an error, by what the others have written into the register."""

from __future__ import annotations

import itertools
import struct
from dataclasses import replace
from types import SimpleNamespace

import pytest

import syncline as sl
from support.cases import case
from syncline.resilience import group
from syncline.resilience.membership import Adopt, Membership, Observation, Report

PRESENT = Membership(0, ("a", "b", "c"), step=0, sources=("a", "b", "c"))
NOTHING = Observation({})
REPORTED = Observation({"b": Report("b", 3)}, ended=frozenset({"c"}))
DECIDED = Observation({}, decided=Membership(1, ("a", "b"), step=3, sources=("b",)))


def test_uneven_inputs_are_a_loss_if_the_others_agree_on_who_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    for why, observations, is_loss in (
        ("reported", [NOTHING, NOTHING, REPORTED], True),
        ("decided", [NOTHING, DECIDED], True),
        ("one has ended", [Observation({}, ended=frozenset({"c"})), REPORTED], True),
        ("all have left the loop", [NOTHING, Observation({}, ended=frozenset({"b", "c"}))], False),
        ("nothing comes", [NOTHING] * 1000, False),
    ):
        one = seeing(monkeypatch, observations)
        assert one.is_loss(sl.UnevenInputs("rank 1 has shut down normally")) == is_loss, why
        assert one.is_loss(sl.PeerLost("rank 1"))
        assert not one.is_loss(ValueError())


def seeing(
    monkeypatch: pytest.MonkeyPatch, observations: list[Observation], killed: tuple[str, ...] = ()
) -> group.Group:
    """A process of three that sees this in the register, under a clock that goes on by one second with each look."""
    seen = itertools.chain(observations, itertools.repeat(NOTHING))
    one = group.Group.__new__(group.Group)
    one._register = SimpleNamespace(  # type: ignore[assignment]
        observe=lambda present: next(seen), killed=lambda names: frozenset(killed).intersection(names)
    )
    one._member = SimpleNamespace(name="a", membership=PRESENT)  # type: ignore[assignment]
    seconds = itertools.count()
    monkeypatch.setattr(group, "time", SimpleNamespace(monotonic=lambda: next(seconds), sleep=lambda _: None))
    return one


OTHER_ERRORS = [
    sl.SynclineError("of no class of its own"),
    sl.CollectiveMismatch("the ranks made different calls"),
    sl.ContractMismatch("the ranks do not agree"),
    sl.ReplicaDivergence("replicas differ", tensor="weight", num_differing=1, minority_ranks=()),
    ConnectionResetError("the other rank closed the connection"),
    RuntimeError("a backend says something that nobody knows"),
    struct.error("unpack requires a buffer of 4 bytes"),
]


def test_each_error_is_a_loss_if_a_member_was_killed_or_the_others_have_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for error in OTHER_ERRORS:
        with case(type(error).__name__):
            assert seeing(monkeypatch, [], killed=("c",)).is_loss(error)
            assert seeing(monkeypatch, [REPORTED]).is_loss(error)
            assert seeing(monkeypatch, [DECIDED]).is_loss(error)
            assert not seeing(monkeypatch, []).is_loss(error)
            assert not seeing(monkeypatch, [], killed=("a",)).is_loss(error)  # no other one
    for end in (KeyboardInterrupt(), SystemExit(75)):
        assert not seeing(monkeypatch, [], killed=("c",)).is_loss(end)


def test_an_error_stays_what_it_is_if_the_launcher_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def observe(present: Membership) -> Observation:
        raise sl.PeerLost("the launcher's store has ended")

    one = seeing(monkeypatch, [])
    one._register.observe = observe  # type: ignore[union-attr, assignment, method-assign]
    assert not one.is_loss(ValueError("of the program"))


def test_a_change_of_the_ranks_says_how_many_were_lost() -> None:
    one = group.Group.__new__(group.Group)
    one._register = SimpleNamespace(  # type: ignore[assignment]
        report=lambda generation, report: None,
        stop_others=lambda generation: None,
        observe=lambda present: DECIDED,
    )
    after = Membership(1, ("a", "b", "d"), step=3, sources=("b",))
    last = Membership(2, ("a", "d"), step=3, sources=("a",))
    decided = iter([after, last, last])
    member = SimpleNamespace(
        membership=PRESENT,
        name="a",
        stop=lambda **said: REPORTED,
        look=lambda observed, now: Adopt(next(decided), loads=False),
    )
    one._member = member  # type: ignore[assignment]
    one._last_trained = PRESENT
    assert one._agree(3, poll_seconds=0.0) is after
    assert (one.num_lost, one.change) == (1, "rank 2 of 3 was lost and 1 process joined")
    # Rank 1 is lost while they connect.
    member.membership = after
    assert one._agree(3, poll_seconds=0.0) is last
    assert (one.num_lost, one.change) == (2, "ranks 1, 2 of 3 were lost and 1 process joined")
    # Or it is lost in the first step of the three.
    one.settle()
    one._agree(3, poll_seconds=0.0)
    assert (one.num_lost, one.change) == (1, "rank 1 of 3 was lost")
    # Of two that train, none is lost, and a third one is while it joins.
    one._last_trained = Membership(4, ("a", "b"), step=3, sources=("a",))
    member.membership = replace(one._last_trained, generation=5, members=("a", "b", "e"))
    decided = iter([replace(one._last_trained, generation=6)])
    one._agree(3, poll_seconds=0.0)
    assert (one.num_lost, one.change) == (0, "1 process was lost while joining")
