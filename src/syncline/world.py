"""Who this process is among the ranks, and which transport a group has.

`init` joins the ranks that the launcher started. It is optional: with torch.distributed initialised by somebody else
(Ray's `train_func`, a program written for torch's own class) that group is used and left alone.

Nothing here happens on import. `init` seeds nothing and sets no thread counts.
"""

from __future__ import annotations

import atexit
import socket
import sys
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from syncline import environment
from syncline.errors import SynclineError
from syncline.process import end_with_parent, record_failure
from syncline.transport.base import Transport
from syncline.transport.c10d import C10dTransport
from syncline.transport.threads import ThreadGroup

__all__ = ["World", "init", "shutdown", "transport_of", "world"]

_TRANSPORTS = ("auto", "c10d")


@dataclass(frozen=True, kw_only=True)
class World:
    """One process among all ranks of a job."""

    rank: int
    """0 to `size - 1`."""
    size: int
    """Number of ranks."""
    local_rank: int
    """0 to `local_size - 1`, on this host."""
    local_size: int
    """Number of ranks on this host."""
    host: str
    """Name of this host."""
    generation: int
    """How often the launcher has restarted the job."""
    device: torch.device
    """Where this rank computes: its own accelerator, or the CPU."""


@dataclass
class _Running:
    """What `init` made and `shutdown` undoes."""

    world: World
    arguments: tuple[object, ...]
    owns_group: bool
    exported: dict[str, str | None]
    former_excepthook: Any


@dataclass
class _Transports:
    """One transport for each group in use, forgotten with the default group they belong to."""

    of_world: dist.ProcessGroup | None = None
    by_group: dict[int, tuple[dist.ProcessGroup, Transport]] = field(default_factory=dict)
    alone: Transport | None = None


_running: _Running | None = None
_transports = _Transports()


def init(
    transport: str = "auto",
    *,
    timeout: timedelta | float = 300.0,
    device: torch.device | str | None = None,
) -> World:
    """Join the ranks that torchrun, SLURM, `syncline run` or another launcher started.

    Alone, no process group is made and everything works with one rank. Where torch.distributed is initialised
    already, its default group is used, and `shutdown` leaves it alone.

    Args:
        transport: "auto", or "c10d" for torch's process groups.
        timeout: how long any wait may take, in seconds or as a timedelta.
        device: where this rank computes; None is its own CUDA device, or the CPU.

    Returns:
        Who this process is. A second call with the same arguments returns the same.

    Raises:
        ValueError: an unknown transport, a timeout that is not positive, contradictory environment variables, or
            more ranks than CUDA devices on this host.
        SynclineError: called again with other arguments.

    Example:
        >>> import syncline as sl
        >>> sl.init().size
        1
        >>> sl.shutdown()
    """
    global _running
    arguments = (transport, timeout, device)
    if _running is not None:
        if _running.arguments != arguments:
            raise SynclineError(
                f"init was called before with {_running.arguments}, now with {arguments}: call it once, or "
                "call shutdown in between"
            )
        return _running.world
    if transport not in _TRANSPORTS:
        raise ValueError(f"expected transport to be one of {', '.join(_TRANSPORTS)}; got {transport!r}")
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not 0 < seconds < float("inf"):
        raise ValueError(f"expected a finite timeout above 0 seconds, got {timeout}")
    found = environment.current()
    own_device = _device(found, device)
    owns_group = found.size > 1 and not dist.is_initialized()
    exported = environment.export(found.variables()) if found.size > 1 else {}
    if own_device.type == "cuda":
        torch.cuda.set_device(own_device)
    if owns_group:
        _join(found, own_device, timedelta(seconds=seconds))
    if found.launcher == "torchrun":
        end_with_parent()  # `syncline run` has seen to it before the script began
    former_excepthook = sys.excepthook
    sys.excepthook = _recording(former_excepthook)
    _running = _Running(_describe(found, own_device), arguments, owns_group, exported, former_excepthook)
    return _running.world


def shutdown() -> None:
    """Undo `init`: leave the ranks, restore what was set. Safe to call twice, or without `init`."""
    global _running
    running, _running = _running, None
    _transports.by_group.clear()
    _transports.of_world = None
    _transports.alone = None
    if running is None:
        return
    sys.excepthook = running.former_excepthook
    environment.restore(running.exported)
    if running.owns_group and dist.is_initialized():
        dist.destroy_process_group()


# A program that ends without `shutdown` leaves no process group behind, and no warning about one.
atexit.register(shutdown)


def world() -> World:
    """Who this process is, also without `init`: as torch.distributed says, or alone.

    Raises:
        SynclineError: a launcher started several ranks, but nobody has joined them.
    """
    if _running is not None:
        return _running.world
    found = environment.current()
    _check_joined(found)
    return _describe(found, _device(found, None))


def transport_of(group: dist.ProcessGroup | Transport | None = None) -> Transport:
    """The transport of a group: the same object for the same group, as long as its default group lives.

    Args:
        group: a torch.distributed group, a transport (returned as it is), or None for the default group, which is
            one rank where torch.distributed is not initialised.

    Raises:
        SynclineError: a launcher started several ranks, but nobody has joined them.
    """
    if isinstance(group, Transport):
        return group
    if group is None and not dist.is_initialized():
        _check_joined(environment.current())
        if _transports.alone is None:
            _transports.alone = ThreadGroup(1).transport(0)
        return _transports.alone
    default: dist.ProcessGroup | None = dist.group.WORLD
    if _transports.of_world is not default:
        _transports.by_group.clear()
        _transports.of_world = default
    wanted = default if group is None else group
    assert wanted is not None
    known = _transports.by_group.get(id(wanted))
    if known is None:
        # The group is kept with its transport, so its id stays its own.
        known = _transports.by_group[id(wanted)] = (wanted, C10dTransport(wanted))
    return known[1]


# ---------------------------------------------------------------------- the parts of init


def _device(found: environment.Environment, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    num_devices = torch.cuda.device_count()
    if found.local_rank >= num_devices:
        raise ValueError(
            f"local rank {found.local_rank} has no CUDA device of its own: {found.local_size} ranks share this host, "
            f"which shows {num_devices} device(s). Start at most {num_devices} rank(s) a host, or pass "
            'device="cpu" or the device to share'
        )
    return torch.device("cuda", found.local_rank)


def _join(found: environment.Environment, device: torch.device, timeout: timedelta) -> None:
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(
            backend, init_method="env://", rank=found.rank, world_size=found.size, timeout=timeout
        )
    except (RuntimeError, dist.DistError) as error:
        raise SynclineError(
            f"rank {found.rank} of {found.size} could not join the others at {found.master_addr}:{found.master_port} "
            f"within {timeout.total_seconds():.0f} s (launcher: {found.launcher}). Either a rank was not started "
            f"or has ended, or the address cannot be reached from this host, or another program uses the "
            f"port: {error}"
        ) from error


def _describe(found: environment.Environment, device: torch.device) -> World:
    rank, size = found.rank, found.size
    local_rank, local_size = found.local_rank, found.local_size
    if dist.is_initialized() and (dist.get_rank(), dist.get_world_size()) != (rank, size):
        # Initialised by hand, without a launcher's variables: nothing says more than that it is this host.
        rank, size = dist.get_rank(), dist.get_world_size()
        local_rank, local_size = rank, size
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        host=socket.gethostname(),
        generation=found.generation,
        device=device,
    )


def _check_joined(found: environment.Environment) -> None:
    """Several ranks that each train alone, and nobody notices: not here."""
    if found.size > 1 and not dist.is_initialized():
        raise SynclineError(
            f"this process is rank {found.rank} of {found.size} ({found.launcher}), but it has not joined the others: "
            "call sl.init() first, or torch.distributed.init_process_group()"
        )


def _recording(former: Any) -> Any:
    """An excepthook that tells the launcher first, so that it knows which rank failed first, and with what."""

    def excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        path = environment.error_file()
        if path is not None:
            record_failure(error, path, traceback)
        former(kind, error, traceback)

    return excepthook
