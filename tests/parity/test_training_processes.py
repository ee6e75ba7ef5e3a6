"""What goes along with training, in processes, over each engine. Ranks as threads have the details: tests/unit."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import syncline as sl
from support.cases import case
from syncline.buffers.policies import BufferSync
from syncline.session import transport_of

ON_BOTH = pytest.mark.parametrize("transport", ["shm", "c10d"])


def gathered(value: Any) -> list[Any]:
    """`value` of every rank, by torch."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def assert_equal_on_all_ranks(value: Any) -> None:
    values = gathered(value)
    assert values == [values[0]] * len(values)


def batch(step: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + step)
    return torch.randn(*shape, generator=generator)


# ---------------------------------------------------------------------- buffers


def with_buffers() -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.BatchNorm2d(3, dtype=torch.float64))
    module[0].register_buffer("scale", torch.full((2,), 0.1))
    module[0].register_buffer("mask", torch.tensor([True, False]))
    return module


@pytest.mark.ranks(3)
@ON_BOTH
def test_buffers_become_equal(transport: Any) -> None:
    rank = sl.init(transport).rank
    for policy in ("average", "broadcast"):
        module, t = with_buffers(), transport_of()
        for norm in module[1:]:  # type: ignore[index]
            norm.running_mean.fill_(float(rank))
            norm.running_var.fill_(2.0)
            norm.num_batches_tracked.fill_(rank)
        sync = BufferSync(policy)  # type: ignore[arg-type]
        sync.use(module, t, t)
        before = t.statistics()
        sync.before_forward(next_is_due=True)
        num_calls = (t.statistics() - before).num_calls
        values = {name: buffer.tolist() for name, buffer in module.named_buffers()}
        assert_equal_on_all_ranks(values)
        average = policy == "average"
        assert num_calls == ({"all_reduce": 2} if average else {"broadcast": 1})
        for i in (1, 2):
            assert values[f"{i}.running_mean"] == pytest.approx([1.0 if average else 0.0] * 3, rel=1e-7)
            variance = 2.0 + 2 / 3 if average else 2.0  # of 0, 1, 2
            assert values[f"{i}.running_var"] == pytest.approx([variance] * 3, rel=1e-7)
            assert values[f"{i}.num_batches_tracked"] == (2 if average else 0)
        assert values["0.scale"] == torch.full((2,), 0.1).tolist()
        assert values["0.mask"] == [True, False]


@pytest.mark.ranks(2)
@ON_BOTH
def test_after_buffers_were_made_equal_rank_0_may_evaluate_alone(transport: Any) -> None:
    rank = sl.init(transport).rank
    for policy in ("broadcast", "average", "none"):
        module = with_buffers()
        sync = BufferSync(policy)  # type: ignore[arg-type]
        sync.use(module, transport_of(), transport_of())
        mean: Any = module[1].running_mean  # type: ignore[index]
        mean.fill_(1.0 + rank)
        sync.sync()
        if rank == 0:
            sync.before_forward(next_is_due=False)
        dist.barrier()
        assert gathered(mean.tolist()) == [[1.5 if policy == "average" else 1.0] * 3] * 2, policy


@pytest.mark.ranks(2)
@ON_BOTH
@pytest.mark.filterwarnings("ignore:step .*rank 0 ran forwards:RuntimeWarning")
def test_without_buffers_rank_0_may_evaluate_alone_before_the_first_step_and_after_each(
    transport: Any,
) -> None:
    rank = sl.init(transport).rank
    for is_training in (True, False):
        ddp = sl.DistributedDataParallel(nn.Linear(4, 2))
        for step in range(3):
            if rank == 0:
                ddp.train(is_training)
                ddp(torch.randn(8, 4)).argmax(1).float().mean().item()
                ddp.train()
            sl.barrier()
            ddp.zero_grad()
            ddp(torch.full((3, 4), rank + step + 1.0)).square().sum().backward()
            assert_equal_on_all_ranks([p.grad.tolist() for p in ddp.parameters()])  # type: ignore[union-attr]


# ---------------------------------------------------------------------- SyncBatchNorm


@pytest.mark.ranks(3)
@ON_BOTH
def test_ranks_with_synchronized_batch_norm_compute_what_one_process_does(transport: Any) -> None:
    rank = sl.init(transport).rank
    for sizes in ([3, 3, 3], [2, 0, 3]):
        torch.manual_seed(0)
        layers = [nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.BatchNorm2d(3, momentum=None)]
        alone = nn.Sequential(*layers).double()
        ddp = sl.DistributedDataParallel(sl.nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(alone)))
        parts = list(torch.randn(sum(sizes), 2, 6, 6, dtype=torch.float64).split(sizes))
        with ddp.normalize_by(len(parts[rank])):
            (ddp(parts[rank]) - 0.5).pow(4).sum().backward()
        ((alone(torch.cat(parts)) - 0.5).pow(4).sum() / sum(sizes)).backward()
        mine = [*(p.grad for p in ddp.parameters()), *ddp.buffers()]
        for got, expected in zip(
            mine, [*(p.grad for p in alone.parameters()), *alone.buffers()], strict=True
        ):
            torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
        assert_equal_on_all_ranks([tensor.tolist() for tensor in mine])  # type: ignore[union-attr]


@pytest.mark.ranks(3)
def test_statistics_stay_within_a_process_group_also_those_of_a_copy() -> None:
    """One group of ranks 0 and 1; rank 2 makes no call."""
    group, rank = dist.new_group([0, 1]), dist.get_rank()
    if rank == 2:
        return
    layer = sl.nn.SyncBatchNorm(3, process_group=group, momentum=1.0)
    twin = copy.deepcopy(layer)
    assert twin.process_group is group
    parts = [torch.arange(12.0).view(4, 3) ** (r + 1) for r in range(2)]
    twin(parts[rank])
    assert layer.running_mean.tolist() == [0.0] * 3
    torch.testing.assert_close(twin.running_mean, torch.cat(parts).mean(0))
    torch.testing.assert_close(twin.running_var, torch.cat(parts).var(0))


# ---------------------------------------------------------------------- gradients that are not finite, replicas

torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 2))


@contextlib.contextmanager
def bad(parameter: Tensor, when: bool) -> Iterator[None]:
    """In this block, if `when`, the first element of its gradient is NaN."""
    at = torch.tensor([0])
    handle = parameter.register_hook(lambda g: g.reshape(-1).index_fill(0, at, math.nan).view_as(g))
    if not when:
        handle.remove()
    yield
    handle.remove()


@pytest.mark.ranks(2)
@ON_BOTH
def test_all_ranks_do_the_same_with_gradients_that_are_not_finite(transport: Any) -> None:
    sl.init(transport)
    for policy, outcome in {"raise": "raised", "skip": "discarded", "zero": "zeroed"}.items():
        with case(policy):
            train_with_fewer_inputs_on_rank_0(policy, outcome)


def train_with_fewer_inputs_on_rank_0(policy: Any, outcome: str) -> None:
    """Rank 1 trains for longer, and its gradients are not finite while rank 0 trains as well, and afterwards."""
    ddp: Any = sl.DistributedDataParallel(copy.deepcopy(NET), on_nonfinite=policy)
    optimizer = ddp.attach(torch.optim.AdamW(ddp.parameters(), lr=0.01))
    errors, outcomes = [], []

    def train(first: int, stop: int) -> None:
        for step in range(first, stop):
            optimizer.zero_grad()
            with bad(ddp.module[0].weight, step in (1, 4) and dist.get_rank() == 1):
                try:
                    ddp(batch(step, 5, 3)).square().mean().backward()
                    optimizer.step()
                except sl.NonFiniteGradient as error:
                    errors.append((str(error), error.found))
                    if step >= 3:  # this ends `join` on all ranks
                        raise
                finally:
                    outcomes.append(ddp.last_step.nonfinite.outcome)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(0, 3)
        assert_equal_on_all_ranks([p.tolist() for p in ddp.parameters()])
        is_over = pytest.raises(sl.NonFiniteGradient) if policy == "raise" else contextlib.nullcontext()
        with is_over as last, ddp.join():
            train(3, 6 if dist.get_rank() else 4)
    assert_equal_on_all_ranks([p.tolist() for p in ddp.parameters()])
    assert all(bool(p.isfinite().all()) for p in ddp.parameters())
    bad_steps = [step for step, found in enumerate(outcomes) if found == outcome]
    assert bad_steps == ([1, 4] if dist.get_rank() else [1])
    if policy == "raise":
        assert errors[0][1] == {1: ("0.weight",)}
        assert_equal_on_all_ranks((errors[0], str(last.value)))  # type: ignore[union-attr]
    else:
        told = [str(one.message) for one in caught if "rank 1: 0.weight (NaN in 1 of 120" in str(one.message)]
        assert len(told) == (2 if dist.get_rank() == 0 else 0)


@pytest.mark.ranks(3)
@ON_BOTH
def test_one_bit_is_found_and_named_and_equal_replicas_cost_no_further_call(transport: Any) -> None:
    sl.init(transport)

    def trained(*, flipped: bool, **kwargs: Any) -> sl.DistributedDataParallel:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
        ddp = sl.DistributedDataParallel(module, replica_check=sl.ReplicaCheck(every=3), **kwargs)
        optimizer = ddp.attach(torch.optim.AdamW(ddp.parameters()))
        for step in range(7):
            if flipped and step == 4 and dist.get_rank() == 1:
                module[3].bias.detach().view(torch.int32)[2] ^= 1
            optimizer.zero_grad()
            ddp(torch.randn(6, 8)).square().sum().backward()
            optimizer.step()
        return ddp

    for kwargs in ({}, {"compression": sl.compression.Cast(torch.bfloat16)}, {"bucket_cap_mb": 0.001}):
        with pytest.raises(sl.ReplicaDivergence) as caught:
            trained(flipped=True, **kwargs)
        error = caught.value
        assert (error.tensor, error.elements, error.minority_ranks) == ("3.bias", (2, 2), (1,)), kwargs
        assert error.found_at_step in (5, 6, 7)
    ddp = trained(flipped=False)
    assert ddp.contract["replica check"].last_done == "step 7: equal"
    before = ddp.statistics().total_calls
    ddp(torch.randn(6, 8)).sum().backward()
    assert ddp.last_step is not None
    num_calls = ddp.statistics().total_calls - before
    assert num_calls == len(ddp.last_step.buckets) + 1, "the buckets, and the buffers"


@pytest.mark.ranks(2)
def test_a_rank_without_inputs_is_not_compared() -> None:
    torch.manual_seed(0)
    ddp = sl.DistributedDataParallel(nn.Linear(3, 2), replica_check=sl.ReplicaCheck(every=1))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with ddp.join():
        for _ in range(2 + 3 * dist.get_rank()):  # rank 0 stops stepping after 2
            optimizer.zero_grad()
            ddp(torch.randn(4, 3)).square().sum().backward()
            optimizer.step()
    sl.check_replicas(ddp)


# ---------------------------------------------------------------------- ranks that are asked to stop


def shared(path: Path) -> str:
    """Rank 0's folder, on all ranks."""
    return gathered(str(path))[0]


def until_stopped(state: sl.TrainState, checkpointer: sl.Checkpointer, step: Any, limit: int = 20) -> int:
    with pytest.raises(SystemExit):
        for _ in range(limit):
            if state.step == 3 and dist.get_rank() == 1:
                checkpointer.ask_to_stop()
            step()
            state.commit()
            checkpointer.stop_if_asked(state)
    return state.step


WRAPPINGS: list[tuple[dict[str, Any], torch.dtype]] = [
    ({}, torch.float32),
    ({}, torch.bfloat16),
    ({"sharded": True}, torch.float32),
    ({"strategy": sl.LocalSGD(4)}, torch.float32),
    ({"strategy": sl.Gossip("ring")}, torch.float32),
]


@pytest.mark.ranks(3)
@ON_BOTH
def test_all_ranks_stop_after_the_step_under_way(transport: Any, tmp_path: Path) -> None:
    sl.init(transport)
    for number, (wrapping, dtype) in enumerate(WRAPPINGS):
        ddp = sl.DistributedDataParallel(nn.Linear(4, 1).to(dtype), **wrapping)
        optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1))
        state = sl.TrainState(model=ddp, optimizer=optimizer)
        directory = shared(tmp_path / str(number))
        checkpointer = sl.Checkpointer(directory, stop_signals=())

        def step(ddp: Any = ddp, optimizer: Any = optimizer, dtype: torch.dtype = dtype) -> None:
            ddp(torch.ones(2, 4, dtype=dtype)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        with case(wrapping, dtype):
            assert until_stopped(state, checkpointer, step) == 4
            assert [path.name for path in Path(directory).iterdir()] == ["save-000001-step-4"]


@pytest.mark.ranks(2)
def test_ranks_with_torchs_own_wrapper_stop(tmp_path: Path) -> None:
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
    state = sl.TrainState(model=ddp)
    checkpointer = sl.Checkpointer(shared(tmp_path), stop_signals=())
    assert until_stopped(state, checkpointer, lambda: ddp(torch.ones(2, 4)).sum().backward()) == 4


@pytest.mark.ranks(2)
def test_where_a_rank_has_no_inputs_left_the_stop_waits_for_the_end_of_join(tmp_path: Path) -> None:
    ddp = sl.DistributedDataParallel(nn.Linear(4, 1))
    state = sl.TrainState(model=ddp)
    checkpointer = sl.Checkpointer(shared(tmp_path), stop_signals=())
    rank = dist.get_rank()

    def step() -> None:
        ddp(torch.ones(2, 4)).sum().backward()
        state.commit()
        checkpointer.stop_if_asked(state)

    with ddp.join():
        for _ in range(2 + 3 * rank):
            if rank == 1 and state.step == 3:
                checkpointer.ask_to_stop()
            step()
    assert state.step == 2 + 3 * rank
    state.step = 5
    with pytest.raises(SystemExit):
        step()
    assert state.step == 6
    transport_of().barrier().wait()
