"""Branches for GPUs, on a machine without one: CPU tensors that say they are on cuda:0, and a torch.cuda that is faked.

The arithmetic is real. Streams, kernels and NCCL are not: those are tested in tests/gpu.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from syncline.checkpoint import objects
from syncline.compression.quantize import Quantize
from syncline.compression.topk import largest_places
from syncline.gradients.riders.finite import OwnGradients
from syncline.session import ranks
from syncline.session.rendezvous import Presence, backend_for


class Fake(Tensor):
    """A tensor with its values on the CPU, which says that it is on cuda:0."""

    device = property(lambda self: torch.device("cuda", 0))  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]


def fake(values: Tensor) -> Tensor:
    return values.as_subclass(Fake)  # type: ignore[arg-type]


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


def test_the_largest_values_are_those_that_the_cpu_finds() -> None:
    values = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    expected = largest_places(values, 100).sort().values
    assert torch.equal(largest_places(fake(values), 100).as_subclass(Tensor).sort().values, expected)


def test_a_device_quantizes_in_one_slab() -> None:
    blocks = torch.zeros(2, 5000, 32)
    quantize = Quantize(4, block=32) if "block" in Quantize.__init__.__code__.co_varnames else Quantize(4)
    assert list(quantize._slabs(fake(blocks))) == [slice(0, 5000)]
    assert len(list(quantize._slabs(blocks))) > 1


@pytest.mark.parametrize(
    ("asked", "local_rank", "num_visible", "expected"),
    [(None, 1, 2, "cuda:1"), (None, 3, 1, "cuda:0"), ("cuda", 1, 2, "cuda:1"), ("cuda:0", 1, 2, "cuda:0")],
)
def test_each_rank_of_a_host_gets_its_gpu(
    asked: str | None, local_rank: int, num_visible: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_visible)
    assert str(ranks._device(asked and torch.device(asked), local_rank)) == expected


def presence(rank: int, gpu: str | None) -> Presence:
    return Presence(rank=rank, size=2, host="here", pid=rank, gpu=gpu)


def test_nccl_serves_ranks_with_a_gpu_each_and_gloo_serves_ranks_that_share_one() -> None:
    assert backend_for([presence(0, None), presence(1, None)], warn=True) == "gloo"
    assert backend_for([presence(0, "a"), presence(1, "b")], warn=True) == "cpu:gloo,cuda:nccl"
    with pytest.warns(UserWarning, match=r"2 ranks share 1 GPU\(s\)"):
        assert backend_for([presence(0, "a"), presence(1, "a")], warn=True) == "cpu:gloo,cuda:gloo"


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
