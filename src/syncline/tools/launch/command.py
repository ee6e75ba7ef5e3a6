"""The command line that starts a rank: Python, which runs worker.py, which runs the user's program.

This module needs no torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

_WORKER = Path(__file__).with_name("worker.py")


def worker_command(
    program: Sequence[str],
    *,
    is_module: bool = False,
    is_python: bool = True,
    before: tuple[str, str] | None = None,
) -> list[str]:
    """Return the arguments with which Python runs a program as a rank. This process is the launcher of the rank.

    Args:
        program: a script, a module or a command, followed by its arguments.
        is_module: whether the program is a module, as in python -m.
        is_python: whether the program is a script or a module. False means that it is a command.
        before: the name of a module and a text. The module's `main` is called with the text in the same process, before
            the program runs. None means no call.
    """
    kind = ["-m"] if is_module else [] if is_python else ["--exec"]
    first = ["--before", *before] if before is not None else []
    return [str(_WORKER), str(os.getpid()), *first, *kind, *program]
