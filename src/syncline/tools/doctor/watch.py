"""The part of `syncline doctor SCRIPT` that runs in each rank. It examines a module at a forward of its wrapper.

`main` is called before the script starts (`tools/launch/worker.py --before`). It replaces the `forward` of torch's
DistributedDataParallel and of Syncline's. When a wrapper is called for the requested forward, the module inside it is
run several times with the batch of this call, forward and backward. In these runs, the wrapper does not communicate.
The results of the runs are compared. Then the script ends, or continues unchanged.

When the script starts, torch is already imported. Environment variables that torch reads at import must therefore be
set outside of the script.
"""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.parallel
from torch import Tensor, nn

from syncline._torch.modules import NotTraced
from syncline._torch.tensors import tree_map_only
from syncline.ddp.wrapper import DistributedDataParallel
from syncline.debug.examination import Examination
from syncline.gradients.usage import tensors_in
from syncline.gradients.wrapper_protocol import replica_of
from syncline.session.world import transport_of
from syncline.transport.base import Transport
from syncline.user_code import calling

_CHECKPOINT_ERROR = "Checkpointing is not compatible with .grad()"
"""The text of torch's error if `torch.autograd.grad` is called for a module that uses re-entrant checkpoints.

Re-entrant checkpoints need a backward that writes `.grad`. Such a backward would start a reduction.
"""


def main(argument: str) -> None:
    """Watch all wrappers of this process.

    Args:
        argument: the arguments of `_Watch`, as JSON.
    """
    watch = _Watch(**json.loads(argument))
    for wrapper in (torch.nn.parallel.DistributedDataParallel, DistributedDataParallel):
        watch.replace_forward(wrapper)


class _Watch:
    """The watch of this process.

    Args:
        step: the number of the forward to examine, for each wrapper. Forwards in training mode with gradients enabled
            are counted, from 1.
        continues: whether the script continues after the examined forward.
        report: the path of a file. For each examined wrapper, rank 0 adds a line of JSON with `agrees` and `text`.
    """

    def __init__(self, *, step: int, continues: bool, report: str) -> None:
        self._step, self._continues, self._report = step, continues, Path(report)
        self._num_forwards: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._is_over = False

    def replace_forward(self, wrapper: type[nn.Module]) -> None:
        """Replace the forward of a wrapper class by a function that first calls `_before_forward`."""
        original = vars(wrapper)["forward"]

        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            self._before_forward(module, args, kwargs)
            return original.__get__(module, type(module))(*args, **kwargs)

        # torch.compile would otherwise trace `_before_forward`.
        setattr(wrapper, "forward", NotTraced(forward))  # noqa: B010

    def _before_forward(self, ddp: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_over:  # the script has caught the first SystemExit
            raise SystemExit(0)
        if not (ddp.training and torch.is_grad_enabled()):
            return
        number = self._num_forwards.get(ddp, 0) + 1
        self._num_forwards[ddp] = number
        if number != self._step:
            return
        replica = replica_of(ddp)
        transport = transport_of(ddp.process_group) if replica is None else replica.transport
        agrees, text = _examine(ddp, args, kwargs, transport, number)
        if transport.rank == 0:
            if not self._continues:
                text += _name_others(ddp)
            with self._report.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"agrees": agrees, "text": text}) + "\n")
        if not self._continues:
            self._is_over = True
            raise SystemExit(0)


def _name_others(ddp: nn.Module) -> str:
    """Return a text that names the other wrappers, which are not examined because the script ends now.

    The text is empty if there are no other wrappers.
    """
    others = [
        found
        for found in gc.get_objects()
        # Not isinstance, because it reads attributes of proxies, which may run any code.
        if issubclass(type(found), torch.nn.parallel.DistributedDataParallel) and found is not ddp
    ]
    names = ", ".join(f"{type(other).__name__}({type(other.module).__name__})" for other in others)
    return (
        f"\n\nnot examined: {names}. With --continue, each is examined at its own forward" if others else ""
    )


def _examine(
    ddp: Any, args: tuple[Any, ...], kwargs: dict[str, Any], transport: Transport, number: int
) -> tuple[bool, str]:
    """Examine the module inside the wrapper `ddp`, with the arguments of its forward.

    All ranks call this function together.

    Returns:
        Whether the results of all runs agree, and the text of the report.
    """
    module: nn.Module = ddp.module
    if ddp.device_ids:  # the wrapper moves its inputs too
        device = torch.device(ddp.device_type, ddp.device_ids[0])
        args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to(device), (args, kwargs))
    report = Examination(
        title=f"syncline doctor: forward {number} of {type(ddp).__name__}({type(module).__name__})",
        run=lambda inputs: _forward_and_backward(module, *inputs),
        inputs=(args, kwargs),
        objects={"": ddp},
        transport=transport,
        reduces=False,
    ).report()
    text = str(report)
    if isinstance(ddp, DistributedDataParallel):
        text += f"\n\n{ddp.contract}"
    else:
        text += (
            f"\n\n{type(ddp).__name__}: torch's class, {transport.size} ranks, compared over {transport.name}"
        )
    return report.agrees, text


def _forward_and_backward(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """Run the module forward and backward. Return a loss.

    The gradients are written to `.grad` after the backward, so the wrapper starts no reduction.
    """
    with calling(f"the forward of {type(module).__name__}"):
        found = module(*args, **kwargs)
    outputs = [tensor for tensor in tensors_in(found) if tensor.requires_grad and tensor.numel()]
    if not outputs:
        return None
    loss = torch.stack([_weighted_sum(output) for output in outputs]).sum()
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    try:
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
    except RuntimeError as error:
        if _CHECKPOINT_ERROR not in str(error):
            raise
        return loss
    for parameter, gradient in zip(trained, gradients, strict=True):
        parameter.grad = gradient
    return loss


def _weighted_sum(output: Tensor) -> Tensor:
    """Return a weighted sum of the elements, as a loss. Each element has its own weight.

    A plain sum is not a suitable loss, because its gradient vanishes in a softmax.
    """
    real = torch.view_as_real(output) if output.is_complex() else output
    wide = real.to(torch.float32) if real.dtype in (torch.float16, torch.bfloat16) else real
    weights = torch.arange(wide.numel(), dtype=wide.dtype, device=wide.device).cos_()
    return (wide.reshape(-1) * weights).sum().to("cpu", torch.float64)
