from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from syncline.gradients.riders.coverage import rotation, spread

sizes_lists = st.lists(
    st.tuples(st.integers(0, 200_000), st.sampled_from([1, 2, 4, 8, 16])), min_size=0, max_size=20
)


@given(sizes_lists, st.integers(1, 50))
def test_every_element_has_one_turn(sizes: list[tuple[int, int]], num_slices: int) -> None:
    slices = rotation(sizes, num_slices)
    assert len(slices) == num_slices
    seen: dict[int, int] = {}
    for pieces in slices:
        for piece in pieces:
            assert piece.start == seen.get(piece.leaf, 0), "in order, without gaps"
            seen[piece.leaf] = piece.stop
    assert seen == {leaf: numel for leaf, (numel, _) in enumerate(sizes)}


@given(sizes_lists.filter(bool), st.integers(1, 50))
def test_no_slice_costs_much_more_than_its_share(sizes: list[tuple[int, int]], num_slices: int) -> None:
    cost = sum(numel * itemsize for numel, itemsize in sizes) + len(sizes) * 2**14
    for pieces in rotation(sizes, num_slices):
        bytes_here = sum((piece.stop - piece.start) * sizes[piece.leaf][1] for piece in pieces)
        # What is cut ends at a multiple of 64 elements, and a tensor's overhead may lie in the slice before.
        assert bytes_here <= cost / num_slices + 2 * 64 * 16 + 1


@given(sizes_lists, st.integers(1, 50))
def test_pieces_but_the_last_are_whole_words(sizes: list[tuple[int, int]], num_slices: int) -> None:
    for pieces in rotation(sizes, num_slices):
        for piece in pieces:
            assert piece.start % 64 == 0
            assert piece.stop % 64 == 0 or piece.stop == sizes[piece.leaf][0]


@given(sizes_lists, st.integers(1, 50))
def test_a_round_of_turns_has_it_all_and_no_more_slices_than_are_worth_it(
    sizes: list[tuple[int, int]], num_turns: int
) -> None:
    turns = spread(sizes, num_turns)
    assert len(turns) == num_turns
    numels = [0] * len(sizes)
    for piece in (piece for pieces in turns for piece in pieces):
        numels[piece.leaf] += piece.stop - piece.start
    assert numels == [numel for numel, _ in sizes]
    cost = sum(numel * itemsize for numel, itemsize in sizes) + len(sizes) * 2**14
    assert sum(map(bool, turns)) <= max(1, cost // 2**18 + 1)
