"""A program in which Syncline sees macOS or Windows, as far as Python shows a system to it.

    python other_system.py {linux,darwin,win32} FOLDER [RANK SIZE PORT]

Modules of Syncline, and only they, get the standard library without the names that the other system lacks, and no file
below /proc, /sys and /dev. torch and the standard library themselves stay as they are. So this shows that Syncline's
own code asks for nothing that the system lacks; it says nothing of torch there.
"""

from __future__ import annotations

import builtins
import importlib
import os
import pathlib
import pkgutil
import sys
from types import ModuleType
from typing import Any

NOT_LINUX = {
    "os": "memfd_create MFD_CLOEXEC pidfd_open sched_getaffinity posix_fallocate eventfd O_TMPFILE",
    "select": "epoll",
    "socket": "TCP_USER_TIMEOUT TCP_KEEPIDLE SO_PEERCRED MSG_CMSG_CLOEXEC",
}
NOT_UNIX = {
    "os": "fork register_at_fork getuid geteuid getpgid getsid setsid killpg mkfifo statvfs sysconf getloadavg wait "
    "WNOHANG WIFEXITED O_NONBLOCK O_NOCTTY O_CLOEXEC O_DIRECTORY O_NOFOLLOW fchmod chown getgroups uname",
    "select": "poll epoll POLLIN",
    "signal": "SIGKILL SIGUSR1 SIGUSR2 SIGALRM SIGSTOP SIGCHLD SIGHUP SIGQUIT SIGTSTP SIGCONT setitimer ITIMER_REAL "
    "pthread_kill pthread_sigmask sigwait set_wakeup_fd",
    "socket": "AF_UNIX SCM_RIGHTS send_fds recv_fds",
    "mmap": "PROT_READ PROT_WRITE MAP_SHARED MAP_PRIVATE",
    "faulthandler": "register",
}
MISSING: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "linux": ({}, ()),
    "darwin": (NOT_LINUX, ()),
    "win32": (
        {name: f"{NOT_LINUX.get(name, '')} {NOT_UNIX[name]}" for name in NOT_UNIX},
        ("fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "syslog", "readline"),
    ),
}
LINUX_ONLY = ("/proc", "/sys", "/dev")


class Seen(ModuleType):
    """A module without the names that the system lacks, and with others in their place."""

    def __init__(self, real: ModuleType, missing: frozenset[str], instead: dict[str, Any]) -> None:
        super().__init__(real.__name__)
        object.__setattr__(self, "_seen", (real, missing, instead))

    def __getattribute__(self, name: str) -> Any:
        real, missing, instead = object.__getattribute__(self, "_seen")
        if name in missing:
            raise AttributeError(f"module {real.__name__!r} has no attribute {name!r} on this system")
        return instead[name] if name in instead else getattr(real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "_seen")[0], name, value)


def without_linux_files(function: Any) -> Any:
    def opened(path: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(LINUX_ONLY):
            raise FileNotFoundError(2, "no such file on this system", os.fspath(path))
        return function(path, *arguments, **options)

    return opened


def show(system: str) -> None:
    """From now on, modules of Syncline are imported on this system."""
    names, modules = MISSING[system]

    def cdll(name: str | None, *arguments: Any, **options: Any) -> Any:
        if name is None and system == "win32":
            raise TypeError("argument of type 'NoneType' is not iterable")
        return ctypes.CDLL(name, *arguments, **options)

    import ctypes

    instead: dict[str, dict[str, Any]] = {
        "sys": {"platform": system},
        "ctypes": {"CDLL": cdll},
        "os": {name: without_linux_files(getattr(os, name)) for name in ("open", "readlink", "listdir")},
        "builtins": {},
    }
    seen = {
        name: Seen(
            importlib.import_module(name), frozenset(names.get(name, "").split()), instead.get(name, {})
        )
        for name in {*names, *instead}
    }
    real_import, real_open = builtins.__import__, pathlib.Path.open

    def import_(
        name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        if not level and str((globals or {}).get("__name__", "")).split(".")[0] == "syncline":
            if name in modules:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            if name in seen:
                return seen[name]
        return real_import(name, globals, locals, fromlist, level)

    def opened(path: pathlib.Path, *arguments: Any, **options: Any) -> Any:
        if str(path).startswith(LINUX_ONLY[:2]):
            raise FileNotFoundError(2, "no such file on this system", str(path))
        return real_open(path, *arguments, **options)

    builtins.__import__ = import_
    builtins.open = without_linux_files(builtins.open)
    pathlib.Path.open = opened  # type: ignore[method-assign]


def import_everything() -> int:
    import syncline

    names = [found.name for found in pkgutil.walk_packages(syncline.__path__, "syncline.")]
    for name in names:
        if name.endswith(("__main__", "libsyncline_core")) or name.startswith("syncline.frameworks."):
            continue  # a program; the native core; what needs a framework
        importlib.import_module(name)
    return len(names)


def train(folder: str) -> list[float]:
    """Three steps on this rank's part of the data, saved and loaded again; the parameters."""
    import torch

    import syncline as sl

    world = sl.init(device="cpu", timeout=60)
    torch.manual_seed(world.rank)
    ddp = sl.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)))
    optimizer = ddp.attach(torch.optim.AdamW(ddp.parameters(), lr=0.1))
    state = sl.TrainState(model=ddp, optimizer=optimizer)
    data = torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(0))
    with sl.Checkpointer(folder) as checkpointer:
        for batch in data:
            optimizer.zero_grad()
            ddp(batch[world.rank :: world.size]).square().sum().backward()
            optimizer.step()
            state.commit()
            checkpointer.stop_if_asked(state)
        checkpointer.save(state)
        before = [p.detach().clone() for p in ddp.parameters()]
        for p in ddp.parameters():
            p.data.zero_()
        checkpointer.load(state)
    assert all(map(torch.equal, before, ddp.parameters()))
    sl.barrier()
    assert sl.mean(float(world.rank)) == (world.size - 1) / 2
    sl.check_replicas(ddp)
    print(ddp.contract)
    found = torch.cat([p.detach().flatten() for p in ddp.parameters()]).tolist()
    sl.shutdown()
    return found


def launch() -> str:
    """What `sl.launch` says where it cannot start ranks."""
    import syncline as sl

    try:
        sl.launch(sl.init)
    except sl.SynclineError as error:
        return str(error)
    raise AssertionError("it started ranks")


def main(system: str, folder: str, *rank: str) -> None:
    import torch.distributed  # noqa: F401 - first, so that torch sees this system as it is

    if rank:
        variables = dict(zip(("RANK", "WORLD_SIZE", "MASTER_PORT"), rank, strict=True))
        os.environ.update(variables, MASTER_ADDR="127.0.0.1", LOCAL_RANK=rank[0], LOCAL_WORLD_SIZE=rank[1])
    if system != "linux":
        show(system)
    print("trained:", train(folder))
    if not rank:
        print("imported", import_everything(), "modules")
        if system == "win32":
            print("sl.launch:", launch())


if __name__ == "__main__":
    main(*sys.argv[1:])
