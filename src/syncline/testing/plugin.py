"""The pytest plugin of Syncline. The marker `@pytest.mark.ranks(n)` runs a test function on n rank processes at once.

    import pytest, torch, torch.distributed as dist

    @pytest.mark.ranks(2)
    def test_sum() -> None:
        x = torch.ones(1)
        dist.all_reduce(x)          # the plugin has initialised torch.distributed with Gloo in each rank
        assert x == dist.get_world_size()

The plugin is installed with Syncline, and pytest finds it by its entry point. The rank processes are reused from test
to test, so they import torch only once. Each has one thread for computations. Every test gets a new process group, so
tests are isolated, and a test starts within milliseconds. `RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`,
`MASTER_ADDR` and `MASTER_PORT` are set as torchrun sets them. The port is reserved for the test, and nothing listens
there.

Fixtures and parameters are evaluated in pytest's own process and then sent to the ranks, so they must be picklable. The
test passes if it passes on every rank. Otherwise, the report names the ranks that failed and shows their tracebacks. A
rank is killed if it has not ended after `timeout` seconds (`ranks(2, timeout=10)`, default 60), or a few seconds after
another rank failed. The report then shows the stacks of this rank's threads. The processes of a failed test are
replaced by new processes.

`ranks(3, killed=[2])` is for a test that kills rank 2 with SIGKILL to see how the other ranks react. The test fails if
rank 2 is not killed.
"""

from __future__ import annotations

import pickle
from collections.abc import Collection
from typing import Any

import pytest

from syncline.testing.pool import Outcome, RankPool, Task
from syncline.words import describe_ranks, ranks_with

__all__: list[str] = []

_POOL = pytest.StashKey[RankPool]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "ranks(n, timeout=60, killed=()): run the test on n rank processes at once"
    )


def pytest_unconfigure(config: pytest.Config) -> None:
    pool = config.stash.get(_POOL, None)
    if pool is not None:
        pool.close()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    size, timeout_seconds, killed = _read(*marker.args, **marker.kwargs)
    name, owner = pyfuncitem.function.__name__, pyfuncitem.cls
    task = Task(
        module=pyfuncitem.module.__name__,
        qualname=name if owner is None else f"{owner.__qualname__}.{name}",
        arguments=_arguments(pyfuncitem),
        timeout_seconds=timeout_seconds,
        warning_filters=_warning_filters(pyfuncitem),
    )
    _judge(_pool_of(pyfuncitem.config).run(size, task, killed))
    return True


def _pool_of(config: pytest.Config) -> RankPool:
    if _POOL not in config.stash:
        config.stash[_POOL] = RankPool()
    return config.stash[_POOL]


def _read(n: int, timeout: float = 60.0, killed: Collection[int] = ()) -> tuple[int, float, frozenset[int]]:
    """Check the arguments of the marker `ranks`, and return them. Fail the test if an argument is invalid."""
    if not isinstance(n, int) or n < 1:
        pytest.fail(f"@pytest.mark.ranks(n): expected at least 1 rank, got {n!r}", pytrace=False)
    if not all(0 <= rank < n for rank in killed):
        expected = f"expected ranks between 0 and {n - 1} in killed"
        pytest.fail(f"@pytest.mark.ranks({n}, killed={killed!r}): {expected}", pytrace=False)
    return n, float(timeout), frozenset(killed)


def _arguments(item: pytest.Function) -> dict[str, Any]:
    """Return the test function's arguments, by name. Fail the test if an argument cannot be pickled for the ranks."""
    arguments = {name: item.funcargs[name] for name in item._fixtureinfo.argnames}
    for name, value in arguments.items():
        try:
            pickle.dumps(value)
        except Exception as error:
            pytest.fail(
                f"the argument {name!r} ({type(value).__name__}) cannot be sent to the rank processes: "
                f"{error}. Create the value inside the test, or give the test a picklable argument, such as a name",
                pytrace=False,
            )
    return arguments


def _warning_filters(item: pytest.Function) -> tuple[str, ...]:
    """Return the warning filters of the configuration, of the command line and of the test, in this order.

    Pytest applies the filters in the same order.
    """
    config = item.config
    marked = [mark.args for mark in reversed(list(item.iter_markers("filterwarnings")))]
    given = [*config.getini("filterwarnings"), *(config.known_args_namespace.pythonwarnings or [])]
    return (*given, *(text for texts in marked for text in texts))


def _judge(outcomes: list[Outcome]) -> None:
    """Pass, skip, xfail or fail the test in pytest's own process, according to the outcomes of all ranks."""
    if any(outcome.kind in ("failed", "stuck") for outcome in outcomes):
        texts = {rank: f"{outcome.kind}\n{outcome.text}".rstrip() for rank, outcome in enumerate(outcomes)}
        parts = [f"{describe_ranks(ranks)} {text}" for text, ranks in ranks_with(texts).items()]
        pytest.fail("\n\n".join(parts), pytrace=False)
    for outcome in outcomes:
        if outcome.kind == "skipped":
            raise pytest.skip.Exception(outcome.text, _use_item_location=True)
        if outcome.kind == "xfailed":
            pytest.xfail(outcome.text)
