"""A backward: its table of states is that of the code, and a rider reads of it what belongs to this step."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest

from syncline import UnreducedGradients
from syncline.gradients import Words
from syncline.gradients import backward as module
from syncline.gradients.backward import ALLOWED_MOVES, Backward, BackwardState
from syncline.gradients.bucket_plan import BucketCaps
from syncline.gradients.options import GradientOptions
from syncline.gradients.riders.missing import MissingGradients
from syncline.gradients.riders.roster import Roster
from syncline.gradients.usage import StaticUsage
from syncline.transport import Transport, run_ranks

DOCS = Path(__file__).parents[2] / "docs" / "inside" / "architecture.md"

_ROW = re.compile(r"^\| `?([A-Z]+)`?\s+\|.*\|([^|]*)\|$", re.MULTILINE)


def moves_in(text: str) -> dict[str, set[str]]:
    """The rows of the table of states in `text`: a state, and the next ones."""
    return {state: set(re.findall(r"[A-Z]{4,}", after)) for state, after in _ROW.findall(text)}


@pytest.mark.parametrize("text", [str(module.__doc__), DOCS.read_text()], ids=["module", "architecture page"])
def test_the_table_of_states_is_that_of_the_code(text: str) -> None:
    assert moves_in(text) == {state.name: {to.name for to in after} for state, after in ALLOWED_MOVES.items()}


_RIDER = re.compile(r"^\| `(\w+)` \| (\d+)(?: each)? \| ([^|]+) \|", re.MULTILINE)


@pytest.mark.parametrize(("compares", "left_out"), [(True, "replica_look"), (False, "replica_watch")])
def test_the_page_lists_the_riders_in_the_order_in_which_they_conclude(compares: bool, left_out: str) -> None:
    def rank(t: Transport) -> Roster:
        options = GradientOptions(
            caps=BucketCaps(cap_bytes=1, first_cap_bytes=1),
            as_bucket_view=False,
            allow_unused=False,
            static_graph=True,
            compares_replicas=compares,
            looks_at_replicas=not compares,
            on_nonfinite="raise",
        )
        roster = Roster("raise")
        roster.use(["weight"], t, options, static=StaticUsage(1), gradients=list)
        return roster

    roster = run_ranks(2, rank)[0]
    roster.metrics.use_names(["loss"])
    riders = [(type(one).__module__.rpartition(".")[2], one.num_bits, one.subject) for one in roster.riders]
    listed = [(file, int(bits), subject) for file, bits, subject in _RIDER.findall(DOCS.read_text())]
    assert [one for one in listed if one[0] != left_out] == riders
    assert roster.subjects == tuple(subject for _, _, subject in riders)


def test_every_other_move_is_refused() -> None:
    for state, to in product(BackwardState, repeat=2):
        backward = Backward(step=3, state=state)
        if to in ALLOWED_MOVES[state]:
            backward.move(to)
            assert backward.state is to
        else:
            with pytest.raises(AssertionError, match=f"the backward of step 3: {state.value} -> {to.value}"):
                backward.move(to)


def test_a_rank_names_the_gradients_that_are_missing_in_this_step_and_none_of_an_earlier_one() -> None:
    def rank(t: Transport) -> str:
        rider = MissingGradients(["weight", "bias"], are_allowed=False)
        texts = []
        for step, missing in ((1, {0}), (2, set() if t.rank else {1})):
            backward = Backward(step=step, state=BackwardState.FILLING)
            backward.missing = frozenset(missing)
            rider.word(backward)
            with pytest.raises(UnreducedGradients) as caught:
                rider.receive(Words((1, int(not t.rank or step == 1)), step, t))
            texts.append(str(caught.value))
        assert "weight" in texts[0]
        return texts[1]

    first, second = run_ranks(2, rank)
    assert first == second
    assert "bias" in first
    assert "weight" not in first
