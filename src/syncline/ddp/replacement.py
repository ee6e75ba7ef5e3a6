"""The replacement of torch's class by ours, for code that names torch's class and cannot be edited."""

from __future__ import annotations

import sys
from types import ModuleType, TracebackType
from typing import Self

from torch import nn

from syncline.ddp.wrapper import DistributedDataParallel

_TORCHS = nn.parallel.DistributedDataParallel


class Replacement:
    """A replacement of torch's class that is in force until `undo` is called, or until the end of a `with` block."""

    def __init__(self) -> None:
        self._replaced: list[tuple[ModuleType, str]] = []
        package = __name__.partition(".")[0]
        for name, module in list(sys.modules.items()):
            if (
                isinstance(module, ModuleType)
                and name.partition(".")[0] != package
                and not _has_subclass(module)
            ):
                self._replaced += [(module, key) for key, one in list(vars(module).items()) if one is _TORCHS]
        for module, key in self._replaced:
            setattr(module, key, DistributedDataParallel)

    def undo(self) -> None:
        """Let the names refer to torch's class again."""
        for module, key in self._replaced:
            if vars(module).get(key) is DistributedDataParallel:
                setattr(module, key, _TORCHS)
        self._replaced.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.undo()


def _has_subclass(module: ModuleType) -> bool:
    """Return whether a module, not of torch, defines a subclass of torch's class, whose methods may name the base."""
    return not module.__name__.startswith("torch.") and any(
        issubclass(type(one), type)  # `isinstance` would warn of deprecated objects of torch
        and issubclass(one, _TORCHS)
        and one is not _TORCHS
        and not issubclass(one, DistributedDataParallel)
        and one.__module__ == module.__name__
        for one in list(vars(module).values())
    )


def replace_torch_ddp() -> Replacement:
    """Let `torch.nn.parallel.DistributedDataParallel` be `sl.DistributedDataParallel` in all modules.

    This is for frameworks and programs that you cannot edit: they import torch's class by name, or ask for it by
    `type(model) is DistributedDataParallel`. The name is replaced in torch, and in each module that has imported the
    class by now. Modules that import the class later get ours from torch. Existing wrappers stay as they are. So do
    modules that have defined a subclass of torch's class already: call this function before you import them.

    Returns:
        An object whose `undo` lets all replaced names refer to torch's class again. It is also a context manager, which
        does that at the end of the block. Modules that were imported in between keep ours.

    Examples:
        >>> import torch, syncline as sl
        >>> with sl.replace_torch_ddp():
        ...     ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        >>> type(ddp) is sl.DistributedDataParallel, type(ddp) is torch.nn.parallel.DistributedDataParallel
        (True, False)
    """
    return Replacement()
