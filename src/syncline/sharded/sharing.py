"""Parameters with one copy per host: `share_`, `write_shared`, and the guard of such parameters.

All ranks of a host compute with the same memory, so no rank may write while another rank reads. A barrier before each
write waits until all ranks' backwards have ended. A barrier after the write waits until all ranks have written. Writes
at other times are detected by autograd's version counters. Writes that bypass the counters (by `.data`, `.numpy()` or a
pointer) are not detected.
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
from syncline.checks import checked_kind, suggests_arguments
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
    """Return the guard of a module's shared parameters. Return None if the parameters are not shared."""
    return REGISTRY.by_module(OneCopy).get(module)


def has_one_copy(module: nn.Module) -> bool:
    """Return whether several ranks use one copy of the parameters of a module or of one of its submodules."""
    copies = REGISTRY.by_module(OneCopy)
    return bool(copies) and any(inner in copies for inner in module.modules())


def remember_one_copy(module: nn.Module, copy: OneCopy) -> None:
    """Make `copy` the guard of a module's parameters.

    The module's `load_state_dict` then opens the guard before it writes, and closes it afterwards.
    """
    copies = REGISTRY.by_module(OneCopy)
    if module not in copies:
        module.register_load_state_dict_pre_hook(_before_loading)
        module.register_load_state_dict_post_hook(_after_loading)
    copies[module] = copy


class OneCopy:
    """The guard of a module's shared parameters, which makes writers and readers wait for each other.

    Args:
        named: the parameters with their names.
        lane: the transport between the ranks that have the parameters. No other code uses it at the same time.
        num_copies: the number of copies, one per host. Pass 0 if each rank has its own copy, and the optimizer keeps
            these copies equal.
        check: a function that raises an error if a parameter no longer uses the expected memory.
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
        """Whether all ranks of a host use the same memory."""
        self._num_copies = num_copies
        self.named = list(named)
        self._tensors = [tensor for _, tensor in named]
        self._check = check
        self._flags = torch.zeros(1, dtype=torch.int32, device="cpu")
        self._depth = 0
        self._versions: list[int] = []
        self.note_versions()

    def note_versions(self) -> None:
        """Record the present version counters of the parameters as the expected values."""
        self._versions = self._present_versions()

    def _present_versions(self) -> list[int]:
        return [version_of(tensor) for tensor in self._tensors]

    def wait_to_write(self) -> None:
        """Wait until no rank reads the parameters any more. This is a collective call.

        Raises:
            SynclineError: a rank has written the parameters outside of `sl.write_shared`. All ranks raise the error.
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
        """Wait until all ranks have written. This is a collective call.

        The method then marks the parameters as changed, so that autograd detects graphs that saved the former values.

        Args:
            written: the parameters that any rank has written.
        """
        if self.is_common:
            self.lane.barrier().wait()
        torch.autograd.graph.increment_version(list(written))
        self.note_versions()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Return the context of `sl.write_shared`, in which this rank may write."""
        self.open()
        try:
            yield
        finally:
            self.close()

    def open(self) -> None:
        """Wait until this rank may write. The caller must call `close` once for each call of this method."""
        if not self._depth:
            self.wait_to_write()
        self._depth += 1

    def close(self) -> None:
        """Wait until all ranks have written. If there are several copies, broadcast the values of rank 0's copy."""
        self._depth -= 1
        if self._depth:
            return
        if self._num_copies != 1:
            if self.is_common:
                self.lane.barrier().wait()  # the rank that writes on rank 0's host has written
            TensorBroadcaster([tensor.detach() for tensor in self._tensors], self.lane).start(0).wait()
        self.wait_to_read(self._tensors)

    def written_here(self) -> str:
        """Return the names of parameters that this rank wrote outside of `sl.write_shared` since the last call.

        The text is empty if there are none. Nothing is sent, so the method also works after the lane was closed.
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
        rows = [row.decode() for row in self.lane.all_gather_bytes(shown.encode())]
        ranks = [rank for rank, text in enumerate(rows) if text]
        raise written_elsewhere(f", on {describe_ranks(ranks)}: {rows[ranks[0]]}")


def written_elsewhere(where: str) -> SynclineError:
    """Return the error for a write outside of `sl.write_shared`.

    Args:
        where: the ranks and parameters in words that follow "sl.write_shared". Pass "" to name none.
    """
    return SynclineError(
        f"shared parameters were written outside of sl.write_shared{where}. All ranks of a host compute with the same "
        "copy, so the write may have changed values while another rank was reading them: write the parameters only "
        "inside of `with sl.write_shared(module):`. All ranks must enter this context"
    )


def _before_loading(module: nn.Module, *_: Any) -> None:
    """Open the guard of a module before `load_state_dict` writes. A copy of the module has this hook, but no guard."""
    if (copy := one_copy_of(module)) is not None:
        copy.open()


def _after_loading(module: nn.Module, _: Any) -> None:
    """Close the guard of a module after `load_state_dict` has written."""
    if (copy := one_copy_of(module)) is not None:
        copy.close()


AnyModule = TypeVar("AnyModule", bound=nn.Module)

_ALIGNMENT_BYTES = 64


@suggests_arguments
def share_(module: AnyModule, *, group: dist.ProcessGroup | Transport | None = None) -> AnyModule:
    """Move the parameters of `module` into shared memory. Each host then has one copy, with rank 0's values.

    This is a collective call. All parameters are moved, including frozen parameters, and their former memory is freed.
    Buffers are not shared, because forwards write them. Afterwards parameters may be written only inside of
    `sl.write_shared(module)`, or by the optimizer of `sl.DistributedDataParallel(module, sharded=True)`.

    Args:
        module: a module on the CPU, the same on all ranks.
        group: the ranks that share memory: a `torch.distributed` process group, a Syncline transport, or None for the
            default group. They may be on several hosts if each host has equally many ranks.

    Returns:
        `module` itself.

    Raises:
        TypeError: `module` is not a module.
        ValueError: the group has no shared memory (for example because each rank is on another host, or because the
            transport `c10d` was selected), or a parameter is not on the CPU. All ranks raise the error.
        ContractMismatch: the modules differ between ranks. All ranks raise the error with the same text.

    Examples:
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


@suggests_arguments
def write_shared(module: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which shared parameters may be written.

    Either one rank writes the parameters, or all ranks write the same values.

    All ranks must enter and leave the context together. Entering waits until no rank reads the parameters any more.
    Leaving waits until all ranks have written. If there are several copies (one per host, or one per rank with
    `sharded=True` and without shared memory), leaving also sends the values of rank 0's copy to all other copies. So a
    program in which rank 0 writes is right in each case.

    Args:
        module: the module that was given to `sl.share_` or wrapped with `sharded=True`, or the wrapper.

    Raises:
        ValueError: the module's parameters are not shared.
        SynclineError: the parameters were written before, outside of such a context. On all ranks, entering the context
            raises the error.
    """
    checked_kind("module", module, nn.Module, "a torch.nn.Module")
    copy = one_copy_of(module)
    if copy is None and isinstance(module, nn.parallel.DistributedDataParallel):
        copy = one_copy_of(module.module)
    if copy is None:
        raise ValueError(
            f"expected a module with shared parameters, got a {type(module).__name__} whose parameters are not shared: "
            "share them by sl.share_(module) or sharded=True. If this module is a part of a module with shared "
            "parameters, pass the whole module"
        )
    return copy.writing()


def _allocate(parameters: list[Tensor], transport: Transport) -> list[Tensor]:
    """Return a view in shared memory for each parameter. Parameters of the same dtype and device are adjacent."""
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
                f"sl.share_: expected ranks with shared memory and a module on the CPU, got transport {transport.name} "
                f"and a parameter on {members[0].device}. Only ranks of the same host can share memory, and every host "
                "must have the same number of ranks. "
                'To see why there is no shared memory on one host, call sl.init(transport="shm"): its error says why'
            )
        for member, offset in zip(members, offsets, strict=True):
            views[id(member)] = view_like(flat, offset, member)
    return [views[id(p)] for p in parameters]
