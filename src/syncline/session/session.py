"""The session of a process, from the moment when the process joins the other ranks until it leaves them."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist

from syncline import environment, launchers
from syncline._torch.process_groups import (
    PrefixStore,
    Store,
    addresses_gathered,
    backends_of,
    name_groups_anew,
    set_timeout,
    timeout_seconds_of,
)
from syncline.errors import CollectiveTimeout, PeerLost, SynclineError
from syncline.launchers import Environment
from syncline.liveness.connection import StoreConnection
from syncline.liveness.gathering import Ended, StoreGathering
from syncline.liveness.processes import RankProcess
from syncline.liveness.store import SignedStore
from syncline.session import process
from syncline.session.asked import Asked, checked_transport
from syncline.session.ending import (
    Destroyer,
    ReportingHook,
    has_failed,
    keep_groups,
    report_to_peers,
    uncaught_exception,
)
from syncline.session.ranks import (
    World,
    check_that_ranks_were_joined,
    default_group,
    world_alone,
    world_from,
    world_of_default_group,
)
from syncline.session.rendezvous import (
    REMEDY,
    TITLE,
    Presence,
    Stores,
    backend_for,
    failed_connection,
    wait_for_all,
)
from syncline.session.transports import Transports
from syncline.transport.agreement import exchange
from syncline.transport.base import Transport
from syncline.transport.c10d import C10dTransport
from syncline.user_code import warn_user

_REFUSAL_SECONDS = environment.patience(10.0)
"""How long a rank with invalid arguments waits for the other ranks, in seconds, so that they raise the error, too."""

_REGROUP_SECONDS = environment.patience(10.0)
"""The time limit for ranks that are about to connect, in seconds. A rank that is suspended meanwhile costs this time.
"""


@dataclass(frozen=True)
class _Joined:
    """The effects of one call of `init`, which `shutdown` undoes."""

    asked: Asked
    world: World
    group: weakref.ref[dist.ProcessGroup] | None = None
    """The default process group that `init` created or found; None if the world has one rank and no process group."""
    destroyer: Destroyer | None = None
    """The thread that destroys the group; None if `init` did not create the group."""
    variables_before: dict[str, str | None] = field(default_factory=dict)
    hook: ReportingHook | None = None

    def is_current(self) -> bool:
        """Return whether the default group is still the group of this session. The program may have destroyed it."""
        return (self.group() if self.group is not None else None) is default_group()


class Session:
    """The session of this process, which holds all state of the library that belongs to the process as a whole."""

    def __init__(self) -> None:
        self.transports = Transports(self._leave_at_exit, self._check_alone)
        self._joined: _Joined | None = None
        """The effects of `init`; None before `init` and after `shutdown`."""
        self.is_about_to_join = False
        """Whether this process was started to join ranks that are training, and has not joined them by `regroup`."""
        self._has_left = False
        """Whether the process has left the other ranks by `shutdown`, and has not called `init` since."""
        self._lock = threading.RLock()
        self._stores = Stores()
        self._backend = ""
        """The name of the backend of the default group."""
        self._job_store: Store | None = None
        """The store in which the ranks have met, from the first use on. It outlives the default group."""
        self._regrouped: Callable[[], object] = lambda: None
        """A weak reference to the default group whose ranks have met in `_job_store`."""
        self._asked = Asked()
        """The arguments of `init` for a new default group, or defaults if the program has not called `init`.
        """
        self._former_world: World | None = None
        """The world of the default group that `disconnect` has closed."""
        self._waits: list[weakref.WeakMethod[Callable[[], object]]] = []
        """Methods that wait for pending work. `shutdown` calls these methods."""
        self._pid_at_exit = 0
        """The pid of the process in which `_at_exit` is registered; 0 if `_at_exit` is not registered."""

    # ------------------------------------------------------------------ init

    def init(self, ask: Callable[[], Asked]) -> World:
        """Join the other ranks. `world.init` documents this method.

        Args:
            ask: a function that checks the arguments of `init` and returns them. It raises TypeError or ValueError if
                an argument is invalid.
        """
        with self._lock:
            if self._joined is not None and not self._joined.is_current():
                self.shutdown()
            refused: Exception | None = None
            try:
                asked = ask()
            except (TypeError, ValueError) as fault:
                refused = fault
            if refused is not None:  # outside of `except`, because chaining would print the error twice
                if self._joined is None:
                    self._refuse(refused)
                raise refused
            if self._joined is None:
                self._joined = self._start(asked)
                self._has_left = False
            elif self._joined.asked != asked:
                raise SynclineError(
                    f"expected sl.init({self._joined.asked}), as in the earlier call, got sl.init({asked}): pass the "
                    "same arguments, or call sl.shutdown() between the two calls"
                )
            return self._joined.world

    def _start(self, asked: Asked) -> _Joined:
        group = default_group()
        if group is not None:
            return self._adopt(group, asked)
        env = launchers.current()
        if environment.joins_running_job() and env.launcher_has_store:
            return self._start_beside(env, asked)
        if env.master_addr is None or env.master_port is None:
            if env.warning is not None:
                warn_user(env.warning, UserWarning)
            return _Joined(asked, world_alone(asked.device))
        if env.ends_with_launcher:
            process.end_with_parent()
        before = environment.export(env.variables())
        try:
            world = world_from(env, asked.device)
            if world.device.type == "cuda":
                torch.cuda.set_device(world.device)
            group = self._make_default_group(env, world.device, asked)
        except BaseException:
            environment.restore(before)
            raise
        destroyer = Destroyer()
        self._run_at_exit()
        # The output of `syncline run` already names the rank.
        prefix = "" if env.launcher == "syncline run" or world.size == 1 else f"[rank{world.rank}]: "
        hook = ReportingHook(sys.excepthook, self._report, prefix)
        return _Joined(asked, world, weakref.ref(group), destroyer, before, hook)

    def _start_beside(self, env: Environment, asked: Asked) -> _Joined:
        """Begin as a world of one rank. `regroup` connects it to ranks that are training."""
        if env.ends_with_launcher:
            process.end_with_parent()
        here = world_from(env, asked.device)
        if here.device.type == "cuda":
            torch.cuda.set_device(here.device)
        self._job_store = self._stores.for_changes(self._stores.of_next_init(env, asked.timeout_seconds))
        self._backend = backend_for([Presence.of_this_process(env, here.device)], warn=False)
        self._asked, self.is_about_to_join = asked, True
        self._former_world = replace(here, rank=0, size=1, local_rank=0, local_size=1)
        alone = {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            environment.JOINS: "0",
        }
        before = environment.export(alone, replace=True)
        self._run_at_exit()
        hook = ReportingHook(sys.excepthook, self._report)
        return _Joined(asked, self._former_world, None, Destroyer(), before, hook)

    def _adopt(self, group: dist.ProcessGroup, asked: Asked) -> _Joined:
        """Compare the arguments of all ranks over an existing default group, and select the transport of the group."""
        world = world_of_default_group(asked.device)
        lines = asked.lines(world.device)
        known = self.transports.known(group)
        if known is None:
            self.transports.select(
                group,
                asked.transport,
                asked.timeout_seconds,
                compare=lambda c10d: exchange(c10d, TITLE, lines, remedy=REMEDY),
            )
        else:
            exchange(known, TITLE, lines, remedy=REMEDY)
            if asked.transport != "auto":
                raise SynclineError(
                    f"sl.init({asked.transport!r}) cannot select the transport: an earlier call of Syncline has "
                    f"already selected {known.name}. Call sl.init({asked.transport!r}) before all other calls of "
                    "Syncline"
                )
        self._run_at_exit()
        return _Joined(asked, world, weakref.ref(group), hook=ReportingHook(sys.excepthook, self._report))

    def _make_default_group(self, env: Environment, device: torch.device, asked: Asked) -> dist.ProcessGroup:
        """Wait for the other ranks, compare the arguments, create torch's default group, and select its transport."""
        store = self._stores.of_next_init(env, asked.timeout_seconds)
        mine = Presence.of_this_process(env, device, asked.lines(device))
        everyone = wait_for_all(store, mine, asked.timeout_seconds)
        processes = [presence.process_anywhere() for presence in everyone]
        self._backend = backend_for(everyone, warn=env.local_rank == 0)
        try:
            return self._connect(
                store,
                env.rank,
                env.size,
                device,
                asked,
                asked.timeout_seconds,
                has_ended=lambda ranks: [rank for rank in ranks if everyone[rank].has_ended(mine)],
                processes=processes,
            )
        except RuntimeError as error:
            named = failed_connection(error, mine, everyone, asked.timeout_seconds)
            if named is None:
                raise
            raise named from error

    def _connect(
        self,
        store: Store,
        rank: int,
        size: int,
        device: torch.device,
        asked: Asked,
        seconds: float,
        connection: StoreConnection | None = None,
        has_ended: Ended | None = None,
        processes: Sequence[RankProcess | None] = (),
    ) -> dist.ProcessGroup:
        """Create torch's default group between ranks that have met at a store, and select its transport.

        Args:
            store: the store.
            rank, size: this rank, and the number of ranks.
            device: the device of this rank.
            asked: the arguments of `init`.
            seconds: how long the ranks may take to connect. Their operations have the timeout of `asked`.
            connection: see `C10dTransport`.
            has_ended: a function that finds ended ranks; None if their processes are not known.
            processes: see `Transports.select`.
        """
        gather = StoreGathering(
            SignedStore(store),
            "syncline/connect",
            rank=rank,
            size=size,
            timeout_seconds=seconds,
            purpose="while the ranks connected to each other",
            has_ended=has_ended,
            # In `sl.steps`, a rank stops waiting if the others have changed meanwhile.
            may_raise=connection is not None,
        )
        with addresses_gathered(gather, also_at_store=True):
            dist.init_process_group(
                self._backend,
                store=store,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=seconds),
                device_id=device if "nccl" in self._backend else None,
            )
        group = default_group()
        assert group is not None
        if seconds != asked.timeout_seconds:
            set_timeout(group, timedelta(seconds=asked.timeout_seconds))
        try:
            self.transports.select(
                group,
                asked.transport,
                asked.timeout_seconds,
                connection=connection,
                gather=gather,
                processes=processes,
            )
        except BaseException:
            dist.destroy_process_group()
            raise
        return group

    # ------------------------------------------------------------------ a change of the ranks

    def job_store(self) -> Store:
        """Return the store in which the ranks have met. `world.job_store` documents this method."""
        with self._lock:
            group = default_group()
            if group is not None and self._regrouped() is not group:
                is_own = self._joined is not None and self._joined.destroyer is not None
                met = self._stores.of_last_init if is_own else group.get_group_store()
                self._job_store = self._stores.for_changes(met)
                self._regrouped = weakref.ref(group)
            if self._job_store is None:
                raise SynclineError(
                    "expected several ranks that have met at a store, got a world of one rank"
                )
            return self._job_store

    def timeout_seconds(self) -> float:
        """Return the timeout of `init`, or else that of the default group; see `world.timeout_seconds`."""
        joined = self._joined
        return joined.asked.timeout_seconds if joined is not None else self.transport_of(None).timeout_seconds

    def disconnect(self) -> None:
        """Close all process groups. `world.disconnect` documents this method."""
        with self._lock:
            self.job_store()  # which outlives the group
            group, joined = default_group(), self._joined
            if group is None:
                return
            self._former_world = self.world()
            self._backend = backends_of(group)
            self._asked = (
                joined.asked if joined else Asked(timeout_seconds=timeout_seconds_of(group) or 300.0)
            )
            self.transports.close(goes_on=True)
            destroyer = (
                joined.destroyer if joined is not None and joined.destroyer is not None else Destroyer()
            )
            destroyer.hold(group)
            del group  # so that the last reference is not this one
            destroyer.end(destroy=True)
            if joined is not None:
                # Until there is a new group, this process is not joined to other ranks, so it has none to leave.
                own = None if joined.destroyer is None else Destroyer()
                self._joined = replace(joined, group=None, destroyer=own)

    def regroup(
        self,
        key: str,
        *,
        rank: int,
        size: int,
        local_rank: int,
        local_size: int,
        connection: StoreConnection,
        has_ended: Ended,
        processes: Sequence[RankProcess | None],
    ) -> World:
        """Create a new default group. `world.regroup` documents this method."""
        with self._lock:
            self.disconnect()
            store, former, asked = self.job_store(), self._former_world, self._asked
            assert former is not None
            world = replace(former, rank=rank, size=size, local_rank=local_rank, local_size=local_size)
            variables = {
                "RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size
            }  # fmt: skip
            before = environment.export({name: str(n) for name, n in variables.items()}, replace=True)
            if self._joined is not None:
                before |= self._joined.variables_before
                self._joined = replace(self._joined, world=world, variables_before=before)
            name_groups_anew()
            hook = sys.excepthook
            try:
                seconds = min(asked.timeout_seconds, _REGROUP_SECONDS)
                group = self._connect(
                    PrefixStore(key, store),
                    rank,
                    size,
                    world.device,
                    asked,
                    seconds,
                    connection=connection.under(key),
                    has_ended=has_ended,
                    processes=processes,
                )
            finally:
                sys.excepthook = hook  # torch puts its own hook around it, again in each group
            self._regrouped = weakref.ref(group)
            self.is_about_to_join = False
            if self._joined is not None:
                self._joined = replace(self._joined, group=weakref.ref(group))
            return world

    def _refuse(self, fault: Exception) -> None:
        """Report to the other ranks, which may be waiting, that this rank passed invalid arguments to `init`.

        Args:
            fault: the error about the arguments.

        Raises:
            TypeError, ValueError: some ranks passed invalid arguments. Every rank raises the error.
        """
        group = default_group()
        if group is not None:
            c10d = C10dTransport(group)
            try:
                exchange(c10d, TITLE, [], fault=fault)
            finally:
                c10d.close()
        env = launchers.current()
        if env.master_addr is not None and env.master_port is not None:
            # The error about the arguments is more useful than an error about missing ranks or a missing store.
            with contextlib.suppress(CollectiveTimeout, PeerLost):
                store = self._stores.of_next_init(env, _REFUSAL_SECONDS)
                mine = Presence.of_this_process(env, torch.device("cpu"), fault=fault)
                wait_for_all(store, mine, _REFUSAL_SECONDS)

    # ------------------------------------------------------------------ while the ranks are joined

    def is_joined(self) -> bool:
        """Return whether the effects of `init` are in force. `world.is_joined` documents this method."""
        return self._joined is not None and self._joined.is_current()

    def world(self) -> World:
        """Return the world of this process. `world.world` documents this method."""
        with self._lock:
            if self._joined is not None and self._joined.is_current():
                return self._joined.world
        if default_group() is not None:
            return world_of_default_group(None)
        self._check_alone()
        return world_alone(None)

    def transport_of(self, group: dist.ProcessGroup | Transport | None) -> Transport:
        """Return the transport of a group. `world.transport_of` documents this method."""
        joined = self._joined
        return self.transports.of(group, checked_transport() if joined is None else joined.asked.transport)

    def before_shutdown(self, wait: Callable[[], object]) -> None:
        """Register a method that `shutdown` calls. `world.before_shutdown` documents this method."""
        self._waits = [known for known in self._waits if known() is not None]
        self._waits.append(weakref.WeakMethod(wait))

    def _check_alone(self) -> None:
        check_that_ranks_were_joined(has_left=self._has_left)

    # ------------------------------------------------------------------ shutdown and the end of the process

    def shutdown(self) -> None:
        """Undo `init`. `world.shutdown` documents this method."""
        error = sys.exc_info()[1]
        if error is None:
            for known in self._waits:
                wait = known()
                if wait is not None:
                    with contextlib.suppress(Exception):  # the program has seen the error where it occurred
                        wait()
        with self._lock:
            joined, self._joined = self._joined, None
            self.transports.continue_alone()
            if joined is None:
                return
            self._has_left = True
            atexit.unregister(self._at_exit)
            self._pid_at_exit = 0
            group_is_live = joined.is_current() and default_group() is not None
            # `shutdown` may run in a `finally` or `with` while an exception is raised.
            if error is not None and process.exit_code_of(error) and not process.is_agreed_stop(error):
                self._report(error, error.__traceback__)
            self.transports.close()
            if joined.destroyer is not None:
                joined.destroyer.end(destroy=group_is_live)
            if joined.hook is not None:
                joined.hook.remove()
            environment.restore(joined.variables_before)

    def begin_in_fork(self) -> None:
        """Forget what the parent process has joined. `world.begin_in_fork` documents this method."""
        self._lock = threading.RLock()  # a thread of the parent may hold the lock
        self._joined, self._has_left, self._pid_at_exit = None, False, 0
        self._waits, self._stores = [], Stores()
        self.transports.continue_alone()

    def _report(self, error: BaseException, tb: TracebackType | None) -> None:
        report_to_peers(self.transports.selected(), error, tb)

    def _leave_at_exit(self) -> None:
        """Register `_at_exit`, unless it is registered already. Programs that do not call `init` need it, too."""
        if not self._pid_at_exit:
            self._run_at_exit()

    def _run_at_exit(self) -> None:
        atexit.unregister(self._at_exit)
        atexit.register(self._at_exit)
        self._pid_at_exit = os.getpid()

    def leave_at_end(self) -> None:
        """Do what `_at_exit` does. `world.leave_at_end` documents this method."""
        self._at_exit()

    def _at_exit(self) -> None:
        """Leave the other ranks. Each rank that waits for this rank, now or later, raises an error with the reason."""
        failed = has_failed()
        if self._joined is not None:
            if failed:
                keep_groups()
            else:
                self.shutdown()
        elif not failed:
            for transport in self.transports.selected():
                transport.leave()  # the peers raise `UnevenInputs`, not a lost connection
        elif os.getpid() == self._pid_at_exit:  # a fork inherits the call
            error = uncaught_exception()
            if error is not None:
                self._report(error, error.__traceback__)
