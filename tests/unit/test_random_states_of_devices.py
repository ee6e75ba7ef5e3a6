"""Random states of several GPUs, with a faked torch.cuda."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from syncline.checkpoint import objects


def test_random_states_go_to_the_current_gpu_of_another_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [torch.tensor([0, 1], dtype=torch.uint8), torch.tensor([2, 3], dtype=torch.uint8)]
    current = {"device": 1}
    written: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current["device"])
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: list(states))
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", written.extend)
    sent = objects.packed()
    current["device"] = 0
    objects.set_rng_state(objects.unpacked(sent))
    assert [state.tolist() for state in written] == [[2, 3], [0, 1]]
