"""Replacements of the methods by which torch's elastic agent starts, polls and closes the processes of a host.

torch's launcher has no public way to change these steps. So `syncline run` replaces methods of torch's
`SubprocessContext`, and one of the agent, while it runs. This does not affect the ranks, which are other processes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import get_subprocess_handler

from syncline._torch.lookup import is_there, lookup


class Method:
    """A method of a class of torch that can be replaced temporarily.

    Args:
        owner: the class.
        name: the name of the method.
        used_for: the feature that needs the method; see `lookup`.
    """

    def __init__(self, owner: type, name: str, used_for: str) -> None:
        self._owner = owner
        self._name = name
        self._original = lookup(f"{owner.__module__}:{owner.__qualname__}.{name}", used_for)

    @property
    def is_there(self) -> bool:
        """Whether the installed torch has the method."""
        return is_there(self._original)

    @contextlib.contextmanager
    def replaced(self, replacement: Callable[..., Any]) -> Iterator[None]:
        """Replace the method inside a `with` block.

        Args:
            replacement: a function that is called with the original method, the object and the arguments.

        Raises:
            SynclineError: the installed torch lacks the method.
        """
        if not self.is_there:
            self._original()  # raises the error
        former = getattr(self._owner, self._name)
        setattr(self._owner, self._name, lambda *args, **how: replacement(former, *args, **how))
        try:
            yield
        finally:
            setattr(self._owner, self._name, former)


def start_again(ranks: SubprocessContext, local_rank: int, variables: Mapping[str, str]) -> None:
    """Start the process of one rank again, after it has ended.

    Args:
        ranks: the processes of the host.
        local_rank: the rank on this host.
        variables: environment variables, in addition to those of the former process.
    """
    ranks.subprocess_handlers[local_rank] = get_subprocess_handler(
        entrypoint=str(ranks.entrypoint),
        args=ranks.args[local_rank],
        env={**ranks.envs[local_rank], **variables},
        stdout=ranks.stdouts[local_rank],
        stderr=ranks.stderrs[local_rank],
        local_rank_id=local_rank,
        numa_options=ranks._numa_options,
    )


START = Method(SubprocessContext, "_start", "run ranks that can be asked to stop")
"""The method that starts all ranks of the host."""

POLL = Method(SubprocessContext, "_poll", "run ranks that can be asked to stop")
"""The method that checks the ranks: it returns the results once all ranks have ended or one has failed, else None."""

PIDS = Method(SubprocessContext, "pids", "start a lost rank again")
"""The method that returns the process numbers of the ranks. If they change, torch's agent ends the job."""

CLOSE = Method(SubprocessContext, "_close", "let ranks report why a peer has ended")
"""The method that ends the ranks. The replacement first lets them report why a peer has ended."""

EXIT_BARRIER = Method(SimpleElasticAgent, "_exit_barrier", "wait for the launchers of other hosts")
"""The method with which the agent of each host waits for those of all others, after its ranks have ended."""
