"""Buffer policies and the arithmetic of pooling. Ranks are threads."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import syncline as sl
from support.cases import case
from support.threads import on_threads
from syncline.buffers.policies import BufferSync
from syncline.buffers.pooling import BufferAverage, from_raw_moments_, join_halves, split_halves
from syncline.transport import Transport, run_ranks


def float64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def used(module: nn.Module, t: Transport, policy: str, ignored: Collection[str] = ()) -> BufferSync:
    sync = BufferSync(policy)
    sync.use(module, t, t, ignored)
    return sync


def on_ranks(
    num_ranks: int, build: Callable[[int], nn.Module], policy: str = "average"
) -> list[dict[str, Tensor]]:
    """The buffers of each rank after one synchronization."""

    def rank(t: Transport) -> dict[str, Tensor]:
        module = build(t.rank)
        sync = used(module, t, policy)
        sync.before_forward(next_is_due=True)
        assert sync.last_forward().sent
        return dict(module.named_buffers())

    results = run_ranks(num_ranks, rank)
    for other in results[1:]:
        for name, buffer in results[0].items():
            assert torch.equal(buffer, other[name]), name  # no NaN among them
    return results


class Holder(nn.Module):
    def __init__(self, **buffers: Tensor) -> None:
        super().__init__()
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)


def norm(mean: float, variance: float, *, dtype: torch.dtype = torch.float32, steps: int = 0) -> nn.Module:
    layer = nn.BatchNorm1d(2, dtype=dtype)
    layer.running_mean.fill_(mean)
    layer.running_var.fill_(variance)
    layer.num_batches_tracked.fill_(steps)
    return layer


# ---------------------------------------------------------------------- pooling, by arithmetic


def test_a_variance_below_zero_by_rounding_becomes_zero() -> None:
    squares = float64(1.0 - 1e-16, 4.0)
    from_raw_moments_(float64(1.0, 1.0), squares)
    assert squares.tolist() == [0.0, 3.0]


@given(st.floats(allow_nan=False), st.integers(1, 1000))
@settings(deadline=None, max_examples=300)
def test_the_mean_of_equal_numbers_in_halves_is_that_number(x: float, num_ranks: int) -> None:
    if abs(x) > 1e300:
        x = math.copysign(math.inf, x)  # the sum would overflow
    halves = split_halves(float64(x))
    total = halves.clone()
    for _ in range(num_ranks - 1):
        total += halves
    if 0 < abs(x) < 1e-290:
        return  # the low half is subnormal: sums are exact, quotients need not be
    assert join_halves(total / num_ranks).item() == x


def test_nan_in_halves_stays_nan() -> None:
    assert join_halves(split_halves(float64(math.nan))).isnan().all()


# ---------------------------------------------------------------------- average


def test_running_statistics_are_pooled() -> None:
    for num_ranks, dtype in product((2, 3), (torch.float16, torch.bfloat16, torch.float32, torch.float64)):
        means, variances = [1.0, 3.0, -2.0][:num_ranks], [2.0, 4.0, 0.5][:num_ranks]
        layers = [
            norm(m, v, dtype=dtype, steps=5 - r)
            for r, (m, v) in enumerate(zip(means, variances, strict=True))
        ]
        (first, *_) = on_ranks(num_ranks, layers.__getitem__)
        mean = sum(means) / num_ranks
        # The mean of the variances, and what the means differ by.
        variance = sum(variances) / num_ranks + sum((m - mean) ** 2 for m in means) / num_ranks
        rtol = torch.finfo(dtype).eps
        with case(num_ranks, dtype):
            for name, value in (("running_mean", mean), ("running_var", variance)):
                torch.testing.assert_close(first[name].double(), float64(value, value), rtol=rtol, atol=0)
            assert first["running_mean"].dtype is dtype
            assert first["num_batches_tracked"].item() == 5


def test_buffers_that_are_equal_stay_as_they_are_to_the_bit() -> None:
    """Also running statistics with a large mean."""
    x = torch.randn(999, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    equal = Holder(
        float32=x.float(),
        float64=x.clone(),
        huge=x * 1e200,
        float16=x.half(),
        bfloat16_=x.bfloat16(),
        complex128=torch.complex(x, -x),
        mask=torch.full((3, 3), -math.inf).triu(1),
        integers=torch.arange(4),
        running_mean=torch.full((2,), 1e3 / 3),
        running_var=torch.full((2,), 0.1),
    )
    for num_ranks in (2, 3, 5, 7):
        for name, buffer in on_ranks(num_ranks, lambda _: copy.deepcopy(equal))[0].items():
            with case(num_ranks, name):
                assert torch.equal(buffer, equal.get_buffer(name))


def test_a_large_mean_does_not_cancel_the_variance() -> None:
    """In float32 the squares of 1e4 have a spacing of 8."""
    (first, _) = on_ranks(2, lambda r: norm(1e4 + r, 2.0))
    # The pooled mean 1e4 + 0.5 is exact; 2 + 0.25 is off by about 1e8 * 1e-16, and rounded to float32.
    torch.testing.assert_close(first["running_var"], torch.full((2,), 2.25), rtol=1.2e-7, atol=0)


def test_integers_take_the_maximum_and_bools_are_true_where_any_is() -> None:
    def build(rank: int) -> nn.Module:
        return Holder(
            small=torch.tensor([rank, -rank], dtype=torch.int8),
            bytes_=torch.tensor([200 + rank], dtype=torch.uint8),
            large=torch.tensor([(1 << 60) + rank]),
            switch=torch.tensor([rank == 1, False, True]),
        )

    (first, _) = on_ranks(2, build)
    assert first["small"].tolist() == [1, 0]
    assert first["bytes_"].tolist() == [201]
    assert first["large"].tolist() == [(1 << 60) + 1]
    assert first["switch"].tolist() == [True, False, True]
    assert [b.dtype for b in first.values()] == [torch.int8, torch.uint8, torch.int64, torch.bool]


def test_other_floats_are_averaged_whatever_their_layout() -> None:
    def build(rank: int) -> nn.Module:
        return Holder(
            transposed=(torch.arange(6.0).view(2, 3) * (1 + rank)).t(),
            last=torch.full((1, 2, 2, 2), float(rank)).to(memory_format=torch.channels_last),
            conjugate=torch.tensor([1 + 2j * rank]).conj(),
            scalar=torch.tensor(float(rank)),
            empty=torch.zeros(0, 3),
        )

    first, second = on_ranks(2, build)
    assert first["transposed"].tolist() == (torch.arange(6.0).view(2, 3) * 1.5).t().tolist()
    assert first["transposed"].stride() == (1, 3)
    assert first["last"].flatten().tolist() == [0.5] * 8
    assert first["conjugate"].tolist() == second["conjugate"].tolist() == [1 - 1j]
    assert first["scalar"].item() == 0.5


def test_only_pairs_of_one_submodule_are_pooled() -> None:
    """A running_var on its own is a buffer as any other; a mean of another shape is not its mean."""
    buffers = {"alone": {"running_var": 2.0}, "odd": {"running_mean": 4.0, "running_var": 2.0}}

    def build(rank: int) -> nn.Module:
        module = nn.ModuleDict()
        for name, values in buffers.items():
            module[name] = Holder(**{key: torch.full((2,), value * rank) for key, value in values.items()})
        module["odd"].running_mean = torch.tensor(4.0 * rank)
        return module

    (first, _) = on_ranks(2, build)
    assert [b.flatten().tolist() for b in first.values()] == [[1.0, 1.0], [2.0], [1.0, 1.0]]


def test_a_shared_layer_is_pooled_once_and_instance_norm_too() -> None:
    def build(rank: int) -> nn.Module:
        layer = norm(float(rank), 1.0)
        instance = nn.InstanceNorm1d(2, track_running_stats=True)
        instance.running_mean.fill_(2.0 * rank)
        return nn.ModuleList([layer, layer, instance])

    (first, _) = on_ranks(2, build)
    assert first["0.running_var"].tolist() == [1.25] * 2
    assert first["2.running_var"].tolist() == [2.0] * 2


@on_threads(2)
def test_everything_travels_in_two_collectives_at_most(t: Transport) -> None:
    layers = [nn.BatchNorm1d(3), nn.BatchNorm2d(5), Holder(x=torch.zeros(2, dtype=torch.float64))]
    cases = [(nn.ModuleList(layers), 2), (Holder(x=torch.zeros(2)), 1), (Holder(n=torch.zeros(2).int()), 1)]
    for module, expected in cases:
        before = t.statistics()
        assert used(module, t, "average").sync() == expected
        assert (t.statistics() - before).num_calls == {"all_reduce": expected}


@on_threads(2)
def test_an_average_of_nothing_sends_nothing(t: Transport) -> None:
    BufferAverage([torch.zeros(0)], [], t).wait()
    assert t.statistics().total_calls == 0


# ---------------------------------------------------------------------- every policy


POLICIES = ("broadcast", "average")


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown buffers='mean'; write buffers=\"average\""):
        sl.DistributedDataParallel(nn.BatchNorm1d(1), buffers="mean")


@on_threads(2)
def test_buffers_are_equal_before_a_forward_on_torchs_schedule(t: Transport) -> None:
    """They are written where they are: their version counters stay."""
    for policy in POLICIES:
        module, sent, values = norm(float(t.rank), 1.0), [], []
        versions = [buffer._version for buffer in module.buffers()]
        sync = used(module, t, policy)
        for next_is_due in (True, False, True, True):
            sync.before_forward(next_is_due=next_is_due)
            sent.append(sync.last_forward().sent)
            values.append(module.running_mean[0].item())
            if len(sent) == 1:
                assert [buffer._version for buffer in module.buffers()] == versions
            module.running_mean.add_(t.rank)
        with case(policy):
            assert sent == [True, True, False, True]
            assert values[:2] == ([0.0, 0.0] if policy == "broadcast" else [0.5, 1.0])


def test_the_first_forward_after_a_change_of_the_ranks_makes_buffers_equal() -> None:
    """A rank can be lost in a forward of some ranks under no_sync, and a process that joins has run no forward."""

    def rank(t: Transport) -> float:
        alone = t.split(t.rank)
        ddp = sl.DistributedDataParallel(norm(float(t.rank), 1.0), process_group=alone)
        if t.rank == 0:
            with ddp.no_sync():
                ddp(torch.ones(4, 2))
        ddp._update_process_group(t)
        ddp.eval()(torch.ones(4, 2))
        return ddp.module.running_mean[0].item()

    first, second = run_ranks(2, rank)
    assert first == second


def test_broadcast_makes_them_rank_0s() -> None:
    (first, _) = on_ranks(2, lambda r: norm(1.0 + r, 2.0 + r, steps=r), policy="broadcast")
    assert [b.flatten()[0].item() for b in first.values()] == [1.0, 2.0, 0]


@on_threads(2)
def test_none_sends_nothing_before_a_forward(t: Transport) -> None:
    for policy in ("none", "broadcast"):
        module = norm(float(t.rank), 1.0)
        sync = used(module, t, policy)
        sync.enabled = False
        sync.before_forward(next_is_due=True)
        with case(policy):
            assert module.running_mean[0].item() == t.rank
            assert sync.last_forward().reason == "broadcasting buffers is switched off"
    for policy in POLICIES:  # nor is anything sent without buffers
        sync = used(nn.Linear(2, 2), t, policy)
        sync.before_forward(next_is_due=True)
        assert sync.sync() == 0
    assert t.statistics().total_calls == 0


@on_threads(2)
def test_a_replaced_buffer_and_one_set_to_none_are_noticed(t: Transport) -> None:
    for policy, expected in (("broadcast", 0.0), ("average", 5.0)):
        module = nn.Sequential(norm(0.0, 1.0), Holder(x=torch.zeros(3)))
        sync = used(module, t, policy)
        sync.before_forward(next_is_due=True)
        module[0].running_mean = torch.full((2,), 10.0 * t.rank)
        module[1].x = None
        sync.before_forward(next_is_due=True)
        with case(policy):
            assert sync.last_forward().num_tensors == 3
            assert module[0].running_mean[0].item() == expected


@on_threads(2)
def test_ignored_buffers_are_left_alone_and_a_variance_without_its_mean_is_not_pooled(t: Transport) -> None:
    module = nn.Sequential(norm(float(t.rank), 1.0 + t.rank))
    module.register_buffer("top", torch.tensor(float(t.rank)))
    sync = used(module, t, "average", ["0.running_mean", "top"])
    sync.before_forward(next_is_due=True)
    assert sync.last_forward().num_tensors == 2
    assert [b.flatten()[0].item() for b in module.buffers()] == [t.rank, t.rank, 1.5, 0]


@on_threads(2)
def test_another_source_can_be_chosen_for_a_broadcast(t: Transport) -> None:
    module = norm(float(t.rank), 1.0)
    used(module, t, "broadcast").before_forward(next_is_due=True, src=1)
    assert module.running_mean[0].item() == 1.0


@on_threads(2)
def test_a_forward_left_to_a_hook_says_whether_it_was_due_and_keeps_the_schedule(t: Transport) -> None:
    sync = used(norm(float(t.rank), 1.0), t, "broadcast")
    due = [sync.leave_to_hook(next_is_due=False), sync.leave_to_hook(next_is_due=True)]
    sync.enabled = False
    due.append(sync.leave_to_hook(next_is_due=True))
    assert due == [True, False, False]
    assert "hook" in sync.last_forward().reason
    assert t.statistics().total_calls == 0


# ---------------------------------------------------------------------- equal after the last step


@on_threads(2)
def test_equalize_makes_them_equal_now_and_the_next_forward_sends_nothing(t: Transport) -> None:
    for policy, expected in (("broadcast", 1.0), ("average", 1.5), ("none", 1.0)):
        module = norm(0.0, 1.0)
        sync = used(module, t, policy)
        sync.before_forward(next_is_due=True)
        module.running_mean.fill_(1.0 + t.rank)
        before = t.statistics()
        with case(policy):
            assert sync.sync() == (t.statistics() - before).total_calls > 0
            after = t.statistics()
            for next_is_due in (False, True):
                if t.rank == 0 or next_is_due:  # rank 0 evaluates alone
                    sync.before_forward(next_is_due=next_is_due)
            assert t.statistics().total_calls == after.total_calls
            if t.rank == 1 and policy != "none":
                assert sync.last_forward().reason == "the buffers were made equal after the previous forward"
            sync.before_forward(next_is_due=True)
            assert sync.last_forward().sent is (policy != "none")
            assert module.running_mean[0].item() == expected


def test_training_under_average_keeps_evaluation_equal_on_all_ranks() -> None:
    g = torch.Generator().manual_seed(0)
    batches = torch.randn(6, 2, 8, 3, generator=g) + torch.arange(2).view(1, 2, 1, 1)  # (step, rank, N, C)

    def rank(t: Transport) -> list[Tensor]:
        module = nn.BatchNorm1d(3)
        sync = used(module, t, "average")
        for batch in batches:
            sync.before_forward(next_is_due=True)
            module(batch[t.rank])
        sync.sync()
        return list(module.buffers())

    first, second = run_ranks(2, rank)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    mean, variance = torch.zeros(3), torch.ones(3)
    for batch in batches:  # the same in one process: each rank's update, then pooled
        means = 0.9 * mean + 0.1 * batch.mean(1)  # (rank, C)
        mean, variances = means.mean(0), 0.9 * variance + 0.1 * batch.var(1)
        variance = variances.mean(0) + means.var(0, correction=0)
    torch.testing.assert_close(first[0], mean, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(first[1], variance, rtol=1e-6, atol=0)
    assert first[2].item() == 6
