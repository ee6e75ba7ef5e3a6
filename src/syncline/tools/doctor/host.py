"""Functions that check whether this host is fit for parallel training, and a program that tests an all_reduce."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from syncline.debug.report import facts
from syncline.environment import num_cores
from syncline.session.world import init, shutdown, transport_of
from syncline.transport.shared_memory.hub import SharedMemoryUnavailable, library
from syncline.transport.shared_memory.memory import available_bytes
from syncline.words import format_time

_SMALL_SHM_BYTES = 1 << 30

_FEW_FILES = 1024

_LITTLE_MEMORY_BYTES = 1 << 30

_SLOW_LOOKUP_SECONDS = 0.5

_LOOPBACK_AS_TORCH_HAS_IT = "::ffff:127.0.0.1"
"""The address of connections within this host, on a socket for both versions of IP."""


class Finding(NamedTuple):
    """The result of one check of this host."""

    name: str
    text: str
    kind: Literal["fine", "note", "problem"] = "fine"
    """A "problem" prevents parallel training. A "note" can become a problem. In these cases, `text` has a remedy."""


def _judged(name: str, text: str, is_bad: bool, remedy: str) -> Finding:
    """Return what was measured: a note with a remedy if it is bad."""
    return Finding(name, f"{text}{remedy}", "note") if is_bad else Finding(name, text)


def findings() -> list[Finding]:
    """Check this host, and return the results of all checks. No check communicates with other ranks.

    Examples:
        >>> [finding.name for finding in findings()][:3]
        ['versions', 'processor', 'native core']
    """
    found = facts()
    versions = f"syncline {found['syncline']}, torch {found['torch']}, Python {found['Python']}"
    return [
        Finding("versions", versions),
        Finding("processor", f"{num_cores()} cores, {found['processor']}"),
        _check_native_core(),
        _check_torch_backends(),
        _check_cuda(found),
        _check_memory(),
        _check_name_lookup(),
        *_check_shared_files(),
        *_check_limits(),
    ]


def _check_native_core() -> Finding:
    name = "native core"
    try:
        library()
    except SharedMemoryUnavailable as error:
        is_linux = sys.platform == "linux"
        remedy = "" if is_linux else "; ranks use Gloo instead of shared memory"
        return Finding(name, f"{error}{remedy}", "problem" if is_linux else "note")
    return Finding(name, "installed and loaded, so ranks of one host share memory")


def _check_torch_backends() -> Finding:
    name = "torch.distributed"
    if not dist.is_available():
        text = "this torch was built without torch.distributed: install another build of torch"
        return Finding(name, text, "problem")
    checks = {"Gloo": dist.is_gloo_available, "NCCL": dist.is_nccl_available, "MPI": dist.is_mpi_available}
    found = [backend for backend, is_available in checks.items() if is_available()]
    if "Gloo" not in found:
        text = "this torch was built without Gloo, which connects ranks on the CPU: install another build of torch"
        return Finding(name, text, "problem")
    return Finding(name, ", ".join(found))


def _check_cuda(found: dict[str, str]) -> Finding:
    if not torch.cuda.is_available():
        return Finding("CUDA", "no device that this torch can use")
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    text = f"{len(devices)} x {devices[0]}" if len(set(devices)) == 1 else ", ".join(devices)
    if not dist.is_nccl_available():
        text += ", but this torch was built without NCCL: install another build of torch"
        return Finding("CUDA", text, "problem")
    return Finding("CUDA", f"{text}, CUDA {found['CUDA']}")


def _check_memory() -> Finding:
    available = available_bytes()
    if available is None:
        return Finding("memory", "the system does not report how much memory is free")
    remedy = ", which is little: end other programs, or raise the memory limit of this process"
    return _judged("memory", f"{available / 1e9:.1f} GB free", available < _LITTLE_MEMORY_BYTES, remedy)


def _check_name_lookup() -> Finding:
    """Time what torch does for each connection between ranks: it looks up the name of the other end."""
    began_at = time.perf_counter()
    with contextlib.suppress(OSError):
        socket.getnameinfo((_LOOPBACK_AS_TORCH_HAS_IT, 0, 0, 0), socket.NI_NUMERICSERV)
    seconds = time.perf_counter() - began_at
    text = f"torch looks up the name of this host in {format_time(seconds)}"
    remedy = (
        ", for each connection: the name server does not answer. Until it does, ranks start slowly. On this host the "
        f'line "{_LOOPBACK_AS_TORCH_HAS_IT} localhost" in /etc/hosts helps'
    )
    return _judged("name lookup", text, seconds >= _SLOW_LOOKUP_SECONDS, remedy)


def _check_shared_files() -> Iterator[Finding]:
    """Check /dev/shm, through which DataLoader workers and NCCL pass tensors. Syncline does not use /dev/shm."""
    if sys.platform != "linux":
        return
    place = Path("/dev/shm")
    remedy = "start a container with --shm-size=8g (Kubernetes: mount an emptyDir with medium: Memory)"
    if not place.is_dir() or not os.access(place, os.W_OK):
        yield Finding("/dev/shm", f"does not exist or is not writable: {remedy}", "problem")
        return
    total, _, free = shutil.disk_usage(place)
    text = f"{total / 1e9:.2f} GB, {free / 1e9:.2f} GB free"
    little = f", which is little for DataLoader workers and NCCL: {remedy}"
    yield _judged("/dev/shm", text, free < _SMALL_SHM_BYTES, little)


def _check_limits() -> Iterator[Finding]:
    try:
        import resource
    except ImportError:  # not a Unix
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    text = f"{'unlimited' if soft == unlimited else soft} at most"
    little = f", which is little for many ranks and workers: run ulimit -n {min(hard, 65536)}"
    yield _judged("open files", text, soft != unlimited and soft < _FEW_FILES, little)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    size = "unlimited" if locked == unlimited else f"{locked / 1e6:.2f} MB"
    yield Finding("locked memory", f"{size} (InfiniBand needs unlimited: ulimit -l)")


# ---------------------------------------------------------------------- a program for two ranks


def main(path: str) -> None:
    """Connect to the other ranks and check an all_reduce. Rank 0 then writes the name of the transport to a file.

    Args:
        path: the path of the file.
    """
    world = init(device="cpu")
    transport = transport_of(None)
    ours = torch.full((1000,), 1.0 + world.rank)
    transport.all_reduce(ours).wait()
    expected = world.size * (world.size + 1) / 2
    if not bool((ours == expected).all()):
        raise SystemExit(
            f"rank {world.rank}: expected all elements of an all_reduce to be the sum {expected}, got the values "
            f"{ours.unique().tolist()}"
        )
    if world.rank == 0:
        Path(path).write_text(transport.name)
    shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
