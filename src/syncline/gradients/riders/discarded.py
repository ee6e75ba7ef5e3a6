"""Which gradients may not be stepped: tensors that were judged, and none that comes in their place."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from torch import Tensor

__all__ = ["DiscardedGradients"]


_MARK = "_syncline_discarded"

_numbers = itertools.count(1)


class DiscardedGradients:
    """Recognizes the gradients of a step that is to be left undone, as long as they are in `.grad`.

    What is done to such a tensor, clipping say, makes it no better. It is no more in the way once `zero_grad()` has
    dropped it, whatever `.grad` is set to then.

    The mark is an attribute of the tensor: it goes where the tensor goes, keeps nothing alive, and is no weak
    reference, which `torch.utils.swap_tensors` would refuse.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> weight.grad = torch.full((2,), torch.nan)
        >>> discarded = DiscardedGradients()
        >>> discarded.are([weight.grad])
        >>> discarded.has_any_of([weight.grad.clamp_(0, 1)]), discarded.has_any_of([torch.ones(2), None])
        (True, False)
        >>> discarded.are([])
        >>> discarded.has_any_of([weight.grad])
        False
    """

    def __init__(self) -> None:
        self._number = 0

    def are(self, gradients: Iterable[Tensor | None]) -> None:
        """From now on these, and no earlier ones."""
        self._number = 0
        for gradient in gradients:
            if gradient is not None:
                self._number = self._number or next(_numbers)
                setattr(gradient, _MARK, self._number)

    def has_any_of(self, gradients: Iterable[Tensor | None]) -> bool:
        """Whether some of them are those."""
        return bool(self._number) and any(getattr(one, _MARK, 0) == self._number for one in gradients)
