"""The program of a rank process of the pool, which runs as `python -m syncline.testing.worker FD`.

FD is the file descriptor of the channel to the pool. The process ends when the pool closes this channel.

With `--fork`, the process is a template: it forks rank processes at the pool's request. The template computes nothing
and starts no thread, so a forked child behaves like an interpreter that has just imported torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import pickle
import signal
import sys
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _pytest.assertion import install_importhook
from _pytest.assertion import util as assertion_util
from _pytest.config import Config, get_config, parse_warning_filter

from syncline import environment, launchers, tracebacks
from syncline._torch.modules import import_compiler
from syncline.session.process import end_with_parent
from syncline.session.world import shutdown
from syncline.testing.pool import FORKS, Outcome, Task

_SLOW_TO_IMPORT = (
    "syncline.ddp.wrapper",
    "syncline.checkpoint.checkpointer",
    "syncline.evolution.strategy",
    "syncline.debug",
)
"""The modules that most tests import. A template imports these modules once, before it forks ranks."""


def main(file_descriptor: int, *, forks: bool) -> None:
    """Run this process as a worker or as a template.

    Args:
        file_descriptor: the file descriptor of the channel to the pool.
        forks: whether the process is a template, which forks workers.
    """
    end_with_parent()
    _rewrite_assertions()
    if not forks:
        _work(Connection(file_descriptor))
        return
    import_compiler()
    for name in _SLOW_TO_IMPORT:
        importlib.import_module(name)
    template_pid = os.getpid()
    child = _fork_on_request(file_descriptor)
    if child is not None:
        end_with_parent(template_pid)
        os.setsid()
        channel, output = child
        log = os.open(output, os.O_WRONLY | os.O_APPEND)
        os.dup2(log, sys.stdout.fileno())
        os.dup2(log, sys.stderr.fileno())
        os.close(log)
        _work(Connection(channel))


def _fork_on_request(file_descriptor: int) -> tuple[int, str] | None:
    """Answer the requests of `pool.Template` until the pool closes the channel.

    Returns:
        In a forked child, the file descriptor of its channel to the pool, and the path of its output file. In the
        template, None.
    """
    with contextlib.suppress(EOFError, OSError), Connection(file_descriptor) as channel:
        while True:
            request: str | int = channel.recv()
            if isinstance(request, str):
                handle = recv_handle(channel)
                pid = os.fork()
                if not pid:
                    return handle, request
                os.close(handle)
                channel.send(pid)
            else:
                ended, status = os.waitpid(request, os.WNOHANG)
                channel.send(os.waitstatus_to_exitcode(status) if ended else None)
    return None


def _work(channel: Connection) -> None:
    """Run the tasks that the pool sends, until the pool closes the channel."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, ConnectionResetError, BrokenPipeError):
        sys.path[:] = pickle.loads(channel.recv_bytes())
        channel.send_bytes(b"ready")
        while True:
            message = channel.recv_bytes()
            outcome = _run(message)
            if outcome.kind == "failed":
                _clean_up()  # so that ranks that wait for this rank fail too
            sys.stdout.flush()
            channel.send_bytes(pickle.dumps(outcome))
            channel.recv_bytes()  # all ranks have ended, so none of them needs the connections of this rank
            _clean_up()


def _run(message: bytes) -> Outcome:
    patches: list[pytest.MonkeyPatch] = []
    before: dict[str, str | None] = {}
    try:
        task: Task
        task, store_path, variables = pickle.loads(message)
        patches = [value for value in task.arguments.values() if isinstance(value, pytest.MonkeyPatch)]
        before = environment.export(variables, replace=True)
        with warnings.catch_warnings():
            function = _find(task)
            for text in task.warning_filters:
                warnings.filterwarnings(*parse_warning_filter(text, escape=False))
            _init_process_group(store_path, task.timeout_seconds)
            function(**task.arguments)
    except pytest.skip.Exception as skip:
        return Outcome(kind="skipped", text=str(skip))
    except pytest.xfail.Exception as xfail:
        return Outcome(kind="xfailed", text=str(xfail))
    except (Exception, SystemExit, KeyboardInterrupt, pytest.fail.Exception) as error:
        return Outcome(kind="failed", text=tracebacks.describe(error).whole)
    finally:
        for patch in patches:  # pytest's own process cannot undo them, because this is a copy of the fixture
            patch.undo()
        environment.restore(before)
    return Outcome(kind="passed")


def _find(task: Task) -> Any:
    found: Any = importlib.import_module(task.module)
    *classes, name = task.qualname.split(".")
    for part in classes:
        found = getattr(found, part)()
    return getattr(found, name)


def _init_process_group(store_path: str, timeout_seconds: float) -> None:
    ours = launchers.current()
    store = dist.FileStore(store_path, ours.size)  # type: ignore[attr-defined]
    timeout = timedelta(seconds=timeout_seconds)
    dist.init_process_group("gloo", store=store, rank=ours.rank, world_size=ours.size, timeout=timeout)
    # A rank that fails at once closes its connections. It must not do so before the others have connected.
    store.set(f"rank {ours.rank} is connected", "")
    store.wait([f"rank {rank} is connected" for rank in range(ours.size)], timeout)


def _clean_up() -> None:
    shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


def _rewrite_assertions() -> None:
    """Install pytest's rewriting of assertions, so that a failed `assert a == b` shows the values of a and b."""
    config: Config = get_config()
    # Without "ignore", it warns about plugins that are already imported.
    config.parse(["-W", "ignore"], addopts=False)
    install_importhook(config)

    def compared(op: str, left: object, right: object) -> str | None:
        for lines in config.hook.pytest_assertrepr_compare(config=config, op=op, left=left, right=right):
            if lines:
                return "\n~".join(line.replace("\n", "\\n") for line in lines).replace("%", "%%")
        return None

    assertion_util._reprcompare = compared


if __name__ == "__main__":
    main(int(sys.argv[1]), forks=FORKS in sys.argv)
