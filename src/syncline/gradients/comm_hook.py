"""Communication hooks: a user's function that replaces Syncline's all_reduce, with torch's interface.

`torch.distributed.GradBucket` cannot be created from Python, so hooks receive an object with the same methods. torch's
own hooks (`torch.distributed.algorithms.ddp_comm_hooks`) and hooks written for torch's class work unchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from syncline._torch.tensors import TorchFuture
from syncline.errors import SynclineError
from syncline.transport.work import Work


class GradBucket:
    """One bucket as passed to a communication hook, with the methods of torch's `GradBucket`.

    Args:
        index: index of the bucket. Hooks are called in the order of the indices.
        buffer: all gradients of the bucket, not divided: a flat tensor of shape (numel,), or one sparse gradient.
        parameters: the bucket's parameters.
        gradients: views of `buffer` in the parameters' shapes; empty for a sparse gradient, as in torch.
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
        """Return the flat tensor of the gradients."""
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """Return views of the flat tensor, one per parameter; an empty list after the flat tensor was replaced."""
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
    """A registered communication hook and its state."""

    state: object
    hook: Callable[[Any, Any], Any]
    label: str = ""
    averages: bool = False
    """Whether the hook is known to return the mean over all ranks, so that another divisor can be applied."""

    @property
    def name(self) -> str:
        """The label, or else the hook's qualified name. Ranks compare their hooks by this name."""
        return self.label or qualified_name(self.hook)

    def refuse_own_division(self, remedy: str) -> None:
        """Check that the hook returns a mean over all ranks, which can be turned into a mean over items.

        Args:
            remedy: the end of the message, which states what to do.

        Raises:
            ValueError: the hook may divide the gradients by another number.
        """
        if not self.averages:
            raise ValueError(
                "normalize_by cannot divide the gradients by the number of items, because communication hook "
                f"{self.name} already divides them. {remedy}"
            )

    def start(self, bucket: GradBucket, take_result: Callable[[Tensor], object]) -> Work:
        """Call the hook for a bucket; return a work whose `wait` passes the hook's result to `take_result`.

        Raises:
            TypeError: the hook returned no future.
        """
        buffer = bucket.buffer()  # the hook may replace it
        future = self.hook(self.state, bucket)
        if not isinstance(future, TorchFuture):
            raise TypeError(
                f"communication hook {self.name}: expected the hook to return a torch.futures.Future that holds the "
                f"reduced flat tensor, got {type(future).__name__}. For example, return "
                "`dist.all_reduce(..., async_op=True).get_future()`"
            )

        def take(result: object) -> None:
            if isinstance(result, list | tuple) and len(result) == 1:
                (result,) = result
            is_flat = not buffer.is_sparse
            if isinstance(result, Tensor) and (
                result.shape == buffer.shape or (is_flat and result.numel() == buffer.numel())
            ):
                take_result(result)
                return
            got = (
                f"one of shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
            )
            raise SynclineError(
                f"communication hook {self.name}, bucket {bucket.index()}: expected the hook's future to hold a tensor "
                f"of shape {tuple(buffer.shape)}, got {got}. Return a future that holds the bucket's buffer, reduced"
            )

        return _HookWork(future, take)


class _HookWork(Work):
    """The reduction of one bucket by a communication hook, under way.

    Args:
        future: the future that the hook returned.
        take: a function to call with the value of the future.
    """

    __slots__ = ("_future", "_take")

    def __init__(self, future: Any, take: Callable[[object], None]) -> None:
        self._future = future
        self._take = take

    def wait(self, timeout_seconds: float | None = None) -> None:
        self._take(self._future.wait())

    def is_completed(self) -> bool:
        return bool(self._future.done())


def qualified_name(hook: Callable[..., Any]) -> str:
    """Return the name by which ranks compare callables; for a callable object, the name of its class."""
    name: str = getattr(hook, "__qualname__", type(hook).__name__)
    return name


def checked_comm_hook(state: object, hook: object, *, label: str = "") -> CommHook:
    """Return a communication hook with its state, after a check of its signature.

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
