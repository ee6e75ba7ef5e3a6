"""The rendezvous of a job's ranks at a store, before the first collective.

Every rank writes its identity and its arguments of `sl.init` to the store, and reads those of all ranks. So:

- After a timeout, the error names the ranks that are missing.
- If two processes claim one rank, the second process raises an error that names both processes.
- Different arguments raise the same error on all ranks, before any process group exists.
- All ranks select the same backend, because they select it from the same messages.
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
from syncline.words import describe_difference, describe_ranks, refusal_of

TITLE = "sl.init"

REMEDY = 'Pass the same arguments to sl.init on every rank; if only some have a GPU, device="cpu" on all.'
"""The remedy for ranks that called `sl.init` with different arguments."""

_READ_SECONDS = 10.0
"""Time for which rank 0 keeps the store open after an error, so that the other ranks can read the reason."""


@dataclass(frozen=True, kw_only=True)
class Presence:
    """The message of a rank to all ranks: its identity, its host and its arguments of `sl.init`."""

    rank: int
    size: int
    host: str
    pid: int
    gpu: str | None
    """Unique id of the rank's GPU; None if the rank computes on the CPU."""
    asked: list[str] = field(default_factory=list)
    """Arguments of `sl.init`, one line per argument. These lines must be equal on all ranks."""
    fault: list[str] | None = None
    """Class name and text of an error, if the rank cannot join because its arguments are invalid; None otherwise."""

    @staticmethod
    def of_this_process(
        env: Environment, device: torch.device, asked: Sequence[str] = (), fault: Exception | None = None
    ) -> Presence:
        """Return the message of this process."""
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
    """The stores of this process. They outlive `shutdown`, so that a later `init` never connects to a closing store."""

    def __init__(self) -> None:
        self._by_place: dict[tuple[str | None, int | None, int, int], Store] = {}
        self._num_inits = 0

    def of_next_init(self, env: Environment, timeout_seconds: float) -> Store:
        """Return the store for the next `init`, with a new prefix for its keys.

        Without a new prefix, the launcher's store could return keys of an earlier attempt or an earlier `init`.
        """
        place = (env.master_addr, env.master_port, env.rank, env.size)
        if place not in self._by_place:
            self._by_place[place] = connect(env, timeout_seconds)
        self._num_inits += 1
        return PrefixStore(f"syncline/{env.generation}/{self._num_inits - 1}", self._by_place[place])


def connect(env: Environment, timeout_seconds: float) -> Store:
    """Connect to the store at MASTER_ADDR:MASTER_PORT. Rank 0 opens the store unless the launcher has opened it.

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
        with contextlib.suppress(OSError):  # TCPStore raises the error, or shares a store of this process
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
                f"rank 0 cannot listen on {where}: the port is in use. Set another MASTER_PORT for the job, or use "
                "`syncline run`, which finds a free port"
            ) from error
        raise CollectiveTimeout(
            f"rank {env.rank} of {env.size} could not connect to {where} within {timeout_seconds:g} s. Check that "
            f"rank 0 is running and that this host can reach that port ({str(error).splitlines()[0]})"
        ) from error


def wait_for_all(store: Store, mine: Presence, timeout_seconds: float) -> list[Presence]:
    """Wait until all ranks are present, and return their messages in rank order.

    Args:
        store: an empty store, the same on all ranks.
        mine: the message of this rank.
        timeout_seconds: how long to wait for each rank.

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
            f"rank {mine.rank} of {mine.size} lost the connection to the store in sl.init, before all ranks had "
            "arrived: the process that opened the store (rank 0, or the launcher) has ended. Look at the last lines of "
            f"its log ({str(error).splitlines()[0]})"
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
            f"two processes are rank {mine.rank}: {other}, and {mine}. Set a different RANK for each process. If the "
            "first process belongs to an earlier job, end it or use another MASTER_PORT"
        )
    try:
        everyone = [_parsed(text, rank) for rank, text in enumerate(messages.multi_get(keys))]
    except dist.DistStoreError as error:
        missing = [rank for rank, key in enumerate(keys) if not messages.has(key)]
        raise CollectiveTimeout(
            f"rank {mine.rank} waited {timeout_seconds:g} s in sl.init, but {describe_ranks(missing)} of {mine.size} "
            "did not call it. Check whether they failed before sl.init(), and whether their host can reach rank 0"
        ) from error
    sizes = {presence.size for presence in everyone}
    if len(sizes) > 1:
        sizes_in_words = ", ".join(f"{p.size} on rank {p.rank} ({p})" for p in everyone)
        raise SynclineError(
            f"the ranks have different world sizes: {sizes_in_words}. Set the same WORLD_SIZE on all ranks"
        )
    difference = _difference(everyone)
    if difference is not None:
        _let_all_read(store, mine, timeout_seconds)
        raise difference
    return everyone


def _difference(everyone: Sequence[Presence]) -> Exception | None:
    """Return the error to raise on all ranks if some arguments are invalid or different; None if there is none."""
    faults = {p.rank: (p.fault[0], p.fault[1], None) for p in everyone if p.fault is not None}
    if faults:
        return refusal_of(TITLE, faults, "refused, no rank has joined")
    text = describe_difference(TITLE, [p.asked for p in everyone], remedy=REMEDY)
    return None if text is None else ContractMismatch(text)


def _let_all_read(store: Store, mine: Presence, timeout_seconds: float) -> None:
    """Keep rank 0 waiting until all ranks have read the messages, because the store may end with its process."""
    keys = [f"rank {rank} has read" for rank in range(mine.size)]
    with contextlib.suppress(dist.DistStoreError, dist.DistNetworkError):
        store.set(keys[mine.rank], "")
        if mine.rank == 0:
            store.wait(keys, timedelta(seconds=min(timeout_seconds, _READ_SECONDS)))


def _parsed(text: str, rank: int) -> Presence:
    """Return the message that the process of `rank` wrote to the store."""
    where = f"key 'rank {rank}' at the store"
    found = decode(Presence, text, where)
    if found.rank != rank:
        raise SynclineError(f"{where}: expected a message of rank {rank}, got one of rank {found.rank}")
    if found.fault is not None and len(found.fault) != 2:
        raise SynclineError(f"{where}: expected the class of an error and its text, got {found.fault}")
    return found


def backend_for(everyone: Sequence[Presence], *, warn: bool) -> str:
    """Return the torch.distributed backend that all ranks can use. The result is the same on every rank.

    Args:
        everyone: the messages of all ranks. `wait_for_all` has checked that either all ranks use a GPU or none does.
        warn: whether this rank warns if ranks share a GPU. One rank per host is enough.
    """
    if everyone[0].gpu is None:
        return "gloo"
    num_gpus = len({presence.gpu for presence in everyone})
    if num_gpus == len(everyone):
        return "cpu:gloo,cuda:nccl"
    if warn:
        warn_user(
            f"{len(everyone)} ranks share {num_gpus} GPU(s). NCCL needs one GPU for each rank, so Gloo sends the "
            "tensors on GPUs through the CPU, which is slow and only good for trials. Start one process per GPU "
            '(syncline run -n gpu), or call sl.init(device="cpu")',
            UserWarning,
        )
    return "cpu:gloo,cuda:gloo"
