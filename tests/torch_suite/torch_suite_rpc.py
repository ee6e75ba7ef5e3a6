"""torch's own tests of DistributedDataParallel under distributed autograd (RPC), run against a class.

    python tests/torch_suite/torch_suite_rpc.py syncline      # or: torch; 8 tests, two minutes

They ship in torch's wheel (`ddp_under_dist_autograd_test.py`), and start up to six processes each. A shorter test of
the same is in `tests/parity/test_distributed_autograd.py`.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

CLASS = "TORCH_SUITE_CLASS"
"""Tells the processes of a test, which import this file anew, what is tested."""

if os.environ.get(CLASS, sys.argv[-1]) == "syncline":
    import syncline

    torch.nn.parallel.DistributedDataParallel = syncline.DistributedDataParallel  # type: ignore[misc]

from torch.testing._internal.common_distributed import MultiProcessTestCase  # noqa: E402
from torch.testing._internal.common_utils import run_tests  # noqa: E402
from torch.testing._internal.distributed import ddp_under_dist_autograd_test as torchs  # noqa: E402
from torch.testing._internal.distributed.rpc.tensorpipe_rpc_agent_test_fixture import (  # noqa: E402
    TensorPipeRpcAgentTestFixture as Fixture,
)

Cases: Any = MultiProcessTestCase


class TestUnder(Fixture, torchs.DdpUnderDistAutogradTest, Cases):
    """A wrapper inside or around parts of a model that lives on several workers."""

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()


class TestComparison(Fixture, torchs.DdpComparisonTest, Cases):
    """The same gradients as in an ordinary backward."""

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()


if __name__ == "__main__":
    if sys.argv[-1] not in ("syncline", "torch"):
        sys.exit("expected the class to test, syncline or torch, as the last argument")
    os.environ[CLASS] = sys.argv.pop()
    run_tests()
