"""Parameters of which there is one copy a host: who may write them when, and how other writes are noticed.

All ranks compute with the same memory, so nobody writes while another reads: a barrier before (all backwards are over),
a barrier after. Autograd's version counters tell writes from elsewhere; what goes around them (`.data`, `.numpy()`, a
pointer) is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from syncline._torch.tensors import version_of
from syncline.differences import describe_ranks
from syncline.errors import SynclineError
from syncline.tensors.broadcasting import TensorBroadcaster
from syncline.transport.base import Transport

__all__ = ["OneCopy", "has_one_copy", "one_copy_of", "remember_one_copy", "written_elsewhere"]


_copies: weakref.WeakKeyDictionary[nn.Module, OneCopy] = weakref.WeakKeyDictionary()

_MAX_NAMES = 5


def one_copy_of(module: nn.Module) -> OneCopy | None:
    """The guard of a module's shared parameters; None where they are not shared."""
    return _copies.get(module)


def has_one_copy(module: nn.Module) -> bool:
    """Whether the parameters of a module, or of one inside of it, are shared."""
    return bool(_copies) and any(inner in _copies for inner in module.modules())


def remember_one_copy(module: nn.Module, copy: OneCopy) -> None:
    """`copy` guards the parameters of `module` from now on; `load_state_dict` writes by its rules."""
    if module not in _copies:
        module.register_load_state_dict_pre_hook(_BeforeLoading(module))
        module.register_load_state_dict_post_hook(_AfterLoading(module))
    _copies[module] = copy


class OneCopy:
    """Guards the parameters of one module.

    Args:
        named: the parameters.
        lane: between the ranks that have them; nothing else travels by it at the same time.
        num_copies: how many there are, one on each host; 0 where each rank has its own. The optimizer keeps them equal.
        check: raises where the memory of a parameter is not what it was.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, Tensor]],
        lane: Transport,
        *,
        num_copies: int,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.lane = lane
        self.is_common = num_copies > 0
        """Whether other ranks have the same memory."""
        self._num_copies = num_copies
        self.named = list(named)
        self._tensors = [tensor for _, tensor in named]
        self._check = check
        self._flags = torch.zeros(1, dtype=torch.int32)
        self._depth = 0
        self._versions: list[int] = []
        self.note_versions()

    def note_versions(self) -> None:
        """What the parameters are now is what they have to be."""
        self._versions = self._present_versions()

    def _present_versions(self) -> list[int]:
        return [version_of(tensor) for tensor in self._tensors]

    def wait_to_write(self) -> None:
        """Return when no rank reads any more; a collective call.

        Raises:
            SynclineError: on all ranks: one of them has written outside of `sl.write_shared`.
        """
        self._check()
        if not self.is_common or self.lane.size == 1:
            return
        is_touched = self._present_versions() != self._versions and not self._depth
        self._flags[0] = int(is_touched)
        self.lane.all_reduce(self._flags, "max").wait()
        if self._flags.item():
            self._raise_touched(is_touched=is_touched)

    def wait_to_read(self, written: Sequence[Tensor]) -> None:
        """Return when all ranks have written; a collective call. Graphs made before will notice.

        Args:
            written: those that have been, by whatever rank.
        """
        if self.is_common:
            self.lane.barrier().wait()
        torch.autograd.graph.increment_version(list(written))
        self.note_versions()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """See `sl.write_shared`."""
        self.open()
        try:
            yield
        finally:
            self.close()

    def open(self) -> None:
        """Wait until this rank may write; pairs with `close`."""
        if not self._depth:
            self.wait_to_write()
        self._depth += 1

    def close(self) -> None:
        """Wait until all may read."""
        self._depth -= 1
        if self._depth:
            return
        if self._num_copies != 1:
            if self.is_common:
                self.lane.barrier().wait()  # whoever on rank 0's host writes has written
            TensorBroadcaster([tensor.detach() for tensor in self._tensors], self.lane).start(0).wait()
        self.wait_to_read(self._tensors)

    def written_here(self) -> str:
        """The parameters that this rank has written where it may not, by name, since it was last asked.

        Nothing is sent, so this can be asked when the lane is closed already.
        """
        if not self.is_common or self.lane.size == 1:
            return ""
        versions = zip(self.named, self._present_versions(), self._versions, strict=True)
        names = [name for (name, _), now, then in versions if now != then]
        self.note_versions()  # it is said once
        more = f", ... ({len(names)} parameters)" if len(names) > _MAX_NAMES else ""
        return ", ".join(names[:_MAX_NAMES]) + more

    def _raise_touched(self, *, is_touched: bool) -> None:
        shown = self.written_here() if is_touched else ""
        told = [row.decode() for row in self.lane.all_gather_bytes(shown.encode())]
        ranks = [rank for rank, text in enumerate(told) if text]
        raise written_elsewhere(f", on {describe_ranks(ranks)}: {told[ranks[0]]}")


def written_elsewhere(where: str) -> SynclineError:
    """What to raise for a write outside of `sl.write_shared`."""
    return SynclineError(
        f"shared parameters were written outside of sl.write_shared{where}. All ranks of the host compute with this "
        "one copy, so a write is seen by all, at whatever they are just doing: write inside of "
        "`with sl.write_shared(module):`, which all ranks enter"
    )


class _LoadingHook:
    """Does not keep its module alive; a copied or pickled one does nothing."""

    def __init__(self, module: nn.Module | None = None) -> None:
        self._module = None if module is None else weakref.ref(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return type(self)()

    def __reduce__(self) -> Any:
        return type(self), ()

    def _copy(self) -> OneCopy | None:
        module = None if self._module is None else self._module()
        return None if module is None else _copies.get(module)


class _BeforeLoading(_LoadingHook):
    def __call__(self, module: nn.Module, *_: Any) -> None:
        copy = self._copy()
        if copy is not None:
            copy.open()


class _AfterLoading(_LoadingHook):
    def __call__(self, module: nn.Module, incompatible: Any) -> None:
        copy = self._copy()
        if copy is not None:
            copy.close()
