"""What belongs to a training run, named once."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from syncline._torch.modules import uncompiled
from syncline.checkpoint.dataloaders import Places, dealer_of
from syncline.checkpoint.load_torch import Key, adopt
from syncline.checkpoint.objects import load_into, state_of, types_in
from syncline.checkpoint.random_state import rng_state, set_rng_state
from syncline.checkpoint.rollback import Before
from syncline.checks import checked_count, checked_flag, checked_state, what_it_is
from syncline.data.sampler import DistributedSampler
from syncline.gradients.reducer import GradientSync, caretakers_of
from syncline.gradients.wrapper_protocol import replica_of
from syncline.session.world import transport_of
from syncline.sharded.part import ShardedState, sharded_state_of
from syncline.user_code import calling

__all__ = ["TrainState", "load_all"]


_RESERVED = ("step", "rng")


class TrainState(ShardedState):
    """What belongs to a training run: saved, loaded and compared as one.

    Beside what is named here it has `step`, and the state of the random number generators of this rank: Python's,
    NumPy's where that is imported, torch's on the CPU and on each CUDA device in use.

    Args:
        model: a module; wrapped by torch's or Syncline's DistributedDataParallel or not, compiled by torch.compile or
            not, which makes no difference to what is saved. Of Syncline's wrapper, the strategy's and the compression's
            state belong to it.
        optimizer: a torch optimizer; attached ones, too.
        scheduler: of the learning rate.
        scaler: a `torch.amp.GradScaler`.
        sampler: what deals out the samples: a `DistributedSampler`, or a loader that has the place in the data itself,
            as torchdata's StatefulDataLoader.
        named: anything else with `state_dict()` and `load_state_dict(state)`, by a name of yours.

    Raises:
        TypeError: something without these two methods; `step` and `rng` as names; a `DistributedSampler` by a name of
            yours alone, which `commit` would not move on.
        ValueError: a sampler and the loader that has it inside: each would have the place in the data; a module that
            has a wrapped one inside, which is not named and whose strategy or compression has a state.

    Example:
        >>> import torch, syncline as sl
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> state = sl.TrainState(model=model, optimizer=optimizer)
        >>> state.commit()
        >>> state.step
        1
    """

    def __init__(
        self,
        *,
        model: nn.Module | None = None,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        sampler: Any = None,
        **named: Any,
    ) -> None:
        roles = {
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "scaler": scaler,
            "sampler": sampler,
        }
        given = {name: one for name, one in roles.items() if one is not None} | named
        self.named: dict[str, Any] = {name: uncompiled(one) for name, one in given.items()}
        """What was named, by name; of what torch.compile has made of a module, that module."""
        self.step = 0
        """How many steps were made."""
        self._places = Places(self.named)
        """Whether the places of streams move."""
        _check_one_place(self.named)
        _check_none_is_hidden(self.named)
        for name, one in self.named.items():
            if name in _RESERVED:
                raise TypeError(f"{name} is saved anyway: give {type(one).__name__} another name")
            if isinstance(one, type) or not all(
                callable(getattr(one, method, None)) for method in ("state_dict", "load_state_dict")
            ):
                raise TypeError(
                    f"expected {name} to have state_dict() and load_state_dict(), got {what_it_is(one)}. "
                    + _remedy_of(one)
                )
        if sampler is None:
            _check_none_is_misnamed(self.named)

    def commit(self, num_samples: int | None = None) -> None:
        """One more step was made: `step` goes up, and the sampler's place moves on.

        Args:
            num_samples: how many samples this rank has used for it, of all its micro-batches; needed where the sampler
                is a `DistributedSampler`, which cannot see what a DataLoader has only fetched ahead. Of one epoch: when
                the next is begun, all that was used of this one has to be told.

        Raises:
            TypeError: it is needed, and missing; there is no sampler that it could be for; it is no integer.
            ValueError: below 0, or more than are left of the epoch.
        """
        if num_samples is not None:
            checked_count("num_samples", num_samples, at_least=0)
        advance = getattr(self.named.get("sampler"), "advance", None)
        if advance is not None:
            if num_samples is None:
                raise TypeError(
                    "expected commit(num_samples), the number of samples that this rank has used in the step: the "
                    "sampler's place moves on by them. len(batch), or the sum over the micro-batches of the step"
                )
            advance(num_samples)
        elif num_samples and "sampler" not in self.named:
            raise TypeError(
                f"got commit({num_samples}), but nobody remembers how many samples were used, and a run that goes on "
                "would begin the epoch anew: name the sampler, sl.TrainState(sampler=...), or commit() without"
            )
        self.step += 1
        with calling("state_dict() of a stream"):
            self._places.step_ended()

    def state_dict(self) -> dict[str, Any]:
        """Return all of it, on this rank; tensors are not copied. A collective call where something is sharded."""
        return self._states(state_of)

    def _shard_state_dict(self) -> dict[str, Any]:
        """Return the same, but of what is sharded this rank's shard alone; local."""
        return self._states(_shard_state_of)

    def _load_shards(self, state: Mapping[str, Any], types: Mapping[int, torch.dtype]) -> None:
        self.load_state_dict(state)

    def _states(self, taken: Callable[[Any], Any]) -> dict[str, Any]:
        states = {}
        for name, one in self.named.items():
            with calling(f"state_dict() of {name} ({type(one).__name__})"):
                states[name] = taken(one)
        return {"step": self.step, **states, "rng": rng_state()}

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Load what `state_dict` returned.

        Tensors may be kept by who gets them (see `copies`). Without "rng" chance stays as it is.

        Args:
            state: what was saved.
            strict: whether it has to be of the same names. Otherwise what is in both is loaded, and the rest stays.

        Raises:
            TypeError: it is no dict.
            ValueError: names are missing, or there are others.

        What fails leaves all as it was: modules (but for one that ranks share, `sharded=True`), optimizers,
        random numbers, and other objects as far as their `state_dict()` brings them back.
        """
        checked_state(state)
        checked_flag("strict", strict)
        before = Before(self.named, self.step)
        try:
            load_all(self, state, strict=strict)
        except BaseException:
            before.restore(together=False)
            self._resume_from_step(before.step)
            raise

    def _resume_from_step(self, step: int) -> None:
        """Set `step` after a load, also the one that messages and records of wrapped modules count from."""
        self.step = step
        for one in self._gradient_syncs():
            one.resume_from_step(step)

    def _mark_replicas_equal(self) -> None:
        """Record that all ranks have compared what was loaded: a later divergence has come about since."""
        for one in self._gradient_syncs():
            one.mark_replicas_equal()

    def _gradient_syncs(self) -> list[GradientSync]:
        modules = [one for one in self.named.values() if isinstance(one, nn.Module)]
        return caretakers_of(parameter for module in modules for parameter in module.parameters())

    def load_torch(
        self,
        path: str | os.PathLike[str],
        *,
        names: Mapping[str, Key | None] | None = None,
        besides: Collection[str] = (),
        strict: bool = True,
        group: Any = None,
    ) -> dict[str, Any]:
        """Take over a checkpoint of plain torch: `torch.save({"model": model.state_dict(), ...}, path)`.

        A collective call: all ranks read the same file. It is read with `weights_only=True`, so nothing that it says is
        run. Names are looked up in it, and `step`; a file of nothing but `module.state_dict()` is the one module's that
        is named. The prefixes of DistributedDataParallel and torch.compile ("module.", "_orig_mod.") may be there or
        not.

        Args:
            path: of the file.
            names: by name of what is named here, the key under which the file has it, if that is another; several, one
                inside of the other, as a tuple; None for what the file has not and what stays as it is.
            besides: keys of the file that have no name here, to be given back.
            strict: whether anything else that is in the file and not used, or that is missing there, is an error, also
                in a module's state; otherwise it is a warning.
            group: see `broadcast_`.

        Returns:
            What the file has besides what was loaded, by key.

        Raises:
            TypeError: an argument is of another type; on every rank.
            ValueError: something is missing, or is left over; the file is not what torch.save writes, has objects of
                other types, or what is in it does not fit what is named. On every rank.
            ContractMismatch: the ranks have different files, or name different things.
            ReplicaDivergence: modules or optimizers are not the same on all ranks now.

        Example:
            >>> import tempfile, torch, syncline as sl
            >>> model = torch.nn.Linear(2, 1)
            >>> state = sl.TrainState(model=model)
            >>> with tempfile.NamedTemporaryFile() as file:
            ...     torch.save({"net": model.state_dict(), "step": 1200, "epoch": 3}, file.name)
            ...     state.load_torch(file.name, names={"model": "net"}, besides=["epoch"])
            {'epoch': 3}
            >>> state.step
            1200
        """
        transport = transport_of(group)
        return adopt(self, path, names=names, besides=besides, strict=strict, transport=transport)


def load_all(into: TrainState, state: Mapping[str, Any], *, strict: bool) -> None:
    """As `TrainState.load_state_dict`; what fails leaves it half loaded."""
    missing = sorted({"step", *into.named} - state.keys())
    unknown = sorted(state.keys() - {"step", "rng", *into.named})
    if "step" not in state or (strict and (missing or unknown)):
        raise ValueError(
            f"expected the state of {', '.join(into.named) or 'nothing but step and rng'}; "
            + "; ".join(
                [f"{name} was not saved" for name in missing]
                + [f"{name} was saved, and is not named here" for name in unknown]
            )
            + ". Name the same things as when it was saved; or load with strict=False what is in both"
        )
    both = {name: one for name, one in into.named.items() if name in state}
    types: dict[int, torch.dtype] = {}
    for name, one in both.items():
        if isinstance(one, nn.Module):
            types |= types_in(one, state[name])
    for name, one in both.items():
        with calling(f"load_state_dict() of {name} ({type(one).__name__})"):
            load_into(one, state[name], types)
    into._resume_from_step(state["step"])
    if "rng" in state:
        rng = state["rng"]
        set_rng_state(rng)
        # A DataLoader draws a number when it begins: it did so before the state was saved, and will again. So
        # chance is where it was when the sampler deals the first index of the epoch that goes on.
        sampler = dealer_of(into.named.get("sampler"))
        if sampler is not None:
            sampler.when_resumed = lambda: set_rng_state(rng)


def _check_one_place(named: Mapping[str, Any]) -> None:
    owners: dict[DistributedSampler, str] = {}
    for name, one in named.items():
        sampler = dealer_of(one)
        if sampler is not None and sampler in owners:
            raise ValueError(
                f"{owners[sampler]} and {name} have one DistributedSampler, and would each put it at a place of their "
                "own. Name the sampler, with commit(num_samples); or the loader that it is in, with commit()"
            )
        if sampler is not None:
            owners[sampler] = name


def _shard_state_of(one: Any) -> Any:
    sharded = sharded_state_of(one)
    return state_of(one) if sharded is None else sharded._shard_state_dict()


def _check_none_is_hidden(named: Mapping[str, Any]) -> None:
    modules = {name: one for name, one in named.items() if isinstance(one, nn.Module)}
    for name, module in modules.items():
        for path, part in module.named_modules():
            replica = replica_of(part)
            if replica is None or not replica.has_sync_state:
                continue
            if not any(part is one for one in modules.values()):
                raise ValueError(
                    f"{name} has a wrapped module inside, {path}, whose strategy or compression has a state that the "
                    f"state_dict() of a {type(module).__name__} knows nothing of, and a run that goes on would lose: "
                    "name the wrapped modules themselves, sl.TrainState(model=..., other=...)"
                )


def _check_none_is_misnamed(named: Mapping[str, Any]) -> None:
    for name, one in named.items():
        if isinstance(one, DistributedSampler):
            raise TypeError(
                f"expected sampler={name}, got {name}={name}: by another name commit(num_samples) does not move a "
                "DistributedSampler on, and a run that goes on would begin the epoch anew"
            )


def _remedy_of(one: Any) -> str:
    if isinstance(one, DataLoader):
        return (
            "A DataLoader has no place in the data: name the sl.DistributedSampler that it has, or use torchdata's "
            "StatefulDataLoader, which has one"
        )
    return "Numbers and tensors of your own belong into an object with these two methods"
