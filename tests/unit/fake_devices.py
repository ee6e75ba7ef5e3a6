"""CPU tensors that say they are on cuda:0: the arithmetic is real. Streams, kernels and NCCL need tests/gpu."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor


class Fake(Tensor):
    """A tensor with its values on the CPU, which says that it is on cuda:0."""

    device = property(lambda self: torch.device("cuda", 0))  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]


def fake(values: Tensor) -> Tensor:
    return values.as_subclass(Fake)  # type: ignore[arg-type]


class SaysCuda(Tensor):
    """A tensor on the CPU whose `is_cuda` is True. Its `device` is the CPU, so a wrapper can reduce its gradient."""

    is_cuda = property(lambda self: True)  # type: ignore[assignment]


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch report two GPUs, of which the second is the current one."""
    facts = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 2,
        "current_device": 1,
        "get_device_name": "a GPU",
    }
    for name, value in facts.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
