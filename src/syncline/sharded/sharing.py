"""Parameters with one copy per host: `share_`, `write_shared`, and when ranks may write them.

All ranks of a host compute with the same memory, so no rank may write while another reads. There is a barrier before
each write (all backwards have ended) and one after it. Writes at other times are detected by autograd's version
counters. Writes that bypass these (`.data`, `.numpy()`, a pointer) are not detected.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from syncline._torch.tensors import version_of
from syncline.checks import checked_kind
from syncline.errors import SynclineError
from syncline.gradients.shard import view_like
from syncline.session.registry import REGISTRY
from syncline.session.world import transport_of
from syncline.tensors.broadcasting import TensorBroadcaster
from syncline.transport.agreement import describe_tensors, exchange
from syncline.transport.base import Transport
from syncline.words import describe_ranks

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


AnyModule = TypeVar("AnyModule", bound=nn.Module)

_ALIGNMENT_BYTES = 64


def share_(module: AnyModule, *, group: dist.ProcessGroup | Transport | None = None) -> AnyModule:
    """Move the parameters of `module` into shared memory: one copy per host, with rank 0's values.

    All parameters are moved, frozen ones too, and their own memory is freed. Buffers are not shared, because forwards
    write them. A collective call. Afterwards parameters may be written only inside of `sl.write_shared(module)`, or by
    the optimizer of `sl.DistributedDataParallel(module, sharded=True)`.

    Args:
        module: the same on all ranks, on the CPU.
        group: the ranks, on one host or on several hosts with equally many ranks each, that share memory: a
            `torch.distributed` process group, a Syncline transport, or None for the default group.

    Returns:
        `module` itself.

    Raises:
        TypeError: not a module.
        ValueError: the group has no shared memory (for example because each rank is on a host of its own, or `c10d` was
            chosen explicitly), or a parameter is not on the CPU. All ranks raise it.
        ContractMismatch: the ranks' modules differ; the same text on every rank.

    Example:
        >>> import torch, syncline as sl
        >>> model = sl.share_(torch.nn.Linear(2, 1))
        >>> with sl.write_shared(model), torch.no_grad():
        ...     _ = model.weight.zero_()
    """
    transport = transport_of(group)
    fault, named = None, []
    try:
        checked_kind("module", module, nn.Module, "a torch.nn.Module")
        named = list(module.named_parameters())
    except TypeError as error:
        fault = error
    exchange(transport, "sl.share_", describe_tensors(named), fault=fault)
    lane = transport.lane(f"parameters of {type(module).__name__}")
    if lane is not transport:
        weakref.finalize(module, lane.close)
    views = _allocate([p for _, p in named], transport)
    team = transport.team(torch.device("cpu"))
    with torch.no_grad():
        if team.size < lane.size:
            TensorBroadcaster([p.detach() for _, p in named], lane).start(0).wait()
        if team.position == 0:
            for view, (_, parameter) in zip(views, named, strict=True):
                view.copy_(parameter)
    lane.barrier().wait()
    for view, (_, parameter) in zip(views, named, strict=True):
        parameter.data = view
    remember_one_copy(module, OneCopy(named, lane, num_copies=lane.size // team.size))
    return module


def write_shared(module: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which shared parameters may be written, by one rank or by all ranks with the same values.

    Entering is a collective call: all ranks have arrived, so none reads. Leaving is one too: all ranks have written. If
    there are several copies (one per host, or one per rank with `sharded=True` and without shared memory), leaving
    sends the values of rank 0's copy to all others. A program in which rank 0 writes is therefore right in each case.

    Args:
        module: the module that was given to `sl.share_` or wrapped with `sharded=True`, or the wrapper.

    Raises:
        ValueError: the module's parameters are not shared.
        SynclineError: the parameters were written outside of such a context before. Raised on entering, on all ranks.
    """
    checked_kind("module", module, nn.Module, "a torch.nn.Module")
    copy = one_copy_of(module)
    if copy is None and isinstance(module, nn.parallel.DistributedDataParallel):
        copy = one_copy_of(module.module)
    if copy is None:
        raise ValueError(
            f"the parameters of this {type(module).__name__} are not shared: sl.share_(module) shares them, or "
            "sharded=True. Of a part of a module that is shared, name the module"
        )
    return copy.writing()


def _allocate(parameters: list[Tensor], transport: Transport) -> list[Tensor]:
    """Return a view in shared memory for each parameter; parameters of one type are adjacent."""
    views: dict[int, Tensor] = {}
    kinds = sorted({(str(p.dtype), str(p.device)) for p in parameters})
    for kind in kinds:
        members = [p for p in parameters if (str(p.dtype), str(p.device)) == kind]
        multiple = max(1, _ALIGNMENT_BYTES // members[0].element_size())
        offsets, numel = [], 0
        for member in members:
            offsets.append(numel)
            numel += -(-member.numel() // multiple) * multiple
        flat = transport.allocate_shared(numel, members[0].dtype, members[0].device)
        if flat is None:
            raise ValueError(
                f"sl.share_: expected ranks that share memory, got {transport.name} and a parameter on "
                f"{members[0].device}. Shared memory serves CPU tensors of ranks on one host, or on several with as "
                'many ranks each (on one host, sl.init(transport="shm") says why it is not available)'
            )
        for member, offset in zip(members, offsets, strict=True):
            views[id(member)] = view_like(flat, offset, member)
    return [views[id(p)] for p in parameters]
