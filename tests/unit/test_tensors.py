"""Naming the tensors of a target, and broadcasting them. Ranks are threads."""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.cases import case
from syncline import PeerFailed
from syncline.tensors.broadcasting import TensorBroadcaster
from syncline.tensors.packing import plan_pieces
from syncline.tensors.targets import named_tensors
from syncline.transport import Transport, Work, run_ranks


def names(target: Any) -> list[str]:
    return [name for name, _ in named_tensors(target)]


# ---------------------------------------------------------------------- names


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(2), persistent=False)
        self.register_buffer("absent", None)


def test_a_module_gives_parameters_then_buffers_and_tied_weights_once() -> None:
    assert names(Net()) == [
        "embed.weight",
        "norm.weight",
        "norm.bias",
        "mask",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    ]


def test_an_optimizer_gives_its_state_in_the_order_of_its_parameters() -> None:
    first, second, unused = (nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer = torch.optim.Adam([{"params": [first]}, {"params": [unused, second]}], lr=torch.tensor(0.1))
    (first.sum() + second.sum()).backward()
    optimizer.step()
    assert names(optimizer) == [
        "state[0].exp_avg",
        "state[0].exp_avg_sq",
        "state[0].step",
        "state[2].exp_avg",
        "state[2].exp_avg_sq",
        "state[2].step",
        "param_groups[0].lr",  # one tensor in both groups
    ]
    assert unused not in optimizer.state


def test_nested_containers_name_the_path_and_do_not_depend_on_insertion_order() -> None:
    x, y, z = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    assert named_tensors({"b": [x, (y,)], "a": {"c": z}}) == [("a.c", z), ("b[0]", x), ("b[1][0]", y)]
    assert names({"a": {"c": z}, "b": [x, (y,)]}) == ["a.c", "b[0]", "b[1][0]"]
    assert names(x) == ["tensor"]
    assert names({}) == []


def test_views_of_the_same_memory_are_one_tensor_and_others_are_not() -> None:
    x = torch.arange(6.0)
    assert names([x, x.view(6), x.detach(), x]) == ["[0]"]
    assert names([x, x[:3], x.view(2, 3), x[1:]]) == ["[0]", "[1]", "[2]", "[3]"]
    assert names([x.view(2, 3), x.view(3, 2).t()]) == ["[0]", "[1]"]
    assert names([torch.empty(0), torch.empty(0)]) == ["[0]", "[1]"]


def test_other_leaves_are_refused_by_path() -> None:
    rows: list[tuple[Any, str]] = [
        (3, "got a int:"),
        (None, "got a NoneType:"),
        ({"a": [torch.zeros(1), "x"]}, r"got a str at a\[1\]:"),
        ([nn.Linear(1, 1)], r"got a Linear at \[0\]:"),
    ]
    for target, text in rows:
        with case(text), pytest.raises(TypeError, match=text):
            named_tensors(target)


class Wrapping(torch.Tensor):
    """As DTensor does, this announces that it wraps other tensors."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_tensors_that_cannot_be_written_are_refused_by_name() -> None:
    rows: list[tuple[Any, str]] = [
        (nn.LazyLinear(2), "expected weight to have a shape, got a lazy tensor"),
        ({"x": torch.zeros(2, device="meta")}, "expected x to have values, got a tensor on the meta device"),
        ({"x": torch.zeros(2).to_sparse()}, r"expected x to be a dense tensor, got torch\.sparse_coo"),
        (
            {"x": torch.zeros(1, 3).expand(2, 3)},
            r"writable in place, got an expanded tensor \(shape \(2, 3\), strides \(0, 1\)\)",
        ),
        ({"x": torch.zeros(2).as_subclass(Wrapping)}, "got a Wrapping, which wraps other tensors"),
    ]
    for target, text in rows:
        with case(text), pytest.raises(ValueError, match=text):
            named_tensors(target)
    # Strides of dimensions of size one, or of empty tensors, do not matter.
    assert names(torch.arange(3).expand(1, 3)) == ["tensor"]
    assert names([torch.empty_strided((2, 0, 1), (0, 1, 0))]) == ["[0]"]


# ---------------------------------------------------------------------- values


def every_kind(seed: int) -> list[Tensor]:
    """Tensors of all sorts, different for every seed."""
    g = torch.Generator().manual_seed(seed)

    def bits(*shape: int, dtype: torch.dtype) -> Tensor:
        # Any bit pattern, NaNs with payloads too: what is sent are bytes.
        width = torch.empty(0, dtype=dtype).element_size()
        raw = torch.randint(0, 256, (*shape, width), generator=g, dtype=torch.uint8)
        return raw.view(dtype).reshape(shape)

    return [
        bits(3, dtype=torch.float32),
        bits(dtype=torch.int64),
        torch.empty(0, 4),
        torch.randint(0, 2, (5,), generator=g, dtype=torch.bool),
        bits(7, dtype=torch.bfloat16),
        bits(3, dtype=torch.float8_e4m3fn),
        bits(2, 2, dtype=torch.complex64),
        torch.randn(300_000, generator=g),
        torch.randn(2, 3, 4, 4, generator=g).to(memory_format=torch.channels_last),
        torch.randn(600, 700, generator=g).t(),
        torch.randn(10, generator=g)[::3],
        torch.randn(4, generator=g, dtype=torch.complex64).conj(),
        torch.randint(0, 99, (2, 2), generator=g, dtype=torch.uint8),
    ]


def broadcast(broadcaster: TensorBroadcaster, src: int = 0, *, blocking: bool = True) -> None:
    if blocking:
        broadcaster.run(src)
    else:
        broadcaster.start(src).wait()


def same_bits(a: Tensor, b: Tensor) -> bool:
    a, b = (t.resolve_conj().contiguous().view(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(a, b)


def test_tensors_of_every_kind_arrive_bit_for_bit() -> None:
    def program(transport: Transport, src: int, blocking: bool) -> list[Tensor]:
        tensors = every_kind(seed=transport.rank)
        broadcast(TensorBroadcaster(tensors, transport), src, blocking=blocking)
        return tensors

    for src, blocking in ((0, True), (2, False)):
        with case(src, blocking):
            for tensors in run_ranks(3, functools.partial(program, src=src, blocking=blocking)):
                for got, expected in zip(tensors, every_kind(seed=src), strict=True):
                    assert same_bits(got, expected)
                    assert got.stride() == expected.stride()
                    assert got.is_conj() == expected.is_conj()


def test_strides_may_differ_between_ranks_and_a_single_element_may_have_any() -> None:
    def program(transport: Transport) -> None:
        x = torch.arange(12.0).view(3, 4) if transport.rank == 0 else torch.zeros(4, 3).t()
        big = torch.ones(600, 500) * 7 if transport.rank == 0 else torch.zeros(500, 600).t()
        broadcast(TensorBroadcaster([x, torch.zeros(1), big], transport), blocking=False)
        assert torch.equal(big, torch.full((600, 500), 7.0))
        assert torch.equal(x, torch.arange(12.0).view(3, 4))
        y = torch.full((4,), float(transport.rank))
        empty = torch.empty((2, 0, 1), dtype=torch.float64)
        broadcast(TensorBroadcaster([y[::2][:1], empty], transport), 1, blocking=False)
        assert y.tolist() == [1.0, *[float(transport.rank)] * 3]

    run_ranks(2, program)


def test_nothing_is_written_on_the_source() -> None:
    def program(transport: Transport, blocking: bool) -> list[list[float]]:
        tensors = [torch.ones(2), torch.ones(3), torch.ones(2, 2).t()]
        original = transport.broadcast

        def sent(tensor: Tensor, src: int = 0) -> Work:
            work = original(tensor, src)  # this engine sends a copy
            if transport.rank == src:
                for t in tensors:
                    t.fill_(7)
            return work

        transport.broadcast = sent  # type: ignore[method-assign]
        broadcast(TensorBroadcaster(tensors, transport), blocking=blocking)
        return [t.unique().tolist() for t in tensors]

    for blocking in (False, True):
        found = run_ranks(2, functools.partial(program, blocking=blocking))
        assert found == [[[7.0]] * 3, [[1.0]] * 3], blocking


def test_everything_small_travels_in_one_collective_and_large_tensors_alone_from_where_they_are() -> None:
    def program(transport: Transport) -> None:
        large = torch.zeros(300_000)
        tensors = [*nn.BatchNorm1d(8).buffers(), large, torch.zeros(3, dtype=torch.bool)]
        addresses = []
        original = transport.broadcast
        transport.broadcast = lambda t, src=0: addresses.append(t.data_ptr()) or original(t, src)  # type: ignore
        broadcaster = TensorBroadcaster(tensors, transport)
        broadcast(broadcaster, blocking=False)
        statistics = transport.statistics()
        assert statistics.num_calls == {"broadcast": 2}
        assert statistics.payload_bytes == {"broadcast": 2 * 32 + 8 + 1_200_000 + 3}
        assert broadcaster.num_collectives == 2
        assert large.data_ptr() in addresses

    run_ranks(2, program)


def test_one_rank_or_no_tensor_sends_nothing() -> None:
    def program(transport: Transport) -> int:
        tensors = [torch.ones(3)] if transport.size == 1 else [torch.ones(0)]
        broadcaster = TensorBroadcaster(tensors, transport)
        broadcast(broadcaster, blocking=False)
        broadcast(broadcaster)
        assert broadcaster.num_collectives == 0
        return transport.statistics().total_calls

    assert run_ranks(1, program) == [0]
    assert run_ranks(2, program) == [0, 0]


# ---------------------------------------------------------------------- autograd


def test_writing_counts_as_an_in_place_change_except_on_the_source_or_if_it_is_not_to() -> None:
    def program(transport: Transport, numel: int, blocking: bool, preserve_version: bool) -> None:
        p = nn.Parameter(torch.full((numel,), float(transport.rank)))
        loss = (p * p).sum()  # saves p
        before = p._version, p.data_ptr()
        broadcaster = TensorBroadcaster([p, torch.zeros(3)], transport, preserve_version=preserve_version)
        broadcast(broadcaster, blocking=blocking)
        assert bool((p == 0).all())
        assert p.requires_grad
        assert p.is_leaf
        is_seen = transport.rank == 1 and not preserve_version
        assert (p._version > before[0], p.data_ptr()) == (is_seen, before[1])
        if is_seen:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        else:
            loss.backward()

    for how in itertools.product((2, 300_000), (False, True), (False, True)):
        with case(*how):
            run_ranks(2, lambda transport, how=how: program(transport, *how))  # type: ignore[misc]


# ---------------------------------------------------------------------- again and again


def test_a_broadcaster_sends_the_values_of_each_call_also_after_memory_was_replaced() -> None:
    def program(transport: Transport) -> None:
        x, y = torch.zeros(2), torch.zeros(3)
        broadcaster = TensorBroadcaster([x, y], transport)
        for step in range(4):
            x.fill_(10 * step + transport.rank)
            y.fill_(100 * step + transport.rank)
            if step == 3:
                x.data = torch.full((2,), 5.0 + transport.rank)
            broadcast(broadcaster, step % 2, blocking=False)
            src = step % 2
            assert x.tolist() == [10 * step + src if step < 3 else 5.0 + src] * 2
            assert y.tolist() == [100 * step + src] * 3

    run_ranks(2, program)


def test_starting_again_waits_for_a_broadcast_under_way() -> None:
    def program(transport: Transport) -> list[float]:
        x, y = torch.full((2,), 1.0 + transport.rank), torch.zeros(3)
        broadcaster = TensorBroadcaster([x, y], transport)
        first = broadcaster.start(0)
        second = broadcaster.start(1)
        second.wait()
        first.wait()
        assert first.is_completed()
        return x.tolist()

    assert run_ranks(2, program) == [[1.0, 1.0]] * 2


def test_run_holds_at_most_two_packed_copies_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces = functools.partial(plan_pieces, cap_bytes=64, alone_bytes=1000)
    monkeypatch.setattr("syncline.tensors.broadcasting.plan_pieces", small_pieces)

    def program(transport: Transport) -> tuple[int, int, bool]:
        tensors = [torch.full((8,), float(i + transport.rank)) for i in range(20)]
        copies: list[weakref.ref[Tensor]] = []
        most = 0
        original = transport.broadcast

        def counting(tensor: Tensor, src: int = 0) -> Work:
            nonlocal most
            copies.append(weakref.ref(tensor))
            most = max(most, sum(copy() is not None for copy in copies))
            return original(tensor, src)

        transport.broadcast = counting  # type: ignore[method-assign]
        broadcast(TensorBroadcaster(tensors, transport))
        right = all(bool((t == i).all()) for i, t in enumerate(tensors))
        return len(copies), most, right

    assert run_ranks(2, program) == [(10, 2, True)] * 2


def test_a_rank_that_fails_is_an_error_of_wait_and_nothing_counts_as_arrived() -> None:
    def program(transport: Transport) -> None:
        if transport.rank == 0:
            raise ZeroDivisionError("rank 0 fails")
        work = TensorBroadcaster([torch.zeros(2), torch.zeros(3)], transport).start(0)
        for _ in range(2):
            with pytest.raises(PeerFailed):
                work.wait()

    with pytest.raises(ZeroDivisionError):
        run_ranks(2, program)
