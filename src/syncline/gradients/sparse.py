"""A bucket of one sparse gradient, for example of an embedding. The rows are gathered and then added up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from syncline._torch.tensors import gradient_dtype, num_entries, sparse_tensor, stored_indices, stored_values
from syncline.gradients.bucket import Bucket
from syncline.gradients.bucket_plan import BucketPlan
from syncline.gradients.tail import Tail
from syncline.transport.base import Transport
from syncline.transport.work import CombinedWork, Work


class SparseBucket(Bucket):
    """A bucket that sums one sparse gradient over the ranks. Ranks may have different rows of the gradient.

    Each rank contributes the rows that it used. Every rank receives the rows of all ranks, in rank order, and adds up
    the rows with the same index in that order. So every rank gets the same bits. Traffic grows with the number of used
    rows, not with the size of the embedding.

    Args:
        plan: the plan of the bucket, which has one parameter.
        parameters: all parameters of the module, by index.
        transport: the transport that sends the rows.
    """

    is_sparse = True
    collective = "all_gather"

    def __init__(self, plan: BucketPlan, parameters: Sequence[Tensor], transport: Transport) -> None:
        super().__init__(plan, parameters)
        (self._parameter,) = self.members
        self._transport = transport
        self._scale = 1.0
        self._own = _no_rows(self._parameter)
        self._sum: Tensor | None = None
        self._num_rows = torch.zeros(transport.size, dtype=torch.int64, device=transport.control_device)

    def fill(self, scale: float, missing: frozenset[int]) -> Sequence[int]:
        gradient = self._parameter.grad
        if gradient is None:
            self._own = _no_rows(self._parameter)
        else:  # coalescing adds up the rows of the same index
            self._own = gradient.coalesce() if gradient.is_sparse else gradient.to_sparse(1)
        self._scale = scale
        return ()

    def fill_zeros(self) -> None:
        self._own = _no_rows(self._parameter)

    def _start(self, tail: Tail | None) -> Work:
        assert tail is None
        if self._comm_hook is not None:  # as in torch, the hook receives a sparse tensor
            return self._comm_hook.start(self._grad_bucket(self._own, ()), self._take_sum)
        own = torch.tensor([num_entries(self._own)], device=self._num_rows.device)
        counts = self._transport.all_gather(self._num_rows, own)
        return CombinedWork([(counts, self._gather_rows)])

    def _take_sum(self, result: Tensor) -> None:
        self._sum = result

    def _gather_rows(self) -> None:
        """Gather the rows of all ranks, and add them up. The number of rows of each rank is already known."""
        num_rows: list[int] = self._num_rows.tolist()
        parameter, size, num_own = self._parameter, self._transport.size, num_entries(self._own)
        most = max(num_rows)  # every rank sends as many rows as the rank that has the most
        row_shape = parameter.shape[1:]
        indices = torch.zeros(most, dtype=torch.int64, device=parameter.device)
        values = torch.zeros((most, *row_shape), dtype=gradient_dtype(parameter), device=parameter.device)
        indices[:num_own] = stored_indices(self._own)[0]
        torch.mul(stored_values(self._own), self._scale, out=values[:num_own])
        all_indices = indices.new_zeros(size * most)
        all_values = values.new_zeros((size * most, *row_shape))
        if most:
            self._transport.all_gather(all_indices, indices).wait()
            self._transport.all_gather(all_values.view(-1), values.view(-1)).wait()
        kept = torch.cat(
            [torch.arange(rank * most, rank * most + n, device="cpu") for rank, n in enumerate(num_rows)]
        )
        kept = kept.to(parameter.device)
        self._sum = sparse_tensor(all_indices[kept][None], all_values[kept], parameter.shape).coalesce()

    def free(self) -> None:
        self._own, self._sum = _no_rows(self._parameter), None

    def own(self) -> Tensor:
        return stored_values(self._own)

    def own_parts(self) -> list[tuple[int, Tensor]]:
        return [(self.plan.parameters[0], self.own())]

    def handed_out(self) -> tuple[Tensor, list[tuple[int, Tensor]]]:
        gradient = self._parameter.grad
        if gradient is None:
            return self._parameter.new_zeros(0), []
        values = stored_values(gradient) if gradient.is_sparse else gradient
        return values, [(self.plan.parameters[0], values)]

    def divide(self, divisor: float) -> None:
        assert self._sum is not None
        stored_values(self._sum).div_(divisor)

    def hand_out(self, skip: frozenset[int], *, any_missing: bool, keeps_tensor: bool = False) -> None:
        """Set `.grad` to the sum over all ranks, unless the parameter is in `skip`. The sum has no autograd graph."""
        if self.plan.parameters[0] not in skip:
            self._parameter.grad = self._sum
        self.free()


def _no_rows(parameter: Tensor) -> Tensor:
    return sparse_tensor(
        torch.zeros(1, 0, dtype=torch.int64, device=parameter.device),
        parameter.new_zeros(0, *parameter.shape[1:]),
        parameter.shape,
        is_coalesced=True,
    )
