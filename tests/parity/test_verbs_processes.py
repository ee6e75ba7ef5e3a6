"""The verbs on real processes: over shared memory and Gloo, against torch's own collectives. Ranks as threads have the
details: tests/unit/test_verbs*.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import syncline as sl
from syncline import CollectiveMismatch, ContractMismatch, ReplicaDivergence
from syncline.session import transport_of
from syncline.tensors import TensorReducer
from syncline.transport import C10dTransport, Transport
from syncline.verbs import all_reduce

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128]


def both_engines() -> list[Transport]:
    shared = transport_of(None)
    assert shared.name == "shared memory"
    return [shared, C10dTransport(timeout_seconds=30)]


def gathered(value: Any) -> list[Any]:
    """`value` of every rank, by torch."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def same_text_everywhere(error: BaseException) -> str:
    texts = gathered(str(error))
    assert texts == [texts[0]] * len(texts)
    return texts[0]


# ---------------------------------------------------------------------- tensors


def floating_tree(rank: int) -> dict[str, Tensor]:
    """Of every type that has a mean: large and small, strided, conjugated, a single element, empty."""
    found: dict[str, Tensor] = {}
    for dtype in DTYPES:
        g = torch.Generator().manual_seed(rank)
        wide = torch.complex128 if dtype.is_complex else torch.float64
        shape = (530, 500) if dtype in (torch.float32, torch.bfloat16) else (40, 30)
        x = (10 * torch.randn(shape, dtype=wide, generator=g)).to(dtype)
        found[f"{dtype} large"] = x.clone()
        found[f"{dtype} strided"] = x.t() if rank % 2 else x.t().contiguous()
        found[f"{dtype} small"] = x[0, :7].clone()
        found[f"{dtype} single"] = x[::2, 0][:1]
        found[f"{dtype} scalar"] = x[1, 1].clone()
        found[f"{dtype} empty"] = x[:0].clone()
        if dtype.is_complex:
            found[f"{dtype} conjugated"] = x[1].clone() if rank else x[1].conj_physical().conj()
    return found


@pytest.mark.ranks(3)
@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [3.0, 0.0, 0.7]])
def test_broadcasts_and_averages_are_those_of_one_process(weights: list[float]) -> None:
    everyone = [floating_tree(rank) for rank in range(3)]
    asynchronous = 0 in weights
    for t in both_engines():
        mine = floating_tree(t.rank)
        work = sl.broadcast_(mine, src=1, group=t, async_op=asynchronous)
        if asynchronous:
            work.wait()
        assert all(torch.equal(tensor, everyone[1][name]) for name, tensor in mine.items()), t.name
        mine = floating_tree(t.rank)
        if weights[t.rank] == 0:
            for tensor in mine.values():
                tensor.fill_(math.nan)
        work = sl.average_(mine, weights[t.rank], group=t, async_op=asynchronous)
        if asynchronous:
            work.wait()
        for name, tensor in mine.items():
            wide = torch.complex128 if tensor.is_complex() else torch.float64
            pairs = zip(everyone, weights, strict=True)
            parts = [one[name].to(wide) * (weight / sum(weights)) for one, weight in pairs if weight]
            exact, size = sum(parts[1:], parts[0]), sum((p.abs() for p in parts), torch.zeros(()))
            eps = torch.finfo(tensor.dtype).eps
            if tensor.dtype.itemsize == 2:  # added up in fp32, rounded once
                bound = exact.abs() * eps / 2 * 1.01 + size * 2.0**-20 + torch.finfo(tensor.dtype).tiny * eps
            else:
                bound = size * eps * (t.size + 2)
            assert bool(((tensor.to(wide) - exact).abs() <= bound).all()), (t.name, name)
        sl.check_replicas(mine, group=t)


@pytest.mark.ranks(2)
def test_equal_replicas_stay_half_precision_does_not_overflow_and_large_tensors_travel_in_parts() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("syncline.tensors.reduction.CAP_BYTES", 1 << 21)
        patch.setattr(all_reduce, "CAP_BYTES", 1 << 21)
        for t in both_engines():
            before = floating_tree(0) | {"extreme": torch.tensor([65504.0, 6e-8], dtype=torch.float16)}
            mine = {name: tensor.clone() for name, tensor in before.items()}
            sl.average_(mine, 0.7, group=t)
            for name, tensor in mine.items():
                assert torch.equal(tensor, before[name]), (t.name, name)
            for x in (torch.full((1200, 500), t.rank + 1.0), torch.full((500, 1200), t.rank + 1.0).t()):
                x = x if t.rank else x.contiguous()
                statistics = t.statistics()
                sl.average_(x, 1.0 + t.rank, group=t)
                assert (t.statistics() - statistics).num_calls["all_reduce"] == 2
                torch.testing.assert_close(x, torch.full_like(x, 5 / 3))
                x.add_(t.rank)
                sl.all_reduce_(x, "max", group=t)
                torch.testing.assert_close(x, torch.full_like(x, 8 / 3))


@pytest.mark.ranks(3)
def test_a_mean_is_that_of_the_values_and_the_same_bits_everywhere() -> None:
    numbers = [[0.1, 1e17, 3.0, 1.0], [0.7, 1.0, math.pi, 2.0], [0.3, -1e17, 1 / 3, 5.0]]
    weights = [3, 5, 11]
    for t in both_engines():
        mine = {"x": numbers[t.rank], "big": torch.full((10_000,), numbers[t.rank][0])}
        result = sl.mean(mine, weight=weights[t.rank], group=t)
        for i, got in enumerate(result["x"]):
            exact = math.fsum(w * row[i] for w, row in zip(weights, numbers, strict=True)) / sum(weights)
            # Products, sums and the quotient round once each, relative to the largest of them.
            assert abs(got - exact) <= 6 * 2.0**-53 * max(abs(row[i]) for row in numbers)
        torch.testing.assert_close(result["big"], torch.full((10_000,), result["x"][0]), rtol=4e-7, atol=0)
        everyone = gathered((result["x"], result["big"].tolist()))
        assert everyone == [everyone[0]] * 3


# ---------------------------------------------------------------------- modules, optimizers, gradients


@pytest.mark.ranks(3)
def test_module_and_optimizer_are_averaged_and_train_alike() -> None:
    for t in both_engines():
        torch.manual_seed(t.rank)
        module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        for _ in range(1 + t.rank):
            module(torch.randn(4, 6)).square().sum().backward()
            optimizer.step()
        with pytest.raises(ReplicaDivergence) as caught:
            sl.check_replicas(module, group=t)
        assert "No more than half of the ranks agree" in same_text_everywhere(caught.value)
        sl.average_(module, 1.0 + t.rank, group=t)
        sl.average_(optimizer, 1.0 + t.rank, group=t)
        batch = torch.arange(24.0).view(4, 6)
        for _ in range(3):
            optimizer.zero_grad()
            module(batch).square().sum().backward()
            optimizer.step()
        sl.check_replicas([module.state_dict(), dict(module.named_parameters())], group=t)
        sl.check_replicas(optimizer, group=t)
        assert optimizer.state[module[0].weight]["step"].item() == 6
        if t.rank == 1:
            with torch.no_grad():
                module[1].bias[2] += 1.0
        with pytest.raises(ReplicaDivergence) as caught:
            sl.check_replicas(module, group=t)
        assert (caught.value.minority_ranks, caught.value.tensor) == ((1,), "1.bias")
        assert "\n  1.bias, element 2 of 8  ranks 0, 2 | rank 1\n" in same_text_everywhere(caught.value)
        sl.broadcast_(module, group=t)
        sl.check_replicas(module, group=t)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("as_view", [False, True])
def test_gradients_under_no_sync_become_those_of_torch(as_view: bool) -> None:
    def wrap(wrapper: Any, **more: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 600), nn.ReLU(), nn.Linear(600, 600))
        return wrapper(model, gradient_as_bucket_view=as_view, **more)

    def backward(wrapper: Any, seed: int) -> None:
        g = torch.Generator().manual_seed(10 * dist.get_rank() + seed)
        wrapper(torch.randn(4, 6, generator=g)).square().sum().backward()

    torchs, group = nn.parallel.DistributedDataParallel, C10dTransport(timeout_seconds=30)
    ours = sl.DistributedDataParallel
    reference, wrappers = wrap(torchs), [wrap(torchs), wrap(ours), wrap(ours, process_group=group)]
    for step in range(2):
        with reference.no_sync():
            backward(reference, 0)
        backward(reference, 1)
        for wrapper in wrappers:
            with wrapper.no_sync():
                backward(wrapper, 0)
                backward(wrapper, 1)
            sl.sync_gradients_(wrapper if step else wrapper.module)
            for found, expected in zip(wrapper.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(found.grad, expected.grad)
            sl.check_replicas([p.grad for p in wrapper.parameters()])
            wrapper(torch.ones(4, 6)).sum().backward()  # the next backward goes on from there
            wrapper.zero_grad()
        reference.zero_grad()


@pytest.mark.ranks(3)
def test_a_gradient_that_some_ranks_lack_and_sparse_rows() -> None:
    for t in both_engines():
        module = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2), nn.Embedding(5, 2, sparse=True)])
        if t.rank == 1:
            module[0].weight.grad = torch.full((2, 2), 3.0)
        if t.rank > 0:
            module[2](torch.tensor([t.rank, 4])).sum().backward()
        sl.sync_gradients_(module, group=t)
        assert module[0].weight.grad is not None
        assert module[0].weight.grad.unique().tolist() == [1.0]
        assert module[1].weight.grad is None
        rows = module[2].weight.grad.to_dense()[:, 0].tolist()
        assert rows == pytest.approx([0, 1 / 3, 1 / 3, 0, 2 / 3])


@pytest.mark.ranks(2)
def test_reductions_and_backwards_take_turns() -> None:
    """Asynchronous verbs and a wrapped module's own traffic do not meet."""
    for group in both_engines():
        ddp = sl.DistributedDataParallel(nn.Linear(4, 4), process_group=group)
        x = torch.full((70_000,), float(group.rank))
        for _ in range(3):
            work = sl.average_([x], async_op=True, group=group)
            ddp(torch.ones(2, 4)).sum().backward()
            work.wait()
            sl.sync_gradients_(ddp, async_op=True).wait()
            ddp.zero_grad()
        assert x.unique().tolist() == [0.5]
        TensorReducer([x], group, "sum").run()
        assert x.unique().tolist() == [1.0]


# ---------------------------------------------------------------------- ranks and errors


@pytest.mark.ranks(3)
def test_ranks_of_a_subgroup_are_global() -> None:
    rank = dist.get_rank()
    one, other = dist.new_group([1, 2]), dist.new_group([0, 2])
    x = torch.full((3,), float(rank))
    if rank != 1:
        assert sl.keep_best_(x, float(rank), group=other) == 2
        assert x.tolist() == [2.0] * 3
    x.fill_(rank)
    if rank > 0:
        sl.broadcast_(x, src=2, group=one)
        assert x.tolist() == [2.0, 2.0, 2.0]
        assert sl.mean(float(rank), group=one) == 1.5
        sl.barrier(one)
        with pytest.raises(ValueError, match=r"which consists of ranks 1, 2, got 0"):
            sl.broadcast_(x, src=0, group=one)
    for t in both_engines():
        y = torch.full((3,), float(rank))
        assert sl.keep_best_(y, [1.0, math.nan, 0.5][rank], "min", group=t) == 2
        assert y.tolist() == [2.0] * 3


@pytest.mark.ranks(3)
def test_all_ranks_raise_an_error_in_the_same_words_and_can_go_on() -> None:
    rank, x = dist.get_rank(), torch.ones(2)
    rows: list[tuple[type[Exception], Any, list[str]]] = [
        (
            ValueError,
            lambda t: sl.average_(x, [1.0, math.nan, -1.0][rank], group=t),
            ["rank 1: ", "got nan\nrank 2: ", "got -1.0"],
        ),
        (
            ValueError,
            lambda t: sl.mean(1.0, math.nan if rank == 1 else 1.0, group=t),
            ["rank 1: expected weight"],
        ),
        (ValueError, lambda t: sl.keep_best_(x, math.nan, group=t), ["NaN on all 3"]),
        (
            TypeError,
            lambda t: sl.broadcast_([x, "x" if rank == 1 else x], group=t),
            ["rank 1: ", "a str at [1]"],
        ),
        (ContractMismatch, lambda t: sl.average_([x] if rank else [x, x.clone()], group=t), ["tensor [1]"]),
        (ContractMismatch, lambda t: sl.sync_gradients_(nn.Linear(2, 2 + rank // 2), group=t), ["weight"]),
        (
            ContractMismatch,
            lambda t: sl.broadcast_({"x": torch.ones(2 + rank // 2)}, group=t),
            ["tensor x", "expected torch.float32 (2,) on cpu"],
        ),
        (
            CollectiveMismatch,
            lambda t: sl.broadcast_(x, group=t) if rank else sl.mean(1.0, group=t),
            ["rank 0: sl.mean, ", "rank 1: sl.broadcast_, "],
        ),
    ]
    for t in both_engines():
        for kind, call, words in rows:
            with pytest.raises(kind) as caught:
                call(t)
            text = same_text_everywhere(caught.value)
            assert all(one in text for one in words), text
            sl.barrier(t)
        assert x.tolist() == [1.0, 1.0]
