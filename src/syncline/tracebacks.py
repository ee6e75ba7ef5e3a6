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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep

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
    """What a user reads first; see the note above."""
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
    whole, brief = (traceback.TracebackException(type(error), error, begin, compact=True) for _ in range(2))
    if begin is None:
        whole.stack = None  # type: ignore[assignment]  # as Python does, it then prints no header
    is_ours = bool(whole.stack) and whole.stack[-1].filename.startswith(_PACKAGE)
    _shorten(brief, has_marks=not is_ours)
    suggestion = _suggestion(error)
    return Described(
        brief=(_cut(brief) if is_ours else _text(brief)) + suggestion,
        whole=_text(whole) + suggestion,
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
    is_known = isinstance(error, NameError | AttributeError)
    if sys.version_info >= (3, 12) or not is_known or hasattr(error, "__notes__"):
        return ""
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        sys.__excepthook__(type(error), error, error.__traceback__)
    found = re.search(r"\. Did you mean: '\w+'\?$", printed.getvalue().rstrip())
    return "" if found is None else found[0]


def _text(shown: traceback.TracebackException) -> str:
    return "".join(shown.format()).rstrip("\n")


def _cut(shown: traceback.TracebackException) -> str:
    """Return a traceback of at most `_MAX_LINES` lines. The middle of a long text of the error is left out."""
    text = _text(shown).split("\n")
    num_hidden = len(text) - _MAX_LINES
    num_of_error = "".join(shown.format_exception_only()).rstrip("\n").count("\n") + 1
    if num_hidden > 0 and num_of_error > num_hidden + 3:
        text[-2 - num_hidden : -1] = [f"  ... {num_hidden + 1} more lines"]
    return "\n".join(text)


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
    if before is not sys.__excepthook__ and not getattr(before, "__module__", "").startswith("torch."):

        def show(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> object:
            begin = _from_the_program(tb)
            return before(kind, error.with_traceback(begin), begin)

        return show

    def hook(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
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
    """Forget what the ranks of this host have printed. Call this before one of them is started again."""
    folder = os.path.dirname(os.path.dirname(error_file))
    for name in os.listdir(folder):
        if name.startswith(_CLAIM):
            os.remove(os.path.join(folder, name))


def _is_first(described: Described, folder: str) -> bool:
    """Claim an error. Return False if another rank of this host has claimed an equal one."""
    with contextlib.suppress(OSError):
        if described.is_of_peer and any(name.startswith(_CLAIM) for name in os.listdir(folder)):
            return False
    subject = "the group" if described.is_of_group else without_numbers(described.brief)
    claim = os.path.join(folder, _CLAIM + hashlib.sha256(subject.encode(errors="replace")).hexdigest()[:16])
    try:
        os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    except OSError:  # the launcher has removed its folder, or the disk is full
        return True
    return True


# ---------------------------------------------------------------------- frames


def _from_the_program(tb: TracebackType | None) -> TracebackType | None:
    """Return a traceback without its outermost frames that have started the program.

    Returns None if only such frames led to the exception, as for a syntax error in the program.
    """
    begin = tb
    while begin is not None and begin.tb_frame.f_code.co_filename.startswith((_PACKAGE, "<frozen ")):
        begin = begin.tb_next
    return begin or (None if _is_of_worker(tb) else tb)


def _is_of_worker(tb: TracebackType | None) -> bool:
    return tb is not None and tb.tb_frame.f_code.co_filename == os.path.join(
        _PACKAGE, "tools", "launch", "worker.py"
    )


def _shorten(shown: traceback.TracebackException, *, has_marks: bool) -> None:
    """Leave out of a chain of exceptions what does not help to find the mistake."""
    chain = list(_chain(shown))
    for one in chain:
        one.stack = _brief_stack(one.stack, has_marks=has_marks)
    if len(chain) > 1:
        last: Any = chain[1]
        last.__cause__ = last.__context__ = None


def _chain(shown: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    """Yield an exception, its cause, and so on, as Python prints them, but the last one first."""
    one: traceback.TracebackException | None = shown
    while one is not None:
        yield one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def _brief_stack(stack: traceback.StackSummary | None, *, has_marks: bool) -> Any:
    """Return the frames of a stack that help to find the mistake; None if it has no frames.

    Args:
        stack: the stack.
        has_marks: whether the last line may have markers below it (^^^). Python 3.13 marks more than 3.11 does.
    """
    if not stack:
        return None
    found = _of_the_program(stack) or stack[-1:]
    # Markers help only in the last line. The others tell how the program came there.
    plain = [traceback.FrameSummary(f.filename, f.lineno, f.name, line=f.line) for f in found]
    if has_marks:
        plain[-1] = found[-1]
    num_hidden = len(plain) - _MAX_FRAMES
    if num_hidden > 1:
        gap = traceback.FrameSummary("", num_hidden, "")
        plain = [plain[0], gap, *plain[1 + num_hidden :]]
    return _BriefStack(plain)


class _BriefStack(traceback.StackSummary):
    """A stack in which a frame without a file stands for frames that are left out. Its line is their number."""

    def format_frame_summary(self, frame_summary: traceback.FrameSummary, **how: Any) -> str:
        if not frame_summary.filename:
            return f"  ... {frame_summary.lineno} more calls\n"
        return super().format_frame_summary(frame_summary, **how)


def _of_the_program(stack: traceback.StackSummary) -> list[traceback.FrameSummary]:
    """Return the frames that are not in torch or Syncline, or in the standard library and called from there."""
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    libraries = (_PACKAGE, os.path.dirname(torch) + os.sep) if torch else (_PACKAGE,)
    kept, is_hidden = [], False
    for frame in stack:
        if not (is_hidden and frame.filename.startswith(_STANDARD_LIBRARY)):
            is_hidden = frame.filename.startswith(libraries)
        if not is_hidden:
            kept.append(frame)
    return kept
