"""The parts of a training state that `sl.steps` needs: wrapped modules, attached optimizers and the sampler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.checkpoint.objects import load_into
from syncline.checkpoint.train_state import TrainState
from syncline.checks import what_it_is
from syncline.data import DistributedSampler
from syncline.ddp.wrapper import DistributedDataParallel
from syncline.optimizers.attached import AttachedOptimizer
from syncline.optimizers.contents import parameters_of
from syncline.session.world import transport_of
from syncline.strategies.execution import Rounds


def wrappers_in(state: TrainState) -> list[DistributedDataParallel]:
    """Return the wrapped modules of a training state.

    Raises:
        ValueError: there is none, or one cannot follow another number of ranks.
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
            "Without it, no collective decides whether a step stands"
        )
    for wrapper in found:
        replica = wrapper._replica
        replica.refuse_sharded(
            "sl.steps cannot restore the part of the optimizer's state that is lost with a rank"
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


def go_to_place(state: TrainState, saved: Mapping[str, Any]) -> None:
    """Let a training state continue as far as that of another rank, without the values of its modules and optimizers.

    Learning rates, schedulers and other small objects are loaded. This rank's parameters, the state of its optimizers
    and the position of its sampler stay.

    Args:
        state: the training state.
        saved: the state of the other rank.
    """
    for name, one in state.named.items():
        if isinstance(one, Optimizer):
            for group, then in zip(one.param_groups, saved[name]["param_groups"], strict=True):
                for key, value in then.items():
                    if isinstance(group.get(key), Tensor):
                        group[key].copy_(value)
                    elif key not in ("params", "param_names"):
                        group[key] = value
        elif not isinstance(one, nn.Module | DistributedSampler):
            load_into(one, saved[name], {})
    state._resume_from_step(saved["step"])


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
