"""The world of a process (its rank among the others): `init`, `shutdown`, `world`, and the transport of a group.

`init` is optional. A single process does not need it. If torch.distributed is already initialised (by Ray or by the
user), the library uses the existing group. `init` does what a program otherwise does itself: it reads the launcher's
variables, waits for the other ranks, creates the process group, and selects the device. It also reports an uncaught
exception to the launcher and the peers, and ends the process without hanging.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import socket
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from syncline import environment
from syncline._torch.process_groups import PrefixStore, Store, living_groups
from syncline.environment import Environment
from syncline.errors import CollectiveTimeout, PeerLost, SynclineError
from syncline.session import process
from syncline.session.arguments import Asked
from syncline.session.rendezvous import REMEDY, TITLE, Presence, backend_for, connect, meet
from syncline.session.transports import best_over
from syncline.transport.agreement import exchange
from syncline.transport.base import Transport
from syncline.transport.c10d import C10dTransport
from syncline.transport.threads import ThreadGroup

__all__ = ["World", "before_shutdown", "init", "shutdown", "transport_of", "world"]


_DESTROY_SECONDS = 10.0

_REFUSAL_SECONDS = 10.0
"""How long a rank with invalid arguments waits for the others, to report the error to them, before it raises alone."""

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


@dataclass(frozen=True, kw_only=True)
class World:
    """The place of this process among the ranks of its job."""

    rank: int
    """Rank of this process, from 0 to `size - 1`, over all hosts."""
    size: int
    """Number of ranks."""
    local_rank: int
    """Rank on this host, from 0 to `local_size - 1`."""
    local_size: int
    """Number of ranks on this host."""
    host: str
    """This host's name."""
    generation: int
    """Number of times that the launcher has restarted the ranks."""
    device: torch.device
    """The device on which this rank should compute."""


class _Destroyer:
    """A thread that destroys the default group, started in advance: Python 3.12 starts no thread while it exits."""

    def __init__(self) -> None:
        self._decided = threading.Event()
        self._destroy = False
        self._thread = threading.Thread(target=self._run, name="syncline-shutdown", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._decided.wait()
        if self._destroy:
            dist.destroy_process_group()

    def end(self, *, destroy: bool) -> None:
        """End the thread, but wait only a limited time for a collective that other ranks have not joined."""
        self._destroy = destroy
        self._decided.set()
        self._thread.join(_DESTROY_SECONDS)
        if self._thread.is_alive():
            warnings.warn(
                f"shutdown: after {_DESTROY_SECONDS:g} s a collective is still under way that other ranks have not "
                "joined; the process group is left behind. Wait for asynchronous work before shutdown()",
                stacklevel=3,
            )


@dataclass
class _Session:
    """The effects of one `init`, which `shutdown` undoes."""

    asked: Asked
    world: World
    group: weakref.ref[dist.ProcessGroup] | None = None
    """The default group that `init` created or found; None in a world of one process without a group."""
    destroyer: _Destroyer | None = None
    """Set only if `init` created the group."""
    variables_before: dict[str, str | None] = field(default_factory=dict)
    hook: _Hook | None = None
    hook_before: _Hook | None = None

    def is_current(self) -> bool:
        """Return True if the default group is still that of this session. Users and tests may destroy it."""
        return (self.group() if self.group is not None else None) is _default_group()


@dataclass
class _Group:
    """A process group of which this process is a member, and its transport once selected."""

    group: dist.ProcessGroup
    transport: Transport | None = None
    is_default: bool = True
    lock: Any = field(default_factory=threading.RLock)
    """Held while the ranks select the transport. Per group, because other threads may do this for other groups."""


_lock = threading.RLock()

_session: _Session | None = None

_num_inits = 0

# Stores outlive `shutdown`, so that a second `init` of the same ranks never connects to a store that is closing.
_stores: dict[tuple[str | None, int | None, int, int], Store] = {}

_transports: dict[int, _Group] = {}

_alone: Transport | None = None

_lost_default_group = False
"""Whether code other than `shutdown` destroyed a default group of several ranks. If so, `transport_of(None)` raises."""

_tells_peers = False


# ---------------------------------------------------------------------- init and shutdown


def init(
    transport: str = "auto",
    *,
    timeout: timedelta | float = 300.0,
    device: torch.device | str | int | None = None,
) -> World:
    """Join the other ranks, as described by the launcher's variables. Without a launcher, return a world of one rank.

    Call it on all ranks. They compare the arguments before any process group exists, and select the transport of the
    default group together. A second call with the same arguments returns the same `World`. If torch.distributed is
    already initialised, `init` uses its group, and `shutdown` does not destroy it.

    Args:
        transport: how tensors are sent. "c10d": torch.distributed (Gloo on CPUs, NCCL on GPUs). "shm": shared memory
            for tensors on the CPU; all ranks raise an error if it is not available, for example on several hosts.
            "auto": the best transport that all ranks of a group can use. For tensors on the CPU this is shared memory
            on one host, and shared memory within each host with Gloo between hosts. Everything else uses
            torch.distributed.
        timeout: how long to wait for another rank, here and in every collective (a timedelta, or seconds).
        device: the device on which this rank computes. None means the GPU of its local rank, or the CPU if there is no
            GPU. A GPU becomes torch's current device.

    Returns:
        The world of this process.

    Raises:
        TypeError, ValueError: an argument, or a variable of the launcher, is invalid. An argument that is invalid on
            one rank raises the same error on all ranks.
        ContractMismatch: the ranks passed different arguments. The text is the same on every rank.
        SynclineError: init was called before with other arguments, or the ranks do not fit together, or "shm" was
            requested and is not available. The text gives the reason on every rank.
        CollectiveTimeout: some ranks did not arrive in time. The text names them.

    Example:
        >>> import syncline as sl
        >>> sl.init().size
        1
        >>> sl.shutdown()
    """
    global _session
    with _lock:
        if _session is not None and not _session.is_current():
            shutdown()
        refused: Exception | None = None
        try:
            asked = Asked.of(transport, timeout, device)
        except (TypeError, ValueError) as fault:
            refused = fault
        if refused is not None:  # outside of `except`, because chaining would print the error twice
            if _session is None:
                _refuse(refused)
            raise refused
        if _session is None:
            _session = _start(asked)
        elif _session.asked != asked:
            raise SynclineError(
                f"init was called before with {_session.asked}, and now with {asked}: use the same arguments, or call "
                "shutdown() in between"
            )
        return _session.world


_unfinished: list[weakref.WeakMethod[Callable[[], object]]] = []


def before_shutdown(wait: Callable[[], object]) -> None:
    """Register `wait`, a method that waits for pending work, to be called by `shutdown`. Its object is held weakly."""
    _unfinished[:] = [known for known in _unfinished if known() is not None]
    _unfinished.append(weakref.WeakMethod(wait))


def shutdown() -> None:
    """Undo `init`. Without an `init`, or when called again, do nothing.

    Call it on all ranks. It waits for pending saves, unless an exception is being handled. Then it closes the
    transports and destroys the process group that `init` created.
    """
    global _session, _alone, _lost_default_group
    if sys.exc_info()[1] is None:
        for known in _unfinished:
            wait = known()
            if wait is not None:
                with contextlib.suppress(Exception):  # the error was reported where it occurred
                    wait()
    with _lock:
        session, _session, _alone = _session, None, None
        _forget_destroyed_groups()
        _lost_default_group = False
        if session is None:
            return
        atexit.unregister(_at_exit)
        group_is_live = session.is_current()
        error = sys.exc_info()[1]
        # `shutdown` may run in a `finally` or `with` while an exception is raised.
        if error is not None and process.exit_code_of(error) and not process.is_agreed_stop(error):
            _tell_peers(error, error.__traceback__)
        for transport in _made_transports():
            transport.close()
        _transports.clear()
        if session.destroyer is not None:
            session.destroyer.end(destroy=group_is_live)
        if session.hook is not None and sys.excepthook is session.hook:
            sys.excepthook = session.hook_before or sys.__excepthook__
        environment.restore(session.variables_before)


def world() -> World:
    """Return the world of this process: from `init`, else from torch.distributed, else a world of one rank.

    Raises:
        SynclineError: a launcher started several ranks, and this process has not joined the others yet.

    Example:
        >>> world().rank
        0
    """
    with _lock:
        if _session is not None and _session.is_current():
            return _session.world
    if _default_group() is not None:
        return _world_of_default_group(None)
    _check_that_ranks_were_joined()
    return _world_alone(None)


def _start(asked: Asked) -> _Session:
    group = _default_group()
    if group is not None:
        found = _world_of_default_group(asked.device)
        _compare_over(group, asked, found.device)
        session = _Session(asked=asked, world=found, group=weakref.ref(group))
        _watch(session, hook_before=sys.excepthook)
        return session
    env = environment.current()
    if env.master_addr is None or env.master_port is None:
        return _Session(asked=asked, world=_world_alone(asked.device))
    if env.launcher in ("syncline run", "torchrun"):
        process.end_with_parent()  # the parent stays alive as long as its ranks; a thread of Ray's may not
    before = environment.export(env.variables())
    hook_before = sys.excepthook
    try:
        found = _world(env, _device(asked.device, env.local_rank))
        if found.device.type == "cuda":
            torch.cuda.set_device(found.device)
        group = _make_default_group(env, found.device, asked)
    except BaseException:
        environment.restore(before)
        raise
    # Torch's own hook puts "[rank1]: " before each line. Output of `syncline run` names the rank already.
    hook_before = hook_before if env.launcher == "syncline run" else sys.excepthook
    session = _Session(
        asked=asked, world=found, group=weakref.ref(group), destroyer=_Destroyer(), variables_before=before
    )
    _watch(session, hook_before=hook_before)
    return session


def _make_default_group(env: Environment, device: torch.device, asked: Asked) -> dist.ProcessGroup:
    """Meet the other ranks, compare the arguments of `init`, create torch's default group, and select its transport."""
    store = _store_of_this_init(env, asked.timeout_seconds)
    mine = Presence.of_this_process(env, device, asked.lines(device))
    everyone = meet(store, mine, asked.timeout_seconds)
    backend = backend_for(everyone, warn=env.local_rank == 0)
    dist.init_process_group(
        backend,
        store=store,
        rank=env.rank,
        world_size=env.size,
        timeout=timedelta(seconds=asked.timeout_seconds),
        device_id=device if "nccl" in backend else None,
    )
    group = _default_group()
    assert group is not None
    try:
        _transports[id(group)] = _Group(group, _chosen(group, asked.transport, asked.timeout_seconds))
    except BaseException:
        dist.destroy_process_group()
        raise
    return group


def _store_of_this_init(env: Environment, timeout_seconds: float) -> Store:
    """Return the store for this `init`, with a prefix of its own.

    Without the prefix, the launcher's store could return keys of an earlier attempt or an earlier `init`.
    """
    global _num_inits
    place = (env.master_addr, env.master_port, env.rank, env.size)
    if place not in _stores:
        _stores[place] = connect(env, timeout_seconds)
    _num_inits += 1
    return PrefixStore(f"syncline/{env.generation}/{_num_inits - 1}", _stores[place])


def _compare_over(group: dist.ProcessGroup, asked: Asked, device: torch.device) -> None:
    """Compare the arguments of `init` over an existing group, and select the group's transport."""
    known = _transports.get(id(group))
    if known is not None and known.transport is not None:
        exchange(known.transport, TITLE, asked.lines(device), remedy=REMEDY)
        if asked.transport != "auto":
            raise SynclineError(
                f"the ranks use {known.transport.name} already, chosen by their first call without init: call "
                f"sl.init({asked.transport!r}) before it"
            )
        return
    c10d = C10dTransport(group, timeout_seconds=asked.timeout_seconds)
    try:
        exchange(c10d, TITLE, asked.lines(device), remedy=REMEDY)
        transport = best_over(c10d, asked.transport)
    except BaseException:
        c10d.close()
        raise
    _transports[id(group)] = _Group(group, transport)


def _refuse(fault: Exception) -> None:
    """Report invalid arguments of `init` on this rank to the other ranks, which may be waiting for it.

    Raises:
        TypeError, ValueError: the arguments are invalid on some rank. Every rank raises it.
    """
    group = _default_group()
    if group is not None:
        c10d = C10dTransport(group)
        try:
            exchange(c10d, TITLE, [], fault=fault)
        finally:
            c10d.close()
    env = environment.current()
    if env.master_addr is not None and env.master_port is not None:
        # The invalid arguments matter more than missing ranks or a missing store, so these errors are dropped.
        with contextlib.suppress(CollectiveTimeout, PeerLost):
            store = _store_of_this_init(env, _REFUSAL_SECONDS)
            meet(store, Presence.of_this_process(env, torch.device("cpu"), fault=fault), _REFUSAL_SECONDS)


# ---------------------------------------------------------------------- end of the process


def _watch(session: _Session, *, hook_before: _Hook) -> None:
    """Report uncaught exceptions to the launcher and the peers, and make the exit clean, without a hang."""
    atexit.register(_at_exit)
    session.hook, session.hook_before = _telling_hook(environment.error_file(), hook_before), hook_before
    sys.excepthook = session.hook


def _telling_hook(path: str | None, hook_before: _Hook) -> _Hook:
    """Return an excepthook that also reports to the launcher (by a file) and to the peers (by their transports)."""
    own_pid = os.getpid()

    def excepthook(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        if os.getpid() == own_pid and path is not None:  # not in a fork, which inherits the hook
            process.record_failure(error, path, tb)
        # Print before the peers are informed. Once one rank has ended, the launcher soon ends the others.
        hook_before(kind, error, tb)
        if os.getpid() == own_pid:
            _tell_peers(error, tb)

    return excepthook


def _tell_peers(error: BaseException, tb: TracebackType | None) -> None:
    """Report the exception to the peers. Ranks waiting for this one, now or later, raise `PeerFailed` with its text."""
    lines = traceback.format_exception(type(error), error, tb)
    reason = "it ended by an uncaught exception:\n" + "".join(lines).rstrip()
    for transport in _made_transports():
        with contextlib.suppress(Exception):
            transport.abort(reason)


def _tell_peers_without_session() -> None:
    """Install the reports to peers for programs that use torch.distributed without `init`; once per process."""
    global _tells_peers
    if not _tells_peers and _session is None:
        _tells_peers = True
        sys.excepthook = _telling_hook(None, sys.excepthook)
        atexit.register(_leave_at_exit)


def _leave_at_exit() -> None:
    """Leave all transports. Ranks waiting for this one, now or later, raise `UnevenInputs`, not a lost connection."""
    if _session is None and not _has_failed():
        for transport in _made_transports():
            transport.leave()


def _has_failed() -> bool:
    """Return True if an exception ends this process. Python does not record `sys.exit(1)`; the error file does."""
    path = environment.error_file()
    return getattr(sys, "last_type", None) is not None or (path is not None and os.path.exists(path))


def _at_exit() -> None:
    if not _has_failed():
        shutdown()
        return
    # An exception ends this process, perhaps while collectives are pending that its peers will never join. The
    # destructor of a group would wait for these collectives until the timeout, while the peers wait for this process.
    # The extra reference keeps the groups from being destroyed. The kernel then closes the connections at once.
    groups = living_groups()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(groups))


# ---------------------------------------------------------------------- transports


def transport_of(group: dist.ProcessGroup | Transport | None = None) -> Transport:
    """Return the transport of a group, always the same object while the group exists.

    `init` selects the transport of the default group. For any other group, or without `init`, the first call is
    collective, because the ranks select the transport together.

    Args:
        group: None means torch's default group, or a world of one rank if there is none. A transport is returned
            unchanged.

    Raises:
        ValueError: this rank is not in `group`, or `group` was destroyed.
        SynclineError: "shm" was requested and is not available; or `group` is None and the default group of several
            ranks was destroyed; or a launcher started several ranks and this process has not joined them.

    Example:
        >>> transport_of(None).size
        1
    """
    global _alone, _lost_default_group
    if isinstance(group, Transport):
        return group
    default = _default_group()
    known = _transports.get(id(default if group is None else group))
    if known is not None and known.group is default and known.transport is not None:
        # The fast path of almost every call: a default group exists as long as it is the default.
        return known.transport
    with _lock:
        _forget_destroyed_groups()
        if default is not None:
            _lost_default_group = False
        found = group if group is not None else default
        if found is None:
            if _lost_default_group:
                raise SynclineError(
                    "the default process group was destroyed (torch.distributed.destroy_process_group), and this "
                    "process is in no group of ranks any more: synchronize before that, or join the ranks again "
                    "(sl.init(), or torch.distributed.init_process_group()); sl.shutdown() goes on alone"
                )
            _check_that_ranks_were_joined()
            if _alone is None:
                _alone = ThreadGroup(1).transport(0)
            return _alone
        if not isinstance(found, dist.ProcessGroup):
            raise ValueError(
                f"expected group to be a process group that this rank is in, got {found!r}: dist.new_group "
                "returns such a value on ranks outside of the group; make no call with it there"
            )
        if id(found) not in _transports:
            if not _is_alive(found):
                raise ValueError("this process group was destroyed: pass one that is alive, or None")
            _transports[id(found)] = _Group(found, is_default=found is default)
            _tell_peers_without_session()
        known = _transports[id(found)]
        asked = _session.asked.transport if _session is not None else "auto"
    with known.lock:
        if known.transport is None:
            known.transport = _chosen(found, asked, None)
        return known.transport


def _chosen(group: dist.ProcessGroup, asked: str, timeout_seconds: float | None) -> Transport:
    """Create a transport between the ranks of `group`; a collective call.

    Args:
        group: the process group.
        asked: "auto", "c10d" or "shm", the same on all ranks.
        timeout_seconds: how long an operation may wait; None means the group's own timeout.
    """
    c10d = C10dTransport(group, timeout_seconds=timeout_seconds)
    try:
        return best_over(c10d, asked)
    except BaseException:
        c10d.close()
        raise


def _made_transports() -> list[Transport]:
    return [known.transport for known in list(_transports.values()) if known.transport is not None]


def _forget_destroyed_groups() -> None:
    global _lost_default_group
    for key in [key for key, known in _transports.items() if not _is_alive(known.group)]:
        known = _transports.pop(key)
        if known.transport is not None:
            _lost_default_group |= known.is_default and known.transport.size > 1
            known.transport.close()


def _is_alive(group: dist.ProcessGroup) -> bool:
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return False
    return True


def _default_group() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


# ---------------------------------------------------------------------- worlds


def _check_that_ranks_were_joined() -> None:
    """Raise if a launcher started several ranks and this process has not joined them. Each would train alone."""
    try:
        env = environment.current()
    except ValueError:
        return  # `init` reports invalid variables; without `init` they are ignored
    if env.size > 1:
        raise SynclineError(
            f"this process is rank {env.rank} of {env.size} (launcher: {env.launcher}), but it has not joined the "
            "others: call sl.init() first, or torch.distributed.init_process_group()"
        )


def _world_alone(device: torch.device | None) -> World:
    return _world(Environment(launcher="alone"), _device(device, 0))


def _world_of_default_group(device: torch.device | None) -> World:
    rank, size = dist.get_rank(), dist.get_world_size()
    try:
        env = environment.current()
    except ValueError:  # torch.distributed was initialised without these variables
        env = Environment(launcher="alone")
    if (env.rank, env.size) != (rank, size):
        # The variables do not say which ranks share a host, and asking the ranks is a collective. Assume one host.
        env = Environment(launcher="environment", rank=rank, size=size, local_rank=rank, local_size=size)
    if device is None and torch.cuda.is_available() and torch.cuda.is_initialized():
        device = torch.device("cuda", torch.cuda.current_device())  # the program has already selected it
    return _world(env, _device(device, env.local_rank))


def _world(env: Environment, device: torch.device) -> World:
    return World(
        rank=env.rank,
        size=env.size,
        local_rank=env.local_rank,
        local_size=env.local_size,
        host=socket.gethostname(),
        generation=env.generation,
        device=device,
    )


def _device(asked: torch.device | None, local_rank: int) -> torch.device:
    if asked is None:
        asked = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if str(asked) == "cuda":
        # A launcher may show each rank only its own GPU. Then the rank sees one GPU, with index 0.
        return torch.device("cuda", local_rank % max(1, torch.cuda.device_count()))
    return asked
