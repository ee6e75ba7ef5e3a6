"""Gradients that must not be applied."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from torch import Tensor

_MARK = "_syncline_discarded"

_numbers = itertools.count(1)


class DiscardedGradients:
    """Marks on the gradients of a discarded step, by which they are recognized as long as they are in `.grad`.

    A marked tensor stays marked when it is changed in place (by clipping, for example). Once `zero_grad()` has dropped
    it, a new tensor in `.grad` is not marked.

    The mark is an attribute of the tensor. So it moves with the tensor and keeps nothing alive. A weak reference would
    not do, because `torch.utils.swap_tensors` refuses tensors that have one.

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
        """Mark these gradients as discarded; earlier marks no longer count."""
        self._number = 0
        for gradient in gradients:
            if gradient is not None:
                self._number = self._number or next(_numbers)
                setattr(gradient, _MARK, self._number)

    def has_any_of(self, gradients: Iterable[Tensor | None]) -> bool:
        """Return whether any of these gradients is marked."""
        return bool(self._number) and any(getattr(one, _MARK, 0) == self._number for one in gradients)
