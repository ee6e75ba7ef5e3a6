"""Forward and backward in lower precision: torch's `mixed_precision=` of DistributedDataParallel.

The parameters stay as they are. Forward runs on low-precision copies, and autograd carries the gradients back through
the cast. Optimizers, clipping and checkpoints therefore see full precision.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from syncline._torch.tensors import tree_map_only

__all__ = ["MixedPrecision"]


class MixedPrecision:
    """A module that runs in lower precision.

    Args:
        module: the module. Its floating-point buffers are cast to `buffer_dtype` at once, in place.
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
        self._module = module
        self._ignored = ignored
        if config.buffer_dtype is not None:
            for buffer in module.buffers():
                if buffer.is_floating_point():
                    buffer.data = buffer.data.to(config.buffer_dtype)

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
