"""`sharded=True` trains what the replicated run trains: bit for bit where the arithmetic is the same."""

from __future__ import annotations

import copy
import functools
import gc
import io
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, Muon, Optimizer, RMSprop

import syncline as sl
from support.cases import case
from support.inside import replica_of
from support.states import wait_until
from support.threads import on_threads
from syncline import DistributedDataParallel as DDP
from syncline import SynclineError
from syncline.gradients import layout
from syncline.liveness import StepPhase
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


class Mixed(nn.Module):
    """Two dtypes, and a layer with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 40)
        self.b = nn.Linear(40, 40, dtype=torch.float64)
        self.tied = self.a

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.tied(x)).double())


with torch.random.fork_rng():
    torch.manual_seed(3)
    NET, MIXED = Net(), Mixed()
    IMAGES = nn.Sequential(nn.Conv2d(2, 8, 3), nn.Conv2d(8, 2, 3)).to(memory_format=torch.channels_last)
    SMALL = nn.Linear(2, 1)
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
        self, group: Any, name: str, *, sharded: bool = True, module: nn.Module | None = None, **wrap: Any
    ) -> None:
        self.module = net() if module is None else module
        self.ddp = DDP(self.module, process_group=group, sharded=sharded, **wrap)
        self.optimizer = self.ddp.attach(OPTIMIZERS[name](self.module))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        self.rank = self.ddp._distributed_rank

    def backward(self, step: int, **kwargs: Any) -> None:
        self.ddp(batch(self.rank, step), **kwargs).square().mean().backward()

    def step(self, step: int, **kwargs: Any) -> None:
        self.optimizer.zero_grad()
        self.backward(step, **kwargs)
        self.optimizer.step()

    def values(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.module.parameters()]


Step = Callable[[Run, int], object]


def pair(group: Any, name: str, *, module: nn.Module | None = None, **wrap: Any) -> tuple[Run, Run]:
    """A run with replicas and a sharded one, of equal modules."""
    base = net() if module is None else module
    theirs, ours = (
        Run(group, name, sharded=sharded, module=copy.deepcopy(base), **wrap) for sharded in (False, True)
    )
    return theirs, ours


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


def compare(
    group: Any, name: str, step: Step = Run.step, *, num_steps: int = 4, exact: bool = True, **how: Any
) -> Run:
    """Train both runs; after each step the values are equal, and in the end the states of the optimizers."""
    same = exact and "fused" not in name
    theirs, ours = pair(group, name, **how)
    for number in range(num_steps):
        step(theirs, number)
        step(ours, number)
        (assert_equal if same else assert_alike)(ours.values(), theirs.values())
    state = theirs.optimizer.state_dict()
    assert_equal_states(ours.optimizer.state_dict(), state, same=same)
    ours.optimizer.load_state_dict(state)
    assert_equal_states(ours.optimizer.state_dict(), state)
    return ours


# ---------------------------------------------------------------------- ranks as threads: one tensor for all


def test_all_optimizers_train_what_replicas_train() -> None:
    for name, size in itertools.product(OPTIMIZERS, (1, 2, 3)):
        with case(name, size):
            run_ranks(size, lambda t, name=name: compare(t, name))


@on_threads(3)
def test_switches_and_many_buckets(t: Transport) -> None:
    rows: list[tuple[str, dict[str, Any]]] = [
        ("AdamW, foreach", {"find_unused_parameters": True}),
        ("AdamW, foreach", {"static_graph": True}),
        ("AdamW, foreach", {"gradient_as_bucket_view": True}),
        ("AdamW, foreach", {"buffers": "none"}),
        ("AdamW, groups", {"bucket_cap_mb": 0.001}),
        ("AdamW, groups", {"bucket_cap_mb": 0.02}),
        ("Adafactor, whole", {"bucket_cap_mb": 0.001}),
        ("Adafactor, whole", {"bucket_cap_mb": 0.02}),
        ("AdamW, single", {"module": MIXED}),
    ]
    for name, how in rows:
        with case(name, how):
            compare(t, name, **how)


def test_many_buckets_take_turns_in_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "POOL_BYTES", 0)

    def rank(t: Transport) -> None:
        compare(t, "AdamW, groups", bucket_cap_mb=0.001)
        compare(t, "Adafactor, whole", bucket_cap_mb=0.001)
        compare(t, "SGD, single", bucket_cap_mb=0.001, find_unused_parameters=True)
        run = compare(t, "SGD, single", bucket_cap_mb=0.001, static_graph=True)
        buckets = replica_of(run.ddp).gradients.layout.buckets
        assert len(buckets) > 4
        assert len({b.flat.untyped_storage().data_ptr() for b in buckets}) == 3  # type: ignore[union-attr]

    run_ranks(2, rank)


@on_threads(2)
def test_bfloat16_reduced_in_float32(t: Transport) -> None:
    theirs, ours = pair(t, "SGD, single", module=net().bfloat16(), reduce_dtype=torch.float32)
    for step in range(3):
        for run in (theirs, ours):
            run.optimizer.zero_grad()
            run.ddp(batch(run.rank, step).bfloat16()).square().mean().backward()
            run.optimizer.step()
        # torch's bfloat16 kernels, too, round the last elements of a tensor otherwise: by one unit, 2**-8.
        torch.testing.assert_close(ours.values(), theirs.values(), rtol=2**-6, atol=1e-3)


@on_threads(2)
def test_channels_last_weights_keep_their_strides(t: Transport) -> None:
    def step(run: Run, step: int) -> None:
        x = torch.randn(2, 2, 8, 8, generator=torch.Generator().manual_seed(10 * run.rank + step))
        run.optimizer.zero_grad()
        run.ddp(x).square().mean().backward()
        run.optimizer.step()

    trained = compare(t, "AdamW, single", step, module=IMAGES).module
    assert [p.stride() for p in trained.parameters()] == [p.stride() for p in IMAGES.parameters()]


@on_threads(3)
def test_muon_and_adamw_side_by_side(t: Transport) -> None:
    """Muon takes matrices as a whole, AdamW the rest by spans; whichever is attached first."""

    def train(*, sharded: bool, muon_first: bool) -> tuple[list[Tensor], list[Any]]:
        module = net()
        ddp = DDP(module, process_group=t, sharded=sharded, bucket_cap_mb=0.02)
        matrices, others = (group["params"] for group in two_groups(module))
        muon: Optimizer = Muon(matrices, lr=0.02)
        adamw: Optimizer = AdamW(others, lr=0.01)
        for optimizer in (muon, adamw) if muon_first else (adamw, muon):
            ddp.attach(optimizer)
        for step in range(3):
            for optimizer in (muon, adamw):
                optimizer.zero_grad()
            ddp(batch(t.rank, step)).square().mean().backward()
            ddp.clip_grad_norm_(1e9)
            for optimizer in (muon, adamw):
                optimizer.step()
        return [p.detach().clone() for p in module.parameters()], [muon.state_dict(), adamw.state_dict()]

    theirs, their_states = train(sharded=False, muon_first=True)
    for muon_first in (True, False):
        ours, our_states = train(sharded=True, muon_first=muon_first)
        assert_equal(ours, theirs)
        for a, b in zip(our_states, their_states, strict=True):
            assert_equal_states(a, b)


@on_threads(2)
def test_a_scheduler_and_a_state_from_before_or_after_attaching(t: Transport) -> None:
    def train(*, sharded: bool, attached_last: bool) -> list[Tensor]:
        module = net()
        optimizer = AdamW(two_groups(module), lr=0.01)
        if attached_last:  # with state of whole parameters, which is cut
            module(batch(0, 0)).sum().backward()
            optimizer.step()
        ddp = DDP(module, process_group=t, sharded=sharded)
        if not attached_last:
            ddp.attach(optimizer)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=6)
        if attached_last:
            ddp.attach(optimizer)
        for step in range(5):
            optimizer.zero_grad()
            ddp(batch(t.rank, step)).square().mean().backward()
            optimizer.step()
            scheduler.step()
        return [p.detach().clone() for p in module.parameters()]

    for attached_last in (False, True):
        ours, theirs = (train(sharded=sharded, attached_last=attached_last) for sharded in (True, False))
        with case(attached_last):
            assert_equal(ours, theirs)


def test_nobody_writes_while_another_reads() -> None:
    """Rank 1 evaluates between its backward and its step, while rank 0 is in `step` already."""
    boards: dict[int, Any] = {}

    def rank(t: Transport) -> None:
        run = Run(t, "SGD, single")
        boards[t.rank] = t.board
        t.barrier().wait()
        before = run.values()
        run.backward(0)
        if t.rank == 1:
            wait_until(lambda: boards[0].phase is StepPhase.OPTIMIZER_STEP)
            for _ in range(10):
                assert_equal(run.values(), before)
        run.optimizer.step()
        assert not torch.equal(run.module.last.weight, before[6])
        after = run.values()
        t.barrier().wait()
        assert_equal(run.values(), after)

    run_ranks(2, rank)


@on_threads(2)
def test_a_refused_backward_can_be_made_good(t: Transport) -> None:
    theirs, ours = pair(t, "SGD, single")
    theirs.step(0)
    ours.step(0)
    with pytest.raises(SynclineError, match="zero_grad"):
        ours.backward(1)
    theirs.step(2)
    ours.step(2)
    assert_equal(ours.values(), theirs.values())


# ---------------------------------------------------------------------- clipping, scaling, accumulating


def clips(group: Any, norm_type: float = 2.0) -> None:
    """Clip what was accumulated."""
    runs = theirs, ours = pair(group, "SGD, single")
    for step in range(3):
        norms = []
        for run in runs:
            run.optimizer.zero_grad()
            with run.ddp.no_sync():
                run.backward(10 * step)
            run.backward(10 * step + 1)
            norms.append(run.ddp.clip_grad_norm_(0.01, norm_type=norm_type))
            run.optimizer.step()
        # In the replicated norm one sum of some 10,000 numbers is rounded to fp32, parameter by parameter.
        torch.testing.assert_close(norms[1], norms[0], rtol=1e-5, atol=0)
        assert len(set(sl.gather(norms[1].view(1), group=group).tolist())) == 1
        torch.testing.assert_close(ours.values(), theirs.values(), rtol=1e-5, atol=1e-7)


def test_the_norm_is_that_of_replicas() -> None:
    for norm_type in (1.0, 2.0, 3.0, math.inf):
        with case(norm_type):
            run_ranks(3, lambda t, norm_type=norm_type: clips(t, norm_type))


@on_threads(2)
def test_an_infinite_norm_is_an_error_on_all_ranks_if_asked(t: Transport) -> None:
    run = Run(t, "SGD, single", on_nonfinite="ignore")
    loss = run.ddp(batch(t.rank, 0)).sum()
    (loss * (math.inf if t.rank == 1 else 1.0)).backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        run.ddp.clip_grad_norm_(1.0, error_if_nonfinite=True)


def overflows(run: Run, step: int) -> None:
    """In steps 1 and 3 one element of one gradient overflows on one rank; it lies in one rank's shard."""
    run.optimizer.zero_grad()
    *_, last = run.module.parameters()
    loss = run.ddp(batch(run.rank, step)[:, : 2 if run.module.__class__ is nn.Linear else 6]).square().mean()
    if step % 2 and run.rank == 1:
        loss = loss + 3e38 * last[-1] * 10
    run.scaler.scale(loss).backward()
    if step >= 2:
        run.scaler.unscale_(run.optimizer)
        run.ddp.clip_grad_norm_(1e6)
    before = run.values()
    run.scaler.step(run.optimizer)
    run.scaler.update()
    assert run.scaler.get_scale() == [4.0, 2.0, 2.0, 1.0, 1.0][step]
    if step % 2:
        assert_equal(run.values(), before)


@on_threads(3)
def test_an_overflow_in_one_share_skips_the_step_of_all(t: Transport) -> None:
    for name in ("AdamW, single", "AdamW, foreach", "AdamW, fused"):
        with case(name):
            compare(t, name, overflows, num_steps=5)


@on_threads(3)
def test_ranks_with_nothing_to_step(t: Transport) -> None:
    """Three elements for three ranks: one has none, and takes part in all that is collective."""
    for name in ("AdamW, single", "SGD, fused", "Adafactor, whole"):
        with case(name):
            compare(t, name, overflows, num_steps=5, module=SMALL, exact=False)


def accumulates(run: Run, step: int) -> None:
    run.optimizer.zero_grad()
    with run.ddp.no_sync():
        run.backward(10 * step)
        run.backward(10 * step + 1)
    run.backward(10 * step + 2)
    run.optimizer.step()


def counts_items(run: Run, step: int) -> None:
    run.optimizer.zero_grad()
    num_items = 1 + (step + run.rank) % 3
    with run.ddp.normalize_by(num_items):
        run.ddp(batch(run.rank, step)[:num_items]).square().sum().backward()
    run.optimizer.step()


@on_threads(2)
def test_accumulation_and_normalize_by(t: Transport) -> None:
    compare(t, "AdamW, single", accumulates)
    compare(t, "SGD, single", counts_items)


@on_threads(2)
def test_a_parameter_that_no_rank_used_is_not_stepped(t: Transport) -> None:
    """Its momentum and decay rest, as in the replicated run; one that some rank used is stepped."""

    def step(run: Run, step: int) -> None:
        run.step(step, spare=[True, False, run.rank == 1, False][step])

    compare(t, "AdamW, single", step, module=net(spare=True), find_unused_parameters=True)


# ---------------------------------------------------------------------- saved and loaded


def test_checkpoints_go_both_ways() -> None:
    """Through a file, from replicated to sharded and back, and to another number of ranks."""

    def first(t: Transport, name: str, *, sharded: bool) -> bytes:
        run = Run(t, name, sharded=sharded)
        for step in range(2):
            run.step(step)
        file = io.BytesIO()
        torch.save({"model": run.ddp.state_dict(), "optimizer": run.optimizer.state_dict()}, file)
        return file.getvalue()

    def second(
        t: Transport, name: str, saved: list[bytes], *, sharded: bool
    ) -> tuple[list[Tensor], dict[str, Any]]:
        run = Run(t, name, sharded=sharded)
        loaded = torch.load(io.BytesIO(saved[t.rank % 2]))
        run.ddp.load_state_dict(loaded["model"])
        run.optimizer.load_state_dict(loaded["optimizer"])
        for step in range(2, 4):
            run.step(step)
        return run.values(), run.optimizer.state_dict()

    for name in ("SGD, single", "AdamW, fused", "AdamW, groups", "Adafactor, whole"):
        same = "fused" not in name
        of_replicas, of_shards = (
            run_ranks(2, functools.partial(first, name=name, sharded=sharded)) for sharded in (False, True)
        )
        for size in (2, 3):
            again = functools.partial(second, name=name)
            expected, state = run_ranks(size, functools.partial(again, saved=of_replicas, sharded=False))[0]
            for saved, sharded in itertools.product((of_replicas, of_shards), (True, False)):
                with case(name, size, f"sharded={sharded}"):
                    for values, its_state in run_ranks(
                        size, functools.partial(again, saved=saved, sharded=sharded)
                    ):
                        (assert_equal if same else assert_alike)(values, expected)
                        assert_equal_states(its_state, state, same=same)


# ---------------------------------------------------------------------- what is refused


@on_threads(2)
def test_reading_a_gradient_names_what_to_call_instead(t: Transport) -> None:
    run = Run(t, "AdamW, foreach")
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


@on_threads(2)
def test_zero_grad_of_whatever(t: Transport) -> None:
    for of, to_none in itertools.product(("module", "ddp", "optimizer"), (True, False)):

        def step(run: Run, step: int, of: str = of, to_none: bool = to_none) -> None:
            getattr(run, of).zero_grad(set_to_none=to_none)
            run.backward(step)
            run.optimizer.step()

        with case(of, to_none):
            ours = compare(t, "SGD, single", step)
            ours.ddp.zero_grad()
            before = ours.values()
            ours.optimizer.step()
            assert_equal(ours.values(), before)


@on_threads(2)
def test_who_forgot_to_attach_is_told_so(t: Transport) -> None:
    module = net()
    ddp = DDP(module, process_group=t, sharded=True)
    ddp.attach(SGD(module.middle.parameters(), lr=0.1))
    ddp(batch(t.rank, 0)).sum().backward()
    with pytest.raises(SynclineError, match=r"first.weight belongs to no attached optimizer.*ddp.attach"):
        SGD(module.first.parameters(), lr=0.1).step()
    with pytest.raises(SynclineError, match=r"\.grad of parameter middle.weight cannot be read"):
        SGD(module.middle.parameters(), lr=0.1).step()
    with pytest.raises(SynclineError, match="cannot be moved or converted"):
        module.to(torch.float64)


def test_what_cannot_be_sharded_is_said_at_construction() -> None:
    sparse = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 2))
    overlapping = nn.Module()
    overlapping.a = nn.Parameter(torch.zeros(4))
    overlapping.b = nn.Parameter(overlapping.a.data[1:3])

    def rank(t: Transport) -> None:
        for module, wrap, text in (
            (sparse, {}, "sparse gradients"),
            (MIXED, {"reduce_dtype": torch.float32}, "reduce_dtype="),
            (overlapping, {}, "the parameters a and b use the same memory"),
            (net(), {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}, "skip_all"),
        ):
            with pytest.raises(ValueError, match=text):
                DDP(module, process_group=t, sharded=True, **wrap)  # type: ignore[arg-type]

    run_ranks(2, rank)


@on_threads(2)
def test_what_cannot_go_on_with_shards_is_a_value_error(t: Transport) -> None:
    run = Run(t, "SGD, single")
    own = [p for p in run.module.parameters() if p.requires_grad]
    attach = run.ddp.attach
    for action, text in (
        (lambda: run.ddp.join(), "join"),
        (lambda: run.ddp.register_comm_hook(None, lambda state, bucket: None), "communication hook"),
        (lambda: copy.deepcopy(run.ddp), "a wrapper cannot be copied or pickled"),
        (lambda: run.optimizer.add_param_group({"params": []}), "before ddp.attach"),
        (lambda: attach(SGD(own, lr=0.1)), "has 7 of the 8 parameters of the SGD"),
        (lambda: attach(SGD(own, lr=0.1), replace=False), "cannot be stepped by two attached optimizers"),
        (lambda: attach(torch.optim.LBFGS(own), replace=True), "LBFGS"),
        (lambda: attach(SGD([nn.Parameter(torch.ones(1)), *own]), replace=True), "not sharded"),
        (lambda: sl.broadcast_(run.optimizer, group=t), "this optimizer is sharded"),
    ):
        with pytest.raises(ValueError, match=text):
            action()


@on_threads(2)
def test_whole_parameters_have_to_be_known_before_the_first_backward(t: Transport) -> None:
    ddp = DDP(net(), process_group=t, sharded=True)
    ddp(batch(t.rank, 0)).sum().backward()
    with pytest.raises(ValueError, match="before the first backward"):
        ddp.attach(Adafactor(ddp.parameters()))
    before = [p.detach().clone() for p in ddp.parameters()]
    ddp.attach(SGD(ddp.parameters(), lr=0.1)).step()  # spans are as they were
    assert not all(torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True))


@on_threads(2)
def test_a_graph_from_before_the_step_notices(t: Transport) -> None:
    run = Run(t, "SGD, single")
    early = run.module(batch(t.rank, 5)).sum()
    run.step(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(early, run.module.first.weight)


@on_threads(2)
def test_contract_and_timeline_say_who_steps_what(t: Transport) -> None:
    run = Run(t, "AdamW, single")
    run.step(0)
    contract = run.ddp.contract
    assert contract["gradients"].how == "mean, reduce_scatter: each rank gets its shard (1 of 2)"
    assert contract["parameters"].when == "at every step"
    assert "one copy for all ranks" in contract["parameters"].how
    assert contract["optimizer"].size == "AdamW by flat spans"
    assert "all_reduce" not in run.ddp.explain()
    assert "steps its shard (1 of 2)" in " ".join(run.ddp.explain().split())


# ---------------------------------------------------------------------- rank processes

GROUPS: dict[str, Callable[[], Any]] = {"shared memory": lambda: None, "gloo": C10dTransport}
"""Over shared memory the ranks have one copy, over Gloo each has its own."""
ON_BOTH = pytest.mark.parametrize("group", GROUPS)


@pytest.mark.ranks(2, timeout=600)
@ON_BOTH
@pytest.mark.real
def test_two_processes_train_what_replicas_train(group: str, monkeypatch: pytest.MonkeyPatch) -> None:
    t = GROUPS[group]()
    names = [name for name in OPTIMIZERS if name not in ("Adam", "SGD, foreach", "AdamW, named")]
    for name in names:
        with case(name):
            compare(t, name)
            compare(t, name, bucket_cap_mb=0.02)
    monkeypatch.setattr(layout, "POOL_BYTES", 0)  # buckets that take turns in the same memory
    for name in names:
        with case(name):
            compare(t, name, bucket_cap_mb=0.001)


@pytest.mark.ranks(3)
@ON_BOTH
def test_three_processes_train_what_replicas_train(group: str) -> None:
    """Gloo adds three numbers in another order in its reduce_scatter than in its all_reduce."""
    t = GROUPS[group]()
    for name in ("AdamW, groups", "Adafactor, whole"):
        compare(t, name, exact=group == "shared memory")


@pytest.mark.ranks(3)
def test_two_hosts_of_different_size_train_what_replicas_train() -> None:
    """Two ranks on one host, one on another: each has its own copy."""
    t = on_hosts("aab")
    for name in ("AdamW, groups", "Adafactor, whole"):
        compare(t, name, exact=False, bucket_cap_mb=0.02)


@pytest.mark.ranks(4, timeout=300)
@pytest.mark.parametrize("hosts", ["aabb", "abba"])
@pytest.mark.real
def test_two_hosts_with_a_copy_each_train_what_replicas_train(hosts: str) -> None:
    t = on_hosts(hosts)
    for name, cap in itertools.product(("AdamW, groups", "AdamW, fused", "Adafactor, whole"), (None, 0.02)):
        with case(name, cap):
            compare(t, name, bucket_cap_mb=cap)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("hosts", ["aabb", "abab"])
def test_a_host_has_one_copy_that_is_loaded_saved_clipped_and_written_as_one(hosts: str) -> None:
    t = on_hosts(hosts)
    ours = Run(t, "AdamW, foreach")

    def seen_by_all(tensor: Tensor) -> list[float]:
        return [float(row) for row in t.all_gather_bytes(str(tensor.sum().item()).encode())]

    ours.step(0)
    assert_state_of_half(ours)
    assert "one copy on each of 2 hosts, values of rank 0" in ours.ddp.contract.long()
    assert "steps its shard (1 of 2)" in " ".join(ours.ddp.explain().split())
    clips(t)
    saved = ours.optimizer.state_dict()
    before = {key: value.clone() for key, value in ours.ddp.state_dict().items()}
    ours.step(1)
    expected = ours.values()
    ours.optimizer.load_state_dict(saved)
    ours.ddp.load_state_dict(before)
    ours.step(1)
    assert_equal(ours.values(), expected)
    weight = ours.module.first.weight
    t.barrier().wait()  # all have read
    if ours.rank == 0:  # behind everybody's back: it is one memory a host
        weight.data.fill_(7.0)
    t.barrier().wait()
    seen = seen_by_all(weight)
    assert [total == 7.0 * weight.numel() for total in seen] == [host == "a" for host in hosts]
    with sl.write_shared(ours.ddp), torch.no_grad():
        if ours.rank == 0:
            weight.fill_(0.5)
    assert seen_by_all(weight) == [0.5 * weight.numel()] * 4


@pytest.mark.ranks(4)
def test_sharing_over_two_hosts_gives_each_of_them_rank_0s_values() -> None:
    t = on_hosts("abba")
    module = net()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(t.rank + 1.0)
    sl.share_(module, group=t)
    assert all(bool((p == 1.0).all()) for p in module.parameters())
    with sl.write_shared(module), torch.no_grad():
        if t.rank in (0, 3):  # both on host a: one memory, so both count
            (module.first if t.rank else module.middle).bias.fill_(2.0)
    assert bool((module.first.bias == 2.0).all())
    assert bool((module.middle.bias == 2.0).all())
    t.barrier().wait()  # all have read
    if t.rank == 2:
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


@pytest.mark.ranks(2, timeout=180)
@ON_BOTH
def test_processes_clip_scale_and_write(group: str) -> None:
    t = GROUPS[group]()
    clips(t)
    for name in ("AdamW, single", "AdamW, fused"):
        compare(t, name, overflows, num_steps=5)
    run = Run(t, "SGD, single")
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
def test_two_processes_have_one_copy_and_a_write_elsewhere_is_an_error_on_both() -> None:
    run = Run(None, "AdamW, single")
    run.step(0)
    assert_state_of_half(run)
    dist.barrier()
    if run.rank == 0:  # behind everybody's back, to see that it is one memory
        run.module.first.weight.data.fill_(7.0)
    dist.barrier()
    assert bool((run.module.first.weight == 7.0).all())
    dist.barrier()
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
    replica = net()
    with torch.no_grad():
        replica.frozen.fill_(0.5)
    ours = Run(None, "AdamW, single", module=module)
    theirs = Run(None, "AdamW, single", sharded=False, module=replica)
    for step in range(3):
        ours.step(step)
        theirs.step(step)
    assert_equal(ours.values(), theirs.values())
    dist.barrier()  # both have read
    if dist.get_rank() == 1:
        with torch.no_grad():
            module.frozen.add_(1.0)
    with pytest.raises(SynclineError, match="on rank 1: frozen"):
        ours.step(3)


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
        t = transport_of(None).split(0)
        assert t is not None
        run = Run(t, "AdamW, single", module=module)
        run.step(0)
        run.step(1)
        dist.barrier()
        t.close()


@pytest.mark.ranks(2)
def test_a_sharded_module_outlives_its_wrapper() -> None:
    run = Run(None, "AdamW, single")
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
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    for twin in (copy.deepcopy(module), torch.load(file, weights_only=False)):
        twin.load_state_dict(module.state_dict())
        with torch.no_grad():
            twin.first.weight.fill_(float(dist.get_rank()))
        with pytest.raises(ValueError, match="are not shared"):
            sl.write_shared(twin)
    with sl.write_shared(module):
        pass


@pytest.mark.ranks(2)
def test_sharing_over_gloo_says_what_it_needs() -> None:
    with pytest.raises(ValueError, match=r"expected ranks with shared memory .*, got transport gloo"):
        sl.share_(net(), group=C10dTransport())
