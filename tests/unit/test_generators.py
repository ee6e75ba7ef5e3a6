"""The states of random number generators that `sl.steps` remembers."""

from __future__ import annotations

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
