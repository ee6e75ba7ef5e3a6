"""The random number generators of this process, whose states are remembered in each step."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class Generators:
    """The generators of Python, numpy and torch on this process."""

    def __init__(self) -> None:
        self._of_numpy: _OfNumpy | None = None

    def remember(self) -> Callable[[], None]:
        """Return a function that restores the present states."""
        numpy = sys.modules.get("numpy")
        if numpy is not None and self._of_numpy is None:
            self._of_numpy = _OfNumpy(numpy)
        of_python, of_torch = random.getstate(), torch.get_rng_state()
        of_numpy = None if self._of_numpy is None else self._of_numpy.state()
        of_cuda: Iterable[Tensor] = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

        def restore() -> None:
            random.setstate(of_python)
            torch.set_rng_state(of_torch)
            if of_numpy is not None:
                sys.modules["numpy"].random.set_state(of_numpy)
            for index, state in enumerate(of_cuda):
                torch.cuda.set_rng_state(state, index)

        return restore


_NUM_BYTES = 624 * 4 + 4
"""The size of numpy's Mersenne Twister: 624 words, and the position in them."""


class _OfNumpy:
    """numpy's global generator. Its state is copied only if it has changed, because a copy takes 0.1 ms."""

    def __init__(self, numpy: Any) -> None:
        self._random = numpy.random
        self._kind = numpy.random.MT19937
        self._find = getattr(numpy.random, "get_bit_generator", None)  # since numpy 1.24
        self._generator: Any = None
        self._address = 0
        """Where the words of the generator are."""
        self._bytes: bytes | None = None
        self._state: Any = None

    def state(self) -> Any:
        """Return the present state, as `numpy.random.get_state`."""
        seen = self._seen()
        # A number that waits for the next call of `normal` can be used up without a change of the words.
        if seen is None or seen != self._bytes or self._state[3]:
            self._state = self._random.get_state()
            # In case a version of numpy has other bytes there
            self._bytes = seen if seen == _bytes_of(self._state) else None
        return self._state

    def _seen(self) -> bytes | None:
        generator: Any = None if self._find is None else self._find()
        if type(generator) is not self._kind:
            return None
        if generator is not self._generator:
            self._generator, self._address = generator, generator.ctypes.state_address
        return ctypes.string_at(self._address, _NUM_BYTES)


def _bytes_of(state: Any) -> bytes:
    _, words, position, *_ = state
    return bytes(words.tobytes() + int(position).to_bytes(4, sys.byteorder))
