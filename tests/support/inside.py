"""What tests of several folders look at or change inside of the product, so that no other file has to name it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock
from weakref import WeakSet

import syncline as sl
from syncline.gradients import replica_of
from syncline.session import world as session_world

__all__ = [
    "any_session", "as_if_on_a_device", "connecting_again_within", "replica_of", "set_clock", "set_session",
    "without_scalers", "without_wait_for_causes",
]  # fmt: skip


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


def without_wait_for_causes() -> Any:
    """In this block, a wait that failed does not look for its cause in what other ranks tell."""
    return mock.patch("syncline.liveness.failed_wait._LOCAL_CAUSE_SECONDS", 0.0)


def connecting_again_within(seconds: float) -> Any:
    """In this block, ranks that have lost another one wait so long for each other when they connect again."""
    return mock.patch("syncline.session.session._REGROUP_SECONDS", seconds)


def set_session(session: Any) -> None:
    """Let this be the session of the process that runs now, of several that are simulated in this one."""
    session_world._SESSION = session


@contextlib.contextmanager
def any_session() -> Iterator[None]:
    """In this block, `set_session` may set the session of this process."""
    own = session_world._SESSION
    try:
        yield
    finally:
        session_world._SESSION = own
