"""Errors after which ranks are out of step. They are raised with all known facts, and again if the caller continues."""

from __future__ import annotations

from collections.abc import Sequence

from syncline.errors import SynclineError
from syncline.gradients.bucket_plan import BucketPlan

_CHECKPOINTING = "torch.utils.checkpoint(..., use_reentrant=False), or static_graph=True"


class OutOfStep:
    """The error after which one rank has sent data that another has not.

    Args:
        rank: the number of this rank.
        names: names of all parameters, by index.
        text: the text of an error that was raised before; None if there was none.
    """

    def __init__(self, rank: int, names: Sequence[str], *, text: str | None = None) -> None:
        self.text = text
        """The text of the error; None if there was none."""
        self._rank = rank
        self._names = names

    def raise_again(self) -> None:
        """Raise the error again, if there was one."""
        if self.text is not None:
            raise SynclineError(self.text)

    def add_place(self, error: Exception, step: int, bucket: BucketPlan) -> None:
        """Add the rank, step, phase and parameters to `error`.

        The caller raises the same exception again, so that a user sees one traceback.
        """
        names = [self._names[i] for i in bucket.parameters]
        shown = ", ".join(names[:3]) + (f", ... ({len(names)} parameters)" if len(names) > 3 else "")
        place = f"rank {self._rank}, step {step}, backward, bucket {bucket.index} ({shown})"
        self.text = f"{place}: {error}"
        if isinstance(error, SynclineError):
            error.args = (self.text,)
        else:  # a user's hook raised it, so its text stays as it is
            error.add_note(f"at {place}")

    # The methods below return an error, which the caller raises.

    def too_late(self, step: int) -> SynclineError:
        """Return the error for a gradient that came after the end of its backward, which runs inside another one."""
        return self._error(
            step,
            "a gradient came after all parameters had theirs and were reduced, from another re-entrant checkpoint of "
            f"the same backward. Use {_CHECKPOINTING}",
        )

    def from_outside(self, step: int, index: int) -> SynclineError:
        """Return the error for a gradient of a parameter that the graph would not reach."""
        return self._error(
            step,
            f"{self._names[index]} received a gradient from outside of the graph that this backward began with. With "
            f"activation checkpointing use {_CHECKPOINTING}",
        )

    def twice(self, step: int, indices: Sequence[int]) -> SynclineError:
        """Return the error for parameters that got more than one gradient in one backward."""
        names = ", ".join(sorted(self._names[index] for index in indices))
        return self._error(
            step,
            f"{names} received a gradient more than once in one backward, the second time after it may have been sent. "
            f"With activation checkpointing use {_CHECKPOINTING}",
        )

    def interrupted(self, step: int, num_sent: int) -> SynclineError:
        """Return the error for a backward that began before the previous one, which had sent data, was over."""
        return self._error(
            step,
            f"a backward began before the previous one had ended, when {num_sent} bucket(s) of it had been sent "
            "already, so the ranks are out of step. If an exception ended the previous backward, restart all ranks "
            f"from a checkpoint; if this is activation checkpointing, use {_CHECKPOINTING}",
        )

    def _error(self, step: int, what: str) -> SynclineError:
        self.text = f"rank {self._rank}, step {step}: {what}"
        return SynclineError(self.text)
