"""The states of random number generators that `sl.steps` remembers."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from syncline.resilience import generators
from syncline.resilience.generators import Generators


def draw() -> tuple[float, ...]:
    """A number of each generator. The second call of `normal` uses what the first has left."""
    return random.random(), torch.rand(()).item(), np.random.normal(), np.random.random()


@pytest.mark.parametrize("num_normal", [0, 1])
def test_the_same_numbers_come_again(num_normal: int) -> None:
    found = Generators()
    for _ in range(3):
        np.random.normal(size=num_normal)  # leaves a number for the next call
        restore = found.remember()
        first = draw()
        restore()
        assert draw() == first


def test_numpys_state_is_copied_only_if_it_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    np.random.seed(3)
    found, copies = Generators(), 0
    get_state = np.random.get_state

    def counting() -> object:
        nonlocal copies
        copies += 1
        return get_state()

    monkeypatch.setattr(np.random, "get_state", counting)
    found.remember()
    found.remember()
    assert copies == 1
    np.random.random()
    found.remember()
    assert copies == 2


def test_a_number_that_is_used_up_without_a_change_is_noticed() -> None:
    np.random.seed(3)
    found = Generators()
    np.random.normal()  # leaves a number
    found.remember()
    np.random.normal()  # uses it up: the words stay as they are
    restore = found.remember()
    expected = np.random.normal()
    restore()
    assert np.random.normal() == expected


@pytest.mark.parametrize("kind", ["_OfPython", "_OfNumpy"])
def test_without_a_look_at_the_words_the_state_is_always_copied(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(getattr(generators, kind), "_look", lambda self: None)
    found = Generators()
    for _ in range(2):
        restore = found.remember()
        expected = draw()
        restore()
        assert draw() == expected
        restore()


def test_pythons_state_is_copied_only_if_it_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    random.seed(3)
    found, copies = Generators(), 0
    get_state = random.getstate

    def counting() -> object:
        nonlocal copies
        copies += 1
        return get_state()

    monkeypatch.setattr(random, "getstate", counting)
    found.remember()
    found.remember()
    assert copies == 1
    for number in range(2, 1300):  # twice round all words
        random.getrandbits(32)
        found.remember()
        assert copies == number
    random.seed(4)
    found.remember()
    assert copies == 1300


def test_a_number_of_gauss_that_is_used_up_without_a_change_is_noticed() -> None:
    random.seed(3)
    found = Generators()
    random.gauss(0.0, 1.0)  # leaves a number
    found.remember()
    random.gauss(0.0, 1.0)  # uses it up: the words stay as they are
    restore = found.remember()
    expected = random.gauss(0.0, 1.0)
    restore()
    assert random.gauss(0.0, 1.0) == expected


def test_words_that_are_elsewhere_are_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in another implementation of Python: the state is always copied."""
    monkeypatch.setattr(generators._OfPython, "_look", lambda self: b"always the same bytes...")
    found = Generators()
    for _ in range(3):
        restore = found.remember()
        expected = random.random()
        restore()
        assert random.random() == expected
