"""Averaging of one flat tensor by a compression with error feedback, and the state that is kept in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from syncline.checks import checked_state
from syncline.compression.base import Averaged, Averaging, Compression, Layout, encoder_of


class Averager:
    """Averages one flat tensor repeatedly. With error feedback, the loss of one averaging is added to the next.

    With error feedback nothing is lost for good: the sum of all means that came out, plus the mean over ranks of the
    residuals, equals the sum of the exact means. Residuals that are not finite are dropped.

    Args:
        compression: the encoding of the values; None to send them unencoded.
        layout: the layout of the flat tensor.
    """

    def __init__(self, compression: Compression | None, layout: Layout) -> None:
        self.layout = layout
        self._encoder = encoder_of(compression, layout)
        self._residual: Tensor | None = None
        if compression is not None and compression.feeds_back:
            self._residual = torch.zeros(layout.numel, dtype=layout.dtype, device=layout.device)

    def mean(self, values: Tensor) -> Averaging:
        """Average `values`, of shape (numel,) in the layout's type, which are overwritten."""
        if self._residual is None:
            return (yield from self._encoder.mean(values, wants_lost=False))
        averaged = yield from self._encoder.mean(self._residual.add_(values), wants_lost=True)
        lost = torch.zeros_like(averaged.mean) if averaged.lost is None else averaged.lost
        # Otherwise one gradient that overflowed would be added to all later ones.
        self._residual = lost.nan_to_num_(0.0, 0.0, 0.0)
        return Averaged(averaged.mean)

    def memory(self) -> list[dict[str, Tensor]]:
        """Return the state of each tensor of the layout, by name; empty dicts without a state. Do not write to it."""
        kept = [dict(tensors) for tensors in self._encoder.memory()]
        if self._residual is not None:
            for tensors, piece in zip(kept, self._residual.split(self.layout.numels), strict=True):
                tensors["residual"] = piece
        return kept

    def remember(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state of one tensor, as `memory` returned it.

        Raises:
            ValueError: the state is of another compression, or of a tensor of another shape.
        """
        self._check(index, tensors)
        for name, tensor in self.memory()[index].items():
            tensor.copy_(tensors[name])

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the state, with keys `<index of the tensor>.<name>`."""
        return joined_state({str(index): tensors for index, tensors in enumerate(self.memory())})

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a state that `state_dict` returned.

        Raises:
            ValueError: the state is of another compression, or of other tensors. Nothing has changed then.
        """
        given = parted_state(state)
        num_tensors = len(self.layout.shapes)
        unknown = sorted(set(given).difference(map(str, range(num_tensors))))
        if unknown:
            raise ValueError(
                f"expected the compression state of tensors 0 to {num_tensors - 1}, got a state of tensor "
                f"{', '.join(unknown)}: load a state of the same tensors"
            )
        kept = [given.get(str(index), {}) for index in range(num_tensors)]
        for index, tensors in enumerate(kept):
            self._check(index, tensors)
        for index, tensors in enumerate(kept):
            self.remember(index, tensors)

    def _check(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        """Raise if `tensors` do not fit the state of a tensor."""
        own, given = (
            {name: tuple(tensor.shape) for name, tensor in state.items()}
            for state in (self.memory()[index], tensors)
        )
        if own != given:
            raise ValueError(
                f"expected the compression state of tensor {index}, whose shape is {self.layout.shapes[index]}, to "
                f"have the shapes {own}, got {given}: the state was saved with another compression or of another tensor"
            )


def joined_state(kept: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return copies of the state of several tensors, with keys `<name of the tensor>.<name of the state>`.

    Example:
        >>> joined_state({"fc.weight": {"residual": torch.zeros(1)}})
        {'fc.weight.residual': tensor([0.])}
    """
    return {
        f"{name}.{kind}": tensor.clone() for name, tensors in kept.items() for kind, tensor in tensors.items()
    }


def parted_state(state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return the nested dicts from which `joined_state` made the argument.

    Example:
        >>> parted_state({"fc.weight.residual": torch.zeros(1)})
        {'fc.weight': {'residual': tensor([0.])}}
    """
    kept: dict[str, dict[str, Tensor]] = {}
    for key, tensor in checked_state(state).items():
        name, _, kind = key.rpartition(".")
        kept.setdefault(name, {})[kind] = tensor
    return kept


def with_mean_residuals(own: Any, of_all: Sequence[Any]) -> Any:
    """Return a rank's state, with each residual replaced by its mean over all ranks.

    A run with another number of ranks can load the result. The loss that is still to be fed back is the mean of the
    residuals over ranks. If each rank has that mean, the loss stays the same for any number of ranks.

    Args:
        own: the state of a rank, which is not changed: nested dicts, lists and tuples, in which the names of residuals
            are as `joined_state` makes them.
        of_all: the state of each rank, in rank order.

    Example:
        >>> states = [{"0.residual": torch.tensor([4.0])}, {"0.residual": torch.tensor([2.0])}]
        >>> with_mean_residuals({"step": 3, "of": [states[1]]}, [{"step": 3, "of": [state]} for state in states])
        {'step': 3, 'of': [{'0.residual': tensor([3.])}]}
    """
    return _with_means(own, of_all, len(of_all))


def _with_means(own: Any, of_others: Sequence[Any], num_ranks: int) -> Any:
    """Replace residuals by means. `of_others` are the ranks that have this entry. A missing residual counts as zero."""
    if isinstance(own, dict):
        joined = {}
        for key, one in own.items():
            theirs = [state[key] for state in of_others if key in state]
            is_residual = isinstance(one, Tensor) and str(key).rpartition(".")[2] == "residual"
            joined[key] = _mean(theirs, num_ranks) if is_residual else _with_means(one, theirs, num_ranks)
        return joined
    if type(own) in (list, tuple):
        return type(own)(
            _with_means(one, [state[index] for state in of_others if index < len(state)], num_ranks)
            for index, one in enumerate(own)
        )
    return own


def _mean(tensors: Sequence[Tensor], num_ranks: int) -> Tensor:
    """Return the sum of the tensors divided by `num_ranks`, added in rank order so that all ranks get the same bits."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total.div_(num_ranks)
