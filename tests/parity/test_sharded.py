"""`sharded=True` trains what the replicated run trains: bit for bit where the arithmetic is the same."""

from __future__ import annotations

import copy
import gc
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, Muon, Optimizer, RMSprop

import syncline as sl
from support.states import wait_until
from syncline import DistributedDataParallel as DDP
from syncline import SynclineError
from syncline.gradients import layout
from syncline.session import transport_of
from syncline.transport import C10dTransport, HierarchicalTransport, Transport, run_ranks

Make = Callable[[nn.Module], Optimizer]


class Net(nn.Module):
    """Large and small gradients, a frozen parameter, and weights that are used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 150), nn.Linear(150, 150), nn.Linear(150, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)
        self.spare = nn.Linear(6, 150)

    def forward(self, x: Tensor, *, spare: bool = False) -> Tensor:
        x = x * self.frozen
        x = torch.tanh(self.spare(x) if spare else self.first(x))
        return self.last(torch.tanh(self.middle(torch.tanh(self.middle(x))))) * self.scale


def _net() -> Net:
    generator = torch.Generator().manual_seed(3)
    net = Net.__new__(Net)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        Net.__init__(net)
    del generator
    return net


NET = _net()
"""Copied by each run; ranks may be threads, and torch's seed is one for all."""


def net(*, spare: bool = False) -> Net:
    made = copy.deepcopy(NET)
    if not spare:
        del made.spare
    return made


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * rank + step))


def two_groups(module: nn.Module) -> list[dict[str, Any]]:
    parameters = [p for p in module.parameters() if p.requires_grad]
    matrices, others = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.03, "weight_decay": 0.0}]


OPTIMIZERS: dict[str, Make] = {
    "SGD, single": lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, foreach=False),
    "SGD, foreach": lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9, foreach=True),
    "SGD, fused": lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "Adam": lambda m: Adam(m.parameters(), lr=0.01, amsgrad=True),
    "AdamW, single": lambda m: AdamW(m.parameters(), lr=0.01, foreach=False),
    "AdamW, foreach": lambda m: AdamW(m.parameters(), lr=0.01, foreach=True),
    "AdamW, fused": lambda m: AdamW(m.parameters(), lr=0.01, fused=True),
    "AdamW, groups": lambda m: AdamW(two_groups(m), lr=0.01),
    "AdamW, named": lambda m: AdamW(m.named_parameters(), lr=0.01),
    "Adagrad": lambda m: Adagrad(m.parameters(), lr=0.05),
    "RMSprop": lambda m: RMSprop(m.parameters(), lr=0.01, momentum=0.5),
    "Adafactor, whole": lambda m: Adafactor(m.parameters(), lr=0.01),
}


class Run:
    """One training run on one rank."""

    def __init__(
        self, group: Any, make: Make, *, sharded: bool, module: nn.Module | None = None, **wrap: Any
    ) -> None:
        self.module = net() if module is None else module
        self.ddp = DDP(self.module, process_group=group, sharded=sharded, **wrap)
        self.optimizer = self.ddp.attach(make(self.module))
        self.rank = self.ddp._replica.transport.rank

    def backward(self, step: int, **kwargs: Any) -> None:
        self.ddp(batch(self.rank, step), **kwargs).square().mean().backward()

    def step(self, step: int, **kwargs: Any) -> None:
        self.optimizer.zero_grad()
        self.backward(step, **kwargs)
        self.optimizer.step()

    def values(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.module.parameters()]


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b), (a - b).abs().max()


def assert_alike(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """torch's fused kernels compute the last few elements of a tensor by other instructions than the rest, and shards
    end elsewhere than parameters: those may differ in their last bit, by 6e-8 of their size, and go on from there.
    """
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def assert_equal_states(ours: dict[str, Any], theirs: dict[str, Any], *, same: bool = True) -> None:
    assert ours["param_groups"] == theirs["param_groups"]
    assert sorted(ours["state"]) == sorted(theirs["state"])
    for index, state in theirs["state"].items():
        mine = ours["state"][index]
        assert set(mine) == set(state)
        for key, value in state.items():
            if isinstance(value, Tensor):
                assert mine[key].shape == value.shape, key
                (assert_equal if same else assert_alike)([mine[key]], [value])
            else:
                assert mine[key] == value, key


def compare(group: Any, make: Make, *, num_steps: int = 4, same: bool = True, **wrap: Any) -> None:
    theirs, ours = Run(group, make, sharded=False, **wrap), Run(group, make, sharded=True, **wrap)
    for step in range(num_steps):
        theirs.step(step)
        ours.step(step)
        (assert_equal if same else assert_alike)(ours.values(), theirs.values())
    assert_equal_states(ours.optimizer.state_dict(), theirs.optimizer.state_dict(), same=same)


# ---------------------------------------------------------------------- ranks as threads: one tensor for all


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_threads_train_what_replicas_train(name: str, size: int) -> None:
    run_ranks(size, lambda transport: compare(transport, OPTIMIZERS[name], same="fused" not in name))


@pytest.mark.parametrize("cap", [0.001, 0.02])
def test_many_buckets(cap: float) -> None:
    run_ranks(3, lambda t: compare(t, OPTIMIZERS["AdamW, groups"], bucket_cap_mb=cap))
    run_ranks(3, lambda t: compare(t, OPTIMIZERS["Adafactor, whole"], bucket_cap_mb=cap))


def test_many_buckets_take_turns_in_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "POOL_BYTES", 0)

    def rank(transport: Transport) -> None:
        compare(transport, OPTIMIZERS["AdamW, groups"], bucket_cap_mb=0.001)
        compare(transport, OPTIMIZERS["Adafactor, whole"], bucket_cap_mb=0.001)
        compare(transport, OPTIMIZERS["SGD, single"], bucket_cap_mb=0.001, find_unused_parameters=True)
        compare(transport, OPTIMIZERS["SGD, single"], bucket_cap_mb=0.001, static_graph=True)
        ddp = Run(transport, OPTIMIZERS["SGD, single"], sharded=True, bucket_cap_mb=0.001).ddp
        buckets = ddp._replica.gradients.layout.buckets
        assert len(buckets) > 4
        assert len({b.flat.untyped_storage().data_ptr() for b in buckets}) == 3  # type: ignore[union-attr]

    run_ranks(2, rank)


@pytest.mark.parametrize(
    "wrap",
    [
        {"find_unused_parameters": True},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"buffers": "none"},
    ],
    ids=lambda wrap: next(iter(wrap)),
)
def test_switches(wrap: dict[str, Any]) -> None:
    run_ranks(2, lambda t: compare(t, OPTIMIZERS["AdamW, foreach"], **wrap))


def test_bfloat16_reduced_in_float32() -> None:
    def rank(transport: Transport) -> None:
        theirs, ours = (
            Run(
                transport,
                OPTIMIZERS["SGD, single"],
                sharded=sharded,
                module=net().bfloat16(),
                reduce_dtype=torch.float32,
            )
            for sharded in (False, True)
        )
        for step in range(3):
            for run in (theirs, ours):
                run.optimizer.zero_grad()
                run.ddp(batch(run.rank, step).bfloat16()).square().mean().backward()
                run.optimizer.step()
            # torch's bfloat16 kernels, too, round the last elements of a tensor otherwise: by one unit, 2**-8.
            torch.testing.assert_close(ours.values(), theirs.values(), rtol=2**-6, atol=1e-3)

    run_ranks(2, rank)


def test_mixed_dtypes_and_tied_weights() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 40)
            self.b = nn.Linear(40, 40, dtype=torch.float64)
            self.tied = self.a

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.tanh(self.tied(x)).double())

    with torch.random.fork_rng():
        torch.manual_seed(1)
        base = Mixed()

    def rank(transport: Transport) -> None:
        runs = [
            Run(transport, OPTIMIZERS["AdamW, single"], sharded=sharded, module=copy.deepcopy(base))
            for sharded in (False, True)
        ]
        for step in range(3):
            for run in runs:
                run.step(step)
            assert_equal(runs[1].values(), runs[0].values())
        assert len(runs[1].values()) == 4

    run_ranks(3, rank)


def test_channels_last_weights_keep_their_strides() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        base: nn.Module = nn.Sequential(nn.Conv2d(2, 8, 3), nn.Conv2d(8, 2, 3)).to(
            memory_format=torch.channels_last
        )

    def rank(transport: Transport) -> None:
        runs = [
            Run(transport, OPTIMIZERS["AdamW, single"], sharded=sharded, module=copy.deepcopy(base))
            for sharded in (False, True)
        ]
        for step in range(2):
            x = torch.randn(2, 2, 8, 8, generator=torch.Generator().manual_seed(10 * transport.rank + step))
            for run in runs:
                run.optimizer.zero_grad()
                run.ddp(x).square().mean().backward()
                run.optimizer.step()
            assert_equal(runs[1].values(), runs[0].values())
        assert [p.stride() for p in runs[1].module.parameters()] == [p.stride() for p in base.parameters()]
        assert_equal_states(runs[1].optimizer.state_dict(), runs[0].optimizer.state_dict())
        again = Run(transport, OPTIMIZERS["AdamW, single"], sharded=True, module=copy.deepcopy(base))
        again.optimizer.load_state_dict(runs[0].optimizer.state_dict())
        assert_equal_states(again.optimizer.state_dict(), runs[0].optimizer.state_dict())

    run_ranks(2, rank)


def test_muon_and_adamw_side_by_side() -> None:
    """Muon takes matrices as a whole, AdamW the rest by spans; whichever is attached first."""

    def train(transport: Transport, *, sharded: bool, muon_first: bool) -> tuple[list[Tensor], list[Any]]:
        module = net()
        ddp = DDP(module, process_group=transport, sharded=sharded, bucket_cap_mb=0.02)
        matrices, others = (group["params"] for group in two_groups(module))
        muon: Optimizer = Muon(matrices, lr=0.02)
        adamw: Optimizer = AdamW(others, lr=0.01)
        for optimizer in (muon, adamw) if muon_first else (adamw, muon):
            ddp.attach(optimizer)
        for step in range(3):
            for optimizer in (muon, adamw):
                optimizer.zero_grad()
            ddp(batch(transport.rank, step)).square().mean().backward()
            ddp.clip_grad_norm_(1e9)
            for optimizer in (muon, adamw):
                optimizer.step()
        return [p.detach().clone() for p in module.parameters()], [muon.state_dict(), adamw.state_dict()]

    def rank(transport: Transport) -> None:
        theirs, their_states = train(transport, sharded=False, muon_first=True)
        for muon_first in (True, False):
            ours, our_states = train(transport, sharded=True, muon_first=muon_first)
            assert_equal(ours, theirs)
            for a, b in zip(our_states, their_states, strict=True):
                assert_equal_states(a, b)

    run_ranks(3, rank)


def test_a_scheduler_made_before_or_after_attaching() -> None:
    def train(transport: Transport, *, sharded: bool, before: bool) -> list[Tensor]:
        ddp = DDP(net(), process_group=transport, sharded=sharded)
        optimizer = AdamW(two_groups(ddp), lr=0.01)
        if not before:
            ddp.attach(optimizer)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=6)
        if before:
            ddp.attach(optimizer)
        for step in range(5):
            optimizer.zero_grad()
            ddp(batch(transport.rank, step)).square().mean().backward()
            optimizer.step()
            scheduler.step()
        return [p.detach().clone() for p in ddp.parameters()]

    def rank(transport: Transport) -> None:
        theirs = train(transport, sharded=False, before=False)
        assert_equal(train(transport, sharded=True, before=False), theirs)
        assert_equal(train(transport, sharded=True, before=True), theirs)

    run_ranks(2, rank)


def test_ranks_with_nothing_to_step() -> None:
    """Three elements for three ranks: one has none, and takes part in all that is collective."""

    def rank(transport: Transport) -> None:
        base = nn.Linear(2, 1)
        with torch.no_grad():
            base.weight.fill_(0.5)
            base.bias.fill_(-0.5)
        for make in (OPTIMIZERS["AdamW, single"], OPTIMIZERS["SGD, fused"], OPTIMIZERS["Adafactor, whole"]):
            seen, states = [], []
            for sharded in (False, True):
                module = copy.deepcopy(base)
                ddp = DDP(module, process_group=transport, sharded=sharded)
                optimizer = ddp.attach(make(module))
                scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
                for step in range(3):
                    optimizer.zero_grad()
                    loss = ddp(batch(transport.rank, step)[:, :2]).square().mean()
                    scaler.scale(loss * (math.inf if (step, transport.rank) == (1, 0) else 1.0)).backward()
                    scaler.unscale_(optimizer)
                    ddp.clip_grad_norm_(1e6)
                    scaler.step(optimizer)
                    scaler.update()
                assert scaler.get_scale() == 1.0
                seen.append([p.detach().clone() for p in module.parameters()])
                states.append(optimizer.state_dict())
                optimizer.load_state_dict(states[-1])
            assert_alike(seen[1], seen[0])
            assert_equal_states(states[1], states[0], same=False)

    run_ranks(3, rank)


def test_nobody_writes_while_another_reads() -> None:
    """Rank 1 evaluates between its backward and its step, while rank 0 is in `step` already."""
    boards: dict[int, Any] = {}

    def rank(transport: Transport) -> None:
        run = Run(transport, OPTIMIZERS["SGD, single"], sharded=True)
        boards[transport.rank] = transport.board
        transport.barrier().wait()
        before = run.values()
        run.backward(0)
        if transport.rank == 1:
            wait_until(lambda: boards[0].phase.startswith("optimizer.step()"))
            for _ in range(10):
                assert_equal(run.values(), before)
        run.optimizer.step()
        assert not torch.equal(run.module.last.weight, before[6])
        after = run.values()
        transport.barrier().wait()
        assert_equal(run.values(), after)

    run_ranks(2, rank)


def test_a_refused_backward_can_be_made_good() -> None:
    def rank(transport: Transport) -> None:
        theirs, ours = (
            Run(transport, OPTIMIZERS["SGD, single"], sharded=sharded) for sharded in (False, True)
        )
        theirs.step(0)
        ours.step(0)
        with pytest.raises(SynclineError, match="zero_grad"):
            ours.backward(1)
        theirs.step(2)
        ours.step(2)
        assert_equal(ours.values(), theirs.values())

    run_ranks(2, rank)


# ---------------------------------------------------------------------- clipping, scaling, accumulating


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_the_norm_is_that_of_replicas(norm_type: float) -> None:
    def rank(transport: Transport) -> None:
        theirs, ours = (
            Run(transport, OPTIMIZERS["SGD, single"], sharded=sharded) for sharded in (False, True)
        )
        for step in range(3):
            norms = []
            for run in (theirs, ours):
                run.optimizer.zero_grad()
                run.backward(step)
                norms.append(run.ddp.clip_grad_norm_(0.01, norm_type=norm_type))
                run.optimizer.step()
            # In the replicated norm one sum of some 10,000 numbers is rounded to fp32, parameter by parameter.
            torch.testing.assert_close(norms[1], norms[0], rtol=1e-5, atol=0)
            assert norms[1].dtype is norms[0].dtype
            assert norms[1].shape == ()
            assert (
                transport.all_gather_bytes(repr(norms[1].item()).encode())
                == [repr(norms[1].item()).encode()] * transport.size
            )
            torch.testing.assert_close(ours.values(), theirs.values(), rtol=1e-5, atol=1e-7)

    run_ranks(3, rank)


def test_an_infinite_norm_is_an_error_on_all_ranks_if_asked() -> None:
    def rank(transport: Transport) -> None:
        run = Run(transport, OPTIMIZERS["SGD, single"], sharded=True, on_nonfinite="ignore")
        loss = run.ddp(batch(transport.rank, 0)).sum()
        (loss * (math.inf if transport.rank == 1 else 1.0)).backward()
        with pytest.raises(RuntimeError, match="non-finite"):
            run.ddp.clip_grad_norm_(1.0, error_if_nonfinite=True)

    run_ranks(2, rank)


def overflow(group: Any, how: dict[str, bool]) -> None:
    """One element of one gradient overflows on one rank; it lies in one rank's shard."""

    def train(*, sharded: bool) -> tuple[list[Tensor], list[float]]:
        run = Run(group, lambda m: AdamW(m.parameters(), lr=0.01, **how), sharded=sharded)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scales, seen = [], []
        for step in range(4):
            run.optimizer.zero_grad()
            loss = run.ddp(batch(run.rank, step)).square().mean()
            if step == 1 and run.rank == 1:
                loss = loss + 3e38 * run.module.last.bias[1] * 10  # type: ignore[index, union-attr, operator]
            scaler.scale(loss).backward()
            if step >= 2:
                scaler.unscale_(run.optimizer)
            scaler.step(run.optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            seen += run.values()
        return seen, scales

    theirs, their_scales = train(sharded=False)
    ours, scales = train(sharded=True)
    assert scales == their_scales == [4.0, 2.0, 2.0, 2.0]
    (assert_alike if how.get("fused") else assert_equal)(ours, theirs)


@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"fused": True}], ids=["plain", "foreach", "fused"])
def test_an_overflow_in_one_share_skips_the_step_of_all(how: dict[str, bool]) -> None:
    run_ranks(3, lambda transport: overflow(transport, how))


def test_accumulation_under_no_sync() -> None:
    def rank(transport: Transport) -> None:
        theirs, ours = (
            Run(transport, OPTIMIZERS["AdamW, single"], sharded=sharded) for sharded in (False, True)
        )
        for step in range(3):
            for run in (theirs, ours):
                run.optimizer.zero_grad()
                with run.ddp.no_sync():
                    run.backward(10 * step)
                    run.backward(10 * step + 1)
                run.backward(10 * step + 2)
                run.optimizer.step()
            assert_equal(ours.values(), theirs.values())

    run_ranks(2, rank)


def test_normalize_by() -> None:
    def rank(transport: Transport) -> None:
        theirs, ours = (
            Run(transport, OPTIMIZERS["SGD, single"], sharded=sharded) for sharded in (False, True)
        )
        for step in range(3):
            for run in (theirs, ours):
                run.optimizer.zero_grad()
                num_items = 1 + (step + transport.rank) % 3
                with run.ddp.normalize_by(num_items):
                    run.ddp(batch(run.rank, step)[:num_items]).square().sum().backward()
                run.optimizer.step()
            assert_equal(ours.values(), theirs.values())

    run_ranks(2, rank)


def test_a_parameter_that_no_rank_used_is_not_stepped() -> None:
    """Its momentum and decay rest, as in the replicated run; one that some rank used is stepped."""

    def rank(transport: Transport) -> None:
        theirs, ours = (
            Run(
                transport,
                OPTIMIZERS["AdamW, single"],
                sharded=sharded,
                module=net(spare=True),
                find_unused_parameters=True,
            )
            for sharded in (False, True)
        )
        for step, uses_spare in enumerate([True, False, transport.rank == 1, False]):
            theirs.step(step, spare=uses_spare)
            ours.step(step, spare=uses_spare)
            assert_equal(ours.values(), theirs.values())
        assert_equal_states(ours.optimizer.state_dict(), theirs.optimizer.state_dict())

    run_ranks(2, rank)


# ---------------------------------------------------------------------- saved and loaded


@pytest.mark.parametrize("name", ["SGD, single", "AdamW, fused", "AdamW, groups", "Adafactor, whole"])
def test_checkpoints_go_both_ways(name: str) -> None:
    """Through a file, from replicated to sharded and back, and to another number of ranks."""

    def first(transport: Transport, *, sharded: bool) -> bytes:
        run = Run(transport, OPTIMIZERS[name], sharded=sharded)
        for step in range(2):
            run.step(step)
        file = io.BytesIO()
        torch.save({"model": run.ddp.state_dict(), "optimizer": run.optimizer.state_dict()}, file)
        return file.getvalue()

    def second(transport: Transport, saved: bytes, *, sharded: bool) -> tuple[list[Tensor], dict[str, Any]]:
        run = Run(transport, OPTIMIZERS[name], sharded=sharded)
        loaded = torch.load(io.BytesIO(saved))
        run.ddp.load_state_dict(loaded["model"])
        run.optimizer.load_state_dict(loaded["optimizer"])
        for step in range(2, 4):
            run.step(step)
        return run.values(), run.optimizer.state_dict()

    same = "fused" not in name
    of_replicas = run_ranks(2, lambda t: first(t, sharded=False))
    of_shards = run_ranks(2, lambda t: first(t, sharded=True))
    for size in (2, 3):
        expected, state = run_ranks(size, lambda t: second(t, of_replicas[0], sharded=False))[0]
        for saved in (of_replicas, of_shards):
            for sharded in (True, False):
                runs = run_ranks(
                    size,
                    lambda t, saved=saved, sharded=sharded: second(t, saved[t.rank % 2], sharded=sharded),
                )
                for values, its_state in runs:
                    (assert_equal if same else assert_alike)(values, expected)
                    assert_equal_states(its_state, state, same=same)


def test_state_from_before_attaching_is_cut() -> None:
    def train(transport: Transport, *, sharded: bool) -> list[Tensor]:
        module = net()
        optimizer = AdamW(module.parameters(), lr=0.01)
        module(batch(0, 0)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        ddp = DDP(module, process_group=transport, sharded=sharded)
        ddp.attach(optimizer)
        for step in range(3):
            optimizer.zero_grad()
            ddp(batch(transport.rank, step)).square().mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in module.parameters()]

    run_ranks(2, lambda t: assert_equal(train(t, sharded=True), train(t, sharded=False)))


# ---------------------------------------------------------------------- what is refused


def test_reading_a_gradient_names_what_to_call_instead() -> None:
    def rank(transport: Transport) -> None:
        run = Run(transport, OPTIMIZERS["AdamW, foreach"], sharded=True)
        run.backward(0)
        unattached = SGD(run.module.parameters(), lr=0.1)
        for use in (
            lambda: nn.utils.clip_grad_norm_(run.module.parameters(), 1.0),
            lambda: nn.utils.clip_grad_norm_([p for p in run.ddp.parameters() if p.requires_grad], 1.0),
            lambda: run.module.first.weight.grad + 1,
            unattached.step,
            lambda: run.backward(1),  # would add to what is reduced
        ):
            with pytest.raises(SynclineError, match=r"ddp.clip_grad_norm_.*ddp.attach.*zero_grad"):
                use()
        with pytest.raises(SynclineError, match="norm of a shard"):
            nn.utils.clip_grad_norm_(run.optimizer.param_groups[0]["params"], 1.0)

    run_ranks(1 + 1, rank)


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("of", ["module", "wrapper", "optimizer"])
def test_zero_grad_of_whatever(of: str, to_none: bool) -> None:
    def rank(transport: Transport) -> None:
        theirs, ours = (
            Run(transport, OPTIMIZERS["SGD, single"], sharded=sharded) for sharded in (False, True)
        )
        for step in range(3):
            for run in (theirs, ours):
                owner: Any = {"module": run.module, "wrapper": run.ddp, "optimizer": run.optimizer}[of]
                owner.zero_grad(set_to_none=to_none)
                run.backward(step)
                run.optimizer.step()
            assert_equal(ours.values(), theirs.values())
        ours.ddp.zero_grad()
        before = ours.values()
        ours.optimizer.step()
        assert_equal(ours.values(), before)

    run_ranks(2, rank)


def test_who_forgot_to_attach_is_told_so() -> None:
    def rank(transport: Transport) -> None:
        module = net()
        ddp = DDP(module, process_group=transport, sharded=True)
        ddp.attach(SGD(module.middle.parameters(), lr=0.1))
        ddp(batch(transport.rank, 0)).sum().backward()
        with pytest.raises(SynclineError, match=r"first.weight belongs to no attached optimizer.*ddp.attach"):
            SGD(module.first.parameters(), lr=0.1).step()
        with pytest.raises(SynclineError, match=r"\.grad of parameter middle.weight cannot be read"):
            SGD(module.middle.parameters(), lr=0.1).step()
        with pytest.raises(SynclineError, match="cannot be moved or converted"):
            module.to(torch.float64)

    run_ranks(2, rank)


def test_what_cannot_be_sharded_is_said_at_construction() -> None:
    sparse = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 2))
    two_types = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.float64))
    overlapping = nn.Module()
    overlapping.a = nn.Parameter(torch.zeros(4))
    overlapping.b = nn.Parameter(overlapping.a.data[1:3])

    def rank(transport: Transport) -> None:
        for module, wrap, text in (
            (sparse, {}, "sparse gradients"),
            (two_types, {"reduce_dtype": torch.float32}, "reduce_dtype="),
            (overlapping, {}, "the parameters a and b use the same memory"),
            (net(), {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}, "skip_all"),
        ):
            with pytest.raises(ValueError, match=text):
                DDP(module, process_group=transport, sharded=True, **wrap)  # type: ignore[arg-type]

    run_ranks(2, rank)


def test_what_cannot_go_on_with_shards_is_a_value_error() -> None:
    def rank(transport: Transport) -> None:
        run = Run(transport, OPTIMIZERS["SGD, single"], sharded=True)
        own = [p for p in run.module.parameters() if p.requires_grad]
        for action, text in (
            (lambda: run.ddp.join(), "join"),
            (lambda: run.ddp.register_comm_hook(None, lambda state, bucket: None), "communication hook"),
            (lambda: copy.deepcopy(run.ddp), "a wrapper cannot be copied or pickled"),
            (lambda: run.optimizer.add_param_group({"params": []}), "before ddp.attach"),
            (lambda: run.ddp.attach(SGD(own, lr=0.1)), "has 7 of the 8 parameters of the SGD"),
            (
                lambda: run.ddp.attach(SGD(own, lr=0.1), replace=False),
                "cannot be stepped by two attached optimizers",
            ),
            (lambda: run.ddp.attach(torch.optim.LBFGS(own), replace=True), "LBFGS"),
            (
                lambda: run.ddp.attach(SGD([nn.Parameter(torch.ones(1)), *own]), replace=True),
                "not sharded",
            ),
            (lambda: sl.broadcast_(run.optimizer, group=transport), "this optimizer is sharded"),
        ):
            with pytest.raises(ValueError, match=text):
                action()

    run_ranks(2, rank)


def test_a_closure_runs_before_any_rank_writes_parameters() -> None:
    def rank(transport: Transport, *, with_closure: bool) -> list[Tensor]:
        run = Run(transport, OPTIMIZERS["AdamW, single"], sharded=True)
        for step in range(3):

            def closure(step: int = step) -> Tensor:
                run.optimizer.zero_grad()
                loss = run.ddp(batch(transport.rank, step)).square().mean()
                loss.backward()
                return loss

            if with_closure:
                assert run.optimizer.step(closure).requires_grad
            else:
                closure()
                run.optimizer.step()
        return [p.detach().clone() for p in run.module.parameters()]

    plain, closed = (run_ranks(2, lambda t, w=w: rank(t, with_closure=w)) for w in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(plain[1], closed[1], strict=True))


def test_whole_parameters_have_to_be_known_before_the_first_backward() -> None:
    def rank(transport: Transport) -> None:
        ddp = DDP(net(), process_group=transport, sharded=True)
        ddp(batch(transport.rank, 0)).sum().backward()
        with pytest.raises(ValueError, match="before the first backward"):
            ddp.attach(Adafactor(ddp.parameters()))
        before = [p.detach().clone() for p in ddp.parameters()]
        ddp.attach(SGD(ddp.parameters(), lr=0.1)).step()  # spans are as they were
        assert not all(torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True))

    run_ranks(2, rank)


def test_a_graph_from_before_the_step_notices() -> None:
    def rank(transport: Transport) -> None:
        run = Run(transport, OPTIMIZERS["SGD, single"], sharded=True)
        early = run.module(batch(transport.rank, 5)).sum()
        run.step(0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(early, run.module.first.weight)

    run_ranks(2, rank)


def test_contract_and_timeline_say_who_steps_what() -> None:
    def rank(transport: Transport) -> None:
        run = Run(transport, OPTIMIZERS["AdamW, single"], sharded=True)
        run.step(0)
        contract = run.ddp.contract
        assert contract["gradients"].how == "mean, reduce_scatter: each rank gets its shard (1 of 2)"
        assert contract["parameters"].when == "at every step"
        assert "one copy for all ranks" in contract["parameters"].how
        assert contract["optimizer"].size == "AdamW by flat spans"
        assert "all_reduce" not in run.ddp.explain()
        assert "steps its shard (1 of 2)" in " ".join(run.ddp.explain().split())

    run_ranks(2, rank)


# ---------------------------------------------------------------------- rank processes

GROUPS: dict[str, Callable[[], Any]] = {"shared memory": lambda: None, "gloo": C10dTransport}
"""Over shared memory the ranks have one copy, over Gloo each has its own."""


@pytest.mark.ranks(2)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n not in ("Adam", "SGD, foreach", "AdamW, named")])
@pytest.mark.real
def test_two_processes_train_what_replicas_train(name: str, group: str) -> None:
    transport = GROUPS[group]()
    compare(transport, OPTIMIZERS[name], same="fused" not in name)
    compare(transport, OPTIMIZERS[name], same="fused" not in name, bucket_cap_mb=0.02)
    layout.POOL_BYTES, pool_bytes = 0, layout.POOL_BYTES
    try:  # buckets that take turns in the same memory
        compare(transport, OPTIMIZERS[name], same="fused" not in name, bucket_cap_mb=0.001)
    finally:
        layout.POOL_BYTES = pool_bytes


@pytest.mark.ranks(3)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("name", ["AdamW, groups", "Adafactor, whole"])
def test_three_processes_train_what_replicas_train(name: str, group: str) -> None:
    """Gloo adds three numbers in another order in its reduce_scatter than in its all_reduce."""
    compare(GROUPS[group](), OPTIMIZERS[name], same=group == "shared memory")


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", ["AdamW, groups", "Adafactor, whole"])
def test_two_hosts_of_different_size_train_what_replicas_train(name: str) -> None:
    """Two ranks on one host, one on another: each has its own copy."""
    compare(on_hosts("aab"), OPTIMIZERS[name], same=False, bucket_cap_mb=0.02)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("hosts", ["aabb", "abba"])
@pytest.mark.parametrize("name", ["AdamW, groups", "AdamW, fused", "Adafactor, whole"])
@pytest.mark.real
def test_two_hosts_with_a_copy_each_train_what_replicas_train(name: str, hosts: str) -> None:
    transport = on_hosts(hosts)
    for cap in (None, 0.02):
        compare(transport, OPTIMIZERS[name], same="fused" not in name, bucket_cap_mb=cap)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("hosts", ["aabb", "abab"])
def test_a_host_has_one_copy_that_is_loaded_saved_clipped_and_written_as_one(hosts: str) -> None:
    transport = on_hosts(hosts)
    theirs, ours = (
        Run(transport, OPTIMIZERS["AdamW, foreach"], sharded=sharded) for sharded in (False, True)
    )

    def step(number: int) -> None:
        norms = []
        for run in (theirs, ours):
            run.optimizer.zero_grad()
            run.backward(number)
            norms.append(run.ddp.clip_grad_norm_(0.05))
            run.optimizer.step()
        torch.testing.assert_close(norms[1], norms[0], rtol=1e-5, atol=0)
        torch.testing.assert_close(ours.values(), theirs.values(), rtol=1e-4, atol=1e-6)

    def seen_by_all(tensor: Tensor) -> list[float]:
        return [float(row) for row in transport.all_gather_bytes(str(tensor.sum().item()).encode())]

    step(0)
    assert_state_of_half(ours)
    assert "one copy on each of 2 hosts, values of rank 0" in ours.ddp.contract.long()
    assert "steps its shard (1 of 2)" in " ".join(ours.ddp.explain().split())
    saved = ours.optimizer.state_dict()  # torch's form, the same as that of replicas
    for of_ours, of_theirs in zip(
        saved["state"].values(), theirs.optimizer.state_dict()["state"].values(), strict=True
    ):
        torch.testing.assert_close(of_ours, of_theirs, rtol=1e-4, atol=1e-7)
    before = {key: value.clone() for key, value in ours.ddp.state_dict().items()}
    step(1)
    ours.optimizer.load_state_dict(saved)
    ours.ddp.load_state_dict(before)
    theirs.optimizer.load_state_dict(saved)
    theirs.ddp.load_state_dict(before)
    step(1)
    weight = ours.module.first.weight
    transport.barrier().wait()  # all have read
    if ours.rank == 0:  # behind everybody's back: it is one memory a host
        weight.data.fill_(7.0)
    transport.barrier().wait()
    seen = seen_by_all(weight)
    assert [total == 7.0 * weight.numel() for total in seen] == [host == "a" for host in hosts]
    with sl.write_shared(ours.ddp), torch.no_grad():
        if ours.rank == 0:
            weight.fill_(0.5)
    assert seen_by_all(weight) == [0.5 * weight.numel()] * 4


@pytest.mark.ranks(4)
def test_sharing_over_two_hosts_gives_each_of_them_rank_0s_values() -> None:
    transport = on_hosts("abba")
    module = net()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(transport.rank + 1.0)
    sl.share_(module, group=transport)
    assert all(bool((p == 1.0).all()) for p in module.parameters())
    with sl.write_shared(module), torch.no_grad():
        if transport.rank in (0, 3):  # both on host a: one memory, so both count
            (module.first if transport.rank else module.middle).bias.fill_(2.0)
    assert bool((module.first.bias == 2.0).all())
    assert bool((module.middle.bias == 2.0).all())
    transport.barrier().wait()  # all have read
    if transport.rank == 2:
        with torch.no_grad():
            module.middle.bias.add_(1.0)
    with pytest.raises(SynclineError, match=r"on rank 2: middle\.bias"), sl.write_shared(module):
        pass


def assert_state_of_half(run: Run) -> None:
    """Of two ranks that share, by an optimizer of Adam's kind."""
    num_state = sum(
        value.numel()
        for state in run.optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.dim()
    )
    num_trained = sum(p.numel() for p in run.module.parameters() if p.requires_grad)
    num_gaps = 32 * 7
    assert num_state <= num_trained + num_gaps, "two values for half of the elements"


def on_hosts(hosts: str) -> Transport:
    beneath = C10dTransport()
    return HierarchicalTransport.over(beneath, host=hosts[beneath.rank])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("how", [{}, {"fused": True}], ids=["plain", "fused"])
def test_an_overflow_in_one_process_skips_the_step_of_both(how: dict[str, bool], group: str) -> None:
    overflow(GROUPS[group](), how)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("group", GROUPS)
def test_clipping_and_accumulation_in_processes(group: str) -> None:
    transport = GROUPS[group]()
    theirs, ours = (Run(transport, OPTIMIZERS["AdamW, single"], sharded=sharded) for sharded in (False, True))
    for step in range(3):
        norms = []
        for run in (theirs, ours):
            run.optimizer.zero_grad()
            with run.ddp.no_sync():
                run.backward(10 * step)
            run.backward(10 * step + 1)
            norms.append(run.ddp.clip_grad_norm_(0.05))
            run.optimizer.step()
        torch.testing.assert_close(norms[1], norms[0], rtol=1e-5, atol=0)
        torch.testing.assert_close(ours.values(), theirs.values(), rtol=1e-4, atol=1e-6)


@pytest.mark.ranks(2)
def test_two_processes_have_one_copy() -> None:
    run = Run(None, OPTIMIZERS["AdamW, single"], sharded=True)
    run.step(0)
    assert_state_of_half(run)
    dist.barrier()
    if run.rank == 0:  # behind everybody's back, to see that it is one memory
        run.module.first.weight.data.fill_(7.0)
    dist.barrier()
    assert bool((run.module.first.weight == 7.0).all())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("group", GROUPS)
def test_users_write_inside_of_write_shared(group: str) -> None:
    run = Run(GROUPS[group](), OPTIMIZERS["SGD, single"], sharded=True)
    run.step(0)
    with sl.write_shared(run.ddp), torch.no_grad():
        if run.rank == 0:
            run.module.first.weight.fill_(0.25)
    assert bool((run.module.first.weight == 0.25).all())
    run.step(1)
    saved = {key: value.clone() for key, value in run.ddp.state_dict().items()}
    run.step(2)
    run.ddp.load_state_dict(saved)
    run.module.load_state_dict({key.removeprefix("module."): value for key, value in saved.items()})
    assert_equal(list(run.ddp.state_dict().values()), list(saved.values()))
    run.step(3)


@pytest.mark.ranks(2)
def test_a_write_elsewhere_is_an_error_on_both_ranks() -> None:
    run = Run(None, OPTIMIZERS["SGD, single"], sharded=True)
    run.step(0)
    if run.rank == 1:
        with torch.no_grad():
            run.module.middle.bias.add_(1.0)
    with pytest.raises(SynclineError, match=r"outside of sl.write_shared, on rank 1: middle.bias\. "):
        run.step(1)
    run.step(2)  # it was said
    run.module.first.weight.data = run.module.first.weight.data.clone()
    with pytest.raises(SynclineError, match=r"first.weight has other memory than it was given"):
        run.step(3)


@pytest.mark.ranks(2)
def test_share_and_then_shard() -> None:
    module = sl.share_(net())
    with sl.write_shared(module), torch.no_grad():
        if dist.get_rank() == 0:
            module.frozen.fill_(0.5)
    assert bool((module.frozen == 0.5).all())
    assert not module.frozen.requires_grad
    with pytest.raises(ValueError, match="Give sharded=True"):
        DDP(module)
    theirs = net()
    with torch.no_grad():
        theirs.frozen.fill_(0.5)
    ours_run = Run(None, OPTIMIZERS["AdamW, single"], sharded=True, module=module)
    their_run = Run(None, OPTIMIZERS["AdamW, single"], sharded=False, module=theirs)
    for step in range(3):
        ours_run.step(step)
        their_run.step(step)
    assert_equal(ours_run.values(), their_run.values())
    dist.barrier()  # both have read
    if dist.get_rank() == 1:
        with torch.no_grad():
            module.frozen.add_(1.0)
    with pytest.raises(SynclineError, match="on rank 1: frozen"):
        ours_run.step(3)


@pytest.mark.ranks(2)
def test_a_plain_optimizer_on_shared_parameters_is_found_when_the_module_is_wrapped() -> None:
    module = sl.share_(net())
    module(batch(dist.get_rank(), 0)).sum().backward()
    dist.barrier()
    if dist.get_rank() == 1:
        SGD(module.parameters(), lr=0.1).step()
    with pytest.raises(SynclineError, match=r"rank 1: .*outside of sl.write_shared: scale, "):
        DDP(module, sharded=True)


@pytest.mark.ranks(2)
def test_a_module_that_was_sharded_before_the_group_ended_may_be_sharded_again() -> None:
    module = net()
    for _ in range(2):
        transport = transport_of(None).split(0)
        assert transport is not None
        run = Run(transport, OPTIMIZERS["AdamW, single"], sharded=True, module=module)
        run.step(0)
        run.step(1)
        dist.barrier()
        transport.close()


@pytest.mark.ranks(2)
def test_a_sharded_module_outlives_its_wrapper() -> None:
    run = Run(None, OPTIMIZERS["AdamW, single"], sharded=True)
    run.step(0)
    module, optimizer, rank = run.module, run.optimizer, run.rank
    saved = {key: value.clone() for key, value in module.state_dict().items()}
    del run
    gc.collect()
    with sl.write_shared(module), torch.no_grad():
        if rank == 0:
            module.first.weight.fill_(0.5)
    assert bool((module.first.weight == 0.5).all())
    module.load_state_dict(saved)
    assert_equal(list(module.state_dict().values()), list(saved.values()))
    assert len(optimizer.state_dict()["state"]) == sum(p.requires_grad for p in module.parameters())


@pytest.mark.ranks(2)
def test_a_copied_or_pickled_shared_module_is_an_ordinary_one() -> None:
    module = sl.share_(net())
    for twin in (copy.deepcopy(module), torch.load(_saved(module), weights_only=False)):
        twin.load_state_dict(module.state_dict())
        with torch.no_grad():
            twin.first.weight.fill_(float(dist.get_rank()))
        with pytest.raises(ValueError, match="are not shared"):
            sl.write_shared(twin)
    with sl.write_shared(module):
        pass


def _saved(module: nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return file


@pytest.mark.ranks(2)
def test_sharing_over_gloo_says_what_it_needs() -> None:
    with pytest.raises(
        ValueError, match="expected ranks with shared memory and a module on the CPU, got transport gloo"
    ):
        sl.share_(net(), group=C10dTransport())
