"""torch's own tests of DistributedDataParallel, from torch's wheel, run against our class on CPU over Gloo.

    python -m pytest tests/torch_suite                                all (about a minute)
    python -m pytest tests/torch_suite -x --runxfail -k test_NAME     one, a failure shown with its whole traceback
    python tests/torch_suite/torch_suite_survey.py syncline           what fails, one error line each
    python tests/torch_suite/torch_suite_survey.py torch              regenerate torch_passes.json

Which tests: those of `DistributedTest._DistTestBase` that use DistributedDataParallel and that torch's own class
passes in the same setting (`torch_passes.json`); and those that torch's class cannot run on CPU because of its
SyncBatchNorm, with ours in its place. Those that our class is expected to fail stand, with the reason,
in `torch_suite_differences.py`; one of them that passes fails this suite. How they run: `torch_suite_rank.py`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("expecttest", reason="torch's own tests import it")
pytest.importorskip("numpy", reason="torch's own tests import it")

import torch_suite_rank
from torch_suite_differences import EXPECTED
from torch_suite_survey import PASSES, TIMEOUT_SECONDS, num_ranks

import syncline

TABLE = json.loads(PASSES.read_text())
pytestmark = pytest.mark.real

PASSED: dict[str, str] = TABLE["passed"]
"""Test -> "as it is" or "moved to CPU"."""

ONLY_WITH_OUR_SYNC_BATCH_NORM = {
    name
    for name, why in TABLE["not passed"].items()
    if "SyncBatchNorm layers only work with GPU modules" in why
} - {"test_DistributedDataParallel_SyncBatchNorm_half", "test_sync_bn_logged"}
"""Without one that asks for float16 on an accelerator, and one that tests the logging of torch's own."""

SAME_TORCH = torch.__version__.partition("+")[0] == TABLE["torch"].partition("+")[0]


def cases() -> list[object]:
    """Each with its ranks; those that need more ranks come last, so that few processes are started."""
    found = []
    for name in sorted([*PASSED, *ONLY_WITH_OUR_SYNC_BATCH_NORM], key=lambda name: (num_ranks(name), name)):
        marks = [pytest.mark.ranks(num_ranks(name), timeout=TIMEOUT_SECONDS)]
        if name in EXPECTED:
            marks.append(pytest.mark.xfail(strict=True, reason=EXPECTED[name]))
        found.append(pytest.param(name, id=name, marks=marks))
    return found


@pytest.fixture
def expected(name: str, request: pytest.FixtureRequest) -> str:
    """Why a failure is expected, if it is; with --runxfail none is, so that it is shown in full."""
    return "" if request.config.option.runxfail else EXPECTED.get(name, "")


# torch's tests warn on purpose, and check by themselves what must be warned of.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not SAME_TORCH, reason=f"the list was made with torch {TABLE['torch']}")
@pytest.mark.parametrize("name", cases())
def test_torch(name: str, tmp_path: Path, expected: str) -> None:
    torch_suite_rank.run(name, "syncline", str(tmp_path), PASSED.get(name) != "as it is", expected)


def test_every_expected_difference_is_a_test_that_torch_passes() -> None:
    assert set(EXPECTED) <= set(PASSED)
    assert all(EXPECTED.values())


@pytest.mark.ranks(1)
def test_the_class_in_torchs_file_is_ours_and_only_there() -> None:
    tests = torch_suite_rank.load("syncline")
    assert tests.DistributedDataParallel is syncline.DistributedDataParallel
    assert torch.nn.parallel.DistributedDataParallel is torch_suite_rank.CLASSES["torch"]
