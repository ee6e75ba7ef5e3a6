"""Which GPU and which backend a rank gets, with a faked torch.cuda."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from fake_devices import two_gpus  # noqa: F401  # a fixture

import syncline as sl
from syncline.session import ranks, session
from syncline.session.rendezvous import Presence, backend_for
from syncline.transport import C10dTransport


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


@pytest.mark.usefixtures("two_gpus")
def test_an_index_beyond_the_gpus_is_refused() -> None:
    assert session.Asked.of("auto", 1.0, "cuda:1").device == torch.device("cuda:1")
    with pytest.raises(ValueError, match="got 'cuda:2': this process sees 2 of type 'cuda'"):
        session.Asked.of("auto", 1.0, "cuda:2")


@pytest.mark.usefixtures("two_gpus")
def test_a_group_of_the_program_for_gpus_alone_uses_the_current_gpu() -> None:
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers the backend "fake"

    dist.init_process_group("cuda:fake", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert ranks.world_of_default_group(None).device == torch.device("cuda:1")
        t = C10dTransport()
        assert t.control_device == torch.device("cuda:1")
        assert t.sending_device(torch.device("cpu")) == torch.device("cuda:1")
        assert t.other_devices == ["fake (cuda)"]
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("two_gpus")
def test_a_program_that_uses_cuda_is_not_forked() -> None:
    with pytest.raises(sl.SynclineError, match="has initialised CUDA, which does not work in a fork"):
        sl.launch(print, method="fork")
