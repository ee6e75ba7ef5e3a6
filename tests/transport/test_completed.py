"""A collective that all have come for is done, whatever a rank does afterwards, and whoever learns of that first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d

from syncline import PeerFailed
from syncline.transport import C10dTransport, C10dWork, Transport, run_ranks
from syncline.transport.shared_memory import SharedMemoryTransport
from syncline.transport.shared_memory.transport import SharedMemoryWork


def meet_and_abort(t: Transport, start: Callable[[], Any], name: str) -> None:
    """Rank 0 starts, then rank 1, which waits and aborts: then only rank 0 waits."""
    store = distributed_c10d._get_default_store()
    if t.rank == 0:
        work = start()
        store.set(f"{name} is under way", "1")
        store.wait([f"{name} is over"])
        work.wait()
    else:
        store.wait([f"{name} is under way"])
        start().wait()
        t.abort("later")
        store.set(f"{name} is over", "1")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("known_by", ["a look around", "another wait"])
def test_processes(known_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (C10dWork, SharedMemoryWork):
        ends_within = kind._ends_within

        def blind_at_first(
            work: Any,
            seconds: float,
            ends_within: Any = ends_within,
            seen: list[Any] = [],  # noqa: B006
        ) -> bool:
            """The first slice of a wait was over just before the peer came."""
            if not any(work is one for one in seen):
                seen.append(work)
                if known_by == "another wait" and (told := work._health.notices.failure()) is not None:
                    work._health.adopted(told)
                return False
            return bool(ends_within(work, seconds))

        monkeypatch.setattr(kind, "_ends_within", blind_at_first)
    for over in (lambda t: t, SharedMemoryTransport.over):
        for nth in range(2):
            t = over(C10dTransport(timeout_seconds=60))
            x = torch.ones(3)
            starts = [t.barrier, lambda t=t, x=x: t.all_reduce(x)]
            meet_and_abort(t, starts[nth], f"{t.name} {nth}")
            assert x.tolist() == [1.0 + nth] * 3
            with pytest.raises((PeerFailed, RuntimeError), match="later"):
                t.barrier().wait()
            t.close()


def test_threads() -> None:
    def program(t: Transport) -> None:
        first, second = t.all_reduce(torch.ones(1)), t.barrier()
        if t.rank == 1:
            second.wait()
            t.abort("later")
        second.wait()
        first.wait()
        with pytest.raises((PeerFailed, RuntimeError), match="later"):
            t.barrier().wait()

    run_ranks(2, program)
