"""Tracebacks as users read them: brief, and once for all ranks of a host. No other module formats a traceback.

[Note: what a brief traceback leaves out]

One mistake often raises on every rank, far inside of Syncline or torch. A brief traceback keeps the lines that help to
find the mistake:

- frames of the program and of other packages. Frames of Syncline and torch, and those of the standard library that
  they have called, are left out, unless there are no others;
- of a deep stack, the outermost frame and the innermost ones;
- of a chain of exceptions, the last two;
- of a long text of an error of Syncline, the first lines and the last one, which says what to do.

Errors of several ranks that differ in numbers only count as equal. The first rank of a host that raises such an error
prints it, and the others are silent. Errors about the group (`is_of_group`) name all ranks, so one of them is enough.
`PeerFailed` repeats an error that its own rank has printed. The launcher names all ranks that have failed.

Each rank claims an error by a file beside the error files of the host's ranks, which exist under `syncline run` and
torchrun. Whole tracebacks, of every rank: `syncline run --verbose`, or `environment.WHOLE_TRACEBACKS`.

This module imports only the standard library, so that `tools/launch/worker.py` can load it before torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep

_WORKER = os.path.join(_PACKAGE, "tools", "launch", "worker.py")

_STANDARD_LIBRARY = (str(sysconfig.get_path("stdlib")) + os.sep, "<frozen ")

_MAX_FRAMES = 4

_MAX_LINES = 13
"""The number of lines of a brief traceback of an error of Syncline, if its text can be cut."""

_CLAIM = ".printed-"

HIDDEN = "(lines of torch and Syncline are hidden; SYNCLINE_WHOLE_TRACEBACKS=1 shows them)"
"""The last line of a brief traceback, where no launcher says how to see the whole one."""


@dataclass(frozen=True, kw_only=True)
class Described:
    """The texts of one exception, without a newline at the end."""

    brief: str
    """The text that a user reads first; see the note above."""
    whole: str
    """The traceback as Python prints it, without the frames that had started the program."""
    is_of_group: bool
    """Whether it is an error about the group, which names all ranks."""
    is_of_peer: bool
    """Whether it repeats the error of another rank."""


def describe(error: BaseException, tb: TracebackType | None = None) -> Described:
    """Return the texts of an exception.

    Args:
        error: the exception.
        tb: the traceback to show. None means the traceback of the exception.

    Examples:
        >>> describe(ValueError("no data")).brief
        'ValueError: no data'
    """
    begin = _from_the_program(tb or error.__traceback__)
    shown: Any = traceback.TracebackException(type(error), error, begin, compact=True)
    if begin is None:
        shown.stack = None  # as Python does, it then prints no header
    is_ours = bool(shown.stack) and shown.stack[-1].filename.startswith(_PACKAGE)
    end = _suggestion(error)
    whole = "".join(shown.format()).rstrip("\n") + end
    before = shown.__cause__ or (None if shown.__suppress_context__ else shown.__context__)
    for one in filter(None, (shown, before)):
        one.stack = _Lines(_brief_stack(one.stack)) if one.stack else None
    if before is not None:  # of a chain, the last two are shown
        before.__cause__ = before.__context__ = None
    lines = "".join(shown.format()).rstrip("\n").split("\n")
    num_hidden = len(lines) - _MAX_LINES if is_ours else 0
    # The middle of a long text of the error is left out.
    if num_hidden > 0 and "".join(shown.format_exception_only()).count("\n") > num_hidden + 3:
        lines[-2 - num_hidden : -1] = [f"  ... {num_hidden + 1} more lines"]
    return Described(
        brief="\n".join(lines) + end,
        whole=whole,
        is_of_group=bool(getattr(error, "is_of_group", False)),
        is_of_peer=bool(getattr(error, "is_of_peer", False)),
    )


def summary(error: BaseException) -> str:
    """Return the class of an exception and the first line of its text.

    Examples:
        >>> summary(KeyError("label")), summary(StopIteration())
        ("KeyError: 'label'", 'StopIteration')
    """
    return f"{type(error).__name__}: {error}".partition("\n")[0].removesuffix(": ")


def _suggestion(error: BaseException) -> str:
    """Return the name that Python 3.11 proposes instead of an unknown one. `TracebackException` has it since 3.12."""
    is_known = isinstance(error, NameError | AttributeError) and not hasattr(error, "__notes__")
    if sys.version_info >= (3, 12) or not is_known:
        return ""
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        sys.__excepthook__(type(error), error, error.__traceback__)
    found = re.search(r"\. Did you mean: '\w+'\?$", printed.getvalue().rstrip())
    return found[0] if found else ""


def without_numbers(text: str) -> str:
    """Return a text in which every number and address is the same. Texts of equal errors of ranks are then equal.

    Examples:
        >>> without_numbers("rank 1: <Net at 0x7f1c>, index 5") == without_numbers("rank 0: <Net at 0x7aa0>, index 12")
        True
    """
    return re.sub(r"0x[0-9a-f]+|\d+", "0", text)


def printing_hook(
    before: Callable[..., object], *, error_file: str | None, is_whole: bool, prefix: str = ""
) -> Callable[..., object]:
    """Return the `sys.excepthook` that prints an uncaught exception of a rank.

    Args:
        before: the present hook. If it is neither Python's nor torch's, it belongs to the program, and is called.
        error_file: the path of the launcher's error file; None if there is no launcher.
        is_whole: whether to print the whole traceback, on every rank.
        prefix: the text to print before each line.
    """
    is_of_program = before is not sys.__excepthook__ and not getattr(before, "__module__", "").startswith(
        "torch."
    )

    def hook(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        if is_of_program:
            begin = _from_the_program(tb)
            before(kind, error.with_traceback(begin), begin)
        else:
            print_once(describe(error, tb), error_file=error_file, is_whole=is_whole, prefix=prefix)

    return hook


def print_once(described: Described, *, error_file: str | None, is_whole: bool, prefix: str = "") -> None:
    """Print an exception on stderr, unless another rank of this host has printed an equal one."""
    text = described.whole
    if not is_whole:
        if error_file is not None and not _is_first(described, os.path.dirname(os.path.dirname(error_file))):
            return
        text = described.brief
        if error_file is None and text != described.whole:
            text += f"\n{HIDDEN}"
    with contextlib.suppress(OSError, ValueError, AttributeError):  # nothing reads it any more
        sys.stderr.write("".join(f"{prefix}{line}\n" for line in text.split("\n")))
        sys.stderr.flush()


def forget_printed(error_file: str) -> None:
    """Forget which errors the ranks of this host have printed. Call this before one of the ranks is restarted."""
    folder = os.path.dirname(os.path.dirname(error_file))
    for name in os.listdir(folder):
        if name.startswith(_CLAIM):
            os.remove(os.path.join(folder, name))


def _is_first(described: Described, folder: str) -> bool:
    """Claim an error. Return False if another rank of this host has claimed an equal one."""
    subject = "the group" if described.is_of_group else without_numbers(described.brief)
    claim = _CLAIM + hashlib.sha256(subject.encode(errors="replace")).hexdigest()[:16]
    try:
        if described.is_of_peer and any(name.startswith(_CLAIM) for name in os.listdir(folder)):
            return False
        open(os.path.join(folder, claim), "x").close()
    except OSError as error:  # also if the launcher has removed its folder, or the disk is full
        return not isinstance(error, FileExistsError)
    return True


# ---------------------------------------------------------------------- frames


def _from_the_program(tb: TracebackType | None) -> TracebackType | None:
    """Return a traceback without its outermost frames that have started the program.

    Returns None if only such frames led to the exception, as for a syntax error in the program.
    """
    begin = tb
    while begin is not None and begin.tb_frame.f_code.co_filename.startswith((_PACKAGE, "<frozen ")):
        begin = begin.tb_next
    is_of_worker = tb is not None and tb.tb_frame.f_code.co_filename == _WORKER
    return begin or (None if is_of_worker else tb)


class _Lines(list[str]):
    """Formatted frames, in the place of a stack."""

    def format(self, **_: object) -> list[str]:
        return self


def _brief_stack(stack: traceback.StackSummary) -> list[str]:
    """Return the frames that help to find the mistake, formatted.

    Frames of torch and Syncline, and those of the standard library that they have called, are left out, unless there
    are no others.
    """
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    libraries = (_PACKAGE, os.path.dirname(torch) + os.sep) if torch else (_PACKAGE,)
    kept, is_hidden = [], False
    for frame in stack:
        if not (is_hidden and frame.filename.startswith(_STANDARD_LIBRARY)):
            is_hidden = frame.filename.startswith(libraries)
        if not is_hidden:
            kept.append(frame)
    # Without markers (^^^), which have other places in other versions of Python.
    plain = [traceback.FrameSummary(f.filename, f.lineno, f.name, line=f.line) for f in kept or stack[-1:]]
    lines = [traceback.StackSummary.from_list([one]).format()[0] for one in plain]
    num_hidden = len(lines) - _MAX_FRAMES
    return (
        [lines[0], f"  ... {num_hidden} more calls\n", *lines[1 + num_hidden :]] if num_hidden > 1 else lines
    )
