"""Which optimizers treat all elements alike, so that a flat span of several parameters is as good as each of them."""

from __future__ import annotations

from torch import optim
from torch.optim import Optimizer

__all__ = ["is_elementwise"]

_ELEMENTWISE = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.NAdam,
    optim.RAdam,
    optim.Adamax,
    optim.Adagrad,
    optim.Adadelta,
    optim.RMSprop,
    optim.Rprop,
    optim.ASGD,
)
_REFUSED = {
    optim.LBFGS: "it needs all parameters at once",
    optim.SparseAdam: "its gradients are sparse, and cannot be cut into spans",
}


def is_elementwise(optimizer: Optimizer, given: bool | None) -> bool:
    """Whether flat spans will do; whole parameters otherwise.

    Args:
        optimizer: which. Of a type that is not known, whole parameters are right if the update of a parameter depends
            on that parameter alone (Muon, Shampoo, LAMB, Adafactor).
        given: what the user says; None: as is known of the type.

    Raises:
        ValueError: neither will do.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.zeros(2, 2))
        >>> is_elementwise(optim.AdamW([weight]), None), is_elementwise(optim.Adafactor([weight]), None)
        (True, False)
    """
    for kind, reason in _REFUSED.items():
        if isinstance(optimizer, kind):
            raise ValueError(
                f"sharded=True: {type(optimizer).__name__} cannot step a share, for {reason}: wrap the module without "
                "sharded=True"
            )
    return type(optimizer) in _ELEMENTWISE if given is None else given
