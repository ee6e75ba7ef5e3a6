"""Process groups of torch.distributed: their creation, torch's record, private methods, and the addresses of Gloo."""

from __future__ import annotations

import base64
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from syncline._torch.lookup import is_there, lookup
from syncline.environment import patience

if TYPE_CHECKING:
    from torch._C._distributed_c10d import AllgatherOptions as AllgatherOptions
    from torch._C._distributed_c10d import Backend
    from torch._C._distributed_c10d import HashStore as HashStore
    from torch._C._distributed_c10d import PrefixStore as PrefixStore
    from torch._C._distributed_c10d import Store as Store
    from torch._C._distributed_c10d import TCPStore as TCPStore

    C10dBackend = Backend
else:
    C10dBackend = lookup("torch._C._distributed_c10d:Backend", "serve torch.distributed as a backend")
    AllgatherOptions = lookup(
        "torch._C._distributed_c10d:AllgatherOptions", "gather tensors on an accelerator"
    )
    # Public names, but missing if torch was built without torch.distributed.
    Store = lookup("torch.distributed:Store", "join other ranks")
    HashStore = lookup("torch.distributed:HashStore", "join other ranks")
    TCPStore = lookup("torch.distributed:TCPStore", "join other ranks")
    PrefixStore = lookup("torch.distributed:PrefixStore", "join other ranks")

# ---------------------------------------------------------------------- torch's record of groups

_C10D = "torch.distributed.distributed_c10d"

_world: Any = lookup(f"{_C10D}:_world", "list the process groups")

_new_group = lookup(
    f"{_C10D}:_new_process_group_helper", "create a process group by calls of its members only"
)

_unregister = lookup(
    "torch._C._distributed_c10d:_unregister_process_group", "serve other devices than the CPU"
)

_set_timeout = lookup(f"{_C10D}:_set_pg_timeout", "change the timeout of a process group")

_group_name = lookup(f"{_C10D}:GroupName", "name a process group")

is_living: Callable[[object], bool] = _world.pg_map.__contains__ if is_there(_world) else _world
"""Return whether a process group still exists and was not destroyed.

This is a method of torch's dictionary, which is the same object for the lifetime of the process. It has no wrapper,
because each collective calls it and it must be fast.
"""


def living_groups() -> dict[dist.ProcessGroup, Any]:
    """Return torch's own dictionary, whose keys are the process groups that were not destroyed."""
    groups: dict[dist.ProcessGroup, Any] = _world.pg_map
    return groups


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set the timeout of the operations of a process group."""
    _set_timeout(timeout, group)


def name_groups_anew() -> None:
    """Let torch count its process groups from 0 again. Call this if there is no group.

    torch names a group by this number, and ranks find each other under the name. A group that could not be created has
    used up a number, on some ranks only.
    """
    _world.group_count = 0


def backends_of(group: dist.ProcessGroup) -> str:
    """Return the backends of a process group as `init_process_group` takes them, such as "cpu:gloo,cuda:nccl".

    If all devices have the same backend, its name alone is returned. A group that was created by the long text would
    have no default backend, of which torch warns.
    """
    found = str(_world.pg_backend_config[group])
    names = {part.partition(":")[2] or part for part in found.split(",")}
    return names.pop() if len(names) == 1 else found


def has_record_of(group: dist.ProcessGroup) -> bool:
    """Return whether torch's record contains the backends of a process group."""
    return group in _world.pg_backend_config


def new_group_of(
    global_ranks: Sequence[int],
    rank: int,
    backend: str,
    store: Any,
    name: str,
    timeout: timedelta | None,
    *,
    size: int | None = None,
) -> dist.ProcessGroup:
    """Create a process group. All members of the group must call this function, and no other ranks.

    Args:
        global_ranks: the global ranks of the members. Pass an empty sequence if all global ranks are members.
        rank: the rank of this process among the members.
        backend: the name of the backend, as in `torch.distributed.init_process_group`.
        store: a store that all members can reach and that no other group uses.
        name: the name of the group.
        timeout: the timeout of the group's operations. Pass None for the default of the backend.
        size: the number of members. It is needed only if `global_ranks` is empty.
    """
    group: dist.ProcessGroup
    group, _ = _new_group(
        size or len(global_ranks),
        rank,
        list(global_ranks),
        backend,
        store,
        _group_name(name),
        timeout=timeout,
    )
    return group


def record_ranks(group: dist.ProcessGroup, global_ranks: Sequence[int]) -> None:
    """Add the global ranks of a new group's members to torch's record."""
    _world.pg_group_ranks[group] = {global_rank: rank for rank, global_rank in enumerate(global_ranks)}


def forget_group(group: dist.ProcessGroup, name: str) -> None:
    """Remove a new group from torch's record. The caller keeps the group, and closes it later."""
    for record in (_world.pg_map, _world.pg_names, _world.pg_backend_config):
        record.pop(group)
    _unregister(_group_name(name))
    _world.tags_to_pg[""].remove(group)
    _world.tags_to_pg.pop(_world.pg_to_tag.pop(group), None)


# ---------------------------------------------------------------------- calls without a public name

# torch is renaming these methods: later versions have `all_gather_single` beside `_allgather_base`.
_ALL_GATHER, _REDUCE_SCATTER = (
    ("_allgather_base", "_reduce_scatter_base")
    if is_there(lookup("torch.distributed:ProcessGroup._allgather_base", "gather tensors"))
    else ("all_gather_single", "reduce_scatter_single")
)


def all_gather_flat(
    group: dist.ProcessGroup, output: torch.Tensor, input: torch.Tensor, options: Any
) -> dist.Work:
    """Start to gather the flat tensor `input` of each rank into the flat tensor `output` on all ranks."""
    work: dist.Work = getattr(group, _ALL_GATHER)(output, input, options)
    return work


def reduce_scatter_flat(
    group: dist.ProcessGroup, output: torch.Tensor, input: torch.Tensor, options: Any
) -> dist.Work:
    """Start to reduce the flat tensor `input` over the ranks. Each rank gets its shard of the result in `output`."""
    work: dist.Work = getattr(group, _REDUCE_SCATTER)(output, input, options)
    return work


def num_calls_started(group: dist.ProcessGroup) -> int | None:
    """Return how many calls this rank has started on a process group; None if the backend does not count them.

    Without this number, errors cannot name a rank that waits in a call of torch.distributed.
    """
    try:
        number: int = group._get_sequence_number_for_group()  # type: ignore[attr-defined]
    except (RuntimeError, AttributeError):
        return None
    return number


# ---------------------------------------------------------------------- backends of a group


def backend_on(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the backend that a process group uses for tensors on a device."""
    return group._get_backend(device)


def uses_gloo(group: dist.ProcessGroup) -> bool:
    """Return whether Gloo is a backend of a process group, which may be destroyed already."""
    devices = getattr(group, "_device_types", ())
    return any(getattr(backend_on(group, device), "name", str)() == "gloo" for device in devices)


def timeout_seconds_of(group: dist.ProcessGroup) -> float | None:
    """Return the shortest timeout of a group's backends, in seconds. Return None if no timeout is known."""
    found = []
    for device in getattr(group, "_device_types", ()):
        timeout = timeout_of(getattr(backend_on(group, device), "options", None))
        if timeout is not None and timeout > timedelta(0):
            found.append(timeout.total_seconds())
    return min(found, default=None)


_TIMEOUT = "_timeout"


def timeout_of(options: Any) -> timedelta | None:
    """Return the timeout that a backend's options contain. Return None if they contain no timeout."""
    timeout = getattr(options, _TIMEOUT, None)
    return timeout if isinstance(timeout, timedelta) else None


def set_timeout_of(options: Any, timeout: timedelta) -> None:
    """Write a timeout into a backend's options."""
    setattr(options, _TIMEOUT, timeout)


def serve_cpu_by(group: dist.ProcessGroup, backend: Any) -> None:
    """Make a process group use a custom backend for tensors on the CPU."""
    kind = dist.ProcessGroup.BackendType.CUSTOM
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, backend)


# ---------------------------------------------------------------------- the addresses of Gloo

# Gloo process groups whose ranks learn each other's addresses from rank 0, and not from n * n requests to a store.
#
# When a Gloo group of n ranks is created, each rank writes its address to the store, and reads the addresses of all
# ranks one by one: 2 * n * n requests. So here Gloo gets a store in the memory of its own process. A thread creates
# the group, and waits there for the addresses of the other ranks, while this rank gathers them and writes them there.
#
# The process group itself keeps the store that its creator passed. Gloo reads addresses later only if the user has set
# TORCH_GLOO_LAZY_INIT. It then finds them even if the process with the job's store has ended. If the program can wait
# in the group, the addresses are at the creator's store, too: `TorchCall.end` finds the connections of the group by
# them.


class Gather(Protocol):
    """A function that all ranks call together. It gets a text of this rank, and returns those of all ranks in order.

    A text is bytes in UTF-8.
    """

    def __call__(self, payload: bytes, /) -> list[bytes]: ...

    def check_processes(self) -> None:
        """Raise an error if the process of another rank is known to have ended."""


_module: Any = lookup("torch.distributed:distributed_c10d", "connect the ranks of a Gloo group")

_NAME = "ProcessGroupGloo"

_ADDRESS_SECONDS = 30.0
"""How long Gloo may take to write the address of this rank: milliseconds, unless this torch uses other keys."""

_MAX_PAUSE_SECONDS = 0.05

_DEFAULT_TIMEOUT = timedelta(minutes=30)
"""The timeout of a Gloo group whose creator names none."""

_LOOK_SECONDS = 0.05
"""The interval at which a rank checks the processes of the others while Gloo connects. Gloo itself waits for an ended
rank for up to five times its timeout, or fails after some attempts to connect."""

_CAUSE_SECONDS = patience(0.5)
"""How long a rank looks for an ended process after Gloo has failed."""


class _Maker:
    """An object that stands for torch's class ProcessGroupGloo while threads of this process create groups."""

    def __init__(self) -> None:
        self._original: Any = None
        self._gathers: dict[int, tuple[Gather, bool]] = {}
        """The arguments of `gathering` of the threads that are in a `with` block, by the id of the thread."""
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def gathering(self, gather: Gather, *, also_at_store: bool = False) -> Iterator[None]:
        """Gather the addresses of the Gloo groups that this thread creates in the `with` block by `gather`.

        Args:
            gather: a function between the ranks of the groups.
            also_at_store: whether each rank writes its address to the store of the group as well. A thread that waits
                at this store would hold up the rank.
        """
        with self._lock:
            if not self._gathers:
                self._original = getattr(_module, _NAME, None)
                setattr(_module, _NAME, self)
            self._gathers[threading.get_ident()] = gather, also_at_store
        try:
            yield
        finally:
            with self._lock:
                del self._gathers[threading.get_ident()]
                if not self._gathers:
                    setattr(_module, _NAME, self._original)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, self._original)

    def __call__(self, store: Store, rank: int, size: int, **options: Any) -> Any:
        make = partial(self._original, **options)
        gather, also_at_store = self._gathers.get(threading.get_ident(), (None, False))
        # Another thread creates a group of other ranks, or the group needs the store later, to exchange ranks.
        if gather is None or size == 1 or options.get("enable_reconfigure"):
            return make(store, rank, size)
        addresses: Any = HashStore()  # its methods take bytes, too
        connecting = _Connecting(lambda: make(addresses, rank, size))
        connecting.start()
        interface = 0
        own = _own_address(addresses, f"{interface}/{rank}", connecting, _ADDRESS_SECONDS)
        if not own:
            gather(b"")
        while own and all(texts := gather(base64.b64encode(own))):
            if also_at_store:
                store.set(f"{interface}/{rank}", own)  # type: ignore[arg-type]  # it takes bytes, too
            for peer, text in enumerate(texts):
                addresses.set(f"{interface}/{peer}", base64.b64decode(text))
            interface += 1
            seconds = options.get("timeout", _DEFAULT_TIMEOUT).total_seconds()
            own = _own_address(addresses, f"{interface}/{rank}", connecting, seconds, gather.check_processes)
            if not own and connecting.is_alive():
                raise RuntimeError(
                    f"Gloo has not connected rank {rank} to all other ranks within {seconds:g} s"
                )
        if connecting.failure is not None:
            # The connections of a process close a moment before the kernel reports that it has ended.
            deadline = time.monotonic() + _CAUSE_SECONDS
            while time.monotonic() < deadline:
                gather.check_processes()
                time.sleep(_MAX_PAUSE_SECONDS)
            raise connecting.failure
        if connecting.group is None:  # a rank found no address: its Gloo failed, or uses other keys
            return make(store, rank, size)
        return connecting.group


_MAKER = _Maker()

addresses_gathered = _MAKER.gathering


class _Connecting(threading.Thread):
    """A thread in which Gloo creates a group and connects its ranks.

    If the ranks cannot gather their addresses, the thread waits for them until the timeout of the group.
    """

    def __init__(self, connect: Callable[[], Any]) -> None:
        super().__init__(name="syncline connects Gloo", daemon=True)
        self.group: Any = None
        self.failure: Exception | None = None
        self._connect = connect

    def run(self) -> None:
        """Create the group."""
        try:
            self.group = self._connect()
        except Exception as error:
            self.failure = error


def _own_address(
    store: Any, key: str, connecting: _Connecting, seconds: float, look: Callable[[], None] | None = None
) -> bytes:
    """Return the address of this rank on the next network interface. Return b"" if there is none within `seconds`.

    Gloo has one address for each network interface. It connects all ranks by one interface after the other.

    Args:
        store: where Gloo writes the address.
        key: the key of the address.
        connecting: the thread in which Gloo connects. If it ends, there is no further interface.
        seconds: how long to wait.
        look: a function that raises an error if there is nothing to wait for.
    """
    begin = last_look = time.monotonic()
    pause_seconds = 0.001
    while not store.check([key]):
        connecting.join(pause_seconds)
        if not connecting.is_alive() and not store.check([key]):
            return b""
        now = time.monotonic()
        if now > begin + seconds:
            return b""
        if look is not None and now > last_look + _LOOK_SECONDS:
            last_look = now
            look()
        pause_seconds = min(2 * pause_seconds, _MAX_PAUSE_SECONDS)
    address: bytes = store.get(key)
    return address
