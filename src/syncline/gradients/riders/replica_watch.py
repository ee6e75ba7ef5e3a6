"""Rotating fingerprints: each step compares one slice of the replica with the other ranks.

The step number determines the slice. It is hashed when the step's backward begins, because nothing writes to it then:
the last write to parameters and optimizer state was the optimizer's step, which all ranks have made. Buffers change in
forward, so those that were just synchronized are hashed before it.

The fingerprint travels with the gradients (`replicas.py`), so equal replicas send nothing else. Only if fingerprints
differ do the ranks search for the differing elements (`syncline.equality.locate`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from torch import Tensor
from torch.optim import Optimizer

from syncline.checks import checked_choice, checked_count, store
from syncline.equality.fingerprint import mixed
from syncline.equality.leaves import Leaf, parameter_leaves
from syncline.equality.locate import Difference, divergence_error, locate
from syncline.errors import ReplicaDivergence
from syncline.gradients.riders.coverage import Listing, Turns
from syncline.tensors.broadcasting import TensorBroadcaster
from syncline.tensors.targets import distinct_tensors
from syncline.transport.base import Transport
from syncline.user_code import warn_user
from syncline.words import describe_ranks

OnDivergence = Literal["raise", "repair", "warn"]

NUM_FINGERPRINT_BITS = 48
"""Number of bits of a slice's fingerprint."""

_MAX_FINGERPRINT: int = 2**NUM_FINGERPRINT_BITS - 1


@dataclass(frozen=True, slots=True)
class ReplicaCheck:
    """The settings of a replica comparison during training: one slice per step, the whole replica in `every` steps.

    For `DistributedDataParallel(replica_check=...)`. Fingerprints travel with the gradients. They cover parameters,
    the state of attached optimizers (tensors and integers), and buffers right after they were synchronized. Values
    that the contract allows to differ are not compared (each rank's own buffers, and parameters between two rounds of
    a strategy).

    Args:
        every: the number of steps in which the whole replica has had its turn, so that a difference is detected.
        on_divergence: "raise": `ReplicaDivergence` on every rank, before the optimizer steps. "repair": the values of
            the majority are broadcast, with a warning; it raises if no more than half of the ranks agree (as always
            with two ranks), because a repair would be a guess. "warn": a warning on rank 0, and training continues.

    Raises:
        TypeError, ValueError: an argument is not one of these.

    Example:
        >>> import torch, syncline as sl
        >>> check = sl.ReplicaCheck(every=50)
        >>> ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1), replica_check=check)
    """

    every: int = 100
    on_divergence: OnDivergence = "raise"

    def __post_init__(self) -> None:
        store(self, every=checked_count("every", self.every, at_least=1))
        checked_choice("on_divergence", self.on_divergence, get_args(OnDivergence))


class ReplicaWatch:
    """Comparison of one module's replica on this rank with those of its peers.

    Args:
        check: how often to compare, and what to do about a difference.
        title: name of the module, for messages.
        parameters: the parameters that have to be equal; the same on all ranks.
        transport: the transport between the ranks that have to be equal.
        buffers: the buffers that take part, as name, dictionary of the module that owns it, and key in that dictionary.
        optimizers: returns the optimizers whose state has to be equal at present.
        ranks: the numbers by which users know the ranks of `transport`.
        agreed_at: the last step at which all replicas were known to be equal; None if unknown.
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
        ranks: Sequence[int],
        agreed_at: int | None,
    ) -> None:
        self.check = check
        self.last_compared: tuple[int, bool] | None = None
        """The step of the last comparison, and whether all replicas were equal."""
        self.num_looks = 0
        """Number of backwards so far, including those whose slice was empty."""
        self.num_repairs = 0
        self.steps_before = 0
        """Number of steps before the run was resumed, which messages add to the step."""
        self._title = title
        self._transport = transport
        self._ranks = ranks
        named = distinct_tensors(parameters, for_writing=False)
        own = {id(tensor) for _, tensor in parameters}
        self._listing = Listing(parameter_leaves(named), optimizers, own, check.every)
        self._buffer_leaves = [
            Leaf(name, owner, (key,), has_agreed_strides=True) for name, owner, key in buffers
        ]
        self._turns = Turns(check.every, agreed_at)
        """The turns of parameters and of the optimizers' state."""
        self._buffer_turns = Turns(check.every, agreed_at)
        """The turns of buffers, with one hash per forward since the last backward."""
        self._warned: set[str] = set()
        self._was_finite = True

    def continues(self, former: ReplicaWatch) -> None:
        """Take over the state of a former object, because the module has changed."""
        self.last_compared, self.num_looks = former.last_compared, former.num_looks
        self.num_repairs, self._warned, self._was_finite = (
            former.num_repairs,
            former._warned,
            former._was_finite,
        )
        self.steps_before = former.steps_before
        self._turns.all_agreed(former._turns.all_agreed_at)
        if former._turns.coverage is None:
            self._buffer_turns.all_agreed(former._buffer_turns.all_agreed_at)

    def agreed_at(self, step: int | None) -> None:
        """Record that parameters and optimizer state were equal after a step; None if they were replaced."""
        self._turns.all_agreed(step)
        self._buffer_turns.all_agreed(None)

    # ------------------------------------------------------------------ each step

    def buffers_are_equal(self, step: int) -> None:
        """Hash the slice of buffers whose turn it is. Called after they are synchronized, before forward."""
        if self._buffer_turns.coverage is None or step % self.check.every == 0:
            self._buffer_turns.list_again(self._buffer_leaves)
        self._buffer_turns.hash(range(step, step + 1))

    def begin(self, steps: range) -> None:
        """Hash the slices whose turn it is. Called when a backward begins that will be reduced.

        Args:
            steps: the steps since the last comparison, up to the present one; the same on all ranks.
        """
        self.num_looks += 1
        leaves = self._listing.changed(steps)
        if leaves is not None:
            self._turns.list_again(leaves)
        self._turns.hashes.clear()
        self._turns.hash(steps)

    def fingerprint(self) -> int:
        """Return the fingerprint of what was hashed; 0 if no part of the replica has its turn."""
        hashes = (*self._turns.hashes, *self._buffer_turns.hashes)
        if not hashes:
            return 0
        total = len(self._turns.hashes)
        for one in hashes:
            total = mixed(total, one.value())
        return 1 + total % _MAX_FINGERPRINT

    def compare(self, reported: Sequence[int], step: int) -> None:
        """Compare the fingerprints of all ranks; a collective call if they differ.

        Args:
            reported: the fingerprint of each rank.
            step: the present step.

        Raises:
            ReplicaDivergence: values differ, and the policy is "raise", or "repair" without a majority; or the state of
                optimizers has different names or shapes. Raised on every rank.
        """
        if not any(reported):
            return
        are_equal = len(set(reported)) == 1
        self.last_compared = (self.steps_before + step, are_equal)
        if are_equal:
            self._turns.agreed(step)
            self._buffer_turns.agreed(step)
        else:
            self._differ(step)

    def mean_is(self, finite: bool, step: int) -> None:
        """Compare the whole replica at once if the mean has just stopped being finite.

        A bit that flips in an exponent can make gradients infinite. The next step would then write NaN into all
        replicas alike, and no difference would be left to detect.

        Args:
            finite: whether a sample of the mean is finite; the same on all ranks.
            step: the present step.

        Raises:
            ReplicaDivergence: values differ, and the policy is "raise", or "repair" without a majority; or the state of
                optimizers has different names or shapes. Raised on every rank.
        """
        was_finite, self._was_finite = self._was_finite, finite
        if was_finite and not finite:
            self._differ(step, must=False)

    def forget(self) -> None:
        """Drop the hashes at the end of a backward."""
        self._turns.hashes.clear()
        self._buffer_turns.hashes.clear()

    # ------------------------------------------------------------------ where replicas differ

    def _differ(self, step: int, *, must: bool = True) -> None:
        """Search the whole replica for differences; `must` says that fingerprints have shown one."""
        coverage = self._turns.coverage
        assert coverage is not None
        in_run = self.steps_before + step
        title = f"{self._title}, step {in_run}, replica check"
        leaves = coverage.leaves
        self._check_structure(title, leaves, in_run)
        found = locate([leaf.name for leaf in leaves], [leaf.value() for leaf in leaves], self._transport)
        agreed_at = coverage.agreed_at(found[0].index) if found else None
        num_compared = len(leaves)
        are_buffers = not found and bool(self._buffer_turns.hashes)
        if are_buffers:
            found, num_compared, agreed_at = self._differing_buffers()
        if agreed_at is not None:
            agreed_at += self.steps_before
        if not found and not must:
            return
        if not found:
            self._act(
                ReplicaDivergence(
                    f"{title}: fingerprints of the ranks differed when backward began, but all values are equal now "
                    "that it has ended: something writes parameters or optimizer state while a backward is under way, "
                    "on some ranks only. Write between the steps, on all ranks",
                    tensor="",
                    num_differing=0,
                    minority_ranks=(),
                    found_at_step=in_run,
                ),
                {""},
                repair=lambda: "They are equal now.",
            )
            return
        self.last_compared = (in_run, False)
        can_repair = self.check.on_divergence == "repair" and all(one.has_majority for one in found)
        error = divergence_error(
            title,
            [one.among(self._ranks) for one in found],
            num_compared=num_compared,
            num_ranks=self._transport.size,
            remedy=self._remedy(found, agreed_at, are_buffers=are_buffers, can_repair=can_repair),
            agreed_at=agreed_at,
            step=in_run,
            where="" if len(self._ranks) == max(self._ranks) + 1 else describe_ranks(self._ranks),
        )
        if are_buffers:
            self._act(
                error, {one.name for one in found}, repair=lambda: "The next forward synchronizes them again."
            )
            return
        repair = (lambda: self._repaired(found, leaves, step)) if can_repair else None
        self._act(error, {one.name for one in found}, repair=repair)

    def _remedy(
        self,
        found: Sequence[Difference],
        agreed_at: int | None,
        *,
        are_buffers: bool,
        can_repair: bool,
    ) -> str:
        back = "To continue," if agreed_at is None else "Go back to a checkpoint that is older than that, or"
        names = [one.name for one in found]
        targets = [
            target
            for target, is_meant in (
                ("sl.broadcast_(ddp, src=...)", any(not name.startswith("optimizer ") for name in names)),
                ("sl.broadcast_(optimizer, src=...)", any(name.startswith("optimizer ") for name in names)),
            )
            if is_meant
        ]
        cause = (
            "Buffers differ though they have just been synchronized: a bit that flipped, or a buffer that is replaced "
            "on some ranks only."
            if are_buffers
            else "A bit that flipped, a write on some ranks only, or an operation whose result differs between ranks "
            "(`syncline doctor` searches for such operations)."
        )
        if are_buffers or can_repair or self.check.on_divergence == "warn":
            return cause
        return f"{cause} {back} make them equal by {' and '.join(targets)}."

    def _check_structure(self, title: str, leaves: Sequence[Leaf], step: int) -> None:
        """Raise unless all ranks have state for the same parameters, of the same shapes; a collective call."""
        lines = []
        for leaf in leaves:
            value = leaf.value()
            form = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else "a number"
            lines.append(f"{leaf.name}  {form}")
        forms = self._transport.all_gather_bytes("\n".join(lines).encode())
        if len(set(forms)) == 1:
            return
        rows: list[set[str]] = [set(row.decode().split("\n")) for row in forms]
        apart = set().union(*rows) - rows[0].intersection(*rows)
        shown = "; ".join(
            f"rank {self._ranks[at]} has {', '.join(sorted(row & apart)[:3])}"
            for at, row in enumerate(rows)
            if row & apart
        )
        raise ReplicaDivergence(
            f"{title}: expected optimizers with state of the same names and shapes on all ranks, but they differ: "
            f"{shown}. Step attached optimizers equally often, with the same parameters, on every "
            "rank",
            tensor=min(apart).split("  ")[0],
            num_differing=len(apart),
            minority_ranks=(),
            found_at_step=step,
        )

    def _differing_buffers(self) -> tuple[list[Difference], int, int | None]:
        """Return the slice's buffers that differed before forward changed them; a collective call."""
        coverage = self._buffer_turns.coverage
        assert coverage is not None
        hashes: dict[int, int] = {}
        for one in self._buffer_turns.hashes:
            for leaf, number in one.by_leaf().items():
                hashes[leaf] = mixed(hashes.get(leaf, 0), number)
        leaves = coverage.leaves
        names = [leaves[index].name for index in hashes]
        found = locate(names, [None] * len(names), self._transport, mine=list(hashes.values()))
        return found, len(leaves), coverage.all_agreed_at

    # ------------------------------------------------------------------ error, repair or warning

    def _act(self, error: ReplicaDivergence, names: set[str], repair: Callable[[], str] | None) -> None:
        """Raise, repair or warn; a collective call under "repair"."""
        policy = self.check.on_divergence
        if policy == "raise" or (policy == "repair" and repair is None):
            raise error
        text = str(error)
        if policy == "repair" and repair is not None:
            text += f"\nRepaired: {repair()} Training continues."
        elif names <= self._warned:
            return  # there was a warning before
        if policy == "warn":
            self._warned |= names
        if self._transport.rank == 0:
            warn_user(text)

    def _repaired(self, found: Sequence[Difference], leaves: Sequence[Leaf], step: int) -> str:
        """Broadcast the values of the majority; return a sentence on what was done. A collective call."""
        sources = set()
        for one in found:
            src = one.groups[0][0]
            sources.add(self._ranks[src])
            leaf = leaves[one.index]
            value = leaf.value()
            if isinstance(value, Tensor):
                TensorBroadcaster([value.detach()], self._transport).start(src).wait()
            else:
                # It is sent as text, because it may be a bool or have more than 64 bits.
                numbers = self._transport.all_gather_bytes(json.dumps(value).encode())
                if value is not None:
                    leaf.write(json.loads(numbers[src]))
        self.num_repairs += 1
        self.last_compared = (self.steps_before + step, True)
        self._turns.all_agreed(step)
        return f"the values of {describe_ranks(sorted(sources))} were broadcast."
