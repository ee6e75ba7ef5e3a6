"""`syncline doctor SCRIPT`, inside each rank: wait for a forward of a wrapped module, and examine the module.

`main` is called before the script (`tools/launch/worker.py --before`). It wraps the forward of DistributedDataParallel,
torch's and Syncline's. When a wrapper reaches the requested forward, the module inside is run with that batch several
times, forward and backward, without communication by the wrapper, and the runs are compared. Then the script ends, or
continues unchanged.

The script starts with torch already imported. Variables that torch reads at import must therefore be set outside.
"""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.nn.parallel
from torch import Tensor, nn

from syncline._torch.modules import NotTraced
from syncline._torch.tensors import tree_map_only
from syncline.ddp.wrapper import DistributedDataParallel
from syncline.debug.repeated_runs import Step, examine
from syncline.debug.run_state import Subject, synchronization_of
from syncline.gradients.usage import tensors_in
from syncline.gradients.wrapper_protocol import replica_of
from syncline.session.world import transport_of
from syncline.transport.base import Transport
from syncline.user_code import calling

_NOT_BY_GRAD = "Checkpointing is not compatible with .grad()"
"""The error of a re-entrant checkpoint. It needs a backward that reaches `.grad`, which would start a reduction."""


@dataclass(frozen=True, kw_only=True)
class Orders:
    """The options of `syncline doctor`."""

    step: int
    """The forward of each wrapper to examine, counted from 1 in training mode with gradients enabled."""
    goes_on: bool
    """Whether the script continues afterwards."""
    report: str
    """Path of a file that gets one line of JSON per examined wrapper: `agrees` and `text`."""

    def dumped(self) -> str:
        """Serialize the options for the command line."""
        return json.dumps(asdict(self))


def main(argument: str) -> None:
    """Watch all wrappers of this process, with options from `Orders.dumped`."""
    watch = _Watch(Orders(**json.loads(argument)))
    for wrapper in (torch.nn.parallel.DistributedDataParallel, DistributedDataParallel):
        watch.put_before(wrapper)


class _Watch:
    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._num_forwards: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._is_over = False

    def put_before(self, wrapper: type[nn.Module]) -> None:
        """Replace the forward of a wrapper class by one that first reports its inputs to this object."""
        original = vars(wrapper)["forward"]

        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            self._forward_begins(module, args, kwargs)
            return original.__get__(module, type(module))(*args, **kwargs)

        # torch.compile would otherwise trace the code that watches.
        setattr(wrapper, "forward", NotTraced(forward))  # noqa: B010

    def _forward_begins(self, ddp: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_over:  # the script has caught the first SystemExit
            self._end()
        if not (ddp.training and torch.is_grad_enabled()):
            return
        number = self._num_forwards.get(ddp, 0) + 1
        self._num_forwards[ddp] = number
        if number != self._orders.step:
            return
        transport = _transport_of(ddp)
        agrees, text = _examined(ddp, args, kwargs, transport, number)
        if transport.rank == 0:
            if not self._orders.goes_on:
                text += _others(ddp)
            with Path(self._orders.report).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"agrees": agrees, "text": text}) + "\n")
        if not self._orders.goes_on:
            self._is_over = True
            self._end()

    def _end(self) -> NoReturn:
        raise SystemExit(0)


def _others(ddp: nn.Module) -> str:
    """Describe the wrappers that are not examined, because the script ends before their forward."""
    others = [
        one
        for one in gc.get_objects()
        # Not isinstance: it reads attributes of proxies, which may run any code.
        if issubclass(type(one), torch.nn.parallel.DistributedDataParallel) and one is not ddp
    ]
    names = ", ".join(f"{type(one).__name__}({type(one.module).__name__})" for one in others)
    return f"\n\nnot examined: {names}. --continue looks at each at its own forward" if others else ""


def _transport_of(ddp: Any) -> Transport:
    replica = replica_of(ddp)
    return transport_of(ddp.process_group) if replica is None else replica.transport


def _examined(
    ddp: Any, args: tuple[Any, ...], kwargs: dict[str, Any], transport: Transport, number: int
) -> tuple[bool, str]:
    """Return whether the runs agree, and the report; the same on all ranks."""
    module: nn.Module = ddp.module
    if ddp.device_ids:  # the wrapper moves its inputs too
        device = torch.device(ddp.device_type, ddp.device_ids[0])
        args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(device), (args, kwargs))
    step = Step(
        title=f"syncline doctor: forward {number} of {type(ddp).__name__}({type(module).__name__})",
        run=lambda inputs: _forward_and_backward(module, *inputs),
        inputs=(args, kwargs),
        roots={"": module},
        subject=Subject([module], with_gradients=False),
        synchronization=synchronization_of({"": ddp}, with_gradients=False),
        transport=transport,
        aligns_inputs=True,
    )
    report = examine(step)
    text = str(report)
    if isinstance(ddp, DistributedDataParallel):
        text += f"\n\n{ddp.contract}"
    else:
        text += f"\n\n{type(ddp).__name__}: torch's, {transport.size} ranks; compared over {transport.name}"
    return report.agrees, text


def _forward_and_backward(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, dict[str, Tensor | None]]:
    """Return a loss and its gradients. They do not reach `.grad`, so nothing is reduced."""
    with calling(f"the forward of {type(module).__name__}"):
        found = module(*args, **kwargs)
    outputs = [tensor for tensor in tensors_in(found) if tensor.requires_grad and tensor.numel()]
    if not outputs:
        return None, {}
    loss = torch.stack([_weighted_sum(output) for output in outputs]).sum()
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    try:
        gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    except RuntimeError as error:
        if _NOT_BY_GRAD not in str(error):
            raise
        return loss, {}
    return loss, dict(zip(trained, gradients, strict=True))


def _weighted_sum(output: Tensor) -> Tensor:
    """Return a loss with a different gradient per element; that of a plain sum vanishes in a softmax or a norm."""
    real = torch.view_as_real(output) if output.is_complex() else output
    wide = real.to(torch.float32) if real.dtype in (torch.float16, torch.bfloat16) else real
    weights = torch.arange(wide.numel(), dtype=wide.dtype, device=wide.device).cos_()
    return (wide.reshape(-1) * weights).sum().to("cpu", torch.float64)
