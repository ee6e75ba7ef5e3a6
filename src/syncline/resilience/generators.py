"""The random number generators of this process, whose states are remembered in each step.

Python's and numpy's generators are Mersenne Twisters: 624 words, and a position in them. A copy of such a state takes
20 to 100 microseconds, and most training steps draw no number from them. So a state is copied only if it has changed.
Each number changes the position; after 624 numbers, all words change. So the position and the first words tell whether
any number was drawn. They are read from the memory of the generator. Each copy checks that they are really there; if
they are not, as in another implementation of Python, states are always copied.
"""

from __future__ import annotations

import _random
import ctypes
import random
import struct
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class Generators:
    """The generators of Python, numpy and torch on this process."""

    def __init__(self) -> None:
        self._of_python = _OfPython()
        self._of_numpy: _OfNumpy | None = None

    def remember(self) -> Callable[[], None]:
        """Return a function that restores the present states."""
        numpy = sys.modules.get("numpy")
        if numpy is not None and self._of_numpy is None:
            self._of_numpy = _OfNumpy(numpy)
        of_python, of_torch = self._of_python.state(), torch.get_rng_state()
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


_NUM_WORDS = 4
"""The number of words that are looked at: two states with the same position differ in them."""

_WORDS = struct.Struct(f"={_NUM_WORDS}I")

_POSITION = struct.Struct("=i")


class _OfPython:
    """Python's generator: the position, and then the words, behind the header of the object."""

    def __init__(self) -> None:
        self._generator: Any = getattr(random.getstate, "__self__", None)
        self._address: int | None = None
        size = object.__basicsize__ + _POSITION.size + _WORDS.size
        if isinstance(self._generator, _random.Random) and size <= _random.Random.__basicsize__:
            self._address = id(self._generator) + object.__basicsize__
        self._seen: bytes | None = None
        self._state: Any = None

    def state(self) -> Any:
        """Return the present state, as `random.getstate`."""
        seen = self._look()
        # A number that waits for the next call of `gauss` can be used up without a change of the words.
        if seen is None or seen != self._seen or self._state[2] is not None:
            self._state = random.getstate()
            *words, position = self._state[1]
            self._seen = seen if seen == _POSITION.pack(position) + _WORDS.pack(*words[:_NUM_WORDS]) else None
        return self._state

    def _look(self) -> bytes | None:
        if self._address is None or self._generator.gauss_next is not None:
            return None
        return ctypes.string_at(self._address, _POSITION.size + _WORDS.size)


class _OfNumpy:
    """numpy's global generator: the words, and then the position, at the address that numpy tells."""

    _NUM_BYTES = 624 * 4

    def __init__(self, numpy: Any) -> None:
        self._random = numpy.random
        self._kind = numpy.random.MT19937
        self._find = getattr(numpy.random, "get_bit_generator", None)  # since numpy 1.24
        self._generator: Any = None
        self._address = 0
        self._seen: bytes | None = None
        self._state: Any = None

    def state(self) -> Any:
        """Return the present state, as `numpy.random.get_state`."""
        seen = self._look()
        # A number that waits for the next call of `normal` can be used up without a change of the words.
        if seen is None or seen != self._seen or self._state[3]:
            self._state = self._random.get_state()
            _, words, position, *_ = self._state
            self._seen = (
                seen
                if seen == _WORDS.pack(*words[:_NUM_WORDS].tolist()) + _POSITION.pack(int(position))
                else None
            )
        return self._state

    def _look(self) -> bytes | None:
        generator: Any = None if self._find is None else self._find()
        if type(generator) is not self._kind:
            return None
        if generator is not self._generator:
            self._generator, self._address = generator, generator.ctypes.state_address
        first = ctypes.string_at(self._address, _WORDS.size)
        return first + ctypes.string_at(self._address + self._NUM_BYTES, _POSITION.size)
