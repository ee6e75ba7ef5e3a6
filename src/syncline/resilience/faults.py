"""Classification of exceptions in `sl.steps`: some cost the job one process, as a kill does, and others end the job.

[Note: faults]

An exception that ends one process is a loss: the others repeat the step without it, and train on. But if another
process raises the same exception in the same step, the program is at fault, not a process. Then the repeated step would
fail on one process after the other. So the second process that raises it ends the job, and so does each process that
detects this.

Exceptions are the same if they have the same class and come from the same line. Their texts may name the rank.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from syncline.session.ending import uncaught_exception
from syncline.session.process import exit_code_of, is_agreed_stop


@dataclass(frozen=True)
class Fault:
    """An exception in a form that processes can compare with each other."""

    kind: str
    """The name of the exception's class."""
    where: str
    """The name of the file, and the line that has raised it."""

    @staticmethod
    def of(error: BaseException) -> Fault:
        """Return the fault of an exception."""
        tb = error.__traceback__
        while tb is not None and tb.tb_next is not None:
            tb = tb.tb_next
        where = "" if tb is None else f"{os.path.basename(tb.tb_frame.f_code.co_filename)}:{tb.tb_lineno}"
        return Fault(type(error).__qualname__, where)

    def __str__(self) -> str:
        return f"{self.kind} at {self.where}"


def is_fault(error: BaseException) -> bool:
    """Return whether an exception is a fault of its process. Ctrl-C, an agreed stop and sys.exit(0) are not."""
    return bool(exit_code_of(error)) and not (isinstance(error, KeyboardInterrupt) or is_agreed_stop(error))


def call_if_exception_closed(loop: FrameType, then: Callable[[], object]) -> None:
    """Call a function at process exit if an uncaught exception is the reason why a generator is being closed now.

    A generator that is closed early cannot detect the reason: `break`, `return` or an exception in the program. So at
    process exit, the traceback of an uncaught exception is searched for the line that closed the generator.

    Args:
        loop: the frame of the generator.
        then: the function.
    """
    program = loop.f_back
    if program is None:
        return
    code, line = program.f_code, program.f_lineno

    def look() -> None:
        error = uncaught_exception()
        tb = None if error is None or not is_fault(error) else error.__traceback__
        while tb is not None:
            if tb.tb_frame.f_code is code and tb.tb_lineno == line:
                then()
                return
            tb = tb.tb_next

    atexit.register(look)
