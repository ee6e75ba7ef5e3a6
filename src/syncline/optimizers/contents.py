"""Functions that read the contents of an optimizer: its parameters, state and settings.

`OptimizerNumbers` converts the Python numbers of the state and settings to tensors, which can be sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from syncline.checks import what_it_is
from syncline.trees import leaves, map_leaves
from syncline.user_code import calling


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of all parameter groups of an optimizer, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def optimizer_leaves(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of an optimizer's state and settings with their paths.

    Examples of paths are `param_groups[0].lr` and `state[3].exp_avg`. Here 3 is the index of the parameter among the
    parameters of all groups.
    """
    for path, node in _nodes(optimizer):
        yield from leaves(node, path)


def keep_saved_types(state: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Give one parameter's loaded optimizer state the dtypes in which it was saved.

    Args:
        state: the loaded state, in which torch has converted floating-point tensors to the parameter's dtype. It is
            changed in place.
        saved: the saved state.
    """
    for name, value in saved.items():
        now = state.get(name)
        if type(value) is not Tensor or type(now) is not Tensor or value.dtype == now.dtype:
            continue
        if value.is_floating_point() and value.shape == now.shape:
            state[name] = torch.empty_like(now, dtype=value.dtype).copy_(value)


def _nodes(optimizer: Optimizer) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each parameter's state and each parameter group (without its parameters), with their paths."""
    for index, parameter in enumerate(parameters_of(optimizer)):
        # `state` is a defaultdict: looking up a parameter without state would add an entry.
        if parameter in optimizer.state:
            yield f"state[{index}]", optimizer.state[parameter]
    for index, group in enumerate(optimizer.param_groups):
        yield f"param_groups[{index}]", {key: value for key, value in group.items() if key != "params"}


class OptimizerNumbers:
    """The integers and floats of an optimizer as two tensors, which can be broadcast and written back.

    Other settings (switches, names) are not in these tensors. They are part of the description `lines`, so that a
    difference between ranks is reported before anything is sent.

    Args:
        optimizer: the optimizer.
        settings: whether the tensors contain the numbers of the parameter groups, too. Otherwise these numbers do not
            change, and their values are part of the description.

    Examples:
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        >>> numbers = OptimizerNumbers(optimizer)
        >>> _ = numbers.tensors[1].fill_(0.5)
        >>> numbers.write_back()
        >>> optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["nesterov"]
        (0.5, False)
    """

    def __init__(self, optimizer: Optimizer, *, settings: bool = True) -> None:
        self._optimizer = optimizer
        found = list(optimizer_leaves(optimizer))
        sent = [(path, leaf) for path, leaf in found if settings or not is_setting(path)]
        self._integers = {path: leaf for path, leaf in sent if _is_integer(leaf)}
        self._floats = {path: leaf for path, leaf in sent if isinstance(leaf, float)}
        self.tensors: tuple[Tensor, Tensor] = (
            torch.tensor(list(self._integers.values()), dtype=torch.int64, device="cpu"),
            torch.tensor(list(self._floats.values()), dtype=torch.float64, device="cpu"),
        )
        """The tensors to send: the integers as int64 and the floats as float64, on the CPU."""
        self.lines: list[str] = [
            f"{path}  {_described(leaf) if settings or not is_setting(path) else _valued(leaf)}"
            for path, leaf in found
            if not isinstance(leaf, Tensor) or (not settings and is_setting(path))
        ]
        """A description of the contents, which must be equal on all ranks. Ranks compare it by `agree`."""
        for index, group in enumerate(optimizer.param_groups):
            self.lines.append(f"param_groups[{index}].params  {len(group['params'])} tensors")

    def write_back(self) -> None:
        """Write the values of `tensors` into the optimizer's state and settings."""
        received: dict[str, Any] = {}
        for numbers, tensor in zip((self._integers, self._floats), self.tensors, strict=True):
            received.update(zip(numbers, tensor.tolist(), strict=True))
        groups = {f"param_groups[{index}]": group for index, group in enumerate(self._optimizer.param_groups)}
        for path, node in _nodes(self._optimizer):
            new = map_leaves(node, lambda path, leaf: received.get(path, leaf), path)
            # The node of a group is a copy without its parameters, so write into the group itself.
            groups.get(path, node).update(new)


def is_setting(path: str) -> bool:
    """Return whether a path of `optimizer_leaves` belongs to a parameter group. Otherwise it belongs to the state."""
    return path.startswith("param_groups[")


def _is_integer(leaf: Any) -> bool:
    return isinstance(leaf, int) and not isinstance(leaf, bool)


def _described(leaf: Any) -> str:
    if _is_integer(leaf) or isinstance(leaf, float):
        return "an integer" if _is_integer(leaf) else "a float"
    return repr(leaf) if isinstance(leaf, bool | str | None) else type(leaf).__name__


def _valued(leaf: Any) -> str:
    """Return a setting as text. Ranks compare the texts in place of the values.

    If a value is a tensor, number, string, bool or None, its text shows the value. The text of any other value is only
    the name of its type.
    """
    if isinstance(leaf, Tensor):
        return f"{leaf.dtype} {leaf.tolist()}"
    if isinstance(leaf, float):
        return repr(float(leaf))  # because the repr of numpy's floats differs
    return repr(leaf) if isinstance(leaf, int | str | None) else type(leaf).__name__


def floating_state(optimizer: Optimizer) -> list[tuple[str, Tensor]]:
    """Return the floating-point tensors of an optimizer's state by name (momenta, for example).

    Step counts and other tensors without dimensions are left out.

    Examples:
        >>> import torch
        >>> parameter = torch.ones(2, requires_grad=True)
        >>> optimizer = torch.optim.AdamW([parameter])
        >>> parameter.sum().backward()
        >>> optimizer.step()
        >>> [name for name, _ in floating_state(optimizer)]
        ['state[0].exp_avg', 'state[0].exp_avg_sq']
    """
    return [
        (name, leaf)
        for name, leaf in optimizer_leaves(optimizer)
        if isinstance(leaf, Tensor)
        and name.startswith("state[")
        and not name.endswith(".step")
        and (leaf.is_floating_point() or leaf.is_complex())
        and leaf.dim()
    ]


def made_optimizer(
    call: str, make: Callable[[], object], parameters: Sequence[Tensor], *, hint: str = ""
) -> Optimizer:
    """Call a user's function that creates an optimizer, check the optimizer, and return it.

    Args:
        call: the call of the user's function as text for messages, such as "outer(parameters)".
        make: a function without arguments that calls the user's function.
        parameters: the parameters that the user's function gets.
        hint: a text that is appended to the error message about wrong parameters.

    Raises:
        TypeError: the function does not return an optimizer.
        ValueError: the optimizer's parameters are not exactly `parameters`.
    """
    with calling(call):
        optimizer = make()
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"expected {call} to return a torch.optim.Optimizer of these parameters, got {what_it_is(optimizer)}"
        )
    expected = {id(parameter) for parameter in parameters}
    found = {id(parameter) for parameter in parameters_of(optimizer)}
    if found != expected:
        raise ValueError(
            f"expected {call} to return an optimizer of exactly the {len(expected)} parameters that it was given, got "
            f"a {type(optimizer).__name__} with {len(found & expected)} of them and {len(found - expected)} others"
            f"{hint}"
        )
    return optimizer
