"""A class that is wrong on purpose: the fuzzer has to find it."""

from __future__ import annotations

from typing import Any

from syncline import DistributedDataParallel

__all__ = ["Forgetful"]


class Forgetful(DistributedDataParallel):
    """Leaves out the second reduction."""

    num_forwards = 0

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self.training:
            self.num_forwards += 1
            self.require_backward_grad_sync = self.num_forwards != 2
        return super().forward(*inputs, **kwargs)
