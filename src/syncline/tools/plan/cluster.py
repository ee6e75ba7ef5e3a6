"""The cluster on which a job runs: hosts, ranks, cores, memory and the link between hosts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Engine = Literal["shm", "gloo", "nccl"]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The hosts of a job. All hosts are alike."""

    hosts: int = 1
    ranks_per_host: int = 1
    cores_per_host: int
    threads_per_rank: int = 1
    link_bytes_per_second: float | None = None
    """The bandwidth of a host's link in each direction. None on one host."""
    latency_seconds: float = 50e-6
    """How long the shortest message takes from a host to another one."""
    memory_bytes: int | None = None
    """The memory of a host, or of one accelerator; None if it is not known."""
    engine: Engine = "shm"
    """The transport between the ranks of a host. Hosts are connected by Gloo, or by NCCL if ranks use it on a host."""

    @property
    def num_ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    @property
    def has_idle_cores(self) -> bool:
        """Whether a core is left for each rank's transport while all ranks compute."""
        return (
            self.engine == "nccl" or self.ranks_per_host * (self.threads_per_rank + 1) <= self.cores_per_host
        )

    @property
    def crowding(self) -> float:
        """How many threads compute on a core; 1 if accelerators compute."""
        if self.engine == "nccl":
            return 1.0
        return max(1.0, self.ranks_per_host * self.threads_per_rank / self.cores_per_host)

    @property
    def memory_of_rank_bytes(self) -> float | None:
        if self.memory_bytes is None:
            return None
        return self.memory_bytes if self.engine == "nccl" else self.memory_bytes / self.ranks_per_host


_NUMBER = r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*"

_RATE = re.compile(_NUMBER + r"([kmgt]?)(bit|bits|b)(?:/s|ps)?\s*", re.IGNORECASE)

_TIME = re.compile(_NUMBER + r"(ns|us|ms|s)\s*")

_FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}

_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_rate(text: str) -> float:
    """Return a bandwidth in bytes a second.

    Examples:
        >>> parse_rate("100Mbit"), parse_rate("25 Gbit/s"), parse_rate("3GB/s")
        (12500000.0, 3125000000.0, 3000000000.0)

    Raises:
        ValueError: the text is no bandwidth.
    """
    found = _RATE.fullmatch(text)
    if found is None or not float(found[1]):
        raise ValueError(f"{text}: expected a bandwidth such as 100Mbit, 25Gbit or 3GB (a second)")
    is_bytes = found[3] == "B"
    return float(found[1]) * _FACTORS[found[2].lower()] / (1 if is_bytes else 8)


def parse_seconds(text: str) -> float:
    """Return the time that a text such as `12ms` stands for, in seconds.

    Examples:
        >>> parse_seconds("12ms"), parse_seconds("0.2 s")
        (0.012, 0.2)

    Raises:
        ValueError: the text is no time.
    """
    found = _TIME.fullmatch(text)
    if found is None:
        raise ValueError(f"{text}: expected a time such as 50us, 12ms or 0.5s")
    return float(found[1]) * _SECONDS[found[2]]


def rate_text(bytes_per_second: float) -> str:
    """Return a bandwidth in words.

    Examples:
        >>> rate_text(12.5e6), rate_text(3.125e9)
        ('100 Mbit/s', '25 Gbit/s')
    """
    bits = 8 * bytes_per_second
    for unit, factor in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits >= 0.9995 * factor:
            return f"{bits / factor:.3g} {unit}"
    return f"{bits:.3g} bit/s"
