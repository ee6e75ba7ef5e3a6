"""Errors after which ranks are out of step: some ranks have sent data that others do not expect.

Training cannot continue after such an error, so each later backward raises it again.
"""

from __future__ import annotations

from collections.abc import Sequence

from syncline.errors import CollectiveTimeout, SynclineError
from syncline.gradients.bucket_plan import BucketPlan
from syncline.words import format_names

_CHECKPOINTING = (
    "pass use_reentrant=False to torch.utils.checkpoint, or wrap the module with static_graph=True"
)


class OutOfStep:
    """A store for the error after which this rank is out of step with the other ranks. It also composes such errors.

    Args:
        rank: the number of this rank.
        names: names of all parameters, by index.
        text: the text of an error that is to be raised again; None if there was no error.
    """

    def __init__(self, rank: int, names: Sequence[str], *, text: str | None = None) -> None:
        self.text = text
        """The text of the error; None if there was no error."""
        self._rank = rank
        self._names = names

    def raise_again(self) -> None:
        """Raise the stored error again, if there is one."""
        if self.text is not None:
            raise SynclineError(self.text)

    def add_place(self, error: Exception, step: int, bucket: BucketPlan) -> None:
        """Add the rank, the step, the phase and the bucket to the message of `error`, and store the message.

        The caller raises the same exception again, so that a user sees only one traceback.
        """
        names = [self._names[i] for i in bucket.parameters]
        shown = ", ".join(names[:3]) + (f", ... ({len(names)} parameters)" if len(names) > 3 else "")
        place = f"rank {self._rank}, step {step}, backward, bucket {bucket.index} ({shown})"
        self.text = f"{place}: {error}"
        if isinstance(error, CollectiveTimeout):  # its first line names the step and the phase already
            first, newline, details = str(error).partition("\n")
            self.text = f"{first}\n{place}{newline}{details}"
        if isinstance(error, SynclineError):
            error.args = (self.text,)
        else:  # a user's hook raised the error, so its text stays as it is
            error.add_note(f"at {place}")

    # The methods below return an error, which the caller raises.

    def too_late(self, step: int) -> SynclineError:
        """Return the error for a gradient that came after its backward had been ended."""
        return self._error(
            step,
            "a parameter received another gradient after all gradients of the backward had been reduced. This gradient "
            f"came from another re-entrant checkpoint of the same backward. To avoid this, {_CHECKPOINTING}",
        )

    def unfinished(self, step: int, missing: Sequence[int]) -> SynclineError:
        """Return the error for a backward whose end was not seen, because all of its gradients came from checkpoints.

        Args:
            step: the step of the backward.
            missing: indices of the parameters that got no gradient in it.
        """
        names = format_names([self._names[index] for index in missing], num_shown=5)
        return self._error(
            step,
            "the gradients of this backward were not averaged. They all came from re-entrant checkpoints, and "
            f"{len(missing)} of {len(self._names)} parameters got none: {names}. So it was not known when the backward "
            "was over. If an exception ended it, restart all ranks from a checkpoint. Otherwise "
            f"{_CHECKPOINTING}",
        )

    def from_outside(self, step: int, index: int) -> SynclineError:
        """Return the error for a gradient of a parameter that the backward was not expected to reach."""
        return self._error(
            step,
            f"parameter {self._names[index]} received a gradient, although the graph of this backward did not contain "
            f"this parameter when the backward began. With activation checkpointing, {_CHECKPOINTING}",
        )

    def twice(self, step: int, indices: Sequence[int]) -> SynclineError:
        """Return the error for parameters that got more than one gradient in one backward."""
        names = ", ".join(sorted(self._names[index] for index in indices))
        return self._error(
            step,
            f"expected one gradient per parameter, but these parameters received several: {names}. The first gradient "
            "of a parameter may already have been sent when its second gradient was ready. With activation "
            f"checkpointing, {_CHECKPOINTING}",
        )

    def interrupted(self, step: int, num_sent: int, before: str) -> SynclineError:
        """Return the error for a backward that has not ended when something begins that needs its end.

        Args:
            step: the step of the backward.
            num_sent: the number of buckets that the backward had sent.
            before: what begins now.
        """
        sent = "had sent nothing" if not num_sent else f"had already sent data ({num_sent} bucket(s))"
        return self._error(
            step,
            f"{before} began before this backward had ended, and this rank {sent}, so .grad does not hold the mean and "
            "the ranks are out of step. If an exception ended the backward, restart all ranks from a checkpoint. With "
            f"activation checkpointing, {_CHECKPOINTING}",
        )

    def cleared(self, step: int, indices: Sequence[int]) -> SynclineError:
        """Return the error for gradients that were removed from `.grad` before they were sent."""
        names = format_names([self._names[index] for index in indices])
        return self._error(
            step,
            f"expected gradients to stay in .grad until they are averaged, but .grad became None inside of the "
            f"backward: {names}. Remove them after loss.backward(), or in hooks of register_post_accumulate_grad_hook, "
            "which run when .grad holds the mean",
        )

    def _error(self, step: int, problem: str) -> SynclineError:
        self.text = f"rank {self._rank}, step {step}, backward: {problem}"
        return SynclineError(self.text)
