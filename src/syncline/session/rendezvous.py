"""The rendezvous of a job's ranks at a store, before the first collective.

Every rank writes its identity and its arguments of `sl.init` to the store. This has four effects:

- After a timeout, the error names the ranks that are missing.
- If two processes claim one rank, the second one raises an error that names both.
- Different arguments raise the same error on all ranks, before any process group exists.
- All ranks select the same backend, because they select it from the same facts.

The module also binds sockets to one address. Without such a socket, a store of torch listens on every interface of
the host.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from syncline._torch.process_groups import PrefixStore, Store, TCPStore
from syncline.environment import Environment
from syncline.errors import CollectiveTimeout, ContractMismatch, PeerLost, SynclineError
from syncline.liveness.store import SignedStore, decode
from syncline.session.listening import bound_socket, is_loopback
from syncline.user_code import warn_user
from syncline.words import describe_difference, refusal_of

TITLE = "sl.init"

REMEDY = 'Pass the same arguments to sl.init on every rank; if only some have a GPU, device="cpu" on all.'
"""The remedy for ranks that called `sl.init` with different arguments."""

_READ_SECONDS = 10.0
"""How long the rank that opened the store keeps it open after an error, so that the others can read the reason."""


@dataclass(frozen=True, kw_only=True)
class Presence:
    """The message that a rank writes to the store about itself."""

    rank: int
    size: int
    host: str
    pid: int
    gpu: str | None
    """Unique id of the rank's GPU; None on the CPU."""
    asked: list[str] = field(default_factory=list)
    """Arguments of `sl.init`, one line per argument. They must be equal on all ranks."""
    fault: list[str] | None = None
    """Class name and text of the error, if the rank's arguments are invalid and it cannot join; else None."""

    @staticmethod
    def of_this_process(
        env: Environment, device: torch.device, asked: Sequence[str] = (), fault: Exception | None = None
    ) -> Presence:
        return Presence(
            rank=env.rank,
            size=env.size,
            host=socket.gethostname(),
            pid=os.getpid(),
            gpu=str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None,
            asked=list(asked),
            fault=None if fault is None else [type(fault).__name__, str(fault)],
        )

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


class Stores:
    """The stores of this process. They outlive `shutdown`, so that a second `init` connects to none that is closing."""

    def __init__(self) -> None:
        self._by_place: dict[tuple[str | None, int | None, int, int], Store] = {}
        self._num_inits = 0

    def of_next_init(self, env: Environment, timeout_seconds: float) -> Store:
        """Return the store for one `init`, with a prefix of its own.

        Without the prefix, the launcher's store could return keys of an earlier attempt or an earlier `init`.
        """
        place = (env.master_addr, env.master_port, env.rank, env.size)
        if place not in self._by_place:
            self._by_place[place] = connect(env, timeout_seconds)
        self._num_inits += 1
        return PrefixStore(f"syncline/{env.generation}/{self._num_inits - 1}", self._by_place[place])


def connect(env: Environment, timeout_seconds: float) -> Store:
    """Connect to the store at MASTER_ADDR:MASTER_PORT. Rank 0 opens it unless the launcher has.

    Raises:
        SynclineError: the port is in use.
        CollectiveTimeout: no process listens there.
    """
    assert env.master_addr is not None
    assert env.master_port is not None
    where = f"{env.master_addr}:{env.master_port} (MASTER_ADDR, MASTER_PORT)"
    is_master = env.rank == 0 and not env.launcher_has_store
    bound = None
    if is_master and is_loopback(env.master_addr):
        with contextlib.suppress(OSError):  # TCPStore reports the error, or shares a store of this process
            bound = bound_socket(env.master_addr, env.master_port)
    try:
        return TCPStore(
            env.master_addr,
            env.master_port,
            env.size,
            is_master=is_master,
            timeout=timedelta(seconds=timeout_seconds),
            wait_for_workers=False,  # `wait_for_all` waits, and its error names the missing ranks
            multi_tenant=True,
            master_listen_fd=None if bound is None else bound.detach(),
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        if is_master and "address already in use" in str(error).lower():
            raise SynclineError(
                f"rank 0 cannot listen on {where}: the port is in use. Give the job another MASTER_PORT; "
                "`syncline run` finds a free one automatically"
            ) from error
        raise CollectiveTimeout(
            f"rank {env.rank} of {env.size} could not connect to {where} within {timeout_seconds:g} s. Is "
            f"rank 0 running, and can this host reach that port? ({str(error).splitlines()[0]})"
        ) from error


def wait_for_all(store: Store, mine: Presence, timeout_seconds: float) -> list[Presence]:
    """Wait until all ranks are present, and return their messages in rank order.

    Args:
        store: an empty store, the same on all ranks.
        mine: the message of this rank.
        timeout_seconds: how long to wait for the last rank.

    Raises:
        SynclineError: another process claims this rank, or the ranks have different world sizes.
        ContractMismatch: the ranks called `sl.init` with different arguments. The text is the same on every rank.
        TypeError, ValueError: the arguments of some ranks are invalid. The text is the same on every rank.
        CollectiveTimeout: some ranks did not arrive in time. The text names them.
        PeerLost: the process that opened the store has ended.
    """
    try:
        return _wait_for_all(store, mine, timeout_seconds)
    except dist.DistNetworkError as error:
        raise PeerLost(
            f"rank {mine.rank} of {mine.size} lost the store in init, before all ranks had arrived: the process that "
            "opened it (rank 0, or the launcher) has ended. Look at its log, its last lines say why "
            f"({str(error).splitlines()[0]})"
        ) from error


def _wait_for_all(store: Store, mine: Presence, timeout_seconds: float) -> list[Presence]:
    store.set_timeout(timedelta(seconds=timeout_seconds))
    keys = [f"rank {rank}" for rank in range(mine.size)]
    message = json.dumps(asdict(mine))
    messages = SignedStore(store)
    held = messages.set_first(keys[mine.rank], message)
    if held != message:
        other = _parsed(held, mine.rank)
        raise SynclineError(
            f"two processes are rank {mine.rank}: {other}, and {mine}. Give each its own RANK; if the first is "
            "left from an earlier job, end it or use another MASTER_PORT"
        )
    try:
        everyone = [_parsed(text, rank) for rank, text in enumerate(messages.multi_get(keys))]
    except dist.DistStoreError as error:
        missing = [rank for rank, key in enumerate(keys) if not messages.has(key)]
        raise CollectiveTimeout(
            f"rank {mine.rank} waited {timeout_seconds:g} s in init, but {_ranks(missing)} of {mine.size} did not "
            "come. Did they fail before sl.init(), or does their host not reach rank 0?"
        ) from error
    sizes = {presence.size for presence in everyone}
    if len(sizes) > 1:
        counts = ", ".join(f"rank {p.rank} ({p}) says {p.size}" for p in everyone)
        raise SynclineError(
            f"the ranks do not agree on the number of ranks: {counts}. Set one WORLD_SIZE for all"
        )
    difference = _difference(everyone)
    if difference is not None:
        _let_all_read(store, mine, timeout_seconds)
        raise difference
    return everyone


def _difference(everyone: Sequence[Presence]) -> Exception | None:
    """Return the error that keeps these ranks from forming one group; None if they can."""
    faults = {p.rank: (p.fault[0], p.fault[1], None) for p in everyone if p.fault is not None}
    if faults:
        return refusal_of(TITLE, faults, "refused, no rank has joined")
    text = describe_difference(TITLE, [p.asked for p in everyone], remedy=REMEDY)
    return None if text is None else ContractMismatch(text)


def _let_all_read(store: Store, mine: Presence, timeout_seconds: float) -> None:
    """Wait on rank 0 until all ranks have read the messages, because the store ends with the process that opened it."""
    keys = [f"rank {rank} has read" for rank in range(mine.size)]
    with contextlib.suppress(dist.DistStoreError, dist.DistNetworkError):
        store.set(keys[mine.rank], "")
        if mine.rank == 0:
            store.wait(keys, timedelta(seconds=min(timeout_seconds, _READ_SECONDS)))


def _parsed(text: str, rank: int) -> Presence:
    """Return the message that a process wrote to the store as `rank`."""
    where = f"key 'rank {rank}' at the store"
    found = decode(Presence, text, where)
    if found.rank != rank:
        raise SynclineError(f"{where}: expected a message of rank {rank}, got one of rank {found.rank}")
    if found.fault is not None and len(found.fault) != 2:
        raise SynclineError(f"{where}: expected the class of an error and its text, got {found.fault}")
    return found


def backend_for(everyone: Sequence[Presence], *, warn: bool) -> str:
    """Return the torch.distributed backend that serves all ranks; the result is the same on every rank.

    Args:
        everyone: the messages of all ranks. `wait_for_all` has checked that either all ranks use a GPU or none does.
        warn: whether to warn if ranks share a GPU. One rank per host is enough for this.
    """
    if everyone[0].gpu is None:
        return "gloo"
    num_gpus = len({presence.gpu for presence in everyone})
    if num_gpus == len(everyone):
        return "cpu:gloo,cuda:nccl"
    if warn:
        warn_user(
            f"{len(everyone)} ranks share {num_gpus} GPU(s). NCCL needs one for each rank, so tensors on GPUs "
            "are sent by Gloo, through the CPU: use this only for trials, because it is slow. Start one process "
            'per GPU (syncline run -n gpu), or call init(device="cpu")',
            UserWarning,
        )
    return "cpu:gloo,cuda:gloo"


def _ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
