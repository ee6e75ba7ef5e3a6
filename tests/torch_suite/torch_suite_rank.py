"""What one rank does to run one of torch's own DistributedDataParallel tests (see test_torch_suite.py).

torch's wheel ships the tests: `torch/testing/_internal/distributed/distributed_test.py`. The file is executed under
a name of our own while `torch.nn.parallel.DistributedDataParallel` is the class under test, so that every name for
it in there is that class. Nothing stays swapped between tests, for the processes are shared with other tests.

Most of those tests ask for GPUs though what they test is not about GPUs. They run here with "cuda" meaning "cpu":
`.cuda()` returns its tensor, a device of an accelerator is the CPU, `device_ids` are dropped. Which of them make
sense like this is decided by torch's own class: only tests that it passes in the same setting are in the list.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache, partial, wraps
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import SkipTest, mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import syncline

CLASSES = {
    "torch": torch.nn.parallel.DistributedDataParallel,
    "syncline": syncline.DistributedDataParallel,
}

_GPU_GUARDS = ("skip_if_lt_x_gpu", "nccl_skip_if_lt_x_gpu")
"""Decorators of torch's, with arguments, that skip a test where GPUs are missing; skip_if_no_gpu has none."""

_GROUP_TIMEOUT = timedelta(seconds=30)

_MAX_PIXELS = 40
"""Width and height to which the input of a convolution is cropped where "cuda" means "cpu"."""

_PATIENCE_SECONDS = 3.0
"""How long a rank that failed keeps its connections, for others that fail a little later by themselves."""

_moved_to_cpu = False
"""Whether the test under way runs with "cuda" meaning "cpu"."""


def run(name: str, class_name: str, folder: str, moved_to_cpu: bool, expected: str = "") -> None:
    """Run one of torch's tests on this rank, where torch.distributed is initialised.

    Args:
        name: the test method.
        class_name: a key of CLASSES.
        folder: an empty folder shared by the ranks of this test.
        moved_to_cpu: "cuda" means "cpu".
        expected: why a failure is expected; it is then reported as such, and this process is used again.
    """
    try:
        with _setting(CLASSES[class_name], Path(folder), moved_to_cpu):
            tests = load(class_name)
            # Ranks that wait for each other end with tracebacks, before they are ended.
            dist.distributed_c10d._set_pg_timeout(_GROUP_TIMEOUT)
            # torch's tests want random data that differs from test to test no more than from run to run.
            torch.manual_seed(1234)
            random.seed(1234)
            case = _case(tests, name)
            case.rank = dist.get_rank()
            case.file_name = os.path.join(folder, "init")
            tests.Barrier.barrier_id = 0
            getattr(case, name)()
    except SkipTest as skip:
        pytest.skip(str(skip))
    except SystemExit as exit_:
        pytest.skip(_skip_reason(exit_))
    except Exception as error:
        if not expected:
            raise
        reason = _in_one_line(error)
        _leave(Path(folder))
        pytest.xfail(f"{expected} | {reason}")


def names() -> list[str]:
    """The test methods that use DistributedDataParallel, themselves or through their helpers."""
    base = load("torch").DistributedTest._DistTestBase
    functions = {name: f for name, f in vars(base).items() if inspect.isfunction(f)}
    mentioned = {name: _names_in(f) for name, f in functions.items()}
    using = {name for name, words in mentioned.items() if "DistributedDataParallel" in words}
    while more := {name for name, words in mentioned.items() if name not in using and words & using}:
        using |= more
    return sorted(name for name in using if name.startswith("test_"))


@cache
def load(class_name: str) -> ModuleType:
    """torch's test file, executed with the class under test in the place of torch's."""
    import torch.testing._internal.common_distributed as common

    spec = importlib.util.find_spec("torch.testing._internal.distributed.distributed_test")
    assert spec is not None
    assert spec.origin is not None
    spec = importlib.util.spec_from_file_location(f"torch_ddp_tests_of_{class_name}", spec.origin)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    guards = {name: _lifted(getattr(common, name)) for name in _GPU_GUARDS}
    no_gpu = common.skip_if_no_gpu
    guards["skip_if_no_gpu"] = _lifted(lambda: no_gpu)()
    with (
        _swapped(CLASSES[class_name]),
        mock.patch.dict(os.environ, {"BACKEND": "gloo", "WORLD_SIZE": "2"}),
        mock.patch.multiple(common, **guards),
    ):
        sys.modules[spec.name] = module  # pickle looks the classes of the file up by its name
        spec.loader.exec_module(module)
    remove_at_once = module._rank_temp_file

    @contextlib.contextmanager
    def remove_when_all_have_read() -> Iterator[str]:
        """torch's, whose rank 0 may remove the file before another rank has opened it."""
        with remove_at_once() as name:
            yield name
            dist.barrier()

    module._rank_temp_file = remove_when_all_have_read
    return module


# ---------------------------------------------------------------------- the setting of a test


@contextlib.contextmanager
def _setting(tested: type[nn.Module], folder: Path, moved_to_cpu: bool) -> Iterator[None]:
    """The class swapped, the folders and variables torch's tests expect, and everything back at the end."""
    global _moved_to_cpu
    for name in ("barrier", "test_dir", "init_dir"):
        (folder / name).mkdir(exist_ok=True)
    level = dist.get_debug_level()
    dtype = torch.get_default_dtype()
    variables = {"BACKEND": "gloo", "TEMP_DIR": str(folder)}
    _moved_to_cpu = moved_to_cpu
    try:
        with (
            mock.patch.dict(os.environ, variables),
            mock.patch.object(tempfile, "tempdir", str(folder)),
            _swapped(tested),
            _cuda_is_cpu(tested) if moved_to_cpu else contextlib.nullcontext(),
        ):
            yield
    finally:
        _moved_to_cpu = False
        dist.set_debug_level(level)
        torch.set_default_dtype(dtype)


@contextlib.contextmanager
def _swapped(tested: type[nn.Module]) -> Iterator[None]:
    with (
        mock.patch.object(torch.nn.parallel, "DistributedDataParallel", tested),
        mock.patch.object(torch.nn.parallel.distributed, "DistributedDataParallel", tested),
    ):
        yield


def _case(tests: ModuleType, name: str) -> Any:
    """An instance that thinks of itself as one of the processes of torch's own harness."""
    bases = (tests.TestDistBackend, tests.DistributedTest._DistTestBase)
    return type("TorchDDPTests", bases, {"world_size": property(lambda _: dist.get_world_size())})(name)


def _lifted(guard: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator factory that guards a test with torch's decorator unless the test was moved to the CPU."""

    def factory(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        def decorate(f: Callable[..., Any]) -> Callable[..., Any]:
            guarded = guard(*args, **kwargs)(f)

            @wraps(f)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                return (f if _moved_to_cpu else guarded)(*args, **kwargs)

            return wrapper

        return decorate

    return factory


# ---------------------------------------------------------------------- "cuda" means "cpu"


@contextlib.contextmanager
def _cuda_is_cpu(tested: type[nn.Module]) -> Iterator[None]:
    rank = dist.get_rank()
    module_to = nn.Module.to
    init = tested.__init__
    is_ours = tested is CLASSES["syncline"]
    sync_batch_norm = syncline.nn.SyncBatchNorm if is_ours else nn.SyncBatchNorm

    def to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        return module_to(self, *map(_on_cpu, args), **{k: _on_cpu(v) for k, v in kwargs.items()})

    @wraps(init)
    def without_device_ids(
        self: nn.Module,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        *args: Any,
        **kw: Any,
    ) -> None:
        init(self, module, None, None, *args, **kw)

    with (
        mock.patch.object(tested, "__init__", without_device_ids),
        mock.patch.multiple(nn.Module, to=to, cuda=lambda self, device=None: self),
        mock.patch.multiple(
            torch.cuda,
            set_device=lambda device: None,
            current_device=lambda: rank,
            device_count=lambda: dist.get_world_size(),
            synchronize=lambda device=None: None,
            device=lambda device: contextlib.nullcontext(),
        ),
        mock.patch.multiple(torch, Stream=_NoStream, Event=_NoEvent),
        mock.patch.object(torch.accelerator, "current_stream", _NoStream),
        # torch's own has no kernels for the CPU, and torch's class refuses it there.
        mock.patch.object(nn, "SyncBatchNorm", sync_batch_norm),
        mock.patch.object(
            dist, "new_subgroups", partial(dist.new_subgroups, group_size=dist.get_world_size())
        ),
        _CudaIsCpu(),
    ):
        yield


class _CudaIsCpu(TorchFunctionMode):
    """Tensors asked to be on an accelerator are on the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.to:
            args = (args[0], *map(_on_cpu, args[1:]))
        if func is torch.conv2d:
            # One test convolves 1000 x 1000 pixels hundreds of times, which takes many minutes on a CPU.
            args = (args[0][..., :_MAX_PIXELS, :_MAX_PIXELS], *args[1:])
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _on_cpu(kwargs["device"])}
        return func(*args, **kwargs)


class _NoStream:
    """A stream of the CPU, where everything has happened when the call returns."""

    def wait_stream(self, stream: object) -> None: ...

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *exception: object) -> None: ...


class _NoEvent:
    """An event of such a stream."""

    def record(self, stream: object = None) -> None: ...

    def wait(self, stream: object = None) -> None: ...


def _on_cpu(device: Any) -> Any:
    """The CPU for anything that names an accelerator; whatever else it is, unchanged."""
    names_one = (
        (isinstance(device, torch.device) and device.type == "cuda")
        or (isinstance(device, int) and not isinstance(device, bool))
        or (isinstance(device, str) and device.startswith("cuda"))
    )
    return torch.device("cpu") if names_one else device


# ---------------------------------------------------------------------- small parts


def _leave(folder: Path) -> None:
    """Close this rank's connections, so that ranks that wait for it end, too.

    Not at once: what it has sent last may still be on its way to a rank that would fail by itself.
    """
    (folder / f"ended-{dist.get_rank()}").touch()
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while len(list(folder.glob("ended-*"))) < dist.get_world_size() and time.monotonic() < deadline:
        time.sleep(0.05)
    syncline.shutdown()
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.distributed_c10d._abort_process_group()


def _skip_reason(exit_: SystemExit) -> str:
    from torch.testing._internal.common_distributed import TEST_SKIPS

    for skip in TEST_SKIPS.values():
        if skip.exit_code == exit_.code:
            return skip.message
    raise RuntimeError(f"the test called sys.exit({exit_.code!r})") from exit_


def _in_one_line(error: Exception) -> str:
    """Type, first line and deepest place in Syncline, or else in torch's test file."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [
        f for f in frames if "syncline" in f.filename and f.filename != __file__ and "/src/" in f.filename
    ]
    theirs = [f for f in frames if f.filename.endswith("distributed_test.py")]
    where = "".join(f" [{Path(f[-1].filename).name}:{f[-1].lineno}]" for f in (theirs, ours) if f)
    text = " ".join(str(error).partition("To execute this test, run")[0].split())
    return f"{type(error).__name__}: {text[:300]}{where}"


def _names_in(f: Callable[..., Any]) -> set[str]:
    """Every name that stands in a function's code, those of inner functions included."""
    codes = [inspect.unwrap(f).__code__]
    found: set[str] = set()
    for code in codes:
        found |= {*code.co_names, *code.co_freevars}
        codes += [constant for constant in code.co_consts if inspect.iscode(constant)]
    return found
