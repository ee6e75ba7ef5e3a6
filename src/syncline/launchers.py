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
from dataclasses import dataclass, replace
from math import inf
from typing import Literal, NamedTuple

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


class _Names(NamedTuple):
    """The names of the variables of a launcher that counts ranks as torchrun does."""

    launcher: Launcher
    rank: str
    size: str
    local_rank: str
    local_size: str
    job: str = ""
    """The variable with the name of the job; "" if the launcher has none."""
    option: str = ""
    """The option of the launcher that sets a variable of all ranks."""


_TORCHRUN = _Names("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")

_SRUN = _Names("slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "tasks on this node")

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
    """Environment variables. Its methods raise errors that say what to do."""

    def number(
        self, name: str, least: int = 0, most: float = inf, limit: str = "", *, default: int | None = None
    ) -> int:
        """Return a variable as an integer.

        Args:
            name: the name of the variable.
            least: the smallest allowed value, which is not negative.
            most: the largest allowed value.
            limit: a text for the error, which says where `most` comes from.
            default: the value to return if the variable is empty or not set. If `default` is None, such a variable is
                an error.

        Raises:
            ValueError: the variable is not such an integer.
        """
        text = self.get(name, "").strip()
        if not text and default is not None:
            return default
        # A regular expression would be compiled, which takes a part of `sl.init`.
        value = int(text) if text.isdecimal() else -1
        if not least <= value <= most:
            bounds = f"of at least {least}" if most == inf else f"from {least} to {most}"
            got = f"{name}={self[name]!r}" if name in self else f"{name} is not set"
            raise ValueError(f"{got}: expected a whole number {bounds}{limit and f' ({limit})'}. {_REMEDY}")
        return value

    def place(self, names: _Names, size: int, local_size: int, address: str | None, port: int) -> Environment:
        """Return the place of this process.

        Args:
            names: the names of its variables.
            size: the number of all ranks.
            local_size: the number of ranks on this host.
            address: the host of the store, if MASTER_ADDR is not set.
            port: its port, if MASTER_PORT is not set; 0 for none.

        Raises:
            ValueError: a variable is missing, or contradicts another one.
        """
        if self.number("WORLD_SIZE", 1, default=size) != size:
            raise ValueError(
                f"WORLD_SIZE={self['WORLD_SIZE']!r} contradicts {names.launcher}, which started {size} tasks. "
                f"Unset WORLD_SIZE, or set it to {size}"
            )
        rank = self.number(names.rank, 0, size - 1, f"{names.size} - 1")
        # A user who sets RANK and WORLD_SIZE by hand may leave out LOCAL_RANK.
        usual = rank if names is _TORCHRUN else None
        local_rank = self.number(
            names.local_rank, 0, local_size - 1, f"{names.local_size} - 1", default=usual
        )
        return Environment(
            launcher=names.launcher,
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=local_size,
            master_addr=self.get("MASTER_ADDR") or address,
            master_port=self.number("MASTER_PORT", 1, 65535, default=port) or None,
        )


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
    # A batch script and an interactive shell have SLURM_NTASKS too, and a batch script even SLURM_PROCID=0, although
    # they are not ranks. Only srun creates a job step, and only a step has the variables below.
    marks = ("SLURM_STEP_ID", "SLURM_STEPID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST")
    is_in_step = any(name in given for name in marks)
    num_tasks = 1
    if is_in_step or "SLURM_JOB_ID" in given:
        of_job = given.number("SLURM_NTASKS", 1, default=1)
        num_tasks = given.number("SLURM_STEP_NUM_TASKS", 1, default=of_job)
    if is_in_step and "SLURM_PROCID" in given and num_tasks > 1:
        return _parse_slurm(given, num_tasks)
    if given.number("WORLD_SIZE", 1, default=1) > 1:
        return _parse_torchrun(given)  # which raises an error about RANK
    if "PMI_RANK" in given and given.number("PMI_SIZE", 1, default=1) > 1:
        raise ValueError(
            f"PMI_RANK={given['PMI_RANK']!r} says that an MPI launcher started this process, but MPI_LOCALRANKID "
            "(which ranks run on this host) is not set. Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT for each process, or start one torchrun on each host"
        )
    if is_in_step or num_tasks == 1:
        return Environment(launcher="alone")
    warning = (
        f"SLURM_NTASKS={given['SLURM_NTASKS']}, but srun did not start this process, so it trains alone, as the only "
        "rank. Start it with `srun python PROGRAM`, or, if one rank is what you want, with `srun --ntasks=1`"
    )
    return Environment(launcher="alone", warning=warning)


def _parse_torchrun(given: _Variables) -> Environment:
    size = given.number("WORLD_SIZE", 1)
    # Without it, a user has set RANK and WORLD_SIZE by hand. Assume one host then.
    local_size = given.number("LOCAL_WORLD_SIZE", 1, size, "WORLD_SIZE", default=size)
    place = given.place(_TORCHRUN, size, local_size, None, 0)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if size > 1 and not given.get(name):
            raise ValueError(f"{name} is not set, although WORLD_SIZE={size} is set. {_REMEDY}")
    launcher: Launcher = "environment"
    if "TORCHELASTIC_RUN_ID" in given:
        launcher = "syncline run" if environment.RUN_MARK in given else "torchrun"
    return replace(
        place,
        launcher=launcher,
        generation=given.number("TORCHELASTIC_RESTART_COUNT", default=0),
        launcher_has_store=given.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _parse_other(given: _Variables, names: _Names) -> Environment:
    size = given.number(names.size, 1)
    if size == 1:
        return Environment(launcher="alone")
    local_size = given.number(names.local_size, 1, size, names.size)
    if local_size < size and not given.get("MASTER_ADDR"):
        raise ValueError(
            f"{names.launcher} started {size} ranks, of which {local_size} run on this host ({names.local_size}), but "
            f"MASTER_ADDR is not set. Pass the address of rank 0's host to all ranks: {names.option}"
        )
    # Two jobs on one host should not meet. MPICH and MVAPICH do not name the job: torch's usual port is documented.
    job = given.get(names.job, "")
    port = _FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS if job else 29500
    return given.place(names, size, local_size, _LOOPBACK, port)


# ---------------------------------------------------------------------- SLURM


def _parse_slurm(given: _Variables, size: int) -> Environment:
    # The port is equal on all ranks, differs between jobs and between steps of one job, and is below ephemeral ports.
    job, step = given.number("SLURM_JOB_ID", default=0), given.number("SLURM_STEP_ID", default=0)
    port = _FIRST_PORT + (16 * job + step) % _NUM_PORTS
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    nodes = next(filter(None, map(given.get, names)), "")
    if not nodes and not given.get("MASTER_ADDR"):
        raise ValueError(
            "SLURM_STEP_NODELIST is not set, although srun started this process (SLURM_PROCID is set). Pass all "
            "variables to the tasks (srun --export=ALL), or set MASTER_ADDR to the first host"
        )
    # With one host, no other host connects, and the name of a node need not be a host name.
    address = first_host(nodes) if re.search(r"[\[,]", nodes) else _LOOPBACK
    place = given.place(_SRUN, size, _slurm_local_size(given, size), address, port)
    return replace(place, generation=given.number("SLURM_RESTART_COUNT", default=0))


def _slurm_local_size(given: _Variables, size: int) -> int:
    names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    name = next((one for one in names if given.get(one)), None)
    if name is None:
        return given.number("SLURM_NTASKS_PER_NODE", 1, default=size)
    per_node = tasks_per_node(given[name], name)
    return per_node[given.number("SLURM_NODEID", 0, len(per_node) - 1, f"nodes in {name} - 1")]


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
