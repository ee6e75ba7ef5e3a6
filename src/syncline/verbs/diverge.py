"""diverge: let replicas drift apart on purpose, and record whether they have been made equal again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

from torch import Tensor, nn

from syncline._torch.modules import uncompiled
from syncline.checks import checked_kind
from syncline.errors import SynclineError
from syncline.session.registry import REGISTRY
from syncline.transport.agreement import exchange
from syncline.transport.base import Transport
from syncline.verbs.common import refuse_one_copy


class Divergence:
    """A record of the deliberate drift of one wrapped module's replicas.

    Args:
        module: the module inside of the wrapper.
        transport: the transport between the ranks.
        on_change: called with True when the block of `sl.diverge` begins, and with False when the block ends.
        on_equal: called when a verb has made all parameters equal.
    """

    def __init__(
        self,
        module: nn.Module,
        transport: Transport,
        on_change: Callable[[bool], object],
        on_equal: Callable[[], object],
    ) -> None:
        self.is_open = False
        """Whether the block of `sl.diverge` is active, in which nothing is synchronized."""
        self.has_diverged = False
        """Whether the replicas have drifted inside of `sl.diverge`, and have not been made equal since."""
        self._module = weakref.ref(module)
        self._transport = transport
        self._on_change = on_change
        self._on_equal = on_equal
        REGISTRY.add(self)

    @property
    def module(self) -> nn.Module | None:
        """The module inside of the wrapper; None if it is freed."""
        return self._module()

    @contextmanager
    def drifting(self) -> Iterator[None]:
        """Turn synchronization off inside this context. Entering is a collective call."""
        title = f"sl.diverge of {self._title()}"
        fault = None
        if self.is_open:
            fault = ValueError(
                "expected a module outside of sl.diverge, got one that is already inside of such a block: end that "
                "block first"
            )
        exchange(self._transport, title, [], fault=fault)
        self.is_open = True
        self.has_diverged = self._transport.size > 1
        self._on_change(True)
        try:
            yield
        finally:
            self.is_open = False
            self._on_change(False)

    def check_not_diverged(self) -> None:
        """Raise if the replicas have drifted, and have not been made equal since.

        Raises:
            SynclineError: gradients of drifted replicas were to be averaged. Every rank raises the error.
        """
        if self.has_diverged and not self.is_open:
            raise SynclineError(
                f"rank {self._transport.rank}: the replicas of {self._title()} drifted apart inside of sl.diverge and "
                "have not been made equal since, so the mean of their gradients would be wrong for every replica. Make "
                "the replicas equal by sl.average_(ddp), sl.keep_best_(ddp, score) or sl.broadcast_(ddp), or verify by "
                "sl.check_replicas(ddp) that they are equal"
            )

    def refuse_inside(self, call: str) -> None:
        """Raise if `sl.diverge` is active.

        Args:
            call: the refused call, as a noun.

        Raises:
            ValueError: the block of `sl.diverge` is active.
        """
        if self.is_open:
            raise ValueError(
                f"rank {self._transport.rank}: {call} of {self._title()} is not possible inside of sl.diverge, because "
                "the end of the block restores the synchronization over the old group. End the block, make the "
                "replicas equal by sl.average_(ddp), sl.keep_best_(ddp, score) or sl.broadcast_(ddp), and then repeat "
                "the call"
            )

    def covers(self, ids: set[int]) -> bool:
        """Return whether all parameters of the module are among the objects with these ids."""
        return self.module is not None and all(id(p) in ids for p in self.module.parameters())

    def record_equal(self, *, by_writing: bool) -> None:
        """Record that all parameters of the module are equal on all ranks now.

        Args:
            by_writing: whether the parameters were made equal, and not only found to be equal.
        """
        self.has_diverged = False
        if by_writing:
            self._on_equal()

    def is_around(self, module: nn.Module) -> bool:
        """Return whether `module` is the module of this record, is a part of it, or contains it."""
        own = self.module
        return own is not None and (
            any(part is module for part in own.modules()) or any(part is own for part in module.modules())
        )

    def _title(self) -> str:
        return type(self.module).__name__


def divergences_around(module: nn.Module) -> list[Divergence]:
    """Return the records of wrapped modules that are `module` itself, contain it, or are parts of it."""
    return [one for one in REGISTRY.living(Divergence) if one.is_around(module)]


def record_equal(tensors: Iterable[Tensor], *, by_writing: bool = True) -> None:
    """Record that these tensors are equal on all ranks now. Modules inside of `sl.diverge` are not affected.

    Args:
        tensors: the tensors.
        by_writing: whether the tensors were made equal, and not only found to be equal.
    """
    known = [one for one in REGISTRY.living(Divergence) if not one.is_open]
    if not known:
        return
    ids = {id(tensor) for tensor in tensors}
    for one in known:
        if one.covers(ids):
            one.record_equal(by_writing=by_writing)


def diverge(module: nn.Module) -> AbstractContextManager[None]:
    """Turn off all synchronization of a wrapped module inside a context, so that its replicas drift apart.

    Inside the context, no gradients, buffers or parameters are sent, under every strategy. Each rank perturbs its
    weights, trains, or evaluates independently. Afterwards, make the replicas equal by `sl.average_`, `sl.keep_best_`
    or `sl.broadcast_`, and also the optimizer if it has stepped. Until then, a forward whose gradients are to be
    reduced raises an error on every rank. Replicas are never made equal automatically. `docs/strategies.md` has a
    recipe.

    Entering the context is a collective call.

    Args:
        module: a `sl.DistributedDataParallel`, the module inside, or a module that has such wrappers as parts. For a
            module without wrappers the context has no effect.

    Raises:
        TypeError: `module` is not a module, or is torch's own wrapper.
        ValueError: `module` is only a part of a wrapped module, or is already inside of such a context; or the ranks
            use one copy of its parameters (`sl.share_`, `sharded=True`).

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
            one.module is wrapper.module for one in found
        ):
            raise TypeError(
                "expected a module that sl.DistributedDataParallel wraps, got torch's own DistributedDataParallel, "
                "whose synchronization cannot be turned off. Wrap the module with sl.DistributedDataParallel, or call "
                "module.module inside of no_sync"
            )
    position = {id(part): at for at, part in enumerate(inner.modules())}
    if not all(id(one.module) in position for one in found):
        raise ValueError(
            f"expected a whole wrapped module, got a {type(module).__name__} that is only a part of one: pass the "
            "wrapped module"
        )
    refuse_one_copy(inner)
    # The order must be the same on every rank, because each entry is a collective call.
    return _all_drifting(sorted(found, key=lambda one: position[id(one.module)]))


@contextmanager
def _all_drifting(divergences: Sequence[Divergence]) -> Iterator[None]:
    with ExitStack() as stack:
        for divergence in divergences:
            stack.enter_context(divergence.drifting())
        yield
