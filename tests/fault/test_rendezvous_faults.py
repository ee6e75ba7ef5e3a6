"""Rank 0 is killed in `sl.init`, while the ranks meet at a store of the launcher, which outlives rank 0."""

from __future__ import annotations

import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from meeting import meet_at_the_store
from syncline import PeerLost
from syncline.launchers import Environment
from syncline.session import Presence, rendezvous, wait_for_all


def own_presence() -> Presence:
    env = Environment(launcher="environment", rank=dist.get_rank(), size=dist.get_world_size())
    return Presence.of_this_process(env, torch.device("cpu"))


def launchers_store() -> dist.Store:
    """A store of none of the ranks: that in which the test's ranks have met."""
    assert dist.group.WORLD is not None
    return dist.PrefixStore("rendezvous", dist.group.WORLD.get_group_store())


def die_instead_of_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process be killed when it has written its own message, and has read no other."""
    monkeypatch.setattr(rendezvous, "gathered", lambda *_: os.kill(os.getpid(), signal.SIGKILL))


@pytest.mark.ranks(3, killed=[0])
def test_a_rank_0_that_is_killed_after_it_has_arrived_is_named_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meet_at_the_store()
    if dist.get_rank() == 0:
        die_instead_of_reading(monkeypatch)
    store = launchers_store()
    with pytest.raises(PeerLost, match=r"rank 0 \(pid \d+ on .*\): its process has ended. Look") as caught:
        wait_for_all(store, own_presence(), 3000.0)
    assert "did not call" not in str(caught.value)
    meet_at_the_store("seen", without=0)


@pytest.mark.ranks(4, killed=[0])
def test_ranks_of_other_hosts_and_late_ones_learn_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 stands for a rank of another host, which cannot see rank 0. Rank 3 arrives after the end of rank 0."""
    meet_at_the_store()
    rank, store, mine = dist.get_rank(), launchers_store(), own_presence()
    if rank == 0:
        die_instead_of_reading(monkeypatch)
    if rank == 2:
        object.__setattr__(mine, "host_key", "another host")
    if rank == 3:
        store.wait(["rank 1 has raised"], timedelta(seconds=30))
    with pytest.raises(PeerLost, match=r"rank 0 .*: its process has ended") as caught:
        wait_for_all(store, mine, 3000.0)
    if rank == 1:
        assert "rank 3 of 4 did not call sl.init before. Look" in str(caught.value)
        store.set("rank 1 has raised", "")
    meet_at_the_store("seen", without=0)
