"""A user's communication hook in place of our all_reduce, with the interface of torch's.

`torch.distributed.GradBucket` cannot be made from Python, so hooks get an object with the same methods. Hooks of
torch (`torch.distributed.algorithms.ddp_comm_hooks`) and those written for torch's class run on it unchanged.
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

__all__ = ["CommHook", "GradBucket", "checked_comm_hook", "qualified_name"]


class GradBucket:
    """One bucket as a communication hook sees it: torch's `GradBucket`, method for method.

    Args:
        index: which bucket; they are handed out in index order.
        buffer: all gradients of the bucket, flat, of shape (numel,); not divided by anything.
        parameters: the bucket's parameters.
        gradients: views of `buffer` in the parameters' shapes.
        is_last: whether it is the last bucket of this backward.
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
        """Which bucket."""
        return self._index

    def buffer(self) -> Tensor:
        """The flat tensor."""
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """Views of the flat tensor, a parameter each; empty when the buffer was replaced."""
        return list(self._gradients)

    def parameters(self) -> list[Tensor]:
        """The parameters, in the order of `gradients`."""
        return list(self._parameters)

    def is_last(self) -> bool:
        """Whether it is the last bucket of this backward."""
        return self._is_last

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the flat tensor (a compressed one, say); what the hook's future holds is what counts."""
        self._buffer = buffer
        self._gradients = []


@dataclass(frozen=True, kw_only=True, slots=True)
class CommHook:
    """A registered hook and its state."""

    state: object
    hook: Callable[[Any, Any], Any]
    label: str = ""
    averages: bool = False
    """It is known to give the mean over all ranks, so that what it gives can be divided by something else."""

    @property
    def name(self) -> str:
        """The label or the qualified name, by which ranks compare their hooks."""
        return self.label or qualified_name(self.hook)

    def __call__(self, bucket: GradBucket) -> torch.futures.Future[Any]:
        future = self.hook(self.state, bucket)
        if not isinstance(future, TorchFuture):
            raise TypeError(
                f"communication hook {self.name}: expected it to return a torch.futures.Future of the reduced flat "
                f"tensor, got {type(future).__name__}; `dist.all_reduce(..., async_op=True).get_future()` gives one"
            )
        return cast("torch.futures.Future[Any]", future)


def qualified_name(hook: Callable[..., Any]) -> str:
    """By which ranks compare callables; for an object that is called, its class."""
    name: str = getattr(hook, "__qualname__", type(hook).__name__)
    return name


def checked_comm_hook(state: object, hook: object, *, label: str = "") -> CommHook:
    """The hook, if its signature is one that a hook can have.

    Raises:
        TypeError: not callable.
        ValueError: its annotations say that it is something else.
    """
    if not callable(hook):
        raise TypeError(f"Communication hook must be callable, got {type(hook).__name__}.")
    signature = inspect.signature(hook)
    bucket = signature.parameters.get("bucket")
    annotation = None if bucket is None else bucket.annotation  # text, where annotations are postponed
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
