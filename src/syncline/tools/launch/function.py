"""`sl.launch`, which runs a function on several ranks, from a notebook or a plain script."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from importlib.util import find_spec
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from syncline import environment, launchers
from syncline.checks import checked_choice, checked_count, checked_function, checked_kind, checked_seconds
from syncline.errors import SynclineError
from syncline.suggestions import suggests_arguments
from syncline.tools.launch.function_ranks import FunctionRanks
from syncline.tools.launch.guardian import Guardian

T = TypeVar("T")


@suggests_arguments
def launch(
    fn: Callable[..., T],
    ranks: int = 2,
    *,
    args: list[Any] | tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    method: Literal["fork", "spawn"] | None = None,
    timeout: timedelta | float | None = None,
) -> T:
    """Run a function on several ranks of this host, and return the result of rank 0.

    Use it in a notebook or in a plain script, without a launcher. Each rank is a process, in which `fn` is a whole
    program: it calls `sl.init()` first. The printed lines of all ranks appear here, with the rank before each line. If
    a rank fails, the other ranks are ended. Ctrl-C (in a notebook, the stop button) ends all ranks. If this process is
    killed, its ranks end, too.

    Each rank computes with (cores / ranks) threads, unless OMP_NUM_THREADS is set.

    Args:
        fn: the function.
        ranks: the number of ranks.
        args: the positional arguments of `fn`.
        kwargs: the arguments of `fn` by name.
        method: how the ranks are started. "fork" copies this process: everything that is defined here exists in the
            ranks. "spawn" starts new interpreters: they import `fn` from its module, or receive it by cloudpickle if
            that package is installed; a script must call `launch` under `if __name__ == "__main__"`. None means "fork"
            where it is safe: on Linux, if this process uses neither a GPU nor a process group.
        timeout: how long the ranks may run, as a timedelta or in seconds. None means no limit.

    Returns:
        The result of `fn` on rank 0. It is pickled: return numbers, text, tensors on the CPU, state dicts.

    Raises:
        PeerFailed: a rank raised an exception. The text names the rank that failed first, and shows its traceback.
        PeerLost: a rank was killed. The text names it.
        TimeoutError: the ranks have not ended in time. They have printed where they were.
        TypeError, ValueError: an argument is invalid, or cannot be sent to a spawned rank.
        SynclineError: this process is a rank of a job, "fork" was requested and is not safe, or the system is Windows.

    Examples:
        >>> import syncline as sl
        >>> def program(value):
        ...     world = sl.init()
        ...     return sl.gather(value + world.rank).tolist()
        >>> sl.launch(program, ranks=2, args=(10,))
        [10, 11]
    """
    checked_function("fn", fn)
    size = checked_count("ranks", ranks, at_least=1)
    checked_kind("args", args, (list, tuple), "a list or tuple of the arguments of fn")
    if kwargs is not None:
        checked_kind("kwargs", kwargs, Mapping, "a dict of the arguments of fn by name")
    seconds = None if timeout is None else checked_seconds("timeout", timeout)
    if method is not None:
        checked_choice("method", method, ("fork", "spawn"))
    if sys.platform == "win32":
        raise SynclineError(
            "sl.launch needs Linux or macOS, but this system is Windows: start the ranks with torchrun"
        )
    if environment.is_explained():
        return fn(*args, **(kwargs or {}))  # this process is a rank already
    _refuse_in_a_rank()
    chosen = _method(method)
    call = (fn, tuple(args), dict(kwargs or {}))
    with Guardian(environment.for_child({})) as guardian:
        path = FunctionRanks(size, chosen, guardian).run(
            _pickled(*call) if chosen == "spawn" else call, seconds
        )
        # Rank 0 writes no result if it ends by sys.exit(0).
        result: Any = pickle.loads(path.read_bytes()) if path.exists() else None
    returned: T = result
    return returned


# ---------------------------------------------------------------------- before the start


def _refuse_in_a_rank() -> None:
    """Raise an error if this process is itself a rank of a job.

    Raises:
        SynclineError: this process is a rank.
    """
    env = launchers.current()
    is_member = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if env.launcher != "alone" or is_member:
        rank, size = (dist.get_rank(), dist.get_world_size()) if is_member else (env.rank, env.size)
        raise SynclineError(
            f"sl.launch starts the ranks of a job, but this process is already rank {rank} of {size} of a job "
            f"(launcher: {env.launcher}). Call the function itself, without sl.launch, or start this program with "
            "`python` instead of a launcher"
        )


def _method(asked: str | None) -> str:
    """Return how the ranks are started.

    Raises:
        SynclineError: "fork" was requested and is not safe.
    """
    reason = None
    if sys.platform != "linux":
        reason = "torch's libraries do not work in a fork on this system"
    elif torch.cuda.is_initialized():
        reason = "this process has initialised CUDA, which does not work in a fork"
    elif dist.is_available() and dist.is_initialized():
        reason = "this process has initialised torch.distributed, which does not work in a fork"
    if asked == "fork" and reason is not None:
        raise SynclineError(
            f'sl.launch(method="fork") is not safe: {reason}. Use method="spawn", or move this use into the function '
            "and start this process (in a notebook: the kernel) again"
        )
    return asked or ("spawn" if reason is not None else "fork")


def _pickled(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Return a function and its arguments as a pickle for spawned ranks.

    Raises:
        TypeError: they cannot be pickled.
    """
    remedy = "install cloudpickle, or define the function in a module and import it"
    if find_spec("cloudpickle") is not None:
        import cloudpickle

        dumps, remedy = cloudpickle.dumps, "pass only what can be pickled"
    else:
        dumps = pickle.dumps
        main = sys.modules["__main__"]
        if getattr(fn, "__module__", None) == "__main__" and not hasattr(main, "__file__"):
            raise TypeError(
                f"expected fn to be a function of a module, got {fn!r}, which is defined in a notebook or a prompt, "
                f"so a spawned rank cannot import it: {remedy}"
            )
    try:
        content: bytes = dumps((fn, args, kwargs))
    except Exception as error:
        raise TypeError(
            f"expected a function and arguments that a spawned rank can receive, got {type(error).__name__}: {error}. "
            f"For sl.launch with method='spawn', {remedy}"
        ) from error
    return content
