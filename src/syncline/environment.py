"""The environment of this process: its variables and its cores. No other module reads or sets environment variables.

`launchers` finds the rank of this process in these variables.

This module imports only the standard library, so that `tools/launch/worker.py` can load it before torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

RUN_MARK = "SYNCLINE_RUN"
"""The name of the variable that `syncline run` sets for its workers. Its value is different for each job."""

TOKEN = "SYNCLINE_TOKEN"
"""The variable that holds the secret of a job, which all its processes know; see docs/reference/security.md."""

JOINS = "SYNCLINE_JOINS"
"""The variable that `syncline run --resilient` sets for a process that it starts in place of a lost one."""

STORE_FOLDER = "SYNCLINE_STORE_FOLDER"
"""The variable that `syncline run --resilient` sets for ranks that are all on its host: its run id, and a folder."""

BUCKET_CAP_MB = "SYNCLINE_BUCKET_CAP_MB"
"""The variable that sets `bucket_cap_mb` where the program sets none."""

TRANSPORT = "SYNCLINE_TRANSPORT"
"""The variable that sets the argument `transport` of `sl.init` where the program leaves it at "auto"."""

WHOLE_TRACEBACKS = "SYNCLINE_WHOLE_TRACEBACKS"
"""The variable that makes every rank print whole tracebacks, with the lines of torch and Syncline."""

EXPLAIN = "SYNCLINE_EXPLAIN"
"""The variable that `syncline explain` sets in each of its ranks."""

PATIENCE = "SYNCLINE_PATIENCE"
"""The variable that holds the factor of `patience`."""

_MIN_TOKEN_CHARS = 16


def variables() -> Mapping[str, str]:
    """Return the environment variables of this process."""
    return os.environ


def joins_running_job() -> bool:
    """Return whether the launcher started this process in place of a lost one, while the other ranks train on."""
    return os.environ.get(JOINS) == "1"


def store_folder() -> str | None:
    """Return the folder by which the ranks of this start of the job can agree with each other; None if there is none.

    Ranks that another launcher has started inside of a rank inherit the variable, but have another run id.
    """
    run_id, _, folder = os.environ.get(STORE_FOLDER, "").partition(" ")
    if not folder or run_id != os.environ.get("TORCHELASTIC_RUN_ID"):
        return None
    return os.path.join(folder, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def bucket_cap_mb() -> float | None:
    """Return the bucket size that the user has set for all programs, in MiB; None if there is none.

    Raises:
        ValueError: the variable is no number above 0.
    """
    return _number_above_0(BUCKET_CAP_MB)


def patience(seconds: float) -> float:
    """Return for how long to wait for what a busy host delays: a report, an answer or a sign of life of a process.

    Args:
        seconds: how long that takes at most on a host with a core for each process. The user multiplies it where it
            takes longer.

    Raises:
        ValueError: the variable is no number above 0.

    Examples:
        >>> patience(0.5) / patience(1.0)
        0.5
    """
    return seconds * (_number_above_0(PATIENCE) or 1.0)


def _number_above_0(name: str) -> float | None:
    """Return the number that the user has set in a variable; None if there is none."""
    found = os.environ.get(name)
    if not found:
        return None
    try:
        number = float(found)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ValueError(f"expected the environment variable {name} to be a number above 0, got {found!r}")
    return number


def transport() -> str | None:
    """Return the argument `transport` of `sl.init` that the user has set for all programs; None if there is none."""
    return os.environ.get(TRANSPORT) or None


def wants_whole_tracebacks() -> bool:
    """Return whether the user wants to read whole tracebacks, of every rank."""
    return os.environ.get(WHOLE_TRACEBACKS) not in (None, "", "0")


def is_explained() -> bool:
    """Return whether this process is a rank of `syncline explain`: it writes no saves and traces, and starts no ranks.

    Examples:
        >>> is_explained()
        False
    """
    return bool(os.environ.get(EXPLAIN))


def wants_colours() -> bool:
    """Return whether the user accepts colours on a terminal: NO_COLOR is not set, and the terminal has colours."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def error_file() -> str | None:
    """Return the path of the file in which the launcher expects an uncaught exception; None if there is none."""
    return os.environ.get("TORCHELASTIC_ERROR_FILE") or None


def token() -> str | None:
    """Return the secret with which the processes of this job sign their messages to a store; None if there is none.

    Raises:
        ValueError: the secret is so short that it could be guessed.
    """
    found = os.environ.get(TOKEN)
    if found and len(found) < _MIN_TOKEN_CHARS:
        raise ValueError(
            f"expected {TOKEN} to have at least {_MIN_TOKEN_CHARS} random characters; got {len(found)} characters. "
            "Give all ranks the same secret, for example from `openssl rand -hex 32`"
        )
    return found or None


def uses_libuv() -> bool:
    """Return whether torch's stores use libuv. torch for Windows is built without libuv."""
    return os.environ.get("USE_LIBUV", "0" if sys.platform == "win32" else "1") == "1"


def num_cores() -> int:
    """Return the number of processor cores on which this process may run.

    Examples:
        >>> num_cores() >= 1
        True
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cache_folder() -> str:
    """Return the folder in which Syncline keeps what it has measured on this machine for this user."""
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "syncline")


def threads_per_rank(num_ranks: int) -> int:
    """Return with how many threads each of `num_ranks` ranks on this host computes, if the user has set no number.

    Examples:
        >>> threads_per_rank(10**6)
        1
    """
    return max(1, num_cores() // num_ranks)


def torchrun_default(dest: str) -> str | None:
    """Return the default that an environment variable sets for an option of torchrun; None if no variable does.

    Args:
        dest: the option's name with underscores, such as "nproc_per_node".
    """
    return os.environ.get(f"PET_{dest.upper()}")


def export(variables: Mapping[str, str], *, replace: bool = False) -> dict[str, str | None]:
    """Set environment variables for this process and its children.

    Args:
        variables: the values by the names of the variables.
        replace: whether to change variables that are already set. With False, they keep their values.

    Returns:
        The previous values of the variables that this call has set. None stands for a variable that was not set. Pass
        the result to `restore` to undo the call.
    """
    names = [name for name in variables if replace or name not in os.environ]
    before = {name: os.environ.get(name) for name in names}
    os.environ.update({name: variables[name] for name in names})
    return before


def for_child(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables for a child process.

    The child inherits the variables of this process. Of Syncline's own variables, it inherits only the patience, and
    gets those in `variables`.
    """
    inherited = {n: v for n, v in os.environ.items() if n == PATIENCE or not n.startswith("SYNCLINE")}
    return inherited | dict(variables)


def restore(before: Mapping[str, str | None]) -> None:
    """Undo a call of `export`. `before` is the value that this call returned."""
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
