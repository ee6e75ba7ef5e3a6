"""Ranks that share memory when a rank is killed or stopped, memory is short, or a stranger calls."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import signal
import struct
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import soak
import torch
import torch.distributed as dist
from torch import Tensor

import hangs
import syncline as sl
from failure_rows import record
from meeting import group_store, stop, tell, wait_for
from support.states import wait_until
from syncline import PeerLost, SynclineError
from syncline.liveness import StepPhase
from syncline.native import NativeUnavailable, find_library
from syncline.session import transport_of
from syncline.testing import RankPool
from syncline.transport import C10dTransport, Transport
from syncline.transport.shared_memory import (
    SharedMemoryTransport,
    SharedMemoryUnavailable,
    hub,
    memory,
)

pytestmark = pytest.mark.skipif(find_library() is None, reason="the native core was not built")

CPU = torch.device("cpu")
LARGE_NUMEL = 3_000_000


def met(timeout_seconds: float = 3000) -> SharedMemoryTransport:
    """By default, who waits until the timeout hangs."""
    transport = SharedMemoryTransport.over(C10dTransport(timeout_seconds=timeout_seconds))
    assert isinstance(transport, SharedMemoryTransport)
    return transport


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def assert_lost(t: Transport, rank: int, tensor: Tensor) -> None:
    """Calls end with an error that names the rank, and go on to do so."""
    with pytest.raises(PeerLost) as caught:
        while True:
            t.all_reduce(tensor, "max").wait()
    assert f"rank {rank}: its process has ended" in str(caught.value)
    with pytest.raises(PeerLost, match=f"rank {rank}: its process has ended"):
        t.barrier().wait()


# ---------------------------------------------------------------------- SIGKILL


@pytest.mark.ranks(3, killed=[1])
def test_what_a_rank_had_done_before_it_was_killed_counts() -> None:
    t = met()
    tensors = [torch.full((numel,), float(t.rank + 1)) for numel in (1, LARGE_NUMEL)]
    for tensor in tensors:
        t.all_reduce(tensor).wait()
    if t.rank == 1:
        die()
    assert all((tensor == 6).all() for tensor in tensors)
    assert_lost(t, 1, tensors[0])


@pytest.mark.parametrize("is_in_place", [False, True], ids=["copied", "in place"])
@pytest.mark.ranks(3, killed=[1])
def test_a_rank_that_is_killed_in_the_middle_is_lost(is_in_place: bool) -> None:
    t = met()
    tensor = t.allocate(LARGE_NUMEL, torch.float32, CPU) if is_in_place else torch.ones(LARGE_NUMEL)
    t.barrier().wait()
    if t.rank == 1:
        soak.after(0.03, die)
        while True:
            t.all_reduce(tensor, "max").wait()
    assert_lost(t, 1, tensor)


@pytest.mark.ranks(4, killed=[1, 2])
def test_of_two_ranks_that_are_killed_one_at_least_is_named() -> None:
    t = met()
    t.barrier().wait()
    if t.rank in (1, 2):
        die()
    with pytest.raises(PeerLost, match=r"ranks? [12].*: (its process has|their processes have) ended"):
        t.all_reduce(torch.ones(LARGE_NUMEL)).wait()


@pytest.mark.ranks(2, killed=[1])
def test_nothing_is_left_of_a_rank_that_was_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = traces()  # tests before this one may have left theirs to a timer
    original = hub.listener_for_next

    def noted() -> object:
        listener = original()
        group_store().set("address", listener.getsockname()[1:])
        return listener

    monkeypatch.setattr(hub, "listener_for_next", noted)
    t = met()
    address = group_store().get("address").decode()
    tensor = t.allocate(LARGE_NUMEL, torch.float32, CPU)
    t.barrier().wait()
    if t.rank == 1:
        die()
    assert traces() - before
    assert_lost(t, 1, tensor)
    assert not [name for name in os.listdir("/dev/shm") if "syncline" in name]
    t.close()
    del t, tensor
    # The thread that tells where this rank is may be looking at it just now.
    wait_until(lambda: gc.collect() >= 0 and not traces() - before)
    assert address not in Path("/proc/net/unix").read_text()
    record(
        "left memory",
        "shm",
        "nothing: the memory has no name, and goes with the last process that has mapped it",
    )


def traces() -> set[str]:
    """This process's mappings and descriptors of shared memory."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    found = {line for line in lines if "memfd:syncline" in line}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            path = f"/proc/self/fd/{name}"
            if "memfd:syncline" in os.readlink(path):
                found.add(f"{name} {os.stat(path).st_ino}")
    return found


@pytest.mark.ranks(2, killed=[0])
def test_an_address_goes_with_the_rank_that_listens_there(monkeypatch: pytest.MonkeyPatch) -> None:
    if dist.get_rank() == 0:
        original = hub.listener_for_next

        def listen_and_die() -> None:
            listener = original()
            address = listener.getsockname()[1:].decode()
            assert address in Path("/proc/net/unix").read_text()
            group_store().set("address", address)
            die()

        monkeypatch.setattr(hub, "listener_for_next", listen_and_die)
    with pytest.raises(SynclineError):
        met()
    address = group_store().get("address").decode()
    # Its end was noticed before the kernel had closed what it held.
    wait_until(lambda: address not in Path("/proc/net/unix").read_text())


@pytest.mark.ranks(2, killed=[1])
def test_a_rank_that_is_killed_before_it_connects_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    if dist.get_rank() == 1:
        monkeypatch.setattr(hub, "connected", lambda *_: die())
    with pytest.raises(SynclineError, match="rank 1"):
        met()


@pytest.mark.ranks(2)
def test_a_rank_that_does_not_connect_is_named_after_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(address: str, *_: object) -> NoReturn:
        while address in Path("/proc/net/unix").read_text():  # until the other rank has given up
            time.sleep(0.001)
        raise ConnectionRefusedError("too late")

    if dist.get_rank() == 1:
        monkeypatch.setattr(hub, "connected", never)
    with pytest.raises(SharedMemoryUnavailable, match=r"rank 1 \(process \d+\) did not connect within 3 s"):
        met(timeout_seconds=3)


# ---------------------------------------------------------------------- SIGSTOP


@pytest.mark.ranks(2)
@pytest.mark.parametrize("engine", ["shared memory", "gloo"])
def test_a_rank_that_is_stopped_is_named_each_time_and_all_goes_on_when_it_continues(engine: str) -> None:
    t = met() if engine == "shared memory" else C10dTransport(timeout_seconds=30)
    pid = int(t.all_gather_bytes(str(os.getpid()).encode())[1])
    t.board.step, t.board.phase = 3, StepPhase.FORWARD
    for moment in ("stopped", "stopped again"):
        total = torch.full((LARGE_NUMEL,), float(t.rank + 1))
        if t.rank == 1:
            wait_for(moment)
            t.all_reduce(total).wait()
        else:
            reduce_with_a_stopped_peer(t, total, moment, pid)
        assert (total == 3).all()


def reduce_with_a_stopped_peer(t: Transport, total: torch.Tensor, moment: str, pid: int) -> None:
    """As rank 0, which stops rank 1 and continues it as soon as it has been warned."""
    while (place := t.health.places().get(1)) is None or place.step != 3:  # type: ignore[attr-defined]
        time.sleep(0.01)
    stop(pid)
    tell(moment)
    began, told = time.monotonic(), []

    def continue_it(message: Warning | str, _: object, filename: str, *__: object) -> None:
        told.append((str(message), filename, time.monotonic() - began))
        os.kill(pid, signal.SIGCONT)

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = continue_it  # type: ignore[assignment]
        t.all_reduce(total).wait()
    ((text, filename, seconds),) = told
    assert "waits in all_reduce(sum) of 3000000 elements, torch.float32 (call " in text
    assert "for rank 1, whose process is stopped" in text
    assert "was last seen in step 3, forward" in text
    assert filename == __file__, "at the line of who called"
    transport = "shm" if isinstance(t, SharedMemoryTransport) else "c10d"
    record("stopped", transport, f"RuntimeWarning: {text}", seconds)


# ---------------------------------------------------------------------- too little memory


ENOUGH_TO_MEET = 65 * 2**20
"""Bytes of memory with which the ranks meet, but have no lanes."""


@pytest.mark.ranks(3)
def test_too_little_memory_to_meet_is_said_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for available in (0, ENOUGH_TO_MEET):
        monkeypatch.setattr(memory, "available_bytes", lambda available=available: available)
        with pytest.raises(SharedMemoryUnavailable) as caught:
            met()
        text = str(caught.value)
        assert "rank 0: " in text, available
        assert "MB of shared memory are needed, but only" in text, available
        record("little memory", "shm", caught.value)
        assert_same_on_all_ranks(text)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("lacks", ["memory", "library"])
def test_auto_falls_back_and_says_so_once(lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "the native library was not built"
    if lacks == "memory":
        monkeypatch.setattr(memory, "available_bytes", lambda: ENOUGH_TO_MEET)
        reason = "MB of shared memory are needed"
    else:
        monkeypatch.setattr(hub, "native_library", missing)
    transports = sys.modules["syncline.session.world"]._SESSION.transports  # type: ignore[attr-defined]
    monkeypatch.setattr(transports, "_has_warned", False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        world = sl.init()
        tensor = torch.tensor([float(world.rank + 1)])
        for _ in range(2):
            sl.all_reduce_(tensor, op="sum")
        again = dist.new_group()
        sl.barrier(group=again)
        name = transport_of(None).name
    assert name == "gloo"
    assert tensor.item() == 6
    texts = [str(warning.message) for warning in caught if "share" in str(warning.message)]
    assert len(texts) == (1 if world.rank == 0 else 0), texts
    for text in texts:
        assert reason in text
        assert "gloo sends tensors on the CPU instead, which is slower" in text


def missing() -> NoReturn:
    raise NativeUnavailable("the native library was not built")


@pytest.mark.ranks(2)
def test_shm_without_the_library_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """In init, on all ranks, though only one lacks it; and the ranks can go on."""
    rank = dist.get_rank()
    with monkeypatch.context() as patched:
        if rank == 1:
            patched.setattr(hub, "native_library", missing)
        with pytest.raises(SynclineError, match="rank 1: the native library was not built"):
            sl.init(transport="shm")
    assert sl.mean(float(rank)) == 0.5


@pytest.mark.ranks(3)
def test_a_limit_of_the_system_is_an_error_on_all_ranks_and_the_group_goes_on() -> None:
    """File sizes are limited on rank 0, which makes the memory: the system itself refuses."""
    t = met()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if t.rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**22, hard))
    try:
        with pytest.raises(SynclineError) as caught:
            t.allocate(2**21, torch.float32, CPU)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    text = str(caught.value)
    assert text.startswith("cannot allocate shared memory for 2097152 elements of torch.float32:\nrank 0: ")
    assert "File too large" in text
    assert_same_on_all_ranks(text)
    tensor = t.allocate(2**21, torch.float32, CPU)
    tensor.fill_(1)
    t.all_reduce(tensor).wait()
    assert (tensor == 3).all()


def assert_same_on_all_ranks(text: str) -> None:
    texts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    assert set(texts) == {text}


MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
LIMITED = """
import sys
from pathlib import Path
rank, group = int(sys.argv[1]), Path(sys.argv[2])
(group / "cgroup.procs").write_text("0")
import torch
import torch.distributed as dist
import syncline as sl
from syncline import SynclineError
from syncline.native import find_library, library, loading
from syncline.session import transport_of
dist.init_process_group("gloo", init_method=sys.argv[3], rank=rank, world_size=2)
sl.init()
t = transport_of()
def make(megabytes):
    return t.allocate(megabytes * 2**18, torch.float32, torch.device("cpu"))
small = make(8)
try:
    make(600)
except SynclineError as error:
    print(str(error).replace(chr(10), " "))
small.fill_(1)
t.all_reduce(small).wait()
print(small.sum().item(), flush=True)
"""


@pytest.fixture
def limited_group() -> Iterator[Path]:
    """A control group of version 1 that may use 1 GB."""
    group = MEMORY_GROUPS / f"syncline-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(10**9))
    except OSError as error:
        pytest.skip(f"control groups of memory cannot be made here: {error}")
    yield group
    group.rmdir()


def test_the_limit_of_a_control_group_is_an_error_on_all_ranks_and_nobody_is_killed(
    limited_group: Path, tmp_path: Path
) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", LIMITED, str(rank), str(limited_group), f"file://{tmp_path}/meet"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank, (out, err) in zip(ranks, hangs.communicate_with_all(ranks), strict=True):
        assert rank.returncode == 0, err
        told, total = out.splitlines()
        assert "MB of shared memory are needed, but only" in told
        assert float(total) == 2 * 8 * 2**18


# ---------------------------------------------------------------------- strangers

STRANGER = """
import socket, sys
address, hello = sys.argv[1:]
connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
connection.settimeout(60)
connection.connect(b"\\0" + address.encode())
try:
    connection.sendall(bytes.fromhex(hello))
    print("called", flush=True)
    print("turned away" if connection.recv(1) == b"" else "let in", flush=True)
except (ConnectionResetError, BrokenPipeError):
    print("turned away", flush=True)
"""
TOKEN = bytes(range(32))
HELLOS = (struct.pack("<I32s", 1, b"?" * 32), struct.pack("<I32s", 1, TOKEN), b"")
"""With a wrong token, with the right one, and of a stranger that says nothing."""


@pytest.mark.ranks(2)
def test_strangers_are_turned_away_and_the_ranks_still_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    if dist.get_rank():
        met().barrier().wait()
        return
    original, strangers = hub.listener_for_next, []

    def listener_with_strangers() -> object:
        listener = original()
        address = listener.getsockname()[1:].decode()
        for hello in HELLOS:
            command = [sys.executable, "-I", "-S", "-c", STRANGER, address, hello.hex()]
            stranger = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert stranger.stdout is not None
            assert stranger.stdout.readline() == "called\n"
            strangers.append(stranger)
        return listener

    monkeypatch.setattr(hub, "listener_for_next", listener_with_strangers)
    monkeypatch.setattr(hub.secrets, "token_bytes", lambda n: TOKEN[:n])
    t = met()  # nobody waits for the strangers
    t.barrier().wait()
    assert [hangs.communicate(stranger)[0] for stranger in strangers] == ["turned away\n"] * len(HELLOS)


# ---------------------------------------------------------------------- by lot


@pytest.mark.nightly
def test_a_short_soak(rank_pool: RankPool) -> None:
    lines: list[str] = []
    assert soak.soak(5.0, 1, lines.append, rank_pool) == len(lines) >= 1
    assert all(": right, " in line for line in lines)
