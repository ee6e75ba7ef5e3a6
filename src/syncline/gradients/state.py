"""The state of a wrapper's steps, which lasts as long as the wrapper, whatever its module and its group become."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from syncline.gradients.comm_hook import CommHook
from syncline.gradients.ledger import Ledger
from syncline.gradients.options import Controls, OnNonFinite
from syncline.gradients.riders.items import ItemNormalizer
from syncline.gradients.riders.roster import Roster
from syncline.gradients.stragglers import Stragglers
from syncline.user_code import warn_user


class StepState:
    """The state of one wrapper's steps. The reducers that replace each other, as the module changes, share it.

    Args:
        on_nonfinite: the policy for gradients that are not finite.
    """

    def __init__(self, on_nonfinite: OnNonFinite) -> None:
        self.step: int = 0
        """Number of steps of the run so far, including steps before a resume. Messages and records show this number."""
        self.steps_before: int = 0
        """The number of these steps that this wrapper has not made."""
        self.controls: Controls = Controls()
        self.riders: Roster = Roster(on_nonfinite)
        """The roster, which has each rider as an attribute."""
        self.normalizer: ItemNormalizer = ItemNormalizer()
        """The normalizer, which counts the items whose gradients are in `.grad` (see `normalize_by`)."""
        self.stragglers: Stragglers = Stragglers()
        self.ledger: Ledger = Ledger()
        self._warned: set[str] = set()

    def use(self, reducer: object) -> None:
        """Let a reducer take the place of the present one."""
        self.reducer: weakref.ref[Any] = weakref.ref(reducer)
        """The reducer that averages the gradients now. It holds this object."""

    @property
    def num_backwards(self) -> int:
        """Number of synchronized backwards of the wrapper so far."""
        return self.step - self.steps_before

    def step_is(self, step: int) -> None:
        """Record that a step ends with the present backward."""
        self.step = step

    def resume_from(self, step: int) -> None:
        """Set the number of steps so far to `step`, because parameters that were saved after this step were loaded.

        The number can differ between ranks, because one rank can load alone and broadcast the loaded values. So only
        messages and records must depend on the number.
        """
        self.step, self.steps_before = step, step - self.num_backwards
        self.riders.replicas.agreed_at(None, steps_before=self.steps_before)

    def count_from(self, step: int) -> None:
        """Count the backwards anew from `step`, on all ranks, because ranks with different counts now train together.

        The replicas of these ranks are equal.
        """
        self.step = self.steps_before = step
        self.riders.replicas.agreed_at(0, steps_before=step)

    def mark_replicas_equal(self) -> None:
        """Record that all ranks have just compared their replicas and found them equal."""
        self.riders.replicas.agreed_at(self.num_backwards, steps_before=self.steps_before)

    def warn_once(self, topic: str, text: str) -> None:
        """Warn, unless there was a warning of the same topic before."""
        if topic not in self._warned:
            self._warned.add(topic)
            warn_user(text)


@dataclass(frozen=True, slots=True)
class Carry:
    """What a reducer hands to the one that takes its place, because the module or its group has changed."""

    unreduced: Sequence[Tensor]
    """The parameters whose `.grad` holds gradients that were not reduced."""
    comm_hook: CommHook | None
    """The communication hook that reduces the buckets; None for the transport's all_reduce."""
    order: Sequence[int] | None
    """The order of the parameters in buckets that rank 0 of a new group has learnt; None if it has learnt none."""
    out_of_step: str | None
    """The reason why the ranks are out of step; None if they are not, or if the group is new."""
