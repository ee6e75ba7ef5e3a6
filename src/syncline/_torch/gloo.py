"""Gloo process groups whose ranks learn each other's addresses from rank 0, and not from n * n requests to a store.

When a Gloo group of n ranks is created, each rank writes its address to the store, and reads the addresses of all ranks
one by one: 2 * n * n requests. So here Gloo gets a store in the memory of its own process. A thread creates the group,
and waits there for the addresses of the other ranks, while this rank gathers them and writes them there.

The process group itself keeps the store that its creator passed. Gloo reads addresses later only if the user has set
TORCH_GLOO_LAZY_INIT. It then finds them even if the process with the job's store has ended. If the program can wait in
the group, the addresses are at the creator's store, too: `TorchCall.end` finds the connections of the group by them.
"""

from __future__ import annotations

import base64
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

from syncline._torch.lookup import lookup
from syncline._torch.process_groups import HashStore, Store
from syncline.environment import patience


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
"""How often a rank looks at the processes of the others while Gloo connects. Gloo itself waits for up to five times its
timeout for a rank that has ended, or fails after some attempts to connect."""

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
        if connecting.group is None:  # some rank has found no address: its Gloo failed, or uses other keys
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
