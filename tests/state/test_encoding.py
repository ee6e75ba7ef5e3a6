"""A state as JSON and tensors: everything comes back as it was, or is refused by its place."""

from __future__ import annotations

import datetime
import enum
import json
import random
from collections import Counter, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from support.cases import case
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


def test_what_cannot_be_held_is_refused_by_its_place() -> None:
    values: dict[str, Any] = {
        "builtins.object": object(),
        "torch.nn.modules.linear.Linear": nn.Linear(1, 1),
        "builtins.set": {1, 2},
        "builtins.complex": 1j,
        "test_encoding.Pair": Pair(1, 2),
        "test_encoding.Level": Level.LOW,
        "datetime.date": datetime.date(2020, 1, 1),
        "builtins.function": lambda: None,
    }
    for kind, value in values.items():
        text = f"^mine.groups.1.x is a {kind}, which cannot be stored: expected tensors, numbers"
        with case(kind), pytest.raises(TypeError, match=text):
            encode({"groups": [0, {"x": value}]}, "mine")
    tensors = {
        "expected mine.x to be a dense tensor, got torch.sparse_coo": torch.zeros(2, 2).to_sparse(),
        "expected mine.x to have values, got a tensor on the meta device": torch.zeros(2, device="meta"),
        "mine.x is a tensor of torch.float8_e4m3fnuz": torch.zeros(2, dtype=torch.float8_e4m3fnuz),
    }
    for text, tensor in tensors.items():
        with case(text), pytest.raises(ValueError, match=f"^{text}"):
            encode({"x": tensor}, "mine")


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
    state = {
        "model": dict(model.state_dict()),
        "optimizer": optimizer.state_dict(),
        "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10).state_dict(),
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
    }
    tree, tensors = encode(state | {"model": model.state_dict()}, "state")
    assert same(decode(json.loads(json.dumps(tree, allow_nan=False)), tensors), state)


def test_what_this_version_does_not_know_is_refused() -> None:
    unknown: list[dict[str, Any]] = [{"$later": 1}, {"$dtype": "torch.nn"}, {"$dtype": "torch.zeros"}]
    for encoded in unknown:
        text = "expected a value that this version of Syncline can decode"
        with case(encoded), pytest.raises(ValueError, match=text):
            decode(encoded, {})
