"""The environment of this process: its variables and its cores. No other module reads or sets environment variables.

A launcher passes the rank and the world size to a process in environment variables. `parse` looks for two sets of
variables, in this order:

1. torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, ..., TORCHELASTIC_*), which `syncline run`, Ray and
   Kubeflow set as well;
2. SLURM's variables, if `srun` started the process.

If the process has neither, it is a world of one rank.

This module imports only the standard library, so that `tools/launch/worker.py` can load it before torch.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Launcher = Literal["syncline run", "torchrun", "environment", "slurm", "alone"]

RUN_MARK = "SYNCLINE_RUN"
"""The name of the variable that `syncline run` sets for its workers. Its value is different for each job."""

TOKEN = "SYNCLINE_TOKEN"
"""The variable that holds the secret of a job, which all its processes know; see docs/reference/security.md."""

_MIN_TOKEN_CHARS = 16

_REMEDY = (
    "Start the program with `syncline run` or torchrun, which set these variables. "
    "To run a single process, unset RANK, WORLD_SIZE and SLURM_PROCID"
)


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The place of a process in its job, as the launcher passed it: rank, world size, and the address of the store."""

    launcher: Launcher
    """The launcher that set the variables. "environment" means that something else, such as Ray or a script, set the
    variables of torchrun."""
    rank: int = 0
    """Rank of this process among all processes of the job, from 0 to `size - 1`."""
    size: int = 1
    """Number of processes of the job."""
    local_rank: int = 0
    """Rank of this process among the processes of the job on this host, from 0 to `local_size - 1`."""
    local_size: int = 1
    """Number of processes of the job on this host."""
    master_addr: str | None = None
    """Host of the store through which the ranks find each other. None is possible only if `size` is 1."""
    master_port: int | None = None
    """Port of the store on the host `master_addr`. None is possible only if `size` is 1."""
    generation: int = 0
    """Number of times that the launcher has restarted the workers."""
    launcher_has_store: bool = False
    """Whether the launcher has opened the store. If not, rank 0 opens it."""

    def variables(self) -> dict[str, str]:
        """Return the variables that torchrun would set for this process. Some libraries read only these variables."""
        found = {
            "RANK": self.rank,
            "WORLD_SIZE": self.size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_size,
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": self.master_port,
        }
        return {name: str(value) for name, value in found.items() if value is not None}


# ---------------------------------------------------------------------- this process's variables


def current() -> Environment:
    """Return the environment of this process, parsed from its variables by `parse`."""
    return parse(os.environ)


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

    Example:
        >>> num_cores() >= 1
        True
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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

    The result holds the variables of this process, except Syncline's own variables, and the entries of `variables`.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SYNCLINE")}
    return inherited | dict(variables)


def restore(before: Mapping[str, str | None]) -> None:
    """Undo a call of `export`. `before` is the value that this call returned."""
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


# ---------------------------------------------------------------------- parsing


class _Variables(dict[str, str]):
    """Environment variables, with methods that parse a variable or raise an error that says what to do."""

    def number(
        self,
        name: str,
        *,
        at_least: int = 0,
        at_most: int | None = None,
        limit: str = "",
        default: int | None = None,
    ) -> int:
        """Return a variable as an integer from `at_least` to `at_most`.

        Args:
            name: the name of the variable.
            at_least: the smallest allowed value.
            at_most: the largest allowed value. None allows any larger value.
            limit: a text for the error, which says where `at_most` comes from.
            default: the value to return if the variable is empty or not set. If `default` is None, such a variable is
                an error.

        Raises:
            ValueError: the variable is not such an integer.
        """
        text = self.get(name, "")
        if not text and default is not None:
            return default
        is_number = re.fullmatch(r"\s*[+-]?\d+\s*", text) is not None
        if not is_number or int(text) < at_least or (at_most is not None and int(text) > at_most):
            bounds = f"of at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
            bounds += f" ({limit})" if limit else ""
            raise ValueError(f"{name}={text!r}: expected a whole number {bounds}. {_REMEDY}")
        return int(text)

    def missing(self, name: str, *, because: str) -> ValueError:
        """Return the error for a variable that is not set.

        Args:
            name: the name of this variable.
            because: the name of another variable, which is set. Therefore the first variable must be set, too.
        """
        return ValueError(f"{name} is not set, although {because}={self[because]!r} is set. {_REMEDY}")

    def master_port(self) -> int | None:
        """Return the port in MASTER_PORT; None if this variable is not set."""
        return self.number("MASTER_PORT", at_least=1, at_most=65535, default=0) or None


def parse(variables: Mapping[str, str]) -> Environment:
    """Return the environment that these variables describe.

    Args:
        variables: names and values, such as `os.environ`.

    Raises:
        ValueError: a variable is missing, is not a number, or contradicts another variable. The text names the
            variable and its value, and says what to do.

    Example:
        >>> parse({"SHELL": "/bin/sh"}).size
        1
        >>> env = parse({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"})
        >>> env.rank, env.local_size
        (1, 2)
    """
    given = _Variables(variables)
    if "RANK" in given:
        return _parse_torchrun(given)
    if _is_srun_task(given):
        return _parse_slurm(given)
    if given.number("WORLD_SIZE", at_least=1, default=1) > 1:
        raise given.missing("RANK", because="WORLD_SIZE")
    return Environment(launcher="alone")


def _parse_torchrun(given: _Variables) -> Environment:
    if "WORLD_SIZE" not in given:
        raise given.missing("WORLD_SIZE", because="RANK")
    size = given.number("WORLD_SIZE", at_least=1)
    rank = given.number("RANK", at_most=size - 1, limit="WORLD_SIZE - 1")
    # LOCAL_RANK and LOCAL_WORLD_SIZE are missing if a user sets RANK and WORLD_SIZE by hand. Assume one host then.
    local_size = given.number("LOCAL_WORLD_SIZE", at_least=1, at_most=size, limit="WORLD_SIZE", default=size)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if size > 1 and not given.get(name):
            raise given.missing(name, because="WORLD_SIZE")
    launcher: Launcher = "environment"
    if "TORCHELASTIC_RUN_ID" in given:
        launcher = "syncline run" if RUN_MARK in given else "torchrun"
    return Environment(
        launcher=launcher,
        rank=rank,
        size=size,
        local_rank=given.number(
            "LOCAL_RANK", at_most=local_size - 1, limit="LOCAL_WORLD_SIZE - 1", default=rank
        ),
        local_size=local_size,
        master_addr=given.get("MASTER_ADDR") or None,
        master_port=given.master_port(),
        generation=given.number("TORCHELASTIC_RESTART_COUNT", default=0),
        launcher_has_store=given.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _is_srun_task(given: _Variables) -> bool:
    # A batch script and an interactive shell have SLURM_NTASKS too, and a batch script even SLURM_PROCID=0, although
    # they are not ranks. Only srun creates a job step, and only a step has the variables below.
    marks = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST")
    in_step = any(name in given for name in marks)
    return in_step and "SLURM_PROCID" in given and _slurm_size(given) > 1


def _slurm_size(given: _Variables) -> int:
    default = given.number("SLURM_NTASKS", at_least=1, default=1)
    return given.number("SLURM_STEP_NUM_TASKS", at_least=1, default=default)


def _parse_slurm(given: _Variables) -> Environment:
    size = _slurm_size(given)
    rank = given.number("SLURM_PROCID", at_most=size - 1, limit="SLURM_NTASKS - 1")
    if given.number("WORLD_SIZE", at_least=1, default=size) != size:
        raise ValueError(
            f"WORLD_SIZE={given['WORLD_SIZE']!r} contradicts srun, which started {size} tasks. "
            f"Unset WORLD_SIZE, or set it to {size}"
        )
    if "SLURM_LOCALID" not in given:
        raise given.missing("SLURM_LOCALID", because="SLURM_PROCID")
    local_size = _slurm_local_size(given, rank=rank, size=size)
    return Environment(
        launcher="slurm",
        rank=rank,
        size=size,
        local_rank=given.number("SLURM_LOCALID", at_most=local_size - 1, limit="tasks on this node - 1"),
        local_size=local_size,
        master_addr=given.get("MASTER_ADDR") or _first_node(given),
        master_port=given.master_port() or _slurm_port(given),
        generation=given.number("SLURM_RESTART_COUNT", default=0),
    )


def _slurm_port(given: _Variables) -> int:
    # The port is equal on all ranks, differs between jobs and between steps of one job, and is below ephemeral ports.
    job, step = given.number("SLURM_JOB_ID", default=0), given.number("SLURM_STEP_ID", default=0)
    return 20000 + (16 * job + step) % 12000


def _first_node(given: _Variables) -> str:
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if given.get(name):
            return first_host(given[name])
    raise ValueError(
        "SLURM_STEP_NODELIST is not set, although srun started this process (SLURM_PROCID is set). Pass all variables "
        "to the tasks (srun --export=ALL), or set MASTER_ADDR to the first host"
    )


def _slurm_local_size(given: _Variables, *, rank: int, size: int) -> int:
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if given.get(name):
            per_node = tasks_per_node(given[name], name)
            break
    else:
        return given.number("SLURM_NTASKS_PER_NODE", at_least=1, default=size)
    if "SLURM_NODEID" in given:
        node = given.number("SLURM_NODEID", at_most=len(per_node) - 1, limit=f"nodes in {name} - 1")
        return per_node[node]
    # By default, srun fills one node after the other.
    by_rank = [num_tasks for num_tasks in per_node for _ in range(num_tasks)]
    if rank >= len(by_rank):
        raise ValueError(f"{name}={given[name]!r} counts fewer tasks than SLURM_NTASKS={size}. Unset {name}")
    return by_rank[rank]


def tasks_per_node(text: str, name: str = "SLURM_TASKS_PER_NODE") -> list[int]:
    """Return the number of tasks on each node, parsed from SLURM's short form, such as "2(x3),1".

    Example:
        >>> tasks_per_node("2(x3),1")
        [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not found:
            raise ValueError(
                f"{name}={text!r}: expected the form '2(x3),1', which SLURM uses. If SLURM has not set {name}, unset it"
            )
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def first_host(nodes: str) -> str:
    """Return the first host in a node list of SLURM.

    Example:
        >>> first_host("node[007-010,12],login1")
        'node007'
    """
    first_of_each_range = re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", nodes)
    return first_of_each_range.partition(",")[0]
