"""A load that fails leaves everything as it was, on every rank. Ranks are threads."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import syncline as sl
from support.cases import case
from support.values import exact
from syncline.transport import Transport, run_ranks


class Refuses:
    """Something whose state is loaded last, and not at all."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def state_dict(self) -> dict[str, int]:
        return {"place": 3}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.fails:
            raise ValueError("not mine")


class Run:
    """A training run that has made `seed` steps from weights of its own."""

    def __init__(self, t: Transport, seed: int, *, fails: bool = False, out: int = 2, **how: Any) -> None:
        g = torch.Generator().manual_seed(seed)
        self.model: Any = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, out))
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.normal_(generator=g)
        if how:
            self.model = sl.DistributedDataParallel(self.model, process_group=t, **how)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1 * seed)
        if how:
            self.model.attach(self.optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        sampler = sl.DistributedSampler(range(8), 1, 0)
        self.state = sl.TrainState(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=scheduler,
            sampler=sampler,
            last=Refuses(fails),
        )
        for _ in range(seed):
            self.step(torch.randn(4, 3, generator=g))
            scheduler.step()
            self.state.step += 1

    def step(self, inputs: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.model(inputs).square().mean().backward()
        self.optimizer.step()

    def now(self) -> Any:
        found = self.state.state_dict()
        return exact({name: found[name] for name in found if name != "rng"}), torch.get_rng_state().sum()


HOW: dict[str, dict[str, Any]] = {
    "bare": {},
    "wrapped": {"buffers": "none"},
    "sharded": {"sharded": True},
    "DiLoCo": {"strategy": sl.DiLoCo(2)},
}


def test_a_load_that_fails_on_one_rank_changes_nothing_on_any(tmp_path: Path) -> None:
    def load(t: Transport, directory: Path, kind: str) -> None:
        checkpointer = sl.Checkpointer(directory, group=t)
        checkpointer.save(Run(t, 1, **HOW[kind]).state)
        # Either the last object of rank 1 fails, or the model of all has another shape.
        for differing in ({"fails": t.rank == 1}, {"out": 3}):
            run = Run(t, 2, **differing, **HOW[kind])
            t.barrier().wait()  # the threads share torch's random state, from which a model draws
            before = run.now()
            t.barrier().wait()
            with pytest.raises((ValueError, sl.SynclineError)):
                checkpointer.load(run.state)
            assert run.now() == before, differing
            t.barrier().wait()
            run.step(torch.ones(4, 3))  # it can go on

    for kind in HOW:
        with case(kind):
            run_ranks(2, partial(load, directory=tmp_path / kind, kind=kind))


def test_nor_does_a_file_of_torch_or_a_state_dict(tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    run_ranks(1, lambda t: torch.save(Run(t, 1).state.state_dict() | {"rng": None}, path))

    def load(t: Transport, how: dict[str, Any]) -> None:
        run = Run(t, 2, fails=t.rank == t.size - 1, **how)
        t.barrier().wait()
        before = run.now()
        with pytest.raises((ValueError, sl.SynclineError), match="not mine"):
            if t.size == 2:
                run.state.load_torch(path, besides=["rng"], group=t)
            else:
                run.state.load_state_dict(Run(t, 1).state.state_dict())
        assert run.now() == before

    for size, kind in ((2, "bare"), (2, "sharded"), (1, "bare")):
        with case(size, kind):
            run_ranks(size, partial(load, how=HOW[kind]))


class Replaces(nn.Module):
    """A load puts a buffer of another shape into the place of its own."""

    def __init__(self, seen: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("seen", seen)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.seen = torch.zeros_like(state_dict[f"{prefix}seen"])
        super()._load_from_state_dict(state_dict, prefix, *args)


class Resizes(Replaces):
    """Its own buffer gets another shape."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.seen.resize_(state_dict[f"{prefix}seen"].shape)
        nn.Module._load_from_state_dict(self, state_dict, prefix, *args)


class Assigns(nn.Linear):
    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state_dict, strict, assign=True)


class InPlace(torch.optim.SGD):
    """A load writes into what it has."""

    def load_state_dict(self, state_dict: Any) -> None:
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group["lr"] = saved["lr"]
        for values, saved in zip(self.state.values(), state_dict["state"].values(), strict=True):
            values["momentum_buffer"].copy_(saved["momentum_buffer"])


def stepped(optimizer: torch.optim.Optimizer, gradient: float) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.full_like(parameter, gradient)
    optimizer.step()
    return optimizer


def unusual() -> dict[str, tuple[Any, Any]]:
    """Objects that are saved, and those that load it."""
    return {
        "a buffer is replaced": (Replaces(torch.ones(3)), Replaces(torch.zeros(1))),
        "a buffer is resized": (Resizes(torch.ones(3)), Resizes(torch.zeros(0))),
        "parameters are replaced": (nn.Linear(3, 2), Assigns(3, 2)),
        "parameters are lazy": (nn.Linear(3, 2), nn.LazyLinear(2)),
        "an optimizer is written in place": tuple(
            stepped(InPlace([nn.Parameter(torch.ones(2))], lr=lr, momentum=0.9), lr) for lr in (0.1, 0.5)
        ),
    }


def shown(one: Any) -> Any:
    state = one.state_dict()
    if not isinstance(one, nn.Module):
        return exact(state)
    held = {name: id(value) for name, value in [*one.named_parameters(), *one.named_buffers()]}
    return held, {
        name: "lazy" if nn.parameter.is_lazy(value) else exact(value) for name, value in state.items()
    }


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_whatever_a_load_does_to_an_object_is_undone(tmp_path: Path) -> None:
    for kind, (saved, loading) in unusual().items():
        checkpointer = sl.Checkpointer(tmp_path / kind)
        checkpointer.save(sl.TrainState(it=saved, last=Refuses(False)), step=1)
        before = shown(loading)
        with case(kind):
            with pytest.raises(ValueError, match="not mine"):
                checkpointer.load(sl.TrainState(it=loading, last=Refuses(True)))
            assert shown(loading) == before
            checkpointer.load(sl.TrainState(it=loading, last=Refuses(False)))
            assert shown(loading) != before


def test_what_cannot_be_undone_is_said_and_hides_no_error(tmp_path: Path) -> None:
    class Overlaps(Replaces):
        """Its buffer gets memory that cannot be written."""

        def _load_from_state_dict(self, *args: Any) -> None:
            self.seen.set_(torch.zeros(1).expand(3))

    saved = sl.TrainState(a=Replaces(torch.ones(3)), b=nn.Linear(2, 2), c=Refuses(False))
    sl.Checkpointer(tmp_path).save(saved, step=1)
    other = nn.Linear(2, 2)
    before = shown(other)
    loading = sl.TrainState(a=Overlaps(torch.zeros(3)), b=other, c=Refuses(True))
    with (
        pytest.warns(RuntimeWarning, match="a load failed, and a could not be restored"),
        pytest.raises(ValueError, match="not mine"),
    ):
        sl.Checkpointer(tmp_path).load(loading)
    assert shown(other) == before


def test_what_differs_after_a_load_is_not_kept(tmp_path: Path) -> None:
    class Own(nn.Linear):
        rank = 0

        def _load_from_state_dict(self, state_dict: Any, *args: Any) -> None:
            super()._load_from_state_dict(state_dict, *args)
            with torch.no_grad():
                self.weight += self.rank

    def program(t: Transport) -> None:
        model = Own(2, 2)
        with torch.no_grad():
            model.weight.fill_(1.0)
        state = sl.TrainState(model=model)
        checkpointer = sl.Checkpointer(tmp_path, group=t)
        checkpointer.save(state, step=3)
        with torch.no_grad():
            model.weight.fill_(7.0)
        state.step, model.rank = 0, t.rank
        with pytest.raises(sl.ReplicaDivergence):
            checkpointer.load(state)
        assert (model.weight == 7).all()
        assert state.step == 0

    run_ranks(2, program)
