"""Replicas that drift apart on purpose (`sl.diverge`), and whether they have met since.

diverge: let replicas drift apart on purpose.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

from torch import Tensor, nn

from syncline._torch.modules import uncompiled
from syncline.checks import checked_kind
from syncline.errors import SynclineError
from syncline.transport.agreement import exchange
from syncline.transport.base import Transport
from syncline.verbs.common import refuse_one_copy

__all__ = ["Divergence", "diverge", "divergences_around", "have_met"]


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


def diverge(module: nn.Module) -> AbstractContextManager[None]:
    """A context in which nothing of a wrapped module is synchronized, so that its replicas drift apart.

    Neither gradients nor buffers nor parameters are sent inside, whatever the strategy is: each rank perturbs its
    weights, trains, or evaluates by itself. After it, bring the replicas together by `sl.average_`, `sl.keep_best_` or
    `sl.broadcast_` (and the optimizer, if it has stepped): a forward whose gradients are to be reduced before they have
    met is an error on every rank, and nothing makes them equal behind your back. `docs/strategies.md` has a recipe.

    A collective call on entering.

    Args:
        module: a `sl.DistributedDataParallel`, the module inside, or one that has such wrappers as parts. Of a bare
            module that nothing wraps nothing is synchronized anyway.

    Raises:
        TypeError: not a module, or torch's own wrapper.
        ValueError: it is a part of what is wrapped, or drifts already; or its parameters are one copy for several ranks
            (`sl.share_`, `sharded=True`).

    Example:
        >>> import torch, syncline as sl
        >>> ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1))
        >>> with sl.diverge(ddp), torch.no_grad():
        ...     for parameter in ddp.parameters():
        ...         parameter += 0.01 * torch.randn_like(parameter)
        ...     loss = ddp(torch.ones(1, 2)).square().mean()
        >>> best = sl.keep_best_(ddp, loss, mode="min")
    """
    module = uncompiled(module)
    checked_kind("module", module, nn.Module, "a torch.nn.Module")
    inner = module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module
    found = divergences_around(inner)
    for wrapper in module.modules():
        if isinstance(wrapper, nn.parallel.DistributedDataParallel) and not any(
            one.is_of(wrapper.module) for one in found
        ):
            raise TypeError(
                "torch's own DistributedDataParallel synchronizes in forward and backward and cannot be told not to: "
                "wrap the module with sl.DistributedDataParallel, or use module.module inside of no_sync"
            )
    position = {id(part): at for at, part in enumerate(inner.modules())}
    if not all(one.module_id in position for one in found):
        raise ValueError(
            f"this {type(module).__name__} is a part of a module that is wrapped as a whole: give that one"
        )
    refuse_one_copy(inner)
    return _all_drifting(sorted(found, key=lambda one: position[one.module_id]))  # as on every rank


@contextmanager
def _all_drifting(divergences: Sequence[Divergence]) -> Iterator[None]:
    with ExitStack() as stack:
        for divergence in divergences:
            stack.enter_context(divergence.drifting())
        yield
