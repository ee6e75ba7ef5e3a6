"""The state of ranks that train is sent to one that joins. Threads stand for ranks."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from syncline.resilience.handover import memory_for_state, receive_state, send_state
from syncline.transport import ThreadGroup


def state_of_donors() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    large = {name: torch.randn(200, 100, generator=generator) for name in ("weight", "wide", "momentum")}
    return {**large, "bias": torch.arange(3.0), "turned": torch.ones(200, 300).t().clone(), "step": 4}


def handed_over(into: dict[str, Any] | None, spare: list[Tensor]) -> dict[str, Any]:
    """What the third of three ranks receives of the others."""
    group = ThreadGroup(3)
    found: list[dict[str, Any]] = []

    def take_part(rank: int) -> None:
        transport = group.transport(rank)
        if rank == 2:
            found.append(receive_state(transport, [0, 1], into, spare))
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
    check_values(handed_over(None, []))


def test_memory_that_fits_is_used_and_other_memory_is_left_alone() -> None:
    into = {
        "weight": torch.zeros(200, 100),
        "wide": torch.zeros(200, 100, dtype=torch.float64),
        "turned": torch.zeros(200, 300).t(),
        "only here": torch.zeros(200, 100),
    }
    spare = [torch.zeros(5), torch.zeros(200, 100)]
    received = handed_over(into, spare)
    check_values(received)
    assert received["weight"] is into["weight"] or received["weight"].data_ptr() == into["weight"].data_ptr()
    assert received["momentum"].data_ptr() == spare[1].data_ptr()
    for name in ("wide", "turned", "only here"):
        assert not into[name].any(), name
    assert not spare[0].any()


def test_memory_for_the_state_of_an_optimizer_has_the_sizes_that_it_will_need() -> None:
    large, small = nn.Parameter(torch.zeros(200, 100)), nn.Parameter(torch.zeros(3))
    for optimizer in (
        torch.optim.SGD([large, small], lr=0.1),
        torch.optim.SGD([large, small], lr=0.1, momentum=0.9),
        torch.optim.AdamW([large, small]),
    ):
        large.grad, small.grad = torch.ones_like(large), torch.ones_like(small)
        prepared = memory_for_state([optimizer])
        optimizer.step()
        needed = [value for value in optimizer.state[large].values() if value is not None and value.dim()]
        assert [one.shape for one in prepared] == [one.shape for one in needed]
