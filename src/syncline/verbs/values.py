"""What ranks tell each other without changing anything in place: mean, and barrier."""

from __future__ import annotations

from typing import Any, TypeVar, overload

from torch import Tensor

from syncline.sync.agreement import exchange
from syncline.sync.metrics import weighted_mean
from syncline.verbs.common import Group
from syncline.world import transport_of

__all__ = ["barrier", "mean"]

T = TypeVar("T")


def barrier(group: Group = None) -> None:
    """Return when every rank of the group has called it.

    Args:
        group: see `broadcast_`.

    Raises:
        CollectiveTimeout: a rank did not come before the deadline.
        CollectiveMismatch: a rank called something else.
    """
    transport = transport_of(group)
    with transport.turn:
        exchange(transport, "sl.barrier", [])


@overload
def mean(values: float, weight: float | Tensor = 1.0, *, group: Group = None) -> float: ...
@overload
def mean(values: T, weight: float | Tensor = 1.0, *, group: Group = None) -> T: ...
def mean(values: Any, weight: float | Tensor = 1.0, *, group: Group = None) -> Any:
    """The weighted mean of `values` over the ranks; the same bits on every rank.

    Up to eight numbers cost one collective, more of them two; each tensor of 4,096 elements or more one besides.

    Args:
        values: a number, a tensor, or nested dicts, lists, tuples and dataclasses of them; names, shapes and
            dtypes must be the same on all ranks. Nothing is changed in place.
        weight: how much this rank counts, say the number of items behind its values: finite, at least 0. A rank
            of weight 0 contributes nothing, even if its values are NaN.
        group: see `broadcast_`.

    Returns:
        The same containers. Numbers (int and bool too) become float; tensors keep shape, dtype and device, but
        integer and bool tensors become float32. Detached from autograd.

    Raises:
        ContractMismatch: the ranks' values have different structures; the same text on every rank.
        ValueError: a weight is negative, infinite or NaN, or all weights are 0; a tensor is not dense (sparse, nested,
            quantized); on every rank.
        TypeError: a leaf is neither number nor tensor; on every rank.

    Example:
        >>> import syncline as sl
        >>> loss, num_correct, num_samples = 0.25, 60, 64
        >>> sl.mean({"loss": loss, "accuracy": num_correct / num_samples}, weight=num_samples)
        {'loss': 0.25, 'accuracy': 0.9375}
    """
    transport = transport_of(group)
    with transport.turn:
        return weighted_mean(values, weight, transport)
