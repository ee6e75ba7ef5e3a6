"""The verb `check_replicas`, which verifies that replicas are equal, bit for bit."""

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
from syncline.checks import suggests_arguments
from syncline.equality.fingerprint import digest_of, fingerprints
from syncline.equality.locate import differing, divergence_error, emit_divergence, locate
from syncline.gradients.wrapper_protocol import replica_of
from syncline.optimizers.contents import OptimizerNumbers, is_setting, optimizer_leaves, parameters_of
from syncline.session.world import transport_of
from syncline.sharded.attached import is_sharded
from syncline.tensors.targets import distinct_tensors, named_tensors
from syncline.transport.agreement import describe_tensors
from syncline.user_code import calling
from syncline.verbs.common import Group, Prepared, agree_on_call, refuse_sharded, verb
from syncline.verbs.diverge import divergences_around, record_equal
from syncline.words import format_names, one_line

_TITLE = "sl.check_replicas"

_DIGEST_BYTES = 32

_REMEDY = (
    "Pass the same tensors in the same containers on every rank. (Of tied tensors, only the first is named.)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaReport:
    """The report that `check_replicas` returns.

    Attributes:
        num_ranks: the number of ranks that were compared.
        num_compared: the number of tensors and numbers that were compared.
        may_differ: the names of the tensors that differ, and that the contract of the wrapped module allows to differ.
            Examples are buffers after a forward, parameters between two parameter syncs, and tensors under
            `ignore=`.

    Examples:
        >>> print(ReplicaReport(num_ranks=2, num_compared=7, may_differ=("1.running_mean",)))
        6 of 7 tensors and numbers are the same on all 2 ranks
        note: these tensors differ, which the contract of the wrapped module allows now: 1.running_mean
    """

    num_ranks: int
    num_compared: int
    may_differ: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return one_line(self, str(self).partition("\n")[0])

    def __str__(self) -> str:
        num_same = self.num_compared - len(self.may_differ)
        same = f"{num_same:,} of " if self.may_differ else ""
        ranks = f"all {self.num_ranks} ranks" if self.num_ranks > 1 else "the only rank"
        text = f"{same}{self.num_compared:,} tensors and numbers are the same on {ranks}"
        if self.may_differ:
            names = format_names(self.may_differ, noun="tensors")
            text += (
                f"\nnote: these tensors differ, which the contract of the wrapped module allows now: {names}"
            )
        return text


@suggests_arguments
def check_replicas(target: Any, *, group: Group = None) -> ReplicaReport:
    """Raise an error if `target` is not the same on all ranks, bit for bit. `target` does not change.

    Each rank computes a 64-bit fingerprint of each tensor, by exact integer arithmetic on the device of the tensor. The
    memory for copies is bounded. The comparison takes one small collective. If the replicas differ, a few more
    collectives locate the elements that differ. Equal means the same bits: 0.0 and -0.0 differ, and so do NaNs
    with different payloads. The probability that a difference stays undetected is about 2**-64.

    Args:
        target: one of the following objects. Tied tensors are compared once.

            A Module: its parameters and buffers are compared. In a wrapped module, only those tensors must be equal
            that the contract requires to be equal at present. In `ddp.module`, all tensors must be equal.

            An Optimizer: the tensors and numbers of its state and of its parameter groups are compared.

            A Tensor, or nested dicts, lists and tuples of tensors.

            A `TrainState`: its step, modules, optimizers, scheduler and scaler are compared. State that each rank has
            for itself is not compared: random numbers, the position of the sampler, the shard of a sharded optimizer,
            floats in the state of an optimizer, and your further objects. State that the contract of a wrapped module
            allows to differ is not compared either: buffers after a forward, tensors under `ignore=`, and the optimizer
            state of such tensors. Under a strategy with drift, this includes the scaler, the optimizer state and,
            between two parameter syncs, the parameters.
        group: see `broadcast_`.

    Returns:
        A report, which is the same on every rank. The contract of a wrapped module allows some tensors to differ:
        BatchNorm's buffers after a forward, parameters between two parameter syncs (as under `sl.LocalSGD`), and
        tensors under `ignore=`. If such tensors differ, the printed report ends with a note.

    Raises:
        ReplicaDivergence: some values that must be equal differ. The text names the first tensors that differ, their
            differing elements, the number of differences, and the ranks in the minority. The text is the same on every
            rank.
        ContractMismatch: the targets of the ranks have different names, shapes or dtypes. The text is the same on every
            rank.
        TypeError, ValueError: `target` has an unsupported type, contains something other than tensors, or is a sharded
            optimizer. Every rank raises the error.

    Examples:
        >>> import torch, syncline as sl
        >>> model = torch.nn.Linear(2, 1)
        >>> print(sl.check_replicas(model))
        2 tensors and numbers are the same on the only rank
        >>> state = sl.TrainState(model=model, optimizer=torch.optim.AdamW(model.parameters()))
        >>> sl.check_replicas(state).may_differ
        ()
    """
    transport = transport_of(group)
    with verb(transport, "check_replicas"):

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
        if len({row[:_DIGEST_BYTES] for row in rows}) > 1:
            names, values, compared = (
                _without(read.may_differ, each) for each in (read.names, read.values, mine)
            )
            found = locate(names, values, transport, mine=compared)
            source = "src=<a rank of the majority>" if any(one.minority for one in found) else "src=..."
            error = divergence_error(
                _TITLE,
                found,
                num_compared=len(compared),
                num_ranks=transport.size,
                remedy=f"Call sl.broadcast_(target, {source}) to make the replicas equal again. Then look for the "
                "cause, such as a buffer that is not synchronized, seeds that differ, or an optimizer step that only "
                "some ranks made.",
            )
            emit_divergence(error, check=_TITLE, rank=transport.rank)
            raise error
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
    """The tensors and numbers that the ranks compare, with their names."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.values: list[Any] = []
        """The tensors and numbers, in the order of `names`."""
        self.lines: list[str] = []
        """The lines that describe the target. They must be equal on all ranks before the ranks can compare values."""
        self.may_differ: set[int] = set()
        """The indices in `values` of the tensors that the contract of a wrapped module allows to differ at present."""

    def add(self, target: Any) -> None:
        """Add all tensors and numbers of a module, an optimizer, a tensor, or nested containers of tensors."""
        refuse_sharded(target, "so the state cannot be compared between ranks")
        if isinstance(target, Optimizer):
            self.add_optimizer(target)
        else:
            self.add_tensors(named_tensors(target, for_writing=False), "")
        if isinstance(target, nn.Module) and any(_wrapped_in(target)):
            equal = {id(tensor) for _, tensor in _expected_equal(target)}
            for wrapper in _wrapped_in(target):
                if any(one.has_diverged and not one.is_open for one in divergences_around(wrapper.module)):
                    # After sl.diverge, the check finds out whether the replicas are equal again.
                    equal.update(id(parameter) for parameter in wrapper.parameters())
            self.may_differ = {place for place, value in enumerate(self.values) if id(value) not in equal}

    def add_optimizer(self, optimizer: Optimizer, prefix: str = "", *, own: Set[int] | None = None) -> None:
        """Add the tensors and numbers of an optimizer.

        Args:
            optimizer: the optimizer.
            prefix: the text to put before each name.
            own: ids of the parameters that each rank updates independently. Their state is left out. Floats in the
                state of all parameters, such as the last loss that LBFGS keeps, are left out as well. Pass None to add
                the whole state.
        """
        places = enumerate(parameters_of(optimizer))
        left_out = tuple(f"state[{place}]" for place, p in places if own is not None and id(p) in own)
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
        """Add named tensors, and put `prefix` before each name."""
        prefixed = [(prefix + name, tensor) for name, tensor in named]
        self.lines += describe_tensors(prefixed, kind="tensor", layout=False)
        self.names += [name for name, _ in prefixed]
        self.values += [tensor for _, tensor in prefixed]

    def add_state(self, state: TrainState) -> None:
        """Add the parts of a TrainState that must be equal on all ranks."""
        self.names.append("step")
        self.values.append(state.step)
        modules = [one for one in state.named.values() if isinstance(one, nn.Module)]
        apart = set()  # parameters whose replicas may differ
        ignored = set()
        for wrapper in (part for module in modules for part in _wrapped_in(module)):
            replica = replica_of(wrapper)
            if replica is not None and replica.is_drifting:
                apart |= set(map(id, wrapper.parameters()))
            named = wrapper.module.named_parameters()
            ignored |= {id(p) for name, p in named if name in wrapper.parameters_to_ignore}
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


def _wrapped_in(module: nn.Module) -> Iterator[DistributedDataParallel]:
    return (part for part in module.modules() if isinstance(part, DistributedDataParallel))


def _expected_equal(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the tensors that a module's wrappers require to be equal on all ranks by their contracts, with names."""
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
