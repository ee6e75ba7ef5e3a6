"""Classes that are wrong on purpose: the fuzzer has to find each."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import Tensor

from syncline import DistributedDataParallel
from syncline._torch.tensors import belongs_to_transform

__all__ = ["Forgetful", "Jealous", "Possessive"]


class Forgetful(DistributedDataParallel):
    """Leaves out the second reduction."""

    num_forwards = 0

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self.training:
            self.num_forwards += 1
            self.require_backward_grad_sync = self.num_forwards != 2
        return super().forward(*inputs, **kwargs)


class Possessive(DistributedDataParallel):
    """Lets no wrapper inside of it reduce."""

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for part in self.module.modules():
                if isinstance(part, DistributedDataParallel):
                    stack.enter_context(part.no_sync())
            return super().forward(*inputs, **kwargs)


class Jealous(DistributedDataParallel):
    """Does not reduce what a transform of torch.func has called."""

    def forward(self, x: Tensor) -> Any:
        self.require_backward_grad_sync = not belongs_to_transform(x)
        return super().forward(x)
