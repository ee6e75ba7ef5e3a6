"""Training over Gloo in processes that goes wrong on one rank: a named error on every rank that is left.

The same failures on ranks as threads, where nothing can be lost, are in `tests/parity/test_silent_failures.py`.
"""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import syncline as sl
from meeting import end_by_sigkill
from syncline import CollectiveMismatch, ContractMismatch, PeerLost, SynclineError, UnevenInputs


class Net(nn.Module):
    def __init__(self, *, normed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(4) if normed else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


def step(ddp: nn.Module) -> None:
    ddp(torch.randn(5, 3)).square().mean().backward()


def everybody_says(error: BaseException) -> list[str]:
    """What each rank says, exchanged by the store, for no collective works any more."""
    store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
    store.set(f"text {dist.get_rank()}", str(error))
    return [store.get(f"text {rank}").decode() for rank in range(dist.get_world_size())]


@pytest.mark.ranks(2, killed=[1])
def test_a_killed_peer_is_a_lost_peer_with_rank_step_phase_and_parameters() -> None:
    ddp = sl.DistributedDataParallel(Net())
    for _ in range(2):
        step(ddp)
    if dist.get_rank() == 1:
        end_by_sigkill()
    with pytest.raises(PeerLost) as caught:
        step(ddp)
    text = str(caught.value)
    assert text.startswith("rank 0, step 3, backward, bucket 0 (last.bias, last.weight, first.bias, ...")
    assert "rank 1: its process has ended" in text


@pytest.mark.ranks(2, killed=[1])
@pytest.mark.parametrize("transport", ["c10d", "shm"])
@pytest.mark.parametrize("has_inputs", [True, False])
def test_a_peer_killed_inside_of_join_is_a_lost_peer(has_inputs: bool, transport: str) -> None:
    sl.init(transport=transport)
    ddp = sl.DistributedDataParallel(Net())
    with pytest.raises(PeerLost, match="rank 1: its process has ended"), ddp.join():
        step(ddp)
        if dist.get_rank() == 1:
            end_by_sigkill()
        if has_inputs:
            step(ddp)


@pytest.mark.ranks(2)
def test_a_backward_left_out_inside_of_join_is_a_mismatch_on_both() -> None:
    ddp = sl.DistributedDataParallel(Net())
    with pytest.raises(CollectiveMismatch) as caught, ddp.join():
        for _ in range(2):
            loss = ddp(torch.ones(2, 3)).sum()
            if dist.get_rank() == 0:
                loss.backward()
    for text in everybody_says(caught.value):
        assert "rank 0: step 1, backward, bucket 0, waiting in all_reduce(sum)" in text
        assert "rank 1: step 1, forward, waiting in torch.distributed.all_reduce of Join" in text


@pytest.mark.ranks(2)
def test_no_sync_around_a_backward_alone_inside_of_join_is_an_error_on_both() -> None:
    ddp = sl.DistributedDataParallel(Net())
    with pytest.raises(SynclineError) as caught, ddp.join():
        for _ in range(2 - dist.get_rank()):
            loss = ddp(torch.randn(5, 3)).square().mean()
            with ddp.no_sync():
                loss.backward()
    assert any("join" in text for text in everybody_says(caught.value))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("transport", ["c10d", "shm"])
def test_a_backward_through_the_module_on_one_rank_alone_is_uneven(transport: str) -> None:
    """torch's class leaves it local."""
    sl.init(transport=transport)
    ddp = sl.DistributedDataParallel(Net())
    step(ddp)
    if dist.get_rank() == 1:
        sl.shutdown()
        return
    with ddp.no_sync():
        step(ddp.module)
    with pytest.raises(UnevenInputs, match="rank 1 has shut down normally"):
        step(ddp.module)


@pytest.mark.ranks(2)
def test_a_rank_that_has_fewer_batches_and_ends_is_uneven_inputs() -> None:
    sl.init(timeout=60)
    ddp = sl.DistributedDataParallel(Net())
    for _ in range(2):
        step(ddp)
    if dist.get_rank() == 1:
        sl.shutdown()
        return
    with pytest.raises(UnevenInputs) as caught:
        step(ddp)
    text = str(caught.value)
    assert "rank 0, step 3, backward, bucket 0" in text
    assert "rank 1 has shut down normally" in text
    assert "step 2, after backward" in text
    assert "join()" in text


@pytest.mark.ranks(2)
def test_a_rank_that_has_fewer_batches_and_waits_in_another_call_is_a_mismatch_on_both() -> None:
    ddp = sl.DistributedDataParallel(Net())
    for _ in range(2):
        step(ddp)
    with pytest.raises(CollectiveMismatch) as caught:
        sl.mean(1.0) if dist.get_rank() == 1 else step(ddp)
    for text in everybody_says(caught.value):
        assert "rank 0: step 3, backward, bucket 0, waiting in all_reduce(sum)" in text
        assert "rank 1: step 2, after backward, waiting in sl.mean (call " in text
        assert text.count("at test_loud_failures.py:") == 2


@pytest.mark.ranks(2)
def test_a_batch_skipped_on_one_rank_of_a_net_with_buffers_is_a_mismatch_on_both() -> None:
    ddp = sl.DistributedDataParallel(Net(normed=True))
    step(ddp)
    with pytest.raises(CollectiveMismatch) as caught:
        for _ in range(2):
            loss = ddp(torch.randn(5, 3)).sum()
            if dist.get_rank() == 0:
                loss.backward()
    for text in everybody_says(caught.value):
        assert "rank 0: step 2, backward, bucket 0, waiting in all_reduce(sum)" in text
        assert "rank 1: step 2, forward, waiting in broadcast(from rank 0)" in text


@pytest.mark.ranks(2)
def test_a_module_that_changed_on_one_rank_is_a_mismatch_on_both() -> None:
    net = Net()
    net.first.requires_grad_(False)
    ddp = sl.DistributedDataParallel(net)
    step(ddp)
    if dist.get_rank() == 1:
        net.first.requires_grad_(True)
    with pytest.raises(CollectiveMismatch) as caught:
        step(ddp)
    for text in everybody_says(caught.value):
        assert "rank 0: step 2, backward, bucket 0" in text
        assert "rank 1: step 2, backward, where Net has changed since it was wrapped" in text


@pytest.mark.ranks(2)
def test_two_wrappers_called_in_different_orders_are_a_mismatch_on_both() -> None:
    """A GAN whose ranks disagree about whose turn it is: buckets of different sizes never meet."""
    generator, judge = sl.DistributedDataParallel(Net()), sl.DistributedDataParallel(nn.Linear(3, 7))
    for ddp in (generator, judge):
        step(ddp)
    with pytest.raises(CollectiveMismatch, match="gradients of Net lane"):
        for ddp in (generator, judge) if dist.get_rank() == 0 else (judge, generator):
            step(ddp)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("transport", ["c10d", "shm"])
def test_uneven_evaluation_before_a_collective_of_torchs_own_is_a_mismatch_on_both(transport: str) -> None:
    sl.init(transport=transport)
    ddp = sl.DistributedDataParallel(Net(normed=True))
    step(ddp)
    ddp.eval()
    seen = torch.zeros(())
    with pytest.raises(CollectiveMismatch) as caught:
        for _ in range(3 + 2 * dist.get_rank()):
            seen += ddp(torch.randn(5, 3)).sum().detach()
        dist.all_reduce(seen)
    for text in everybody_says(caught.value):
        assert "rank 0: step 2, after forward, waiting in torch.distributed.all_reduce (call " in text
        assert "rank 1: step 2, forward in eval mode, waiting in broadcast(from rank 0)" in text
        assert text.count("at test_loud_failures.py:") == 2


@pytest.mark.ranks(2)
@pytest.mark.real
def test_a_slow_rank_that_calls_torch_distributed_is_waited_for() -> None:
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    ddp = sl.DistributedDataParallel(Net())
    for _ in range(2):
        if dist.get_rank() == 0:
            until = time.monotonic() + 1.6  # three times as long as it takes to look
            while time.monotonic() < until:
                dist.barrier(alone)
        step(ddp)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("others", ["have ended", "go on"])
def test_who_evaluates_alone_is_told_how(others: str) -> None:
    sl.init(transport="c10d")
    ddp = sl.DistributedDataParallel(Net(normed=True))
    step(ddp)
    ddp.eval()
    if others == "have ended":
        if dist.get_rank() == 1:
            sl.shutdown()
            return
        with pytest.raises(UnevenInputs, match="rank 1 has shut down normally") as ended:
            ddp(torch.randn(5, 3))
        assert "call ddp.module(x) on that rank" in str(ended.value)
        assert "DistributedSampler" not in str(ended.value)
        return
    with pytest.raises(CollectiveMismatch) as caught:
        ddp(torch.randn(5, 3)) if dist.get_rank() == 0 else sl.mean(1.0)
    for text in everybody_says(caught.value):
        assert "rank 0: step 2, forward in eval mode, waiting in broadcast(from rank 0)" in text
        assert "call ddp.module(x) on that rank" in text


@pytest.mark.parametrize("difference", ["dtype", "shape", "order"])
@pytest.mark.ranks(2)
def test_modules_that_differ_are_refused_in_the_same_words_before_the_first_byte(difference: str) -> None:
    """Over Gloo, another type or shape ends the process, or hangs."""
    is_odd = dist.get_rank() == 1
    if difference == "order":
        net = nn.Sequential()
        for name in ("b", "a") if is_odd else ("a", "b"):
            net.add_module(name, nn.Linear(2, 2))
    elif difference == "dtype":
        net = nn.Sequential(nn.Linear(2, 2).double() if is_odd else nn.Linear(2, 2))
    else:
        net = nn.Sequential(nn.Linear(2, 3 if is_odd else 2))
    with pytest.raises(ContractMismatch) as caught:
        sl.DistributedDataParallel(net)
    first, second = everybody_says(caught.value)
    assert first == second
    assert "weight" in first
    assert sl.mean(float(dist.get_rank())) == 0.5, "the group is as good as before"
