"""Where the native core lies, if this installation has one."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

__all__ = ["find_library"]

_NAME = "libsyncline_core.so"


def find_library() -> Path | None:
    """The compiled native core, or None where the package was installed without it.

    A wheel puts the library beside this file. An editable install leaves this file in the source tree and puts the
    library into site-packages, where the installed distribution's list of files names it.
    """
    beside = Path(__file__).with_name(_NAME)
    if beside.is_file():
        return beside
    try:
        installed = files("syncline") or []
    except PackageNotFoundError:  # run from the sources, never installed
        return None
    for file in installed:
        if file.name == _NAME:
            found = Path(str(file.locate()))
            return found if found.is_file() else None
    return None
