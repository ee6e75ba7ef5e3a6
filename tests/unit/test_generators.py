"""The states of random number generators that `sl.steps` remembers."""

from __future__ import annotations

import gc
import random

import numpy as np
import pytest
import torch

from syncline.resilience.undo import remember_generators


def draw() -> tuple[float, ...]:
    """A number of each generator. The second call of `normal` and of `gauss` uses what the first has left."""
    return (
        random.random(),
        random.gauss(0.0, 1.0),
        torch.rand(()).item(),
        np.random.normal(),
        np.random.random(),
    )


@pytest.mark.parametrize("num_left", [0, 1])
def test_the_same_numbers_come_again(num_left: int) -> None:
    for _ in range(3):
        np.random.normal(size=num_left)  # leaves a number for the next call
        for _ in range(num_left):
            random.gauss(0.0, 1.0)
        restore = remember_generators()
        first = draw()
        restore()
        assert draw() == first


def test_no_garbage_collection_begins_while_torch_holds_the_mutex_of_its_generator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under Python 3.11, its destructors would let another rank of this process wait for the mutex for ever."""
    may_begin, state = [gc.isenabled()], torch.get_rng_state()
    monkeypatch.setattr(torch, "get_rng_state", lambda: may_begin.append(gc.isenabled()) or state)
    remember_generators()
    assert [*may_begin, gc.isenabled()] == [True, False, True]
