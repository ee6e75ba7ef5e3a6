"""Every process ends, and with the right exit code, whatever its threads and groups do. `endings.py` runs thousands."""

from __future__ import annotations

from pathlib import Path

import endings
import pytest

NAMES = sorted(set(endings.ENDINGS) - {"torchmetrics"})


@pytest.mark.real
@pytest.mark.parametrize("ending", NAMES)
def test_both_ranks_end_with_the_right_exit_code(ending: str, tmp_path: Path) -> None:
    outcome = endings.run(ending, ("shm", "c10d")[NAMES.index(ending) % 2], tmp_path)
    assert outcome.codes == endings.ENDINGS[ending].codes, outcome.text
