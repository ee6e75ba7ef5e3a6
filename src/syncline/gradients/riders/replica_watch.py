"""Rider: the fingerprint of one slice of the replica. In each step the ranks compare their fingerprints of one slice.

The step number determines the slice. The slice is hashed when the backward begins. Parameters and optimizer state do
not change at that time: all ranks have made the last optimizer step and have not begun the next one. Buffers change in
the forward, so they are hashed before the forward, after they were synchronized.

The fingerprint travels with the gradients. As long as the replicas are equal, nothing else is sent. Only if
fingerprints differ do the ranks search for the elements that differ (`replica_search.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, get_args

from torch import Tensor
from torch.optim import Optimizer

from syncline.checks import checked_choice, checked_count, store, suggests_arguments
from syncline.equality.fingerprint import mixed
from syncline.equality.leaves import Leaf, parameter_leaves
from syncline.equality.locate import emit_divergence
from syncline.errors import ReplicaDivergence
from syncline.gradients.backward import Backward
from syncline.gradients.riders.base import Holder, Reduced, Rider, Words
from syncline.gradients.riders.coverage import Coverage, Listing
from syncline.gradients.riders.replica_search import Located, Peers
from syncline.tensors.broadcasting import TensorBroadcaster
from syncline.tensors.targets import distinct_tensors
from syncline.user_code import warn_user
from syncline.words import describe_ranks

OnDivergence = Literal["raise", "repair", "warn"]

_NUM_FINGERPRINT_BITS = 48
"""The number of bits of a fingerprint."""

_NUM_SAMPLES = 64
"""The number of elements of each bucket in the sample that is checked for NaN and infinity."""

_MAX_FINGERPRINT: int = 2**_NUM_FINGERPRINT_BITS - 1


@suggests_arguments
@dataclass(frozen=True, slots=True)
class ReplicaCheck:
    """The settings of `DistributedDataParallel(replica_check=...)`, which compares replicas during training.

    Each step compares one slice of the replica, so that `every` steps compare the whole replica. A slice is compared by
    its fingerprint, which travels with the gradients. Fingerprints cover the parameters, the tensors and integers in
    the state of attached optimizers, and buffers right after they were synchronized. Values that the
    contract allows to differ are not compared: buffers that each rank keeps for itself, and parameters between two
    parameter syncs of a strategy.

    Args:
        every: the number of steps in which the whole replica is compared once. A difference is detected within this
            number of steps.
        on_divergence: the reaction to a difference. "raise" raises `ReplicaDivergence` on every rank, before the
            optimizer steps. "repair" broadcasts the values of the majority, and warns. If no more than half of the
            ranks agree (as always with two ranks), a repair would be a guess, so "repair" raises the error, too. "warn"
            warns on rank 0, and training continues.

    Raises:
        TypeError, ValueError: an argument has a wrong type or value.

    Examples:
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
    """The object that compares this rank's replica of one module with the replicas of other ranks.

    Args:
        check: the settings: how often to compare, and what to do about a difference.
        peers: the ranks whose replicas must be equal.
        parameters: the names and tensors of the parameters that must be equal. All ranks pass the same parameters.
        buffers: the buffers to compare. Each is given by its name, the dictionary that contains it in its module, and
            its key in this dictionary.
        optimizers: a function that returns the optimizers whose state must be equal at present.
        agreed_at: the last step at which all replicas were known to be equal. Pass None if there is none.
    """

    def __init__(
        self,
        check: ReplicaCheck,
        peers: Peers,
        parameters: Sequence[tuple[str, Tensor]],
        *,
        buffers: Sequence[tuple[str, Mapping[str, Tensor | None], str]],
        optimizers: Callable[[], Sequence[Optimizer]],
        agreed_at: int | None,
    ) -> None:
        self.check = check
        self.last_compared: tuple[int, bool] | None = None
        """The step of the last comparison, and whether the replicas were equal. It is None before any comparison."""
        self.num_repairs = 0
        self.steps_before = 0
        """The number of steps before the run was resumed. Messages add it to the step."""
        self._peers = peers
        named = distinct_tensors(parameters, for_writing=False)
        own = {id(tensor) for _, tensor in parameters}
        self._listing = Listing(parameter_leaves(named), optimizers, own, check.every)
        self._buffer_leaves = [
            Leaf(name, owner, (key,), has_agreed_strides=True) for name, owner, key in buffers
        ]
        self._coverage = Coverage(check.every, agreed_at)
        """The slices of the parameters and of the optimizers' state, and their hashes."""
        self._buffer_coverage = Coverage(check.every, agreed_at)
        """The slices of the buffers, and one hash for each forward since the last backward."""
        self._warned: set[str] = set()
        """The names of the values that a warning has named before."""
        self._was_finite = True
        """Whether the sample of the mean was finite in the last step."""

    def continues(self, other: ReplicaWatch) -> None:
        """Take over the state of the watch that this one replaces."""
        self.last_compared, self.num_repairs = other.last_compared, other.num_repairs
        self._warned, self._was_finite = other._warned, other._was_finite
        self.steps_before = other.steps_before
        self._coverage.all_agreed(other._coverage.all_agreed_at)
        if not other._coverage.is_listed:
            self._buffer_coverage.all_agreed(other._buffer_coverage.all_agreed_at)

    def agreed_at(self, step: int | None) -> None:
        """Record that parameters and optimizer state were equal after `step`. Pass None if they were replaced."""
        self._coverage.all_agreed(step)
        self._buffer_coverage.all_agreed(None)

    # ------------------------------------------------------------------ each step

    def buffers_are_equal(self, step: int) -> None:
        """Hash the slice of buffers that belongs to this step.

        Call this method before a forward, after the buffers were synchronized.
        """
        if not self._buffer_coverage.is_listed or step % self.check.every == 0:
            self._buffer_coverage.list_again(self._buffer_leaves)
        self._buffer_coverage.hash(range(step, step + 1))

    def begin(self, steps: range) -> None:
        """Hash the slices that belong to these steps. Call this method at the start of a backward that will be reduced.

        Args:
            steps: the steps since the last comparison, up to the present step. All ranks pass the same steps.
        """
        leaves = self._listing.changed(steps)
        if leaves is not None:
            self._coverage.list_again(leaves)
        self._coverage.hashes.clear()
        self._coverage.hash(steps)

    def fingerprint(self) -> int:
        """Return the fingerprint of the hashed slices. Return 0 if nothing was hashed."""
        hashes = (*self._coverage.hashes, *self._buffer_coverage.hashes)
        if not hashes:
            return 0
        total = len(self._coverage.hashes)
        for one in hashes:
            total = mixed(total, one.value())
        return 1 + total % _MAX_FINGERPRINT

    def compare(self, reported: Sequence[int], step: int) -> None:
        """Compare the fingerprints of all ranks. If the fingerprints differ, this is a collective call.

        Args:
            reported: the fingerprint of each rank.
            step: the present step.

        Raises:
            ReplicaDivergence: values differ, and the policy is "raise", or it is "repair" and there is no majority.
                Also raised if the names or shapes of the optimizers' state differ. Every rank raises the error.
        """
        if not any(reported):
            return
        are_equal = len(set(reported)) == 1
        self.last_compared = (self.steps_before + step, are_equal)
        if are_equal:
            self._coverage.agreed(step)
            self._buffer_coverage.agreed(step)
        else:
            self._differ(step)

    def mean_is(self, finite: bool, step: int) -> None:
        """Compare the whole replica at once if the mean is not finite and was finite in the step before.

        A bit that flips in the exponent of one parameter can make gradients infinite. The optimizer's next step would
        then write NaN into all replicas alike, and no difference would be left to detect.

        Args:
            finite: whether a sample of the mean is finite. All ranks pass the same value.
            step: the present step.

        Raises:
            ReplicaDivergence: see `compare`.
        """
        was_finite, self._was_finite = self._was_finite, finite
        if was_finite and not finite:
            self._differ(step, is_certain=False)

    def forget(self) -> None:
        """Drop the hashes at the end of a backward."""
        self._coverage.hashes.clear()
        self._buffer_coverage.hashes.clear()

    # ------------------------------------------------------------------ error, repair or warning

    def _differ(self, step: int, *, is_certain: bool = True) -> None:
        """Search the whole replica for differences, and act on them by the policy. This is a collective call.

        Args:
            step: the present step.
            is_certain: whether fingerprints differed. If they did, it is an error if the search finds no difference.
        """
        in_run = self.steps_before + step
        try:
            located = self._peers.search(self._coverage, self._buffer_coverage, in_run)
        except ReplicaDivergence as wrong_structure:
            self._emit(wrong_structure, "raised")
            raise
        if not located.differences:
            if is_certain:
                error = self._peers.equal_again(in_run)
                self._act(error, {""}, repair=lambda: "The values are equal now.")
            return
        if located.agreed_at is not None:
            located = replace(located, agreed_at=located.agreed_at + self.steps_before)
        self.last_compared = (in_run, False)
        policy, names = self.check.on_divergence, {one.name for one in located.differences}
        can_repair = located.are_buffers or (policy == "repair" and located.has_majority)
        error = self._peers.divergence(located, in_run, with_advice=not can_repair and policy != "warn")
        if located.are_buffers:
            self._act(error, names, repair=lambda: "The next forward synchronizes the buffers again.")
        else:
            self._act(error, names, repair=partial(self._repaired, located, step) if can_repair else None)

    def _act(self, error: ReplicaDivergence, names: set[str], repair: Callable[[], str] | None) -> None:
        """Raise an error, repair the values or warn, by the policy. Under "repair" this is a collective call.

        Args:
            error: the error that names the differences.
            names: the names of the values that differ.
            repair: a function that makes the values equal and returns a sentence that says how. Pass None if the values
                cannot be repaired.
        """
        policy = self.check.on_divergence
        if policy == "raise" or (policy == "repair" and repair is None):
            self._emit(error, "raised")
            raise error
        text = str(error)
        if policy == "repair" and repair is not None:
            text += f"\nRepaired: {repair()} Training continues."
        self._emit(error, "repaired" if policy == "repair" else "warned")
        if policy == "warn" and names <= self._warned:
            return  # there was a warning before
        if policy == "warn":
            self._warned |= names
        if self._peers.transport.rank == 0:
            warn_user(text)

    def _emit(self, error: ReplicaDivergence, outcome: Literal["raised", "repaired", "warned"]) -> None:
        peers = self._peers
        rank = peers.ranks[peers.transport.rank]
        emit_divergence(error, check=f"replica check of {peers.title}", rank=rank, outcome=outcome)

    def _repaired(self, located: Located, step: int) -> str:
        """Broadcast the values of the majority, and return a sentence that says so. This is a collective call."""
        transport = self._peers.transport
        sources = set()
        for one in located.differences:
            src = one.groups[0][0]
            sources.add(self._peers.ranks[src])
            leaf = located.leaves[one.index]
            value = leaf.value()
            if isinstance(value, Tensor):
                TensorBroadcaster([value.detach()], transport).start(src).wait()
            else:
                # It is sent as text, because it may be a bool or have more than 64 bits.
                numbers = transport.all_gather_bytes(json.dumps(value).encode())
                if value is not None:
                    leaf.write(json.loads(numbers[src]))
        self.num_repairs += 1
        self.last_compared = (self.steps_before + step, True)
        self._coverage.all_agreed(step)
        return f"the values of {describe_ranks(sorted(sources))} were broadcast."


# ---------------------------------------------------------------------- the rider


class Replicas(Rider):
    """A report of the fingerprint of the slices that this step compares."""

    subject = "fingerprints of replicas"
    num_bits = _NUM_FINGERPRINT_BITS

    def __init__(self) -> None:
        self.watch: ReplicaWatch | None = None
        """The object that compares replicas. It is None without `replica_check`."""
        self._reported: list[int] | None = None

    def use(self, watch: ReplicaWatch | None) -> None:
        """Compare replicas with `watch` from now on. It takes over the state of the present watch."""
        if watch is not None and self.watch is not None:
            watch.continues(self.watch)
        self.watch = watch

    def agreed_at(self, step: int | None, *, steps_before: int) -> None:
        """Record when the replicas were last known to be equal.

        Args:
            step: the number of backwards that the wrapper had run; None if it is not known.
            steps_before: the number of steps before the run was resumed.
        """
        if self.watch is not None:
            self.watch.steps_before = steps_before
            self.watch.agreed_at(step)

    def begin_step(self, step: int) -> None:
        """Hash the slice of this step before parameters or optimizer state change."""
        if self.watch is not None:
            at = step - self.watch.steps_before
            self.watch.begin(range(at, at + 1))

    def word(self, backward: Backward) -> int:
        """Return the fingerprint. Return 0 if no part of the replica is compared in this step."""
        return 0 if self.watch is None else self.watch.fingerprint()

    def receive(self, words: Words) -> None:
        """Keep the fingerprints of all ranks for `conclude`."""
        # Replicas are compared last, because under "repair" and "warn" the optimizer steps all the same.
        self._reported = None if words.any_joined else list(words.active.values())

    def conclude(self, reduced: Reduced) -> None:
        """Compare the fingerprints of all ranks. Do nothing if a rank without inputs takes part.

        Raises:
            ReplicaDivergence: replicas differ (see `ReplicaWatch.compare`). Every rank raises the error.
        """
        if self.watch is None or self._reported is None:
            return
        step = reduced.step - self.watch.steps_before
        self.watch.compare(self._reported, step)
        if reduced.is_mean:
            dense = (bucket for bucket in reduced.buckets if not bucket.is_sparse)
            is_finite = not reduced.any_nonfinite and all(_looks_finite(bucket) for bucket in dense)
            self.watch.mean_is(is_finite, step)

    def forget(self) -> None:
        """Drop the fingerprints at the end of a backward."""
        self._reported = None
        if self.watch is not None:
            self.watch.forget()


def _looks_finite(bucket: Holder) -> bool:
    """Return whether an evenly spread sample of a bucket's reduced elements is finite."""
    values = (
        bucket.own()
    )  # this memory holds the result by now; `handed_out` would list all members of the bucket
    return bool(values[:: max(1, len(values) // _NUM_SAMPLES)].isfinite().all())
