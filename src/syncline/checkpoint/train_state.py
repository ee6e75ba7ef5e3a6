"""`TrainState`: the objects of a training run, which are saved and loaded together."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from syncline._torch.modules import uncompiled
from syncline.checkpoint.files import Files, checksum
from syncline.checkpoint.load_torch import Key, checked_names, load_matched, match, read_torch_file
from syncline.checkpoint.objects import (
    fingerprints_in,
    is_node_loader,
    load_into,
    rng_state,
    saved_types,
    set_rng_state,
    state_of,
)
from syncline.checkpoint.rollback import Before, failing_together, load_together
from syncline.checks import (
    checked_count,
    checked_flag,
    checked_path,
    checked_state,
    suggests_arguments,
    what_it_is,
)
from syncline.data import DistributedSampler
from syncline.gradients.reducer import GradientSync, reducers_of
from syncline.gradients.wrapper_protocol import replica_of
from syncline.session.world import transport_of
from syncline.sharded.part import ShardedState, sharded_state_of
from syncline.user_code import calling, warn_user
from syncline.words import format_count, one_line

_RESERVED = ("step", "rng")

_ENOUGH_STEPS = 3
"""The number of steps in which a stream must stay at one position before a warning is given.

It is more than 1, because a stream can read a block of several batches at once.
"""


@suggests_arguments
class TrainState(ShardedState):
    """A collection of the objects of a training run, which are saved, loaded and compared together.

    The saved state also contains `step` and the state of this rank's random number generators: Python's, NumPy's if
    NumPy is imported, and torch's on the CPU and on each CUDA device in use.

    Args:
        model: a module, which may be wrapped by torch's or Syncline's DistributedDataParallel, or compiled by
            torch.compile. Its saved state can be loaded into a module that is wrapped or compiled differently. With
            Syncline's wrapper, the state of the strategy and of the compression is saved, too.
        optimizer: a torch optimizer. It may be attached to a wrapped module.
        scheduler: a learning rate scheduler.
        scaler: a `torch.amp.GradScaler`.
        sampler: the object that selects the samples: a `DistributedSampler`, or a loader that saves its position in
            the data, such as torchdata's StatefulDataLoader.
        named: further objects with `state_dict()` and `load_state_dict(state)`, by names of your choice.

    Raises:
        TypeError: an object lacks `state_dict` or `load_state_dict`; an object has the name `step` or `rng`; or a
            `DistributedSampler` was not given as `sampler`, so that `commit` would not advance it.
        ValueError: two of the objects have the same DistributedSampler, for example the sampler itself and a loader
            that contains it; or a module contains a wrapped module that was not given, although the strategy or the
            compression of this wrapped module has a state; or a torchdata.nodes.Loader reads by an
            `sl.DistributedSampler`.

    Examples:
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
        """The objects, by name. A compiled module is replaced by the module that was compiled."""
        self.step = 0
        """The number of steps that the run has made."""
        self._streams = StreamWatch(self.named)
        _check_samplers(self.named)
        _check_none_is_hidden(self.named)
        for name, one in self.named.items():
            if name in _RESERVED:
                raise TypeError(
                    f"{name} is a reserved name, because sl.TrainState always saves its own {name}: give the "
                    f"{type(one).__name__} another name"
                )
            if isinstance(one, type) or not all(
                callable(getattr(one, method, None)) for method in ("state_dict", "load_state_dict")
            ):
                raise TypeError(
                    f"expected {name} to have state_dict() and load_state_dict(), got {what_it_is(one)}. "
                    + _remedy_of(one)
                )
            _check_node_loader(name, one)

    def __repr__(self) -> str:
        return one_line(self, f"step {self.step}, {', '.join(self.named)}")

    def commit(self, num_samples: int | None = None) -> None:
        """Count one more step, and advance the sampler.

        Args:
            num_samples: the number of samples that this rank has used in the step, over all of its micro-batches. It is
                required if the sampler is a `DistributedSampler`, because a DataLoader may have fetched samples that
                were not used yet. Commit all used samples of an epoch before the next epoch begins.

        Raises:
            TypeError: `num_samples` is missing although it is required, was given without a sampler, or is not an
                integer.
            ValueError: `num_samples` is below 0, or is more than the samples that this rank has left in the epoch.
        """
        if num_samples is not None:
            checked_count("num_samples", num_samples, at_least=0)
        advance = getattr(self.named.get("sampler"), "advance", None)
        if advance is not None:
            if num_samples is None:
                raise TypeError(
                    "expected commit(num_samples) with the number of samples that this rank has used in the step, "
                    "because the sampler advances by this number. Give len(batch), or the sum over the micro-batches"
                )
            advance(num_samples)
        elif num_samples and "sampler" not in self.named:
            raise TypeError(
                f"got commit({num_samples}), but without a sampler the number of used samples is not saved, and a "
                "resumed run would start the epoch again: give the sampler to sl.TrainState(sampler=...), or call "
                "commit() without a number"
            )
        self.step += 1
        with calling("state_dict() of a stream"):
            self._streams.step_ended()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all objects, without copying tensors. A collective call if any object is sharded."""
        return self._states(state_of)

    def _shard_state_dict(self) -> dict[str, Any]:
        """Return the state of all objects, with only this rank's shard of each sharded object. Nothing is sent."""
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
        """Load a state that `state_dict` returned.

        Objects other than modules may keep references to the tensors in `state`. If `state` has no "rng", the random
        number generators stay unchanged.

        If the load fails, modules, optimizers and random number generators get their earlier state back. So do other
        objects if their `state_dict` and `load_state_dict` allow it. A module of which several ranks share one copy
        (`sharded=True`) is not restored.

        Args:
            state: the saved state.
            strict: whether `state` must have exactly the names of this object. If False, only the objects whose names
                are in both are loaded, and the others stay unchanged.

        Raises:
            TypeError: `state` is not a dict.
            ValueError: `state` lacks names of this object, or has names that this object does not have.
        """
        checked_state(state)
        checked_flag("strict", strict)
        with Before(self).restored_on_failure(together=False):
            load_all(self, state, strict=strict)

    def _resume_from_step(self, step: int) -> None:
        """Set the step of this state and of its wrapped modules after a load.

        Wrapped modules use the step in messages and records.
        """
        self.step = step
        for one in self._gradient_syncs():
            one.state.resume_from(step)

    def _mark_replicas_equal(self) -> None:
        """Record that the replicas are equal at this step, because all ranks have just compared the loaded values."""
        for one in self._gradient_syncs():
            one.state.mark_replicas_equal()

    def _gradient_syncs(self) -> list[GradientSync]:
        modules = [one for one in self.named.values() if isinstance(one, nn.Module)]
        return reducers_of(parameter for module in modules for parameter in module.parameters())

    def load_torch(
        self,
        path: str | os.PathLike[str],
        *,
        names: Mapping[str, Key | None] | None = None,
        besides: Collection[str] = (),
        strict: bool = True,
        group: Any = None,
    ) -> dict[str, Any]:
        """Load a file that torch.save wrote, such as `torch.save({"model": model.state_dict(), ...}, path)`.

        A collective call: all ranks read the same file. The file is read with `weights_only=True`, so no code from the
        file runs. The entries under the key `step` and under the names of this state are loaded. If the file has only
        the state of one module (`module.state_dict()`), it is loaded into the only module of this state. The keys of a
        module's state may have the prefixes of DistributedDataParallel and torch.compile ("module.", "_orig_mod.").

        Args:
            path: the path of the file.
            names: a dict from names of this state to keys of the file, for objects whose key is not their name. A tuple
                of keys leads to a nested object. A key of None means that the object is not in the file, and stays
                unchanged.
            besides: further keys of the file, whose entries are returned.
            strict: whether unused or missing entries are an error. Entries within the state of a module count, too. If
                False, such entries cause a warning.
            group: the group of ranks that load together; see `broadcast_`.

        Returns:
            The entries of the file that were not loaded, by key.

        Raises:
            TypeError: an argument has a wrong type. Raised on every rank.
            ValueError: entries are missing or unused; the file was not written by torch.save, or has objects other than
                tensors and plain values; or an entry does not match its object. Raised on every rank.
            ContractMismatch: the ranks have different files, or give different names or other arguments.
            ReplicaDivergence: modules or optimizers differ between ranks after loading.

        Examples:
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
        transport, title = transport_of(group), "sl.TrainState.load_torch"
        remedy = (
            "Give every rank the same file: give a path that all hosts see, or put equal copies on all hosts."
        )
        with failing_together(transport, title, remedy=remedy) as lines:
            path = checked_path("path", path)
            keys, besides = checked_names(names, besides)
            checked_flag("strict", strict)
            content = Files().map(path)
            lines += [f"file  {checksum(content)}", f"strict  {strict}"]
            if not content:  # also true of special files of the kernel, in which torch.load could block
                raise ValueError(f"{path} cannot be read as a file that torch.save wrote: it is empty")
            matched = match(read_torch_file(path), self.named, names=keys, besides=besides)
            if strict:
                matched.check_complete(path)
            lines += [f"named  {name}" for name in self.named]
            lines += [f"under another name  {name}: {keys[name]!r}" for name in sorted(keys)]
            lines += [f"besides  {key}" for key in besides]
            before = Before(
                self
            )  # before any rank begins to load, because ranks may share one copy of a module
        load_together(transport, title, before, lambda: load_matched(self, matched, path, strict=strict))
        if transport.rank == 0 and (matched.missing or matched.unused):
            warn_user(f"{title} of {path}: {'; '.join(matched.left())}")
        return matched.rest


def load_all(into: TrainState, state: Mapping[str, Any], *, strict: bool) -> None:
    """Load a state as `TrainState.load_state_dict` does, but restore nothing if the load fails."""
    missing = sorted({"step", *into.named} - state.keys())
    unknown = sorted(state.keys() - {"step", "rng", *into.named})
    if "step" not in state or (strict and (missing or unknown)):
        raise ValueError(
            f"expected a saved state with the names {', '.join(['step', *into.named])}: "
            + "; ".join(
                [f"{name} was not saved" for name in missing]
                + [f"{name} was saved, but is not named here" for name in unknown]
            )
            + ". Use the same names as when the state was saved; or load only the names in both, with strict=False"
        )
    types = saved_types(into.named, state)
    for name, one in into.named.items():
        if name in state:
            with calling(f"load_state_dict() of {name} ({type(one).__name__})"):
                load_into(one, state[name], types)
    into._resume_from_step(state["step"])
    if "rng" in state:
        rng = state["rng"]
        set_rng_state(rng)
        # A DataLoader draws a random number when its iteration begins: once before the state was saved, and again in
        # the resumed run. So the generators are set again when the sampler returns the first index of that epoch.
        sampler = sampler_of(into.named.get("sampler"))
        if sampler is not None:
            sampler.when_resumed = lambda: set_rng_state(rng)


def _check_samplers(named: Mapping[str, Any]) -> None:
    owners: dict[DistributedSampler, str] = {}
    for name, one in named.items():
        sampler = sampler_of(one)
        if sampler is None:
            continue
        if sampler in owners:
            raise ValueError(
                f"{owners[sampler]} and {name} have the same DistributedSampler, and both would set its position. "
                "Give either only the sampler, and call commit(num_samples), or only the loader, and call commit()"
            )
        if sampler is one and "sampler" not in named:
            raise TypeError(
                f"expected the DistributedSampler under the name sampler, got it under the name {name}. "
                "commit(num_samples) advances only the object named sampler, so a resumed run would start the epoch "
                "again: give it as sl.TrainState(sampler=...)"
            )
        owners[sampler] = name


def _check_node_loader(name: str, one: Any) -> None:
    """Raise an error if `one` is a `torchdata.nodes.Loader` that reads by an `sl.DistributedSampler`.

    Such a loader saves the committed position of the sampler, and nothing commits.
    """
    nodes = [one] if is_node_loader(one) else []
    for node in nodes:  # the list grows during the loop
        for value in vars(node).values():
            parts = list(value.values()) if isinstance(value, dict) else [value]
            if any(isinstance(part, DistributedSampler) for part in parts):
                raise ValueError(
                    f"{name} is a torchdata.nodes.Loader with an sl.DistributedSampler, whose position it does not "
                    "save, so a resumed run would start the epoch again: give SamplerWrapper torch's sampler, "
                    "torch.utils.data.DistributedSampler(...), or use torchdata's StatefulDataLoader"
                )
            nodes += [part for part in parts if isinstance(part, sys.modules["torchdata.nodes"].BaseNode)]


def _shard_state_of(one: Any) -> Any:
    sharded = sharded_state_of(one)
    return state_of(one) if sharded is None else sharded._shard_state_dict()


def _check_none_is_hidden(named: Mapping[str, Any]) -> None:
    for name, module in named.items():
        for path, part in module.named_modules() if isinstance(module, nn.Module) else ():
            replica = replica_of(part)
            is_named = any(part is one for one in named.values())
            if replica is not None and replica.has_sync_state and not is_named:
                raise ValueError(
                    f"{name} contains a wrapped module, {path}, whose strategy or compression has a state. The "
                    f"state_dict() of {name} does not have this state, so a resumed run would lose it: give each "
                    "wrapped module to sl.TrainState under a name of its own, sl.TrainState(model=..., other=...)"
                )


def _remedy_of(one: Any) -> str:
    if isinstance(one, DataLoader):
        return (
            "A DataLoader does not save its position in the data: give its sl.DistributedSampler as sampler=, or use "
            "torchdata's StatefulDataLoader, which saves its position"
        )
    return "To save numbers and tensors of your own, put them into an object with these two methods"


# ---------------------------------------------------------------------- differences of a resumed run


def sampler_of(one: Any) -> DistributedSampler | None:
    """Return the DistributedSampler of an object: the object itself, or the sampler in a loader; None if absent."""
    inner = getattr(getattr(one, "batch_sampler", None), "sampler", None)
    samplers = (one, getattr(one, "sampler", None), inner)
    return next((sampler for sampler in samplers if isinstance(sampler, DistributedSampler)), None)


class StreamWatch:
    """A detector of streams whose position does not change from step to step.

    The workers of a DataLoader read copies of a stream, so the position of the saved stream itself never changes.

    Args:
        named: the saved objects, by name.

    Examples:
        >>> class Stream(IterableDataset[int]):
        ...     def __iter__(self):
        ...         return iter(range(8))
        ...     def state_dict(self):
        ...         return {"next": 0}
        >>> watch = StreamWatch({"data": Stream()})
        >>> for _ in range(4):
        ...     watch.step_ended()
        >>> [remark[:37] for remark in watch.remarks()], list(watch.remarks())
        (['the position of data (Stream) has not'], [])
    """

    def __init__(self, named: Mapping[str, Any]) -> None:
        self._named = named
        self._positions: dict[str, list[list[Any]]] = {
            name: []
            for name, one in named.items()
            if isinstance(one, IterableDataset)
            or (name == "sampler" and not isinstance(one, DataLoader) and sampler_of(one) is None)
        }
        """The fingerprints of each watched stream's positions, one for each step, by the name of the stream."""
        self._standing: list[str] = []
        """The names of the streams whose position did not change in `_ENOUGH_STEPS` steps."""

    def step_ended(self) -> None:
        """Record the position of each watched stream, and detect streams that do not move. Call it after each step."""
        for name, positions in list(self._positions.items()):
            positions.append(fingerprints_in(self._named[name].state_dict()))
            has_moved = positions[0] != positions[-1]
            if has_moved or len(positions) > _ENOUGH_STEPS:
                del self._positions[name]
                self._standing += [] if has_moved else [name]

    def remarks(self) -> Iterator[str]:
        """Yield a warning about each stream that does not move. Each warning is yielded once."""
        while self._standing:
            name = self._standing.pop(0)
            yield (
                f"the position of {name} ({type(self._named[name]).__name__}) has not changed in {_ENOUGH_STEPS} "
                "steps, so a resumed run would read the same samples again. The workers of a DataLoader read copies of "
                "a stream, so the stream itself does not advance: use num_workers=0, or use torchdata's "
                "StatefulDataLoader and save it, sl.TrainState(sampler=loader)"
            )


def remarks_on_loaders(named: Mapping[str, Any]) -> Iterator[str]:
    """Yield a warning about each DataLoader because of which a resumed run draws an extra random number.

    All DataLoaders of this process are inspected, which takes about ten milliseconds.

    Args:
        named: the saved objects, by name.
    """
    names = {id(one): name for name, one in named.items()}
    kinds: list[type] = [DataLoader]
    for kind in kinds:  # the list grows during the loop
        kinds += kind.__subclasses__()
    # The garbage collector lists the objects that refer to these classes. An instance refers to its class.
    for loader in (one for one in gc.get_referrers(*kinds) if type(one) in kinds):
        if getattr(loader, "generator", None) is not None:
            continue
        stream = names.get(id(loader.dataset))
        if loader.persistent_workers:
            when = "once per run, because of persistent_workers=True"
        elif stream is not None and isinstance(loader.dataset, IterableDataset):
            when = f"whenever it begins to read {stream}"
        elif id(loader) in names and sampler_of(loader) is None:
            when = "whenever an iteration begins"
        else:
            continue  # a resumed run draws the same numbers, or the sampler resets the generators
        what = f"{type(loader.dataset).__name__} ({format_count(loader.num_workers, 'worker')})"
        yield (
            f"a DataLoader of {what} draws from torch's global generator {when}. A resumed run draws one number more, "
            "so its later random numbers (dropout masks, for example) differ: give the DataLoader a generator of its "
            "own, generator=torch.Generator()"
        )
