"""Read a file that `torch.save` wrote, without running code from the file."""

from __future__ import annotations

import io
import pickle
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch

from syncline.untrusted import open_regular

_MAX_SHOWN = 5


def read_torch_file(path: str) -> Any:
    """Load a file that `torch.save` wrote, and return its content.

    The tensors are on the CPU. If the format of the file allows it, they are mapped into memory.

    Raises:
        ValueError: `torch.save` does not write such a file, or the file has objects that could be created only by
            running code from the file. The message lists the keys and types of these objects.
        OSError: the file could not be read.
    """
    file, size = open_regular(path)
    with file:
        is_zip = size > 0 and zipfile.is_zipfile(file)
    if not size:  # also a file of the kernel, in which torch.load could wait for ever
        raise ValueError(f"{path} cannot be read as a file that torch.save wrote: it is empty")
    try:
        if is_zip:
            _check_is_stored(path, size)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning)  # about old types of torch itself
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip or None)
        _check_is_bounded(found)
        return found
    except OSError:
        raise
    except Exception as error:
        refused = _refused_types(path) if is_zip else []
        if not refused:
            reason = next(iter(str(error).strip().splitlines()), "")
            if isinstance(error, pickle.UnpicklingError):
                reason = str(error).partition("WeightsUnpickler error: ")[2].partition("\n")[0] or reason
            raise ValueError(
                f"{path} cannot be read as a file that torch.save wrote. The file may be incomplete, be of "
                "another kind, or contain objects that are not read (only tensors and plain values are, because "
                "weights_only=True). torch.load raised "
                f"{type(error).__name__}: {reason}"
            ) from error
        places = [f"  {place}" for place in refused[:_MAX_SHOWN]]
        if len(refused) > _MAX_SHOWN:
            places.append(f"  and {len(refused) - _MAX_SHOWN} more")
        problem = f"{path} has objects other than tensors and plain values. Loading them could run code from the file:"
        remedy = (
            "Save the file without these objects: vars(args) instead of args, module.state_dict() instead of a module. "
            "If you trust the file, first allow their types with torch.serialization.add_safe_globals([...]). Or load "
            "the file once with torch.load(path, weights_only=False), and save only the entries that you need."
        )
        raise ValueError("\n".join([problem, *places, remedy])) from None


# ---------------------------------------------------------------------- files that expand


_MAX_VALUES = 100_000_000
"""The largest number of values in a file. A list that is in several lists counts once for each of them."""


def _check_is_stored(path: str, num_bytes: int) -> None:
    """Raise a ValueError if the entries of an archive take more bytes than the archive. torch.save compresses none."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    if any(one.compress_type for one in entries) or sum(one.file_size for one in entries) > num_bytes:
        raise ValueError("its entries are compressed, or take the same bytes")


def _check_is_bounded(content: Any) -> None:
    """Raise a ValueError if a value contains itself, or if containers that repeat each other expand without bound."""
    sizes: dict[int, int | None] = {}

    def size_of(value: Any) -> int:
        if not isinstance(value, list | tuple | set | dict):
            return 1
        if id(value) not in sizes:
            sizes[id(value)] = None
            inner = chain(value, value.values()) if isinstance(value, dict) else value
            sizes[id(value)] = 1 + sum(map(size_of, inner))
        found = sizes[id(value)]
        if found is None or found > _MAX_VALUES:
            raise ValueError("its containers contain themselves, or repeat each other too often")
        return found

    size_of(content)


# ---------------------------------------------------------------------- the refused objects and their places


def _refused_types(path: str) -> list[str]:
    """Return a line for each refused object, with its place in the file and its type.

    Returns an empty list if the objects cannot be found.
    """
    try:
        refused = set(torch.serialization.get_unsafe_globals_in_checkpoint(path))
        with zipfile.ZipFile(path) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            content = _Shapes(io.BytesIO(archive.read(name))).load()
        _check_is_bounded(content)
    except Exception:  # the file is refused in any case, and the places are only a detail
        return []
    places = list(dict.fromkeys(_places(content, refused, "")))
    unplaced = refused - {place.rpartition(" is a ")[2] for place in places}
    return [*places, *(f"somewhere in the file is a {kind}" for kind in sorted(unplaced))]


class _Inert:
    """A placeholder for an object in a pickle. Its methods do nothing."""

    kind = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        pass

    extend = add = update = append


class _Shapes(pickle.Unpickler):
    """An unpickler that creates only plain containers and placeholders. It runs no code that the file names."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        return type(name, (_Inert,), {"kind": f"{module}.{name}"})

    def persistent_load(self, pid: Any) -> Any:
        return _Inert()


def _places(value: Any, refused: set[str], place: str) -> Iterator[str]:
    if isinstance(value, list | tuple | set):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _places(one, refused, f"{place}.{key}" if place else str(key))
    elif _kind_of(value) in refused:
        yield f"{place or 'the whole content'} is a {_kind_of(value)}"


def _kind_of(value: Any) -> str:
    """Return the name of the type that a placeholder (an instance or a class) stands for; "" for any other value."""
    kind = value if isinstance(value, type) else type(value)
    return kind.kind if issubclass(kind, _Inert) else ""
