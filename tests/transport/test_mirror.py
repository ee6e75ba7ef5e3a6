"""The engine that imitates the other ranks gives the results that ranks with equal values get over threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from support.cases import case
from syncline import PeerFailed, SynclineError
from syncline.transport import REDUCE_OPS, MirrorTransport, Transport, run_ranks

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.int8, torch.int64, torch.bool)


def mirror(size: int, *, has_shared_memory: bool = True) -> MirrorTransport:
    return MirrorTransport(rank=0, size=size, timeout_seconds=5.0, has_shared_memory=has_shared_memory)


def values(numel: int, dtype: torch.dtype) -> Tensor:
    return (torch.arange(numel) % 5 + 1).to(dtype)


def assert_equal_to_threads(
    program: Callable[[Transport], list[Tensor]], size: int, *, rtol: float | None = None
) -> None:
    """Compare the results of this rank with those of rank 0 of as many threads, within the rounding of a sum."""
    expected, *_ = run_ranks(size, program)
    for got, wanted in zip(program(mirror(size)), expected, strict=True):
        is_rounded = got.is_floating_point() or got.is_complex()
        within = rtol or (size * torch.finfo(got.dtype).eps if is_rounded else 0.0)
        torch.testing.assert_close(got, wanted, rtol=within, atol=1e-5 if rtol else 0.0)


def reductions(t: Transport) -> list[Tensor]:
    found = []
    for dtype in DTYPES:
        for op in REDUCE_OPS:
            tensor, part = values(7, dtype), torch.zeros(3, dtype=dtype)
            whole = values(3 * t.size, dtype)
            try:
                t.all_reduce(tensor, op).wait()  # type: ignore[arg-type]
                t.reduce_scatter(part, whole, op).wait()  # type: ignore[arg-type]
            except ValueError:  # this dtype has no such operation, on any engine
                continue
            assert torch.equal(whole, values(3 * t.size, dtype)), "the input was changed"
            found += [tensor, part]
    return found


def what_only_moves(t: Transport) -> list[Tensor]:
    everyone, empty = torch.zeros(4 * t.size), torch.zeros(0)
    t.all_gather(everyone, values(4, torch.float32)).wait()
    t.all_gather(empty, torch.zeros(0)).wait()
    within = torch.zeros(2 * t.size)
    within[:2] = 3.0
    t.all_gather(within, torch.tensor([3.0, 3.0])).wait()
    parameter = nn.Parameter(values(3, torch.float32))
    t.broadcast(parameter, t.size - 1).wait()
    spans = values(2 * t.size + 1, torch.float32)
    bounds = [*range(0, 2 * t.size, 2), 2 * t.size + 1]
    t.reduce_spans(spans, bounds).wait()
    t.barrier().wait()
    assert t.all_gather_bytes(b"equal") == [b"equal"] * t.size
    return [everyone, empty, within, parameter.detach(), spans[: bounds[1]]]


def test_operations_have_the_results_of_equal_ranks() -> None:
    for program, sizes in ((reductions, (1, 2, 3, 5)), (what_only_moves, (1, 2, 3))):
        for size in sizes:
            with case(program.__name__, size):
                assert_equal_to_threads(program, size)


def test_a_part_of_the_output_can_be_gathered() -> None:
    whole = torch.tensor([7.0, 0.0, 0.0])
    mirror(3).all_gather(whole, whole[:1]).wait()
    assert whole.tolist() == [7.0] * 3


def test_messages_around_a_ring_and_between_two_ranks() -> None:
    def program(t: Transport, to: int) -> list[Tensor]:
        first, second = torch.zeros(2), torch.zeros(3)
        after, before = (t.rank + to) % 3, (t.rank - to) % 3
        works = [t.recv(first, before), t.send(torch.ones(2), after), t.send(torch.full((3,), 2.0), after)]
        works.append(t.recv(second, before))
        for work in reversed(works):
            work.wait()
        return [first, second]

    for to in (1, 2):
        assert_equal_to_threads(lambda t, to=to: program(t, to), 3)


def test_a_message_that_this_rank_does_not_send() -> None:
    work = mirror(2).recv(torch.zeros(2), 1)
    assert not work.is_completed()
    with pytest.raises(SynclineError, match=r"this rank has sent no such message.*syncline run --trace"):
        work.wait()


def test_groups_and_their_end() -> None:
    transport = mirror(4)
    part = transport.split(1)
    assert part is not None
    assert (part.size, part.board is transport.board, transport.split(None)) == (4, True, None)
    part.abort("enough")
    with pytest.raises(PeerFailed, match="enough"):
        part.barrier()
    transport.barrier().wait()
    transport.close()
    transport.close()


def test_shared_memory_is_imitated_where_it_is_asked_for() -> None:
    cpu = torch.device("cpu")
    with_memory, without = mirror(2), mirror(2, has_shared_memory=False)
    assert (with_memory.name, without.name) == ("shared memory, imitated", "torch.distributed, imitated")
    assert (with_memory.reduces_in_place, without.reduces_in_place) == (True, False)
    assert with_memory.allocate_shared(3, torch.float32, cpu) is not None
    assert without.allocate_shared(3, torch.float32, cpu) is None
    assert MirrorTransport.imitates_peers
    assert not Transport.imitates_peers


# ---------------------------------------------------------------------- whole steps


def set_values(net: nn.Module) -> None:
    """Set the same values in every thread; random numbers of threads come from one generator."""
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.linspace(-0.5, 0.7, parameter.numel()).view_as(parameter))


def trained(transport: Transport, uses_items: bool, **arguments: object) -> list[Tensor]:
    """Train two steps, with a parameter that is not used, and words of riders that are not zero."""
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    net.register_parameter("unused", nn.Parameter(torch.ones(1)))
    set_values(net)
    ddp = sl.DistributedDataParallel(
        net,
        process_group=transport,
        find_unused_parameters=True,
        **arguments,  # type: ignore[arg-type]
    )
    optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1))
    for step in range(2):
        optimizer.zero_grad()
        ddp.report(loss=float(step))
        loss = ddp(torch.arange(12.0).view(4, 3)).square().mean()
        if uses_items:
            with ddp.normalize_by(4):
                loss.backward()
        else:
            loss.backward()
        optimizer.step()
    assert ddp.last_step is not None
    assert ddp.last_step.metrics == {"loss": 1.0}
    return [parameter.detach().clone() for parameter in net.parameters()]


def test_a_step_has_the_result_of_equal_ranks() -> None:
    for size, uses_items in itertools.product((2, 3), (False, True)):
        with case(size, uses_items):
            assert_equal_to_threads(lambda t, items=uses_items: trained(t, items), size, rtol=1.3e-6)


STRATEGIES: dict[str, Callable[[], dict[str, object]]] = {
    "local sgd": lambda: {"strategy": sl.LocalSGD(2)},
    "diloco": lambda: {"strategy": sl.DiLoCo(2)},
    "gossip on a ring": lambda: {"strategy": sl.Gossip("ring")},
    "gossip, exponential": lambda: {"strategy": sl.Gossip("exponential")},
    "replica check": lambda: {"replica_check": sl.ReplicaCheck(every=1)},
    "power sgd": lambda: {"compression": sl.compression.PowerSGD()},
}


def trained_on_ones(transport: Transport, net: nn.Linear, **arguments: object) -> Any:
    """Train four steps."""
    ddp = sl.DistributedDataParallel(net, process_group=transport, **arguments)  # type: ignore[arg-type]
    optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1))
    for _ in range(4):
        optimizer.zero_grad()
        ddp(torch.ones(2, net.in_features)).square().mean().backward()
        optimizer.step()
    return ddp


def test_strategies_have_the_result_of_equal_ranks() -> None:
    def program(transport: Transport, kind: str) -> list[Tensor]:
        net = nn.Linear(8, 8)
        set_values(net)
        trained_on_ones(transport, net, **STRATEGIES[kind]())
        return [parameter.detach().clone() for parameter in net.parameters()]

    for kind in STRATEGIES:
        with case(kind):
            assert_equal_to_threads(lambda t, kind=kind: program(t, kind), 3, rtol=1e-4)


def test_divided_work_runs_with_finite_values() -> None:
    every: list[dict[str, object]] = [
        {"sharded": True},
        {"strategy": sl.ParameterServer(1)},
        {"compression": sl.compression.Quantize()},
        {"compression": sl.compression.TopK(0.5)},
    ]
    for arguments in every:
        with case(arguments):
            ddp = trained_on_ones(mirror(3), nn.Linear(9, 7), **arguments)
            assert all(parameter.isfinite().all() for parameter in ddp.parameters())
            assert "The other ranks were imitated" in ddp.explain()
