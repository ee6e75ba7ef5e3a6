"""Counts the calls of Python functions of the package in one step. Run as a script by `test_gradient_sync.py`.

It is a program of its own, because the number depends on what the process has done before: whether a function was
compiled, and which wrappers are still to be freed.
"""

from __future__ import annotations

import copy
import gc
import json
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import syncline
from syncline.transport import Transport, run_ranks

PACKAGE = Path(syncline.__file__).parent
ROOMS = tuple(f"{PACKAGE / room}/" for room in ("gradients", "ddp", "buffers", "optimizers", "_torch"))
"""In other rooms a rank waits for the others. What it calls there depends on how long it waits."""

NUM_LAYERS = 50


def calls_of_a_step(size: int, *, view: bool) -> list[dict[str, Any]]:
    """Return the number of buckets and the calls by function in the third step, for each rank."""
    # Made once, for ranks are threads that share one generator. By these values it is known after the first step that
    # the ranks have different data, so that nothing is reported in the step that is counted.
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(2, 2) for _ in range(NUM_LAYERS)))

    def rank(transport: Transport) -> dict[str, Any]:
        ddp = syncline.DistributedDataParallel(
            copy.deepcopy(module), process_group=transport, gradient_as_bucket_view=view
        )
        calls: Counter[str] = Counter()

        def profile(frame: FrameType, event: str, _: Any) -> None:
            code = frame.f_code
            # Comprehensions are no calls from Python 3.12 on.
            if (
                event == "call"
                and code.co_filename.startswith(ROOMS)
                and code.co_name not in ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")
            ):
                calls[f"{Path(code.co_filename).relative_to(PACKAGE)}: {code.co_qualname}"] += 1

        def step(profile: Any) -> None:
            ddp.zero_grad()
            sys.setprofile(profile)
            try:
                ddp(torch.full((1, 2), float(transport.rank + 1))).sum().backward()
            finally:
                sys.setprofile(None)

        for profiled in (None, None, profile):
            step(profiled)
        record = ddp.last_step
        assert record is not None
        return {"num_buckets": len(record.buckets), "calls": calls}

    return run_ranks(size, rank)


def main() -> None:
    gc.disable()  # nothing is to be freed, with calls of its own, while these are counted
    counted = {
        f"{size} {view}": calls_of_a_step(size, view=view) for size in (1, 2) for view in (False, True)
    }
    print(json.dumps(counted))


if __name__ == "__main__":
    main()
