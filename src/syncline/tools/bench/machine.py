"""Functions that describe the machine on which a benchmark runs."""

from __future__ import annotations

import contextlib
import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import syncline
from syncline.environment import num_cores


def total_memory_bytes() -> int:
    """Return the total size of this host's physical memory, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def describe_machine() -> dict[str, Any]:
    """Return the hardware and the load of this machine and the versions of its software, as a dict for JSON."""
    return {
        "cpu": _cpu_model(),
        "architecture": platform.machine(),
        "num_cores": num_cores(),
        "load": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "torch": metadata.version("torch"),
        "python": platform.python_version(),
        "syncline": syncline.__version__,
    }


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            return found[1]
    return platform.processor() or "an unnamed CPU"
