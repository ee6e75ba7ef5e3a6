"""Which tensors travel alone and which together, and walking through nested containers: plain arithmetic."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from syncline.tensors.packing import plan_pieces
from syncline.trees import leaves, map_leaves

# ---------------------------------------------------------------------- packing


def test_tensors_are_packed_up_to_the_cap_unless_they_travel_alone() -> None:
    assert plan_pieces([40, 40, 20, 1], cap_bytes=100, alone_bytes=1000) == [(0, 1, 2), (3,)]
    assert plan_pieces([10, 1000, 10], cap_bytes=100, alone_bytes=1000) == [(0, 2), (1,)]
    assert plan_pieces([10, 999, 10], cap_bytes=2000, alone_bytes=1000) == [(0, 1, 2)]
    assert plan_pieces([10, 500, 10], cap_bytes=100, alone_bytes=1000) == [(0,), (1,), (2,)]
    assert plan_pieces([1, 2, 3, 4], ["cpu", "cuda", "cpu", "cuda"], cap_bytes=100) == [(0, 2), (1, 3)]
    assert plan_pieces([0, 5, 0], cap_bytes=100) == [(1,)]  # empty ones are not sent
    assert plan_pieces([0, 0]) == plan_pieces([]) == []


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(st.integers(0, 300), st.sampled_from("ab")), max_size=30),
    st.integers(1, 200),
    st.integers(1, 250),
)
def test_every_tensor_with_bytes_is_in_exactly_one_piece(
    tensors: list[tuple[int, str]], cap_bytes: int, alone_bytes: int
) -> None:
    sizes = [size for size, _ in tensors]
    places = [place for _, place in tensors]
    pieces = plan_pieces(sizes, places, cap_bytes=cap_bytes, alone_bytes=alone_bytes)
    assert sorted(i for piece in pieces for i in piece) == [i for i, size in enumerate(sizes) if size]
    for piece in pieces:
        assert list(piece) == sorted(piece)
        assert len({places[i] for i in piece}) == 1
        if len(piece) > 1:
            assert sum(sizes[i] for i in piece) <= cap_bytes
            assert max(sizes[i] for i in piece) < alone_bytes


# ---------------------------------------------------------------------- nested containers

Point = namedtuple("Point", ["x", "y"])


@dataclass(frozen=True)
class Metrics:
    loss: float
    num_steps: int
    total: float = field(init=False, default=0.0)


def test_dicts_are_walked_in_the_order_of_their_keys_not_of_insertion() -> None:
    assert list(leaves({"b": 1, "a": 2})) == list(leaves({"a": 2, "b": 1})) == [("a", 2), ("b", 1)]


def test_paths_name_the_way_to_a_leaf() -> None:
    tree = {"a": [1, (2,)], 3: {"x": 4}, "p": Point(5, 6), "m": Metrics(0.5, 7)}
    paths = ["[3].x", "a[0]", "a[1][0]", "m.loss", "m.num_steps", "p.x", "p.y"]
    assert [path for path, _ in leaves(tree)] == paths
    assert list(leaves(1)) == [("", 1)]
    assert list(leaves({"a": [1]}, "values")) == [("values.a[0]", 1)]


def test_the_same_containers_come_back() -> None:
    metrics = Metrics(0.5, 7)
    tree: dict[str, Any] = {"b": [1, (2,)], "a": OrderedDict(z=3, y=4), "p": Point(5, 6), "m": metrics}
    new = map_leaves(tree, lambda path, leaf: leaf * 2)
    assert new == {"b": [2, (4,)], "a": OrderedDict(z=6, y=8), "p": Point(10, 12), "m": Metrics(1.0, 14)}
    assert list(new) == ["b", "a", "p", "m"]
    assert list(new["a"]) == ["z", "y"]
    assert type(new["a"]) is OrderedDict
    assert type(new["p"]) is Point
    assert tree["b"] == [1, (2,)]
    assert tree["a"]["z"] == 3


def test_leaves_are_mapped_in_the_order_in_which_they_are_listed() -> None:
    tree = {"b": [1, {"d": 2, "c": 3}], "a": 4}
    visited: list[tuple[str, int]] = []
    map_leaves(tree, lambda path, leaf: visited.append((path, leaf)))
    assert visited == list(leaves(tree))
