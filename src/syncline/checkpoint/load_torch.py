"""Load a file of `torch.save` into a `TrainState`, and report the entries that do not match.

No code from the file is run.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import re
import warnings
import zipfile
from collections.abc import Collection, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.optim import Optimizer

from syncline._torch.modules import COMPILED_PREFIX, EXTRA_STATE
from syncline.checkpoint.objects import copies, load_into, saved_types, unwrapped
from syncline.checkpoint.rollback import Loadable
from syncline.checks import did_you_mean
from syncline.user_code import calling
from syncline.words import format_names

Key = str | int | Sequence[str | int]
"""The place of an object in a file: a key, or a sequence of keys that leads to a nested object."""

_PREFIXES = re.compile(rf"(?:module\.|{re.escape(COMPILED_PREFIX)})*")
"""A pattern for the prefixes that DistributedDataParallel and torch.compile add to parameter names."""

_MAX_SHOWN = 5
"""The number of types that the error about a file shows."""


def checked_names(names: object, besides: object) -> tuple[dict[str, Key | None], list[str]]:
    """Check `names` and `besides`, and return them as a dict and a list.

    Raises:
        TypeError: an argument has a wrong type.
    """
    names = {} if names is None else names
    if not isinstance(names, Mapping) or not all(isinstance(name, str) for name in names):
        raise TypeError(
            "expected names to map names of this state to keys of the file, such as "
            f'{{"model": "net"}}, got {names!r}'
        )
    for name, key in names.items():
        keys = [key] if key is None or isinstance(key, str | int) else key
        if not isinstance(keys, Sequence) or not all(isinstance(one, str | int | None) for one in keys):
            raise TypeError(
                f"expected names[{name!r}] to be a key of the file, a tuple of keys, or None; got {key!r}"
            )
    besides = [besides] if isinstance(besides, str) else besides
    if not isinstance(besides, Collection) or not all(isinstance(key, str) for key in besides):
        raise TypeError(
            f'expected besides to be a list of keys of the file, such as ["epoch"], got {besides!r}'
        )
    return dict(names), list(besides)


@dataclass
class Matched:
    """The result of matching the entries of a file with the names of a state."""

    found: dict[str, Any] = field(default_factory=dict)
    """The entries of the file that match a name of the state, by that name."""
    rest: dict[str, Any] = field(default_factory=dict)
    """The entries of the file that match no name, by key."""
    missing: list[str] = field(default_factory=list)
    """The names and the requested keys for which the file has no entry; also names within the state of a module."""
    unused: list[str] = field(default_factory=list)
    """The keys of entries that were neither loaded nor requested; also keys within the state of a module."""

    def left(self) -> list[str]:
        """Return lines of text that list `missing` and `unused`."""
        kinds = {"not in the file": self.missing, "in the file, and not used": self.unused}
        return [f"{kind}: {', '.join(keys)}" for kind, keys in kinds.items() if keys]

    def check_complete(self, path: str) -> None:
        """Raise a ValueError about the file at `path` if `missing` or `unused` is not empty."""
        if not self.missing and not self.unused:
            return
        remedies = []
        if self.missing:
            name, key = next(
                ((name, key) for name in self.missing for key in self.unused if name in key or key in name),
                (self.missing[0], "..."),
            )
            remedies.append(
                f'Give the key of {name} in the file, names={{"{name}": "{key}"}}, or leave {name} unchanged, '
                f'names={{"{name}": None}}.'
            )
        if self.unused:
            remedies.append(
                f'Give besides=["{self.unused[0]}"] to get an unused entry as part of the result.'
            )
        remedies.append("Give strict=False to load only the entries that match.")
        mismatches = "\n  ".join([f"{path} does not match the named objects:", *self.left()])
        raise ValueError(f"{mismatches}\n{' '.join(remedies)}")


def match(
    content: Any, named: Mapping[str, Any], *, names: Mapping[str, Key | None], besides: Collection[str] = ()
) -> Matched:
    """Match the entries of a file with the names of a state.

    Args:
        content: the content of the file.
        named: the objects of the state, by name.
        names: a dict from names of the state to keys of the file, for objects whose key is not their name. A key of
            None means that the object is not in the file.
        besides: further keys of the file, whose entries the caller wants.

    Raises:
        ValueError: `content` is not a dict, or `names` has a name that the state does not have.

    Examples:
        >>> import torch
        >>> named = {"model": torch.nn.Linear(1, 1, bias=False), "optimizer": ...}
        >>> content = {"net": {"weight": torch.ones(1, 1)}, "epoch": 3}
        >>> matched = match(content, named, names={"model": "net"})
        >>> matched.found, matched.rest
        ({'model': {'weight': tensor([[1.]])}}, {'epoch': 3})
        >>> matched.left()
        ['not in the file: step, optimizer', 'in the file, and not used: epoch']
    """
    unknown = sorted(names.keys() - {"step", *named})
    if unknown:
        raise ValueError(
            f"expected each key of names= to be one of the names of this state ({', '.join(['step', *named])}), got "
            + ", ".join(unknown)
            + did_you_mean(unknown[0], ["step", *named])
        )
    if not isinstance(content, dict):
        raise ValueError(
            "expected the file to hold a dict of objects by name, or the state_dict() of one module; got a "
            + type(content).__name__
        )
    matched = Matched()
    modules = [name for name, one in named.items() if isinstance(one, nn.Module)]
    if len(modules) == 1 and modules[0] not in names and modules[0] not in content and _is_of_module(content):
        matched.found[modules[0]] = content
        matched.missing = [*(name for name in named if name not in (modules[0], *names)), *besides]
        return matched
    used: set[Any] = set()
    for name in ("step", *named):
        where = names.get(name, name)
        if where is None:
            continue
        keys = [where] if isinstance(where, str | int) else list(where)
        try:
            matched.found[name] = functools.reduce(operator.getitem, keys, content)
        except (KeyError, IndexError, TypeError):
            matched.missing.append(name)
        else:
            used.add(keys[0])
    matched.rest = {key: value for key, value in content.items() if key not in used}
    matched.unused = [str(key) for key in matched.rest if key not in besides]
    matched.missing += [key for key in besides if key not in matched.rest]
    return matched


def _is_of_module(content: Mapping[Any, Any]) -> bool:
    """Return whether `content` is the state of one module, as `module.state_dict()` returns it."""
    return bool(content) and all(
        isinstance(key, str) and (isinstance(value, Tensor) or key.endswith(EXTRA_STATE))
        for key, value in content.items()
    )


# ---------------------------------------------------------------------- load into the objects


def load_matched(state: Loadable, matched: Matched, path: str, *, strict: bool) -> dict[str, Any]:
    """Load the matched entries into `state`, and return the states that must now be equal on all ranks, by name."""
    loaded: dict[str, Any] = {}
    if "step" in matched.found:
        step = matched.found["step"]
        step = step.item() if isinstance(step, Tensor) and step.numel() == 1 else step
        if type(step) is not int or step < 0:
            raise ValueError(f"expected step in {path} to be an integer of at least 0, got {step!r}")
        matched.found["step"] = step
    into = {name: one for name, one in state.named.items() if name in matched.found}
    for name, one in into.items():
        if isinstance(one, nn.Module):
            into[name], matched.found[name] = _aligned(unwrapped(one), matched.found[name], name, path)
    types = saved_types(into, matched.found)
    for name, one in into.items():
        found = matched.found[name]
        if isinstance(one, nn.Module):
            try:
                keys = one.load_state_dict(found, strict=strict)
            except RuntimeError as error:
                raise ValueError(f"{name} of {path}: {error}") from error
            matched.missing += [f"{name}.{key}" for key in keys.missing_keys]
            matched.unused += [f"{name}.{key}" for key in keys.unexpected_keys]
            loaded[name] = {key: value for key, value in one.state_dict().items() if key in found}
            continue
        try:
            with calling(f"load_state_dict() of {name} ({type(one).__name__})"):
                # An object may keep references to the loaded state. A copy does not keep the mapped file open.
                load_into(one, found if copies(one) else deepcopy(found), types)
        except (KeyError, AttributeError, IndexError) as error:
            raise ValueError(
                f"{name} of {path} is not the state of a {type(one).__name__}: {type(error).__name__}: {error}"
            ) from error
        if isinstance(one, Optimizer) and not copies(one):
            loaded[name] = one.state_dict()
    state._resume_from_step(matched.found.get("step", state.step))
    return loaded


def _aligned(module: nn.Module, found: Any, name: str, path: str) -> tuple[nn.Module, dict[str, Any]]:
    """Return the part of `module` that has the entries of its state `found`, and `found` with the keys of this part.

    The part is `module` itself, unless the wrapper prefixes of their keys differ.

    Raises:
        ValueError: `found` is not the state of a module, or it has no entry of this module.
    """
    if not isinstance(found, dict):
        kind = type(found).__name__
        raise ValueError(f"expected {name} of {path} to be a dict from module.state_dict(), got a {kind}")
    there, here = _prefix(found), _prefix(module.state_dict())
    part, state = module, found
    if there != here:
        part, state = module.get_submodule(here.removesuffix(".")), copy(found)
        for wrapper in there.split(".")[:-1]:
            consume_prefix_in_state_dict_if_present(state, f"{wrapper}.")
    own = part.state_dict()
    if own and state.keys().isdisjoint(own):
        raise ValueError(
            f"{name} of {path} has no entry of this {type(module).__name__}: expected keys such as "
            f"{format_names(list(own), noun='keys')}, got {format_names([*map(str, state)], noun='keys') or 'nothing'}"
        )
    return part, state


def _prefix(keys: Collection[str]) -> str:
    """Return the wrapper prefixes with which all of these keys begin; "" if they have none in common."""
    common = os.path.commonprefix([str(key) for key in keys])  # noqa: RUF071  # these are strings, not paths
    found = _PREFIXES.match(common)
    return found[0] if found else ""


# ---------------------------------------------------------------------- read the file


def read_torch_file(path: str) -> Any:
    """Return the content of a file that `torch.save` wrote. No code from the file is run.

    The tensors are on the CPU. They are mapped into memory, if the file is as `torch.save` writes it since torch 1.6.

    Raises:
        ValueError: `torch.save` does not write such a file, or the file has objects that could be created only by
            running code from the file. The message lists the types of these objects.
        OSError: the file could not be read.
    """
    try:
        is_mapped = False
        with contextlib.suppress(zipfile.BadZipFile), zipfile.ZipFile(path) as archive:
            # torch.load would map compressed bytes as tensors.
            is_mapped = all(entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist())
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning)  # about old types of torch itself
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)
    except OSError:
        raise
    except Exception as error:
        refused: list[str] = []
        with contextlib.suppress(Exception):  # the file is refused in any case
            refused = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
        if refused:
            types = ascii(", ".join(refused[:_MAX_SHOWN]))[1:-1] + (", ..." if refused[_MAX_SHOWN:] else "")
            raise ValueError(
                f"{path} has objects other than tensors and plain values. Loading them could run code from the file. "
                f"Their types: {types}.\n"
                "Save the file without these objects: vars(args) instead of args, module.state_dict() instead of a "
                "module. If you trust the file, first allow their types with "
                "torch.serialization.add_safe_globals([...]). Or load the file once with "
                "torch.load(path, weights_only=False), and save only the entries that you need."
            ) from None
        reason = str(error).strip()
        reason = (reason.partition("WeightsUnpickler error: ")[2] or reason).partition("\n")[0]
        raise ValueError(
            f"{path} cannot be read as a file that torch.save wrote. The file may be incomplete, be of another kind, "
            "or contain objects that are not read (only tensors and plain values are, because weights_only=True). "
            f"torch.load raised {type(error).__name__}: {reason}"
        ) from error
