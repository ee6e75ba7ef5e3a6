"""States that have to be equal in full."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

__all__ = ["exact"]


def exact(value: Any) -> Any:
    """Return what `==` compares in full: of a tensor its type, its shape and each number, in a state of any depth."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), repr(value.tolist())
    if isinstance(value, Mapping):
        return {key: exact(one) for key, one in value.items()}
    return type(value)(map(exact, value)) if isinstance(value, list | tuple) else value
