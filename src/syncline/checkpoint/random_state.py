"""The state of this process's random number generators: get, set, check, compare and send it."""

from __future__ import annotations

import ctypes
import hashlib
import io
import random
import sys
from array import array
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["check_rng_state", "packed", "positions", "rng_state", "set_rng_state", "unpacked"]


def rng_state() -> dict[str, Any]:
    """Return the state of Python's generator, NumPy's if it is imported, and torch's (CUDA if in use)."""
    version, numbers, gauss = random.getstate()
    # A tensor keeps the manifest readable; as JSON, 625 numbers per rank would hide everything else.
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
    """Set the generators to a state from `rng_state`."""
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
    """Raise unless `set_rng_state` can set `state`; change nothing.

    Raises:
        ValueError, TypeError, LookupError: it is not a state from `rng_state`.
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


def positions() -> dict[str, str]:
    """Return 16 digits for each generator; they change when a number is drawn.

    Example:
        >>> before = positions()
        >>> _ = torch.rand(1)
        >>> [name for name, position in positions().items() if position != before[name]]
        ["torch's on the CPU"]
    """
    version, numbers, gauss = random.getstate()
    found = {"Python's": _digest(array("Q", numbers).tobytes(), repr((version, gauss)))}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        found["NumPy's"] = _digest(keys.tobytes(), repr((str(kind), *map(float, rest))))
    found["torch's on the CPU"] = _digest(_bytes_of(torch.get_rng_state()))
    if torch.cuda.is_initialized():
        for index, state in enumerate(_from_the_current_device(torch.cuda.get_rng_state_all())):
            where = f"CUDA device {index} of this rank" if index else "CUDA"
            found[f"torch's on {where}"] = _digest(_bytes_of(state))
    return found


def packed() -> bytes:
    """Return `rng_state()` as bytes that can be sent to another rank."""
    content = io.BytesIO()
    state = rng_state()
    torch.save(state | {"cuda": _from_the_current_device(state.get("cuda", []))}, content)
    return content.getvalue()


def unpacked(content: bytes) -> dict[str, Any]:
    """Return the state from `packed`, for `set_rng_state`, without the devices that this process does not use."""
    state: dict[str, Any] = torch.load(io.BytesIO(content), weights_only=True)
    of_devices = state.pop("cuda")
    if torch.cuda.is_initialized():
        here = torch.cuda.get_rng_state_all()
        first = torch.cuda.current_device()
        for index, one in enumerate(of_devices[: len(here)]):
            here[(first + index) % len(here)] = one
        state["cuda"] = here
    return state


def _from_the_current_device(states: list[Tensor]) -> list[Tensor]:
    """Rotate the states so that this rank's device is first, because rank 1's cuda:1 matches rank 0's cuda:0."""
    first = torch.cuda.current_device() if states else 0
    return states[first:] + states[:first]


def _bytes_of(state: Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.numel())


def _digest(*parts: bytes | str) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part if isinstance(part, bytes) else part.encode())
    return digest.hexdigest()
