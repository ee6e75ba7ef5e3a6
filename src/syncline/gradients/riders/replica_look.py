"""Rider: a look at the replicas in the steps 1, 2, 4, 8, 16, ..., which warns once if parameters differ between ranks.

This is the default. The other checks look for causes of drift, such as gradients that are not
reduced. This rider looks at the result, so it also detects drift with unforeseen causes. An accelerator hashes its
parameters in its own time, and a rank reports the result in a later step.

A program may change parameters for a part of a step, on each rank in another way, as sharpness-aware minimization does.
So they are hashed twice: at the end of the first forward after a reduction, and at the beginning of the backward that
is reduced. Ranks differ if they differ at both times. If there was one forward, one hash serves for both. It is made at
the end of the forward, because a module may compute values from its first batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from torch import Tensor, strided

from syncline._torch.tensors import outside_of_transforms, plain_torch_functions
from syncline.equality.fingerprint import begin_hashes, mixed
from syncline.equality.locate import Difference, differing
from syncline.gradients.backward import Backward
from syncline.gradients.riders.base import Reduced, Rider, Words
from syncline.gradients.riders.finite import LateResult
from syncline.user_code import warn_user
from syncline.words import format_count

_NUM_HASH_BITS, _NUM_LOOK_BITS = 22, 6

_HASH_MASK = (1 << _NUM_HASH_BITS) - 1

_WORD = 1 << 64

_MAX_SHOWN = 5
"""The largest number of parameters that the warning names."""


class Looks:
    """The default of `replica_check`: ranks compare their parameters in the steps 1, 2, 4, 8, ..., and only warn."""

    def __repr__(self) -> str:
        return "a look in steps 1, 2, 4, 8, ..."


LOOKS = Looks()


class _Reading:
    """The hashes of all parameters at one moment.

    Args:
        tensors: the parameters.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._on_host, elsewhere = begin_hashes(tensors)
        self._late = LateResult(elsewhere)
        self._num = len(tensors)

    @property
    def is_there(self) -> bool:
        """Whether accelerators have hashed theirs."""
        return self._late.is_there

    def hashes(self) -> list[int]:
        """Return the hash of each parameter."""
        late = self._late.numbers()
        return [self._on_host.get(index, late.get(index, 0) % _WORD) for index in range(self._num)]

    def total(self) -> int:
        """Return one hash of all parameters."""
        return reduce(mixed, self.hashes(), 0) & _HASH_MASK


class ReplicaLook(Rider):
    """A report of the hash of all parameters, in the steps that look. The word is 0 in all other steps."""

    subject = "a look at the replicas in steps 1, 2, 4, 8, ..."
    num_bits = 2 * _NUM_HASH_BITS + _NUM_LOOK_BITS

    def __init__(self) -> None:
        self._title = ""
        self._named: Sequence[tuple[str, Tensor]] = ()
        self._num_steps = 0
        """The number of reductions since `restart` was called, which is the same on all ranks."""
        self._is_open = True
        """Whether ranks still look: there was no warning yet. All ranks have the same value."""
        self._step = 0
        """The step whose parameters were hashed last."""
        self._look = 0
        """The number of this look."""
        self.is_due = False
        """Whether the next reduction looks."""
        self._first: _Reading | None = None
        """The reading at the end of the first forward after the last reduction; None if there was none."""
        self._num_forwards = 0
        """The number of forwards since the last reduction."""
        self._equal_in: int | None = None
        """The last step in which the parameters were found equal."""
        self._readings: tuple[_Reading, _Reading] | None = None
        """The readings that this rank reports, at the forward and at the backward; None if there are none."""
        self._differing: Words | None = None
        """The words of all ranks, if they show that parameters differ."""

    def use(self, title: str, named: Sequence[tuple[str, Tensor]]) -> None:
        """Look at these parameters from now on, which all ranks have in the same order.

        Args:
            title: the name of the module.
            named: the parameters that must be equal on all ranks, with their names. Tensors whose class handles every
                operation, and which may have no memory, are left out.
        """
        self._title = title
        self._named = [
            (name, one)
            for name, one in named
            if type(one).__torch_dispatch__ is Tensor.__torch_dispatch__ and one.layout is strided
        ]
        self._forget()

    def restart(self) -> None:
        """Count the steps anew, because other ranks take part now. All ranks call this method together."""
        self._num_steps, self._equal_in = 0, None
        self._forget()

    def _forget(self) -> None:
        self._readings = self._first = None
        self._num_forwards = 0
        self.is_due = bool(self._is_open and self._named and not self._num_steps & (self._num_steps + 1))

    def stop(self) -> None:
        """Look no more: there was a warning, or a communication hook lets the replicas drift. All ranks call this."""
        self._is_open = self.is_due = False

    def forward_ended(self) -> None:
        """Read the parameters if this was the first forward after a reduction. Call this only if a look is due."""
        self._num_forwards += 1
        if self._first is None:
            self._first = self._read()

    def _read(self) -> _Reading:
        with outside_of_transforms(), plain_torch_functions():
            return _Reading([tensor for _, tensor in self._named])

    def begin_step(self, step: int) -> None:
        """Choose what this rank reports, if this step looks."""
        self._differing = None
        if not self.is_due:  # a backward that fails does not count: it may be run again
            return
        self._step, self._look = step, (self._num_steps + 1).bit_length()
        first = self._first or self._read()
        self._readings = first, self._read() if self._num_forwards > 1 else first

    def word(self, backward: Backward) -> int:
        """Return the hashes of all parameters at both times; 0 if there are none to report now."""
        if self._readings is None or not all(reading.is_there for reading in self._readings):
            return 0
        first, now = self._readings
        total = first.total()
        second = total if now is first else now.total()
        return (self._look << _NUM_HASH_BITS | total) << _NUM_HASH_BITS | second

    def receive(self, words: Words) -> None:
        """Compare the hashes of all ranks, if all ranks have reported one of the same look."""
        reported = set(words.active.values())
        if (
            not self._look
            or words.any_joined
            or {word >> 2 * _NUM_HASH_BITS for word in reported} != {self._look}
        ):
            return
        firsts, seconds = ({word >> shift & _HASH_MASK for word in reported} for shift in (_NUM_HASH_BITS, 0))
        if len(firsts) > 1 and len(seconds) > 1:
            self._differing = words
        else:
            self._equal_in, self._readings = self._step, None

    def conclude(self, reduced: Reduced) -> None:
        """Warn on every rank if parameters differ. This is then a collective call, and the last one."""
        self._num_steps += 1
        self._first, self._num_forwards = None, 0
        self.is_due = bool(self._is_open and self._named and not self._num_steps & (self._num_steps + 1))
        if not reduced.buckets:  # this rank has no inputs left (`join`), so its parameters stay behind
            self._readings = None
        words, self._differing = self._differing, None
        if words is None or self._readings is None:
            return
        readings, self._readings = self._readings, None
        names = [name for name, _ in self._named]
        first, now = (differing(names, one.hashes(), words.transport) for one in readings)
        at_both = {one.name for one in first}
        if found := [one for one in now if one.name in at_both]:
            self.stop()
            warn_user(self._text(found))

    def _text(self, found: Sequence[Difference]) -> str:
        before = (
            "were never compared before" if self._equal_in is None else f"were equal in step {self._equal_in}"
        )
        lines = [f"  {one}" for one in found[:_MAX_SHOWN]]
        if len(found) > _MAX_SHOWN:
            lines.append(f"  ... and {len(found) - _MAX_SHOWN} more")
        of = format_count(len(self._named), "parameter")
        where = f"{self._title}, step {self._step}"
        first = f"{where}: expected equal parameters on all ranks, but {len(found)} of {of} differ"
        last = (
            f"They {before}. Gradients are averaged, so the parameters stay apart unless the program makes them equal "
            "again. Likely causes: values that are computed from the first batch, a checkpoint that one rank loaded "
            "alone, and a write on one rank. Call sl.broadcast_(ddp.module) on all ranks after it. If they are meant "
            "to differ, name them in ignore=, or give replica_check=None. This warning comes only once"
        )
        return "\n".join([f"{first}:", *lines, last])
