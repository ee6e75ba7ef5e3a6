"""The verb `diverge`, which lets replicas drift apart on purpose, and a record of whether they are equal again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

from torch import Tensor, nn

from syncline._torch.modules import uncompiled
from syncline.checks import checked_kind, suggests_arguments
from syncline.errors import SynclineError
from syncline.session.registry import REGISTRY
from syncline.transport.agreement import exchange
from syncline.transport.base import Transport
from syncline.verbs.common import refuse_one_copy


class Divergence:
    """A record of whether the replicas of one wrapped module drift apart, or have drifted apart, by `sl.diverge`.

    Args:
        module: the module inside of the wrapper.
        transport: the transport between the ranks.
        on_change: a function that is called with True when a block of `sl.diverge` begins, and with False when the
            block ends.
        on_equal: a function that is called when a verb has made all parameters of the module equal on all ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        transport: Transport,
        on_change: Callable[[bool], object],
        on_equal: Callable[[], object],
    ) -> None:
        self.is_open = False
        """Whether a block of `sl.diverge` is active. In the block nothing is synchronized."""
        self.has_diverged = False
        """Whether a block of `sl.diverge` has begun since the replicas were last known to be equal."""
        self._module = weakref.ref(module)
        self._transport = transport
        self._on_change = on_change
        self._on_equal = on_equal
        REGISTRY.add(self)

    @property
    def module(self) -> nn.Module | None:
        """The module inside of the wrapper; None if the module was freed."""
        return self._module()

    @contextmanager
    def drifting(self) -> Iterator[None]:
        """Return a context in which the module is not synchronized. To enter the context is a collective call."""
        title = f"sl.diverge of {self._title()}"
        fault = None
        if self.is_open:
            fault = ValueError(
                "expected a module outside of sl.diverge, got a module that is already inside of a block of "
                "sl.diverge: end that block first"
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
        """Raise an error if the replicas have drifted apart. Call this method before gradients are averaged.

        Raises:
            SynclineError: the replicas have drifted apart and have not been made equal since. Every rank raises the
                error.
        """
        if self.has_diverged and not self.is_open:
            raise SynclineError(
                f"rank {self._transport.rank}: the replicas of {self._title()} drifted apart inside of sl.diverge and "
                "have not been made equal since, so the mean of their gradients would be wrong for every replica. Make "
                "the replicas equal by sl.average_(ddp), sl.keep_best_(ddp, score) or sl.broadcast_(ddp). Or, if they "
                "are already equal, call sl.check_replicas(ddp), which verifies this"
            )

    def refuse_inside(self, call: str) -> None:
        """Raise an error if a block of `sl.diverge` is active.

        Args:
            call: the refused call in words, such as "the change of the process group". The error message shows them.

        Raises:
            ValueError: a block of `sl.diverge` is active.
        """
        if self.is_open:
            raise ValueError(
                f"rank {self._transport.rank}: {call} of {self._title()} is not possible inside of sl.diverge, because "
                "the end of the block restores the synchronization over the old group. End the block, make the "
                "replicas equal by sl.average_(ddp), sl.keep_best_(ddp, score) or sl.broadcast_(ddp), and then repeat "
                "the call"
            )

    def covers(self, ids: set[int]) -> bool:
        """Return whether the module still exists, and `ids` contains the ids of all of its parameters."""
        return self.module is not None and all(id(p) in ids for p in self.module.parameters())

    def record_equal(self, *, by_writing: bool) -> None:
        """Record that all parameters of the module are equal on all ranks now.

        Args:
            by_writing: True if the parameters were made equal, False if they were found to be equal.
        """
        self.has_diverged = False
        if by_writing:
            self._on_equal()

    def is_around(self, module: nn.Module) -> bool:
        """Return whether `module` is the module of this record, one of its parts, or a module that contains it."""
        own = self.module
        return own is not None and (
            any(part is module for part in own.modules()) or any(part is own for part in module.modules())
        )

    def _title(self) -> str:
        return type(self.module).__name__


def divergences_around(module: nn.Module) -> list[Divergence]:
    """Return the records of all wrapped modules that are `module`, one of its parts, or a module that contains it."""
    return [one for one in REGISTRY.living(Divergence) if one.is_around(module)]


def record_equal(tensors: Iterable[Tensor], *, by_writing: bool = True) -> None:
    """Record that these tensors are equal on all ranks now. Modules in an active block of `sl.diverge` are left out.

    Args:
        tensors: the tensors.
        by_writing: True if the tensors were made equal, False if they were found to be equal.
    """
    known = [one for one in REGISTRY.living(Divergence) if not one.is_open]
    if not known:
        return
    ids = {id(tensor) for tensor in tensors}
    for one in known:
        if one.covers(ids):
            one.record_equal(by_writing=by_writing)


@suggests_arguments
def diverge(module: nn.Module) -> AbstractContextManager[None]:
    """Turn off all synchronization of a wrapped module inside a context, so that its replicas drift apart.

    Inside the context, no gradients, buffers or parameters are sent, whatever the strategy. Each rank can perturb its
    weights, train, or evaluate independently. Afterwards, make the replicas equal by `sl.average_`, `sl.keep_best_` or
    `sl.broadcast_`. If the optimizer has stepped, make it equal as well. Until then, a forward whose gradients are to
    be reduced raises an error on every rank. Syncline never makes the replicas equal automatically. The file
    `docs/guides/strategies.md` contains a recipe.

    To enter the context is a collective call.

    Args:
        module: a `sl.DistributedDataParallel`, the module inside of such a wrapper, or a module that has such wrappers
            as parts. For a module without wrappers, the context has no effect.

    Raises:
        TypeError: `module` is not a module, or it is or contains torch's own wrapper.
        ValueError: `module` is only a part of a wrapped module; or it is already inside of such a context; or the ranks
            use one copy of its parameters (`sl.share_`, `sharded=True`).

    Examples:
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
                "expected a module in sl.DistributedDataParallel, got one in torch's own DistributedDataParallel, "
                "whose synchronization cannot be turned off. Use sl.DistributedDataParallel. Or use no_sync() of "
                "torch's wrapper instead of sl.diverge, and call wrapper.module inside of no_sync()"
            )
    position = {id(part): at for at, part in enumerate(inner.modules())}
    if not all(id(one.module) in position for one in found):
        raise ValueError(
            f"expected a whole wrapped module, got a {type(module).__name__} that is only a part of a wrapped module: "
            "pass the wrapper, or the module that it wraps"
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
