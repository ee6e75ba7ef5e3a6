"""check_replicas: are the replicas equal, bit for bit?"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from syncline.errors import ReplicaDivergence
from syncline.optim.attached import is_sharded
from syncline.state.encoding import encode
from syncline.state.train_state import TrainState
from syncline.sync.agreement import describe_tensors, exchange
from syncline.sync.divergence import have_met
from syncline.sync.fingerprint import digest_of
from syncline.sync.optimizers import OptimizerNumbers, optimizer_leaves, parameters_of
from syncline.sync.replicas import LocatedDifference, divergence_error, locate, values_fingerprints
from syncline.sync.tensors import named_tensors
from syncline.transport.user_code import calling
from syncline.verbs.common import Group
from syncline.world import transport_of

__all__ = ["check_replicas"]

_TITLE = "sl.check_replicas"
_REMEDY = "Call it with the same tree of tensors on every rank. (Of tied tensors only the first is named.)"


def check_replicas(target: Any, *, group: Group = None) -> None:
    """Raise if `target` is not the same on all ranks, bit for bit.

    Each rank boils its tensors down to numbers of 64 bits, by exact integer arithmetic on the device that they are on;
    memory for copies is bounded. Replicas that are equal cost one small collective; where they are not, some more find
    the elements. Equal means the same bits: 0.0 and -0.0 differ, and so do NaNs with different payloads. A difference
    is missed with a probability of about 2**-64. Nothing is changed.

    Args:
        target: a Module (parameters and buffers), an Optimizer (tensors and numbers of its state and of its parameter
            groups), a Tensor, or nested dicts, lists and tuples of tensors. Tied tensors are looked at once. Of a
            `TrainState`: its step, its modules, optimizers, scheduler and scaler; not what is each rank's own (random
            numbers, the sampler's place, a share of a sharded optimizer, other objects of yours), nor what a wrapped
            module's contract lets differ (buffers after a forward; under a strategy that lets replicas drift, the
            scaler, the optimizer's state and, between two meetings, parameters).
        group: see `broadcast_`.

    Raises:
        ReplicaDivergence: something differs: the first tensors in the target's order, the elements, how many there
            are, and which ranks are in the minority; the same text on every rank.
        ContractMismatch: the ranks' targets have different names, shapes or dtypes; the same text on every rank.
        TypeError, ValueError: `target` is or contains something else, or is a sharded optimizer; on every rank.

    Example:
        >>> import torch, syncline as sl
        >>> model = torch.nn.Linear(2, 1)
        >>> sl.check_replicas(model)
        >>> sl.check_replicas(sl.TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters())))
    """
    transport = transport_of(group)
    read = _Read()
    fault = None
    mine: list[int] = []
    try:
        if isinstance(target, TrainState):
            read.add_state(target)
        else:
            read.add(target)
        mine = values_fingerprints(read.values)
    except Exception as error:
        fault = error
    told = exchange(transport, _TITLE, read.lines, payload=digest_of(mine), fault=fault, remedy=_REMEDY)
    if len(set(told)) > 1:
        found = locate(read.names, read.values, transport, mine=mine)
        raise _divergence(found, len(mine), transport.size)
    have_met([value for value in read.values if isinstance(value, Tensor)], by_writing=False)


class _Read:
    """What is compared, as it was found."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.values: list[Any] = []
        """Tensors and numbers."""
        self.lines: list[str] = []
        """What has to be the same before anything can be compared."""

    def add(self, target: Any, prefix: str = "") -> None:
        """Of a module, an optimizer or a tree of tensors: all of it."""
        if is_sharded(target):
            raise ValueError(
                "this optimizer is sharded: each rank has state for its own share, which no other has"
            )
        self.add_tensors(named_tensors(target, for_writing=False), prefix)
        if isinstance(target, Optimizer):
            self.lines += [prefix + line for line in OptimizerNumbers(target).lines]
            for path, leaf in optimizer_leaves(target):
                if not isinstance(leaf, Tensor):
                    self.names.append(prefix + path)
                    self.values.append(leaf)

    def add_tensors(self, named: Sequence[tuple[str, Tensor]], prefix: str) -> None:
        """Some tensors."""
        prefixed = [(prefix + name, tensor) for name, tensor in named]
        self.lines += describe_tensors(prefixed, kind="tensor", layout=False)
        self.names += [name for name, _ in prefixed]
        self.values += [tensor for _, tensor in prefixed]

    def add_state(self, state: TrainState) -> None:
        """What all ranks have in common."""
        self.names.append("step")
        self.values.append(state.step)
        own = _stepped_apart(state)
        for name, one in state.named.items():
            prefix = f"{name}."
            if isinstance(one, DistributedDataParallel):
                common: Any = getattr(one, "replicated", None)
                # torch's: buffers differ after a forward.
                self.add_tensors(common() if common else list(one.module.named_parameters()), prefix)
            elif isinstance(one, nn.Module):
                self.add(one, prefix)
            elif isinstance(one, Optimizer):
                if not is_sharded(one) and not any(id(p) in own for p in parameters_of(one)):
                    self.add(one, prefix)
            elif name == "scheduler" or (name == "scaler" and not own):
                with calling(f"state_dict() of {name} ({type(one).__name__})"):
                    content = one.state_dict()
                tree, tensors = encode(content, name)
                self.add_tensors(list(tensors.items()), "")
                self.names.append(name)
                self.values.append(json.dumps(tree))


def _stepped_apart(state: TrainState) -> set[int]:
    """Ids of the parameters that ranks step by themselves, so that they have what is stepped with by themselves."""
    return {
        id(parameter)
        for one in state.named.values()
        if not getattr(one, "steps_alike", True)
        for parameter in one.parameters()
    }


def _divergence(found: Sequence[LocatedDifference], num_compared: int, num_ranks: int) -> ReplicaDivergence:
    source = "src=<a rank of the majority>" if any(one.difference.minority for one in found) else "src=..."
    return divergence_error(
        _TITLE,
        found,
        num_compared=num_compared,
        num_ranks=num_ranks,
        remedy=f"sl.broadcast_(target, {source}) makes them equal again; what let them drift (a buffer, a seed, a step "
        "on some ranks) remains to be found.",
    )
