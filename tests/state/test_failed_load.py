"""A load that fails leaves everything as it was, on every rank. Ranks are threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import syncline as sl
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
    """A training run that has made a step from weights of its own."""

    def __init__(self, t: Transport, seed: int, *, fails: bool = False, out: int = 2, **how: Any) -> None:
        g = torch.Generator().manual_seed(seed)
        module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, out))
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.normal_(generator=g)
        self.model: Any = module
        if how:
            self.model = sl.DistributedDataParallel(module, process_group=t, **how)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1 * seed)
        if how:
            self.model.attach(self.optimizer)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.state = sl.TrainState(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            sampler=sl.DistributedSampler(range(8), 1, 0),
            last=Refuses(fails),
        )
        for _ in range(seed):
            self.optimizer.zero_grad()
            self.model(torch.randn(4, 3, generator=g)).square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.state.step += 1

    def now(self) -> str:
        found = self.state.state_dict()
        return repr(_exact({name: found[name] for name in found if name != "rng"})) + str(
            torch.get_rng_state().sum()
        )


def _exact(value: Any) -> Any:
    """As it is, with the numbers of each tensor in full: how many are printed is no rank's own affair."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, dict):
        return {key: _exact(part) for key, part in value.items()}
    return type(value)(map(_exact, value)) if isinstance(value, list | tuple) else value


HOW: dict[str, dict[str, Any]] = {
    "bare": {},
    "wrapped": {"buffers": "none"},
    "sharded": {"sharded": True},
    "DiLoCo": {"strategy": sl.DiLoCo(2)},
}


@pytest.mark.parametrize("kind", HOW)
@pytest.mark.parametrize("why", ["the last object", "another shape"])
def test_a_load_that_fails_on_one_rank_changes_nothing_on_any(why: str, kind: str, tmp_path: Path) -> None:
    def save(t: Transport) -> None:
        sl.Checkpointer(tmp_path, group=t).save(Run(t, 1, **HOW[kind]).state)

    def load(t: Transport) -> None:
        others = why == "another shape"
        run = Run(t, 2, fails=t.rank == 1 and not others, out=3 if others else 2, **HOW[kind])
        before = run.now()
        t.barrier().wait()
        with pytest.raises((ValueError, sl.SynclineError)):
            sl.Checkpointer(tmp_path, group=t).load(run.state)
        assert run.now() == before
        # And it can go on.
        run.optimizer.zero_grad()
        run.model(torch.ones(4, 3)).square().mean().backward()
        run.optimizer.step()

    run_ranks(2, save)
    run_ranks(2, load)


@pytest.mark.parametrize("sharded", [None, True])
def test_nor_does_a_file_of_torch(tmp_path: Path, *, sharded: bool | None) -> None:
    how = {} if sharded is None else {"sharded": True}
    path = tmp_path / "old.pt"

    def program(t: Transport) -> None:
        run = Run(t, 1)
        if t.rank == 0:
            torch.save(run.state.state_dict() | {"rng": None}, path)
        t.barrier().wait()
        mine = Run(t, 2, fails=t.rank == 1, **how)
        before = mine.now()
        with pytest.raises((ValueError, sl.SynclineError), match="not mine"):
            mine.state.load_torch(path, besides=["rng"], group=t)
        assert mine.now() == before

    run_ranks(2, program)


def test_nor_does_a_state_dict() -> None:
    def program(t: Transport) -> None:
        state = Run(t, 1).state.state_dict()
        run = Run(t, 2, fails=True)
        before = run.now()
        with pytest.raises(ValueError, match="not mine"):
            run.state.load_state_dict(state)
        assert run.now() == before

    run_ranks(1, program)


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


UNUSUAL: dict[str, tuple[Any, Any]] = {
    "a buffer is replaced": (Replaces(torch.ones(3)), Replaces(torch.zeros(1))),
    "a buffer is resized": (Resizes(torch.ones(3)), Resizes(torch.zeros(0))),
    "parameters are replaced": (nn.Linear(3, 2), Assigns(3, 2)),
    "parameters are lazy": (nn.Linear(3, 2), nn.LazyLinear(2)),
    "an optimizer is written in place": tuple(
        stepped(InPlace([nn.Parameter(torch.ones(2))], lr=lr, momentum=0.9), lr) for lr in (0.1, 0.5)
    ),
}


def shown(one: Any) -> str:
    state = one.state_dict()
    if isinstance(one, nn.Module):
        held = {name: id(value) for name, value in [*one.named_parameters(), *one.named_buffers()]}
        state = {
            name: "lazy" if nn.parameter.is_lazy(value) else _exact(value) for name, value in state.items()
        }
        return str((state, held))
    return str(_exact(state))


@pytest.mark.parametrize("kind", UNUSUAL)
def test_whatever_a_load_does_to_an_object_is_undone(kind: str, tmp_path: Path) -> None:
    saved, loading = UNUSUAL[kind]
    sl.Checkpointer(tmp_path).save(sl.TrainState(it=saved, last=Refuses(False)), step=1)
    before = shown(loading)
    with pytest.raises(ValueError, match="not mine"):
        sl.Checkpointer(tmp_path).load(sl.TrainState(it=loading, last=Refuses(True)))
    assert shown(loading) == before
    sl.Checkpointer(tmp_path).load(sl.TrainState(it=loading, last=Refuses(False)))
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
