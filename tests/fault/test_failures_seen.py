"""The failures of the failure matrix that need no more than two ranks of the pool, over both transports."""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import syncline as sl
from failure_rows import record, recorded
from meeting import end_by_sigkill, stop

pytestmark = pytest.mark.real

both_transports = pytest.mark.parametrize("transport", ["shm", "c10d"])


def wrapped(transport: str, **options: object) -> sl.DistributedDataParallel:
    sl.init(transport=transport, timeout=30)
    torch.manual_seed(0)
    ddp = sl.DistributedDataParallel(nn.Linear(3, 2), **options)  # type: ignore[arg-type]
    step(ddp)
    return ddp


def step(ddp: nn.Module, scale: float = 1.0) -> None:
    (scale * ddp(torch.randn(5, 3))).square().mean().backward()


def tell(key: str, text: str = "") -> None:
    dist.group.WORLD.get_group_store().set(key, text)  # type: ignore[union-attr]


def wait_for(key: str) -> str:
    store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
    return store.get(key).decode()


@pytest.mark.ranks(2, killed=[1])
@both_transports
def test_killed(transport: str) -> None:
    ddp = wrapped(transport)
    if dist.get_rank() == 1:
        end_by_sigkill()
    with recorded("killed", transport, sl.PeerLost, "rank 1: its process has ended"):
        step(ddp)


@pytest.mark.ranks(2)
@both_transports
def test_exception(transport: str) -> None:
    ddp = wrapped(transport)
    if dist.get_rank() == 1:
        try:
            raise KeyError("the data of step 2")
        except KeyError:
            sl.shutdown()
        return
    with recorded("exception", transport, sl.SynclineError, "KeyError: 'the data of step 2'"):
        step(ddp)


@pytest.mark.ranks(2)
@both_transports
def test_stopped(transport: str) -> None:
    ddp = wrapped(transport)
    if dist.get_rank() == 1:
        tell("pid", str(os.getpid()))
        wait_for("stopped")
        step(ddp)
        return
    pid = int(wait_for("pid"))
    stop(pid)
    tell("stopped")
    began = time.monotonic()
    seen: list[tuple[str, float]] = []

    def resume(message: Warning | str, *_: object) -> None:
        seen.append((str(message), time.monotonic() - began))
        os.kill(pid, signal.SIGCONT)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = resume  # type: ignore[assignment]
        step(ddp)
    text, seconds = seen[0]
    assert "for rank 1, whose process is stopped" in text
    record("stopped", transport, f"RuntimeWarning: {text}", seconds)


@pytest.mark.ranks(2)
@both_transports
def test_absent(transport: str) -> None:
    sl.init(transport=transport, timeout=2)
    if dist.get_rank() == 1:
        wait_for("given up")
        return
    with recorded("absent", transport, sl.CollectiveTimeout, "rank 1 did not reach sl.barrier within 2 s; "):
        sl.barrier()
    tell("given up")


@pytest.mark.ranks(2)
@both_transports
def test_uneven(transport: str) -> None:
    ddp = wrapped(transport)
    if dist.get_rank() == 1:
        sl.shutdown()
        return
    with recorded("uneven", transport, sl.UnevenInputs, "rank 1 has shut down normally"):
        step(ddp)


@pytest.mark.ranks(2)
@both_transports
def test_other_call(transport: str) -> None:
    ddp = wrapped(transport)
    with recorded("other call", transport, sl.CollectiveMismatch):
        sl.mean(1.0) if dist.get_rank() == 1 else step(ddp)


@pytest.mark.ranks(2)
@both_transports
def test_model(transport: str) -> None:
    sl.init(transport=transport, timeout=30)
    with recorded("model", transport, sl.ContractMismatch, "weight"):
        sl.DistributedDataParallel(nn.Linear(3, 2 + dist.get_rank()))


@pytest.mark.ranks(2)
@both_transports
def test_nan(transport: str) -> None:
    ddp = wrapped(transport, on_nonfinite="raise")
    with recorded("nan", transport, sl.NonFiniteGradient, "rank 1"):
        step(ddp, float("nan") if dist.get_rank() == 1 else 1.0)


@pytest.mark.ranks(2)
@both_transports
def test_replica(transport: str) -> None:
    ddp = wrapped(transport, replica_check=sl.ReplicaCheck(every=1))
    if dist.get_rank() == 1:
        with torch.no_grad():
            ddp.module.weight[0, 0] += 1
    with recorded("replica", transport, sl.ReplicaDivergence, "weight"):
        for _ in range(3):
            step(ddp)


def test_damaged_save(tmp_path: Path) -> None:
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
