"""What the native core of shared memory returns, its limits, and the error of ranks that cannot share memory."""

from __future__ import annotations

from syncline.errors import SynclineError
from syncline.native import Library, NativeUnavailable
from syncline.native import library as native_library

MAX_RANKS = 256

MAX_ABORT_BYTES = 65536


class SharedMemoryUnavailable(SynclineError):
    """The error that all ranks of a group raise if they cannot share memory.

    Args:
        text: the reasons, in the same words on all ranks.
        is_worth_a_warning: whether users can change something so that the ranks can share memory. It is False for ranks
            on several hosts.
    """

    def __init__(self, text: str, *, is_worth_a_warning: bool = True) -> None:
        super().__init__(text)
        self.is_worth_a_warning = is_worth_a_warning


class Outcome:
    """The values that `wait` and `poll` of the native core return."""

    DONE = 0
    PENDING = 1
    ABORTED = 2
    MISMATCH = 3
    DISAGREED = 4


def library() -> Library:
    """Return the native library. The first call loads it.

    Raises:
        SharedMemoryUnavailable: the library was not built, belongs to another version, or cannot be loaded.
    """
    try:
        return native_library()
    except NativeUnavailable as error:
        raise SharedMemoryUnavailable(str(error)) from error
