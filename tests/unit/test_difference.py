"""What ranks do not agree on, in words: expected texts, literally."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.words import describe_difference, describe_ranks


def test_equal_descriptions_have_no_difference() -> None:
    assert describe_difference("Net", [["a  1", "b  2"]] * 3) is None
    assert describe_difference("Net", [[]] * 3) is None
    assert describe_difference("Net", [["a  1"]]) is None


def test_one_name_with_other_properties_is_shown_side_by_side() -> None:
    expected = ["parameter fc1.weight  torch.float32 (128, 784)", "parameter fc1.bias  torch.float32 (128,)"]
    other = ["parameter fc1.weight  torch.float32 (128, 783)", "parameter fc1.bias  torch.float32 (128,)"]
    assert describe_difference("DistributedDataParallel(Net)", [expected, other, expected]) == (
        "DistributedDataParallel(Net): the ranks do not agree. The expected values are those of most ranks.\n"
        "rank 1 against ranks 0, 2:\n"
        "  parameter fc1.weight\n"
        "    expected torch.float32 (128, 784) (ranks 0, 2)\n"
        "    got      torch.float32 (128, 783) (rank 1)\n"
        "Give every rank the same objects and arguments, in the same order."
    )


def test_the_largest_group_is_the_reference_whatever_rank_0_has() -> None:
    text = describe_difference("Net", [["a  0"], ["a  1"], ["a  1"], ["a  1"]])
    assert text is not None
    assert "rank 0 against ranks 1-3:" in text
    assert "expected 1 (ranks 1-3)" in text
    assert "got      0 (rank 0)" in text


def test_of_groups_of_one_size_that_with_the_lowest_rank_is_the_reference() -> None:
    text = describe_difference("Net", [["a  0"], ["a  1"], ["a  1"], ["a  0"]])
    assert text is not None
    assert text.startswith("Net: the ranks do not agree. The expected values are those of rank 0.\n")
    assert "ranks 1, 2 against ranks 0, 3:" in text


def test_what_lacks_and_what_is_too_much() -> None:
    text = describe_difference("Net", [["a  1", "b  2"], ["a  1", "c  3"]])
    assert text is not None
    assert text.splitlines()[1:4] == ["rank 1 against rank 0:", "  also has  c  3", "  lacks  b  2"]


def test_another_order_is_said_in_words() -> None:
    text = describe_difference("Net", [["a  1", "b  2", "c  3"], ["a  1", "c  3", "b  2"]])
    assert text is not None
    assert text.splitlines()[2:5] == [
        "  the entries are in another order. The first difference is at entry 2:",
        "    expected b (rank 0)",
        "    got      c (rank 1)",
    ]


def test_entries_of_one_name_are_told_apart_by_their_position() -> None:
    text = describe_difference("Net", [["a  1", "a  2"], ["a  3", "a  2"]])
    assert text is not None
    assert text.splitlines()[2:5] == ["  a", "    expected 1 (rank 0)", "    got      3 (rank 1)"]


def test_every_other_group_is_compared_with_the_reference() -> None:
    text = describe_difference("Net", [["a  0"], ["a  0"], ["a  1"], ["a  2"]])
    assert text is not None
    assert "rank 2 against ranks 0, 1:" in text
    assert "rank 3 against ranks 0, 1:" in text


def test_more_than_twenty_differences_are_counted_not_shown() -> None:
    text = describe_difference("Net", [[f"p{i}  x" for i in range(50)], [f"p{i}  y" for i in range(50)]])
    assert text is not None
    assert text.count("expected x") == 20
    assert "  and 30 more" in text.splitlines()


def test_the_remedy_is_the_last_line() -> None:
    text = describe_difference("Net", [["a"], []], remedy="Build the same module.")
    assert text is not None
    assert text.splitlines()[-1] == "Build the same module."


def test_a_colon_separates_name_and_properties_too() -> None:
    text = describe_difference("Net", [["gradients: 8 tensors"], ["gradients: 9 tensors"]])
    assert text is not None
    assert text.splitlines()[2:4] == ["  gradients", "    expected 8 tensors (rank 0)"]


def test_lines_that_differ_in_separators_alone_still_differ() -> None:
    text = describe_difference("Net", [["a  1"], ["a: 1"]])
    assert text is not None
    assert "the entries differ only in spaces" in text


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([1, 0], "ranks 0, 1"),
        ([0, 1, 2], "ranks 0-2"),
        ([0, 2, 3, 4, 7], "ranks 0, 2-4, 7"),
    ],
)
def test_ranks_in_words(ranks: list[int], text: str) -> None:
    assert describe_ranks(ranks) == text


lines = st.lists(st.sampled_from(["a", "a  1", "a  2", "b  1", "c: 1", "d"]), max_size=5)


@settings(deadline=None, max_examples=200)
@given(st.lists(lines, min_size=1, max_size=5))
def test_a_text_exists_exactly_when_two_ranks_differ(descriptions: list[list[str]]) -> None:
    differ = any(a != b for a, b in itertools.pairwise(descriptions))
    text = describe_difference("Net", descriptions)
    assert (text is not None) == differ
    if text is not None:
        # Every rank outside of the reference group is named with a reason of its own.
        heads = [i for i, line in enumerate(text.splitlines()) if " against " in line]
        assert all(text.splitlines()[i + 1].startswith("  ") for i in heads)
        assert len(heads) == len({tuple(lines) for lines in descriptions}) - 1
