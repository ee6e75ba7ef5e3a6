"""Training in processes that goes wrong on one rank: a named error on every rank that is left, in time.

The same failures on ranks as threads, where nothing can be lost, are in `tests/parity/test_silent_failures.py`.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import syncline as sl
from failure_rows import record, recorded
from meeting import end_by_sigkill, tell, texts_of_all_ranks, wait_for
from syncline import CollectiveMismatch, ContractMismatch, PeerLost, SynclineError, UnevenInputs

both_transports = pytest.mark.parametrize("transport", ["shm", "c10d"])


class Net(nn.Module):
    def __init__(self, *, normed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(4) if normed else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


def wrapped(
    transport: str = "auto", *, normed: bool = False, **options: object
) -> sl.DistributedDataParallel:
    """A wrapper that has done two steps."""
    sl.init(transport=transport, timeout=60)
    ddp = sl.DistributedDataParallel(Net(normed=normed), **options)  # type: ignore[arg-type]
    for _ in range(2):
        step(ddp)
    return ddp


def step(ddp: nn.Module, scale: float = 1.0) -> None:
    (scale * ddp(torch.randn(5, 3))).square().mean().backward()


# ---------------------------------------------------------------------- a rank has ended, or does not come


@pytest.mark.ranks(2, killed=[1])
@both_transports
def test_a_killed_peer_is_a_lost_peer_with_rank_step_phase_and_parameters(transport: str) -> None:
    ddp = wrapped(transport)
    if dist.get_rank() == 1:
        end_by_sigkill()
    with recorded("killed", transport, PeerLost) as caught:
        step(ddp)
    text = str(caught.value)
    assert text.startswith("rank 0, step 3, backward, bucket 0 (last.bias, last.weight, first.bias, ...")
    assert "rank 1: its process has ended" in text


@pytest.mark.ranks(2, killed=[1])
@pytest.mark.parametrize(("has_inputs", "transport"), [(True, "c10d"), (False, "shm")])
def test_a_peer_killed_inside_of_join_is_a_lost_peer(has_inputs: bool, transport: str) -> None:
    ddp = wrapped(transport)
    with pytest.raises(PeerLost, match="rank 1: its process has ended"), ddp.join():
        step(ddp)
        if dist.get_rank() == 1:
            end_by_sigkill()
        if has_inputs:
            step(ddp)


@pytest.mark.ranks(2)
@both_transports
def test_an_exception_under_way_in_shutdown_is_quoted_to_the_others(transport: str) -> None:
    ddp = wrapped(transport)
    if dist.get_rank() == 1:
        try:
            raise KeyError("the data of step 3")
        except KeyError:
            sl.shutdown()
        return
    with recorded("exception", transport, SynclineError, "KeyError: 'the data of step 3'"):
        step(ddp)


@pytest.mark.ranks(2)
@both_transports
def test_a_rank_that_has_fewer_batches_and_ends_is_uneven_inputs(transport: str) -> None:
    ddp = wrapped(transport)
    if dist.get_rank() == 1:
        sl.shutdown()
        return
    with recorded("uneven", transport, UnevenInputs, "rank 1 has shut down normally") as caught:
        step(ddp)
    for words in ("rank 0, step 3, backward, bucket 0", "step 2, after backward", "join()"):
        assert words in str(caught.value)


@pytest.mark.ranks(2)
@both_transports
def test_a_backward_through_the_module_on_one_rank_alone_is_uneven(transport: str) -> None:
    """torch's class leaves it local."""
    ddp = wrapped(transport)
    if dist.get_rank() == 1:
        sl.shutdown()
        return
    with ddp.no_sync():
        step(ddp.module)
    with pytest.raises(UnevenInputs, match="rank 1 has shut down normally"):
        step(ddp.module)


@pytest.mark.ranks(2)
@both_transports
def test_a_rank_that_does_not_come_is_named_after_the_timeout(transport: str) -> None:
    sl.init(transport=transport, timeout=2)
    if dist.get_rank() == 1:
        wait_for("given up")
        return
    text = "rank 1 did not reach sl.barrier within 2 s; "
    with recorded("absent", transport, sl.CollectiveTimeout, text):
        sl.barrier()
    tell("given up")


# ---------------------------------------------------------------------- ranks make different calls


@pytest.mark.ranks(2)
def test_a_backward_left_out_inside_of_join_is_a_mismatch_on_both() -> None:
    ddp = sl.DistributedDataParallel(Net())
    with pytest.raises(CollectiveMismatch) as caught, ddp.join():
        for _ in range(2):
            loss = ddp(torch.ones(2, 3)).sum()
            if dist.get_rank() == 0:
                loss.backward()
    for text in texts_of_all_ranks(str(caught.value)):
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
    assert any("join" in text for text in texts_of_all_ranks(str(caught.value)))


@pytest.mark.ranks(2)
@both_transports
def test_a_rank_that_has_fewer_batches_and_waits_in_another_call_is_a_mismatch_on_both(
    transport: str,
) -> None:
    ddp = wrapped(transport)
    with recorded("other call", transport, CollectiveMismatch) as caught:
        sl.mean(1.0) if dist.get_rank() == 1 else step(ddp)
    for text in texts_of_all_ranks(str(caught.value)):
        assert "rank 0: step 3, backward, bucket 0, waiting in all_reduce(sum)" in text
        assert "rank 1: step 2, after backward, waiting in sl.mean (call " in text
        assert text.count("at test_loud_failures.py:") == 2


@pytest.mark.ranks(2)
def test_a_batch_skipped_on_one_rank_of_a_net_with_buffers_is_a_mismatch_on_both() -> None:
    ddp = wrapped(normed=True)
    with pytest.raises(CollectiveMismatch) as caught:
        for _ in range(2):
            loss = ddp(torch.randn(5, 3)).sum()
            if dist.get_rank() == 0:
                loss.backward()
    for text in texts_of_all_ranks(str(caught.value)):
        assert "rank 0: step 3, backward, bucket 0, waiting in all_reduce(sum)" in text
        assert "rank 1: step 3, forward, waiting in broadcast(from rank 0)" in text


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
    for text in texts_of_all_ranks(str(caught.value)):
        assert "rank 0: step 2, backward, bucket 0" in text
        assert "rank 1: step 2, backward, where the module has changed since it was wrapped" in text


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
@both_transports
def test_uneven_evaluation_before_a_collective_of_torchs_own_is_a_mismatch_on_both(transport: str) -> None:
    if transport == "c10d":
        dist.destroy_process_group()  # so sl.init creates the group, and its ranks do not meet as torch's do
    ddp = wrapped(transport, normed=True)
    ddp.eval()
    seen = torch.zeros(())
    with pytest.raises(CollectiveMismatch) as caught:
        for _ in range(3 + 2 * dist.get_rank()):
            seen += ddp(torch.randn(5, 3)).sum().detach()
        dist.all_reduce(seen)
    for text in texts_of_all_ranks(str(caught.value)):
        assert "rank 0: step 3, after forward, waiting in torch.distributed.all_reduce (call " in text
        assert "rank 1: step 3, forward in eval mode, waiting in broadcast(from rank 0)" in text
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
    ddp = wrapped("c10d", normed=True)
    ddp.eval()
    advice = "call ddp.module(x) on that rank"
    if others == "have ended":
        if dist.get_rank() == 1:
            sl.shutdown()
            return
        with pytest.raises(UnevenInputs, match="rank 1 has shut down normally") as ended:
            ddp(torch.randn(5, 3))
        assert advice in str(ended.value)
        assert "DistributedSampler" not in str(ended.value)
        return
    with pytest.raises(CollectiveMismatch) as caught:
        ddp(torch.randn(5, 3)) if dist.get_rank() == 0 else sl.mean(1.0)
    for text in texts_of_all_ranks(str(caught.value)):
        assert "rank 0: step 3, forward in eval mode, waiting in broadcast(from rank 0)" in text
        assert advice in text


# ---------------------------------------------------------------------- values differ


@pytest.mark.ranks(2)
@both_transports
def test_modules_that_differ_are_refused_in_the_same_words_before_the_first_byte(transport: str) -> None:
    """Over Gloo, another type or shape ends the process, or hangs."""
    sl.init(transport=transport, timeout=30)
    is_odd = dist.get_rank() == 1
    swapped = nn.Sequential()
    for name in ("b", "a") if is_odd else ("a", "b"):
        swapped.add_module(name, nn.Linear(2, 2))
    of_another_type = nn.Linear(2, 2).double() if is_odd else nn.Linear(2, 2)
    for net in (nn.Linear(2, 3 if is_odd else 2), of_another_type, swapped):
        with recorded("model", transport, ContractMismatch, "weight") as caught:
            sl.DistributedDataParallel(net)
        texts: list[str] = [""] * 2
        dist.all_gather_object(texts, str(caught.value))
        assert texts[0] == texts[1]
        assert sl.mean(float(dist.get_rank())) == 0.5, "the group is as good as before"


@pytest.mark.ranks(2)
@both_transports
def test_gradients_that_are_not_finite_and_replicas_that_differ_are_named(transport: str) -> None:
    ddp = wrapped(transport, on_nonfinite="raise", replica_check=sl.ReplicaCheck(every=1))
    with recorded("nan", transport, sl.NonFiniteGradient, "rank 1"):
        step(ddp, float("nan") if dist.get_rank() == 1 else 1.0)
    if dist.get_rank() == 1:
        with torch.no_grad():
            ddp.module.last.weight[0, 0] += 1
    with recorded("replica", transport, sl.ReplicaDivergence, "weight"):
        for _ in range(3):
            step(ddp)


def test_a_damaged_save_is_skipped(tmp_path: Path) -> None:
    state = sl.TrainState(model=nn.Linear(3, 2))
    with sl.Checkpointer(tmp_path, stop_signals=()) as checkpointer:
        checkpointer.save(state, 1)
        newest = checkpointer.save(state, 2)
        assert newest is not None
        [file] = Path(newest).glob("*.safetensors")
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        began = time.monotonic()
        with pytest.warns(RuntimeWarning, match="damaged saves were skipped") as caught:
            assert checkpointer.load(state) == 1
        sees = "RuntimeWarning: " + " ".join(str(caught[0].message).split())
        record("damaged save", "", sees, time.monotonic() - began)
