"""What a module consists of, to notice at little cost that it has changed since it was wrapped."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from itertools import chain
from typing import Any

from torch import nn

__all__ = ["Inventory"]

_requires_grad = operator.attrgetter("requires_grad")


class Inventory:
    """Remembers a module's submodules and parameters, and how many buffers there are.

    Asked in each forward: 30 us for 250 submodules with 500 parameters, 3 us for a small net. Buffers may be
    replaced by assignment (some modules do so in each forward), so only their number is looked at.

    Args:
        module: which.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 2))
        >>> inventory = Inventory(net)
        >>> inventory.has_changed()
        False
        >>> net.append(nn.Linear(2, 2)) and inventory.has_changed()
        True
    """

    def __init__(self, module: nn.Module) -> None:
        submodules = list(module.modules())
        self._tables = [
            table
            for submodule in submodules
            for table in (submodule._parameters, submodule._modules, submodule._buffers)
        ]
        self._num_entries = sum(map(len, self._tables))
        self._compared: list[dict[str, Any]] = [
            table
            for submodule in submodules
            for table in (submodule._parameters, submodule._modules)
            if table
        ]
        self._members = list(self._current())
        self._frozen = [
            member
            for member in self._members
            if isinstance(member, nn.Parameter) and not member.requires_grad
        ]

    def has_changed(self) -> bool:
        """Whether something was added, removed, replaced or unfrozen."""
        return (
            sum(map(len, self._tables)) != self._num_entries
            or not all(map(operator.is_, self._current(), self._members))
            or any(map(_requires_grad, self._frozen))
        )

    def _current(self) -> Iterator[object]:
        return chain.from_iterable(map(dict.values, self._compared))
