"""The file of a measurement: its figures, and the settings without which its times mean something else.

Times are compared only with times that were measured with the same settings. The functions are pure, except
`read_measurement`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from goals import Figure, from_json


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
    """Return the contents of a file that a program of benchmarks/ has written (--json).

    Raises:
        OSError: the file cannot be read.
        ValueError: the contents are something else.
    """
    data: object = json.loads(path.read_text())
    figures = from_json(data)
    settings = data.get("settings") if isinstance(data, dict) else None
    if figures and not isinstance(settings, dict):
        raise ValueError(
            "expected the settings of the measurement, which older versions did not write: measure it again"
        )
    return Measurement(figures, settings if isinstance(settings, dict) else {})


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
