"""A rank is killed while the ranks of several hosts select a transport in `sl.init`."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from meeting import end_by_sigkill, meet_at_the_store
from syncline import PeerLost, liveness
from syncline.liveness import RankProcess
from syncline.session.transports import Transports
from syncline.transport import C10dTransport


@pytest.mark.ranks(4, killed=[1])
def test_a_rank_that_is_killed_meanwhile_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks have their notices and processes before the first collective that can wait for the rank."""
    host = "aabb"[dist.get_rank()]
    monkeypatch.setattr(liveness.processes, "host_key", lambda: host)
    processes: list[Any] = [None] * 4
    dist.all_gather_object(processes, RankProcess.own())
    meet_at_the_store()
    if dist.get_rank() == 1:
        start, num_started = C10dTransport._start, 0

        def killed(*args: Any, **kwargs: Any) -> Any:
            nonlocal num_started
            num_started += 1
            if num_started == 2:
                end_by_sigkill()
            return start(*args, **kwargs)

        monkeypatch.setattr(C10dTransport, "_start", killed)
    with pytest.raises(PeerLost, match="rank 1: its process has ended"):
        Transports(lambda: None, lambda: None).select(
            dist.group.WORLD,  # type: ignore[arg-type]
            "auto",
            3000.0,
            gather=lambda payload: pytest.fail("only ranks that all share memory use this"),
            processes=processes,
        )
    meet_at_the_store("seen", without=1)
