"""average_, sync_gradients_, keep_best_ and check_replicas on real processes: shared memory and Gloo."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import syncline as sl
from syncline import ContractMismatch, ReplicaDivergence
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
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def same_text_everywhere(error: BaseException) -> str:
    texts = gathered(str(error))
    assert texts == [texts[0]] * len(texts)
    return texts[0]


def tree(rank: int) -> dict[str, Tensor]:
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


def averages_are_those_of_a_float64_reference(
    t: Transport, weights: list[float], *, asynchronous: bool
) -> None:
    everyone = [tree(rank) for rank in range(t.size)]
    mine = tree(t.rank)
    if weights[t.rank] == 0:
        for tensor in mine.values():
            tensor.fill_(math.nan)
    if asynchronous:
        sl.average_(mine, weights[t.rank], group=t, async_op=True).wait()
    else:
        sl.average_(mine, weights[t.rank], group=t)
    for name, tensor in mine.items():
        wide = torch.complex128 if tensor.is_complex() else torch.float64
        parts = [
            one[name].to(wide) * (weight / sum(weights))
            for one, weight in zip(everyone, weights, strict=True)
            if weight
        ]
        exact, size = sum(parts[1:], parts[0]), sum((p.abs() for p in parts), torch.zeros(()))
        eps = torch.finfo(tensor.dtype).eps
        if tensor.dtype.itemsize == 2:  # added up in fp32, rounded once
            bound = exact.abs() * eps / 2 * 1.01 + size * 2.0**-20 + torch.finfo(tensor.dtype).tiny * eps
        else:
            bound = size * eps * (t.size + 2)
        assert bool(((tensor.to(wide) - exact).abs() <= bound).all()), (t.name, name)
    sl.check_replicas(mine, group=t)


def check_averages(weights: list[list[float]]) -> None:
    for t in both_engines():
        for one in weights:
            for asynchronous in (False, True):
                averages_are_those_of_a_float64_reference(t, one, asynchronous=asynchronous)


@pytest.mark.ranks(2)
def test_two_ranks_average_to_rounding() -> None:
    check_averages([[1.0, 1.0], [3.0, 0.1], [0.0, 2.0]])


@pytest.mark.ranks(3)
@pytest.mark.slow
def test_three_ranks_average_to_rounding() -> None:
    check_averages([[1.0, 1.0, 1.0], [3.0, 0.0, 0.7]])


@pytest.mark.ranks(2)
def test_equal_replicas_stay_and_half_precision_does_not_overflow() -> None:
    for t in both_engines():
        before = tree(0) | {"extreme": torch.tensor([65504.0, 6e-8], dtype=torch.float16)}
        mine = tree(0) | {"extreme": before["extreme"].clone()}
        sl.average_(mine, 0.7, group=t)
        for name, tensor in mine.items():
            assert torch.equal(tensor, before[name]), (t.name, name)


@pytest.mark.ranks(2)
def test_tensors_beyond_the_largest_piece_travel_in_parts() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("syncline.tensors.reduction.CAP_BYTES", 1 << 21)
        patch.setattr(all_reduce, "CAP_BYTES", 1 << 21)
        for t in both_engines():
            for x in (torch.full((1200, 500), t.rank + 1.0), torch.full((500, 1200), t.rank + 1.0).t()):
                x = x if t.rank else x.contiguous()
                before = t.statistics()
                sl.average_(x, 1.0 + t.rank, group=t)
                assert (t.statistics() - before).num_calls["all_reduce"] == 2
                torch.testing.assert_close(x, torch.full_like(x, 5 / 3))
                x.add_(t.rank)
                sl.all_reduce_(x, "max", group=t)
                torch.testing.assert_close(x, torch.full_like(x, 8 / 3))


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
        sl.check_replicas(module, group=t)
        sl.check_replicas(optimizer, group=t)
        assert optimizer.state[module[0].weight]["step"].item() == 6


@pytest.mark.ranks(2)
@pytest.mark.parametrize("as_view", [False, True])
def test_gradients_under_no_sync_become_those_of_torch(as_view: bool) -> None:
    def accumulate(wrapper: Any, *, last: bool) -> None:
        with wrapper.no_sync():
            for seed in range(2 if last else 3):
                g = torch.Generator().manual_seed(10 * dist.get_rank() + seed)
                wrapper(torch.randn(4, 6, generator=g)).square().sum().backward()
        if last:
            g = torch.Generator().manual_seed(10 * dist.get_rank() + 2)
            wrapper(torch.randn(4, 6, generator=g)).square().sum().backward()

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 600), nn.ReLU(), nn.Linear(600, 600))

    torchs = torch.nn.parallel.DistributedDataParallel
    reference = torchs(model(), gradient_as_bucket_view=as_view)
    theirs = torchs(model(), gradient_as_bucket_view=as_view)
    wrappers: list[Any] = [theirs, sl.DistributedDataParallel(model(), gradient_as_bucket_view=as_view)]
    wrappers.append(
        sl.DistributedDataParallel(
            model(), process_group=C10dTransport(timeout_seconds=30), gradient_as_bucket_view=as_view
        )
    )
    for step in range(2):
        accumulate(reference, last=True)
        for wrapper in wrappers:
            accumulate(wrapper, last=False)
            sl.sync_gradients_(wrapper if step else wrapper.module)
            for (name, ours), expected in zip(
                wrapper.module.named_parameters(), reference.parameters(), strict=True
            ):
                torch.testing.assert_close(ours.grad, expected.grad, msg=name)
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


@pytest.mark.ranks(3)
def test_the_best_is_told_as_a_global_rank_also_in_a_subgroup() -> None:
    group = dist.new_group([0, 2])
    x = torch.full((3,), float(dist.get_rank()))
    if dist.get_rank() != 1:
        assert sl.keep_best_(x, float(dist.get_rank()), group=group) == 2
        assert x.tolist() == [2.0] * 3
    for t in both_engines():
        y = torch.full((3,), float(t.rank))
        assert sl.keep_best_(y, [1.0, math.nan, 0.5][t.rank], "min", group=t) == 2
        assert y.tolist() == [2.0] * 3
        with pytest.raises(ValueError, match="NaN on all 3") as caught:
            sl.keep_best_(y, math.nan, group=t)
        same_text_everywhere(caught.value)


@pytest.mark.ranks(3)
def test_the_minority_is_named_alike_on_every_rank() -> None:
    for t in both_engines():
        module = nn.BatchNorm1d(3)
        sl.check_replicas(module, group=t)
        if t.rank == 1:
            with torch.no_grad():
                module.bias[2] = -0.0
        with pytest.raises(ReplicaDivergence) as caught:
            sl.check_replicas(module, group=t)
        assert caught.value.minority_ranks == (1,)
        assert caught.value.tensor == "bias"
        assert "\n  bias, element 2 of 3  ranks 0, 2 | rank 1\n" in same_text_everywhere(caught.value)


@pytest.mark.ranks(3)
def test_what_one_rank_refuses_all_raise_in_the_same_words() -> None:
    for t in both_engines():
        x = torch.ones(2)
        weight = [1.0, math.nan, -1.0][t.rank]
        with pytest.raises(ValueError, match=r"rank 1: .* got nan\nrank 2: .* got -1\.0") as caught:
            sl.average_(x, weight, group=t)
        same_text_everywhere(caught.value)
        with pytest.raises(ContractMismatch) as mismatch:
            sl.average_([x] if t.rank else [x, torch.ones(1)], group=t)
        same_text_everywhere(mismatch.value)
        with pytest.raises(ContractMismatch) as mismatch:
            sl.sync_gradients_(nn.Linear(2, 2 + t.rank // 2), group=t)
        same_text_everywhere(mismatch.value)
        sl.barrier(t)


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
