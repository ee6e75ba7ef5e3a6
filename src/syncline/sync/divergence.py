"""Replicas that drift apart on purpose (`sl.diverge`), and whether they have met since."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from syncline.errors import SynclineError
from syncline.sync.agreement import exchange
from syncline.transport.base import Transport

__all__ = ["Divergence", "divergences_around", "have_met"]

_lock = threading.Lock()  # ranks may be threads
_known: weakref.WeakSet[Divergence] = weakref.WeakSet()


class Divergence:
    """Whether the replicas of one wrapped module are drifting apart on purpose, or have done so.

    Args:
        module: the module inside of the wrapper.
        transport: between the ranks.
        on_change: called when drifting begins and when it ends, with whether it goes on now.
        on_met: called when a verb has written all its parameters, so that they are equal.
    """

    def __init__(
        self,
        module: nn.Module,
        transport: Transport,
        on_change: Callable[[bool], object],
        on_met: Callable[[], object],
    ) -> None:
        self.is_open = False
        """Whether nothing is synchronized now."""
        self.has_diverged = False
        """Whether replicas have drifted on purpose, and nothing has made them equal since."""
        self._module = weakref.ref(module)
        self._transport = transport
        self._on_change = on_change
        self._on_met = on_met
        with _lock:
            _known.add(self)

    def is_of(self, module: nn.Module) -> bool:
        """Whether it is this module's."""
        return self._module() is module

    @contextmanager
    def drifting(self) -> Iterator[None]:
        """Synchronize nothing inside. A collective call on entering."""
        title = f"sl.diverge of {self._title()}"
        fault = None
        if self.is_open:
            fault = ValueError("the module is inside of sl.diverge already: leave that first")
        exchange(self._transport, title, [], fault=fault)
        self.is_open = True
        self.has_diverged = self._transport.size > 1
        self._on_change(True)
        try:
            yield
        finally:
            self.is_open = False
            self._on_change(False)

    def check_met(self) -> None:
        """Raise if the next synchronization would take replicas for equal that have drifted apart.

        Raises:
            SynclineError: they have; on every rank.
        """
        if self.has_diverged and not self.is_open:
            raise SynclineError(
                f"rank {self._transport.rank}: the replicas of {self._title()} drifted apart inside of sl.diverge and "
                "have not met since, so a mean of their gradients would fit none of them. sl.average_(ddp), "
                "sl.keep_best_(ddp, score) or sl.broadcast_(ddp) makes them equal; sl.check_replicas(ddp) sees whether "
                "they are"
            )

    def covers(self, ids: set[int]) -> bool:
        """Whether all its parameters are among these."""
        module = self._module()
        return module is not None and all(id(parameter) in ids for parameter in module.parameters())

    def met(self, *, by_writing: bool) -> None:
        """All its parameters are equal on all ranks now."""
        self.has_diverged = False
        if by_writing:
            self._on_met()

    @property
    def module_id(self) -> int:
        """By which its module is found."""
        return id(self._module())

    def is_around(self, module: nn.Module) -> bool:
        """Whether a module is a part of its module, or has it as a part, or is that itself."""
        own = self._module()
        return own is not None and (
            any(part is module for part in own.modules()) or any(part is own for part in module.modules())
        )

    def _title(self) -> str:
        return type(self._module()).__name__


def divergences_around(module: nn.Module) -> list[Divergence]:
    """Those of wrapped modules that a module is a part of, or has as parts, or is."""
    with _lock:
        return [one for one in _known if one.is_around(module)]


def have_met(tensors: Iterable[Tensor], *, by_writing: bool = True) -> None:
    """These tensors are equal on all ranks now; of a module that goes on drifting it does not count.

    Args:
        tensors: which.
        by_writing: whether they were made so, and not only found to be.
    """
    with _lock:
        known = [one for one in _known if not one.is_open]
    if not known:
        return
    ids = {id(tensor) for tensor in tensors}
    for one in known:
        if one.covers(ids):
            one.met(by_writing=by_writing)
