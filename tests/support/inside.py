"""What tests of several folders look at or change inside of the product, so that no other file has to name it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock
from weakref import WeakSet

import syncline as sl
from syncline.gradients import replica_of

__all__ = ["as_if_on_a_device", "connecting_again_within", "replica_of", "set_clock", "without_scalers"]


def set_clock(ddp: sl.DistributedDataParallel, now: Callable[[], float], *, has_waits: bool = True) -> None:
    """Let the phases of the steps last as long as a clock says, without the waits for other ranks, if it has waits."""
    clock: Any = replica_of(ddp).gradients.reduction.clock  # type: ignore[union-attr, attr-defined]
    clock.now = now
    if not has_waits:
        clock._counts = type(clock._counts)()


def as_if_on_a_device() -> Any:
    """In this block, tensors are hashed as on an accelerator."""
    return mock.patch("syncline.equality.fingerprint._is_in_host_memory", lambda _: False)  # noqa: PT008


def without_scalers() -> Any:
    """In this block, the GradScalers of other tests are forgotten, which may not be collected yet."""
    return mock.patch("syncline._torch.optimizers._scalers", WeakSet())


def connecting_again_within(seconds: float) -> Any:
    """In this block, ranks that have lost another one wait so long for each other when they connect again."""
    return mock.patch("syncline.session.session._REGROUP_SECONDS", seconds)
