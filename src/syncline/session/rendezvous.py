"""The rendezvous of a job's ranks at a store, before the first collective.

Every rank writes a message with its identity and its arguments of `sl.init` to the store, and gets the messages of all
ranks (see `liveness/gathering.py`). This has four advantages:

- After a timeout, the error names the missing ranks.
- If two processes claim one rank, the second process raises an error that names both processes.
- If the ranks pass different arguments, all ranks raise the same error before any process group exists.
- All ranks select the same backend, because they select it from the same messages.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from syncline import environment
from syncline._torch.process_groups import PrefixStore, Store, TCPStore
from syncline.errors import CollectiveTimeout, ContractMismatch, PeerLost, SynclineError
from syncline.launchers import Environment
from syncline.liveness.connection import interruptibly
from syncline.liveness.folder_store import FolderStore
from syncline.liveness.gathering import Lookout, MissingRanks, first_of, gathered
from syncline.liveness.processes import RankProcess
from syncline.liveness.store import SignedStore, decode
from syncline.session.listening import NO_LOOPBACK, bound_socket, has_loopback, is_loopback
from syncline.user_code import warn_user
from syncline.words import describe_difference, describe_ranks, refusal_of

TITLE = "sl.init"

REMEDY = 'Pass the same arguments to sl.init on every rank. If only some ranks have a GPU, pass device="cpu" on all.'
"""The last line of an error about different arguments of `sl.init`: how to prevent the error."""

_ROUND_SECONDS = 60.0
"""How long a restarted rank waits for rank 0, which is restarted at the same time."""

_POLL_SECONDS = 0.05

_LOST = ("connection closed", "connection reset", "broken pipe")
"""Words of torch's errors about a connection that was closed at its other end.

The list is shorter than that of `is_of_backend`: while ranks connect, other errors often have another cause, such as a
wrong network interface.
"""

_READ_SECONDS = environment.patience(10.0)
"""How long rank 0 keeps the store open after an error, in seconds, so that the other ranks can read the reason."""


@dataclass(frozen=True, kw_only=True)
class Presence:
    """The message that a rank writes for all ranks: its identity, its host, its GPU, and its arguments of `sl.init`."""

    rank: int
    size: int
    host: str
    pid: int
    gpu: str | None
    """The unique id of the GPU of the rank; None if the rank computes on the CPU."""
    asked: list[str] = field(default_factory=list)
    """The arguments of `sl.init`, one line of text per argument. The lines must be equal on all ranks."""
    fault: list[str] | None = None
    """The class name and the text of the error about the rank's arguments; None if the arguments are valid."""
    host_key: str | None = None
    """The key of the host, as in `RankProcess`; None if the system does not show the states of processes."""
    started: int = 0
    """The start time of the process, as in `RankProcess`; 0 if it is not known."""

    @staticmethod
    def of_this_process(
        env: Environment, device: torch.device, asked: Sequence[str] = (), fault: Exception | None = None
    ) -> Presence:
        """Return the message that this process writes for all ranks."""
        process = RankProcess.own()
        return Presence(
            rank=env.rank,
            size=env.size,
            host=socket.gethostname(),
            pid=os.getpid(),
            gpu=str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None,
            asked=list(asked),
            fault=None if fault is None else [type(fault).__name__, str(fault)],
            host_key=None if process is None else process.host,
            started=0 if process is None else process.started,
        )

    def has_ended(self, seen_from: Presence) -> bool:
        """Return whether the process of this rank has certainly ended. Another host cannot see this.

        Args:
            seen_from: the message of the calling process.
        """
        process = self.process(seen_from)
        return process is not None and process.has_ended()

    def process(self, seen_from: Presence) -> RankProcess | None:
        """Return the process of this rank. None if the calling process, whose message is `seen_from`, cannot see it."""
        return self.process_anywhere() if self.host_key == seen_from.host_key else None

    def process_anywhere(self) -> RankProcess | None:
        """Return the process of this rank, which may be on another host. None if its system does not show it."""
        return None if self.host_key is None else RankProcess(self.host_key, self.pid, self.started)

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"


class Stores:
    """The connections of this process to stores.

    The connections outlive `shutdown`, so that a later `init` never connects to a store that is about to close.
    """

    def __init__(self) -> None:
        self._by_place: dict[tuple[str | None, int | None, int, int], Store] = {}
        self._num_inits: Counter[tuple[str | None, int | None, int, int]] = Counter()
        self._in_folders: dict[str, FolderStore] = {}
        """The stores in folders. They live as long as this process; see `FolderStore`."""
        self.of_last_init: Store | None = None
        """The store of the last `init`, in which the ranks have met; None before the first `init`."""

    def of_next_init(self, env: Environment, timeout_seconds: float) -> Store:
        """Return the store for the next `init`. It puts a new prefix before each key.

        Without the prefix, `init` could read messages of an earlier `init`, or messages that are older than a restart.
        Calls of `init` with another address, rank or size count separately, because other ranks may lack them.

        Raises:
            CollectiveTimeout: rank 0 did not arrive in time, or this rank could not connect to the store.
        """
        place = (env.master_addr, env.master_port, env.rank, env.size)
        if place not in self._by_place:
            self._by_place[place] = connect(env, timeout_seconds)
        store = PrefixStore(f"syncline/{self._num_inits[place]}", self._by_place[place])
        self.of_last_init = PrefixStore(_round(store, env, timeout_seconds), store)
        self._num_inits[place] += 1
        return self.of_last_init

    def for_changes(self, met: Store | None) -> Store | None:
        """Return the store by which the ranks agree on a membership when a rank is lost.

        Ranks that are all on the host of one launcher use a folder, so that they need no answer of the launcher.

        Args:
            met: the store in which the ranks have met, which they use otherwise.
        """
        folder = environment.store_folder()
        if folder is None:
            return met
        if folder not in self._in_folders:
            self._in_folders[folder] = FolderStore(Path(folder))
        return self._in_folders[folder]


def _round(store: Store, env: Environment, timeout_seconds: float) -> str:
    """Return the name of the present start of the ranks, which is the same on all ranks.

    A store of the launcher outlives the ranks, and it holds messages of ranks that were started earlier. torchrun's
    agents start the ranks again on all hosts, but they count the starts differently: an agent does not count those that
    another one began. So rank 0 makes a new name. A rank that finds a name that it has used in an earlier start waits
    for the next one.
    """
    if not env.launcher_has_store:
        return str(env.generation)  # rank 0 opens a new store
    store.set_timeout(timedelta(seconds=timeout_seconds))
    messages, own = SignedStore(store), uuid.uuid4().hex
    try:
        if env.rank == 0 and not environment.joins_running_job():
            messages.set("round", own)
            return own
        name = messages.get("round")
        if not environment.joins_running_job():
            seconds = min(timeout_seconds, _ROUND_SECONDS)
            deadline = time.monotonic() + seconds
            while (held := messages.set_first(key := f"rank {env.rank} in {name}", own)) != own:
                if time.monotonic() > deadline:
                    raise _taken(env.rank, key, held, seconds)
                time.sleep(_POLL_SECONDS)
                name = messages.get("round")
        return name
    except dist.DistStoreError as error:
        raise CollectiveTimeout(
            f"rank {env.rank} waited {timeout_seconds:g} s in sl.init, but rank 0 of {env.size} did not call sl.init. "
            "Check whether this rank failed before that call, and whether it can reach the store"
        ) from error
    except dist.DistNetworkError as error:
        raise _store_lost(env.rank, env.size, error) from error


def _taken(rank: int, key: str, held: str, seconds: float) -> SynclineError:
    """Return the error for a rank that finds its place in the present start of the ranks taken."""
    return SynclineError(
        f"rank {rank} found {held[:60]!r} under the key {key!r} at the store in sl.init, and expected its own entry. "
        f"For {seconds:g} s rank 0 began no new start of the ranks. Either an earlier process of rank {rank} wrote the "
        "entry, and rank 0 was not started again together with this rank, or another program wrote it. Start the whole "
        "job again, with another MASTER_PORT. If other programs can connect to the store, set SYNCLINE_TOKEN on all "
        "ranks"
    )


def connect(env: Environment, timeout_seconds: float) -> Store:
    """Connect to the store at MASTER_ADDR:MASTER_PORT. On rank 0, open the store unless the launcher has opened it.

    Raises:
        SynclineError: rank 0 cannot open the store, because the port is in use.
        CollectiveTimeout: this rank could not connect to the store in time.
    """
    assert env.master_addr is not None
    assert env.master_port is not None
    where = f"{env.master_addr}:{env.master_port} (MASTER_ADDR, MASTER_PORT)"
    if is_loopback(env.master_addr) and not has_loopback():
        raise SynclineError(f"rank {env.rank} of {env.size} cannot connect to {where}: {NO_LOOPBACK}")
    is_master = env.rank == 0 and not env.launcher_has_store
    bound = None
    if is_master and is_loopback(env.master_addr) and environment.uses_libuv():
        with contextlib.suppress(OSError):  # TCPStore raises the error, or shares a store of this process
            bound = bound_socket(env.master_addr, env.master_port)
    try:
        return interruptibly(
            partial(
                TCPStore,
                env.master_addr,
                env.master_port,
                env.size,
                is_master=is_master,
                timeout=timedelta(seconds=timeout_seconds),
                wait_for_workers=False,  # `wait_for_all` waits, and its error names the missing ranks
                multi_tenant=True,
                master_listen_fd=None if bound is None else bound.detach(),
                use_libuv=environment.uses_libuv(),
            )
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        if is_master and "address already in use" in str(error).lower():
            raise SynclineError(
                f"rank 0 cannot listen on {where}: the port is in use. Set another MASTER_PORT for the job, or use "
                "`syncline run`, which finds a free port"
            ) from error
        raise CollectiveTimeout(
            f"rank {env.rank} of {env.size} could not connect to {where} within {timeout_seconds:g} s. "
            f"{_remedy_of_connect(env)}. torch reported: {str(error).splitlines()[0]}"
        ) from error


def _remedy_of_connect(env: Environment) -> str:
    """Return what to do if this process could not connect to the store."""
    assert env.master_addr is not None
    host = socket.gethostname()
    try:
        socket.getaddrinfo(env.master_addr, None, type=socket.SOCK_STREAM)
    except OSError:
        return f"{host} cannot resolve this name. Set MASTER_ADDR to an address of rank 0's host on all ranks"
    if env.rank == 0 and not env.launcher_has_store:
        return (
            f"This rank listens there for the other ranks, on {host}. Set MASTER_ADDR to an address of {host} on all "
            "ranks, or start rank 0 on the host that has this address"
        )
    return "Check that rank 0 is running, and that this host can reach this port of rank 0's host"


def wait_for_all(store: Store, mine: Presence, timeout_seconds: float) -> list[Presence]:
    """Wait until all ranks are present, and return their messages in rank order.

    Args:
        store: an empty store, the same on all ranks.
        mine: the message of this rank.
        timeout_seconds: how long to wait for the messages of all ranks.

    Raises:
        SynclineError: another process claims this rank, or the ranks have different world sizes.
        ContractMismatch: the ranks called `sl.init` with different arguments. The text is the same on every rank.
        TypeError, ValueError: some ranks passed invalid arguments. The text is the same on every rank.
        CollectiveTimeout: some ranks did not arrive in time. The text names them.
        PeerLost: the process of rank 0, or the process that opened the store, has ended.
    """
    try:
        return _wait_for_all(store, mine, timeout_seconds)
    except dist.DistNetworkError as error:
        raise _store_lost(mine.rank, mine.size, error) from error


def _store_lost(rank: int, size: int, error: Exception) -> PeerLost:
    return PeerLost(
        f"rank {rank} of {size} lost the connection to the store in sl.init, before all ranks had arrived: the process "
        "that opened the store (rank 0, or the launcher) has ended. The last lines of its log name the cause. torch "
        f"reported: {str(error).splitlines()[0]}"
    )


def failed_connection(
    error: RuntimeError, mine: Presence, everyone: Sequence[Presence], timeout_seconds: float
) -> SynclineError | None:
    """Return the error that `sl.init` raises if ranks have met, but could not connect. None stands for `error`.

    Args:
        error: the error of the connection. Errors of torch name no rank.
        mine: the message of this rank.
        everyone: the messages of all ranks.
        timeout_seconds: how long the ranks were allowed to take.
    """
    if isinstance(error, SynclineError):
        return None
    reported = f"torch reported: {str(error).splitlines()[0]}"
    where = f"sl.init failed on rank {mine.rank} of {mine.size} while the ranks connected to each other"
    ended = [presence for presence in everyone if presence.has_ended(mine)]
    if ended:
        names = ", ".join(f"rank {presence.rank} ({presence})" for presence in ended)
        return PeerLost(
            f"{where}: {names}: its process has ended. Look at the last lines of its log. {reported}"
        )
    if isinstance(error, dist.DistStoreError):
        return CollectiveTimeout(
            f"{where}: some rank did not connect within {timeout_seconds:g} s, although all ranks had called sl.init. "
            f"Check that all ranks still run. {reported}"
        )
    if "cannot resolve 127.0.0.1" in str(error).lower():
        return SynclineError(f"{where}: {NO_LOOPBACK}. {reported}")
    if any(words in str(error).lower() for words in _LOST):
        return PeerLost(
            f"{where}: a connection was lost, because another rank has ended, or the network has failed. Look at the "
            f"log of the rank that ended first: its last lines name the cause. {reported}"
        )
    return None


def _wait_for_all(store: Store, mine: Presence, timeout_seconds: float) -> list[Presence]:
    store.set_timeout(timedelta(seconds=timeout_seconds))
    keys = [f"rank {rank}" for rank in range(mine.size)]
    message = json.dumps(vars(mine))
    messages = SignedStore(store)
    held = messages.set_first(keys[mine.rank], message)
    if held != message:
        other = _parsed(held, mine.rank)
        raise SynclineError(
            f"two processes claim to be rank {mine.rank}: {other}, and {mine}. Set a different RANK for each process. "
            "If the first process belongs to an earlier job, end that process, or use another MASTER_PORT"
        )
    try:
        everyone = _messages_of_all(messages, keys, mine, timeout_seconds)
    except MissingRanks as missing:
        if missing.have_ended:
            raise _rank_0_lost(messages, keys, mine) from missing
        raise CollectiveTimeout(
            f"rank {mine.rank} waited {timeout_seconds:g} s in sl.init, but {describe_ranks(missing.ranks)} of "
            f"{mine.size} did not call sl.init. Check whether these ranks failed before that call, and whether "
            "they can reach the host of rank 0"
        ) from missing
    difference = _difference(everyone)
    if difference is not None:
        _let_all_read(messages, mine, timeout_seconds)
        raise difference
    return everyone


def _rank_0_lost(messages: SignedStore, keys: Sequence[str], mine: Presence) -> PeerLost:
    """Return the error about the end of rank 0. Rank 0 may have ended because it has waited in vain for other ranks."""
    absent = [rank for rank, key in enumerate(keys) if not messages.has(key)]
    others = f" {describe_ranks(absent)} of {mine.size} did not call sl.init before." if absent else ""
    return PeerLost(
        f"sl.init failed on rank {mine.rank} of {mine.size}: rank 0 ({_parsed(messages.get(keys[0]), 0)}): its process "
        f"has ended.{others} Look at the last lines of its log"
    )


def _messages_of_all(
    messages: SignedStore, keys: Sequence[str], mine: Presence, timeout_seconds: float
) -> list[Presence]:
    """Return the messages of all ranks in rank order. Each rank reads that of rank 0 first, and compares the sizes."""
    lookout: Lookout | None = None
    if mine.rank != 0:
        first = _parsed(first_of(messages, keys, timeout_seconds), 0)
        _check_sizes([first, mine])
        lookout = Lookout(
            mine.rank, mine.size, lambda ranks: [0] if 0 in ranks and first.has_ended(mine) else []
        )
    texts = gathered(messages, keys, mine.rank, timeout_seconds, lookout)
    everyone = [_parsed(text, rank) for rank, text in enumerate(texts)]
    _check_sizes(everyone)
    return everyone


def _check_sizes(presences: Sequence[Presence]) -> None:
    """Raise an error if these ranks have different world sizes."""
    if len({presence.size for presence in presences}) > 1:
        sizes_in_words = ", ".join(f"{p.size} on rank {p.rank} ({p})" for p in presences)
        raise SynclineError(
            f"the ranks have different world sizes: {sizes_in_words}. Set the same WORLD_SIZE on all ranks"
        )


def _difference(everyone: Sequence[Presence]) -> Exception | None:
    """Return the error to raise on all ranks if some arguments are invalid or differ. Return None if all agree."""
    faults = {p.rank: (p.fault[0], p.fault[1], None) for p in everyone if p.fault is not None}
    if faults:
        return refusal_of(TITLE, faults, "refused, no rank has joined")
    text = describe_difference(TITLE, [p.asked for p in everyone], remedy=REMEDY)
    return None if text is None else ContractMismatch(text)


def _let_all_read(messages: SignedStore, mine: Presence, timeout_seconds: float) -> None:
    """Report that this rank has read all messages. On rank 0, wait until all ranks have reported this.

    Rank 0 waits because the store may end together with rank 0.
    """
    keys = [f"rank {rank} has read" for rank in range(mine.size)]
    with contextlib.suppress(dist.DistStoreError, dist.DistNetworkError):
        messages.set(keys[mine.rank], "")
        if mine.rank == 0:
            messages.wait(keys, timedelta(seconds=min(timeout_seconds, _READ_SECONDS)))


def _parsed(text: str, rank: int) -> Presence:
    """Return the message that `rank` wrote to the store as `text`.

    Raises:
        SynclineError: `text` is not a valid message of this rank.
    """
    where = f"key 'rank {rank}' at the store"
    found = decode(Presence, text, where)
    if found.rank != rank:
        raise SynclineError(f"{where}: expected a message of rank {rank}, got a message of rank {found.rank}")
    if found.fault is not None and len(found.fault) != 2:
        raise SynclineError(
            f"{where}: expected the entry `fault` to be the class name and the text of an error, got {found.fault}"
        )
    return found


def backend_for(everyone: Sequence[Presence], *, warn: bool) -> str:
    """Return the name of the torch.distributed backend that all ranks can use. The result is the same on every rank.

    Args:
        everyone: the messages of all ranks. `wait_for_all` has checked that either all ranks use a GPU or none does.
        warn: whether this rank warns if several ranks use one GPU. One warning per host is enough.
    """
    if everyone[0].gpu is None:
        return "gloo"
    num_gpus = len({presence.gpu for presence in everyone})
    if num_gpus == len(everyone):
        return "cpu:gloo,cuda:nccl"
    if warn:
        warn_user(
            f"{len(everyone)} ranks share {num_gpus} GPU(s). NCCL needs one GPU for each rank. So Gloo sends the GPU "
            "tensors through the CPU, which is slow and good only for trials. Start one process per GPU "
            '(syncline run -n gpu), or call sl.init(device="cpu")',
            UserWarning,
        )
    return "cpu:gloo,cuda:gloo"
