"""Checks of the values of options, before a command begins its work: numbers have bounds, and files can be used."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from syncline.tools.cli.options import UsageError
from syncline.words import shortened

MOST_RANKS = 1024
"""The largest number of ranks on one host."""

MOST_HOSTS = 1_000_000

MOST_STEPS = 1_000_000_000

_FIRST_BYTES = 4096


def check_number(option: str, value: float | None, least: float, most: float, what: str = "") -> None:
    """Raise an error if the value of an option is out of bounds. None means that the option was not given.

    Args:
        option: the name of the option.
        value: its value.
        least: the smallest value.
        most: the largest value.
        what: what is counted, as in "ranks"; empty for nothing.

    Raises:
        UsageError: the value is not a number between the bounds.

    Examples:
        >>> check_number("--hosts", 10**11, 1, MOST_HOSTS)
        Traceback (most recent call last):
        syncline.tools.cli.options.UsageError: --hosts 100000000000: expected at most 1,000,000
    """
    if value is None or least <= value <= most:
        return
    words = f"at most {most:,}" if value > most else f"at least {least:,}"
    raise UsageError(f"{option} {shortened(str(value), 40)}: expected {words}{what and ' '}{what}")


def check_input(option: str, path: Path) -> None:
    """Raise an error if a path is not a file that this user can read.

    A pipe or a device is refused, because a read from it may wait for ever.

    Args:
        option: the name of the option, with a space behind it; empty for an argument.
        path: its value.

    Raises:
        UsageError: it is something else.
    """
    kind = _kind_of(path)
    if kind is None:
        raise UsageError(f"cannot read {option}{path}: No such file or directory")
    if kind != "file":
        raise UsageError(f"{option}{path}: expected a file, got a {kind}")
    if not os.access(path, os.R_OK):
        raise UsageError(f"{option}{path}: expected a file that this user may read")


def check_directory(path: Path) -> None:
    """Raise an error if a path exists, but is no folder that this user can list.

    Raises:
        UsageError: it is something else.
    """
    kind = _kind_of(path)
    if kind is None:
        return
    if kind != "folder":
        raise UsageError(f"{path} is a {kind}: expected the directory of a trace")
    if not os.access(path, os.R_OK | os.X_OK):
        raise UsageError(f"{path}: expected a directory that this user may read")


def is_text(path: Path) -> bool:
    """Return whether a file can be the source of a Python program, which has no null bytes."""
    with path.open("rb") as file:
        return b"\0" not in file.read(_FIRST_BYTES)


def check_output(option: str, path: Path) -> None:
    """Raise an error if a file cannot be written after the work.

    Raises:
        UsageError: the path names no file in a folder that exists, or this user may not write it.
    """
    kind = _kind_of(path)
    if kind in ("folder", "pipe", "socket"):
        raise UsageError(f"{option} {path}: expected a file, got a {kind}")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{option} {path}: expected the path of a file in a folder that exists")
    if not os.access(path if kind else path.absolute().parent, os.W_OK):
        raise UsageError(f"{option} {path}: expected a file that this user may write")


def write_file(option: str, path: Path, text: str, *, follows_link: bool = True) -> None:
    """Write a text to a file.

    Args:
        option: the option that names another file.
        path: the file. A pipe needs a reader: without one, the command would wait for ever.
        text: the text.
        follows_link: whether the file may be a link to another one. It must not if the user has not named it: who made
            the folder would choose which file of the user is overwritten.

    Raises:
        UsageError: the file cannot be written.
    """
    fd = _opened(option, path, follows_link=follows_link)
    try:
        with open(fd, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError as error:
        raise _cannot_write(option, path, error) from None


def _opened(option: str, path: Path, *, follows_link: bool) -> int:
    """Return the descriptor of a file that is opened to be written, without a wait for the reader of a pipe."""
    waits = getattr(os, "O_NONBLOCK", 0)
    no_link = 0 if follows_link else getattr(os, "O_NOFOLLOW", 0)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | waits | no_link, 0o666)
    except OSError as error:
        if no_link and path.is_symlink():
            raise UsageError(f"cannot write {path}: it is a link: name a file with {option}") from None
        if _kind_of(path) == "pipe":
            raise UsageError(f"cannot write {path}: no process reads this pipe") from None
        raise _cannot_write(option, path, error) from None
    if waits:
        os.set_blocking(fd, True)
    return fd


def _cannot_write(option: str, path: Path, error: OSError) -> UsageError:
    return UsageError(f"cannot write {path}: {error.strerror}: name another file with {option}")


def _kind_of(path: Path) -> str | None:
    """Return what is at a path, in a word; None if there is nothing.

    Raises:
        UsageError: the path cannot be looked up.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UsageError(f"cannot use {path}: {error.strerror}") from None
    kinds = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}
    return kinds.get(stat.S_IFMT(mode), "device")
