"""Rider: a look at the replicas in the steps 1, 2, 4, 8, 16, ..., which warns once if parameters differ between ranks.

This is the default. Everything else looks at causes for which replicas drift apart, such as gradients that are not
reduced. This rider looks at the result, so it also finds causes that nobody has foreseen. A step that looks reads each
parameter once. An accelerator hashes its parameters in its own time, and a rank reports the result in a later step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from torch import Tensor, nn, strided

from syncline.equality.fingerprint import begin_hashes, mixed
from syncline.equality.locate import Difference, differing
from syncline.gradients.backward import Backward
from syncline.gradients.riders.base import Reduced, Rider, Words
from syncline.gradients.riders.finite import LateResult
from syncline.user_code import warn_user
from syncline.words import format_count

_NUM_HASH_BITS, _NUM_LOOK_BITS = 42, 6

_HASH_MASK = (1 << _NUM_HASH_BITS) - 1

_WORD = 1 << 64

_MAX_SHOWN = 5
"""The largest number of parameters that the warning names."""


class Looks:
    """The default of `replica_check`: ranks compare their parameters in the steps 1, 2, 4, 8, ..., and only warn."""

    def __repr__(self) -> str:
        return "a look in steps 1, 2, 4, 8, ..."


LOOKS = Looks()


class ReplicaLook(Rider):
    """A report of the hash of all parameters, in the steps that look. The word is 0 in all other steps."""

    subject = "a look at the replicas in steps 1, 2, 4, 8, ..."
    num_bits = _NUM_HASH_BITS + _NUM_LOOK_BITS

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
        self._equal_in: int | None = None
        """The last step in which the parameters were found equal."""
        self._hashes: dict[int, int] | None = None
        """The hashes that this rank reports, by the index of the parameter; None if there are none to report."""
        self._late: LateResult | None = None
        """The hashes of accelerators, until they are there."""
        self._differing: Words | None = None
        """The words of all ranks, if they show that parameters differ."""

    def use(self, title: str, named: Sequence[tuple[str, Tensor]]) -> None:
        """Look at these parameters from now on, which all ranks have in the same order.

        Args:
            title: the name of the module.
            named: the parameters that must be equal on all ranks, with their names. Subclasses of tensors are left out.
        """
        self._title = title
        self._named = [
            (name, one)
            for name, one in named
            if type(one) in (Tensor, nn.Parameter) and one.layout is strided
        ]
        self._hashes = self._late = None

    def restart(self) -> None:
        """Count the steps anew, because other ranks take part now. All ranks call this method together."""
        self._num_steps, self._equal_in = 0, None
        self._hashes = self._late = None

    def stop(self) -> None:
        """Look no more, because a communication hook of the program may let the replicas drift. All ranks call this."""
        self._is_open = False

    def begin_step(self, step: int) -> None:
        """Hash the parameters if this step looks. No rank has made the optimizer step of this step yet."""
        self._differing = None
        number = self._num_steps + 1  # a backward that fails does not count: it may be run again
        if self._is_open and self._named and number & (number - 1) == 0:
            self._step, self._look = step, number.bit_length()
            self._hashes, elsewhere = begin_hashes([tensor for _, tensor in self._named])
            self._late = LateResult(elsewhere) if elsewhere else None

    def word(self, backward: Backward) -> int:
        """Return the hash of all parameters; 0 if there is none to report now."""
        if self._hashes is None:
            return 0
        if self._late is not None:
            if not self._late.is_there:
                return 0
            self._hashes.update((i, number % _WORD) for i, number in self._late.numbers().items())
            self._late = None
        total = reduce(mixed, self._in_order(self._hashes), 0)
        return self._look << _NUM_HASH_BITS | total & _HASH_MASK

    def _in_order(self, hashes: dict[int, int]) -> list[int]:
        return [hashes.get(index, 0) for index in range(len(self._named))]

    def receive(self, words: Words) -> None:
        """Compare the hashes of all ranks, if all ranks have reported one of the same look."""
        reported = set(words.active.values())
        if (
            not self._look
            or words.any_joined
            or {word >> _NUM_HASH_BITS for word in reported} != {self._look}
        ):
            return
        if len(reported) > 1:
            self._differing = words
        else:
            self._equal_in, self._hashes = self._step, None

    def conclude(self, reduced: Reduced) -> None:
        """Warn on every rank if parameters differ. This is then a collective call, and the last one."""
        self._num_steps += 1
        if not reduced.buckets:  # this rank has no inputs left (`join`), so its parameters stay behind
            self._hashes = None
        words, self._differing = self._differing, None
        if words is None or self._hashes is None:
            return
        mine, self._hashes, self._is_open = self._in_order(self._hashes), None, False
        found = differing([name for name, _ in self._named], mine, words.transport)
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
            f"They {before}. Gradients are averaged, but the parameters stay apart. Likely causes: values that are "
            "computed from the first batch, a checkpoint that one rank loaded alone, and a write on one rank. Call "
            "sl.broadcast_(ddp.module) on all ranks after it. If they are meant to differ, name them in ignore=, or "
            "give replica_check=None. This warning comes only once"
        )
        return "\n".join([f"{first}:", *lines, last])
