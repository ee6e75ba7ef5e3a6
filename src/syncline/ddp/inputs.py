"""The inputs of a forward: torch's `device_ids=` moves them to a device, `mixed_precision=` to a lower precision.

In lower precision the parameters stay as they are. Forward runs on low-precision copies, and autograd carries the
gradients back through the cast. Optimizers, clipping and checkpoints therefore see full precision.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from syncline._torch.tensors import tree_map_only


class MixedPrecision:
    """A module that runs in lower precision.

    Args:
        module: the module.
        ignored: names of parameters that are not cast.
        config: torch's `_MixedPrecision`: `param_dtype`, `reduce_dtype`, `buffer_dtype`; None casts nothing.
    """

    def __init__(self, module: nn.Module, config: Any, ignored: Collection[str] = ()) -> None:
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
            if not isinstance(getattr(config, name, ""), torch.dtype | None):
                raise TypeError(
                    "expected mixed_precision to be torch's _MixedPrecision (param_dtype, reduce_dtype and "
                    f"buffer_dtype, each a torch.dtype or None), got {config!r}"
                )
        self.param_dtype: torch.dtype | None = config.param_dtype
        self.reduce_dtype: torch.dtype | None = config.reduce_dtype or config.param_dtype
        self._buffer_dtype: torch.dtype | None = config.buffer_dtype
        self._module = module
        self._ignored = frozenset(ignored)

    def cast_buffers(self) -> None:
        """Cast the module's floating-point buffers to `buffer_dtype`, in place."""
        if self._buffer_dtype is not None:
            for buffer in self._module.buffers():
                if buffer.is_floating_point():
                    buffer.data = buffer.data.to(self._buffer_dtype)

    def __call__(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module's forward in the lower precision."""
        dtype = self.param_dtype
        if dtype is None:
            return self._module(*inputs, **kwargs)

        def lower(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        inputs, kwargs = tree_map_only(Tensor, lower, (inputs, kwargs))
        parameters = {
            name: lower(parameter)
            for name, parameter in self._module.named_parameters()
            if name not in self._ignored
        }
        return torch.func.functional_call(self._module, parameters, inputs, kwargs)


def checked_device_ids(
    module: nn.Module,
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
) -> tuple[list[int] | None, int | None]:
    """Return the devices of inputs and outputs, by torch's rules; None leaves them where they are."""
    is_list = isinstance(device_ids, Sequence) and not isinstance(device_ids, str)
    if device_ids is not None and not (is_list and all(map(_is_device, device_ids))):
        raise TypeError(f"expected device_ids to be a list of one device, or None, got {device_ids!r}")
    if output_device is not None and not _is_device(output_device):
        raise TypeError(f"expected output_device to be a device, or None, got {output_device!r}")
    devices = {p.device for p in module.parameters()}
    types = {device.type for device in devices}
    if not device_ids and not output_device:  # as in torch, 0 counts as not given, even on CPU
        return None, None
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(
            f"device_ids can only be None or contain a single element, got {list(device_ids)}: one process drives "
            "one device"
        )
    if len(devices) > 1 or types == {"cpu"}:
        where = ", ".join(sorted(map(str, devices)))
        raise ValueError(
            "DistributedDataParallel device_ids and output_device arguments only work with single-device GPU modules; "
            f"this one lives on {where}, got device_ids={device_ids}, output_device={output_device}: leave them out"
        )
    if not device_ids:
        return None, None
    first = _index_of(device_ids[0])
    return [first], first if output_device is None else _index_of(output_device)


def _is_device(device: object) -> bool:
    return isinstance(device, int | str | torch.device) and not isinstance(device, bool)


def _index_of(device: int | torch.device) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index
