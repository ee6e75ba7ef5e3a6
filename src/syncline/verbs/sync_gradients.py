"""The verb `sync_gradients_`, which replaces gradients by their mean over the ranks, without another backward."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor, nn

from syncline._torch.tensors import gradient_dtype
from syncline.checks import checked_flag, checked_kind, suggests_arguments
from syncline.errors import SynclineError
from syncline.gradients.bucket_plan import BucketCaps, ParameterSpec, plan_buckets
from syncline.gradients.reducer import GradientSync, reducers_of
from syncline.gradients.riders.items import Standing
from syncline.gradients.sparse import SparseBucket
from syncline.session.world import transport_of
from syncline.tensors.reduction import TensorReducer
from syncline.transport.agreement import PAYLOAD_BYTES, describe_tensors, gather_rows
from syncline.transport.base import Transport
from syncline.transport.work import DONE, CombinedWork, Work
from syncline.verbs.common import Group, Prepared, agree_on_call, verb
from syncline.words import describe_ranks

AnyModule = TypeVar("AnyModule", bound=nn.Module)

_TITLE = "sl.sync_gradients_"

_REMEDY = "Pass the same module on every rank: the wrapper on all ranks, or the bare module on all ranks."

# number of items and total (-1: none), is_uncounted, is_mean, is_changed, number of parameters in `_own`
_STANDING = struct.Struct("<qq???I")

_NONE, _DENSE, _SPARSE = 0, 1, 2
"""The possible kinds of a parameter's gradient on a rank: no gradient, a dense gradient, or a sparse gradient."""


@overload
def sync_gradients_(
    module: AnyModule, *, group: Group = None, async_op: Literal[False] = False
) -> AnyModule: ...


@overload
def sync_gradients_(module: nn.Module, *, group: Group = None, async_op: Literal[True]) -> Work: ...


@overload
def sync_gradients_(module: AnyModule, *, group: Group = None, async_op: bool) -> AnyModule | Work: ...


@suggests_arguments
def sync_gradients_(module: Any, *, group: Group = None, async_op: bool = False) -> Any:
    """Replace the gradients of a module's parameters by their mean over the ranks, without another backward.

    Use this function if unreduced gradients of `no_sync` are left when an epoch ends (pytorch/pytorch issue 53443), or
    for the gradients of a bare module. The result is the same as that of a synchronized backward. With
    `sl.DistributedDataParallel`, the gradients count as reduced afterwards, so `optimizer.step()` and `clip_grad_norm_`
    work. If the backwards ran inside of `normalize_by`, the sum of the gradients is divided by the number of items of
    all ranks.

    If only some ranks have a gradient for a parameter, the gradient counts as zero on the other ranks, and is created
    there. If no rank has a gradient, `.grad` stays None. Gradients that are already reduced do not change, except for
    the last bit if the number of ranks is not a power of two. The call takes two small collectives, or only one for up
    to 196 parameters. Then gradients of one dtype and device are sent together. Communication hooks are not called.

    Args:
        module: `sl.DistributedDataParallel`, torch's wrapper, or a bare module. A bare module can also be the module
            inside of a wrapper. If a wrapper is passed, the parameters that it ignores are left out.
        group: see `broadcast_`. If the module is wrapped, None means the group of the wrapper, and no other group is
            allowed.
        async_op: whether to return at once, with a handle. Do not use the gradients before you have waited for the
            handle. Only sparse gradients are complete when this call returns.

    Returns:
        `module`. If `async_op` is True, a handle with a method `wait()`.

    Raises:
        ContractMismatch: the ranks passed different modules. The text is the same on every rank.
        TypeError: `module` is not a module. Every rank raises the error.
        ValueError: the module is sharded, has several wrappers, or is wrapped with another group; only some backwards
            ran inside of `normalize_by`; gradients of an earlier step were cleared on some ranks only; or `module` is
            only a part of a module with `normalize_by`. Every rank raises the error.
        SynclineError: this function was called inside of a backward.

    Examples:
        >>> import torch, syncline as sl
        >>> ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1))
        >>> with ddp.no_sync():
        ...     ddp(torch.ones(1, 2)).sum().backward()
        >>> ddp = sl.sync_gradients_(ddp)
    """
    transport, group_fault = _transport(module, group)
    with verb(transport, "sync_gradients_"):

        def prepare() -> Prepared[_Gradients]:
            checked_flag("async_op", async_op)
            mine = _Gradients(module)
            if group_fault is not None:
                raise group_fault
            return Prepared(mine, mine.lines, mine.payload())

        mine, payloads = agree_on_call(transport, _TITLE, prepare, remedy=_REMEDY)
        num_own = {_STANDING.unpack_from(payload)[-1] for payload in payloads}
        # A wrapper without references may be freed on some ranks and not yet on others. Then all ranks ignore it.
        num_items = mine.divisor([_read(payload) for payload in payloads]) if len(num_own) == 1 else None
        if mine.has_short_kinds:
            kinds = [_unpacked(payload[_STANDING.size :], len(mine.kinds)) for payload in payloads]
        else:
            rows = gather_rows(transport, torch.tensor(mine.kinds, dtype=torch.uint8, device="cpu"))
            kinds = [bytes(row.tolist()) for row in rows]
        work = mine.start(
            transport, [max(column) for column in zip(*kinds, strict=True)], num_items, wait=not async_op
        )
        if async_op:
            return work
        work.wait()
        return module


def _transport(module: Any, group: Group) -> tuple[Transport, Exception | None]:
    """Return the transport to use and, if `group` is not the group of the module's wrapper, an error to raise."""
    found = reducers_of(module.parameters()) if isinstance(module, nn.Module) else []
    if not found:
        if group is None and isinstance(module, nn.parallel.DistributedDataParallel):
            group = module.process_group
        return transport_of(group), None
    main_lane = found[0].main_lane
    if group is None or transport_of(group) is main_lane:
        return main_lane, None
    return transport_of(group), ValueError(
        "expected `group` to be the group over which the wrapper synchronizes the module, got another group: omit the "
        "argument `group`, or pass the group of the wrapper"
    )


class _Gradients:
    """The gradients of a module on this rank, and the counts of the items from which they were computed.

    Args:
        module: see `sync_gradients_`.

    Raises:
        TypeError, ValueError, SynclineError: the gradients cannot be reduced.
    """

    def __init__(self, module: Any) -> None:
        checked_kind(
            "module", module, nn.Module, "a torch.nn.Module", hint=": pass the module or its wrapper"
        )
        ignored: set[str] = set()
        if isinstance(module, nn.parallel.DistributedDataParallel):
            ignored, module = set(module.parameters_to_ignore), module.module
        named = [(name, p) for name, p in module.named_parameters() if name not in ignored]
        self._gradient_sync = _gradient_sync_of([parameter for _, parameter in named])
        self._parameters = [parameter for _, parameter in named]
        self._place = {id(parameter): at for at, parameter in enumerate(self._parameters)}
        own = [] if self._gradient_sync is None else self._gradient_sync.parameters
        self._own = {self._place[id(parameter)] for parameter in own if id(parameter) in self._place}
        """The indices in `_parameters` of the parameters that the wrapper synchronizes."""
        self._standing = Standing(None, False, None, False, False)
        if self._gradient_sync is not None:
            self._standing = self._gradient_sync.state.normalizer.standing()
            if len(self._own) < len(own) and (self._standing.num_items, self._standing.total) != (None, None):
                raise ValueError(
                    "expected the whole wrapped module, got only a part of the module: normalize_by counts items for "
                    "all of its gradients together, so pass the whole module"
                )
        self.kinds = [_kind(name, parameter) for name, parameter in named]
        self.has_short_kinds = _STANDING.size + _packed_bytes(len(self.kinds)) <= PAYLOAD_BYTES
        """Whether the kinds of all gradients fit into one payload."""
        self.lines = describe_tensors(named, layout=False)

    def payload(self) -> bytes:
        """Return the bytes for the other ranks: the counts of items and, if they fit, the kinds of the gradients."""
        items, is_uncounted, total, is_mean, is_changed = self._standing
        counts = (-1 if count is None else count for count in (items, total))
        standing = _STANDING.pack(*counts, is_uncounted, is_mean, is_changed, len(self._own))
        return standing + _packed(self.kinds) if self.has_short_kinds else standing

    def divisor(self, standings: Sequence[Standing]) -> int | None:
        """Return the number of items of all ranks, by which gradients are divided. Return None if no rank counts items.

        Args:
            standings: the counts of items on each rank.

        Raises:
            ValueError: the counts of the ranks do not fit together, so no divisor is correct. Every rank raises the
                error.
        """
        counted = [rank for rank, one in enumerate(standings) if one.num_items is not None]
        if not counted:
            return None
        uncounted = [rank for rank, one in enumerate(standings) if one.is_uncounted]
        changed = [rank for rank, one in enumerate(standings) if one.is_changed]
        problem = None
        if uncounted:
            problem = (
                "expected all backwards or no backwards inside of normalize_by, got backwards inside on "
                f"{describe_ranks(counted)} and backwards outside on {describe_ranks(uncounted)}, so no divisor is "
                "correct. Put all backwards inside of normalize_by and clear the gradients"
            )
        elif changed:
            problem = (
                "expected gradients of an earlier step to be cleared or left unchanged, got gradients on "
                f"{describe_ranks(changed)} that were changed, for example clipped, but not cleared, so no divisor is "
                "correct. Clear the gradients"
            )
        elif len({one.total for one in standings}) > 1:
            without = [rank for rank, one in enumerate(standings) if one.total is None]
            problem = (
                "expected gradients of an earlier step to be cleared on all ranks or on none, got gradients that are "
                f"cleared only on {describe_ranks(without)}. Clear the gradients on all ranks"
            )
        if problem is not None:
            raise ValueError(f"{_TITLE}: {problem}, then accumulate again")
        assert self._gradient_sync is not None
        normalizer = self._gradient_sync.state.normalizer
        normalizer.carry()
        return normalizer.total([one.num_items or 0 for one in standings], step=self._gradient_sync.step)

    def start(self, transport: Transport, kinds: Sequence[int], num_items: int | None, *, wait: bool) -> Work:
        """Start to reduce all gradients. Return the handle on which the caller waits.

        Args:
            transport: the transport between the ranks.
            kinds: a number for the kind of each parameter's gradient. It is the maximum over all ranks.
            num_items: the number of items of all ranks, by which the gradients of the wrapped module are divided. Pass
                None if no rank counts items.
            wait: if True, wait for each reduction before the next one starts, to bound the memory for copies. If False,
                start the reductions of all dense gradients at once.
        """
        dense: dict[bool, list[Tensor]] = {False: [], True: []}
        for at, (parameter, kind) in enumerate(zip(self._parameters, kinds, strict=True)):
            is_counted = num_items is not None and at in self._own
            divisor = float(num_items or 1) if is_counted else float(transport.size)
            if kind == _SPARSE:
                _reduce_sparse(parameter, transport, divisor)
            elif kind == _DENSE:
                if parameter.grad is None:
                    dtype = gradient_dtype(parameter)
                    parameter.grad = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
                dense[is_counted].append(parameter.grad)
        reducers = [
            TensorReducer(dense[False], transport, "mean", rounds_once=True),
            TensorReducer(dense[True], transport, "sum", divisor=float(num_items or 1), rounds_once=True),
        ]
        if wait:
            for reducer in reducers:
                reducer.run()
            self._finish(num_items)
            return DONE
        works = [(reducer.start(), None) for reducer in reducers]
        return CombinedWork([*works, (DONE, lambda: self._finish(num_items))])

    def _finish(self, num_items: int | None) -> None:
        if self._gradient_sync is not None:
            own = [at for at, p in enumerate(self._gradient_sync.parameters) if id(p) in self._place]
            self._gradient_sync.reduced_outside(
                own, num_items=num_items, was_changed=self._standing.is_changed
            )


def _gradient_sync_of(parameters: Sequence[Tensor]) -> GradientSync | None:
    found = reducers_of(parameters)
    if len(found) > 1:
        # Wrappers may share parameters, and a module may be wrapped twice. Among the wrappers whose parameters are all
        # given, which must have the same parameters, use the latest.
        given = {id(parameter) for parameter in parameters}
        whole = [one for one in found if all(id(parameter) in given for parameter in one.parameters)]
        if len({frozenset(map(id, one.parameters)) for one in whole}) != 1:
            raise ValueError(
                f"expected a module with one wrapper, got a module whose parts have {len(found)} wrappers: call "
                "sl.sync_gradients_(wrapper) once for each wrapper"
            )
        found = [max(whole, key=lambda one: one.ownership.birth)]
    if not found:
        return None
    if found[0].options.sharded:
        raise ValueError(
            "expected a module that is not sharded, got a module with sharded=True, in which each rank has only its "
            "shard of the reduced gradients. Instead of this call, run the last micro-batch outside of no_sync"
        )
    if found[0].is_in_backward:
        raise SynclineError(
            f"{_TITLE} was called inside of a backward, before all gradients were complete: call {_TITLE} after "
            "backward()"
        )
    return found[0]


def _kind(name: str, parameter: Tensor) -> int:
    gradient = parameter.grad
    if gradient is None:
        return _NONE
    if gradient.dtype is not parameter.dtype or gradient.device != parameter.device:
        raise ValueError(
            f"expected the gradient of {name} to have dtype {parameter.dtype} on {parameter.device}, like the "
            f"parameter, got dtype {gradient.dtype} on {gradient.device}: convert the gradient"
        )
    if gradient.layout not in (torch.strided, torch.sparse_coo):
        raise ValueError(
            f"expected the gradient of {name} to have layout torch.strided or torch.sparse_coo, got {gradient.layout}"
        )
    return _DENSE if gradient.layout == torch.strided else _SPARSE


def _reduce_sparse(parameter: Tensor, transport: Transport, divisor: float) -> None:
    """Sum a sparse gradient over the ranks, divide the sum by `divisor`, and wait for the result.

    A synchronized backward reduces sparse gradients in the same way.
    """
    spec = ParameterSpec(
        name="gradient",
        numel=parameter.numel(),
        itemsize_bytes=parameter.element_size(),
        dtype=str(parameter.dtype).removeprefix("torch."),
        device=str(parameter.device),
        sparse=True,
    )
    (plan,) = plan_buckets([spec], [0], caps=BucketCaps(cap_bytes=0, first_cap_bytes=0), tail_numel=0)
    bucket = SparseBucket(plan, [parameter], transport)
    bucket.fill(1.0, frozenset())
    bucket.send(tail=None, trigger=None)
    bucket.wait()
    bucket.divide(divisor)
    bucket.hand_out(frozenset(), any_missing=False)


# ---------------------------------------------------------------------- message format (pure)


def _read(payload: bytes) -> Standing:
    items, total, *flags, _ = _STANDING.unpack_from(payload)
    return Standing(None if items < 0 else items, flags[0], None if total < 0 else total, flags[1], flags[2])


def _packed_bytes(num_kinds: int) -> int:
    return -(-num_kinds // 4)


def _packed(kinds: Sequence[int]) -> bytes:
    """Pack the kinds of gradients into bytes, four kinds into each byte.

    Examples:
        >>> list(_unpacked(_packed([0, 1, 2, 0, 1]), 5))
        [0, 1, 2, 0, 1]
    """
    number = sum(kind << (2 * at) for at, kind in enumerate(kinds))
    return number.to_bytes(_packed_bytes(len(kinds)), "little")


def _unpacked(packed: bytes, num_kinds: int) -> bytes:
    number = int.from_bytes(packed, "little")
    return bytes((number >> (2 * at)) & 3 for at in range(num_kinds))
