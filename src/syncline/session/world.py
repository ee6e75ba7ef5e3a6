"""Who this process is among the ranks: `init`, `shutdown`, `world`, and the transport of a group.

`init` is optional. Alone, nothing is needed; where torch.distributed is initialised already (by Ray, by the
user), the library works on what is there. `init` does what a program otherwise writes itself: it reads the
launcher's variables, meets the other ranks, makes the process group, selects the device, and sees that an
exception reaches the launcher and that the process ends when it should.
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
"""How long a rank whose arguments make no sense waits for the others, to tell them, before it raises alone."""

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among the ranks of its job."""

    rank: int
    """0 to `size - 1`, over all hosts."""
    size: int
    """Number of ranks."""
    local_rank: int
    """0 to `local_size - 1`, on this host."""
    local_size: int
    """Number of ranks on this host."""
    host: str
    """This host's name."""
    generation: int
    """How often the launcher has restarted the ranks."""
    device: torch.device
    """Where this rank should compute."""


class _Destroyer:
    """Destroys the default group on a thread made beforehand: Python 3.12 starts no thread while it exits."""

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
        """End the thread, but do not wait forever for a collective that the other ranks never joined."""
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
    """What one `init` did, for `shutdown` to undo."""

    asked: Asked
    world: World
    group: weakref.ref[dist.ProcessGroup] | None = None
    """The default group that `init` made or found; None when alone."""
    destroyer: _Destroyer | None = None
    """Where `init` made the group."""
    variables_before: dict[str, str | None] = field(default_factory=dict)
    hook: _Hook | None = None
    hook_before: _Hook | None = None

    def is_current(self) -> bool:
        """Whether the default group is still the one of this session: users and tests may destroy it."""
        return (self.group() if self.group is not None else None) is _default_group()


@dataclass
class _Group:
    """A process group that this process is in, and its transport once there is one."""

    group: dist.ProcessGroup
    transport: Transport | None = None
    is_default: bool = True
    lock: Any = field(default_factory=threading.RLock)
    """Held while the ranks meet: other groups may be met by other threads at the same time."""


_lock = threading.RLock()

_session: _Session | None = None

_num_inits = 0

# Stores outlive `shutdown`, so that a second `init` of the same ranks cannot meet a store that is closing.
_stores: dict[tuple[str | None, int | None, int, int], Store] = {}

_transports: dict[int, _Group] = {}

_alone: Transport | None = None

_lost_default_group = False
"""Whether the default group, of several ranks, was destroyed by another than `shutdown`: then None means no group."""

_tells_peers = False


# ---------------------------------------------------------------------- init and shutdown


def init(
    transport: str = "auto",
    *,
    timeout: timedelta | float = 300.0,
    device: torch.device | str | int | None = None,
) -> World:
    """Join the other ranks, as the launcher's variables say; alone, do nothing but say so.

    Call it on all ranks. They compare the arguments before any process group exists, and choose the transport of the
    default group together. Called again with the same arguments it returns the same `World`. An initialised
    torch.distributed is used as it is, and left as it is by `shutdown`.

    Args:
        transport: how tensors travel. "c10d": by torch.distributed (Gloo on CPUs, NCCL on GPUs). "shm": tensors on
            the CPU by shared memory, an error on all ranks where that cannot be had, so on several hosts. "auto": the
            best that all ranks of a group can have: tensors on the CPU by shared memory where they are on one host,
            by shared memory within each host and Gloo between them on several, else by torch.distributed.
        timeout: how long to wait for another rank, here and in every collective (a timedelta, or seconds).
        device: where this rank computes; None means the GPU of its local rank, or the CPU where there is
            none. A GPU is made torch's current device.

    Returns:
        Who this process is.

    Raises:
        TypeError, ValueError: an argument, or a variable of the launcher, makes no sense. An argument that makes none
            on one rank is the same error on all.
        ContractMismatch: the ranks gave different arguments; the same text on every rank.
        SynclineError: init was called before with other arguments, or the ranks do not fit together, or "shm" was asked
            for and cannot be had: the text says why, on every rank.
        CollectiveTimeout: some ranks did not come; they are named.

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
        if refused is not None:  # outside of `except`, so that what the ranks raise does not print it twice
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
    """Have `shutdown` call `wait`, a method that waits for what is under way; its object is held weakly."""
    _unfinished[:] = [known for known in _unfinished if known() is not None]
    _unfinished.append(weakref.WeakMethod(wait))


def shutdown() -> None:
    """Undo `init`; without it, or a second time, do nothing.

    Destroys the process group that `init` made, and closes the transports; call it on all ranks. Saves that are under
    way are waited for, unless an exception is on its way out.
    """
    global _session, _alone, _lost_default_group
    if sys.exc_info()[1] is None:
        for known in _unfinished:
            wait = known()
            if wait is not None:
                with contextlib.suppress(Exception):  # it was said where it happened
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
        # In a `finally` or `with`, on the way out.
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
    """Who this process is: what `init` said; else what torch.distributed says; else it is alone.

    Raises:
        SynclineError: a launcher started several ranks, and nobody has joined them yet.

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
        process.end_with_parent()  # these do not outlive their ranks; a thread of Ray's may
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
    # Torch's own hook puts "[rank1]: " before each line; `syncline run` has named the rank already.
    hook_before = hook_before if env.launcher == "syncline run" else sys.excepthook
    session = _Session(
        asked=asked, world=found, group=weakref.ref(group), destroyer=_Destroyer(), variables_before=before
    )
    _watch(session, hook_before=hook_before)
    return session


def _make_default_group(env: Environment, device: torch.device, asked: Asked) -> dist.ProcessGroup:
    """The ranks meet, compare what each gave `init`, make torch's default group, and choose its transport."""
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
    """The launcher's store may remember an earlier attempt, or an earlier init: each gets names of its own."""
    global _num_inits
    place = (env.master_addr, env.master_port, env.rank, env.size)
    if place not in _stores:
        _stores[place] = connect(env, timeout_seconds)
    _num_inits += 1
    return PrefixStore(f"syncline/{env.generation}/{_num_inits - 1}", _stores[place])


def _compare_over(group: dist.ProcessGroup, asked: Asked, device: torch.device) -> None:
    """The same for a group that is there already: compare what the ranks gave `init`, and choose its transport."""
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
    """The arguments of `init` make no sense on this rank: tell the others, who may be waiting for it.

    Raises:
        TypeError, ValueError: on every rank.
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
        # Ranks that do not come, or a store that is not there, are the lesser news.
        with contextlib.suppress(CollectiveTimeout, PeerLost):
            store = _store_of_this_init(env, _REFUSAL_SECONDS)
            meet(store, Presence.of_this_process(env, torch.device("cpu"), fault=fault), _REFUSAL_SECONDS)


# ---------------------------------------------------------------------- how the process ends


def _watch(session: _Session, *, hook_before: _Hook) -> None:
    """See that an uncaught exception reaches launcher and peers, and that the exit is clean and never hangs."""
    atexit.register(_at_exit)
    session.hook, session.hook_before = _telling_hook(environment.error_file(), hook_before), hook_before
    sys.excepthook = session.hook


def _telling_hook(path: str | None, hook_before: _Hook) -> _Hook:
    """An excepthook that tells the launcher, by a file, and the peers, by their transports, then does as before."""
    own_pid = os.getpid()

    def excepthook(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        if os.getpid() == own_pid and path is not None:  # not in a fork, which inherits the hook
            process.record_failure(error, path, tb)
        # Printed first: once one rank has ended, the launcher gives the others little time for their words.
        hook_before(kind, error, tb)
        if os.getpid() == own_pid:
            _tell_peers(error, tb)

    return excepthook


def _tell_peers(error: BaseException, tb: TracebackType | None) -> None:
    """Peers that wait for this rank, or come to, raise `PeerFailed` with this traceback, not a lost connection."""
    lines = traceback.format_exception(type(error), error, tb)
    reason = "it ended by an uncaught exception:\n" + "".join(lines).rstrip()
    for transport in _made_transports():
        with contextlib.suppress(Exception):
            transport.abort(reason)


def _tell_peers_without_session() -> None:
    """For those who use torch.distributed without `init`; once a process."""
    global _tells_peers
    if not _tells_peers and _session is None:
        _tells_peers = True
        sys.excepthook = _telling_hook(None, sys.excepthook)
        atexit.register(_leave_at_exit)


def _leave_at_exit() -> None:
    """Peers that still wait for this rank, or come to, raise `UnevenInputs`, not a lost connection."""
    if _session is None and not _has_failed():
        for transport in _made_transports():
            transport.leave()


def _has_failed() -> bool:
    """Whether an exception ends this process. Python forgets a `sys.exit(1)`; the launcher's file knows of it."""
    path = environment.error_file()
    return getattr(sys, "last_type", None) is not None or (path is not None and os.path.exists(path))


def _at_exit() -> None:
    if not _has_failed():
        shutdown()
        return
    # An exception ends this process, perhaps with collectives under way that its peers will never join. The
    # destructor of their group would wait for them, for as long as the timeout, while the peers wait for this
    # process. So the groups are left to the kernel, which closes the connections at once.
    groups = living_groups()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(groups))


# ---------------------------------------------------------------------- transports


def transport_of(group: dist.ProcessGroup | Transport | None = None) -> Transport:
    """The transport of a group, always the same object while the group lives.

    `init` chooses that of the default group. For any other group, and without `init`, the first call is a collective
    one: the ranks choose the transport.

    Args:
        group: None means torch's default group, or this process alone; a transport means itself.

    Raises:
        ValueError: this rank is not in `group`, or `group` was destroyed.
        SynclineError: "shm" was asked for, and cannot be had.

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
        # As in almost every call. The default group is alive as long as it is the default.
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
    """A new transport between the ranks of `group`; a collective call.

    Args:
        group: the process group.
        asked: "auto", "c10d" or "shm", the same on all ranks.
        timeout_seconds: None is the group's own.
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
    """Several ranks that each train alone, and nobody notices: not here."""
    try:
        env = environment.current()
    except ValueError:
        return  # `init` will say so; without it, variables that make no sense say nothing
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
    except ValueError:  # whoever initialised torch.distributed did not go by them
        env = Environment(launcher="alone")
    if (env.rank, env.size) != (rank, size):
        # No launcher said which ranks share a host; asking them would be a collective. One host is assumed.
        env = Environment(launcher="environment", rank=rank, size=size, local_rank=rank, local_size=size)
    if device is None and torch.cuda.is_available() and torch.cuda.is_initialized():
        device = torch.device("cuda", torch.cuda.current_device())  # whoever came first has chosen
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
        # A launcher may show each rank only its own GPU: then there is one, and it is number 0.
        return torch.device("cuda", local_rank % max(1, torch.cuda.device_count()))
    return asked
