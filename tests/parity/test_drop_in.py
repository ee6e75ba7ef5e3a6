"""What users do with torch's class, done with ours beside it on the same Gloo group: the same gradients come out."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Net, batch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.join import Join
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint

import syncline as sl
from support.cases import case
from syncline import DistributedDataParallel as DDP

TorchDDP = torch.nn.parallel.DistributedDataParallel
Wrap = Callable[..., Any]


def gradients_of(
    ddp: Any, *, num_steps: int = 4, between: Callable[[], None] = lambda: None, lr: float = 0.1
) -> list[Tensor]:
    """All gradients of a few steps, those of an accumulated one included."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=lr)
    seen = []
    for step in range(num_steps):
        optimizer.zero_grad()
        with ddp.no_sync() if step == 2 else nullcontext():
            ddp(batch(step)).square().mean().backward()
        if step == 2:
            ddp(batch(50)).square().mean().backward()
        seen += [p.grad.clone() for p in ddp.parameters() if p.grad is not None]
        optimizer.step()
    between()
    return seen


def assert_equal(ours: list[Tensor], theirs: list[Tensor], **tolerance: float) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        if tolerance:
            torch.testing.assert_close(a.float(), b.float(), **tolerance)
        else:
            assert torch.equal(a.to_dense(), b.to_dense())


def assert_torchs(run: Callable[[Wrap], list[Tensor]], **tolerance: float) -> None:
    """Compare what comes out with our class and with torch's."""
    assert_equal(run(DDP), run(TorchDDP), **tolerance)


SUMMED: dict[str, float] = {"rtol": 1e-6, "atol": 1e-7}
"""Where the order of the summands, or of a division and a sum, is another."""
OFF_ON = (False, True)


# ---------------------------------------------------------------------- communication hooks


# Without annotations: torch refuses those that are text.
def scaled_by_hand(state, bucket):
    state["calls"] += 1
    state["last"] += bucket.is_last()
    assert sum(g.numel() for g in bucket.gradients()) == bucket.buffer().numel()
    assert [p.shape for p in bucket.parameters()] == [g.shape for g in bucket.gradients()]
    tensor = bucket.buffer() / dist.get_world_size()
    future = dist.all_reduce(tensor, async_op=True).get_future()  # type: ignore[union-attr]
    return future.then(lambda done: done.value()[0])


def power_sgd() -> Any:
    return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)


def post_local_sgd() -> Any:
    alone, _ = dist.new_subgroups(group_size=1)
    return post_localSGD_hook.PostLocalSGDState(None, alone, start_localSGD_iter=2)


HOOKS: dict[str, tuple[Callable[[], Any], Any]] = {
    "allreduce": (lambda: None, default_hooks.allreduce_hook),
    "fp16": (lambda: None, default_hooks.fp16_compress_hook),
    "fp16 wrapper": (lambda: None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "powerSGD": (power_sgd, powerSGD_hook.powerSGD_hook),
    "noop": (lambda: None, debugging_hooks.noop_hook),
    "post_localSGD": (post_local_sgd, post_localSGD_hook.post_localSGD_hook),
    "by hand": (lambda: {"calls": 0, "last": 0}, scaled_by_hand),
}


@pytest.mark.ranks(2, timeout=300)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_torchs_communication_hooks_run_unchanged() -> None:
    for name, view in itertools.product(HOOKS, OFF_ON):
        make_state, hook = HOOKS[name]

        def run(
            wrap: Wrap, make_state: Any = make_state, hook: Any = hook, view: bool = view
        ) -> list[Tensor]:
            ddp, state = wrap(Net(), gradient_as_bucket_view=view), make_state()
            ddp.register_comm_hook(state, hook)
            # PowerSGD starts from random matrices, by numpy's generator, seeded in its state.
            found = gradients_of(ddp)
            if hook is scaled_by_hand:
                assert state["calls"] == state["last"] == 4
            return found

        with case(
            name, view
        ):  # the order of a hook's own rounding is its own: buckets may be cut differently
            assert_torchs(run, rtol=2e-3, atol=2e-4)


@pytest.mark.ranks(2)
def test_a_hook_may_come_between_two_backwards_and_is_told_which_of_many_buckets_is_last() -> None:
    for view in OFF_ON:

        def run(wrap: Wrap, view: bool = view) -> list[Tensor]:
            ddp = wrap(Net(), gradient_as_bucket_view=view, bucket_cap_mb=0.001)
            first, state = gradients_of(ddp), {"calls": 0, "last": 0}
            ddp.register_comm_hook(state, scaled_by_hand)
            found = [*first, *gradients_of(ddp)]
            assert state["last"] == 4
            if isinstance(ddp, DDP):
                assert state["calls"] == 4 * len(ddp.last_step.buckets) > 4
                assert "by communication hook scaled_by_hand" in ddp.contract.long()
            return found

        with case(view):
            assert_torchs(run, **SUMMED)


@pytest.mark.ranks(2)
def test_the_built_in_hook_equals_torchs() -> None:
    def run(wrap: Wrap) -> list[Tensor]:
        ddp = wrap(Net())
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
        return gradients_of(ddp)

    assert_torchs(run, **SUMMED)


def test_what_is_no_hook_is_refused() -> None:
    ddp = DDP(nn.Linear(1, 1))
    with pytest.raises(TypeError, match="must be callable"):
        ddp.register_comm_hook(None, 3)  # type: ignore[arg-type]

    def wrong(state, bucket): ...

    wrong.__annotations__["bucket"] = int

    with pytest.raises(ValueError, match="bucket annotation should be"):
        ddp.register_comm_hook(None, wrong)
    ddp.register_comm_hook(None, debugging_hooks.noop_hook)
    with pytest.raises(RuntimeError, match="can only be called once"):
        ddp.register_comm_hook(None, debugging_hooks.noop_hook)
    with pytest.raises(ValueError, match="normalize_by cannot divide"), ddp.normalize_by(3):
        pass
    ddp = DDP(nn.Linear(1, 1))
    with ddp.normalize_by(1), pytest.raises(ValueError, match="normalize_by cannot divide"):
        ddp.register_comm_hook(None, debugging_hooks.noop_hook)


@pytest.mark.ranks(2)
def test_a_hook_that_raises_is_the_users_error_with_its_place() -> None:
    def broken(state: object, bucket: object) -> Any:
        raise KeyError("mine")

    ddp = DDP(Net())
    ddp.register_comm_hook(None, broken)
    with pytest.raises(KeyError, match="mine") as caught:
        ddp(batch(0)).sum().backward()
    assert "step 1, backward, bucket 0" in caught.value.__notes__[0]


# ---------------------------------------------------------------------- kinds of gradients


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.rows, self.out = nn.Embedding(40, 8, sparse=True), nn.Linear(8, 1)

    def forward(self, indices: Tensor) -> Tensor:
        return self.out(self.rows(indices).sum(1))


def looked_at(state, bucket):
    state.append((bucket.index(), bucket.is_last(), bucket.buffer().is_sparse, len(bucket.gradients())))
    return default_hooks.allreduce_hook(None, bucket)


@pytest.mark.ranks(2)
def test_sparse_gradients_are_torchs_also_those_that_a_communication_hook_gets() -> None:
    for view, hook in ((False, None), (True, None), (False, looked_at), (False, debugging_hooks.noop_hook)):
        kinds: list[list[bool]] = []

        def run(wrap: Wrap, view: bool = view, hook: Any = hook, kinds: Any = kinds) -> list[Tensor]:
            ddp = wrap(Sparse(), gradient_as_bucket_view=view)
            calls: list[Any] = []
            if hook is not None:
                ddp.register_comm_hook(calls, hook)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
            seen = []
            for step in range(3):
                optimizer.zero_grad()
                generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
                indices = torch.randint(0, 40, (3 + 2 * dist.get_rank(), 4), generator=generator)
                ddp(indices).square().mean().backward()
                assert ddp.module.rows.weight.grad.is_sparse
                seen += [p.grad.to_dense().clone() for p in ddp.parameters()]
                optimizer.step()
            assert all(num_gradients == (0 if is_sparse else 2) for _, _, is_sparse, num_gradients in calls)
            assert sum(is_last for _, is_last, _, _ in calls) == len(calls) // 2
            kinds.append(sorted(is_sparse for _, _, is_sparse, _ in calls))
            return seen

        with case(view, hook):
            assert_torchs(run, rtol=1e-6, atol=1e-8)
            assert kinds[0] == kinds[1]


@pytest.mark.ranks(2)
def test_a_hook_that_returns_something_else_for_a_sparse_gradient_is_an_error() -> None:
    def values(state: object, bucket: Any) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer()._values() if bucket.buffer().is_sparse else bucket.buffer())
        return future

    ddp = DDP(Sparse())
    ddp.register_comm_hook(None, values)
    with pytest.raises(
        sl.SynclineError, match=r"expected the hook.s future to hold a tensor of shape \(40, 8\)"
    ):
        ddp(torch.tensor([[1, 2]])).sum().backward()


@pytest.mark.ranks(2)
def test_a_sparse_parameter_that_one_rank_did_not_use() -> None:
    class Maybe(Sparse):
        def forward(self, indices: Tensor) -> Tensor:
            return super().forward(indices) if dist.get_rank() else self.out(torch.ones(2, 8))

    for with_hook in OFF_ON:
        ddp = DDP(Maybe(), find_unused_parameters=True)
        if with_hook:
            ddp.register_comm_hook(None, default_hooks.allreduce_hook)
        ddp(torch.tensor([[1, 2]])).sum().backward()
        with case(with_hook):
            assert ddp.module.rows.weight.grad.coalesce().indices().tolist() == [[1, 2]]


@pytest.mark.ranks(2)
def test_complex_and_channels_last_parameters() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.phase = nn.Parameter(torch.randn(6, dtype=torch.complex64))
            self.conv = nn.Conv2d(1, 3, 3).to(memory_format=torch.channels_last)

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.phase).abs().sum() + self.conv(x[None, None].expand(1, 1, 5, 6)).square().sum()

    assert_torchs(lambda wrap: gradients_of(wrap(Mixed()), lr=0.0))


@pytest.mark.ranks(2)
def test_sums_in_another_type_than_the_parameters() -> None:
    module = nn.Linear(4, 1, bias=False).to(torch.bfloat16)
    ddp = DDP(module, reduce_dtype=torch.float32)
    x = torch.tensor([[1.0, 0.5, 3.0, 2.0]], dtype=torch.bfloat16) * (1 + 254 * dist.get_rank())
    ddp(x).sum().backward()
    expected = torch.tensor([[1.0, 0.5, 3.0, 2.0]]) * 128  # (1 + 255) / 2, rounded once at the end
    assert torch.equal(module.weight.grad.float(), expected)  # type: ignore[union-attr]
    assert "in float32" in ddp.contract["gradients"].how


@pytest.mark.ranks(2)
def test_torchs_mixed_precision_argument() -> None:
    config = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=None)
    ddp = DDP(Net(), mixed_precision=config)
    assert ddp(batch(0)).dtype is torch.bfloat16
    full = gradients_of(TorchDDP(Net()))
    assert all(p.dtype is torch.float32 for p in ddp.parameters())
    assert_equal(gradients_of(ddp), full, rtol=0.1, atol=0.02)


# ---------------------------------------------------------------------- graphs


class Branches(nn.Module):
    """Which branch is used depends on rank and step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.stem = nn.Linear(6, 6)
        self.branches = nn.ModuleList([nn.Linear(6, 2) for _ in range(3)])
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.branches[(self.calls + dist.get_rank()) % 2](self.stem(x))


@pytest.mark.ranks(2)
def test_unused_parameters_are_torchs() -> None:
    for view, cap_mb in itertools.product(OFF_ON, (0.0001, 25)):
        options = {"gradient_as_bucket_view": view, "bucket_cap_mb": cap_mb}

        def run(wrap: Wrap, options: Any = options) -> list[Tensor]:
            ddp = wrap(Branches(), find_unused_parameters=True, **options)
            seen = gradients_of(ddp)
            assert ddp.module.branches[2].weight.grad is None
            return seen

        with case(options):
            assert_torchs(run)


class Heads(nn.Module):
    """Which heads are used is chosen from outside; each has a bucket of its own under a small cap."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.stem = nn.Linear(6, 6)
        self.heads = nn.ModuleList([nn.Linear(6, 2) for _ in range(3)])
        self.used = [0]

    def forward(self, x: Tensor) -> Tensor:
        return sum(self.heads[i](self.stem(x)) for i in self.used)  # type: ignore[return-value]


def with_heads(wrap: Wrap, *, skip: bool = True, view: bool = False, with_hook: bool = False) -> Any:
    ddp = wrap(
        Heads(),
        find_unused_parameters=True,
        skip_all_reduce_unused_params=skip,
        gradient_as_bucket_view=view,
        bucket_cap_mb=0.00001,
    )
    if with_hook:
        ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    return ddp


@pytest.mark.ranks(2)
def test_buckets_that_no_rank_used_are_not_sent_if_asked() -> None:
    for with_hook, view in itertools.product(OFF_ON, OFF_ON):

        def run(wrap: Wrap, with_hook: bool = with_hook, view: bool = view) -> list[Tensor]:
            ddp = with_heads(wrap, view=view, with_hook=with_hook)
            found = gradients_of(ddp)
            assert ddp.module.heads[2].weight.grad is None
            assert ddp._get_ddp_logging_data()["num_buckets_reduced"] == 4
            return found

        with case(with_hook, view):
            assert_torchs(run)


@pytest.mark.ranks(2)
def test_where_ranks_use_different_parameters_skipping_changes_nothing() -> None:
    """torch asks that they do not, else its class may hang."""

    def run(**how: bool) -> tuple[list[Tensor | None], list[int]]:
        ddp = with_heads(DDP, **how)
        seen: list[Tensor | None] = []
        num_sent = []
        for step, used in enumerate([([0], [1]), ([0, 2], [0]), ([1], [1])]):
            ddp.zero_grad(set_to_none=step != 1)
            ddp.module.used = used[dist.get_rank()]
            ddp(batch(step)).square().mean().backward()
            seen += [None if p.grad is None else p.grad.clone() for p in ddp.parameters()]
            num_sent.append(len(ddp.last_step.buckets))
        ddp.zero_grad()
        with ddp.no_sync():
            ddp.module.used = [2] if dist.get_rank() else [1]
            ddp(batch(4)).square().mean().backward()
        ddp.module.used = [0]
        ddp(batch(5)).square().mean().backward()
        num_sent.append(len(ddp.last_step.buckets))
        return [*seen, *(p.grad for p in ddp.parameters())], num_sent

    for view, with_hook in itertools.product(OFF_ON, OFF_ON):
        how = {"view": view, "with_hook": with_hook}
        (ours, num_sent), (plain, _) = run(skip=True, **how), run(skip=False, **how)
        with case(how):
            assert num_sent == [6, 6, 4, 8]
            assert [g is None for g in ours] == [g is None for g in plain]
            assert_equal([g for g in ours if g is not None], [g for g in plain if g is not None])


@pytest.mark.ranks(2)
def test_skipping_goes_together_with_uneven_inputs() -> None:
    def run(*, skip: bool) -> list[Tensor]:
        ddp = with_heads(DDP, skip=skip)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with ddp.join():
            for step in range(2 + 2 * dist.get_rank()):
                optimizer.zero_grad()
                ddp.module.used = [step % 2]
                ddp(batch(step)).square().mean().backward()
                optimizer.step()
        return list(ddp.parameters())

    assert_equal(run(skip=True), run(skip=False))


@dataclass
class Output:
    logits: Tensor
    extra: object = None


class Repeated(Net):
    """Its middle layer is used several times, in reentrant checkpoints."""

    def __init__(self, num_uses: int) -> None:
        super().__init__()
        self.num_uses, self.as_dataclass = num_uses, False

    def forward(self, x: Tensor) -> Any:
        x = torch.tanh(self.first(x))
        for _ in range(self.num_uses):
            x = checkpoint(self.middle, x, use_reentrant=True)
        x = self.last(x)
        return Output(x, extra=[None]) if self.as_dataclass else x


@pytest.mark.ranks(2)
def test_static_graph_with_reentrant_checkpoints_of_shared_layers_is_torchs() -> None:
    def run(wrap: Wrap, *, as_dataclass: bool = False) -> list[Tensor]:
        ddp = wrap(Repeated(3), static_graph=True)
        ddp.module.as_dataclass = as_dataclass
        seen = []
        for step in range(3):
            ddp.zero_grad()
            output = ddp(batch(step))
            (output.logits if as_dataclass else output).square().mean().backward()
            seen += [p.grad.clone() for p in ddp.parameters()]
        return seen

    expected = run(TorchDDP)
    assert_equal(run(DDP), expected)
    assert_equal(run(DDP, as_dataclass=True), expected)  # torch's own leaves each rank its own gradients here


@pytest.mark.ranks(2)
def test_a_static_graph_that_changes_on_one_rank_is_the_same_error_on_both() -> None:
    for (learnt, later), cap_mb, with_hook in itertools.product(((1, 3), (3, 1)), (0.0001, None), OFF_ON):
        ddp = DDP(Repeated(learnt), static_graph=True, bucket_cap_mb=cap_mb)
        if with_hook:
            ddp.register_comm_hook(None, default_hooks.allreduce_hook)
        ddp(batch(0)).square().mean().backward()
        before = [p.grad.clone() for p in ddp.parameters()]  # type: ignore[union-attr]
        ddp.zero_grad()
        ddp.module.num_uses = learnt if dist.get_rank() == 0 else later
        with case(learnt, later, cap_mb, with_hook):
            with pytest.raises(sl.ContractMismatch, match="static_graph=True") as caught:
                ddp(batch(0)).square().mean().backward()
            assert f"rank 1: middle.weight ({learnt} before, {later} now)" in str(caught.value)
            assert "rank 0:" not in str(caught.value)
            ddp.zero_grad()  # the ranks are in step, and may go on
            ddp.module.num_uses = learnt
            ddp(batch(0)).square().mean().backward()
            assert_equal([p.grad for p in ddp.parameters()], before)  # type: ignore[misc]


@pytest.mark.ranks(2)
def test_a_gan_runs_its_discriminator_twice_before_a_backward() -> None:
    def run(wrap: Wrap, **options: bool) -> tuple[list[Tensor], list[Tensor]]:
        torch.manual_seed(8)
        ddp = wrap(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)), **options)
        (ddp(batch(0)).mean() - ddp(batch(1)).mean()).backward()
        return [p.grad.clone() for p in ddp.parameters()], [b.clone() for b in ddp.buffers()]

    ours = run(DDP)
    if torch.__version__.startswith("2.11."):  # its class writes to buffers that the first forward saved
        assert_equal(ours[0], run(TorchDDP, broadcast_buffers=False)[0])
    else:
        for mine, theirs in zip(ours, run(TorchDDP), strict=True):
            assert_equal(mine, theirs)


# ---------------------------------------------------------------------- uneven inputs


@pytest.mark.ranks(2)
def test_uneven_inputs_end_with_torchs_parameters() -> None:
    for num_fewer, by_initial in itertools.product((0, 1, 5), OFF_ON):

        def run(wrap: Wrap, num_fewer: int = num_fewer, by_initial: bool = by_initial) -> list[Tensor]:
            torch.manual_seed(9)
            module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
            ddp = wrap(module, bucket_cap_mb=0.0001)
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            with ddp.join(divide_by_initial_world_size=by_initial):
                for step in range(5 - num_fewer * dist.get_rank()):
                    optimizer.zero_grad()
                    ddp(batch(step)).square().mean().backward()
                    optimizer.step()
            return [t.clone() for t in (*ddp.parameters(), *ddp.buffers())]

        with case(num_fewer, by_initial):
            assert_torchs(run, **SUMMED)


@pytest.mark.ranks(2)
def test_a_rank_without_inputs_learns_its_static_graph_later() -> None:
    ddp = DDP(Repeated(2), static_graph=True)
    with ddp.join():
        for step in range(2 - 2 * dist.get_rank()):
            ddp(batch(step)).square().mean().backward()
    for step in range(2):
        ddp.zero_grad()
        with ddp.join():
            ddp(batch(step)).square().mean().backward()
    found = [p.grad.clone() for p in ddp.parameters()]  # type: ignore[union-attr]
    fresh = DDP(copy.deepcopy(ddp.module), static_graph=True)
    fresh.zero_grad()
    fresh(batch(1)).square().mean().backward()
    assert_equal(found, [p.grad for p in fresh.parameters()])  # type: ignore[misc]


@pytest.mark.ranks(2)
def test_averaged_buffers_are_of_the_ranks_that_still_have_inputs() -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(1, momentum=1.0)
            self.register_buffer("largest", torch.tensor(0))

        def forward(self, x: Tensor) -> Tensor:
            seen.append((self.norm.running_mean.item(), self.norm.running_var.item(), self.largest.item()))
            self.largest.copy_(x.max())
            return self.norm(x)

    seen: list[tuple[float, ...]] = []
    ddp = DDP(Norm(), buffers="average")
    x = torch.tensor([[10.0], [12.0]]) + 10 * dist.get_rank()
    with ddp.join():
        for _ in range(3 - dist.get_rank()):
            ddp(x).square().sum().backward()
    expected = [
        (0.0, 1.0, 0),
        (16.0, 2.0 + 25.0, 22),  # both have inputs: means 11 and 21
        (11.0, 2.0, 12),  # rank 1 has none left
    ]
    assert seen == expected[: len(seen)]


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_join_beside_another_joinable() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # importing it warns

    def run(wrap: Wrap) -> list[Tensor]:
        ddp = wrap(Net())
        optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1)
        with Join([ddp, optimizer]):
            for step in range(2 + 2 * dist.get_rank()):
                optimizer.zero_grad()
                ddp(batch(step)).square().mean().backward()
                optimizer.step()
        return [p.clone() for p in ddp.parameters()]

    assert_torchs(run, **SUMMED)


@pytest.mark.ranks(2)
def test_a_module_may_change_just_before_join() -> None:
    net = Net()
    first, *others = net.parameters()
    first.requires_grad_(False)
    ddp = DDP(net)
    first.requires_grad_(True)
    with ddp.join():
        for step in range(2 * dist.get_rank()):  # rank 0 has none, and takes part all the same
            ddp(batch(step)).square().mean().backward()
    assert ddp.contract["gradients"].size.startswith(f"{1 + len(others)} tensors")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_rank_without_inputs_lacks_a_buffer_that_a_forward_adds(num_steps: int) -> None:
    """torch's class sends the buffer nevertheless, and Gloo ends the process."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)

        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "mask"):
                self.register_buffer("mask", torch.ones(6))
            return self.norm(x) * self.mask

    ddp = DDP(Masked())
    with pytest.raises(sl.ContractMismatch, match="rank 1 against rank 0:\n  lacks  buffer mask"), ddp.join():
        for step in range(num_steps * (1 - dist.get_rank())):
            ddp(batch(step)).sum().backward()


@pytest.mark.ranks(2)
def test_join_can_end_all_ranks_with_the_first() -> None:
    ddp = DDP(Net())
    words = "Detected at least one rank" if dist.get_rank() else "Rank 0 exhausted all inputs"
    with pytest.raises(RuntimeError, match=words), ddp.join(throw_on_early_termination=True):
        for step in range(1 + 2 * dist.get_rank()):
            ddp(batch(step)).sum().backward()


# ---------------------------------------------------------------------- parameters left out


@pytest.mark.ranks(2)
def test_ignored_parameters_and_buffers_stay_each_ranks_own() -> None:
    module = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    for parameter in module.parameters():
        parameter.data.fill_(1.0 + dist.get_rank())
    ddp = DDP(module, ignore=["2.*", "1.running_*"])
    assert module[0].weight[0, 0].item() == 1.0
    assert module[2].weight[0, 0].item() == 1.0 + dist.get_rank()
    ddp(batch(dist.get_rank())).square().sum().backward()
    rows: list[Any] = [None, None]
    dist.all_gather_object(rows, [p.grad.tolist() for p in ddp.parameters()])  # type: ignore[union-attr]
    assert rows[0][:4] == rows[1][:4]
    assert rows[0][4] != rows[1][4]
    assert ddp.contract["buffers"].size.startswith("1 tensor")


@pytest.mark.ranks(2)
def test_arguments_that_differ_are_refused_and_patterns_that_match_nothing() -> None:
    rank = dist.get_rank()
    with pytest.raises(sl.ContractMismatch, match=r"ignored +first\.bias"):
        DDP(Net(), ignore=["first.bias"] if rank else [])
    with pytest.raises(sl.ContractMismatch, match="skip_all_reduce_unused_params"):
        DDP(Net(), find_unused_parameters=True, skip_all_reduce_unused_params=rank == 1)
    with pytest.raises(ValueError, match=r"'frist.*', which matches none"):
        DDP(Net(), ignore=["frist.*"])


@pytest.mark.ranks(2)
def test_delayed_parameters_are_reduced_last() -> None:
    module = Net()
    delayed = [(name, p) for name, p in module.named_parameters() if name.startswith("last")]
    ddp = DDP(module, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=module.first.weight)
    assert_equal(gradients_of(ddp), gradients_of(DDP(Net())))
    assert set(ddp.last_step.buckets[-1].parameters) == {"last.weight", "last.bias"}


# ---------------------------------------------------------------------- optimizers, saving, copies


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_optimizers_in_backward_step_with_the_mean() -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    module, plain = Net(), DDP(Net())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    ddp = DDP(module)  # torch's class needs an accelerator for this
    for step in range(3):
        ddp(batch(step)).square().mean().backward()
        assert all(p.grad is None for p in ddp.parameters())
        optimizer.zero_grad()
        plain(batch(step)).square().mean().backward()
        optimizer.step()
    assert_equal(list(ddp.parameters()), list(plain.parameters()))


class Inner(nn.Module):
    """What it holds is named as what a wrapper holds, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2))
        self.module = nn.BatchNorm1d(2)
        self.module.module = nn.Linear(2, 2)


class Outer(nn.Module):
    def __init__(self, wrap: Wrap) -> None:
        super().__init__()
        self.module = wrap(Inner())
        self.other = wrap(Inner())
        self.head = nn.Linear(1, 1)


def bare(module: nn.Module) -> nn.Module:
    return module


def wrapped_inner(wrap: Wrap) -> nn.Module:
    return wrap(Inner())


def wrapped_outer(wrap: Wrap) -> nn.Module:
    return wrap(Outer(bare))


@pytest.mark.ranks(1)
def test_a_state_dict_loads_with_and_without_the_prefix() -> None:
    for make, write in itertools.product((wrapped_inner, wrapped_outer, Outer), (DDP, TorchDDP, bare)):
        written, read = make(write), make(DDP)
        saved = written.state_dict()
        before = set(saved)
        with case(make, write):
            assert not any(read.load_state_dict(saved, strict=True))
            assert set(saved) == before
            assert_equal([*read.parameters(), *read.buffers()], [*written.parameters(), *written.buffers()])
            if write is DDP:
                make(TorchDDP).load_state_dict(saved, strict=True)
            with pytest.raises(RuntimeError, match="Unexpected key"):
                read.load_state_dict({**saved, "module.unknown": torch.zeros(1)})
            with pytest.raises(RuntimeError, match="Missing key"):
                read.load_state_dict(dict(list(saved.items())[1:]))


@pytest.mark.ranks(2)
def test_after_join_everything_is_as_before_it_in_copies_too() -> None:
    ddp = DDP(Net())
    block = ddp.join()
    for _ in range(2):  # torch's may be entered again
        with block:
            for step in range(1 + dist.get_rank()):
                ddp(batch(step)).square().mean().backward()
                inside = copy.deepcopy(ddp)
    assert not ddp._join_config.enable
    for duplicate in (inside, copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp))):
        duplicate.zero_grad()
        duplicate.load_state_dict(ddp.state_dict())
        for step in range(2):
            duplicate(batch(step)).square().mean().backward()
        assert duplicate.last_step.synchronized
        assert duplicate.last_step.step == 2
    ddp.double()  # refused inside
    ddp.zero_grad()
    ddp(batch(0).double()).square().mean().backward()
    assert {p.grad.dtype for p in ddp.parameters()} == {torch.float64}
    with pytest.raises(KeyError), ddp.join():
        raise KeyError
    assert not ddp._join_config.enable


@pytest.mark.ranks(2)
def test_a_copy_synchronizes_on_its_own() -> None:
    ddp = DDP(Net())
    expected = gradients_of(ddp, lr=0.0)
    for duplicate in (copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp))):
        assert_equal(gradients_of(duplicate, lr=0.0), expected)


def test_it_is_what_frameworks_look_for() -> None:
    ddp = DDP(Net())
    assert isinstance(ddp, TorchDDP)
    assert isinstance(ddp.module, Net)
    assert ddp.reducer._rebuild_buckets() is False
    ddp.reducer.prepare_for_backward([])
    ddp.reducer._delay_all_reduce()  # Lightning calls it for static graphs under manual optimization
    with pytest.raises(AttributeError, match="does not use torch's reducer"):
        ddp.reducer._get_zeros_like_grad_buckets()
