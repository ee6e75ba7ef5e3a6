"""Communication hooks, which are functions of the user that reduce buckets in place of all_reduce.

The interface is that of torch. `torch.distributed.GradBucket` cannot be created from Python, so hooks receive an object
with the same methods. torch's own hooks (`torch.distributed.algorithms.ddp_comm_hooks`) and hooks written for torch's
class work unchanged.
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
    """The description of one bucket that a communication hook receives. It has the methods of torch's `GradBucket`.

    Args:
        index: index of the bucket. Hooks are called in the order of the indices.
        buffer: a flat tensor of shape (numel,) with all gradients of the bucket, or one sparse gradient. The gradients
            are not divided by the number of ranks.
        parameters: the parameters of the bucket.
        gradients: one view of `buffer` per parameter, in the parameter's shape. As in torch, the list is empty for a
            sparse gradient.
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
        """Return the tensor that holds all gradients of the bucket, or the tensor given to `set_buffer`."""
        return self._buffer

    def gradients(self) -> list[Tensor]:
        """Return one view of the flat tensor per parameter; [] for a sparse gradient, and [] after `set_buffer`."""
        return list(self._gradients)

    def parameters(self) -> list[Tensor]:
        """Return the parameters of the bucket, in the order of `gradients`."""
        return list(self._parameters)

    def is_last(self) -> bool:
        """Return whether this is the last bucket of the backward."""
        return self._is_last

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the tensor that the method `buffer` returns, for example by a compressed tensor.

        This does not set the result of the reduction, which is the value of the hook's future.
        """
        self._buffer = buffer
        self._gradients = []


_LOCAL = {"noop_hook", "post_localSGD_hook"}
"""The names of torch's communication hooks that leave gradients local."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommHook:
    """A registered communication hook and its state."""

    state: object
    hook: Callable[[Any, Any], Any]
    label: str = ""
    averages: bool = False
    """Whether the hook is known to return the mean over all ranks. Only such a hook can be used with `normalize_by`."""

    @property
    def name(self) -> str:
        """The name by which ranks compare their hooks: the label or, without a label, the hook's qualified name."""
        return self.label or qualified_name(self.hook)

    @property
    def lets_replicas_drift(self) -> bool:
        """Whether this is a hook of torch that leaves gradients local, so that replicas differ for some steps."""
        return getattr(self.hook, "__name__", "") in _LOCAL

    def refuse_own_division(self, remedy: str) -> None:
        """Raise an error if the hook is not known to return the mean over all ranks.

        `normalize_by` can turn such a mean into a mean over items.

        Args:
            remedy: the last sentences of the error message, which state what to do.

        Raises:
            ValueError: the hook is not known to return the mean over all ranks.
        """
        if not self.averages:
            raise ValueError(
                "normalize_by cannot divide the gradients by the number of items, because communication hook "
                f"{self.name} already divides them. {remedy}"
            )

    def start(self, bucket: GradBucket, take_result: Callable[[Tensor], object]) -> Work:
        """Call the hook for a bucket, and return the `Work` that waits for the hook's result.

        Args:
            bucket: the bucket that the hook reduces.
            take_result: a function that takes the reduced tensor. `wait` of the returned `Work` calls it.

        Raises:
            TypeError: the hook returned no future.
        """
        buffer = bucket.buffer()  # the hook may replace it
        future = self.hook(self.state, bucket)
        if not isinstance(future, TorchFuture):
            raise TypeError(
                f"communication hook {self.name}: expected the hook to return a torch.futures.Future that holds the "
                f"reduced tensor, got an object of type {type(future).__name__}. Return a future, for example "
                "`dist.all_reduce(bucket.buffer(), async_op=True).get_future()`"
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
                f"a tensor of shape {tuple(result.shape)}"
                if isinstance(result, Tensor)
                else type(result).__name__
            )
            raise SynclineError(
                f"communication hook {self.name}, bucket {bucket.index()}: expected the hook's future to hold a tensor "
                f"of shape {tuple(buffer.shape)}, got {got}. Return a future that holds the reduced values of "
                "bucket.buffer()"
            )

        return _HookWork(future, take)


class _HookWork(Work):
    """The work that waits until a communication hook has reduced one bucket.

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
    """Return the qualified name of a hook, or the name of its class if the hook is a callable object."""
    name: str = getattr(hook, "__qualname__", type(hook).__name__)
    return name


def checked_comm_hook(state: object, hook: object, *, label: str = "") -> CommHook:
    """Check the signature of a communication hook, and return the hook together with its state.

    Raises:
        TypeError: the hook is not callable.
        ValueError: the hook's annotations contradict the signature of a communication hook.
    """
    if not callable(hook):
        raise TypeError(
            f"Communication hook must be callable, got an object of type {type(hook).__name__}. Pass a "
            "function of (state, bucket)"
        )
    signature = inspect.signature(hook)
    bucket = signature.parameters.get("bucket")
    annotation = None if bucket is None else bucket.annotation  # a string if annotations are postponed
    torchs = dist.GradBucket  # type: ignore[attr-defined]
    allowed = (inspect.Parameter.empty, object, torchs, GradBucket)
    if isinstance(annotation, type) and annotation not in allowed:
        raise ValueError(
            f"Communication hook: bucket annotation should be dist.GradBucket, got {annotation}. Annotate the argument "
            "`bucket` as dist.GradBucket, or remove its annotation"
        )
    returned = signature.return_annotation
    is_open = returned in (inspect.Signature.empty, object, Any) or isinstance(returned, str)
    if not is_open and "Future" not in str(returned):
        raise ValueError(
            f"Communication hook: return annotation should be torch.futures.Future[torch.Tensor], got {returned}. "
            "Correct or remove the return annotation"
        )
    return CommHook(state=state, hook=hook, label=label)
