"""Where the random number generators of this process are."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["check_rng_state", "rng_state", "set_rng_state"]


def rng_state() -> dict[str, Any]:
    """Where this process's random number generators are: Python's, NumPy's where it is imported, and torch's."""
    version, numbers, gauss = random.getstate()
    # As a tensor, for 625 numbers a rank would hide all else that there is to read in a manifest.
    python = (version, torch.tensor(numbers), gauss)
    state: dict[str, Any] = {"python": python, "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, gauss = numpy.random.get_state()
        state["numpy"] = (
            str(kind),
            torch.from_numpy(keys.copy()),
            int(position),
            int(has_gauss),
            float(gauss),
        )
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """The inverse of `rng_state`."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    torch.set_rng_state(state["torch"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        kind, keys, *rest = state["numpy"]
        numpy.random.set_state((kind, keys.numpy(), *rest))
    if "cuda" in state and torch.cuda.is_available():
        here: list[Tensor] = state["cuda"][: torch.cuda.device_count()]
        torch.cuda.set_rng_state_all(here)


def check_rng_state(state: Any) -> None:
    """Raise unless `set_rng_state` can set it; nothing is changed.

    Raises:
        ValueError, TypeError, LookupError: it is not what `rng_state` gives.
    """
    version, numbers, gauss = state["python"]
    random.Random().setstate((version, tuple(numbers.tolist()), gauss))
    states = [("cpu", state["torch"]), *(("cuda", one) for one in state.get("cuda", ()))]
    for device, one in states:
        if not isinstance(one, Tensor) or one.dtype is not torch.uint8 or one.dim() != 1:
            raise ValueError("expected states of torch's generators in bytes")
        if device == "cpu":
            try:
                torch.Generator().set_state(one)
            except RuntimeError as error:
                raise ValueError(str(error)) from None
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        kind, keys, *rest = state["numpy"]
        numpy.random.RandomState().set_state((kind, keys.numpy(), *rest))
