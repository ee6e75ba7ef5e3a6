"""The search for NaN in gradients on a device, on a machine without one: see fake_devices.py."""

from __future__ import annotations

import torch
from fake_devices import fake
from torch import Tensor

from syncline.gradients.riders.finite import OwnGradients


class Bucket:
    def __init__(self, *parts: Tensor) -> None:
        self.parts = parts

    def own(self) -> Tensor:
        return self.parts[0]

    def own_parts(self) -> list[tuple[int, Tensor]]:
        return list(enumerate(self.parts))


def test_gradients_on_a_device_are_checked_later_and_found_by_parameter() -> None:
    own = OwnGradients()
    nan, inf = torch.tensor([1.0, float("nan")]), torch.tensor([float("-inf")])
    assert own.check(Bucket(*map(fake, (torch.ones(2), nan, inf)))) is False  # type: ignore[arg-type]
    assert own.found == {}, "nothing waits for the device before the end of the backward"
    assert own.wait() == {1: "NaN", 2: "infinity"}
    own.check_gradients([(7, fake(nan)), (8, fake(torch.ones(1)))])
    assert own.wait()[7] == "NaN"
    assert 8 not in own.found
