"""The schedule by which ranks compare their replicas.

The leaves of a replica are its tensors and integers. The leaves are divided into slices. Each step compares one slice,
so that a fixed number of steps compares the whole replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from syncline.equality.fingerprint import SliceHash, mixed
from syncline.equality.leaves import Leaf, optimizer_leaves_of

_OVERHEAD_BYTES = 1 << 14
"""The fixed time of hashing a tensor of any size, as the number of bytes that could be hashed in this time."""

_LEAST_BYTES = 1 << 18
"""The least cost of a slice, in bytes. A small replica is divided into fewer slices, and some steps compare nothing."""

_LISTED_ANEW = 8
"""The number of rotations after which the tensors are listed again at the latest. A rotation is `every` steps."""

_ALIGNMENT_NUMEL = 64
"""Tensors are cut at multiples of this number of elements. So each piece except the last consists of whole 64-bit
words."""


class Piece(NamedTuple):
    """A range of elements of one tensor, in memory order."""

    leaf: int
    """Index of the tensor in the list of leaves."""
    start: int
    """Index of the first element."""
    stop: int
    """Index after the last element."""


def rotation(sizes: Sequence[tuple[int, int]], num_slices: int) -> list[tuple[Piece, ...]]:
    """Divide tensors among slices of about the same cost, in order. Return the pieces of each slice.

    A large tensor is cut into several pieces.

    Args:
        sizes: (numel, itemsize) of each tensor. A tensor without elements becomes one piece.
        num_slices: the number of slices; some may be empty.

    Examples:
        >>> [[tuple(piece) for piece in pieces] for pieces in rotation([(10_000, 4), (3, 8)], 2)]
        [[(0, 0, 5056)], [(0, 5056, 10000), (1, 0, 3)]]
    """
    total_bytes = sum(numel * itemsize + _OVERHEAD_BYTES for numel, itemsize in sizes)
    budget_bytes = max(1, -(-total_bytes // num_slices))
    slices: list[list[Piece]] = [[] for _ in range(num_slices)]
    at = 0
    for leaf, (numel, itemsize) in enumerate(sizes):
        index = min(at // budget_bytes, num_slices - 1)
        begins = at + _OVERHEAD_BYTES
        start = 0
        while start < numel or not numel:
            left_bytes = (index + 1) * budget_bytes - begins
            stop = numel
            if index < num_slices - 1 and left_bytes < numel * itemsize:
                stop = max(start, -(-left_bytes // (itemsize * _ALIGNMENT_NUMEL)) * _ALIGNMENT_NUMEL)
                stop = min(stop, numel)
            if stop > start or not numel:
                slices[index].append(Piece(leaf, start, stop))
                start = stop
            index += 1
            if not numel:
                break
        at = begins + numel * itemsize
    return [tuple(pieces) for pieces in slices]


def spread(sizes: Sequence[tuple[int, int]], num_turns: int) -> list[tuple[Piece, ...]]:
    """Divide tensors among `num_turns` turns of about the same cost. Return the pieces of each turn.

    The tensors are cut as by `rotation`. If they are small, there are fewer slices than turns. The slices are then
    spread evenly over the turns, and the other turns are empty.

    Args:
        sizes: (numel, itemsize) of each tensor.
        num_turns: the number of turns.

    Examples:
        >>> [len(pieces) for pieces in spread([(50_000, 4), (50_000, 4)], 5)]
        [1, 0, 1, 0, 0]
    """
    total_bytes = sum(numel * itemsize + _OVERHEAD_BYTES for numel, itemsize in sizes)
    num_slices = max(1, min(num_turns, -(-total_bytes // _LEAST_BYTES)))
    turns: list[tuple[Piece, ...]] = [()] * num_turns
    for index, pieces in enumerate(rotation(sizes, num_slices)):
        turns[index * num_turns // num_slices] = pieces
    return turns


class Coverage:
    """The leaves of a replica, divided into slices. For each slice it records when all ranks last agreed.

    It also holds the hashes of the slices that are compared next.

    The step number alone determines which slice is compared. Ranks may list their leaves at different steps.
    So the slices depend only on the names and sizes of the leaves, and not on the step at which they were listed.

    Args:
        every: the number of slices, which is also the number of steps that compare all leaves.
        agreed_at: the step at which all ranks last agreed on the leaves. Pass None if it is unknown.
    """

    def __init__(self, every: int, agreed_at: int | None) -> None:
        self.leaves: Sequence[Leaf] = ()
        self.hashes: list[SliceHash] = []
        """The hashes that were computed since the last comparison."""
        self._steps = range(0)
        """The steps whose slices were hashed last."""
        self._forms: list[tuple[str, int, int]] | None = None
        """The name, numel and itemsize of each leaf. It is None until the leaves are listed."""
        self._slices: list[tuple[Piece, ...]] = [()] * every
        self._agreed_at = [agreed_at] * every
        """The step at which all ranks last agreed on each slice. It is None if unknown."""

    @property
    def is_listed(self) -> bool:
        """Whether the leaves have been listed."""
        return self._forms is not None

    def list_again(self, leaves: Sequence[Leaf]) -> None:
        """Replace the leaves by the replica's present leaves. Divide them again if names or sizes have changed."""
        forms = _forms(leaves)
        if forms != self._forms:
            agreed_by_leaf, agreed_on_all = self._agreed_by_leaf(), self.all_agreed_at
            before = {leaf.name: agreed for leaf, agreed in zip(self.leaves, agreed_by_leaf, strict=True)}
            self._forms, self._slices = forms, spread([form[1:] for form in forms], len(self._slices))
            for index, pieces in enumerate(self._slices):
                names = [leaves[piece.leaf].name for piece in pieces]
                known = [before[name] for name in names if name in before]
                self._agreed_at[index] = _earliest(known) if known else agreed_on_all
        self.leaves = leaves

    def _agreed_by_leaf(self) -> list[int | None]:
        found: list[list[int | None]] = [[] for _ in self.leaves]
        for agreed, pieces in zip(self._agreed_at, self._slices, strict=True):
            for piece in pieces:
                found[piece.leaf].append(agreed)
        return [_earliest(agreed) for agreed in found]

    def hash(self, steps: range) -> None:
        """Hash the slices that belong to these steps."""
        self._steps = steps
        pieces = [piece for index in self._indices(steps) for piece in self._slices[index]]
        if not pieces:
            return
        one = SliceHash()
        for index, start, stop in pieces:
            leaf = self.leaves[index]
            one.add(index, leaf.value(), start, stop, in_memory_order=leaf.has_agreed_strides)
        self.hashes.append(one)

    def hashes_by_leaf(self) -> dict[int, int]:
        """Return one hash for each leaf, by the leaf's index. It covers all hashed pieces of the leaf.

        Leaves without hashed pieces are left out.
        """
        found: dict[int, int] = {}
        for one in self.hashes:
            for leaf, number in one.by_leaf().items():
                found[leaf] = mixed(found.get(leaf, 0), number)
        return found

    def agreed(self, at: int) -> None:
        """Record that all ranks' hashes were equal at step `at`."""
        if self.hashes:
            for index in self._indices(self._steps):
                self._agreed_at[index] = at

    def all_agreed(self, at: int | None) -> None:
        """Record that all leaves were equal on all ranks at step `at`. Pass None if this is no longer known."""
        self._agreed_at = [at] * len(self._slices)

    def _indices(self, steps: range) -> list[int]:
        return sorted({step % len(self._slices) for step in steps[: len(self._slices)]})

    def agreed_at(self, leaf: int) -> int | None:
        """Return the last step at which all ranks agreed on every piece of a leaf. Return None if it is unknown."""
        return self._agreed_by_leaf()[leaf]

    @property
    def all_agreed_at(self) -> int | None:
        """The last step at which all ranks agreed on every leaf. It is None if unknown."""
        slices = zip(self._agreed_at, self._slices, strict=True)
        return _earliest(agreed for agreed, pieces in slices if pieces or not self.is_listed)


def _earliest(steps: Iterable[int | None]) -> int | None:
    known = list(steps)
    return None if None in known or not known else min(step for step in known if step is not None)


def _forms(leaves: Sequence[Leaf]) -> list[tuple[str, int, int]]:
    forms = []
    for leaf in leaves:
        value = leaf.value()
        is_tensor = isinstance(value, Tensor)
        forms.append((leaf.name, value.numel() if is_tensor else 0, value.element_size() if is_tensor else 1))
    return forms


class Listing:
    """The list of the leaves of parameters and optimizer state, which is made again when the state may have changed.

    An optimizer creates its state in its first step, and loading replaces the state. Listing takes microseconds per
    tensor. So the leaves are listed again if entries were added to the state. If none were added, they are
    listed again once in several rotations.

    Args:
        parameters: the leaves of the parameters.
        optimizers: a function that returns the optimizers whose state must be equal on all ranks at present.
        own: the ids of the parameters.
        every: the number of steps in one rotation. A rotation compares all leaves.
    """

    def __init__(
        self,
        parameters: Sequence[Leaf],
        optimizers: Callable[[], Sequence[Optimizer]],
        own: set[int],
        every: int,
    ) -> None:
        self._parameters = parameters
        self._optimizers = optimizers
        self._own = own
        self._every = every
        self._states: list[tuple[int, int]] | None = None
        """Identities and sizes of the optimizers' state. A change of the state is detected by them."""
        self._num_entries = 0

    def changed(self, steps: range) -> list[Leaf] | None:
        """Return all leaves if they may have changed since the last call. Return None otherwise.

        Args:
            steps: the steps since the last comparison, up to the present step.
        """
        optimizers, every = self._optimizers(), self._every
        states = [(id(optimizer.state), len(optimizer.state)) for optimizer in optimizers]
        if any(step % every == 0 for step in steps[:every]):
            kept = (one for optimizer in optimizers for one in optimizer.state.values())
            self._num_entries = sum(len(one) for one in kept if isinstance(one, dict))
        is_due = any(step % (_LISTED_ANEW * every) == 0 for step in steps[: _LISTED_ANEW * every])
        states.append((self._num_entries, int(is_due)))
        if states == self._states:
            return None
        self._states = states
        return [*self._parameters, *optimizer_leaves_of(optimizers, self._own)]
