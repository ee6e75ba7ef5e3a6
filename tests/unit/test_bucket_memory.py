"""How much memory the buckets have, and when: counted by the storages that are alive."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import syncline as sl
from support.cases import case
from support.threads import on_threads
from syncline.gradients import bucket
from syncline.session import transport_of
from syncline.strategies import Progress
from syncline.testing import run_ranks
from syncline.transport import Transport

WIDTH = 64
NUM_LAYERS = 8
PARAMETER_BYTES = NUM_LAYERS * WIDTH * WIDTH * 4


class Shuffled(nn.Module):
    """Layers that are used in another order than that of their registration, so that buckets are laid out again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS))
        # The same values in all ranks, which are threads.
        for number, parameter in enumerate(self.parameters()):
            nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(number))

    def forward(self, x: Tensor) -> Tensor:
        for at in (3, 0, 6, 1, 7, 2, 5, 4):
            x = self.layers[at](x)
        return x


class Straight(Shuffled):
    """Layers that are used in the order of their registration, so that the first layout is the final one."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Watched:
    """The memory of all buckets that one rank has made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, rank: int) -> None:
        self._rank = rank
        self._made: list[tuple[StorageWeakRef, int]] = []
        self.most_bytes = 0
        """The largest number of bytes that were alive when a bucket had been made."""
        original = bucket.DenseBucket.__init__

        def init(
            made: Any, plan: Any, parameters: Any, transport: Transport, flat: Tensor, **options: Any
        ) -> None:
            original(made, plan, parameters, transport, flat, **options)
            if transport.rank == self._rank:
                self._made.append((StorageWeakRef(flat.untyped_storage()), flat.nbytes))
                self.most_bytes = max(self.most_bytes, self.live_bytes)

        monkeypatch.setattr(bucket.DenseBucket, "__init__", init)

    @property
    def num_made(self) -> int:
        return len(self._made)

    @property
    def live_bytes(self) -> int:
        return sum(num_bytes for storage, num_bytes in self._made if not storage.expired())


def wrapped(
    transport: Transport, *, module: type[nn.Module] = Shuffled, **options: Any
) -> sl.DistributedDataParallel:
    ddp: Any = sl.DistributedDataParallel
    made: sl.DistributedDataParallel = ddp(module(), process_group=transport, bucket_cap_mb=0.04, **options)
    return made


def backward(ddp: nn.Module) -> None:
    ddp(torch.ones(2, WIDTH)).square().sum().backward()


def check_first_steps(ddp: sl.DistributedDataParallel, watched: Watched, *, one_bucket_bytes: int) -> None:
    assert watched.num_made == 0, "the wrapper alone needs no buckets"
    with ddp.no_sync():
        backward(ddp)
    assert watched.num_made == 0, "a local backward needs no buckets"
    backward(ddp)
    assert len(ddp.last_step.buckets) == 4
    num_made = watched.num_made
    assert num_made == 8, "the order was learnt"
    tail_bytes = watched.live_bytes - PARAMETER_BYTES
    assert 0 < tail_bytes < 2048, "the buckets of the first layout are freed"
    assert watched.most_bytes <= PARAMETER_BYTES + 2048 + one_bucket_bytes
    backward(ddp)
    assert watched.num_made == num_made
    assert len(ddp.last_step.buckets) == 4


def test_a_gradient_has_one_place_in_buckets_even_when_they_are_laid_out_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rank(transport: Transport, as_view: bool, watched: Watched) -> None:
        ddp = wrapped(transport, gradient_as_bucket_view=as_view)
        if transport.rank == 0:
            # With views, a former bucket lives until the last of its gradients has moved.
            check_first_steps(ddp, watched, one_bucket_bytes=PARAMETER_BYTES // 2 if as_view else 0)
        else:
            with ddp.no_sync():
                backward(ddp)
            backward(ddp)
            backward(ddp)

    for as_view in (False, True):
        with case(as_view), monkeypatch.context() as patch:
            run_ranks(2, partial(rank, as_view=as_view, watched=Watched(patch, rank=0)))


@pytest.mark.ranks(2)
def test_the_memory_of_the_transport_replaces_the_first_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = transport_of(None)
    assert transport.reduces_in_place
    watched = Watched(monkeypatch, rank=transport.rank)
    check_first_steps(wrapped(transport), watched, one_bucket_bytes=0)


@on_threads(2)
def test_gradients_that_are_views_keep_their_values_when_buckets_are_laid_out_again(t: Transport) -> None:
    copied, viewed = (wrapped(t, gradient_as_bucket_view=as_view) for as_view in (False, True))
    for ddp in (copied, viewed):
        backward(ddp)
    for one, other in zip(copied.parameters(), viewed.parameters(), strict=True):
        assert one.grad.any()
        assert torch.equal(one.grad, other.grad)


def test_a_layout_that_would_not_change_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, rank=0)

    def rank(transport: Transport) -> None:
        ddp = wrapped(transport, module=Straight)
        backward(ddp)
        backward(ddp)

    run_ranks(2, rank)
    assert watched.num_made == 4


def test_a_strategy_without_mean_gradients_has_no_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, rank=0)
    for strategy in (sl.LocalSGD(every=1), sl.DiLoCo(every=1), sl.Manual()):
        steps_of(strategy, watched, 2)
        assert watched.num_made == 0, strategy


def steps_of(strategy: Any, watched: Watched, num_steps: int) -> list[tuple[bool, int]]:
    """Return for each step whether its backward was reduced, and the bytes of all buckets of rank 0 after the step."""

    def rank(transport: Transport) -> list[tuple[bool, int]]:
        ddp = wrapped(transport, strategy=strategy)
        optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.001))
        found = []
        for _ in range(num_steps):
            optimizer.zero_grad()
            backward(ddp)
            optimizer.step()
            found.append((ddp.last_step.synchronized, watched.live_bytes if transport.rank == 0 else 0))
        assert ddp.explain()
        return found

    return run_ranks(2, rank)[0]


def test_buckets_are_freed_after_a_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, rank=0)
    for strategy in (sl.LocalSGD(2, warmup=2), sl.DiLoCo(2, warmup=2)):
        found = steps_of(strategy, watched, 5)
        with case(strategy):
            assert [reduced for reduced, _ in found] == [True, True, False, False, False]
            assert [num_bytes > 0 for _, num_bytes in found] == [True, False, False, False, False]


@dataclass(frozen=True, repr=False)
class ByTurns(sl.LocalSGD):
    """Local SGD that averages the gradients of each second step, too."""

    def at_backward(self, state: Any, progress: Progress) -> tuple[Any, ...]:
        is_reduced = progress.step % 2 == 0
        return super().at_backward(state, Progress(step=0)) if is_reduced else ()


def test_buckets_that_are_needed_again_are_kept_then(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, rank=0)
    found = steps_of(ByTurns(1, warmup=1), watched, 6)
    assert [reduced for reduced, _ in found] == [True, False] * 3
    assert [num_bytes > 0 for _, num_bytes in found] == [False, False, True, True, True, True]
    assert watched.num_made == 4 + 4 + 4


@pytest.mark.ranks(2)
def test_the_transport_gives_memory_again(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = transport_of(None)
    watched = Watched(monkeypatch, rank=transport.rank)
    ddp = wrapped(transport, strategy=ByTurns(1, warmup=1))
    optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.001))
    kept = []
    for _ in range(4):
        optimizer.zero_grad()
        backward(ddp)
        optimizer.step()
        kept.append(watched.live_bytes > 0)
    assert kept == [False, False, True, True]
    first, *others = sl.gather(next(ddp.parameters()).detach().flatten()[None])
    assert first.isfinite().all()
    assert all(torch.equal(first, other) for other in others)
