"""The file of a measurement: its figures, and the settings without which its times mean something else.

Times are compared only with times that were measured with the same settings. The functions are pure, except
`read_measurement`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from syncline.tools.bench.goals import Figure, from_json
from syncline.tools.bench.tables import processor_text, size_text
from syncline.untrusted import json_value, read_regular

_MAX_BYTES = 64 * 1024 * 1024
"""The largest size of a file with a measurement."""


@dataclass(frozen=True)
class Measurement:
    """What the file of a measurement contains for a comparison.

    Attributes:
        figures: the figures. A file of a program without goals has none.
        settings: the settings by name.
    """

    figures: Sequence[Figure]
    settings: Mapping[str, object]


def read_measurement(path: Path) -> Measurement:
    """Return the contents of a file that `syncline bench` or a program of benchmarks/ has written (--json).

    Raises:
        OSError: the file cannot be read.
        ValueError: the contents are something else.
    """
    data: object = json_value(read_regular(path, max_bytes=_MAX_BYTES))
    figures = from_json(data)
    settings = data.get("settings") if isinstance(data, dict) else None
    if figures and not isinstance(settings, dict):
        raise ValueError(
            "expected the settings of the measurement, which older versions did not write: measure it again"
        )
    return Measurement(figures, settings if isinstance(settings, dict) else {})


def settings_of(
    *, num_ranks: int, machine: Mapping[str, Any], plan: Mapping[str, Any], transport: str | None = None
) -> dict[str, object]:
    """Return the settings of a measurement of `syncline bench`.

    The versions of torch and of Syncline are left out: a comparison shows what another version has changed.

    Args:
        num_ranks: the number of ranks, of which each has one thread.
        machine: the result of `machine.describe_machine`.
        plan: the fields of a `ranks.Plan`.
        transport: the name of the transport. None if it is not known yet.
    """
    found: dict[str, object] = {"ranks": num_ranks}
    if transport is not None:
        found["transport"] = transport
    return {
        **found,
        "processor": processor_text(machine),
        "all_reduce": [size_text(size) for size in plan["sizes_bytes"]],
        "models": list(plan["models"]),
        "a turn": f"{plan['turn_seconds']:g} s of all_reduce, {plan['num_steps']} training steps",
    }


def differences(expected: Mapping[str, object], got: Mapping[str, object]) -> str:
    """Return in which settings a measurement differs from what is expected, or "".

    Args:
        expected: the expected settings. A list needs no more than to be part of the measurement's list.
        got: the settings of the measurement.

    Examples:
        >>> differences({"ranks": 4, "sizes": ["1 KiB"]}, {"ranks": 2, "sizes": ["1 KiB", "1 MiB"], "quick": True})
        'ranks: expected 4, got 2'
    """
    return "; ".join(
        f"{name}: expected {_words(wanted)}, got {_words(got.get(name))}"
        for name, wanted in expected.items()
        if not _holds(got.get(name), wanted)
    )


def _holds(found: object, wanted: object) -> bool:
    if isinstance(wanted, list) and isinstance(found, list):
        return all(one in found for one in wanted)
    return found == wanted


def _words(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
