"""Averaging of one flat tensor by a compression with error feedback, and the state that is kept between averagings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from syncline.checks import checked_state
from syncline.compression.base import Averaging, Compression, Layout, encoder_of
from syncline.trees import leaves, map_leaves


class Averager:
    """An object that averages one flat tensor over all ranks, again and again, by a compression.

    The residual is the part of the values that an averaging loses. If the compression uses error feedback, the averager
    adds the residual to the values of the next averaging. Then nothing is lost for good: the sum of all results, plus
    the mean over ranks of the last residuals, equals the sum of the exact means. Elements of a residual that are not
    finite are replaced by zeros.

    Args:
        compression: the compression of the values; None to send them without compression.
        layout: the layout of the flat tensor.
    """

    def __init__(self, compression: Compression | None, layout: Layout) -> None:
        self.layout = layout
        self._encoder = encoder_of(compression, layout)
        self._residual: Tensor | None = None
        if compression is not None and compression.feeds_back:
            self._residual = torch.zeros(layout.numel, dtype=layout.dtype, device=layout.device)
        self._offsets = list(accumulate(layout.numels, initial=0))
        """The place of each tensor in the flat tensor, where its residual is."""
        self._kept: tuple[Tensor | None, list[dict[str, Tensor]]] | None = None
        """The residual and the encoder's memory at the last call of `keep`; None before the first call."""
        self._spare: Tensor | None = None
        """Memory for the next residual, while the present one is kept."""

    def mean(self, values: Tensor) -> Averaging:
        """Return a generator that averages the tensor `values` over all ranks.

        Args:
            values: this rank's values, of shape (numel,) and of the layout's dtype. They are overwritten, and the mean
                may use their memory.
        """
        residual = lost = self._residual
        if residual is not None and self._kept is not None and self._kept[0] is residual:
            lost = torch.empty_like(residual) if self._spare is None else self._spare
            self._spare = None
        mean = yield from self._encoder.mean(values, residual=residual, lost=lost)
        self._residual = lost
        return mean

    def keep(self) -> None:
        """Remember the present state for `undo`. The residual is not copied."""
        former = None if self._kept is None else self._kept[0]
        if former is not self._residual:
            self._spare = former
        memory = [{name: one.clone() for name, one in tensors.items()} for tensors in self._encoder.memory()]
        self._kept = self._residual, memory

    def undo(self) -> None:
        """Restore the state that `keep` has remembered, because the averagings since then do not count."""
        if self._kept is None:
            return
        self._residual, memory = self._kept
        for tensors, kept in zip(self._encoder.memory(), memory, strict=True):
            for name, tensor in kept.items():
                tensors[name].copy_(tensor)

    def memory(self) -> list[dict[str, Tensor]]:
        """Return the state of each tensor of the layout, as a dict of tensors. Do not modify these tensors.

        If a tensor of the layout has no state, its dict is empty.
        """
        return [self._memory_of(index) for index in range(len(self.layout.shapes))]

    def _memory_of(self, index: int) -> dict[str, Tensor]:
        kept = dict(self._encoder.memory_of(index))
        if self._residual is not None:
            kept["residual"] = self._residual[self._offsets[index] : self._offsets[index + 1]]
        return kept

    def remember(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        """Restore the state of one tensor of the layout.

        Args:
            index: the index of the tensor in the layout.
            tensors: the state, as `memory` returned it for the tensor.

        Raises:
            ValueError: the state is of another compression, or of a tensor of another shape.
        """
        self._check(index, tensors)
        for name, tensor in self._memory_of(index).items():
            tensor.copy_(tensors[name])

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of the state of all tensors, with keys `<index of the tensor>.<name of the state>`."""
        return joined_state({str(index): tensors for index, tensors in enumerate(self.memory())})

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a state that `state_dict` returned.

        Raises:
            ValueError: the state is of another compression, or of other tensors. The former state is then unchanged.
        """
        given = parted_state(state)
        num_tensors = len(self.layout.shapes)
        unknown = sorted(set(given).difference(map(str, range(num_tensors))))
        if unknown:
            raise ValueError(
                f"expected the compression state of tensors 0 to {num_tensors - 1}, got a state of tensor "
                f"{', '.join(unknown)}. Load a state that was saved for the same tensors"
            )
        kept = [given.get(str(index), {}) for index in range(num_tensors)]
        for index, tensors in enumerate(kept):
            self._check(index, tensors)
        for index, tensors in enumerate(kept):
            self.remember(index, tensors)

    def _check(self, index: int, tensors: Mapping[str, Tensor]) -> None:
        """Raise ValueError if the names or shapes of a saved state do not fit the tensor with this index."""
        own, given = (
            {name: tuple(tensor.shape) for name, tensor in state.items()}
            for state in (self._memory_of(index), tensors)
        )
        if own != given:
            raise ValueError(
                f"the compression state of tensor {index}, which has shape {self.layout.shapes[index]}: expected a "
                f"state with tensors of the shapes {own}, got {given}. This state was saved with another compression, "
                "or for another tensor. Load a state that was saved with this compression and for this tensor"
            )


def joined_state(kept: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Join the states of several tensors to one dict of copies, with keys `<name of the tensor>.<name of the state>`.

    Examples:
        >>> joined_state({"fc.weight": {"residual": torch.zeros(1)}})
        {'fc.weight.residual': tensor([0.])}
    """
    return {
        f"{name}.{kind}": tensor.clone() for name, tensors in kept.items() for kind, tensor in tensors.items()
    }


def parted_state(state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Divide a dict that `joined_state` returned into one dict per tensor, by the name of the tensor.

    Examples:
        >>> parted_state({"fc.weight.residual": torch.zeros(1)})
        {'fc.weight': {'residual': tensor([0.])}}
    """
    kept: dict[str, dict[str, Tensor]] = {}
    for key, tensor in checked_state(state).items():
        name, _, kind = key.rpartition(".")
        kept.setdefault(name, {})[kind] = tensor
    return kept


def with_own_residuals(state: Any, own: Any) -> Any:
    """Return another rank's state, in which the residuals are those of this rank.

    Ranks have equal states except for their residuals.

    Args:
        state: the state of another rank, made of nested dicts, lists and tuples. It is not changed.
        own: the state of this rank. A residual that it lacks is zero.

    Examples:
        >>> state = {"0.start": torch.ones(1), "0.residual": torch.ones(1)}
        >>> with_own_residuals(state, {})
        {'0.start': tensor([1.]), '0.residual': tensor([0.])}
    """
    residuals = {path: torch.zeros_like(leaf) for path, leaf in _residuals_in(state).items()}
    residuals |= _residuals_in(own)
    return map_leaves(state, lambda path, leaf: residuals.get(path, leaf))


def with_mean_residuals(own: Any, of_all: Sequence[Any]) -> Any:
    """Return a rank's state, with each residual replaced by its mean over all ranks.

    A run with another number of ranks can load the result. Only the mean of the residuals over ranks affects the next
    average. If each rank loads that mean as its residual, the mean is the same for any number of ranks.

    Args:
        own: the state of one rank, made of nested dicts, lists and tuples. It is not changed. A tensor in it is a
            residual if its key ends with `.residual`, as `joined_state` makes it.
        of_all: the states of all ranks, in rank order.

    Examples:
        >>> states = [{"0.residual": torch.tensor([4.0])}, {"0.residual": torch.tensor([2.0])}]
        >>> with_mean_residuals({"step": 3, "of": [states[1]]}, [{"step": 3, "of": [state]} for state in states])
        {'step': 3, 'of': [{'0.residual': tensor([3.])}]}
    """
    totals: dict[str, Tensor] = {}
    for state in of_all:  # in rank order, so that all ranks get the same bits
        for path, residual in _residuals_in(state).items():
            totals[path] = totals[path].add_(residual) if path in totals else residual.clone()
    # A residual that a rank lacks counts as zero.
    means = {path: total.div_(len(of_all)) for path, total in totals.items()}
    return map_leaves(own, lambda path, leaf: means.get(path, leaf))


def _residuals_in(state: Any) -> dict[str, Tensor]:
    """Return the residuals in nested dicts, lists and tuples, by their paths."""
    return {
        path: leaf
        for path, leaf in leaves(state)
        if isinstance(leaf, Tensor) and path.rpartition(".")[2] == "residual"
    }
