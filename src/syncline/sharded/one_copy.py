"""Parameters with one copy per host: when ranks may write them, and how other writes are detected.

All ranks of a host compute with the same memory, so no rank may write while another reads. There is a barrier before
each write (all backwards have ended) and one after it. Writes at other times are detected by autograd's version
counters. Writes that bypass these (`.data`, `.numpy()`, a pointer) are not detected.
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
from syncline.session.registry import REGISTRY
from syncline.tensors.broadcasting import TensorBroadcaster
from syncline.transport.base import Transport

__all__ = ["OneCopy", "has_one_copy", "one_copy_of", "remember_one_copy", "written_elsewhere"]


_MAX_NAMES = 5


def one_copy_of(module: nn.Module) -> OneCopy | None:
    """Return the guard of a module's shared parameters; None if they are not shared."""
    return REGISTRY.by_module(OneCopy).get(module)


def has_one_copy(module: nn.Module) -> bool:
    """Return whether the parameters of a module, or of one of its submodules, are shared."""
    copies = REGISTRY.by_module(OneCopy)
    return bool(copies) and any(inner in copies for inner in module.modules())


def remember_one_copy(module: nn.Module, copy: OneCopy) -> None:
    """Make `copy` the guard of a module's parameters. `load_state_dict` of the module then waits as writers must."""
    copies = REGISTRY.by_module(OneCopy)
    if module not in copies:
        module.register_load_state_dict_pre_hook(_BeforeLoading(module))
        module.register_load_state_dict_post_hook(_AfterLoading(module))
    copies[module] = copy


class OneCopy:
    """The guard of one module's parameters.

    Args:
        named: the parameters with their names.
        lane: connects the ranks that have them; nothing else uses it at the same time.
        num_copies: number of copies, one per host; 0 where each rank has its own and the optimizer keeps them equal.
        check: raises if a parameter's memory was replaced.
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
        """Whether ranks of a host use the same memory."""
        self._num_copies = num_copies
        self.named = list(named)
        self._tensors = [tensor for _, tensor in named]
        self._check = check
        self._flags = torch.zeros(1, dtype=torch.int32)
        self._depth = 0
        self._versions: list[int] = []
        self.note_versions()

    def note_versions(self) -> None:
        """Record the parameters' present versions as the expected ones."""
        self._versions = self._present_versions()

    def _present_versions(self) -> list[int]:
        return [version_of(tensor) for tensor in self._tensors]

    def wait_to_write(self) -> None:
        """Wait until no rank reads any more. A collective call.

        Raises:
            SynclineError: a rank has written outside of `sl.write_shared`; on all ranks.
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
        """Wait until all ranks have written. A collective call. It marks the change for autograd graphs made before.

        Args:
            written: the parameters that any rank has written.
        """
        if self.is_common:
            self.lane.barrier().wait()
        torch.autograd.graph.increment_version(list(written))
        self.note_versions()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Return the context of `sl.write_shared`."""
        self.open()
        try:
            yield
        finally:
            self.close()

    def open(self) -> None:
        """Wait until this rank may write. Every call needs a call of `close`."""
        if not self._depth:
            self.wait_to_write()
        self._depth += 1

    def close(self) -> None:
        """Wait until all ranks may read; unless there is only one copy, broadcast rank 0's values first."""
        self._depth -= 1
        if self._depth:
            return
        if self._num_copies != 1:
            if self.is_common:
                self.lane.barrier().wait()  # the rank that writes on rank 0's host has written
            TensorBroadcaster([tensor.detach() for tensor in self._tensors], self.lane).start(0).wait()
        self.wait_to_read(self._tensors)

    def written_here(self) -> str:
        """Return the names of parameters that this rank wrote without permission since the last call.

        Nothing is sent, so this also works after the lane was closed.
        """
        if not self.is_common or self.lane.size == 1:
            return ""
        versions = zip(self.named, self._present_versions(), self._versions, strict=True)
        names = [name for (name, _), now, then in versions if now != then]
        self.note_versions()  # so that each write is reported once
        more = f", ... ({len(names)} parameters)" if len(names) > _MAX_NAMES else ""
        return ", ".join(names[:_MAX_NAMES]) + more

    def _raise_touched(self, *, is_touched: bool) -> None:
        shown = self.written_here() if is_touched else ""
        told = [row.decode() for row in self.lane.all_gather_bytes(shown.encode())]
        ranks = [rank for rank, text in enumerate(told) if text]
        raise written_elsewhere(f", on {describe_ranks(ranks)}: {told[ranks[0]]}")


def written_elsewhere(where: str) -> SynclineError:
    """Return the error for a write outside of `sl.write_shared`."""
    return SynclineError(
        f"shared parameters were written outside of sl.write_shared{where}. All ranks of the host compute with this "
        "one copy, so a write is seen by all, at whatever they are just doing: write inside of "
        "`with sl.write_shared(module):`, which all ranks enter"
    )


class _LoadingHook:
    """A hook that does not keep its module alive. A copied or unpickled hook does nothing."""

    def __init__(self, module: nn.Module | None = None) -> None:
        self._module = None if module is None else weakref.ref(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return type(self)()

    def __reduce__(self) -> Any:
        return type(self), ()

    def _copy(self) -> OneCopy | None:
        module = None if self._module is None else self._module()
        return None if module is None else one_copy_of(module)


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
