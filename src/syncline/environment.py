"""All access of the package to environment variables.

A launcher passes rank and world size to a process in variables. `parse` turns them into an `Environment`. It is a pure
function of the given mapping. There are three sources, in this order:

1. torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, ..., TORCHELASTIC_*), which `syncline run`, Ray and
   Kubeflow set as well;
2. SLURM's variables, if the process is a task that `srun` started;
3. neither, which means a world of one process.

This module needs only the standard library, so that `tools/launch/worker.py` can load it before torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Launcher = Literal["syncline run", "torchrun", "environment", "slurm", "alone"]

RUN_MARK = "SYNCLINE_RUN"  # set by `syncline run` for its workers, different for each job

TOKEN = "SYNCLINE_TOKEN"  # a secret that the processes of a job share, see docs/security.md

_TOKEN_CHARS = 16

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"

_ALONE = "start it with `syncline run` or torchrun, which set these variables, or unset {name} to run alone"


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The identity of this process, as passed by its launcher."""

    launcher: Launcher
    """The launcher that set the variables. "environment": torchrun's variables without torchrun (Ray, a script)."""
    rank: int = 0
    """Rank of this process, from 0 to `size - 1`, over all hosts."""
    size: int = 1
    """Number of processes of the job."""
    local_rank: int = 0
    """Rank on this host, from 0 to `local_size - 1`."""
    local_size: int = 1
    """Number of processes of the job on this host."""
    master_addr: str | None = None
    """Host of the store at which the ranks meet; None only if `size` is 1."""
    master_port: int | None = None
    """Port of that store."""
    generation: int = 0
    """Number of times that the launcher has restarted the workers."""
    launcher_has_store: bool = False
    """Whether the launcher itself listens at that port. If not, rank 0 opens the store."""

    def variables(self) -> dict[str, str]:
        """Return this environment as torchrun's variables, for libraries that read only those."""
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
    """Parse the variables of this process."""
    return parse(os.environ)


def error_file() -> str | None:
    """Return the path of the file in which the launcher expects this process's last exception; None if not set."""
    return os.environ.get(_ERROR_FILE) or None


def token() -> str | None:
    """Return the secret of this job, with which its processes sign their messages at a store; None if there is none.

    Raises:
        ValueError: the secret is so short that it could be guessed.
    """
    found = os.environ.get(TOKEN) or None
    if found is not None and len(found) < _TOKEN_CHARS:
        raise ValueError(
            f"{TOKEN} has {len(found)} characters: expected at least {_TOKEN_CHARS} random ones, the same on "
            "all ranks, for example from `openssl rand -hex 32`"
        )
    return found


def torchrun_default(dest: str) -> str | None:
    """Return the environment's value of an option of torchrun, which the command line overrides.

    Args:
        dest: the option's name with underscores, "nproc_per_node".
    """
    return os.environ.get(f"PET_{dest.upper()}")


def export(variables: Mapping[str, str], *, replace: bool = False) -> dict[str, str | None]:
    """Set `variables` for this process and its children.

    Args:
        variables: names and values.
        replace: whether to replace variables that are already set.

    Returns:
        The previous values of the variables that were set. Pass them to `restore` to undo the call.
    """
    names = [name for name in variables if replace or name not in os.environ]
    before = {name: os.environ.get(name) for name in names}
    os.environ.update({name: variables[name] for name in names})
    return before


def for_child(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child process: this process's, without Syncline's variables, and with `variables`."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SYNCLINE")}
    return inherited | dict(variables)


def restore(before: Mapping[str, str | None]) -> None:
    """Undo an `export`."""
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


# ---------------------------------------------------------------------- parsing


def parse(variables: Mapping[str, str]) -> Environment:
    """Return the environment that these variables describe.

    Args:
        variables: names and values, such as `os.environ`.

    Raises:
        ValueError: a variable is missing, not a number, or contradicts another one. The text names the variable, its
            value and the remedy.

    Example:
        >>> parse({"SHELL": "/bin/sh"}).size
        1
        >>> env = parse({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"})
        >>> env.rank, env.local_size
        (1, 2)
    """
    if "RANK" in variables:
        return _parse_torchrun(variables)
    if _is_srun_task(variables):
        return _parse_slurm(variables)
    if _number(variables, "WORLD_SIZE", at_least=1, default=1) > 1:
        raise _missing("RANK", because="WORLD_SIZE", variables=variables)
    return Environment(launcher="alone")


def _parse_torchrun(variables: Mapping[str, str]) -> Environment:
    if "WORLD_SIZE" not in variables:
        raise _missing("WORLD_SIZE", because="RANK", variables=variables)
    size = _number(variables, "WORLD_SIZE", at_least=1)
    rank = _number(variables, "RANK", below=size, limit="WORLD_SIZE")
    # LOCAL_RANK and LOCAL_WORLD_SIZE are missing if a user sets RANK and WORLD_SIZE by hand. Assume one host then.
    local_size = _number(
        variables, "LOCAL_WORLD_SIZE", at_least=1, below=size + 1, default=size, limit="WORLD_SIZE + 1"
    )
    local_rank = _number(variables, "LOCAL_RANK", below=local_size, default=rank, limit="LOCAL_WORLD_SIZE")
    if size > 1:
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not variables.get(name):
                raise _missing(name, because="WORLD_SIZE", variables=variables)
    launcher: Launcher = "environment"
    if "TORCHELASTIC_RUN_ID" in variables:
        launcher = "syncline run" if RUN_MARK in variables else "torchrun"
    return Environment(
        launcher=launcher,
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        master_addr=variables.get("MASTER_ADDR") or None,
        master_port=_port(variables) if variables.get("MASTER_PORT") else None,
        generation=_number(variables, "TORCHELASTIC_RESTART_COUNT", default=0),
        launcher_has_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


# ---------------------------------------------------------------------- SLURM


def _is_srun_task(variables: Mapping[str, str]) -> bool:
    # A batch script and an interactive shell have SLURM_NTASKS too, and a batch script even SLURM_PROCID=0, although
    # they are not ranks. Only srun creates a job step, and only a step has the variables below.
    in_step = any(
        f"SLURM_{name}" in variables for name in ("STEP_ID", "STEPID", "STEP_NUM_TASKS", "STEP_NODELIST")
    )
    return in_step and "SLURM_PROCID" in variables and _slurm_size(variables) > 1


def _slurm_size(variables: Mapping[str, str]) -> int:
    name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in variables else "SLURM_NTASKS"
    return _number(variables, name, at_least=1, default=1)


def _parse_slurm(variables: Mapping[str, str]) -> Environment:
    size = _slurm_size(variables)
    rank = _number(variables, "SLURM_PROCID", below=size, limit="SLURM_NTASKS")
    if _number(variables, "WORLD_SIZE", at_least=1, default=size) != size:
        raise ValueError(
            f"WORLD_SIZE={variables['WORLD_SIZE']!r} contradicts srun, which started {size} tasks: "
            f"unset it, or set it to {size}"
        )
    if "SLURM_LOCALID" not in variables:
        raise _missing("SLURM_LOCALID", because="SLURM_PROCID", variables=variables)
    local_size = _slurm_local_size(variables, rank=rank, size=size)
    address = variables.get("MASTER_ADDR") or first_host(_slurm_nodes(variables))
    return Environment(
        launcher="slurm",
        rank=rank,
        size=size,
        local_rank=_number(variables, "SLURM_LOCALID", below=local_size, limit="tasks on this node"),
        local_size=local_size,
        master_addr=address,
        master_port=_port(variables) if variables.get("MASTER_PORT") else _slurm_port(variables),
        generation=_number(variables, "SLURM_RESTART_COUNT", default=0),
    )


def _slurm_nodes(variables: Mapping[str, str]) -> str:
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if variables.get(name):
            return variables[name]
    raise ValueError(
        "SLURM_STEP_NODELIST is not set, though SLURM_PROCID says that srun started this process: pass the "
        "environment on (srun --export=ALL), or set MASTER_ADDR to the first host"
    )


def _slurm_port(variables: Mapping[str, str]) -> int:
    # The port is equal on all ranks, differs between jobs and between steps of one job, and is below ephemeral ports.
    job = _number(variables, "SLURM_JOB_ID", default=0)
    step = _number(variables, "SLURM_STEP_ID", default=0)
    return 20000 + (job * 16 + step) % 12000


def _slurm_local_size(variables: Mapping[str, str], *, rank: int, size: int) -> int:
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if variables.get(name):
            per_node = tasks_per_node(variables[name], name)
            break
    else:
        return _number(variables, "SLURM_NTASKS_PER_NODE", at_least=1, default=size)
    if "SLURM_NODEID" in variables:
        return per_node[_number(variables, "SLURM_NODEID", below=len(per_node), limit=f"nodes in {name}")]
    for num_tasks in per_node:  # by default, srun fills one node after the other
        if rank < num_tasks:
            return num_tasks
        rank -= num_tasks
    raise ValueError(f"{name}={variables[name]!r} counts fewer tasks than SLURM_NTASKS={size}: unset {name}")


def tasks_per_node(text: str, name: str = "SLURM_TASKS_PER_NODE") -> list[int]:
    """Return the number of tasks on each node, parsed from SLURM's form "2(x3),1".

    Example:
        >>> tasks_per_node("2(x3),1")
        [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not found:
            raise ValueError(
                f"{name}={text!r}: expected the form '2(x3),1'; unset it if it is not SLURM's own"
            )
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM node list.

    Example:
        >>> first_host("node[007-010,12],login1")
        'node007'
    """
    first, in_brackets = "", False
    skipping = False  # whether this is the rest of a bracket, after its first number
    for char in nodes:
        if char == "," and not in_brackets:
            break
        if char in "[]":
            in_brackets, skipping = char == "[", False
        elif in_brackets and char in ",-":
            skipping = True
        elif not skipping:
            first += char
    return first


# ---------------------------------------------------------------------- values


def _number(
    variables: Mapping[str, str],
    name: str,
    *,
    at_least: int = 0,
    below: int | None = None,
    default: int | None = None,
    limit: str = "",
) -> int:
    """Return `variables[name]` as an integer in [at_least, below). `limit` names the source of `below` in the error."""
    text = variables.get(name, "")
    if not text and default is not None:
        return default
    remedy = _ALONE.format(name=name)
    if not re.fullmatch(r"\s*[+-]?\d+\s*", text):
        raise ValueError(f"{name}={text!r}: expected a whole number; {remedy}")
    value = int(text)
    if value < at_least:
        raise ValueError(f"{name}={text!r}: expected at least {at_least}; {remedy}")
    if below is not None and value >= below:
        raise ValueError(f"{name}={text!r}: expected less than {below} ({limit}); {remedy}")
    return value


def _port(variables: Mapping[str, str]) -> int:
    return _number(variables, "MASTER_PORT", at_least=1, below=65536, limit="ports end at 65535")


def _missing(name: str, *, because: str, variables: Mapping[str, str]) -> ValueError:
    return ValueError(
        f"{name} is not set, but {because}={variables[because]!r} is: {_ALONE.format(name=because)}"
    )
