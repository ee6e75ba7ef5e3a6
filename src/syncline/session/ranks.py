"""The world of a process: its rank, its device, and the number of ranks.

A launcher's variables or a process group define the world. Without them, the process is the only rank of its world.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

import torch
import torch.distributed as dist

from syncline import launchers
from syncline.errors import SynclineError
from syncline.launchers import Environment
from syncline.words import one_line


@dataclass(frozen=True, kw_only=True)
class World:
    """The rank and the device of this process, and the number of ranks of the job."""

    rank: int
    """The rank of this process among the ranks of all hosts, from 0 to `size - 1`."""
    size: int
    """The number of ranks on all hosts."""
    local_rank: int
    """The rank of this process among the ranks on this host, from 0 to `local_size - 1`."""
    local_size: int
    """The number of ranks on this host."""
    host: str
    """The name of this host."""
    generation: int
    """How often the launcher has restarted the ranks; 0 at the first start."""
    device: torch.device
    """The device on which this rank should compute."""

    def __repr__(self) -> str:
        local = f"local rank {self.local_rank} of {self.local_size}"
        return one_line(self, f"rank {self.rank} of {self.size}, {local} on {self.host}, {self.device}")


def world_from(env: Environment, device: torch.device | None) -> World:
    """Return the world that a launcher's variables describe.

    Args:
        env: the launcher's variables.
        device: the device on which this rank computes. None means the GPU whose index is the local rank, or the CPU if
            there is no GPU.
    """
    return World(
        rank=env.rank,
        size=env.size,
        local_rank=env.local_rank,
        local_size=env.local_size,
        host=socket.gethostname(),
        generation=env.generation,
        device=_device(device, env.local_rank),
    )


def world_alone(device: torch.device | None) -> World:
    """Return a world of which this process is the only rank."""
    return world_from(Environment(launcher="alone"), device)


def world_of_default_group(device: torch.device | None) -> World:
    """Return the world of torch's default process group, which must exist."""
    rank, size = dist.get_rank(), dist.get_world_size()
    try:
        env = launchers.current()
    except ValueError:  # torch.distributed was initialised without these variables
        env = Environment(launcher="alone")
    if (env.rank, env.size) != (rank, size):
        # Only a collective could find out which ranks share a host. Assume one host.
        env = Environment(launcher="environment", rank=rank, size=size, local_rank=rank, local_size=size)
    if device is None and torch.cuda.is_available() and torch.cuda.is_initialized():
        device = torch.device("cuda", torch.cuda.current_device())  # the program has already selected it
    return world_from(env, device)


def _device(asked: torch.device | None, local_rank: int) -> torch.device:
    if asked is None:
        asked = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if str(asked) == "cuda":
        # A launcher may show each rank only its own GPU. Then the rank sees one GPU, with index 0.
        return torch.device("cuda", local_rank % max(1, torch.cuda.device_count()))
    return asked


def check_that_ranks_were_joined(*, has_left: bool) -> None:
    """Raise an error if a launcher started several ranks. Call this function if this process has not joined them.

    Without this check, each process would train alone by mistake.

    Args:
        has_left: whether this process has left the other ranks by `shutdown`. The error message says so.

    Raises:
        SynclineError: a launcher started several ranks.
    """
    try:
        env = launchers.current()
    except ValueError:
        return  # only `init` reports invalid variables
    if env.size > 1:
        has = "has left the other ranks by sl.shutdown()" if has_left else "has not joined the other ranks"
        raise SynclineError(
            f"this process is rank {env.rank} of {env.size} (launcher: {env.launcher}), but it {has}. Call sl.init() "
            "or torch.distributed.init_process_group() first"
        )


def default_group() -> dist.ProcessGroup | None:
    """Return torch's default process group; None if torch.distributed is not initialised."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
