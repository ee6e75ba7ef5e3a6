"""Which GPU and which backend a rank gets, with a faked torch.cuda."""

from __future__ import annotations

import pytest
import torch

from syncline.session import ranks
from syncline.session.rendezvous import Presence, backend_for


@pytest.mark.parametrize(
    ("asked", "local_rank", "num_visible", "expected"),
    [(None, 1, 2, "cuda:1"), (None, 3, 1, "cuda:0"), ("cuda", 1, 2, "cuda:1"), ("cuda:0", 1, 2, "cuda:0")],
)
def test_each_rank_of_a_host_gets_its_gpu(
    asked: str | None, local_rank: int, num_visible: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_visible)
    assert str(ranks._device(asked and torch.device(asked), local_rank)) == expected


def presence(rank: int, gpu: str | None) -> Presence:
    return Presence(rank=rank, size=2, host="here", pid=rank, gpu=gpu)


def test_nccl_serves_ranks_with_a_gpu_each_and_gloo_serves_ranks_that_share_one() -> None:
    assert backend_for([presence(0, None), presence(1, None)], warn=True) == "gloo"
    assert backend_for([presence(0, "a"), presence(1, "b")], warn=True) == "cpu:gloo,cuda:nccl"
    with pytest.warns(UserWarning, match=r"2 ranks share 1 GPU\(s\)"):
        assert backend_for([presence(0, "a"), presence(1, "a")], warn=True) == "cpu:gloo,cuda:gloo"
