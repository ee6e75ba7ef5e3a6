"""What ranks do not agree on, in words: expected texts, literally."""

from __future__ import annotations

import itertools

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


EXPECTED: dict[str, tuple[list[list[str]], list[str]]] = {
    "the largest group is the reference, whatever rank 0 has": (
        [["a  0"], ["a  1"], ["a  1"], ["a  1"]],
        ["rank 0 against ranks 1-3:", "  a", "    expected 1 (ranks 1-3)", "    got      0 (rank 0)"],
    ),
    "of groups of one size, that with the lowest rank is the reference": (
        [["a  0"], ["a  1"], ["a  1"], ["a  0"]],
        [
            "Net: the ranks do not agree. The expected values are those of rank 0.",
            "ranks 1, 2 against ranks 0, 3:",
        ],
    ),
    "what lacks and what is too much": (
        [["a  1", "b  2"], ["a  1", "c  3"]],
        ["rank 1 against rank 0:", "  also has  c  3", "  lacks  b  2"],
    ),
    "another order is said in words": (
        [["a  1", "b  2", "c  3"], ["a  1", "c  3", "b  2"]],
        [
            "  the entries are in another order. The first difference is at entry 2:",
            "    expected b (rank 0)",
            "    got      c (rank 1)",
        ],
    ),
    "entries of one name are told apart by their position": (
        [["a  1", "a  2"], ["a  3", "a  2"]],
        ["rank 1 against rank 0:", "  a", "    expected 1 (rank 0)", "    got      3 (rank 1)"],
    ),
    "every other group is compared with the reference": (
        [["a  0"], ["a  0"], ["a  1"], ["a  2"]],
        [
            *("rank 2 against ranks 0, 1:", "  a", "    expected 0 (ranks 0, 1)", "    got      1 (rank 2)"),
            *("rank 3 against ranks 0, 1:", "  a", "    expected 0 (ranks 0, 1)", "    got      2 (rank 3)"),
        ],
    ),
    "a colon separates name and properties, too": (
        [["gradients: 8 tensors"], ["gradients: 9 tensors"]],
        ["  gradients", "    expected 8 tensors (rank 0)"],
    ),
}


def test_each_kind_of_difference_has_its_lines() -> None:
    for name, (descriptions, expected) in EXPECTED.items():
        text = str(describe_difference("Net", descriptions, remedy="Build the same module."))
        assert text.splitlines()[-1] == "Build the same module."
        assert "\n".join(expected) in text, f"{name}:\n{text}"
    text = str(describe_difference("Net", [["a  1"], ["a: 1"]]))
    assert "the entries differ only in spaces" in text


def test_more_than_twenty_differences_are_counted_not_shown() -> None:
    text = describe_difference("Net", [[f"p{i}  x" for i in range(50)], [f"p{i}  y" for i in range(50)]])
    assert text.count("expected x") == 20
    assert "  and 30 more" in text.splitlines()


def test_ranks_in_words() -> None:
    assert describe_ranks([3]) == "rank 3"
    assert describe_ranks([1, 0]) == "ranks 0, 1"
    assert describe_ranks([0, 1, 2]) == "ranks 0-2"
    assert describe_ranks([0, 2, 3, 4, 7]) == "ranks 0, 2-4, 7"


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
