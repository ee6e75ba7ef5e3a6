"""The hooks that a program registers with `register_post_accumulate_grad_hook` on parameters of a wrapper.

torch runs such a hook as soon as the gradient of this rank is in `.grad`. Programs use them to step an optimizer and to
drop the gradient at once, so the hook must not run before the ranks have averaged the gradient. In a backward that is
reduced, the program's hooks therefore run at its end, when `.grad` holds the mean. Of several wrappers that reduce the
same parameter, the last one runs them. In other backwards they run at once.

torch keeps the hooks of a parameter in a dictionary. `HookTable` takes its place. In it the hooks of wrappers come
before those of the program, because the first hook of a gradient begins the backward.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

from torch import Tensor

from syncline._torch.autograd import contents_of, post_accumulate_hooks, set_post_accumulate_hooks

Hook: TypeAlias = Callable[[Tensor], object]


class Deferring(Protocol):
    """The part of a wrapper that keeps calls of the program's hooks until the wrapper has averaged the gradients."""

    deferred: dict[tuple[UserHook, int], Tensor]
    """The calls that wait, by the hook and the `id` of the parameter."""

    def defers(self, hook: UserHook, parameter: Tensor) -> bool:
        """Keep a call of a hook for later. Return False if the hook must run now."""


class UserHook:
    """A hook of the program.

    Args:
        hook: the program's function.
        deferring: what keeps calls for the wrappers that have the parameter.
        key: the key of the hook.
        source: the dictionary to which the program's handle of the hook refers, if this is no `HookTable`. The program
            removes the hook there.
    """

    __slots__ = ("_deferring", "_hook", "_key", "_source")

    def __init__(
        self, hook: Hook, deferring: list[Deferring], key: int = 0, source: Mapping[int, Hook] | None = None
    ) -> None:
        self._hook, self._deferring, self._key, self._source = hook, deferring, key, source

    def __call__(self, parameter: Tensor) -> None:
        # A list, because each of the wrappers has to keep the call.
        if True not in [one.defers(self, parameter) for one in self._deferring]:
            self._run(parameter)

    @property
    def is_removed(self) -> bool:
        """Whether the program has removed the hook."""
        return self._source is not None and self._key not in self._source

    def run_deferred(self, parameter: Tensor) -> None:
        """Run the hook, unless another wrapper that is still to average keeps the call, too."""
        if not any((self, id(parameter)) in one.deferred for one in self._deferring):
            self._run(parameter)

    def _run(self, parameter: Tensor) -> None:
        if not self.is_removed:
            self._hook(parameter)


class HookTable(OrderedDict[int, Hook]):
    """The hooks of one parameter, by the keys of their handles. It wraps each hook that a program adds."""

    def __init__(self) -> None:
        super().__init__()
        self.deferring: list[Deferring] = []
        """The objects that defer calls of the program's hooks, one for each wrapper that has the parameter."""
        self.contents = 0
        """The contents of the parameter whose gradients call the hooks; see `contents_of`."""

    def __setitem__(self, key: int, hook: Hook) -> None:
        super().__setitem__(key, hook if isinstance(hook, UserHook) else UserHook(hook, self.deferring))

    def add(self, key: int, hook: Hook, deferring: Deferring) -> None:
        """Add the hook of a wrapper before all hooks of the program."""
        self.deferring.append(deferring)
        self._insert(key, hook, before=UserHook)

    def add_first(self, key: int, hook: Hook) -> None:
        """Add the hook of a wrapper that does not reduce the parameter yet, before all other hooks."""
        self._insert(key, hook, before=object)

    def _insert(self, key: int, hook: Hook, *, before: type) -> None:
        # torch calls hooks in the order in which they came into the dictionary.
        later = {of: self.pop(of) for of, found in tuple(self.items()) if isinstance(found, before)}
        super().__setitem__(key, hook)
        for of, found in later.items():
            super().__setitem__(of, found)

    def drop(self, key: int, deferring: Deferring | None = None) -> None:
        """Remove the hook of a wrapper, and hooks that the program has removed."""
        removed = [of for of, hook in self.items() if isinstance(hook, UserHook) and hook.is_removed]
        for one in (key, *removed):
            self.pop(one, None)
        if deferring in self.deferring:
            self.deferring.remove(deferring)


def table_of(parameter: Tensor) -> HookTable:
    """Return the table of hooks of a parameter, which replaces torch's dictionary if there is one.

    torch is given the table in any case. After the contents of a tensor were swapped (`torch.utils.swap_tensors`), it
    has the dictionary, but no longer calls the hooks in it.
    """
    found = post_accumulate_hooks(parameter)
    table = found
    if not isinstance(table, HookTable):
        table = HookTable()
        for key, hook in (found or {}).items():
            table[key] = UserHook(hook, table.deferring, key, found)
    set_post_accumulate_hooks(parameter, table)
    (table.contents,) = contents_of([parameter])
    return table
