"""Rotating fingerprints: in each step a slice of the replica is compared with the other ranks', by some bytes that
travel with the gradients.

A step's slice is hashed when its backward begins, for then nobody writes: parameters and optimizer state were last
written by the optimizer's step, which all ranks have made. The fingerprint rides in the control data (`control.py`), so
equal replicas send nothing else. Only where fingerprints differ do the ranks look for the elements (`replicas.py`).
Buffers change in forward; those that were just synchronized are hashed before it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from syncline.errors import ReplicaDivergence
from syncline.plan.difference import describe_ranks
from syncline.plan.rotation import Piece, rotation
from syncline.sync.broadcasting import TensorBroadcaster
from syncline.sync.control import MAX_REPLICA_FINGERPRINT
from syncline.sync.fingerprint import SliceHash
from syncline.sync.optimizers import parameters_of
from syncline.sync.replicas import LocatedDifference, divergence_error, locate
from syncline.sync.tensors import distinct_tensors
from syncline.transport.base import Transport

__all__ = ["ReplicaCheck", "ReplicaWatch"]

OnDivergence = Literal["raise", "repair", "warn"]
_POLICIES = ("raise", "repair", "warn")


@dataclass(frozen=True, slots=True)
class ReplicaCheck:
    """Compare replicas while training: in each step a slice, and all of it within `every` steps.

    For `DistributedDataParallel(replica_check=...)`. Parameters, the state of attached optimizers, and buffers right
    after they were synchronized are boiled down to fingerprints, which travel with the gradients. What the contract
    lets differ (buffers that are a rank's own, parameters between two meetings of a strategy) is not compared.

    Args:
        every: within so many steps all has had its turn, so that a difference is found.
        on_divergence: "raise" `ReplicaDivergence` on every rank, before the optimizer steps; "repair": the majority's
            values are broadcast, with a warning (where no more than half of the ranks agree, as of two ranks, that
            would be a guess: it raises); "warn": a warning on rank 0, and training goes on.

    Raises:
        TypeError, ValueError: something else.

    Example:
        >>> import torch, syncline as sl
        >>> check = sl.ReplicaCheck(every=50)
        >>> ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1), replica_check=check)
    """

    every: int = 100
    on_divergence: OnDivergence = "raise"

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int):
            raise TypeError(f"expected every to be an integer of at least 1, got {self.every!r}")
        if self.every < 1:
            raise ValueError(f"expected every to be an integer of at least 1, got {self.every}")
        if self.on_divergence not in _POLICIES:
            raise ValueError(
                f"expected on_divergence to be one of {', '.join(map(repr, _POLICIES))}, got {self.on_divergence!r}"
            )


class _Leaf(NamedTuple):
    """One tensor or number of the replica, and where it is to be found when its turn comes."""

    name: str
    tensor: Tensor | None = None
    """A parameter; None for what may be replaced, which is looked up."""
    within: Mapping[Any, Any] = {}
    keys: tuple[Any, ...] = ()

    def value(self) -> Any:
        """What it is now; None where it is gone."""
        if self.tensor is not None:
            return self.tensor
        found: Any = self.within
        for key in self.keys:
            found = found.get(key)
            if found is None:
                return None
        return found


class _Coverage:
    """Some leaves, dealt out to slices whose turn it is one after the other.

    Args:
        leaves: the same on all ranks.
        num_slices: in which all have had their turn.
        agreed_at: the step at which all ranks agreed on them last.
    """

    def __init__(self, leaves: Sequence[_Leaf], num_slices: int, agreed_at: int) -> None:
        self.leaves = leaves
        self.num_slices = num_slices
        self.turn = 0
        self._forms = _forms(leaves)
        self._slices = rotation([form[1:] for form in self._forms], num_slices)
        self._agreed_at = [agreed_at] * num_slices

    @property
    def begins_anew(self) -> bool:
        """Whether the first slice is next."""
        return not self.turn

    def fits(self) -> bool:
        """Whether everything has the size that it was dealt out by."""
        return _forms(self.leaves) == self._forms

    def take(self, num_slices: int = 1) -> tuple[list[int], list[Piece]]:
        """The next slices, and what is in them."""
        indices = [
            (self.turn + number) % self.num_slices for number in range(min(num_slices, self.num_slices))
        ]
        self.turn = (self.turn + num_slices) % self.num_slices
        return indices, [piece for index in indices for piece in self._slices[index]]

    def agreed(self, indices: Sequence[int], step: int) -> None:
        """All ranks had the same in these slices."""
        for index in indices:
            self._agreed_at[index] = step

    def agreed_at(self, leaf: int) -> int:
        """The step at which all ranks agreed on all of a leaf."""
        holding = [
            agreed
            for agreed, pieces in zip(self._agreed_at, self._slices, strict=True)
            if any(piece.leaf == leaf for piece in pieces)
        ]
        return min(holding, default=0)

    @property
    def all_agreed_at(self) -> int:
        """The step at which all ranks agreed on all of it."""
        return min(self._agreed_at)


def _forms(leaves: Sequence[_Leaf]) -> list[tuple[str, int, int]]:
    forms = []
    for leaf in leaves:
        value = leaf.value()
        is_tensor = isinstance(value, Tensor)
        forms.append((leaf.name, value.numel() if is_tensor else 0, value.element_size() if is_tensor else 1))
    return forms


class ReplicaWatch:
    """Compares the replicas of one module on one rank with those of its peers.

    Args:
        check: how often, and what to do.
        title: of the module, for messages.
        parameters: that have to be equal; the same on all ranks.
        buffers: names of those that take part, and where they are: a module's dictionary, and the key in it.
        optimizers: those whose state has to be equal, as they are now.
        transport: between the ranks that have to be equal.
    """

    def __init__(
        self,
        check: ReplicaCheck,
        title: str,
        parameters: Sequence[tuple[str, Tensor]],
        transport: Transport,
        *,
        buffers: Sequence[tuple[str, Mapping[str, Tensor | None], str]],
        optimizers: Callable[[], Sequence[Optimizer]],
    ) -> None:
        self.check = check
        self.last_agreed_at: int | None = None
        """The step of the last comparison that found nothing."""
        self.num_compared = 0
        """Comparisons so far."""
        self.num_repairs = 0
        self._title = title
        self._transport = transport
        self._parameters = [_Leaf(name, tensor) for name, tensor in distinct_tensors(parameters)]
        self._own = {id(tensor) for _, tensor in parameters}
        self._buffer_leaves = [_Leaf(name, within=owner, keys=(key,)) for name, owner, key in buffers]
        self._optimizers = optimizers
        self._states: list[tuple[int, int]] = []
        self._coverage: _Coverage | None = None
        self._buffer_coverage: _Coverage | None = None
        self._slice: list[int] = []
        self._hash: SliceHash | None = None
        self._buffer_slice: list[int] = []
        self._buffer_hash: SliceHash | None = None
        self._warned: set[str] = set()
        self._was_finite = True

    # ------------------------------------------------------------------ each step

    def buffers_are_equal(self, step: int) -> None:
        """Buffers have just been synchronized: look at the slice whose turn it is, before forward changes them."""
        coverage = self._buffer_coverage
        if coverage is None or (coverage.begins_anew and not coverage.fits()):
            coverage = self._buffer_coverage = _Coverage(self._buffer_leaves, self.check.every, step)
        self._buffer_slice, pieces = coverage.take()
        self._buffer_hash = _hashed(coverage.leaves, pieces)

    def begin(self, step: int, num_slices: int = 1) -> None:
        """A backward begins that is going to be reduced: look at the slice whose turn it is."""
        coverage = self._coverage
        optimizers = self._optimizers()
        # State of an optimizer appears with its first step, and is replaced by what is loaded.
        states = [(id(optimizer.state), len(optimizer.state)) for optimizer in optimizers]
        if coverage is None or states != self._states or (coverage.begins_anew and not coverage.fits()):
            agreed_at = 0 if coverage is None else coverage.all_agreed_at
            leaves = [*self._parameters, *self._optimizer_leaves(optimizers)]
            coverage = self._coverage = _Coverage(leaves, self.check.every, agreed_at)
            self._states = states
        self._slice, pieces = coverage.take(num_slices)
        self._hash = _hashed(coverage.leaves, pieces)

    def _optimizer_leaves(self, optimizers: Sequence[Optimizer]) -> list[_Leaf]:
        leaves = []
        for number, optimizer in enumerate(optimizers):
            prefix = f"optimizer {number} ({type(optimizer).__name__}), "
            for index, parameter in enumerate(parameters_of(optimizer)):
                # `state` is a defaultdict: asking it for a parameter without state would make one.
                if id(parameter) in self._own and parameter in optimizer.state:
                    leaves += [
                        _Leaf(f"{prefix}state[{index}].{key}", within=optimizer.state, keys=(parameter, key))
                        for key, value in optimizer.state[parameter].items()
                        if isinstance(value, Tensor | int | float)
                    ]
        return leaves

    def fingerprint(self) -> int:
        """Of this step's slices; never 0."""
        total = 0
        for one in (self._hash, self._buffer_hash):
            total = (total * 0x9E3779B97F4A7C15 + (0 if one is None else one.value())) % (1 << 64)
        return 1 + total % MAX_REPLICA_FINGERPRINT

    def compare(self, told: Sequence[int], step: int) -> None:
        """What all ranks told. Collective where it differs.

        Args:
            told: the fingerprint of each rank.
            step: the step under way.

        Raises:
            ReplicaDivergence: replicas differ, and so it was wanted; on every rank.
        """
        self.num_compared += 1
        if len(set(told)) == 1:
            if self._coverage is not None:
                self._coverage.agreed(self._slice, step)
            if self._buffer_hash is not None and self._buffer_coverage is not None:
                self._buffer_coverage.agreed(self._buffer_slice, step)
            self.last_agreed_at = step
        else:
            self._differ(step)

    def mean_is(self, finite: bool, step: int) -> None:
        """What was reduced in this step is finite, as far as a sample tells; the same on all ranks.

        A bit that flips in an exponent can make gradients infinite, so that the next step would write NaN into all
        replicas alike, and nothing would be left to find. So when it begins, all is compared at once.

        Raises:
            ReplicaDivergence: replicas differ, and so it was wanted; on every rank.
        """
        was_finite, self._was_finite = self._was_finite, finite
        if was_finite and not finite:
            self._differ(step, must=False)

    def forget(self) -> None:
        """The step is over."""
        self._hash = self._buffer_hash = None

    # ------------------------------------------------------------------ where replicas differ

    def _differ(self, step: int, *, must: bool = True) -> None:
        """Look for what differs, all over the replica; `must`: something does."""
        assert self._coverage is not None
        title = f"{self._title}, step {step}, replica check"
        leaves = self._coverage.leaves
        names, values = [leaf.name for leaf in leaves], [leaf.value() for leaf in leaves]
        self._check_structure(title, names, values)
        found = locate(names, values, self._transport)
        agreed_at = None
        if found:
            agreed_at = self._coverage.agreed_at(found[0].index)
        num_compared = len(names)
        if not found and self._buffer_hash is not None and self._buffer_coverage is not None:
            found, num_compared = self._differing_buffers(), len(self._buffer_coverage.leaves)
            agreed_at = self._buffer_coverage.all_agreed_at
        if not found and not must:
            return
        if not found:
            raise ReplicaDivergence(
                f"{title}: fingerprints of the ranks differed when backward began, but all values are equal now that "
                "it has ended: something writes parameters or optimizer state while a backward is under way, on some "
                "ranks only. Write between the steps, on all ranks",
                tensor="",
                num_differing=0,
                minority_ranks=(),
                found_at_step=step,
            )
        error = divergence_error(
            title,
            found,
            num_compared=num_compared,
            num_ranks=self._transport.size,
            remedy=self._remedy(agreed_at),
            agreed_at=agreed_at,
            step=step,
        )
        self._act(error, found, values, step)

    def _remedy(self, agreed_at: int | None) -> str:
        back = "" if not agreed_at else f" Go back to a checkpoint of step {agreed_at} or before, or"
        return (
            "A bit that flipped, a write on some ranks only, or an operation whose result differs between ranks "
            f"(`syncline doctor` looks for such).{back or ' To go on,'} make them equal by sl.broadcast_(ddp, src=...)."
        )

    def _check_structure(self, title: str, names: Sequence[str], values: Sequence[Any]) -> None:
        """Raise unless all ranks have state for the same parameters, of the same shapes; a collective call."""
        lines = [
            f"{name}  {value.dtype} {tuple(value.shape)}"
            if isinstance(value, Tensor)
            else f"{name}  a number"
            for name, value in zip(names, values, strict=True)
        ]
        told = self._transport.all_gather_bytes("\n".join(lines).encode())
        if len(set(told)) == 1:
            return
        rows = [set(row.decode().split("\n")) for row in told]
        everywhere = set.intersection(*rows)
        apart = "; ".join(
            f"rank {rank} alone or with some: {', '.join(sorted(row - everywhere)[:3])}"
            for rank, row in enumerate(rows)
            if row - everywhere
        )
        raise ReplicaDivergence(
            f"{title}: expected optimizers with state of the same names and shapes on all ranks; {apart}. Step "
            "attached optimizers equally often, with the same parameters, on every rank",
            tensor=sorted(set.union(*rows) - everywhere)[0].split("  ")[0],
            num_differing=len(set.union(*rows) - everywhere),
            minority_ranks=(),
        )

    def _differing_buffers(self) -> list[LocatedDifference]:
        """Which of the slice's buffers differed before forward changed them; a collective call."""
        assert self._buffer_hash is not None
        assert self._buffer_coverage is not None
        hashes = self._buffer_hash.by_leaf()
        leaves = self._buffer_coverage.leaves
        names = [leaves[index].name for index in hashes]
        return locate(names, [None] * len(names), self._transport, mine=list(hashes.values()))

    def _act(
        self, error: ReplicaDivergence, found: Sequence[LocatedDifference], values: Sequence[Any], step: int
    ) -> None:
        assert self._coverage is not None
        policy = self.check.on_divergence
        can_repair = all(
            one.difference.majority and isinstance(values[one.index], Tensor) and one.shape is not None
            for one in found
        )
        if policy == "raise" or (policy == "repair" and not can_repair):
            raise error
        text = str(error)
        if policy == "repair":
            for one in found:
                src = one.difference.groups[0][0]
                TensorBroadcaster([values[one.index].detach()], self._transport).start(src).wait()
            self.num_repairs += 1
            self._coverage.agreed(range(self._coverage.num_slices), step)
            sources = sorted({one.difference.groups[0][0] for one in found})
            text += (
                f"\nRepaired: the values of {describe_ranks(sources)} were broadcast, and training goes on."
            )
        elif {one.name for one in found} <= self._warned:
            return  # said before
        self._warned |= {one.name for one in found} if policy == "warn" else set()
        if self._transport.rank == 0:
            warnings.warn(text, RuntimeWarning, stacklevel=2)


def _hashed(leaves: Sequence[_Leaf], pieces: Sequence[Piece]) -> SliceHash:
    found = SliceHash()
    for piece in pieces:
        found.add(piece.leaf, leaves[piece.leaf].value(), piece.start, piece.stop)
    return found
