"""The state of ranks that train is sent to one that joins. Threads stand for ranks."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from syncline.resilience.handover import receive_state, send_state
from syncline.transport import ThreadGroup


def state_of_donors() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    large = {name: torch.randn(200, 100, generator=generator) for name in ("weight", "wide", "momentum")}
    return {**large, "bias": torch.arange(3.0), "turned": torch.ones(200, 300).t().clone(), "step": 4}


def handed_over(into: dict[str, Any] | None) -> dict[str, Any]:
    """What the third of three ranks receives of the others."""
    group = ThreadGroup(3)
    found: list[dict[str, Any]] = []

    def take_part(rank: int) -> None:
        transport = group.transport(rank)
        if rank == 2:
            found.append(receive_state(transport, [0, 1], into))
        else:
            send_state(state_of_donors(), transport, [2], [0, 1])

    threads = [threading.Thread(target=take_part, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [received] = found
    return received


def check_values(received: dict[str, Any]) -> None:
    sent = state_of_donors()
    assert received.keys() == sent.keys()
    assert received["step"] == 4
    for name, value in sent.items():
        assert not isinstance(value, Tensor) or torch.equal(received[name], value), name


def test_a_state_is_received_in_new_memory() -> None:
    check_values(handed_over(None))


def test_memory_that_fits_is_used_and_other_memory_is_left_alone() -> None:
    into = {
        "weight": torch.zeros(200, 100),
        "wide": torch.zeros(200, 100, dtype=torch.float64),
        "turned": torch.zeros(200, 300).t(),
        "only here": torch.zeros(200, 100),
    }
    received = handed_over(into)
    check_values(received)
    assert received["weight"] is into["weight"] or received["weight"].data_ptr() == into["weight"].data_ptr()
    for name in ("wide", "turned", "only here"):
        assert not into[name].any(), name
