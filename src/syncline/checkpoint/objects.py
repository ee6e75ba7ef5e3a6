"""Return and load the state of a module (wrapped or not), an optimizer, random number generators, or another object.

Loading an optimizer needs care: torch casts its state to the dtype of the parameter, and a file does not keep strides.
"""

from __future__ import annotations

import gc
import random
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from syncline.equality.fingerprint import fingerprint_of, fingerprints
from syncline.gradients.wrapper_protocol import SynchronizedModule
from syncline.optimizers.contents import keep_saved_types, parameters_of
from syncline.sharded.part import has_sharded_state, sharded_state_of, whole_of
from syncline.trees import leaves


def unwrapped(module: Any) -> Any:
    """Return the module inside a DistributedDataParallel of torch or Syncline. Return any other object unchanged."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def keep_types(optimizer: Optimizer, saved: Mapping[str, Any], types: Mapping[int, torch.dtype]) -> None:
    """Restore the dtypes in which optimizer state was saved, for parameters that still have their saved dtype.

    When an optimizer loads floating-point state, torch casts the state to the dtype of its parameter. Moments that were
    kept in float32 for bfloat16 weights would be rounded, and the resumed run would differ.

    Args:
        optimizer: an unsharded optimizer that has just loaded its state.
        saved: the state that the optimizer loaded, in the form of its `state_dict()`.
        types: the dtypes in which parameters were saved, by `id(parameter)`. The state of a parameter that is not in
            `types` is not changed.

    Examples:
        >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        >>> optimizer = torch.optim.SGD([weight], momentum=0.9)
        >>> optimizer.state[weight]["momentum_buffer"] = torch.tensor([0.1, 0.2])
        >>> saved = optimizer.state_dict()
        >>> optimizer.load_state_dict(saved)
        >>> keep_types(optimizer, saved, {id(weight): torch.bfloat16})
        >>> optimizer.state[weight]["momentum_buffer"].dtype
        torch.float32
    """
    if not {"state", "param_groups"} <= saved.keys():
        return  # the optimizer's class has a state format of its own
    keys = [key for group in saved["param_groups"] for key in group["params"]]
    for parameter, key in zip(parameters_of(optimizer), keys, strict=False):
        state, before = optimizer.state.get(parameter), saved["state"].get(key)
        if (
            isinstance(state, dict)
            and isinstance(before, dict)
            and types.get(id(parameter)) == parameter.dtype
        ):
            keep_saved_types(state, before)


def lay_out_like_parameters(optimizer: Optimizer) -> None:
    """Give each tensor of an optimizer's state the strides of its parameter, if both have the same shape.

    A file stores elements in the order of their dimensions. Optimizers create state with `zeros_like(parameter)`, and
    their fused kernels read parameter, gradient and state in memory order. If a weight is channels_last and its state
    is not, these kernels would apply the state to the wrong elements.

    Args:
        optimizer: an unsharded optimizer that has just loaded its state.

    Examples:
        >>> conv = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
        >>> optimizer = torch.optim.SGD(conv.parameters(), momentum=0.9)
        >>> optimizer.state[conv.weight]["momentum_buffer"] = torch.ones(4, 3, 2, 2)
        >>> lay_out_like_parameters(optimizer)
        >>> optimizer.state[conv.weight]["momentum_buffer"].stride() == conv.weight.stride()
        True
    """
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, Tensor) or not isinstance(state, dict):
            continue
        for name, value in state.items():
            if type(value) is not Tensor or value.shape != parameter.shape or value.layout != torch.strided:
                continue
            # Allocate as `zeros_like` does, which gives a dense tensor even for an expanded parameter.
            alike = torch.empty_like(parameter, dtype=value.dtype, device=value.device)
            if alike.stride() != value.stride():
                state[name] = alike.copy_(value)


def copies(one: Any) -> bool:
    """Return whether an object copies the tensors that it loads, so that it keeps no references to them.

    A wrapped module copies the tensors of its module, but can keep references to tensors of its synchronization state.
    """
    return has_sharded_state(one) or isinstance(one, nn.Module)


def is_wrapped(state: Any) -> bool:
    """Return whether `state` is the state of a wrapped module, with the keys "module" and "synchronization"."""
    return isinstance(state, dict) and state.keys() == {"module", "synchronization"}


def without_synchronization(state: Any) -> Any:
    """Return the entry "module" of a wrapped module's state. Return any other state unchanged."""
    return state["module"] if is_wrapped(state) else state


def state_of(one: Any) -> Any:
    """Return the state of an object. The state of a wrapped module has the keys "module" and "synchronization"."""
    if not isinstance(one, DistributedDataParallel):
        return one.state_dict()
    beside = one.sync_state_dict() if isinstance(one, SynchronizedModule) else None
    return {"module": one.module.state_dict(), "synchronization": beside}


def saved_types(named: Mapping[str, Any], states: Mapping[str, Any]) -> dict[int, torch.dtype]:
    """Return the dtypes in which the parameters of modules were saved, by `id(parameter)`.

    Args:
        named: objects by name.
        states: their saved states by name. A name may be missing.
    """
    found: dict[int, torch.dtype] = {}
    for name, one in named.items():
        tensors = without_synchronization(states.get(name))
        if isinstance(one, nn.Module) and isinstance(tensors, Mapping):  # else loading it raises the error
            for key, parameter in unwrapped(one).named_parameters():
                if isinstance(tensors.get(key), Tensor):
                    found[id(parameter)] = tensors[key].dtype
    return found


def load_into(one: Any, state: Any, types: Mapping[int, torch.dtype]) -> None:
    """Load a state into an object.

    Args:
        one: the object.
        state: a state from `state_of`. For a sharded object, it is the shards of all ranks, joined by `join_parts`.
        types: the dtypes in which parameters were saved, by `id(parameter)`; see `keep_types`.

    Raises:
        ValueError: `one` is an optimizer, and `state` belongs to another kind of optimizer.
    """
    settings: set[str] = set()
    if isinstance(one, Optimizer):
        # The settings that all groups have. Those that a scheduler has added to the groups are left out.
        settings = set.intersection(*({*group} for group in one.param_groups), {*one.defaults})
    sharded = sharded_state_of(one)
    if sharded is not None:
        sharded._load_shards(state, types)
    else:
        state = whole_of(state)
        unwrapped(one).load_state_dict(without_synchronization(state))
        if isinstance(one, SynchronizedModule) and is_wrapped(state) and state["synchronization"] is not None:
            one.load_sync_state_dict(state["synchronization"])
    if isinstance(one, Optimizer):
        # torch accepts groups with any keys, and would fail only at a later step. A setting that is new in this version
        # of torch is not missing, because the `__setstate__` of torch's optimizers adds it during the load.
        missing = sorted({name for group in one.param_groups for name in settings - group.keys()})
        if missing:
            raise ValueError(
                f"the saved state belongs to another kind of optimizer: it lacks {', '.join(missing)}, which "
                f"{type(one).__name__} needs. Create an optimizer of the class that was saved. If the class is "
                "your own and has got new settings since the save, add them in its __setstate__"
            )
        if sharded is None:
            lay_out_like_parameters(one)
            keep_types(one, state, types)
    elif is_node_loader(one):
        _begin_at(one, state)


def is_node_loader(one: Any) -> bool:
    """Return whether an object is a `torchdata.nodes.Loader`."""
    nodes = sys.modules.get("torchdata.nodes")  # absent unless the program has imported it
    return nodes is not None and isinstance(one, nodes.Loader)


def _begin_at(loader: Any, state: Any) -> None:
    """Make a `torchdata.nodes.Loader` that has just loaded `state` begin its next iteration there.

    torchdata 0.11 ignores `load_state_dict` if `state_dict` was called before, because `state_dict` begins an iteration
    that the next `iter` returns. Nothing is done for a Loader that has not begun any iteration.
    """
    try:
        has_begun = loader._it is not None
    except AttributeError:  # another version of torchdata
        has_begun = True
    if has_begun:
        iter(loader)  # may be the iteration that state_dict() began
        iter(loader)  # begins at `state`, so state_dict() returns it from now on
        loader.load_state_dict(state)  # for the next `iter`


_READING = threading.RLock()


@contextmanager
def reading_generators() -> Iterator[None]:
    """Prevent garbage collections inside the `with` block. One thread at a time runs such a block.

    torch holds the mutex of a generator while it creates the tensor with its state. Up to Python 3.11, a collection can
    begin there, and destructors let other threads run. If such a thread needs the generator, it waits for the mutex
    while it holds the interpreter's lock, which is a deadlock.
    """
    with _READING:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()


def rng_state() -> dict[str, Any]:
    """Return the state of the global random number generators.

    These are Python's, NumPy's if NumPy is imported, and torch's on the CPU and (if CUDA is in use) on each GPU.
    """
    version, numbers, gauss = random.getstate()
    # A tensor keeps the manifest readable; as JSON, 625 numbers per rank would hide everything else.
    python = (version, torch.tensor(numbers, device="cpu"), gauss)
    state: dict[str, Any] = {"python": python}
    with reading_generators():
        state["torch"] = torch.get_rng_state()
        if torch.cuda.is_initialized():
            state["cuda"] = torch.cuda.get_rng_state_all()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = (kind, torch.from_numpy(keys.copy()), *rest)
    return state


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Set the global random number generators to a state from `rng_state`."""
    numpy = sys.modules.get("numpy")
    _set_generators(state, random, torch.default_generator, numpy and numpy.random)
    if "cuda" in state and torch.cuda.is_available():
        here: list[Tensor] = state["cuda"][: torch.cuda.device_count()]
        torch.cuda.set_rng_state_all(here)


def check_rng_state(state: Any) -> None:
    """Raise an error if `set_rng_state` could not set `state`. The global generators are not changed.

    Raises:
        ValueError, TypeError, LookupError: `state` is not a state from `rng_state`.
    """
    numpy = sys.modules.get("numpy")
    try:
        _set_generators(state, random.Random(), torch.Generator(), numpy and numpy.random.RandomState())
    except RuntimeError as error:
        raise ValueError(str(error)) from None


def _set_generators(
    state: Mapping[str, Any], of_python: Any, of_torch: torch.Generator, of_numpy: Any
) -> None:
    """Set the given generators of Python, of torch on the CPU, and of NumPy to a state from `rng_state`."""
    version, numbers, gauss = state["python"]
    of_python.setstate((version, tuple(numbers.tolist()), gauss))
    of_torch.set_state(state["torch"])
    if of_numpy is not None and "numpy" in state:
        kind, keys, *rest = state["numpy"]
        of_numpy.set_state((kind, keys.numpy(), *rest))


def positions() -> dict[str, str]:
    """Return the position of each global random number generator, by the name of the generator.

    A position is a text of 16 hexadecimal digits, which changes when a number is drawn.

    Examples:
        >>> before = positions()
        >>> _ = torch.rand(1)
        >>> [name for name, position in positions().items() if position != before[name]]
        ["torch's on the CPU"]
    """
    state = rng_state()
    found = {"Python's": state["python"], "NumPy's": state.get("numpy"), "torch's on the CPU": state["torch"]}
    # The current device is the first, because it usually differs between ranks: cuda:0 on rank 0 corresponds to cuda:1
    # on rank 1.
    of_cuda = state.get("cuda", [])
    first = torch.cuda.current_device() if of_cuda else 0
    for index, one in enumerate(of_cuda[first:] + of_cuda[:first]):
        found[f"torch's on {f'CUDA device {index} of this rank' if index else 'CUDA'}"] = one
    return {
        name: f"{fingerprint_of(fingerprints_in(one)):016x}" for name, one in found.items() if one is not None
    }


def fingerprints_in(state: Any) -> list[Any]:
    """Return the paths and the fingerprints of the leaves of a state. Equal states have equal lists."""
    named = list(leaves(state))
    return [*(name for name, _ in named), *fingerprints([leaf for _, leaf in named])]
