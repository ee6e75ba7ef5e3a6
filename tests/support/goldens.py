"""Whole printed reports, one file each in tests/goldens.

SYNCLINE_GOLDENS=write python -m pytest TESTS    # writes the files anew; look at what git shows of them
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["assert_golden"]

FOLDER = Path(__file__).parents[1] / "goldens"


def assert_golden(name: str, text: str) -> None:
    """Compare a report with the file of this name."""
    path = FOLDER / f"{name}.txt"
    if os.environ.get("SYNCLINE_GOLDENS") == "write":
        path.write_text(text.rstrip() + "\n", encoding="utf-8")
    expected = path.read_text(encoding="utf-8")
    assert text.rstrip().splitlines() == expected.splitlines(), (
        f"{path.name}: `make goldens` writes the present text"
    )
