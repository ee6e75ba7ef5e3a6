"""A state as JSON and tensors: everything comes back as it was, or is refused by its place."""

from __future__ import annotations

import datetime
import enum
import json
import random
from collections import Counter, OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from syncline.checkpoint.encoding import decode, encode

Pair = namedtuple("Pair", "a b")


class Level(enum.IntEnum):
    LOW = 1


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.sampled_from(
        [torch.float32, torch.bool, torch.device("cpu"), torch.device("cuda:1"), torch.Size([2, 3])]
    ),
    st.integers(0, 5).map(lambda n: torch.arange(n, dtype=torch.float32)),
    st.integers(0, 5).map(lambda n: torch.arange(n) * (1 + 2j)),
    st.just(torch.ones(2, dtype=torch.complex64).mul(1j).conj()),
)
KEYS = st.one_of(st.text(max_size=3), st.integers(), st.booleans(), st.none(), st.tuples(st.integers()))
STATES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(KEYS, inner, max_size=3).map(Counter),
        st.dictionaries(st.sampled_from(["$tensor", "$", "x.y", "x", "y"]), inner, max_size=3),
    ),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(map(repr, one)) == list(map(repr, other)) and all(
            same(a, b) for a, b in zip(one.values(), other.values(), strict=True)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return repr(one) == repr(other)  # nan is not itself, and 0.0 equals -0.0


@given(STATES)
def test_what_is_encoded_comes_back(state: Any) -> None:
    tree, tensors = encode(state, "state")
    text = json.dumps(tree, allow_nan=False)
    assert same(decode(json.loads(text), tensors), state)


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (object(), r"builtins\.object"),
        (nn.Linear(1, 1), r"torch\.nn\.modules\.linear\.Linear"),
        ({1, 2}, r"builtins\.set"),
        (1j, r"builtins\.complex"),
        (Pair(1, 2), r"test_encoding\.Pair"),
        (Level.LOW, r"test_encoding\.Level"),
        (datetime.date(2020, 1, 1), r"datetime\.date"),
        (lambda: None, r"builtins\.function"),
    ],
)
def test_what_cannot_be_held_is_refused_by_its_place(value: Any, what: str) -> None:
    with pytest.raises(
        TypeError,
        match=rf"^mine\.groups\.1\.x is a {what}, which cannot be stored: expected tensors, numbers",
    ):
        encode({"groups": [0, {"x": value}]}, "mine")


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.zeros(2, 2).to_sparse(), r"of layout torch\.sparse_coo and dtype torch\.float32, which"),
        (torch.zeros(2, device="meta"), "on the meta device"),
        (torch.zeros(2, dtype=torch.float8_e4m3fnuz), r"of torch\.float8_e4m3fnuz"),
    ],
)
def test_tensors_without_plain_values_are_refused(tensor: Tensor, why: str) -> None:
    with pytest.raises(ValueError, match=rf"^mine\.x is a tensor {why}"):
        encode({"x": tensor}, "mine")


def test_an_integer_that_python_would_not_read_is_refused() -> None:
    assert decode(json.loads(json.dumps(encode({"x": -(2**8191)}, "mine")[0])), {}) == {"x": -(2**8191)}
    with pytest.raises(ValueError, match=r"^mine\.x is an integer of 8193 bits"):
        encode({"x": 2**8192}, "mine")


def test_a_tensor_that_occurs_twice_is_stored_once_and_comes_back_as_one() -> None:
    shared = torch.ones(2)
    tree, tensors = encode({"a": shared, "b": shared, "c": torch.ones(2)}, "m")
    assert list(tensors) == ["m.a", "m.c"]
    back = decode(tree, tensors)
    assert back["a"] is back["b"]
    assert back["a"] is not back["c"]


def test_places_that_look_the_same_have_names_of_their_own() -> None:
    tree, tensors = encode({"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}, "m")
    assert list(tensors) == ["m.a.b", "m.a.b (2)"]
    back = decode(tree, tensors)
    assert (back["a.b"].item(), back["a"]["b"].item()) == (0.0, 1.0)


def test_what_training_runs_have_can_be_held() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.8, 0.9))
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
    }
    tree, tensors = encode(state, "state")
    back = decode(json.loads(json.dumps(tree, allow_nan=False)), tensors)
    assert isinstance(state["model"], OrderedDict)
    assert same({key: dict(value) if key == "model" else value for key, value in state.items()}, back)
    other = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    other.load_state_dict(back["model"])
    torch.optim.AdamW(other.parameters()).load_state_dict(back["optimizer"])
    random.setstate(back["python"])


@pytest.mark.parametrize("encoded", [{"$later": 1}, {"$dtype": "torch.nn"}, {"$dtype": "torch.zeros"}])
def test_what_this_version_does_not_know_is_refused(encoded: Any) -> None:
    with pytest.raises(ValueError, match="expected a value that this version of Syncline can decode"):
        decode(encoded, {})
