"""Checks of the host's requirements for parallel training, and a small program for two ranks."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from syncline.debug.report import facts
from syncline.session.world import init, shutdown, transport_of
from syncline.transport.shared_memory.core import SharedMemoryUnavailable, library
from syncline.transport.shared_memory.memory import available_bytes

_SMALL_SHM_BYTES = 1 << 30

_FEW_FILES = 1024

_LITTLE_MEMORY_BYTES = 1 << 30


class Finding(NamedTuple):
    """The result of one check."""

    name: str
    text: str
    kind: Literal["fine", "note", "problem"] = "fine"
    """A "problem" prevents training; a "note" may do so later. The text of both includes a remedy."""


def findings() -> list[Finding]:
    """Return the results of all checks; none is a collective call.

    Example:
        >>> [finding.name for finding in findings()][:3]
        ['versions', 'processor', 'native core']
    """
    return list(_looked_at())


def _looked_at() -> Iterator[Finding]:
    found = facts()
    yield Finding(
        "versions", f"syncline {found['syncline']}, torch {found['torch']}, Python {found['Python']}"
    )
    yield Finding("processor", f"{_num_cores()} cores, {found['processor']}")
    yield _native_core()
    yield _engines()
    yield _cuda(found)
    yield _memory()
    yield from _shared_files()
    yield from _limits()


def _num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _native_core() -> Finding:
    name = "native core"
    try:
        library()
    except SharedMemoryUnavailable as error:
        is_linux = sys.platform == "linux"
        remedy = "" if is_linux else "; Gloo moves the tensors instead"
        return Finding(name, f"{error}{remedy}", "problem" if is_linux else "note")
    return Finding(name, "there, and loaded: ranks of one host share memory")


def _engines() -> Finding:
    name = "torch.distributed"
    if not dist.is_available():
        return Finding(name, "this torch was built without it: install another build of torch", "problem")
    asked = {"Gloo": dist.is_gloo_available, "NCCL": dist.is_nccl_available, "MPI": dist.is_mpi_available}
    found = [engine for engine, is_there in asked.items() if is_there()]
    if "Gloo" not in found:
        return Finding(
            name, "without Gloo, which connects ranks on the CPU: install another build of torch", "problem"
        )
    return Finding(name, ", ".join(found))


def _cuda(found: dict[str, str]) -> Finding:
    if not torch.cuda.is_available():
        return Finding("CUDA", "no device that this torch can use")
    devices = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    text = f"{len(devices)} x {devices[0]}" if len(set(devices)) == 1 else ", ".join(devices)
    if not dist.is_nccl_available():
        return Finding(
            "CUDA", f"{text}; but torch was built without NCCL: install another build of torch", "problem"
        )
    return Finding("CUDA", f"{text}, CUDA {found['CUDA']}")


def _memory() -> Finding:
    available = available_bytes()
    if available is None:
        return Finding("memory", "the system does not report how much is free")
    text = f"{available / 1e9:.1f} GB free"
    if available < _LITTLE_MEMORY_BYTES:
        return Finding("memory", f"{text}, under the limits that this process is in: raise them", "note")
    return Finding("memory", text)


def _shared_files() -> Iterator[Finding]:
    """Check /dev/shm, through which DataLoader workers and NCCL pass tensors. Syncline's shared memory has no file."""
    if sys.platform != "linux":
        return
    place = Path("/dev/shm")
    remedy = "a container gets more by --shm-size=8g (Kubernetes: an emptyDir with medium: Memory)"
    if not place.is_dir() or not os.access(place, os.W_OK):
        yield Finding("/dev/shm", f"does not exist or is not writable; {remedy}", "problem")
        return
    total, _, free = shutil.disk_usage(place)
    text = f"{total / 1e9:.2f} GB, {free / 1e9:.2f} GB free"
    if free < _SMALL_SHM_BYTES:
        yield Finding("/dev/shm", f"{text}: little for DataLoader workers and NCCL; {remedy}", "note")
    else:
        yield Finding("/dev/shm", text)


def _limits() -> Iterator[Finding]:
    try:
        import resource
    except ImportError:  # not a Unix
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    text = "unlimited" if soft == unlimited else str(soft)
    if soft != unlimited and soft < _FEW_FILES:
        yield Finding(
            "open files",
            f"{text} at most: few for many ranks and workers; ulimit -n {min(hard, 65536)}",
            "note",
        )
    else:
        yield Finding("open files", f"{text} at most")
    core, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    size = "unlimited" if core == unlimited else f"{core / 1e6:.2f} MB"
    yield Finding("locked memory", f"{size} (InfiniBand needs unlimited: ulimit -l)")


# ---------------------------------------------------------------------- a program for two ranks


def main(path: str) -> None:
    """Connect to the other ranks, all_reduce a tensor, and write the transport's name to a file."""
    world = init(device="cpu")
    transport = transport_of(None)
    ours = torch.full((1000,), 1.0 + world.rank)
    transport.all_reduce(ours).wait()
    expected = world.size * (world.size + 1) / 2
    if not bool((ours == expected).all()):
        raise SystemExit(f"rank {world.rank}: expected a sum of {expected}, got {ours.unique().tolist()}")
    if world.rank == 0:
        Path(path).write_text(transport.name)
    shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
