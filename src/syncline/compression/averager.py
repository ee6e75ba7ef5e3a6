"""A compression applied to one flat tensor with error feedback, and its state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from syncline.checks import checked_state
from syncline.compression.base import Averaged, Averaging, Compression, Layout


class Averager:
    """Averages one flat tensor repeatedly. With error feedback, the loss of one averaging is added to the next.

    With error feedback nothing is lost for good: the means that came out, plus the mean over ranks of the residuals,
    equal the means of the values that went in. Residuals that are not finite are dropped.

    Args:
        compression: how values are encoded.
        layout: the layout of the flat tensor.
    """

    def __init__(self, compression: Compression, layout: Layout) -> None:
        self.layout = layout
        self._encoder = compression.encoder(layout)
        self._residual: Tensor | None = None
        if compression.feeds_back:
            self._residual = torch.zeros(layout.numel, dtype=layout.dtype, device=layout.device)

    def mean(self, values: Tensor) -> Averaging:
        """Average `values`, of shape (numel,) in the layout's type, which are consumed."""
        residual = self._residual
        if residual is None:
            return self._encoder.mean(values, wants_lost=False)
        return self._fed_back(values, residual)

    def _fed_back(self, values: Tensor, residual: Tensor) -> Averaging:
        averaged = yield from self._encoder.mean(residual.add_(values), wants_lost=True)
        lost = averaged.lost
        if lost is None:
            lost = torch.zeros_like(averaged.mean)
        # Otherwise one gradient that overflowed would be added to all later ones.
        self._residual = lost.nan_to_num_(0.0, 0.0, 0.0)
        return Averaged(averaged.mean)

    def memory(self) -> list[dict[str, Tensor]]:
        """Return the state of each tensor of the layout, by name; read-only. The dicts are empty if there is none."""
        kept = [dict(tensors) for tensors in self._encoder.memory()]
        if self._residual is not None:
            for tensors, piece in zip(kept, self._residual.split(self.layout.numels), strict=True):
                tensors["residual"] = piece
        return kept

    def remember(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state of one tensor, as returned by `memory`.

        Raises:
            ValueError: the state is of another compression, or of a tensor of another shape.
        """
        own = self._checked(index, tensors)
        for name, tensor in own.items():
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
                f"expected the state of tensors 0 to {num_tensors - 1}, got one of {', '.join(unknown)}"
            )
        kept = [given.get(str(index), {}) for index in range(num_tensors)]
        for index, tensors in enumerate(kept):
            self._checked(index, tensors)
        for index, tensors in enumerate(kept):
            self.remember(index, tensors)

    def _checked(self, index: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        own = self.memory()[index]
        shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
        given = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if shapes != given:
            raise ValueError(
                f"what a compression keeps of a tensor of shape {self.layout.shapes[index]}: expected {shapes}, got "
                f"{given}, saved with another compression or of another tensor"
            )
        return own


def joined_state(kept: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return copies of the tensors, with keys `<name of the tensor>.<name of the state>`.

    Example:
        >>> joined_state({"fc.weight": {"residual": torch.zeros(1)}})
        {'fc.weight.residual': tensor([0.])}
    """
    return {
        f"{name}.{kind}": tensor.clone() for name, tensors in kept.items() for kind, tensor in tensors.items()
    }


def parted_state(state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Return the nested dicts from which `joined_state` made `state`.

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
    """Return one rank's state for another number of ranks, with each residual replaced by the mean over all ranks.

    The values that are still to be fed back are the mean of the residuals over ranks. If each rank has that mean, it
    stays the same for any number of ranks.

    Args:
        own: a rank's state: nested dicts, lists and tuples, in which residuals have names as from `joined_state`; not
            changed.
        of_all: the state of each rank, in rank order.

    Example:
        >>> states = [{"0.residual": torch.tensor([4.0])}, {"0.residual": torch.tensor([2.0])}]
        >>> with_mean_residuals({"step": 3, "of": [states[1]]}, [{"step": 3, "of": [state]} for state in states])
        {'step': 3, 'of': [{'0.residual': tensor([3.])}]}
    """
    return _with_means(own, of_all, len(of_all))


def _with_means(own: Any, of_others: Sequence[Any], num_ranks: int) -> Any:
    """Replace residuals by means. `of_others` has the ranks with this entry; a missing residual counts as zero."""
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
    """Return the sum of the tensors over `num_ranks`, added in rank order so that all ranks get the same bits."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total.div_(num_ranks)
