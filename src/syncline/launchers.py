"""The place of a process in its job: its rank, the world size, and the address of the store.

A launcher passes these to each process in environment variables. `parse` looks for the variables of these launchers, in
this order:

1. torchrun (RANK, WORLD_SIZE, LOCAL_RANK, ..., TORCHELASTIC_*). `syncline run`, Ray and Kubeflow set the same ones;
2. MPI launchers: `mpirun` of Open MPI, MPICH, Intel MPI and MVAPICH; and submitit's local executor;
3. SLURM, if `srun` started the process.

The order is from the inside to the outside: `srun` may start torchrun or `mpirun`, which then starts the ranks.
If the process has no such variables, it is a world of one rank. docs/guides/engines.md describes the launchers.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from syncline import environment

Launcher = Literal["syncline run", "torchrun", "environment", "mpirun", "submitit", "slurm", "alone"]

_REMEDY = (
    "Start the program with `syncline run` or torchrun, which set these variables. "
    "To run a single process, unset RANK, WORLD_SIZE and SLURM_PROCID"
)

_LOOPBACK = "127.0.0.1"

_FIRST_PORT, _NUM_PORTS = 20000, 12000  # below the ports that Linux assigns to connections


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
    warning: str | None = None
    """The text of a warning if the process was probably started by mistake as the only rank; else None."""

    @property
    def ends_with_launcher(self) -> bool:
        """Whether the process that started this one lives as long as the ranks. A thread of Ray may end earlier."""
        return self.launcher in ("syncline run", "torchrun")

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


@dataclass(frozen=True)
class _Names:
    """The names of the variables of a launcher that counts ranks as torchrun does, but has names of its own."""

    launcher: Launcher
    rank: str
    size: str
    local_rank: str
    local_size: str
    job: str = ""
    """The variable with the name of the job; "" if the launcher has none."""
    option: str = ""
    """The option of the launcher that sets a variable of all ranks."""


_OTHER_NAMES = (
    _Names(
        "mpirun",  # Open MPI
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        job="PMIX_NAMESPACE",
        option="mpirun -x MASTER_ADDR=HOST",
    ),
    _Names(
        "mpirun",  # MPICH, Intel MPI
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        job="I_MPI_HYDRA_UUID",
        option="mpirun -genv MASTER_ADDR HOST",
    ),
    _Names(
        "mpirun",  # mpirun_rsh of MVAPICH
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
        option="mpirun_rsh ... MASTER_ADDR=HOST",
    ),
    _Names(
        "submitit",
        "SUBMITIT_LOCAL_GLOBALID",
        "SUBMITIT_LOCAL_NTASKS",
        "SUBMITIT_LOCAL_LOCALID",
        "SUBMITIT_LOCAL_NTASKS",  # this executor has one host
        job="SUBMITIT_LOCAL_JOB_ID",
    ),
)


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
        digits = text.strip()  # a regular expression would be compiled, which takes a part of `sl.init`
        is_number = (digits[1:] if digits[:1] in ("+", "-") else digits).isdecimal()
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


def current() -> Environment:
    """Return the environment of this process, parsed from its variables by `parse`."""
    return parse(environment.variables())


def parse(variables: Mapping[str, str]) -> Environment:
    """Return the environment that these variables describe.

    Args:
        variables: names and values, such as `os.environ`.

    Raises:
        ValueError: a variable is missing, is not a number, or contradicts another variable. The text names the
            variable and its value, and says what to do.

    Examples:
        >>> parse({"SHELL": "/bin/sh"}).size
        1
        >>> env = parse({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"})
        >>> env.rank, env.local_size
        (1, 2)
    """
    given = _Variables(variables)
    if "RANK" in given:
        return _parse_torchrun(given)
    for names in _OTHER_NAMES:
        if names.rank in given and names.local_rank in given:
            return _parse_other(given, names)
    if _is_srun_task(given):
        return _parse_slurm(given)
    if given.number("WORLD_SIZE", at_least=1, default=1) > 1:
        raise given.missing("RANK", because="WORLD_SIZE")
    if "PMI_RANK" in given and given.number("PMI_SIZE", at_least=1, default=1) > 1:
        raise ValueError(
            f"PMI_RANK={given['PMI_RANK']!r} says that an MPI launcher started this process, but MPI_LOCALRANKID "
            "(which ranks run on this host) is not set. Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT for each process, or start one torchrun on each host"
        )
    return Environment(launcher="alone", warning=_warning_without_srun(given))


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
        launcher = "syncline run" if environment.RUN_MARK in given else "torchrun"
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


# ---------------------------------------------------------------------- MPI and submitit


def _parse_other(given: _Variables, names: _Names) -> Environment:
    size = given.number(names.size, at_least=1)
    if size == 1:
        return Environment(launcher="alone")
    _check_world_size(given, size, names.launcher)
    local_size = given.number(names.local_size, at_least=1, at_most=size, limit=names.size)
    if local_size < size and not given.get("MASTER_ADDR"):
        raise ValueError(
            f"{names.launcher} started {size} ranks, of which {local_size} run on this host ({names.local_size}), but "
            f"MASTER_ADDR is not set. Pass the address of rank 0's host to all ranks: {names.option}"
        )
    return Environment(
        launcher=names.launcher,
        rank=given.number(names.rank, at_most=size - 1, limit=f"{names.size} - 1"),
        size=size,
        local_rank=given.number(names.local_rank, at_most=local_size - 1, limit=f"{names.local_size} - 1"),
        local_size=local_size,
        master_addr=given.get("MASTER_ADDR") or _LOOPBACK,
        master_port=given.master_port() or _port_of_job(given.get(names.job, "")),
    )


def _port_of_job(job: str) -> int:
    # Two jobs on one host should not meet. MPICH and MVAPICH do not name the job: torch's usual port is documented.
    return _FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS if job else 29500


def _check_world_size(given: _Variables, size: int, launcher: str) -> None:
    if given.number("WORLD_SIZE", at_least=1, default=size) != size:
        raise ValueError(
            f"WORLD_SIZE={given['WORLD_SIZE']!r} contradicts {launcher}, which started {size} tasks. "
            f"Unset WORLD_SIZE, or set it to {size}"
        )


# ---------------------------------------------------------------------- SLURM


def _is_in_step(given: _Variables) -> bool:
    # A batch script and an interactive shell have SLURM_NTASKS too, and a batch script even SLURM_PROCID=0, although
    # they are not ranks. Only srun creates a job step, and only a step has the variables below.
    marks = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST")
    return any(name in given for name in marks)


def _is_srun_task(given: _Variables) -> bool:
    return _is_in_step(given) and "SLURM_PROCID" in given and _slurm_size(given) > 1


def _warning_without_srun(given: _Variables) -> str | None:
    if "SLURM_JOB_ID" not in given or _is_in_step(given) or _slurm_size(given) == 1:
        return None
    return (
        f"SLURM_NTASKS={given['SLURM_NTASKS']}, but srun did not start this process, so it trains alone, as the only "
        "rank. Start it with `srun python PROGRAM`, or, if one rank is what you want, with `srun --ntasks=1`"
    )


def _slurm_size(given: _Variables) -> int:
    default = given.number("SLURM_NTASKS", at_least=1, default=1)
    return given.number("SLURM_STEP_NUM_TASKS", at_least=1, default=default)


def _parse_slurm(given: _Variables) -> Environment:
    size = _slurm_size(given)
    rank = given.number("SLURM_PROCID", at_most=size - 1, limit="SLURM_NTASKS - 1")
    _check_world_size(given, size, "srun")
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
    return _FIRST_PORT + (16 * job + step) % _NUM_PORTS


def _first_node(given: _Variables) -> str:
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        nodes = given.get(name)
        if nodes:
            # With one host, nobody else needs to connect, and the name of a node need not be a host name.
            return first_host(nodes) if re.search(r"[\[,]", nodes) else _LOOPBACK
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

    Examples:
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

    Examples:
        >>> first_host("node[007-010,12],login1")
        'node007'
    """
    first_of_each_range = re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", nodes)
    return first_of_each_range.partition(",")[0]
