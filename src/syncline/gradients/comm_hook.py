"""Communication hooks: a user's function that replaces our all_reduce, with torch's interface.

`torch.distributed.GradBucket` cannot be created from Python, so hooks get an object with the same methods. torch's
own hooks (`torch.distributed.algorithms.ddp_comm_hooks`) and hooks written for torch's class work unchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from syncline._torch.tensors import TorchFuture


class GradBucket:
    """One bucket as passed to a communication hook, with the methods of torch's `GradBucket`.

    Args:
        index: index of the bucket; hooks are called in index order.
        buffer: all gradients of the bucket, flat, of shape (numel,), not divided.
        parameters: the bucket's parameters.
        gradients: views of `buffer` in the parameters' shapes.
        is_last: whether this is the last bucket of the backward.
    """

    def __init__(
        self,
        *,
        index: int,
        buffer: Tensor,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        is_last: bool,
    ) -> None:
        self._index = index
        self._buffer = buffer
        self._parameters = list(parameters)
        self._gradients = list(gradients)
        self._is_last = is_last

    def index(self) -> int:
        """Return the index of the bucket."""
        return self._index

    def buffer(self) -> Tensor:
        """Return the flat tensor."""
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """Return views of the flat tensor, one per parameter; empty after the buffer was replaced."""
        return list(self._gradients)

    def parameters(self) -> list[Tensor]:
        """Return the parameters, in the order of `gradients`."""
        return list(self._parameters)

    def is_last(self) -> bool:
        """Return whether this is the last bucket of the backward."""
        return self._is_last

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the flat tensor (by a compressed one, say). The result is still the value of the hook's future."""
        self._buffer = buffer
        self._gradients = []


@dataclass(frozen=True, kw_only=True, slots=True)
class CommHook:
    """A registered hook and its state."""

    state: object
    hook: Callable[[Any, Any], Any]
    label: str = ""
    averages: bool = False
    """Whether the hook is known to return the mean over all ranks, so that another divisor can be applied."""

    @property
    def name(self) -> str:
        """The label, or else the hook's qualified name; ranks compare their hooks by it."""
        return self.label or qualified_name(self.hook)

    def refuse_own_division(self, remedy: str) -> None:
        """Raise if the hook divides the gradients, so that they cannot be divided by a number of items.

        Args:
            remedy: what to do, the end of the message.

        Raises:
            ValueError: it does.
        """
        if not self.averages:
            raise ValueError(
                f"normalize_by cannot divide what communication hook {self.name} reduces: the hook does its own "
                f"division. {remedy}"
            )

    def __call__(self, bucket: GradBucket) -> torch.futures.Future[Any]:
        future = self.hook(self.state, bucket)
        if not isinstance(future, TorchFuture):
            raise TypeError(
                f"communication hook {self.name}: expected it to return a torch.futures.Future of the reduced flat "
                f"tensor, got {type(future).__name__}; `dist.all_reduce(..., async_op=True).get_future()` gives one"
            )
        return cast("torch.futures.Future[Any]", future)


def qualified_name(hook: Callable[..., Any]) -> str:
    """Return the name by which ranks compare callables; for a callable object, that of its class."""
    name: str = getattr(hook, "__qualname__", type(hook).__name__)
    return name


def checked_comm_hook(state: object, hook: object, *, label: str = "") -> CommHook:
    """Return the hook with its state, after a check of its signature.

    Raises:
        TypeError: the hook is not callable.
        ValueError: its annotations contradict the signature of a communication hook.
    """
    if not callable(hook):
        raise TypeError(f"Communication hook must be callable, got {type(hook).__name__}.")
    signature = inspect.signature(hook)
    bucket = signature.parameters.get("bucket")
    annotation = None if bucket is None else bucket.annotation  # a string if annotations are postponed
    torchs = dist.GradBucket  # type: ignore[attr-defined]
    allowed = (inspect.Parameter.empty, object, torchs, GradBucket)
    if isinstance(annotation, type) and annotation not in allowed:
        raise ValueError(
            f"Communication hook: bucket annotation should be dist.GradBucket, got {annotation}."
        )
    returned = signature.return_annotation
    is_open = returned in (inspect.Signature.empty, object, Any) or isinstance(returned, str)
    if not is_open and "Future" not in str(returned):
        raise ValueError(
            f"Communication hook: return annotation should be torch.futures.Future[torch.Tensor], got {returned}."
        )
    return CommHook(state=state, hook=hook, label=label)
