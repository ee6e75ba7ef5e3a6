"""The parts of a training state that `sl.steps` needs: wrapped modules, attached optimizers and the sampler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.checkpoint.objects import (
    is_wrapped,
    load_into,
    saved_types,
    state_of,
    unwrapped,
    without_synchronization,
)
from syncline.checkpoint.train_state import TrainState
from syncline.checks import what_it_is
from syncline.compression.exchange import with_own_residuals
from syncline.data import DistributedSampler
from syncline.ddp.wrapper import DistributedDataParallel
from syncline.optimizers.attached import AttachedOptimizer
from syncline.optimizers.contents import parameters_of
from syncline.session.world import is_about_to_join, transport_of
from syncline.sharded.attached import AttachedShards
from syncline.sharded.part import has_sharded_state, sharded_state_of
from syncline.sharded.sharing import one_copy_of
from syncline.strategies.execution import Rounds


def wrappers_in(state: TrainState) -> list[DistributedDataParallel]:
    """Return the wrapped modules of a training state.

    Raises:
        ValueError: there is none, or one cannot adapt to another number of ranks.
    """
    found = [
        part
        for one in state.named.values()
        if isinstance(one, nn.Module)
        for part in one.modules()
        if isinstance(part, DistributedDataParallel)
    ]
    if not found:
        raise ValueError(
            f"expected state to have a module wrapped by sl.DistributedDataParallel, got {state!r} without one. "
            "Without it, no collective determines whether a step is committed"
        )
    for wrapper in found:
        replica = wrapper._replica
        if is_about_to_join() and one_copy_of(wrapper.module) is not None:
            raise ValueError(
                "with sharded=True, a process cannot join ranks that are training: it has no shards that it could take "
                "over. The other ranks train on without it. Wrap the module without sharded=True"
            )
        if replica.transport is not transport_of(None):
            raise ValueError(
                "expected modules that are wrapped over the default group, got one over another group: sl.steps "
                "replaces only the default group when a rank is lost"
            )
    return found


def rounds_in(wrappers: Sequence[DistributedDataParallel]) -> list[Rounds]:
    """Return the executions of the strategies under which replicas drift."""
    found = [wrapper._replica.drift.rounds for wrapper in wrappers]
    return [rounds for rounds in found if rounds is not None]


def refuse_drift(wrappers: Sequence[DistributedDataParallel]) -> None:
    """Raise an error if replicas drift under a strategy, because the global batch cannot stay the same then.

    Raises:
        ValueError: replicas drift.
    """
    for wrapper in wrappers:
        if wrapper._replica.drift.rounds is not None:
            raise ValueError(
                "keep_global_batch=True expects strategy=sl.EveryStep(), got "
                f"strategy={wrapper._replica.config.strategy}, under which each rank makes steps with batches of its "
                "own, so there is no batch of all ranks. Leave keep_global_batch out"
            )


def refuse_sharded_with_spares(wrappers: Sequence[DistributedDataParallel]) -> None:
    """Raise an error if a module is sharded, because a spare rank would have no shards when it joins.

    Raises:
        ValueError: a module is sharded.
    """
    for wrapper in wrappers:
        wrapper._replica.refuse_sharded(
            "max_ranks must be at least the number of ranks: a spare rank has no shards that it could take over"
        )


def state_to_send(state: TrainState) -> dict[str, Any]:
    """Return the state of all objects, without the shards of sharded modules. Nothing is sent."""
    found: dict[str, Any] = {"step": state.step}
    for name, one in state.named.items():
        if has_sharded_state(one):
            found[name] = {"param_groups": [{**group, "params": []} for group in one.param_groups]}
        else:
            found[name] = state_of(one)
            if isinstance(one, nn.Module):
                module = without_synchronization(found[name])
                for key in _shared_keys(one):
                    del module[key]
    return found


def load_sent(state: TrainState, sent: Mapping[str, Any], *, values: bool, own: bool) -> None:
    """Load the state of another rank.

    Args:
        state: the training state.
        sent: the result of `state_to_send` on the other rank.
        values: whether to load the values of modules and optimizers and the position of the sampler. Otherwise only
            learning rates, schedulers and other small objects are loaded. Shards are never loaded.
        own: whether the compressions of this rank have residuals, which are then kept.
    """
    types = saved_types(state.named, sent)
    for name, one in state.named.items():
        if isinstance(one, Optimizer) and (has_sharded_state(one) or not values):
            _set_settings(one, sent[name]["param_groups"])
        elif isinstance(one, nn.Module):
            if values:
                _load_module(one, sent[name], own=own)
        elif values or not isinstance(one, DistributedSampler):
            load_into(one, sent[name], types)
    state._resume_from_step(sent["step"])


def _load_module(module: nn.Module, sent: Any, *, own: bool) -> None:
    inner, shared = unwrapped(module), _shared_keys(module)
    if shared:
        present = inner.state_dict()
        with torch.no_grad():
            for key, value in without_synchronization(sent).items():
                if isinstance(value, Tensor):
                    present[key].copy_(value)
        return
    if is_wrapped(sent):
        mine = state_of(module)["synchronization"] if own else {}
        sent = {**sent, "synchronization": with_own_residuals(sent["synchronization"], mine)}
    load_into(module, sent, {})


def _shared_keys(module: nn.Module) -> set[str]:
    """Return the keys of the parameters that are in shards, in the state of a module without its wrapper."""
    shards = {
        id(parameter)
        for part in module.modules()
        if isinstance(part, DistributedDataParallel) and part._replica.sharding is not None
        for parameter in part._replica.gradients.parameters
    }
    named = unwrapped(module).named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if id(parameter) in shards}


def _set_settings(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    for group, then in zip(optimizer.param_groups, groups, strict=True):
        for key, value in then.items():
            if isinstance(group.get(key), Tensor):
                group[key].copy_(value)
            elif key not in ("params", "param_names"):
                group[key] = value


def conclude(attached: AttachedOptimizer, *, is_made: bool) -> None:
    """Complete the interrupted step of this rank's shards, or discard it.

    Args:
        attached: the optimizer.
        is_made: whether another rank has made the step of its shards.
    """
    shards = sharded_state_of(attached.optimizer)
    if isinstance(shards, AttachedShards):
        attached.num_steps += shards.open_step.conclude(is_made=is_made)


def num_steps_of(attached: AttachedOptimizer) -> int:
    """Return the number of steps of an optimizer, including one that only the shards of this rank have made so far."""
    shards = sharded_state_of(attached.optimizer)
    return attached.num_steps + (isinstance(shards, AttachedShards) and shards.open_step.is_made)


def sampler_in(state: TrainState) -> DistributedSampler | None:
    """Return the sampler of a training state.

    Raises:
        ValueError: it is a loader, whose position cannot be divided among another number of ranks.
    """
    sampler = state.named.get("sampler")
    if sampler is not None and not isinstance(sampler, DistributedSampler):
        raise ValueError(
            f"expected the sampler of state to be an sl.DistributedSampler, got {what_it_is(sampler)}: sl.steps deals "
            "the samples that are left to other ranks, which needs the sampler itself"
        )
    return sampler


def attached_in(state: TrainState, wrappers: Sequence[DistributedDataParallel]) -> list[AttachedOptimizer]:
    """Attach the optimizers of a training state to the wrapped modules, and return all that are attached."""
    known = {id(one.optimizer) for wrapper in wrappers for one in _attached_to(wrapper)}
    for one in state.named.values():
        if isinstance(one, Optimizer) and id(one) not in known:
            own = {id(parameter) for parameter in parameters_of(one)}
            for wrapper in wrappers:
                if any(id(parameter) in own for parameter in wrapper.parameters()):
                    wrapper.attach(one)
                    break
    return [one for wrapper in wrappers for one in _attached_to(wrapper)]


def _attached_to(wrapper: DistributedDataParallel) -> list[AttachedOptimizer]:
    return wrapper._replica.gradients.riders.settings.optimizers
