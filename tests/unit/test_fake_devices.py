"""Paths that only tensors on a device take, on a machine without one: see fake_devices.py."""

from __future__ import annotations

import pytest
import torch
from fake_devices import fake
from torch import Tensor, nn

import syncline as sl
from syncline.gradients.riders.finite import OwnGradients
from syncline.transport import C10dTransport, C10dWork, Transport, run_ranks


class Bucket:
    def __init__(self, *parts: Tensor) -> None:
        self.parts = parts

    def unchecked(self) -> Tensor:
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


@pytest.mark.ranks(2)
def test_gloo_sends_copies_of_tensors_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Tensor | None] = []
    init = C10dWork.__init__

    def noting(self: C10dWork, transport: C10dTransport, operation: str, detail: str, tensor: Tensor) -> None:
        sent.append(tensor)
        init(self, transport, operation, detail, tensor)

    t = C10dTransport()
    monkeypatch.setattr(C10dWork, "__init__", noting)
    x = torch.tensor([1.0, 2.0]) + t.rank
    for op, expected in {"sum": [3.0, 5.0], "mean": [1.5, 2.5], "max": [2.0, 3.0]}.items():
        y = x.clone()
        t.all_reduce(fake(y), op).wait()  # type: ignore[arg-type]
        assert y.tolist() == expected
    half, whole, other = torch.zeros(1), torch.zeros(4), torch.zeros(2)
    t.reduce_scatter(fake(half), fake(x.clone())).wait()
    assert half.tolist() == [3.0, 5.0][t.rank : t.rank + 1]
    t.all_gather(fake(whole), fake(x.clone())).wait()
    assert whole.tolist() == [1.0, 2.0, 2.0, 3.0]
    t.broadcast(fake(other if t.rank else x), 0).wait()
    assert t.rank == 0 or other.tolist() == [1.0, 2.0]
    sending = t.send(fake(x), 1 - t.rank)
    t.recv(fake(other), 1 - t.rank).wait()
    sending.wait()
    assert other.tolist() == ([2.0, 3.0] if t.rank == 0 else [1.0, 2.0])
    assert len(sent) == 8
    assert all(type(tensor) is Tensor for tensor in sent)


def test_a_setting_on_a_device_is_not_read_and_so_not_compared() -> None:
    def rank(t: Transport, lr: Tensor) -> None:
        ddp = sl.DistributedDataParallel(nn.Linear(2, 1), process_group=t)
        optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=lr + t.rank, foreach=False))
        ddp(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    with pytest.raises(sl.ContractMismatch, match="lr"):
        run_ranks(2, lambda t: rank(t, torch.tensor(0.5)))
    run_ranks(2, lambda t: rank(t, fake(torch.tensor(0.5))))
