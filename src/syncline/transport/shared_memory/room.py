"""How much memory there still is: of the machine, and under the limits of the control groups this process is in.

Who goes beyond a control group's limit is killed, without a word. A scheduler's limit may be on any group between this
process and the root: all of them are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["available_bytes"]

_PROCESS = Path("/proc/self/cgroup")
_MACHINE = Path("/proc/meminfo")
_ROOT = Path("/sys/fs/cgroup")
_PAGES_OF_FILES = ("active_file", "inactive_file")


class _Files(NamedTuple):
    """What one version of control groups calls limit and use, and how the parts of the use begin."""

    limit: str
    used: str
    prefix: str


_VERSION_1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
_VERSION_2 = _Files("memory.max", "memory.current", "")


def available_bytes() -> int | None:
    """Memory that this process can get without swapping; None where the system does not say.

    Example:
        >>> available_bytes() != 0
        True
    """
    found = [_free_bytes(directory, files) for directory, files in _control_groups()]
    found.append(_free_bytes_of_machine())
    return min((num_bytes for num_bytes in found if num_bytes is not None), default=None)


def _free_bytes_of_machine() -> int | None:
    try:
        fields = dict(line.split(":", 1) for line in _MACHINE.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _control_groups() -> Iterator[tuple[Path, _Files]]:
    """The groups that limit this process's memory, from its own to the root."""
    try:
        lines = _PROCESS.read_text().splitlines()
    except OSError:
        lines = []
    found = {_VERSION_1: "/", _VERSION_2: "/"}  # in a container, the root is its own group
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found[_VERSION_2] = path
        elif "memory" in controllers.split(","):
            found[_VERSION_1] = path
    for files, path in found.items():
        for root in (_ROOT / "memory",) if files is _VERSION_1 else (_ROOT, _ROOT / "unified"):
            own = root / path.lstrip("/")
            for directory in (own, *own.parents):
                yield directory, files
                if directory == root:
                    break


def _free_bytes(directory: Path, files: _Files) -> int | None:
    try:
        free = int((directory / files.limit).read_text()) - int((directory / files.used).read_text())
        parts = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None  # no such group here, or "max"
    # Pages of files count as used, but are given up when memory is needed.
    return free + sum(int(parts.get(files.prefix + name, 0)) for name in _PAGES_OF_FILES)
