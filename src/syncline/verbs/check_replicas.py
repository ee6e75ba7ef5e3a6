"""check_replicas: verify that the replicas are equal, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from syncline.checkpoint.encoding import encode
from syncline.checkpoint.train_state import TrainState
from syncline.equality.fingerprint import digest_of, fingerprints
from syncline.equality.locate import Difference, differing, divergence_error, locate
from syncline.errors import ReplicaDivergence
from syncline.gradients.wrapper_protocol import replica_of
from syncline.optimizers.contents import OptimizerNumbers, is_setting, optimizer_leaves, parameters_of
from syncline.session.world import transport_of
from syncline.sharded.attached import is_sharded
from syncline.tensors.targets import distinct_tensors, named_tensors
from syncline.transport.agreement import describe_tensors
from syncline.user_code import calling
from syncline.verbs.common import Group, Prepared, agree_on_call, refuse_sharded
from syncline.verbs.diverge import divergences_around, record_equal
from syncline.words import format_names

_TITLE = "sl.check_replicas"

_DIGEST_BYTES = 32

_REMEDY = "Call it with the same tree of tensors on every rank. (Of tied tensors only the first is named.)"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaReport:
    """The result of `check_replicas`: what was compared, and what differs as the contract allows.

    Attributes:
        num_ranks: number of ranks compared.
        num_compared: number of tensors and numbers compared.
        may_differ: names of tensors that differ and may differ: buffers after a forward, parameters between two
            parameter syncs, tensors under `ignore=`.

    Example:
        >>> print(ReplicaReport(num_ranks=2, num_compared=7, may_differ=("1.running_mean",)))
        6 of 7 tensors and numbers are the same on all 2 ranks
        note: these differ, as the contract of the wrapped module allows now: 1.running_mean
    """

    num_ranks: int
    num_compared: int
    may_differ: tuple[str, ...] = ()

    def __str__(self) -> str:
        num_same = self.num_compared - len(self.may_differ)
        same = f"{num_same:,} of " if self.may_differ else ""
        ranks = f"all {self.num_ranks} ranks" if self.num_ranks > 1 else "the only rank"
        text = f"{same}{self.num_compared:,} tensors and numbers are the same on {ranks}"
        if self.may_differ:
            names = format_names(self.may_differ, noun="tensors")
            text += f"\nnote: these differ, as the contract of the wrapped module allows now: {names}"
        return text


def check_replicas(target: Any, *, group: Group = None) -> ReplicaReport:
    """Raise if `target` is not the same on all ranks, bit for bit.

    Each rank reduces its tensors to numbers of 64 bits, by exact integer arithmetic on the tensors' own device. Memory
    for copies is bounded. Equal replicas cost one small collective; if they differ, a few more locate the elements.
    Equal means the same bits: 0.0 and -0.0 differ, and so do NaNs with different payloads. A difference is missed with
    a probability of about 2**-64. Nothing is changed.

    Args:
        target: one of these. Tied tensors are compared once.

            A Module: its parameters and buffers. Of a wrapped one, only what its contract guarantees to be equal now
            must be equal; of `ddp.module`, everything.

            An Optimizer: the tensors and numbers of its state and of its parameter groups.

            A Tensor, or nested dicts, lists and tuples of tensors.

            A `TrainState`: its step, modules, optimizers, scheduler and scaler. Per-rank state is left out: random
            numbers, the sampler's position, a shard of a sharded optimizer, floats of an optimizer's state, and
            further objects of yours. So is whatever a wrapped module's contract lets differ: buffers after a forward,
            tensors under `ignore=` and their optimizer state. Under a strategy that lets replicas drift these are also
            the scaler, the optimizer's state and, between two parameter syncs, parameters.
        group: see `broadcast_`.

    Returns:
        A report of what was compared, the same on every rank. If you print it, it ends with a note of what differs as
        the contract of a wrapped module allows (BatchNorm's buffers after a forward; parameters between two parameter
        syncs, for example under `sl.LocalSGD`; tensors under `ignore=`).

    Raises:
        ReplicaDivergence: values differ that must be equal. The message has the first tensors in the target's order,
            their differing elements and how many there are, and the ranks in the minority; it is the same on every
            rank.
        ContractMismatch: the ranks' targets have different names, shapes or dtypes; the same text on every rank.
        TypeError, ValueError: `target` is or contains something else, or is a sharded optimizer; on every rank.

    Example:
        >>> import torch, syncline as sl
        >>> model = torch.nn.Linear(2, 1)
        >>> print(sl.check_replicas(model))
        2 tensors and numbers are the same on the only rank
        >>> state = sl.TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters()))
        >>> sl.check_replicas(state).may_differ
        ()
    """
    transport = transport_of(group)
    with transport.turn:

        def prepare() -> Prepared[tuple[_Compared, list[int]]]:
            read = _Compared()
            if isinstance(target, TrainState):
                read.add_state(target)
            else:
                read.add(target)
            mine = fingerprints(read.values)
            payload = digest_of(_without(read.may_differ, mine)) + digest_of(mine)
            return Prepared((read, mine), read.lines, payload)

        (read, mine), rows = agree_on_call(transport, _TITLE, prepare, remedy=_REMEDY)
        apart = read.may_differ
        if len({row[:_DIGEST_BYTES] for row in rows}) > 1:
            names, values, compared = (_without(apart, each) for each in (read.names, read.values, mine))
            found = locate(names, values, transport, mine=compared)
            raise _divergence(found, len(compared), transport.size)
        noted = [] if len(set(rows)) == 1 else differing(read.names, mine, transport)
        equal = _without({one.index for one in noted}, read.values)
        record_equal([value for value in equal if isinstance(value, Tensor)], by_writing=False)
        return ReplicaReport(
            num_ranks=transport.size,
            num_compared=len(mine),
            may_differ=tuple(one.name for one in noted),
        )


def _without(places: Set[int], values: Sequence[Any]) -> list[Any]:
    return [value for place, value in enumerate(values) if place not in places]


class _Compared:
    """The values to compare, with their names and the rules for them."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.values: list[Any] = []
        """Tensors and numbers."""
        self.lines: list[str] = []
        """The description that must be equal on all ranks before values can be compared."""
        self.may_differ: set[int] = set()
        """Indices of the tensors that the contract of a wrapped module lets differ now."""

    def add(self, target: Any) -> None:
        """Add all of a module, an optimizer or a tree of tensors."""
        refuse_sharded(target, "so there is nothing to compare")
        if isinstance(target, Optimizer):
            self.add_optimizer(target)
        else:
            self.add_tensors(named_tensors(target, for_writing=False), "")
        if isinstance(target, nn.Module) and any(_wrapped_in(target)):
            equal = {id(tensor) for _, tensor in _expected_equal(target)}
            for wrapper in _wrapped_in(target):
                if any(one.has_diverged and not one.is_open for one in divergences_around(wrapper.module)):
                    equal.update(
                        id(parameter) for parameter in wrapper.parameters()
                    )  # to detect whether drifted replicas are equal again
            self.may_differ = {place for place, value in enumerate(self.values) if id(value) not in equal}

    def add_optimizer(self, optimizer: Optimizer, prefix: str = "", *, own: Set[int] | None = None) -> None:
        """Add an optimizer's tensors and numbers, but only those that are equal on all ranks if `own` is given.

        Args:
            optimizer: the optimizer.
            prefix: a prefix for names.
            own: ids of the parameters that each rank updates independently. If given, floats of the state count as
                per rank as well, such as the last loss that LBFGS keeps.
        """
        left_out = () if own is None else _state_prefixes(optimizer, own)
        found = [
            (path, leaf)
            for path, leaf in optimizer_leaves(optimizer)
            if not path.startswith(left_out)
            and (own is None or is_setting(path) or not isinstance(leaf, float))
        ]
        tensors = [(path, leaf) for path, leaf in found if isinstance(leaf, Tensor)]
        self.add_tensors(distinct_tensors(tensors, for_writing=False), prefix)
        self.lines += [
            prefix + line for line in OptimizerNumbers(optimizer).lines if not line.startswith(left_out)
        ]
        for path, leaf in found:
            if not isinstance(leaf, Tensor):
                self.names.append(prefix + path)
                self.values.append(leaf)

    def add_tensors(self, named: Sequence[tuple[str, Tensor]], prefix: str) -> None:
        """Add tensors, with a prefix for their names."""
        prefixed = [(prefix + name, tensor) for name, tensor in named]
        self.lines += describe_tensors(prefixed, kind="tensor", layout=False)
        self.names += [name for name, _ in prefixed]
        self.values += [tensor for _, tensor in prefixed]

    def add_state(self, state: TrainState) -> None:
        """Add the parts of a TrainState that must be equal on all ranks."""
        self.names.append("step")
        self.values.append(state.step)
        wrappers = _wrappers(state)
        apart = {id(p) for one in wrappers if _is_drifting(one) for p in one.parameters()}
        ignored = {
            id(p)
            for one in wrappers
            for n, p in one.module.named_parameters()
            if n in one.parameters_to_ignore
        }
        for name, one in state.named.items():
            prefix = f"{name}."
            if isinstance(one, nn.Module):
                self.add_tensors(_expected_equal(one), prefix)
            elif isinstance(one, Optimizer):
                if not is_sharded(one) and not any(id(p) in apart for p in parameters_of(one)):
                    self.add_optimizer(one, prefix, own=ignored)
            elif name == "scheduler" or (name == "scaler" and not apart):
                with calling(f"state_dict() of {name} ({type(one).__name__})"):
                    content = one.state_dict()
                tree, tensors = encode(content, name)
                self.add_tensors(list(tensors.items()), "")
                self.names.append(name)
                self.values.append(json.dumps(tree))


def _wrappers(state: TrainState) -> list[Any]:
    """Return the modules wrapped by torch or Syncline among the named ones and inside of them."""
    modules = [one for one in state.named.values() if isinstance(one, nn.Module)]
    return [part for one in modules for part in _wrapped_in(one)]


def _wrapped_in(module: nn.Module) -> Iterator[DistributedDataParallel]:
    return (part for part in module.modules() if isinstance(part, DistributedDataParallel))


def _is_drifting(wrapper: nn.Module) -> bool:
    """Return whether ranks update the replicas of a wrapped module differently; torch's wrapper never lets them."""
    replica = replica_of(wrapper)
    return replica is not None and replica.is_drifting


def _expected_equal(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the tensors of a module that must be equal on all ranks, by name, according to the wrappers inside."""
    if isinstance(module, DistributedDataParallel):
        replica = replica_of(module)
        if replica is not None:
            return replica.equal_tensors()
        ignored = module.parameters_to_ignore
        # Under torch's wrapper, buffers differ after a forward.
        return [(name, p) for name, p in module.module.named_parameters() if name not in ignored]
    wrapped = {
        name: part for name, part in module.named_modules() if isinstance(part, DistributedDataParallel)
    }
    outermost = {name: part for name, part in wrapped.items() if not _is_below(name, wrapped)}
    found = [
        (n, tensor) for n, tensor in named_tensors(module, for_writing=False) if not _is_below(n, outermost)
    ]
    for name, part in outermost.items():
        found += [(f"{name}.{inner}", tensor) for inner, tensor in _expected_equal(part)]
    return found


def _is_below(name: str, others: Iterable[str]) -> bool:
    return any(name.startswith(f"{other}.") for other in others)


def _state_prefixes(optimizer: Optimizer, own: Set[int]) -> tuple[str, ...]:
    """Return the prefixes of the paths to the state of these parameters."""
    places = enumerate(parameters_of(optimizer))
    return tuple(f"state[{place}]" for place, parameter in places if id(parameter) in own)


def _divergence(found: Sequence[Difference], num_compared: int, num_ranks: int) -> ReplicaDivergence:
    source = "src=<a rank of the majority>" if any(one.minority for one in found) else "src=..."
    return divergence_error(
        _TITLE,
        found,
        num_compared=num_compared,
        num_ranks=num_ranks,
        remedy=f"sl.broadcast_(target, {source}) makes them equal again. Then look for the cause, such as a buffer, "
        "a seed, or a step on some ranks only.",
    )
