"""The selection of the parameters and buffers that are synchronized, and the detection of later changes of the module.

`select` selects the tensors, and rejects modules that cannot be synchronized. `Inventory` detects at little cost that a
module has changed since it was wrapped.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.nn import SyncBatchNorm
from torch.nn.parameter import UninitializedParameter

from syncline._torch.modules import IGNORED_BY_DDP, as_mapping
from syncline.checks import checked_kind


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The tensors of a module that are synchronized, each with its name.

    A tensor that the module uses in several places is listed once, under its first name.
    """

    parameters: tuple[tuple[str, nn.Parameter], ...]
    """All parameters that are kept equal on all ranks, including those that are not trained."""
    trained: tuple[tuple[str, nn.Parameter], ...]
    """Parameters that require grad, without those in `delayed`."""
    delayed: tuple[tuple[str, nn.Parameter], ...]
    """Parameters whose gradients are reduced last, because of `delay_all_reduce_named_params`."""
    sparse: frozenset[str]
    """The names of those parameters in `trained` whose gradients are sparse."""
    buffers: tuple[tuple[str, Tensor], ...]
    """The buffers when the selection was made. They may be added, removed and replaced at any time."""
    ignored: tuple[str, ...]
    """Names of parameters and buffers that are not synchronized."""

    @property
    def reduced(self) -> tuple[tuple[str, nn.Parameter], ...]:
        """All parameters whose gradients are reduced: first those in `trained`, then those in `delayed`."""
        return (*self.trained, *self.delayed)


def select(
    module: nn.Module,
    *,
    ignore: Sequence[str] = (),
    delayed: Sequence[tuple[str, nn.Parameter]] = (),
    must_match: bool = True,
) -> Selection:
    """Select the tensors of a module that have to be synchronized.

    Args:
        module: the module to wrap.
        ignore: the names of parameters and buffers to leave out, or shell patterns for their names, such as `"head.*"`.
        delayed: the parameters whose gradients are reduced last, with their names.
        must_match: whether a pattern in `ignore` that matches no name is an error.

    Raises:
        TypeError: `module` is not a module, or `ignore` is not a list of names.
        ValueError: a pattern matches no name, the parameters are on several types of device, or the module uses torch's
            own SyncBatchNorm on CPU.
        RuntimeError: no parameter requires grad, or a tensor has no shape or no values yet.

    Examples:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        >>> chosen = select(net, ignore=["1.*"])
        >>> [name for name, _ in chosen.trained], len(chosen.ignored)
        (['0.weight', '0.bias'], 5)
    """
    checked_kind(
        "module",
        module,
        nn.Module,
        "a torch.nn.Module",
        hint=". Wrap the model itself, not its parameters, its output or its class",
    )
    all_parameters = dict(module.named_parameters())
    all_buffers = dict(module.named_buffers())
    ignored = _ignored(module, ignore, [*all_parameters, *all_buffers], must_match=must_match)
    taking_part = [(name, p) for name, p in all_parameters.items() if name not in ignored]
    _check_initialised(module, [name for name, p in taking_part if isinstance(p, UninitializedParameter)])
    is_delayed = {id(parameter) for _, parameter in delayed}
    trained = [(name, p) for name, p in taking_part if p.requires_grad and id(p) not in is_delayed]
    if not trained and not delayed:
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameters that require a "
            f"gradient: {type(module).__name__} has no trainable parameters{' outside of ignore=' if ignored else ''}, "
            "so it needs no wrapper. sl.broadcast_(module) makes its replicas equal"
        )
    buffers = [(name, b) for name, b in all_buffers.items() if name not in ignored]
    _check_devices(module, taking_part, buffers)
    return Selection(
        parameters=tuple(taking_part),
        trained=tuple(trained),
        delayed=tuple((name, p) for name, p in taking_part if id(p) in is_delayed),
        sparse=_sparse(module, trained),
        buffers=tuple(buffers),
        ignored=tuple(sorted(ignored)),
    )


def checked_delayed(named: Any, trigger: nn.Parameter | None) -> Sequence[tuple[str, nn.Parameter]]:
    """Check the two arguments about delayed gradients by torch's rules, and return the delayed parameters.

    Args:
        named: the argument `delay_all_reduce_named_params`.
        trigger: the argument `param_to_hook_all_reduce`.

    Returns:
        The delayed parameters with their names; empty if both arguments are None.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: only one of the two arguments is given.
    """
    if (named is None) != (trigger is None):
        raise ValueError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time, but only one "
            "of them was given. Give both arguments or neither"
        )
    if named is None:
        return ()
    checked_kind("param_to_hook_all_reduce", trigger, Tensor, "a parameter")
    pairs: list[Any] = list(named) if isinstance(named, Iterable) and not isinstance(named, str) else [None]
    if not all(
        isinstance(pair, Sequence) and [isinstance(pair[0], str), len(pair)] == [True, 2] for pair in pairs
    ):
        raise TypeError(
            f"expected delay_all_reduce_named_params to be a list of pairs (name, parameter); got {named!r}"
        )
    return pairs


def _ignored(
    module: nn.Module, patterns: Sequence[str], names: Sequence[str], *, must_match: bool
) -> set[str]:
    is_list = isinstance(patterns, Collection) and not isinstance(patterns, str)
    if not is_list or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"expected ignore to be a list of names or shell patterns; got {patterns!r}")
    ignored = set(getattr(module, IGNORED_BY_DDP, ()))  # set by torch's private function of that name
    for pattern in patterns:
        matching = {name for name in names if fnmatchcase(name, pattern)}
        if not matching and must_match:
            raise ValueError(
                f"expected each pattern in ignore to match a parameter or buffer of {type(module).__name__}; got "
                f"{pattern!r}, which matches none of {', '.join(names[:6])}{', ...' if len(names) > 6 else ''}"
            )
        ignored |= matching
    return ignored


def _check_initialised(module: nn.Module, lazy: Sequence[str]) -> None:
    if lazy:
        raise RuntimeError(
            f"{type(module).__name__} has lazy parameters without a shape: {', '.join(lazy[:5])}. Modules with "
            "uninitialized parameters can't be used with `DistributedDataParallel`. Run one forward with a real "
            "batch, then wrap the module"
        )


def _check_devices(
    module: nn.Module, parameters: Sequence[tuple[str, Tensor]], buffers: Sequence[tuple[str, Tensor]]
) -> None:
    kinds = {device.type for device in {parameter.device for _, parameter in parameters}}
    if len(kinds) > 1:
        first_on = {parameter.device.type: name for name, parameter in reversed(parameters)}
        where = ", ".join(f"{name} on {kind}" for kind, name in sorted(first_on.items()))
        raise ValueError(
            "DistributedDataParallel's input module must be on the same type of devices, but the parameters of "
            f"{type(module).__name__} are on several types: {where}. Move all parameters to one type of device, or "
            "name some of them in ignore="
        )
    empty = [name for name, tensor in (*parameters, *buffers) if tensor.is_meta]
    if empty:
        raise RuntimeError(
            f"{type(module).__name__} has tensors on the meta device, which have no values: {', '.join(empty[:5])}. "
            "Call module.to_empty(device=...), then initialize or load the module, then wrap it"
        )
    if "cpu" not in kinds:
        return
    for path, submodule in module.named_modules():
        # A subclass with its own forward, such as sl.nn.SyncBatchNorm, may support the CPU.
        if isinstance(submodule, SyncBatchNorm) and type(submodule).forward is SyncBatchNorm.forward:
            raise ValueError(
                f"torch's SyncBatchNorm layers only work with GPU modules, but {path or 'this module'} is on CPU. "
                "Use layers of sl.nn.SyncBatchNorm, which run on every device. "
                "sl.nn.SyncBatchNorm.convert_sync_batchnorm(module) makes this change"
            )


def _sparse(module: nn.Module, trained: Sequence[tuple[str, nn.Parameter]]) -> frozenset[str]:
    weights = {
        id(submodule.weight)
        for submodule in module.modules()
        if isinstance(submodule, nn.Embedding | nn.EmbeddingBag) and submodule.sparse
    }
    return frozenset(name for name, parameter in trained if id(parameter) in weights)


_requires_grad = operator.attrgetter("requires_grad")

_submodules = operator.attrgetter("_modules")

_values = operator.methodcaller("values")


class Inventory:
    """A record of the submodules and of the parameters that a module has at construction.

    `has_changed` compares the module with this record. It runs in each forward, and takes 30 us for 250 submodules with
    500 parameters, and 3 us for a small net. Buffers are not recorded, because buffers are compared when they are sent.

    Args:
        module: the module to record.

    Examples:
        >>> net = nn.Sequential(nn.Linear(2, 2))
        >>> inventory = Inventory(net)
        >>> inventory.has_changed()
        False
        >>> net.append(nn.Linear(2, 2)) and inventory.has_changed()
        True
    """

    def __init__(self, module: nn.Module) -> None:
        self._tables = [
            as_mapping(table)
            for submodule in module.modules()
            for table in (submodule._parameters, submodule._modules)
        ]
        # Containers replace this table when a layer is deleted. A ScriptModule creates a new table in each access.
        self._parents = [m for m in module.modules() if m._modules and m._modules is m._modules]
        self._children = list(map(_submodules, self._parents))
        self._num_entries = sum(map(len, self._tables))
        self._filled = [table for table in self._tables if table]
        self._members = list(chain.from_iterable(map(_values, self._filled)))
        self._frozen = [
            member
            for member in self._members
            if isinstance(member, nn.Parameter) and not member.requires_grad
        ]

    def has_changed(self) -> bool:
        """Return whether the module has changed since this record was made.

        A module has changed if a submodule or parameter was added, removed or replaced, or if a frozen parameter now
        requires grad.
        """
        return (
            sum(map(len, self._tables)) != self._num_entries
            or not all(map(operator.is_, chain.from_iterable(map(_values, self._filled)), self._members))
            or not all(map(operator.is_, map(_submodules, self._parents), self._children))
            or any(map(_requires_grad, self._frozen))
        )
