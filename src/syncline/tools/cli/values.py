"""The types of options and arguments, for argparse. Each error says what was expected, and what was given."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from syncline.tools.plan.cluster import parse_rate, parse_seconds
from syncline.words import shortened

T = TypeVar("T")
N = TypeVar("N", int, float)

_FACTORS = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


def checked(parse: Callable[[str], T], expected: str) -> Callable[[str], T]:
    """Return a type of values.

    Args:
        parse: returns the value that a text stands for. It raises ValueError or OverflowError if there is none.
        expected: what is expected instead, for the error.

    Examples:
        >>> checked(float, "a number")("much")
        Traceback (most recent call last):
        argparse.ArgumentTypeError: expected a number, got 'much'
    """

    def parsed(text: str) -> T:
        with suppress(ValueError, OverflowError):
            return parse(text)
        raise argparse.ArgumentTypeError(f"expected {expected}, got {shortened(text, 40)!r}")

    return parsed


def number(parse: Callable[[str], N], expected: str, least: float, most: float) -> Callable[[str], N]:
    """Return a type of numbers from `least` to `most`; see `checked`."""

    def bounded(text: str) -> N:
        value = parse(text)
        if not least <= value <= most:
            raise ValueError
        return value

    return checked(bounded, expected)


def integer(what: str, least: int, most: int) -> Callable[[str], int]:
    """Return a type of integers from `least` to `most`. Errors name what they count, as in "a number of ranks"."""
    return number(int, f"{what} from {least:,} to {most:,}", least, most)


def word(is_right: Callable[[str], object], expected: str) -> Callable[[str], str]:
    """Return a type of texts that stay as they are. `is_right` is false, or raises ValueError, for any other text."""

    def same(text: str) -> str:
        if not is_right(text):
            raise ValueError
        return text

    return checked(same, expected)


def _scaled(text: str) -> int:
    factor = _FACTORS.get(text[-1:].upper())
    return round(float(text[:-1]) * factor if factor else float(text))


def _num_bytes(text: str) -> int:
    return _scaled(text.strip().upper().removesuffix("IB").removesuffix("B"))


def num_hosts(text: str) -> tuple[int, int]:
    """Return the smallest and the largest number of hosts that a text such as "1:4" or "2" stands for.

    Raises:
        ValueError: the text is something else.
    """
    least, colon, most = text.partition(":")
    found = int(least), int(most if colon else least)
    if not 1 <= found[0] <= found[1] <= 1_000_000:
        raise ValueError
    return found


def trace_folder(text: str) -> Path:
    """Return the path of the directory of a trace, which need not exist. This is a type.

    Raises:
        OSError: the path is something else, or this user may not list it.
    """
    path = Path(text)
    if path.exists():
        os.scandir(path).close()
    return path


def output_file(text: str) -> Path:
    """Return the path of a file that can be written after the work. This is a type."""
    path = Path(text)
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise argparse.ArgumentTypeError(
            f"expected the path of a file in a folder that exists, which this user may write, got {text!r}"
        )
    return path


RANKS = integer("a number of ranks", 1, 1024)
"""The ranks of one host."""

HOSTS = integer("a number of hosts", 1, 1_000_000)

STEP = integer("the number of a step", 1, 1_000_000_000)

PROCESSES = word(
    lambda text: text.isalpha() or 1 <= int(text) <= 1024,
    "a number of processes from 1 to 1,024, or auto, cpu or gpu",
)

NNODES = word(num_hosts, "a number of hosts from 1 to 1,000,000, or MIN:MAX")

START_METHOD = word(("spawn", "fork", "forkserver").__contains__, "spawn, fork or forkserver")

STREAMS = word(
    re.compile(r"[0-3]|\d+:[0-3](,\d+:[0-3])*").fullmatch,
    "0 (nothing), 1 (stdout), 2 (stderr), 3 (both), or one of them for each local rank, as in 0:3,1:2",
)

FOLDER = word(lambda text: Path(text).is_dir() or not Path(text).exists(), "a folder")
"""A folder, which need not exist."""

PARAMETERS = number(_scaled, "a number of parameters such as 124M or 7B", 1, 10**15)

BYTES = number(_num_bytes, "a size such as 64GB, up to 1,000,000TB", 1, 10**18)

RATE = number(parse_rate, "a bandwidth such as 100Mbit, 25Gbit or 3GB, up to 1,000TB (a second)", 1, 10**15)

TIME = number(parse_seconds, "a time such as 80ms or 0.9s, from 1ns to 1,000,000s", 1e-9, 1e6)

LATENCY = number(parse_seconds, "a time such as 50us or 0.2ms, up to 1,000s", 0, 1000)
