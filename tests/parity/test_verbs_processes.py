"""The verbs in processes, over each engine. Ranks as threads have the details: tests/unit/test_verbs*.py and others."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engines import can_still_be_used, engines, on_every_engine
from torch import Tensor, nn

import syncline as sl
from syncline import CollectiveMismatch, ContractMismatch, ReplicaDivergence
from syncline.tensors import TensorReducer
from syncline.transport import C10dTransport, ThreadGroup, Transport, run_ranks
from syncline.verbs import all_reduce


def of_all(t: Transport, value: object) -> set[str]:
    """What there is on the ranks, as texts."""
    return {row.decode() for row in t.all_gather_bytes(repr(value).encode())}


# ---------------------------------------------------------------------- all_reduce_, also on ranks as threads


def reduces_trees(t: Transport) -> None:
    ranks = range(t.size)
    tree = {
        "large": torch.full((300_000,), float(t.rank)),
        "small": [torch.tensor([t.rank + 1.0], dtype=torch.float64), torch.full((3, 2), float(t.rank)).t()],
        "empty": torch.zeros(0),
    }
    same = sl.all_reduce_(tree, "mean", group=t)
    assert same is tree
    assert tree["large"].unique().tolist() == [sum(ranks) / t.size]
    assert tree["small"][0].item() == sum(rank + 1 for rank in ranks) / t.size
    assert tree["small"][1].unique().tolist() == [sum(ranks) / t.size]
    counts = torch.tensor([t.rank, 5])
    work = sl.all_reduce_([counts], "max", group=t, async_op=True)
    work.wait()
    work.wait()
    assert work.is_completed()
    assert counts.tolist() == [t.size - 1, 5]
    single = torch.full((4,), t.rank + 1.0)
    assert sl.all_reduce_(single, "product", group=t) is single
    assert single[0].item() == torch.arange(1.0, t.size + 1).prod().item()
    pending = torch.tensor([1 + 2j])
    pending = pending.conj() if t.rank % 2 else pending  # the memory holds what it is conjugated from
    sl.all_reduce_(pending, "sum", group=t)
    assert pending.item() == complex(t.size, 2 * (t.size - 2 * (t.size // 2)))
    module = nn.Linear(3, 2)
    nn.init.constant_(module.weight, float(t.rank))
    sl.all_reduce_(module, "mean", group=t)
    assert module.weight.requires_grad
    assert module.weight.unique().tolist() == [sum(ranks) / t.size]
    sl.all_reduce_(module, group=t)  # torch's default: the sum
    assert module.weight.unique().tolist() == [sum(ranks)]


def writing_is_seen_by_autograd(t: Transport) -> None:
    for is_list, asynchronous in itertools.product((False, True), (False, True)):
        x, weight = torch.ones(3), torch.ones(3, requires_grad=True)
        y = (x * weight).sum()
        result: Any = sl.all_reduce_([x] if is_list else x, "sum", group=t, async_op=asynchronous)
        if asynchronous:
            result.wait()
        if t.size > 1:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.backward()


def refuses_on_every_rank(t: Transport) -> None:
    with pytest.raises(ValueError, match=r"op='mean' is not defined for b, which has dtype torch\.int64"):
        sl.all_reduce_({"a": torch.ones(1), "b": torch.ones(1).long()}, "mean", group=t)
    with pytest.raises(ValueError, match="one of sum, mean, max, min, product; got 'avg'"):
        sl.all_reduce_(torch.ones(1), "avg", group=t)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="expected the target to be a Module"):
        sl.all_reduce_([1.0], group=t)


def test_all_reduce_on_threads() -> None:
    for size in (1, 2, 3):
        for program in (reduces_trees, writing_is_seen_by_autograd, refuses_on_every_rank):
            run_ranks(size, program, timeout_seconds=30)


# ---------------------------------------------------------------------- other verbs on tensors


def broadcasts_and_averages_are_those_of_one_process(t: Transport) -> None:
    def tree(rank: int) -> dict[torch.dtype, Tensor]:
        g = torch.Generator().manual_seed(rank)
        return {
            dtype: 10 * torch.randn((530, 500), generator=g).to(dtype)
            for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.complex64)
        }

    weights = [3.0, 0.0, 0.7]
    everyone, mine = [tree(rank) for rank in range(3)], tree(t.rank)
    sl.broadcast_(mine, src=1, group=t, async_op=True).wait()
    assert all(torch.equal(tensor, everyone[1][dtype]) for dtype, tensor in mine.items())
    mine = tree(t.rank)
    if weights[t.rank] == 0:
        for tensor in mine.values():
            tensor.fill_(math.nan)
    sl.average_(mine, weights[t.rank], group=t, async_op=True).wait()
    for dtype, tensor in mine.items():
        first, last = (everyone[rank][dtype].to(torch.promote_types(dtype, torch.float64)) for rank in (0, 2))
        exact, scale = (3.0 * first + 0.7 * last) / 3.7, first.abs() + last.abs()
        assert bool(((tensor - exact).abs() <= scale * 2 * torch.finfo(dtype).eps).all()), dtype
    sl.check_replicas(mine, group=t)


def large_tensors_travel_in_parts(t: Transport) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("syncline.tensors.reduction.CAP_BYTES", 1 << 21)
        patch.setattr(all_reduce, "CAP_BYTES", 1 << 21)
        for x in (torch.full((1200, 500), t.rank + 1.0), torch.full((500, 1200), t.rank + 1.0).t()):
            x = x if t.rank else x.contiguous()
            statistics = t.statistics()
            sl.average_(x, 1.0 + t.rank, group=t)
            assert (t.statistics() - statistics).num_calls["all_reduce"] == 2
            torch.testing.assert_close(x, torch.full_like(x, 7 / 3))
            x.add_(t.rank)
            sl.all_reduce_(x, "max", group=t)
            torch.testing.assert_close(x, torch.full_like(x, 7 / 3 + 2))


def a_mean_is_that_of_the_values_and_the_same_bits_everywhere(t: Transport) -> None:
    numbers = [[0.1, 1e17, 3.0, 1.0], [0.7, 1.0, math.pi, 2.0], [0.3, -1e17, 1 / 3, 5.0]]
    weights = [3, 5, 11]
    mine = {"x": numbers[t.rank], "big": torch.full((10_000,), numbers[t.rank][0])}
    result = sl.mean(mine, weight=weights[t.rank], group=t)
    for got, *row in zip(result["x"], *numbers, strict=True):
        exact = math.fsum(w * x for w, x in zip(weights, row, strict=True)) / sum(weights)
        # Products, sums and the quotient round once each, relative to the largest of them.
        assert abs(got - exact) <= 6 * 2.0**-53 * max(map(abs, row))
    torch.testing.assert_close(result["big"], torch.full((10_000,), result["x"][0]), rtol=4e-7, atol=0)
    assert len(of_all(t, (result["x"], result["big"].tolist()))) == 1


def rows_of_unequal_lengths_are_gathered(t: Transport) -> None:
    for lengths in ([3, 0, 5], [0, 300_000, 7], [6_000_000, 5_999_999, 0]):
        parts = [torch.arange(length, dtype=torch.int32) * (rank + 1) for rank, length in enumerate(lengths)]
        assert torch.equal(sl.gather(parts[t.rank], group=t), torch.cat(parts)), lengths
    mine = [{"prompt": f"{t.rank}", "answer": "a" * 100_000 * t.rank, "raw": b"\x00"}] * t.rank
    objects = sl.gather(mine, objects=True, group=t)
    assert [len(one) for one in objects] == [0, 1, 2]
    assert objects[t.rank] == mine


# ---------------------------------------------------------------------- modules, optimizers, gradients, errors


def module_and_optimizer_are_averaged_and_train_alike(t: Transport) -> None:
    torch.manual_seed(t.rank)
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for _ in range(1 + t.rank):
        module(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
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
    assert len(of_all(t, str(caught.value))) == 1
    sl.broadcast_(module, group=t)
    sl.check_replicas(module, group=t)


def reductions_and_backwards_take_turns(t: Transport) -> None:
    """Asynchronous verbs and a wrapped module's own traffic do not meet."""
    ddp = sl.DistributedDataParallel(nn.Linear(4, 4), process_group=t)
    x = torch.full((70_000,), float(t.rank))
    for _ in range(3):
        work = sl.average_([x], async_op=True, group=t)
        ddp(torch.ones(2, 4)).sum().backward()
        work.wait()
        sl.sync_gradients_(ddp, async_op=True).wait()
        ddp.zero_grad()
    assert x.unique().tolist() == [1.0]
    TensorReducer([x], t, "sum").run()
    assert x.unique().tolist() == [3.0]


def evolution_takes_the_steps_of_one_process(t: Transport) -> None:
    def loss(module: nn.Module) -> Tensor:
        return (module(torch.linspace(-1, 1, 40).view(8, 5)) - 1).square().mean()

    g = torch.Generator().manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1))
    for p in module.parameters():
        nn.init.normal_(p, generator=g)
    alone = copy.deepcopy(module)
    if t.rank == 1:
        nn.init.zeros_(module[0].weight)  # construction makes it rank 0's
    strategy, reference = (
        sl.EvolutionStrategy(each, 0.1, 0.05, population=32, seed=3, optimizer=torch.optim.Adam, group=group)
        for each, group in ((module, t), (alone, ThreadGroup(1).transport(0)))
    )
    assert [strategy.step(loss) for _ in range(3)] == [reference.step(loss) for _ in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), alone.parameters(), strict=True))


def all_ranks_raise_an_error_in_the_same_words_and_can_go_on(t: Transport) -> None:
    rank, x = t.rank, torch.ones(2)
    rows: list[tuple[type[Exception], Any, list[str]]] = [
        (
            ValueError,
            lambda: sl.average_(x, [1.0, math.nan, -1.0][rank], group=t),
            ["rank 1: ", "got nan\nrank 2: ", "got -1.0"],
        ),
        (
            ContractMismatch,
            lambda: sl.gather({"x": torch.ones(rank, 4 if rank == 2 else 3)}, group=t),
            ["rank 2 against ranks 0, 1", "values.x", "(*, 4)"],
        ),
        (
            CollectiveMismatch,
            lambda: sl.broadcast_(x, group=t) if rank else sl.mean(1.0, group=t),
            ["rank 0: sl.mean, ", "rank 1: sl.broadcast_, "],
        ),
    ]
    for kind, call, words in rows:
        with pytest.raises(kind) as caught:
            call()
        text = str(caught.value)
        assert len(of_all(t, text)) == 1
        assert all(one in text for one in words), text
        can_still_be_used(t)
    assert x.tolist() == [1.0, 1.0]


@pytest.mark.ranks(3, timeout=300)
def test_programs_on_every_engine() -> None:
    on_every_engine(
        reduces_trees,
        writing_is_seen_by_autograd,
        refuses_on_every_rank,
        broadcasts_and_averages_are_those_of_one_process,
        large_tensors_travel_in_parts,
        a_mean_is_that_of_the_values_and_the_same_bits_everywhere,
        rows_of_unequal_lengths_are_gathered,
        module_and_optimizer_are_averaged_and_train_alike,
        reductions_and_backwards_take_turns,
        evolution_takes_the_steps_of_one_process,
        all_ranks_raise_an_error_in_the_same_words_and_can_go_on,
    )


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
    for t in engines():
        y = torch.full((3,), float(rank))
        assert sl.keep_best_(y, [1.0, math.nan, 0.5][rank], "min", group=t) == 2
        assert y.tolist() == [2.0] * 3


@pytest.mark.ranks(2)
def test_gradients_under_no_sync_become_those_of_torch() -> None:
    def wrap(wrapper: Any, **more: Any) -> Any:
        torch.manual_seed(0)
        return wrapper(nn.Sequential(nn.Linear(6, 600), nn.ReLU(), nn.Linear(600, 600)), **more)

    def backward(wrapper: Any, seed: int) -> None:
        g = torch.Generator().manual_seed(10 * dist.get_rank() + seed)
        wrapper(torch.randn(4, 6, generator=g)).square().sum().backward()

    torchs, group = nn.parallel.DistributedDataParallel, C10dTransport(timeout_seconds=30)
    ours = sl.DistributedDataParallel
    reference, wrappers = wrap(torchs), []
    for view in (False, True):
        how = {"gradient_as_bucket_view": view}
        wrappers += [wrap(torchs, **how), wrap(ours, **how), wrap(ours, process_group=group, **how)]
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


@pytest.mark.ranks(2)
def test_an_evaluation_on_all_ranks_gives_the_figure_of_one_process() -> None:
    """1003 samples, BatchNorm, numbers of batches 4 and 3, the default group, no `sl.init`."""
    g = torch.Generator().manual_seed(5)
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    for parameter in module.parameters():
        nn.init.normal_(parameter, generator=g)
    x, y = torch.randn(1003, 6, generator=g), torch.randint(0, 4, (1003,), generator=g)
    ddp = sl.DistributedDataParallel(module.eval())
    sampler = sl.DistributedSampler(x, shuffle=True, pad=False)  # type: ignore[arg-type]
    index = torch.tensor(list(sampler))
    with torch.no_grad():
        alone = module(x).argmax(1) == y
        right = torch.cat([ddp(x[some]).argmax(1) == y[some] for some in index.split(167)])
    found = sl.gather({"index": index, "right": right})
    assert torch.equal(found["right"][found["index"].argsort()], alone)
    mean = sl.mean(right.double().mean().item(), weight=len(right))
    assert mean == pytest.approx(alone.double().mean().item(), rel=1e-15)
