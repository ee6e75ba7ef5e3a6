"""Errors after which ranks are out of step: raised with all that is known, and again for a caller that goes on."""

from __future__ import annotations

from collections.abc import Sequence

from syncline.errors import SynclineError
from syncline.gradients.bucket_plan import BucketPlan

__all__ = ["Trouble"]

_CHECKPOINTING = "torch.utils.checkpoint(..., use_reentrant=False), or static_graph=True"


class Trouble:
    """The first error after which one rank has sent what another has not.

    Args:
        rank: this rank.
        names: of all parameters.
    """

    def __init__(self, rank: int, names: Sequence[str]) -> None:
        self.text: str | None = None
        """The error; None while all is well."""
        self._rank = rank
        self._names = names

    def raise_again(self) -> None:
        """Raise the error, if there is one."""
        if self.text is not None:
            raise SynclineError(self.text)

    def add_place(self, error: Exception, step: int, bucket: BucketPlan) -> None:
        """Say in `error` which rank, step, phase and parameters it hit.

        The same exception goes on, so that a user sees one traceback.
        """
        names = [self._names[i] for i in bucket.parameters]
        shown = ", ".join(names[:3]) + (f", ... ({len(names)} parameters)" if len(names) > 3 else "")
        place = f"rank {self._rank}, step {step}, backward, bucket {bucket.index} ({shown})"
        self.text = f"{place}: {error}"
        if isinstance(error, SynclineError):
            error.args = (self.text,)
        else:  # a user's hook raised: its error is his
            error.add_note(f"at {place}")

    # The errors that follow are returned, to be raised.

    def too_late(self, step: int) -> SynclineError:
        """The backward was taken for ended inside of another one, and a gradient came after all."""
        return self._error(
            step,
            "a gradient came after all parameters had theirs and were reduced, from another re-entrant checkpoint of "
            f"the same backward. Use {_CHECKPOINTING}",
        )

    def from_outside(self, step: int, index: int) -> SynclineError:
        """A parameter that the graph would not reach got a gradient."""
        return self._error(
            step,
            f"{self._names[index]} received a gradient from outside of the graph that this backward began with. With "
            f"activation checkpointing use {_CHECKPOINTING}",
        )

    def twice(self, step: int, indices: Sequence[int]) -> SynclineError:
        """Parameters got two gradients in one backward."""
        names = ", ".join(sorted(self._names[index] for index in indices))
        return self._error(
            step,
            f"{names} received a gradient more than once in one backward, the second time after it may have been sent. "
            f"With activation checkpointing use {_CHECKPOINTING}",
        )

    def interrupted(self, step: int, num_sent: int) -> SynclineError:
        """A backward began though the one before had sent something and not ended."""
        return self._error(
            step,
            f"a backward began before the previous one had ended, when {num_sent} bucket(s) of it had been sent "
            "already, so the ranks are out of step. If an exception ended the previous backward, restart all ranks "
            f"from a checkpoint; if this is activation checkpointing, use {_CHECKPOINTING}",
        )

    def _error(self, step: int, what: str) -> SynclineError:
        self.text = f"rank {self._rank}, step {step}: {what}"
        return SynclineError(self.text)
