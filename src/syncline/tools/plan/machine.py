"""The costs of synchronization on a machine: the figures that `syncline bench --calibrate` measures.

Without a measurement, the figures of one machine with two cores are used; a plan then says so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from syncline.environment import cache_folder
from syncline.regular_files import read_regular
from syncline.words import printable

_FORMAT = 1


class Cost(NamedTuple):
    """The cost of a reduction, in seconds: fixed, and for each byte."""

    fixed: float
    per_byte: float
    work_fixed: float
    """The time of this rank's cores, which it takes from the computation if no core is idle."""
    work_per_byte: float

    def time(self, num_bytes: float) -> float:
        """Return how long a reduction of `num_bytes` bytes takes, if the ranks do nothing else."""
        return self.fixed + self.per_byte * num_bytes

    def work(self, num_bytes: float) -> float:
        """Return how long a core is busy with it."""
        return self.work_fixed + self.work_per_byte * num_bytes


class Calls(NamedTuple):
    """The costs of calls that do not depend on the number of bytes, in seconds."""

    per_gradient: float
    """The calls for one gradient in a synchronized backward."""
    per_bucket: float
    """The calls for one bucket."""
    per_step: float
    """The calls for one synchronized step."""
    per_update: float
    """The calls for one parameter in the optimizer's step, which are the same for a shard of it."""


class Coding(NamedTuple):
    """The cost of a compression for each value, in seconds."""

    encoding: float
    decoding: float


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The figures of one machine."""

    name: str
    shared_memory: Mapping[int, Cost]
    """An all_reduce in shared memory, by the number of ranks on the host."""
    gloo: Mapping[int, Cost]
    """An all_reduce over Gloo within the host, by the number of ranks."""
    copy_per_byte: float
    """A copy of a gradient into its bucket, or out of it."""
    calls: Mapping[int, Calls]
    """Calls by the number of ranks on the host: ranks that share a core wait for it."""
    codings: Mapping[str, Coding] = field(default_factory=dict)
    """The compressions, by the text with which they are made: "Cast()"."""
    average_per_byte: float = 0.0
    """An average of parameters, besides the reduction."""
    outer_per_byte: float = 0.0
    """An outer step of DiLoCo, besides the reduction."""
    is_measured: bool = True
    """Whether the figures are those of the machine of the plan."""

    def cost(self, engine: str, num_ranks: int) -> Cost:
        """Return the cost of an all_reduce within a host.

        Between measured numbers of ranks the nearest smaller one counts. Above the largest one, costs grow with the
        number of ranks, except between accelerators.

        Args:
            engine: "shm", "gloo" or "nccl".
            num_ranks: the number of ranks on the host.
        """
        known = self.gloo if engine == "gloo" else self.shared_memory
        nearest = _nearest(known, num_ranks)
        factor = 1.0 if engine == "nccl" else max(1.0, num_ranks / nearest)
        return Cost(*(factor * one for one in known[nearest]))

    def calls_of(self, num_ranks: int) -> Calls:
        """Return the cost of calls if so many ranks are on a host."""
        return self.calls[_nearest(self.calls, num_ranks)]

    def coding(self, code: str) -> Coding:
        """Return what a compression costs for each value; of one that was not measured, the most of all."""
        most = map(max, zip(Coding(0.0, 0.0), *self.codings.values(), strict=True))
        return self.codings.get(code) or Coding(*most)

    def to_json(self) -> dict[str, Any]:
        """Return the figures as a dict for JSON."""
        return {"syncline machine": _FORMAT, **asdict(self)}

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> Machine:
        """Return the figures that `to_json` has written.

        Raises:
            ValueError: these are not the figures of a machine.
        """
        try:
            if found["syncline machine"] != _FORMAT:
                raise ValueError(f"the format is {found['syncline machine']!r}")
            read = {one.name: found[one.name] for one in fields(Machine)}
            read["name"] = printable(read["name"])
            for name, kind in (("shared_memory", Cost), ("gloo", Cost), ("calls", Calls)):
                read[name] = {int(num): kind(*costs) for num, costs in read[name].items()}
            read["codings"] = {code: Coding(*coding) for code, coding in read["codings"].items()}
            return Machine(**read)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"these are not the figures of a machine: {type(error).__name__}: {error}"
            ) from None

    def __post_init__(self) -> None:
        """Check the figures, which may come from a file.

        Raises:
            ValueError: a figure is no time.
        """
        tables = (self.shared_memory, self.gloo, self.calls, self.codings)
        figures = [self.copy_per_byte, self.average_per_byte, self.outer_per_byte]
        figures += [one for table in tables for costs in table.values() for one in costs]
        are_times = all(isinstance(one, int | float) and 0 <= one < math.inf for one in figures)
        if not all(tables[:3]) or not are_times:
            raise ValueError("these are not the figures of a machine: expected times, in seconds")


def _nearest(known: Mapping[int, object], num_ranks: int) -> int:
    """Return the largest measured number of ranks up to `num_ranks`, or else the smallest measured one."""
    smaller = [num for num in known if num <= num_ranks]
    return max(smaller) if smaller else min(known)


def usual_path() -> Path:
    """Return where `syncline bench --calibrate` writes its figures, and where a plan looks for them."""
    return Path(cache_folder()) / "machine.json"


def load_machine(path: Path | None = None, *, engine: str = "shm") -> Machine:
    """Return the figures of this machine, or those of another one if this machine was not measured.

    Args:
        path: the file with the figures; None for the usual one, which need not exist.
        engine: "nccl" for accelerators, of which no figures are measured.

    Raises:
        ValueError: the file exists, but has no figures of a machine.
        OSError: `path` is given, and cannot be read.
    """
    if engine == "nccl" and path is None:
        return UNMEASURED_ACCELERATOR
    if path is None:
        path = usual_path()
        if not path.is_file():
            return UNMEASURED
    try:
        return Machine.from_json(json.loads(read_regular(path)))
    except ValueError as error:
        raise ValueError(f"{path}: {error}. Write the file again: syncline bench --calibrate") from None


UNMEASURED = Machine(
    name="another machine: 2 cores of an AMD EPYC",
    shared_memory={
        2: Cost(5.9e-06, 3.7e-11, 5.9e-06, 3.7e-11),
        4: Cost(0.00011, 2.8e-10, 4.5e-05, 1.3e-10),
        8: Cost(0.00026, 8.5e-10, 6.3e-05, 1.8e-10),
    },
    gloo={
        2: Cost(0.0018, 7e-10, 0.001, 5.8e-10),
        4: Cost(0.0058, 1.1e-09, 0.0021, 5.2e-10),
        8: Cost(0.02, 2.2e-09, 0.004, 5.7e-10),
    },
    copy_per_byte=1.5e-10,
    calls={
        2: Calls(4.5e-06, 3.8e-06, 0.00029, 3.6e-06),
        4: Calls(6.7e-06, 1.4e-05, 0.00029, 9.5e-06),
        8: Calls(4.9e-06, 1.6e-05, 0.00045, 3.5e-05),
    },
    codings={
        "Cast()": Coding(7.9e-10, 4.7e-10),
        "Quantize(8)": Coding(1.4e-09, 8.1e-10),
        "Quantize(4)": Coding(1.3e-09, 6.5e-10),
        "Quantize(2)": Coding(1.4e-09, 7.2e-10),
        "PowerSGD(4)": Coding(9.6e-10, 1.7e-09),
        "PowerSGD(2)": Coding(9e-10, 1.3e-09),
        "TopK(0.01)": Coding(1.5e-09, 9.6e-10),
    },
    average_per_byte=2e-10,
    outer_per_byte=8.2e-10,
    is_measured=False,
)

UNMEASURED_ACCELERATOR = Machine(
    name="accelerators that were not measured: 150 GB/s within a host",
    shared_memory={2: Cost(3e-5, 1 / 150e9, 0.0, 0.0)},
    gloo={2: Cost(3e-5, 1 / 100e9, 0.0, 0.0)},
    copy_per_byte=2 / 1.5e12,
    calls={2: Calls(4e-6, 1e-5, 3e-4, 2e-6)},
    codings={
        "Cast()": Coding(8 / 1.5e12, 8 / 1.5e12),
        "Quantize(8)": Coding(60 / 1.5e12, 60 / 1.5e12),
        "Quantize(4)": Coding(60 / 1.5e12, 60 / 1.5e12),
        "PowerSGD(4)": Coding(20 / 1.5e12, 60 / 1.5e12),
        "PowerSGD(2)": Coding(20 / 1.5e12, 60 / 1.5e12),
        "TopK(0.01)": Coding(60 / 1.5e12, 20 / 1.5e12),
    },
    average_per_byte=4 / 1.5e12,
    outer_per_byte=12 / 1.5e12,
    is_measured=False,
)
"""Estimates from the bandwidth of an accelerator's memory."""
