"""What a process concludes of an error, by what the others have written into the register."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import syncline as sl
from syncline.resilience import group
from syncline.resilience.membership import Adopt, Membership, Observation, Report

PRESENT = Membership(0, ("a", "b", "c"), step=0, sources=("a", "b", "c"))
NOTHING = Observation({})
REPORTED = Observation({"b": Report("b", 3)}, ended=frozenset({"c"}))
DECIDED = Observation({}, decided=Membership(1, ("a", "b"), step=3, sources=("b",)))


@pytest.mark.parametrize(
    ("observations", "is_loss"),
    [
        ([NOTHING, NOTHING, REPORTED], True),
        ([NOTHING, DECIDED], True),
        ([Observation({}, ended=frozenset({"c"})), REPORTED], True),
        ([NOTHING, Observation({}, ended=frozenset({"b", "c"}))], False),
        ([NOTHING] * 1000, False),
    ],
    ids=["reported", "decided", "one has ended", "all have left the loop", "nothing comes"],
)
def test_uneven_inputs_are_a_loss_if_the_others_agree_on_who_is_left(
    observations: list[Observation], is_loss: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = iter(observations)
    one = group.Group.__new__(group.Group)
    one._register = SimpleNamespace(observe=lambda present: next(seen))  # type: ignore[assignment]
    one._member = SimpleNamespace(membership=PRESENT)  # type: ignore[assignment]
    seconds = iter(range(1000))
    monkeypatch.setattr(group, "time", SimpleNamespace(monotonic=lambda: next(seconds), sleep=lambda _: None))
    assert one.is_loss(sl.UnevenInputs("rank 1 has shut down normally")) == is_loss
    assert one.is_loss(sl.PeerLost("rank 1"))
    assert not one.is_loss(ValueError())


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
