"""Compressed averaging over a transport, as a communication hook, and inside of DistributedDataParallel; ranks are
threads.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from encodings_in_one_thread import averagers, mean_of_ranks
from torch import Tensor, nn

import syncline as sl
from support.cases import case
from support.threads import on_threads
from syncline import ContractMismatch, PeerFailed, Statistics, SynclineError
from syncline import DistributedDataParallel as DDP
from syncline.compression import (
    After,
    Cast,
    Chain,
    Compression,
    HookState,
    MeanExchange,
    PowerSGD,
    Quantize,
    TopK,
    hook,
)
from syncline.gradients.comm_hook import GradBucket
from syncline.transport import Transport, run_ranks, sent_bytes

CPU = torch.device("cpu")
SHAPES = [(30, 20), (7,), (5, 4, 3)]
NUMEL = 667
KINDS: list[Compression] = [
    Cast(),
    Quantize(8),
    Quantize(4, error_feedback=False),
    TopK(0.1),
    PowerSGD(2),
    Chain(PowerSGD(2), Cast(torch.float16)),
    Chain(PowerSGD(2), Quantize(8)),
    Chain(TopK(0.1), Quantize(8)),
    Chain(TopK(0.1), Cast()),
    After(1, PowerSGD(2), before=Quantize(8)),
]


def exchange_over(transport: Transport, compression: Compression | None, **options: Any) -> MeanExchange:
    options = {"dtype": torch.float32, "device": CPU, **options}
    return MeanExchange(compression, SHAPES, transport=transport, **options)


def values_of(rank: int, step: int = 0) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * step + rank))


# ---------------------------------------------------------------------- over a transport


def test_over_a_transport_it_is_what_the_encodings_give() -> None:
    def program(transport: Transport) -> list[list[Tensor]]:
        means = []
        for compression in KINDS:
            exchange = exchange_over(transport, compression)
            means.append([])
            for step in range(3):
                exchange.start(values_of(transport.rank, step))
                exchange.advance()
                means[-1].append(exchange.wait().clone())
        return means

    for num_ranks in (2, 3, 4):
        found = run_ranks(num_ranks, program)
        for number, compression in enumerate(KINDS):
            ranks = averagers(compression, SHAPES, num_ranks)
            tolerance = 0.02 if "Cast" in str(compression) else 1e-4  # a sum is rounded by the engine
            for step, mean in enumerate(found[0][number]):
                expected = mean_of_ranks(ranks, [values_of(rank, step) for rank in range(num_ranks)])
                with case(compression, num_ranks, step):
                    torch.testing.assert_close(mean, expected, rtol=0, atol=tolerance)
                    assert all(torch.equal(mean, other[number][step]) for other in found)


@on_threads(1)
def test_alone_nothing_is_sent_and_nothing_lost(transport: Transport) -> None:
    for compression in (None, *KINDS):
        exchange = exchange_over(transport, compression)
        exchange.start(values_of(0))
        with case(compression):
            assert torch.equal(exchange.wait(), values_of(0))
            assert transport.statistics().total_calls == 0


def test_other_floating_types_come_back_as_they_went_in() -> None:
    def program(transport: Transport, compression: Compression | None, dtype: torch.dtype) -> Tensor:
        exchange = exchange_over(transport, compression, dtype=dtype)
        exchange.start(values_of(transport.rank).to(dtype))
        return exchange.wait()

    dtypes = (torch.float16, torch.bfloat16, torch.float64)
    for dtype, compression in product(dtypes, (None, TopK(1.0), Quantize(8), PowerSGD(2), Cast())):
        first, second = run_ranks(2, partial(program, compression=compression, dtype=dtype))
        with case(dtype, compression):
            assert first.dtype is dtype
            assert torch.equal(first, second)
            if compression in (None, TopK(1.0)):
                exact = (values_of(0).to(dtype).double() + values_of(1).to(dtype).double()) / 2
                torch.testing.assert_close(first.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-7)


@on_threads(2)
def test_autocast_around_it_changes_nothing(transport: Transport) -> None:
    means = []
    for enabled in (False, True):
        exchange = exchange_over(transport, PowerSGD(2))
        with torch.autocast("cpu", enabled=enabled):
            exchange.start(values_of(transport.rank))
            means.append(exchange.wait())
    assert torch.equal(*means)


def test_several_are_under_way_at_once_and_go_on_step_by_step() -> None:
    def program(transport: Transport) -> list[Tensor]:
        exchanges = [exchange_over(transport, kind) for kind in (PowerSGD(2), Quantize(8), None)]
        for step, exchange in enumerate(exchanges):
            exchange.start(values_of(transport.rank, step))
            for earlier in exchanges[:step]:
                earlier.advance()
        with pytest.raises(SynclineError, match=r"still in progress\. Call wait\(\) before"):
            exchanges[0].start(values_of(0))
        return [exchange.wait() for exchange in reversed(exchanges)]

    for a, b in zip(*run_ranks(2, program), strict=True):
        assert torch.equal(a, b)


@on_threads(2)
def test_what_is_under_way_cannot_be_saved_and_nothing_cannot_be_waited_for(transport: Transport) -> None:
    exchange = exchange_over(transport, Quantize(8))
    with pytest.raises(SynclineError, match=r"no averaging is in progress\. Call start\(\) first"):
        exchange.wait()
    exchange.start(values_of(transport.rank))
    with pytest.raises(SynclineError, match=r"while an averaging is in progress\. Call wait\(\) first"):
        exchange.state_dict()
    exchange.wait()
    assert sorted(exchange.state_dict()) == ["0.residual", "1.residual", "2.residual"]


def test_a_peer_that_fails_is_named_however_often_one_waits() -> None:
    has_started = threading.Event()

    def program(transport: Transport) -> None:
        if transport.rank == 1:
            assert has_started.wait(30)
            raise RuntimeError("out of memory")
        exchange = exchange_over(transport, PowerSGD(2))
        exchange.start(values_of(transport.rank))
        has_started.set()
        for _ in range(2):
            with pytest.raises(PeerFailed, match="out of memory"):
                exchange.wait()

    with pytest.raises(RuntimeError, match="out of memory"):
        run_ranks(2, program)


@on_threads(1)
def test_wrong_values_are_refused(transport: Transport) -> None:
    expected = "`flat` with 667 elements of torch.float32 on cpu, got 666 elements"
    with pytest.raises(ValueError, match=expected):
        exchange_over(transport, Cast()).start(torch.zeros(666))
    for dtype in (torch.int64, torch.complex64):
        with pytest.raises(ValueError, match=f"only real floating-point numbers, but got {dtype}"):
            exchange_over(transport, Cast(), dtype=dtype)
    with pytest.raises(ValueError, match=r"of tensors 0 to 2, got a state of tensor a"):
        exchange_over(transport, None).load_state_dict({"a.residual": torch.zeros(1)})


# ---------------------------------------------------------------------- bytes


def test_bytes_on_the_wire_by_operation() -> None:
    sent = {"all_reduce": 1200, "send": 800, "recv": 0}
    sent |= dict.fromkeys(("reduce_scatter", "reduce_spans", "all_gather", "broadcast"), 600)
    assert {operation: sent_bytes(operation, 800, 4) for operation in sent} == sent
    assert sent_bytes("barrier", 0, 4) == sent_bytes("all_reduce", 800, 1) == 0
    with pytest.raises(ValueError, match=r"expected operation to be one of all_reduce, .*; got 'gossip'"):
        sent_bytes("gossip", 1, 2)
    assert Statistics(payload_bytes={"send": 5, "recv": 7, "all_reduce": 100}).sent_bytes(2) == 105


def sent_for(transport: Transport, compression: Compression | None, *shape: int) -> Statistics:
    before = transport.statistics()
    exchange = MeanExchange(compression, [shape], dtype=torch.float32, device=CPU, transport=transport)
    exchange.start(torch.ones(math.prod(shape)))
    exchange.wait()
    return transport.statistics() - before


SMALLER: list[tuple[Compression, float]] = [
    (Quantize(4), 7.5),
    (Quantize(8), 3.9),
    (Cast(), 2.0),
    (PowerSGD(2), 120),
    (Chain(PowerSGD(2), Quantize(4)), 900),
    (TopK(0.01), 24),  # 8 bytes a value, to 3 peers
]


@on_threads(4)
def test_what_is_sent_is_smaller_by(transport: Transport) -> None:
    whole = sent_for(transport, None, 1024, 512).sent_bytes(4)
    for compression, at_least in SMALLER:
        with case(compression):
            assert whole / sent_for(transport, compression, 1024, 512).sent_bytes(4) >= at_least * 0.999


@on_threads(4)
def test_statistics_count_the_packed_bytes(transport: Transport) -> None:
    chunk = Quantize(4).num_bytes(1024)
    statistics = sent_for(transport, Quantize(4), 4096)
    assert statistics.payload_bytes == {"send": 3 * chunk, "recv": 3 * chunk, "all_gather": 4 * chunk}
    assert statistics.sent_bytes(4) == 6 * chunk


# ---------------------------------------------------------------------- as a communication hook


def buckets_of(
    parameters: Sequence[Tensor], layout: Sequence[Sequence[int]], values: Tensor
) -> list[GradBucket]:
    """Buckets of some parameters (by position), filled with their parts of `values`."""
    parts = values.split([parameter.numel() for parameter in parameters])
    buckets = []
    for index, members in enumerate(layout):
        flat = torch.cat([parts[i] for i in members])
        views = flat.split([parameters[i].numel() for i in members])
        gradients = [view.view_as(parameters[i]) for view, i in zip(views, members, strict=True)]
        chosen = [parameters[i] for i in members]
        is_last = index == len(layout) - 1
        buckets.append(
            GradBucket(index=index, buffer=flat, parameters=chosen, gradients=gradients, is_last=is_last)
        )
    return buckets


def buckets_of_one(rank: int) -> list[GradBucket]:
    """Three buckets with one parameter each."""
    return buckets_of([torch.zeros(shape) for shape in SHAPES], [[0], [1], [2]], values_of(rank))


def test_what_is_kept_follows_its_parameters_into_other_buckets() -> None:
    layouts = [[[2, 1], [0]], [[0, 2], [1]], [[0, 2], [1]], [[1], [2], [0]]]

    def program(transport: Transport, compression: Compression) -> tuple[Tensor, Tensor, Tensor]:
        net = nn.ParameterList([torch.zeros(shape) for shape in SHAPES])
        state = HookState(compression, transport, module=net)
        came_out, went_in = torch.zeros(NUMEL), torch.zeros(NUMEL)
        for step, layout in enumerate(layouts):
            values = values_of(transport.rank, step)
            went_in += values
            buckets = buckets_of(list(net), layout, values)
            futures = [hook(state, bucket) for bucket in buckets]
            assert [future.wait() is b.buffer() for future, b in zip(futures, buckets, strict=True)]
            gradients = [gradient for bucket in buckets for gradient in bucket.gradients()]
            found = dict(zip([i for members in layout for i in members], gradients, strict=True))
            came_out += torch.cat([found[i].flatten() for i in range(3)])
        kept = state.state_dict()
        return came_out, went_in, torch.cat([kept[f"{i}.residual"] for i in range(3)])

    for compression in (TopK(0.05), PowerSGD(1), Quantize(4)):
        ranks = run_ranks(2, partial(program, compression=compression))
        with case(compression):
            assert torch.equal(ranks[0][0], ranks[1][0])
            balance = ranks[0][0] + (ranks[0][2] + ranks[1][2]) / 2
            torch.testing.assert_close(balance, (ranks[0][1] + ranks[1][1]) / 2, rtol=0, atol=1e-4)


def test_a_future_that_is_waited_for_before_the_last_bucket_completes_what_is_under_way() -> None:
    def program(transport: Transport) -> list[Tensor]:
        state = HookState(PowerSGD(2), transport)
        first, second, _ = buckets_of_one(transport.rank)
        futures = [hook(state, first), hook(state, second)]
        assert not any(future.done() for future in futures)
        return [future.wait() for future in futures]

    for a, b in zip(*run_ranks(2, program), strict=True):
        assert torch.equal(a, b)


def test_a_bucket_is_sent_before_the_one_before_it_has_arrived() -> None:
    """Rank 1 sends nothing before rank 0 has sent two buckets. So rank 0 cannot wait for the first one."""

    def program(
        transport: Transport, compression: Compression, has_sent_two: threading.Event
    ) -> list[Tensor]:
        state = HookState(compression, transport)
        buckets = buckets_of_one(transport.rank)
        if transport.rank == 1:
            assert has_sent_two.wait(30)
        for number, bucket in enumerate(buckets):
            hook(state, bucket)
            if number == 1:
                has_sent_two.set()
        return [bucket.buffer() for bucket in buckets]

    for compression in (Cast(), Quantize(8), TopK(0.5), PowerSGD(2)):
        ranks = partial(program, compression=compression, has_sent_two=threading.Event())
        with case(compression):
            for a, b in zip(*run_ranks(2, ranks, timeout_seconds=10), strict=True):
                assert torch.equal(a, b)


@on_threads(1)
def test_what_a_hook_cannot_save_load_or_encode_is_refused(transport: Transport) -> None:
    with pytest.raises(ValueError, match=r"takes from its module\. Write HookState"):
        HookState(Cast(), transport).state_dict()
    named = HookState(TopK(), transport, module=nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"parameters of this module, got a state of head.weight"):
        named.load_state_dict({"head.weight.residual": torch.zeros(4)})
    sparse, like = torch.zeros(3, 2).to_sparse(1), [torch.zeros(3, 2)]
    bucket = GradBucket(index=4, buffer=sparse, parameters=like, gradients=(), is_last=True)
    with pytest.raises(ValueError, match=r"bucket 4 has a sparse gradient, which TopK.* cannot encode"):
        hook(HookState(TopK(), transport), bucket)


# ---------------------------------------------------------------------- inside of DistributedDataParallel


def net_of(seed: int = 0) -> nn.Sequential:
    net = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 12), nn.Tanh(), nn.Linear(12, 4))
    g = torch.Generator().manual_seed(seed)  # torch's own is shared by the threads
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.3, generator=g)
    return net


def batch_of(rank: int, step: int) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(1000 * rank + step))


def gradients_of(ddp: DDP) -> Tensor:
    return torch.cat([p.grad.flatten() for p in ddp.parameters() if p.grad is not None])


def backward(ddp: DDP, rank: int, step: int) -> Tensor:
    ddp.zero_grad()
    ddp(batch_of(rank, step)).square().mean().backward()
    return gradients_of(ddp)


def test_all_ranks_get_the_same_gradients_and_what_is_lossless_is_the_mean() -> None:
    def program(transport: Transport, **options: Any) -> list[Tensor]:
        found = []
        for compression in (None, TopK(1.0), Quantize(8), Chain(PowerSGD(1), Quantize(4))):
            ddp = DDP(net_of(), process_group=transport, compression=compression, **options)
            found += [backward(ddp, transport.rank, step) for step in range(3)]
        return found

    for options in ({}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.001}):
        first, *others = run_ranks(3, partial(program, **options))
        with case(options):
            for other in others:
                assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
            for plain, whole, quantized in zip(first[:3], first[3:6], first[6:9], strict=True):
                torch.testing.assert_close(whole, plain)
                torch.testing.assert_close(quantized, plain, rtol=0, atol=0.05 * plain.abs().max().item())
                assert not torch.equal(quantized, plain)


@on_threads(1, 2)
def test_the_contract_and_the_timeline_say_how_gradients_travel(transport: Transport) -> None:
    ddp = DDP(net_of(), process_group=transport, compression=PowerSGD(2))
    row = ddp.contract["gradients"]
    if transport.size == 1:
        assert row.when == "never: there is one rank"
        assert ddp.sync_state_dict() == {"compression": {}}
        return
    assert row.how == "mean, PowerSGD(rank=2) with error feedback"
    texts = [ddp.explain()]
    backward(ddp, transport.rank, 0)
    for text in (*texts, ddp.explain()):
        assert "sent by PowerSGD(rank=2) with error feedback when" in " ".join(text.split())


def test_ranks_with_different_compressions_are_told_so() -> None:
    def inside(transport: Transport, others: Sequence[Compression | None]) -> None:
        DDP(net_of(), process_group=transport, compression=others[transport.rank])

    def registered(transport: Transport) -> None:
        ddp = DDP(net_of(), process_group=transport)
        ddp.register_comm_hook(HookState(PowerSGD(2 + transport.rank), transport), hook)
        backward(ddp, transport.rank, 0)

    for others in (
        (PowerSGD(2), PowerSGD(3)),
        (PowerSGD(2), None),
        (TopK(0.1), TopK(0.1, error_feedback=False)),
        (PowerSGD(2), PowerSGD(2, seed=1)),
    ):
        with case(others), pytest.raises(ContractMismatch, match="compression\n"):
            run_ranks(2, partial(inside, others=others))
    with pytest.raises(ContractMismatch, match=r"PowerSGD\(rank=3\) with error feedback"):
        run_ranks(2, registered)


@on_threads(1, 2)
def test_what_does_not_go_together_is_refused(transport: Transport) -> None:
    sparse = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2))
    cases: list[tuple[str, nn.Module, dict[str, Any]]] = [
        ("sharded=True cannot be combined with compression=", net_of(), {"sharded": True}),
        (r"strategy=LocalSGD\(every=8\) never averages any", net_of(), {"strategy": sl.LocalSGD(8)}),
        ("never averages any. Leave compression= out", net_of(), {"strategy": sl.Gossip("ring")}),
        ("have sparse gradients: 0.weight. Create their layers with sparse=False", sparse, {}),
        ("parameter weight has dtype torch.complex64", nn.Linear(2, 2, dtype=torch.complex64), {}),
    ]
    for text, net, options in cases:
        with case(options), pytest.raises(ValueError, match=text):
            DDP(net, process_group=transport, compression=Cast(), **options)
    ddp = DDP(net_of(), process_group=transport, compression=Cast())
    with pytest.raises(ValueError, match=r"Cast\(dtype=bfloat16\) cannot reduce the same buckets"):
        ddp.register_comm_hook(None, lambda state, bucket: None)


@on_threads(3)
def test_normalize_by_is_exact_under_a_compression_that_loses_nothing(transport: Transport) -> None:
    found = []
    for how in ("plain", "inside", "registered"):
        inside = TopK(1.0) if how == "inside" else None
        ddp = DDP(net_of(), process_group=transport, compression=inside, bucket_cap_mb=0.001)
        if how == "registered":
            ddp.register_comm_hook(HookState(TopK(1.0), transport), hook)
        for step in range(2):
            ddp.zero_grad()
            num_items = 1 + 3 * transport.rank
            with ddp.normalize_by(num_items):
                ddp(batch_of(transport.rank, step)[:num_items]).square().sum().backward()
        found.append(gradients_of(ddp))
        assert ddp.last_step.divisor == 1 + 4 + 7
    plain, *compressed = found
    for one in compressed:
        torch.testing.assert_close(one, plain)


class Branches(nn.Module):
    """Uses one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([net_of(0), net_of(1)])
        self.used = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[self.used](x)


def test_buckets_that_nobody_uses_may_be_skipped_also_the_last_one() -> None:
    def program(transport: Transport) -> Tensor:
        found = []
        for used in (0, 1):
            net = Branches()
            net.used = used
            ddp = DDP(
                net,
                process_group=transport,
                compression=PowerSGD(2),
                bucket_cap_mb=0.001,
                find_unused_parameters=True,
                skip_all_reduce_unused_params=True,
            )
            found += [backward(ddp, transport.rank, step) for step in range(3)]
        return torch.cat(found)

    assert torch.equal(*run_ranks(2, program))


@on_threads(2)
def test_a_module_that_changes_goes_on_with_what_was_kept(transport: Transport) -> None:
    net = net_of()
    ddp = DDP(net, process_group=transport, compression=TopK(0.01))
    backward(ddp, transport.rank, 0)
    before = ddp.sync_state_dict()["compression"]["0.weight.residual"]
    assert before.any()
    added = nn.Linear(4, 16)
    for parameter in added.parameters():
        nn.init.constant_(parameter, 0.1)
    net.append(added)
    ddp(batch_of(transport.rank, 1))
    assert torch.equal(ddp.sync_state_dict()["compression"]["0.weight.residual"], before)
    backward(ddp, transport.rank, 1)
    assert "5.weight.residual" in ddp.sync_state_dict()["compression"]


RESUMED = (
    PowerSGD(2),
    Chain(PowerSGD(1), Cast()),
    After(4, PowerSGD(2)),
    After(2, PowerSGD(2), before=Quantize(8)),
)


@on_threads(2)
def test_a_resumed_training_goes_on_with_the_same_values(transport: Transport) -> None:
    """Also over several buckets, which are laid out anew after the first step of either."""

    def made(compression: Compression) -> DDP:
        return DDP(net_of(), process_group=transport, compression=compression, bucket_cap_mb=0.001)

    for compression in RESUMED:
        straight, resumed = made(compression), made(compression)
        for step in range(3):
            backward(straight, transport.rank, step)
        saved = straight.sync_state_dict()
        resumed.load_sync_state_dict(saved)
        with case(compression):
            assert resumed.sync_state_dict()["compression"].keys() == saved["compression"].keys()
            for step in range(3, 6):
                expected = backward(straight, transport.rank, step)
                found = backward(resumed, transport.rank, step)
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@on_threads(2)
def test_state_of_another_compression_is_refused_when_it_is_needed(transport: Transport) -> None:
    ddp = DDP(net_of(), process_group=transport, compression=PowerSGD(2))
    ddp.load_sync_state_dict({"compression": {"0.weight.residual": torch.zeros(16 * 24)}})
    with pytest.raises(ValueError, match="saved with another compression, or for another tensor"):
        backward(ddp, transport.rank, 0)
