"""Set the conditions of a run: the state, the inputs, the random numbers, and torch's settings."""

from __future__ import annotations

import json
import random
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from syncline._torch.tensors import set_deterministic
from syncline.checkpoint.objects import rng_state, set_rng_state
from syncline.checkpoint.rollback import Restorer, restorer_of, restorer_of_tensor
from syncline.debug.recording import is_ordinary
from syncline.tensors.broadcasting import TensorBroadcaster
from syncline.transport.base import Transport
from syncline.trees import leaves, map_leaves


def restorers_of(objects: Sequence[Any]) -> list[Restorer]:
    """Return functions that write back the present state of a computation; see `restore_all`.

    The state is parameters, buffers, gradients (values and objects), training flags, the state of Syncline's wrappers,
    optimizers, and random number generators. A tensor is written only if it has changed. The backup takes as much
    memory as the state.

    Args:
        objects: modules (wrapped or not), optimizers, and other objects that have `state_dict` and `load_state_dict`.

    Examples:
        >>> net = torch.nn.BatchNorm1d(2)
        >>> from syncline.checkpoint.rollback import restore_all
        >>> restorers = restorers_of([net])
        >>> y = net(torch.tensor([[1.0, 2.0], [3.0, 5.0]]))
        >>> restore_all(restorers)
        >>> net.running_mean
        tensor([0., 0.])
    """
    rng = rng_state()  # first, because a state_dict of the user may draw random numbers
    modules = [one for one in objects if isinstance(one, nn.Module)]
    parameters = [parameter for one in modules for parameter in one.parameters()]
    return [
        *(restorer_of(one, is_stepped=True) for one in objects),
        *(partial(setattr, part, "training", part.training) for one in modules for part in one.modules()),
        *(partial(one.requires_grad_, one.requires_grad) for one in parameters),
        *(partial(setattr, one, "grad", one.grad) for one in parameters),
        # Of other classes are the placeholders of sharded gradients, which have no values.
        *(restorer_of_tensor(one.grad) for one in parameters if type(one.grad) is Tensor),
        partial(set_rng_state, rng),
    ]


@contextmanager
def stepping_only(objects: Sequence[Any]) -> Iterator[None]:
    """Inside the `with` block, refuse the step of an optimizer that is not among `objects`.

    Raises:
        ValueError: such an optimizer was about to step. Nothing was changed.
    """

    def refuse(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not any(one is optimizer for one in objects):
            raise ValueError(
                f"the function steps an optimizer of class {type(optimizer).__name__} that was not passed here, so its "
                "state could not be restored: pass sl.TrainState(model=..., optimizer=...), or do not step it"
            )

    handle = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


# ---------------------------------------------------------------------- inputs and random numbers


def copied_inputs(inputs: Any) -> Any:
    """Return the inputs with copies of their tensors, so that a step can write to them."""

    def copied(_: str, leaf: Any) -> Any:
        is_tensor = isinstance(leaf, Tensor)
        return leaf.detach().clone().requires_grad_(leaf.requires_grad) if is_tensor else leaf

    return map_leaves(inputs, copied)


def gathered(value: Any, transport: Transport) -> list[Any]:
    """Return the values of all ranks, which are sent as JSON. A collective call."""
    return [json.loads(row) for row in transport.all_gather_bytes(json.dumps(value).encode())]


def inputs_of_rank_0(inputs: Any, transport: Transport) -> Any | None:
    """Return rank 0's inputs on every rank. A collective call. The shapes of the tensors may differ between the ranks.

    Returns None on every rank if a rank has other plain values or tensors of other dtypes than rank 0.

    Examples:
        >>> from syncline.transport.threads import run_ranks
        >>> def program(transport):
        ...     x = torch.full((2 + transport.rank,), 1.0 + transport.rank)
        ...     return inputs_of_rank_0((x, "mean"), transport)
        >>> run_ranks(2, program)[1]
        (tensor([1., 1.]), 'mean')
    """
    own = dict(leaves(copied_inputs(inputs)))
    sent = {name: leaf for name, leaf in own.items() if isinstance(leaf, Tensor) and is_ordinary(leaf)}
    kinds = {name: str(leaf.dtype) if name in sent else repr(leaf) for name, leaf in own.items()}
    rows = gathered([kinds, [list(tensor.shape) for tensor in sent.values()]], transport)
    if any(row[0] != rows[0][0] for row in rows):
        return None
    if transport.rank:
        shapes = zip(sent.items(), rows[0][1], strict=True)
        sent = {name: tensor.new_empty(shape) for (name, tensor), shape in shapes}
    TensorBroadcaster(list(sent.values()), transport).start(0).wait()
    for name, tensor in sent.items():
        tensor.requires_grad_(own[name].requires_grad)
    return map_leaves(inputs, lambda name, leaf: sent.get(name, leaf))


def seed_alike() -> None:
    """Set Python's, NumPy's and torch's random number generators to a state that is the same on all ranks."""
    random.seed(0)
    torch.manual_seed(0)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)


# ---------------------------------------------------------------------- torch's settings


@contextmanager
def deterministic() -> Iterator[None]:
    """In the `with` block, use deterministic algorithms where they exist, and fill uninitialized memory with NaN."""
    settings: Any = torch.utils.deterministic
    mode, filled = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # torch warns of each operation without a deterministic implementation
        set_deterministic(True, warn_only=mode != 2)
        settings.fill_uninitialized_memory = True
        try:
            yield
        finally:
            settings.fill_uninitialized_memory = filled
            set_deterministic(mode != 0, warn_only=mode == 1)
