"""Memory that all ranks have: what transports give, and `sl.share_` over it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import syncline as sl
from syncline import ContractMismatch, SynclineError
from syncline.session import transport_of
from syncline.transport import Transport, run_ranks

FLOAT32, CPU = torch.float32, torch.device("cpu")


def write_and_read(transport: Transport) -> None:
    flat = transport.allocate_shared(5, FLOAT32, CPU)
    assert flat is not None
    assert (flat.shape, flat.dtype) == ((5,), FLOAT32)
    assert not bool(flat.any())
    transport.barrier().wait()
    if transport.rank == 1:
        flat[2] = 7.0
    transport.barrier().wait()
    assert flat.tolist() == [0, 0, 7, 0, 0]
    empty = transport.allocate_shared(0, torch.bfloat16, CPU)
    assert empty is not None
    assert empty.numel() == 0


def test_all_threads_see_what_one_writes() -> None:
    run_ranks(3, write_and_read)


@pytest.mark.ranks(2)
def test_processes_see_what_one_writes_and_the_front_of_allocated_memory_is_reduced() -> None:
    transport = transport_of(None)
    write_and_read(transport)
    whole = transport.allocate(30_000, FLOAT32, CPU)
    for numel in (1, 4096, 20_000, 30_000):
        front = transport.narrow(whole, numel)
        for value in (1.0, 2.0):  # the second time over what the first has left
            whole.fill_(value * (transport.rank + 1))
            transport.reduce_spans(front, (0, numel // 2, numel)).wait()
            own = front[: numel // 2] if transport.rank == 0 else front[numel // 2 :]
            assert bool((own == 3 * value).all()), numel
            transport.barrier().wait()
            whole.fill_(value * (transport.rank + 1))
            transport.all_reduce(front).wait()
            assert bool((front == 3 * value).all()), numel
            assert bool((whole[numel:] == value * (transport.rank + 1)).all()), numel
            transport.barrier().wait()


def test_all_parameters_are_moved_with_rank_0s_values() -> None:
    base = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2).double())
    base[0].bias.requires_grad_(False)
    tied = base[2]
    base.append(tied)

    def rank(transport: Transport) -> None:
        module = copy.deepcopy(base)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(float(transport.rank + 5))
        parameters = list(module.parameters())
        assert sl.share_(module, group=transport) is module
        assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True))
        assert all(bool((p == 5.0).all()) for p in parameters)
        assert not module[0].bias.requires_grad
        with sl.write_shared(module), sl.write_shared(module), torch.no_grad():
            if transport.rank == 1:
                module[3].weight.fill_(1.0)
        assert bool((module[2].weight == 1.0).all())
        module[1].running_mean.fill_(float(transport.rank))  # each rank's own
        transport.barrier().wait()
        assert bool((module[1].running_mean == transport.rank).all())

    run_ranks(2, rank)


def test_errors_inside_of_write_shared_and_writes_elsewhere_are_errors_on_every_rank() -> None:
    def rank(transport: Transport) -> None:
        module = sl.share_(nn.Linear(2, 2), group=transport)
        if transport.rank == 0:
            with pytest.raises(KeyError), sl.write_shared(module):
                raise KeyError("a")  # lets the others go
        else:
            with sl.write_shared(module):
                pass
        transport.barrier().wait()
        if transport.rank == 0:
            with torch.no_grad():
                module.bias.add_(1.0)
        elsewhere = r"outside of sl.write_shared, on rank 0: bias\."
        with pytest.raises(SynclineError, match=elsewhere), sl.write_shared(module):
            pass
        with sl.write_shared(module):  # said once
            pass
        with pytest.raises(ContractMismatch):
            sl.share_(nn.Linear(2, 2 + transport.rank), group=transport)

    run_ranks(2, rank)


def test_alone_it_is_the_same() -> None:
    module = sl.share_(nn.Linear(2, 2))
    with sl.write_shared(module), torch.no_grad():
        module.weight.fill_(2.0)
    ddp = sl.DistributedDataParallel(nn.Linear(2, 2), sharded=True)
    with sl.write_shared(ddp):
        pass
    ddp.module.load_state_dict(module.state_dict())
    with pytest.raises(ValueError, match="are not shared"):
        sl.write_shared(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"expected module to be a torch.nn.Module"):
        sl.share_(torch.zeros(2))  # type: ignore[type-var]
