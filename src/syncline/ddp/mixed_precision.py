"""torch's `mixed_precision=` of DistributedDataParallel: forward and backward in a lower precision.

The parameters stay as they are. Forward runs on low-precision copies made for it, and autograd carries the
gradients back through the cast, so optimizers, clipping and checkpoints see full precision.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from syncline._torch.tensors import tree_map_only

__all__ = ["MixedPrecision"]


class MixedPrecision:
    """Runs a module in lower precision.

    Args:
        module: whose floating buffers are cast at once, in place, to `buffer_dtype`.
        ignored: names of parameters that stay as they are.
        config: torch's `_MixedPrecision`: `param_dtype`, `reduce_dtype`, `buffer_dtype`, None leaves things alone.
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
        self._module = module
        self._ignored = ignored
        if config.buffer_dtype is not None:
            for buffer in module.buffers():
                if buffer.is_floating_point():
                    buffer.data = buffer.data.to(config.buffer_dtype)

    def __call__(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's forward."""
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
