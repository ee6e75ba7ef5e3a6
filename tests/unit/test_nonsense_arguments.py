"""Every public callable is given nonsense for every parameter: one clear error with the name, and what came.

A valid call of each public callable follows from its defaults and from MAKERS, or stands in TABLE. What is nonsense for
a parameter follows from its annotation, or stands in TABLE. A new one without either makes a test fail.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import syncline as sl
from syncline.checks import what_it_is
from syncline.transport import ThreadGroup, Transport, run_ranks

NAN, INF = float("nan"), float("inf")

# ---------------------------------------------------------------------- what makes no sense

COUNT = ["text", None, 1.5, NAN, INF, True, -1, [1], torch.tensor(2)]
COUNT_OF_ANY_SIGN = ["text", None, 1.5, NAN, INF, True, [1]]
FLAG = ["yes", "", None, NAN, 2, 1.0, [True]]
TORCHS_FLAG = ["yes", "False", NAN, 2, 1.0, [True]]
"""torch's class takes 0, 1 and None as well, and so do we."""
NUMBER = ["text", None, NAN, INF, True, [0.5], 1j]
MODULE = ["text", None, 3, nn.Linear, [nn.Linear(2, 2)]]
FUNCTION = ["text", None, 3]
GROUP = ["text", 3, [0], nn.Linear]
STATE = ["text", None, 3, [1]]
DTYPE = ["text", 3, torch.int32, torch.bool, float]
PATH = [3, None, True, [], ""]
COMPRESSION = ["text", 3, True, sl.compression.Cast]
TREE = ["text", None, 3, {"a": "text"}, object()]

BY_ANNOTATION: dict[str, list[Any]] = {
    "int": COUNT,
    "bool": FLAG,
    "float": NUMBER,
    "float | Tensor": [*NUMBER, torch.zeros(2), torch.tensor(NAN)],
    "int | torch.Tensor": COUNT,
    "nn.Module": MODULE,
    "AnyModule": MODULE,
    "nn.Module | TrainState": MODULE,
    "Callable[..., Any]": FUNCTION,
    "Callable[..., Optimizer]": FUNCTION,
    "Callable[[nn.Module], float | Tensor]": FUNCTION,
    "OuterFactory": [*FUNCTION, torch.optim.SGD([torch.zeros(1)], lr=0.1)],
    "Group": GROUP,
    "dist.ProcessGroup | Transport": GROUP,
    "Mapping[str, Any]": STATE,
    "dict[str, Any]": STATE,
    "Mapping[str, Tensor]": STATE,
    "torch.dtype": DTYPE,
    "str | os.PathLike[str]": PATH,
    "Compression": COMPRESSION,
    "EverythingWithin": ["text", 1, 0, 1.5, True, NAN],
    "Topology": ["text", 3, True, None],
    "ReduceOp": ["text", 3, True, None, NAN],
    "OnDivergence": ["text", 3, True, None],
    "OnNonFinite": ["text", 3, True, None],
    "BufferPolicy": ["text", 3, True],
    "Strategy[Any]": ["text", 3, True, sl.LocalSGD],
    "ReplicaCheck | Looks": ["text", 3, True, sl.ReplicaCheck],
    "TrainState": ["text", 3, None, {}, nn.Linear(2, 2)],
    "Literal['max', 'min']": ["text", 3, True, None],
    "Literal['warn', 'evict'] | None": ["text", 3, True],
    "Literal[8, 4, 2]": ["text", 3, True, None, NAN, 8.0],
    "tuple[Any, ...]": ["text", 3, [1]],
    "dist.ProcessGroup": GROUP,
}
"""What a parameter of such a type is not; None is left out where the annotation says `| None`."""


# ---------------------------------------------------------------------- a valid call of each


@dataclass
class Row:
    """How a callable is called rightly, and what else is nonsense."""

    given: dict[str, Any] = field(default_factory=dict)
    """Arguments of a call that is right; a callable makes a new value for each call."""
    on: Callable[[], Any] | None = None
    """Makes the object of a method, where not as in MAKERS."""
    nonsense: Mapping[str, list[Any]] = field(default_factory=dict)
    """Of parameters for which it does not follow from the annotation; none: any value is accepted, see the comment."""


def wrapper() -> sl.DistributedDataParallel:
    return sl.DistributedDataParallel(nn.Linear(2, 2))


def module() -> nn.Module:
    return nn.Linear(2, 2)


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)


def evolution() -> sl.EvolutionStrategy:
    return sl.EvolutionStrategy(module(), 0.1, 0.1, 2, 0)


def sampler() -> sl.DistributedSampler:
    return sl.DistributedSampler(range(8), 2, 0)


def state() -> sl.TrainState:
    return sl.TrainState(model=module())


def exchange() -> sl.compression.MeanExchange:
    return sl.compression.MeanExchange(
        sl.compression.PowerSGD(1),
        [[2, 2]],
        dtype=torch.float32,
        device=torch.device("cpu"),
        transport=ThreadGroup(1).transport(0),
    )


WRAPPER = "sl.DistributedDataParallel"
ANYTHING: list[Any] = []
"""For a parameter that takes any value."""

MAKERS: dict[str, Callable[[], Any]] = {
    WRAPPER: wrapper,
    "sl.EvolutionStrategy": evolution,
    "sl.compression.HookState": lambda: sl.compression.HookState(sl.compression.Cast(), module=module()),
    "sl.compression.MeanExchange": exchange,
    "sl.DistributedSampler": sampler,
    "sl.nn.SyncBatchNorm": lambda: sl.nn.SyncBatchNorm(2),
    "sl.TrainState": state,
    "sl.Checkpointer": lambda: sl.Checkpointer(folder()),
    "sl.Observer": sl.Observer,
    "sl.exporters.TensorBoard": lambda: sl.exporters.TensorBoard(folder()),
    "sl.exporters.OpenTelemetry": lambda: sl.exporters.OpenTelemetry(),
    "sl.exporters.Prometheus": lambda: sl.exporters.Prometheus(registry()),
}
"""Objects of the classes whose methods users call."""

TABLE: dict[str, Row] = {
    "sl.init": Row(
        nonsense={
            "transport": ["carrier pigeon", 3, None],
            "timeout": [*NUMBER, 0, -1.0],
            "device": ["meta", "nonsense", 99, 1.5, True],
        }
    ),
    "sl.launch": Row(
        {"fn": lambda: os.getpid, "ranks": 1},
        nonsense={
            "fn": FUNCTION,
            "args": ["text", 3, None, {"a": 1}],
            "kwargs": ["text", 3, [1]],
            "method": ["forkserver", 3, True],
            "timeout": [*NUMBER[:1], *NUMBER[2:], 0, -1.0],
        },
    ),
    # verbs
    "sl.broadcast_": Row({"target": module}, nonsense={"target": TREE, "src": [*COUNT, 1]}),
    "sl.average_": Row({"target": module}, nonsense={"target": TREE}),
    "sl.all_reduce_": Row({"target": module, "op": "sum"}, nonsense={"target": TREE}),
    "sl.mean": Row({"values": 1.0}, nonsense={"values": ["text", None, {"a": "text"}, object()]}),
    "sl.gather": Row(
        {"values": 1.0},
        nonsense={"values": ["text", None, {"a": "text"}, object()], "dim": COUNT_OF_ANY_SIGN},
    ),
    "sl.keep_best_": Row(
        {"target": module, "score": 1.0},
        nonsense={"target": TREE, "score": ["text", None, True, [1.0], 1j, torch.zeros(2)]},
    ),
    "sl.check_replicas": Row({"target": module}, nonsense={"target": TREE}),
    "sl.sync_gradients_": Row({"module": module}, nonsense={"module": MODULE}),
    "sl.diverge": Row({"module": wrapper}),
    "sl.share_": Row({"module": module}),
    "sl.write_shared": Row({"module": lambda: sl.share_(module())}),
    # the wrapper
    WRAPPER: Row(
        {"module": module},
        nonsense={
            "device_ids": ["text", 3, [1.5], [True], [0, 1]],
            "output_device": [1.5, True, [0]],
            "dim": ANYTHING,  # not used; torch's class does not look at it either
            "process_group": GROUP,
            "bucket_cap_mb": [*NUMBER[:1], *NUMBER[2:], 0, -1.0],
            "bucket_cap_mb_list": ["text", 3, [0.0], [NAN], ["text"], [True]],
            "delay_all_reduce_named_params": ["text", 3, [nn.Parameter(torch.zeros(2))]],
            "param_to_hook_all_reduce": ["text", 3],
            "mixed_precision": ["text", 3, torch.float16, True],
            "device_mesh": ["text", 3, [0]],
            "ignore": ["weight", 3, None, [3], [None]],
            **dict.fromkeys(
                (
                    *("broadcast_buffers", "init_sync", "find_unused_parameters", "check_reduction"),
                    *("gradient_as_bucket_view", "static_graph", "skip_all_reduce_unused_params"),
                    *("batched_grad_copy", "forward_sync_buffers", "lazy_bucket_allocation"),
                ),
                TORCHS_FLAG,
            ),
        },
    ),
    f"{WRAPPER}.attach": Row(
        {"optimizer": None},
        nonsense={"optimizer": ["text", None, 3, torch.optim.SGD, nn.Linear(1, 1)]},
    ),
    f"{WRAPPER}.clip_grad_norm_": Row(
        {"max_norm": 1.0},
        nonsense={
            "max_norm": ["text", None, NAN, True, -1.0, [1.0]],
            "norm_type": ["text", None, NAN, True, 0.0, -1.0],
            "error_if_nonfinite": TORCHS_FLAG,
            "foreach": TORCHS_FLAG,
        },
    ),
    f"{WRAPPER}.register_comm_hook": Row(
        {"state": None, "hook": lambda: sl.compression.hook}, nonsense={"state": ANYTHING}
    ),
    f"{WRAPPER}.normalize_by": Row(
        {"num_items": 1}, nonsense={"num_items": [*COUNT[:-1], torch.zeros(2), torch.tensor(1.0)]}
    ),
    f"{WRAPPER}.report": Row(
        {"metrics": lambda: {"loss": 1.0}},
        nonsense={
            "metrics": [{"loss": one} for one in ("text", None, [1.0], torch.zeros(2), 1j)],
            "weight": ["text", None, NAN, True, -1.0, float("inf")],
        },
    ),
    f"{WRAPPER}.load_sync_state_dict": Row(
        {"state": lambda: drifting().sync_state_dict()}, on=lambda: drifting()
    ),
    f"{WRAPPER}.join": Row(
        nonsense=dict.fromkeys(
            ("divide_by_initial_world_size", "enable", "throw_on_early_termination"), TORCHS_FLAG
        ),
    ),
    f"{WRAPPER}.train": Row(nonsense={"mode": ANYTHING}),  # torch's own check
    f"{WRAPPER}.zero_grad": Row(nonsense={"set_to_none": ANYTHING}),  # torch's own check
    # when and how
    "sl.LocalSGD": Row({"every": 8}),
    "sl.DiLoCo": Row(
        {"every": 8}, nonsense={"compression": COMPRESSION, "fragments": [*COUNT, 9], "delay": [*COUNT, 8]}
    ),
    "sl.Gossip": Row({"topology": "ring"}),
    "sl.ParameterServer": Row({"staleness": 1}),
    "sl.EvolutionStrategy": Row(
        {"module": module, "sigma": 0.1, "lr": 0.1, "population": 2, "seed": 0},
        nonsense={"population": [*COUNT, 3], "seed": COUNT_OF_ANY_SIGN},
    ),
    "sl.EvolutionStrategy.step": Row({"loss_fn": lambda: lambda module: 1.0}),
    "sl.EvolutionStrategy.load_state_dict": Row({"state": lambda: evolution().state_dict()}),
    # encodings
    "sl.compression.After": Row({"num_averagings": 2, "then": sl.compression.Cast()}),
    "sl.compression.Cast": Row(nonsense={"dtype": [*DTYPE, torch.float32]}),
    "sl.compression.Chain": Row(
        {"stages": (sl.compression.PowerSGD(), sl.compression.Cast())}, nonsense={"stages": [("text", 3), ()]}
    ),
    "sl.compression.PowerSGD": Row(nonsense={"seed": COUNT_OF_ANY_SIGN}),
    "sl.compression.Quantize": Row(nonsense={"block_numel": [*COUNT, 3]}),
    "sl.compression.TopK": Row(nonsense={"ratio": [*NUMBER, 0.0, 1.5]}),
    "sl.compression.HookState": Row({"compression": sl.compression.Cast()}, nonsense={"module": MODULE[2:]}),
    "sl.compression.HookState.load_state_dict": Row({"state": dict}),
    "sl.compression.MeanExchange": Row(
        {
            "compression": None,
            "shapes": [[2, 2]],
            "dtype": torch.float32,
            "device": torch.device("cpu"),
            "transport": lambda: ThreadGroup(1).transport(0),
        },
        nonsense={
            "shapes": ["text", 3, None, [2], [["text"]], [[-1]]],
            "device": ["nonsense", 3, None],
            "transport": ["text", None, 3],
        },
    ),
    "sl.compression.MeanExchange.start": Row(
        {"flat": lambda: torch.zeros(4)}, nonsense={"flat": ["text", None, 3, torch.zeros(3)]}
    ),
    "sl.compression.MeanExchange.load_state_dict": Row({"state": lambda: exchange().state_dict()}),
    # data and layers
    "sl.DistributedSampler": Row(
        {"dataset": range(8), "num_replicas": 2, "rank": 0},
        nonsense={
            "dataset": [None, 3, iter([1]), list],
            "num_replicas": [*COUNT[:1], *COUNT[2:], 0],
            "rank": [*COUNT[:1], *COUNT[2:], 2],
            "shuffle": TORCHS_FLAG,
            "seed": COUNT_OF_ANY_SIGN,
            "drop_last": TORCHS_FLAG,
        },
    ),
    "sl.DistributedSampler.set_epoch": Row({"epoch": 1}, nonsense={"epoch": COUNT_OF_ANY_SIGN}),
    "sl.DistributedSampler.advance": Row({"num_samples": 1}, nonsense={"num_samples": [*COUNT, 99]}),
    "sl.DistributedSampler.load_state_dict": Row({"state": lambda: sampler().state_dict()}),
    "sl.nn.SyncBatchNorm": Row(
        {"num_features": 2},
        nonsense={
            **dict.fromkeys(["affine", "track_running_stats", "bias"], TORCHS_FLAG),
            "device": ANYTHING,  # torch's own check, and "dtype" as well
            "dtype": ANYTHING,
        },
    ),
    "sl.nn.SyncBatchNorm.forward": Row(
        {"input": lambda: torch.zeros(4, 2)},
        # What is no tensor fails as in torch's layers: a tracer's stand-in is none, and may pass.
        nonsense={"input": [torch.zeros(4), torch.zeros(4, 3), torch.zeros(4, 2, dtype=torch.int32)]},
    ),
    "sl.nn.SyncBatchNorm.convert_sync_batchnorm": Row({"module": module}),
    # a run on disk
    "sl.TrainState": Row(
        nonsense={
            name: ["text", 3, nn.Linear] for name in ("model", "optimizer", "scheduler", "scaler", "sampler")
        }
        | {"named": [{"named": "text"}, {"named": 3}]}
    ),
    "sl.TrainState.commit": Row(
        {"num_samples": 1},
        on=lambda: sl.TrainState(sampler=sampler()),
        nonsense={"num_samples": [COUNT[0], *COUNT[2:]]},
    ),
    "sl.TrainState.load_state_dict": Row({"state": lambda: state().state_dict()}),
    "sl.TrainState.load_torch": Row(
        {"path": lambda: torch_file(), "names": lambda: {"model": "net"}},
        nonsense={
            "names": ["text", 3, [1], {"model": 1.5}, {3: "net"}],
            "besides": [3, None, [3]],
            "path": [3, None, True, [], NAN],
            "group": GROUP,
        },
    ),
    "sl.steps": Row(
        {"state": lambda: sl.TrainState(model=wrapper()), "until": 1},
        nonsense={
            "state": ["text", 3, None, {}, nn.Linear(2, 2), sl.TrainState()],
            "until": COUNT,
            "data": ANYTHING,  # whatever can be iterated; `next_batch` says what it is not
            "min_ranks": [*COUNT[:1], *COUNT[2:], 0],
            "patience": ["text", True, None, NAN, 0, -1],
        },
    ),
    "sl.Checkpointer": Row(
        {"directory": lambda: folder()},
        nonsense={
            "files": ["text", 3, True],
            "group": GROUP,
            "stop_signals": ["SIGTERM", 3, None, ["nonsense"], [1.5], [True]],
        },
    ),
    "sl.trace": Row({"directory": lambda: folder()}, nonsense={"max_mb": ["text", True, None, NAN, 0, -1]}),
    "sl.exporters.TensorBoard": Row(
        {"writer_or_dir": lambda: folder()},
        nonsense={"writer_or_dir": [*PATH, nn.Linear, nn.Linear(2, 2)]},
    ),
    "sl.exporters.Prometheus": Row(
        {"registry": lambda: registry()}, nonsense={"registry": ["text", 3, True, nn.Linear]}
    ),
    "sl.Checkpointer.save": Row({"state": state}),
    "sl.Checkpointer.load": Row({"state": state}),
    "sl.Checkpointer.stop_if_asked": Row({"state": state}),
    "sl.Checkpointer.ask_to_stop": Row(nonsense={"why": [3, None, True, ["text"]]}),
    "sl.debug.compare_replicas": Row({"fn": lambda: lambda: torch.zeros(1), "module": module}),
}

NOT_FOR_USERS: dict[str, set[str]] = {
    # Strategies and encodings are asked by the library: what it gives them is not nonsense.
    "strategy": {
        "init",
        "at_backward",
        "at_step",
        "at_sync",
        "at_change",
        "rules",
        "mechanism",
        "workers",
        "state_from",
    },
    "compression": {"encoder", "encode", "decode", "encode_rows", "num_bytes", "in_words"},
    WRAPPER: {"join_hook", "will_sync_module_buffers", "finalize_backward"},
    "sl.compression.HookState": {"use", "average", "finish"},
    "sl.Observer": {name for name in vars(sl.Observer) if not name.startswith("_")} - {"start", "stop"},
    "sl.compression.MeanExchange": {"advance", "wait", "memory", "remember"},
}
"""Methods that the library calls, not its users."""

CALLED_BY_TORCH = {"sl.compression.hook"}

RECORDS = {
    *("BackwardRecord", "BucketRecord", "BufferRecord", "EvolutionRecord", "NonFiniteRecord", "RoundRecord"),
    *("Row", "Contract", "Statistics", "World", "Report", "Finding"),
}
"""What is handed out and never made by users."""


def drifting() -> sl.DistributedDataParallel:
    return sl.DistributedDataParallel(module(), strategy=sl.LocalSGD(8))


def registry() -> Any:
    return importlib.import_module("prometheus_client").CollectorRegistry()


def folder() -> Path:
    return Path(tempfile.mkdtemp(dir=_folders[-1]))


def torch_file() -> Path:
    path = folder() / "file.pt"
    torch.save({"net": module().state_dict(), "step": 1}, path)
    return path


_folders: list[Path] = []


# ---------------------------------------------------------------------- what there is


def public_callables() -> Iterator[tuple[str, Callable[..., Any]]]:
    """All of them, by name: functions, classes, and the methods that classes define here."""
    modules: list[tuple[str, types.ModuleType]] = [("sl", sl)]
    for prefix, found in modules:
        own_classes = [
            name
            for name, value in vars(found).items()
            if inspect.isclass(value) and value.__module__ == found.__name__ and not name.startswith("_")
        ]
        for name in getattr(
            found, "__all__", own_classes
        ):  # a module without a list, as sl.nn, offers its classes
            value = getattr(found, name)
            if isinstance(value, types.ModuleType):
                modules.append((f"{prefix}.{name}", value))
            elif inspect.isclass(value):
                if not issubclass(value, BaseException) and name not in RECORDS:
                    yield from callables_of(f"{prefix}.{name}", value)
            elif callable(value) and f"{prefix}.{name}" not in CALLED_BY_TORCH:
                yield f"{prefix}.{name}", value


def callables_of(name: str, cls: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    left_out = NOT_FOR_USERS.get(name, set())
    left_out |= NOT_FOR_USERS["strategy"] if issubclass(cls, sl.EveryStep.__mro__[1]) else set()
    left_out |= NOT_FOR_USERS["sl.Observer"] if issubclass(cls, sl.Observer) else set()
    left_out |= NOT_FOR_USERS["compression"] if issubclass(cls, sl.compression.Compression) else set()
    if not inspect.isabstract(cls):
        yield name, cls
    own = [base for base in cls.__mro__ if base.__module__.startswith("syncline.")]
    for method in sorted({method for base in own for method in vars(base) if not method.startswith("_")}):
        value = inspect.getattr_static(cls, method)
        is_method = inspect.isfunction(value) or isinstance(value, classmethod | staticmethod)
        if is_method and method not in left_out:
            yield f"{name}.{method}", getattr(cls, method)


def parameters_of(name: str, function: Callable[..., Any]) -> list[inspect.Parameter]:
    return [p for p in inspect.signature(function).parameters.values() if p.name not in ("self", "unnamed")]


def nonsense_for(name: str, parameter: inspect.Parameter) -> list[Any] | None:
    """None: nothing says what a value has to be."""
    row = TABLE.get(name, Row())
    if parameter.name in row.nonsense:
        return row.nonsense[parameter.name]
    text = str(parameter.annotation)
    parts = [part.strip() for part in text.split("|")]
    for kind in (text, " | ".join(part for part in parts if part not in ("None", "Transport"))):
        if kind in BY_ANNOTATION:
            takes_none = "None" in parts or parameter.default is None
            return [one for one in BY_ANNOTATION[kind] if not (one is None and takes_none)]
    return None


CLIENTS = {
    "sl.exporters.OpenTelemetry": "opentelemetry",
    "sl.exporters.Prometheus": "prometheus_client",
    "sl.exporters.TensorBoard": "tensorboard",
}
"""The packages that exporters need. Without its package, an exporter cannot be made."""

ABSENT = tuple(name for name, package in CLIENTS.items() if importlib.util.find_spec(package) is None)

CALLABLES = {name: function for name, function in public_callables() if not name.startswith(ABSENT)}
TABLE = {name: row for name, row in TABLE.items() if not name.startswith(ABSENT)}


def test_nothing_is_left_out() -> None:
    gone = [f"{name} has a row, and is not public" for name in TABLE if name not in CALLABLES]
    unknown = [
        f"{name}: what is nonsense for {parameter.name}: {parameter.annotation}?"
        for name, function in CALLABLES.items()
        for parameter in parameters_of(name, function)
        if nonsense_for(name, parameter) is None
    ]
    assert not gone + unknown, "\n" + "\n".join(gone + unknown)


# ---------------------------------------------------------------------- called


def called(name: str, function: Callable[..., Any], **nonsense: Any) -> None:
    """Call it as the table says, but for what is replaced."""
    row = TABLE.get(name, Row())
    makers = (types.FunctionType, type)
    given = {key: value() if isinstance(value, makers) else value for key, value in row.given.items()}
    make = row.on or MAKERS.get(name.rpartition(".")[0])
    target = make() if make is not None and inspect.isfunction(function) else None
    if name == f"{WRAPPER}.attach":
        assert target is not None
        given["optimizer"] = torch.optim.SGD(target.parameters(), lr=0.1)
    given |= nonsense
    spread: list[Any] = []
    for parameter in parameters_of(name, function):
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            spread = list(given.pop(parameter.name))
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            given |= given.pop(parameter.name, {})
    if parameters_of(name, function) and "param_to_hook_all_reduce" in nonsense:
        given["delay_all_reduce_named_params"] = []
    if "delay_all_reduce_named_params" in nonsense:
        given["param_to_hook_all_reduce"] = nn.Parameter(torch.zeros(1))
    result = function(*([] if target is None else [target]), *spread, **given)
    if hasattr(result, "__enter__") and not isinstance(result, sl.Checkpointer):
        with result:
            pass
    for one in (target, result):
        if isinstance(one, sl.Checkpointer):
            one.close()


def trouble_with(name: str, function: Callable[..., Any], parameter: str, value: Any) -> str | None:
    """What is wrong with how nonsense is answered; None if nothing is."""
    words = f"{name}({parameter}={value!r})"
    try:
        called(name, function, **{parameter: value})
    except (TypeError, ValueError) as error:
        text = str(error)
        if not re.search(rf"\b{parameter.removeprefix('process_')}\b", text):
            return f"{words}: the error does not name {parameter}: {text}"
        came = [repr(value), what_it_is(value), type(value).__name__]
        if isinstance(value, torch.Tensor):
            came += [str(tuple(value.shape)), str(value.dtype), str(value.numel())]
        if isinstance(value, list | tuple | dict):
            inner = value.values() if isinstance(value, dict) else value
            came.append(str(len(value)))
            came += [one for item in inner for one in (repr(item), what_it_is(item))]
        if not any(one in text for one in came):
            return f"{words}: the error does not say what came: {text}"
        return None
    except Exception as error:
        return f"{words}: {type(error).__name__}: {error}"
    return f"{words} is accepted"


@pytest.mark.filterwarnings("ignore:.*(deprecated|both broadcast_buffers):FutureWarning")
def test_nonsense_is_one_clear_error(tmp_path: Path) -> None:
    _folders.append(tmp_path)
    found = []
    for name, function in CALLABLES.items():
        called(name, function)  # what is right is right
        for parameter in parameters_of(name, function):
            for value in nonsense_for(name, parameter) or []:
                found.append(trouble_with(name, function, parameter.name, value))
        sl.shutdown()
    troubles = [trouble for trouble in found if trouble is not None]
    assert len(found) > 800
    assert not troubles, f"{len(troubles)} of {len(found)}:\n" + "\n".join(troubles)


# ---------------------------------------------------------------------- on one rank alone

NO_COLLECTIVE = {
    "sl.compression.HookState",
    "sl.nn.SyncBatchNorm",
    "sl.nn.SyncBatchNorm.convert_sync_batchnorm",
}
"""They take a group, and send nothing when they are called."""


def error_of(call: Callable[[], None]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def test_nonsense_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    """Where there is a collective call: the other rank is waiting for it."""
    _folders.append(tmp_path)
    troubles = []
    num_calls = 0
    for name, function in CALLABLES.items():
        parameters = parameters_of(name, function)
        groups = [p.name for p in parameters if p.name in ("group", "process_group", "device_mesh")]
        for parameter in parameters:
            values = nonsense_for(name, parameter)
            if not groups or not values or parameter.name in groups or name in NO_COLLECTIVE:
                continue

            def call(
                transport: Transport,
                name: str = name,
                function: Callable[..., Any] = function,
                parameter: str = parameter.name,
                value: Any = values[0],
                group: str = groups[0],
            ) -> str:
                nonsense = {parameter: value} if transport.rank == 1 else {}
                return error_of(lambda: called(name, function, **{group: transport}, **nonsense))

            told = run_ranks(2, call, timeout_seconds=30)
            num_calls += 1
            if told[0] != told[1] or "rank 1: expected" not in told[0]:
                troubles.append(f"{name}({parameter.name}={values[0]!r}): {told}")
    assert num_calls > 50
    assert not troubles, f"{len(troubles)} of {num_calls}:\n" + "\n".join(troubles)
