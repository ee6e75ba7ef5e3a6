"""Read a file that `torch.save` wrote, without running code from the file."""

from __future__ import annotations

import contextlib
import warnings
import zipfile
from typing import Any

import torch

from syncline.regular_files import open_regular

_MAX_SHOWN = 5


def read_torch_file(path: str) -> Any:
    """Load a file that `torch.save` wrote, and return its content.

    The tensors are on the CPU. They are mapped into memory, if the file is as `torch.save` writes it since torch 1.6.

    Raises:
        ValueError: `torch.save` does not write such a file, or the file has objects that could be created only by
            running code from the file. The message lists the types of these objects.
        OSError: the file could not be read.
    """
    file, size = open_regular(path)
    with file:
        is_zip = size > 0 and zipfile.is_zipfile(file)
    if not size:  # also a file of the kernel, in which torch.load could wait for ever
        raise ValueError(f"{path} cannot be read as a file that torch.save wrote: it is empty")
    try:
        maps = is_zip and _is_stored(path)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning)  # about old types of torch itself
            return torch.load(path, map_location="cpu", weights_only=True, mmap=maps or None)
    except OSError:
        raise
    except Exception as error:
        refused: list[str] = []
        with contextlib.suppress(Exception):  # the file is refused in any case
            refused = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path)) if is_zip else []
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


def _is_stored(path: str) -> bool:
    """Return whether no entry of an archive is compressed. torch.load would map the compressed bytes as tensors."""
    with zipfile.ZipFile(path) as archive:
        return all(entry.compress_type == zipfile.ZIP_STORED for entry in archive.infolist())
