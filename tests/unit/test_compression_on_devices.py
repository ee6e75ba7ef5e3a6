"""What compressions choose by device, on a machine without one: see fake_devices.py."""

from __future__ import annotations

import torch
from fake_devices import fake
from torch import Tensor

from syncline.compression.quantize import Blocks
from syncline.compression.topk import largest_places


def test_the_largest_values_are_those_that_the_cpu_finds() -> None:
    values = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    expected = largest_places(values, 100)
    assert torch.equal(largest_places(fake(values), 100).as_subclass(Tensor), expected)


def test_a_device_quantizes_in_one_slab() -> None:
    blocks = torch.zeros(2, 5000, 32)
    form = Blocks(4, 32)
    assert list(form._slabs(fake(blocks))) == [slice(0, 5000)]
    assert len(list(form._slabs(blocks))) > 1
