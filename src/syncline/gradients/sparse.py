"""A bucket of one sparse gradient (an embedding with `sparse=True`): rows are gathered and then added up."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from syncline._torch.tensors import num_entries, sparse_tensor, stored_indices, stored_values
from syncline.errors import SynclineError
from syncline.gradients.bucket import BucketState, Lifecycle
from syncline.gradients.bucket_plan import BucketPlan
from syncline.gradients.comm_hook import CommHook, GradBucket
from syncline.transport.base import Transport
from syncline.transport.work import Work


class SparseBucket(Lifecycle):
    """A bucket that sums one sparse gradient over ranks; each rank has other rows.

    Each rank contributes the rows it touched. Every rank receives all rows, in rank order, and adds up the rows of one
    index in that order, so every rank ends with the same bits. Traffic grows with the number of rows touched, not with
    the size of the embedding.

    Args:
        plan: a plan with one parameter.
        parameters: all parameters of the module, by index.
        transport: the transport that sends the rows.
        comm_hook: a hook that reduces the gradient instead; as in torch it gets a sparse tensor.
        is_last: the value of the hook's `is_last`.
    """

    is_sparse = True

    def __init__(
        self,
        plan: BucketPlan,
        parameters: Sequence[Tensor],
        transport: Transport,
        *,
        comm_hook: CommHook | None = None,
        is_last: bool = False,
    ) -> None:
        super().__init__(plan, [parameters[plan.parameters[0]]])
        self._parameter = self.members[0]
        self._transport = transport
        self._comm_hook = comm_hook
        self._is_last = is_last
        self._scale = 1.0
        self._mine: Tensor | None = None
        self._sum: Tensor | None = None
        self._num_rows = torch.zeros(transport.size, dtype=torch.int64, device=transport.control_device)
        self._work: Work | None = None
        self._future: torch.futures.Future[Any] | None = None

    def view_of(self, position: int) -> None:
        """Return None: nothing is copied before the launch."""

    def fill(self, scale: float, missing: frozenset[int]) -> None:
        """Take this rank's rows. A missing gradient has none, unless an earlier backward left some in `.grad`."""
        gradient = self._parameter.grad
        self._mine = None if gradient is None else _as_sparse(gradient)
        self._scale = scale

    def launch_zeros(self, *, tail: Sequence[int] | None) -> None:
        """Contribute no rows, on a rank that has no inputs left."""
        self._mine = None
        self.send(tail=tail, trigger=None)

    def send(self, *, tail: Sequence[int] | None, trigger: int | None) -> None:
        """Send the number of rows to the other ranks, or start the hook."""
        assert tail is None
        self.trigger = trigger
        self._transition(BucketState.IN_FLIGHT)
        self.launched_at = time.perf_counter()
        if self._comm_hook is not None:
            buffer = _no_rows(self._parameter) if self._mine is None else self._mine
            bucket = GradBucket(
                index=self.plan.index,
                buffer=buffer,
                parameters=self.members,
                gradients=(),  # as in torch
                is_last=self._is_last,
            )
            self._future = self._comm_hook(bucket)
            return
        num_rows = 0 if self._mine is None else num_entries(self._mine)
        self._work = self._transport.all_gather(
            self._num_rows, torch.tensor([num_rows], device=self._num_rows.device)
        )

    def wait(self) -> None:
        """Gather the rows of all ranks and add them up, or take the hook's result."""
        start = time.perf_counter()
        if self._future is not None:
            self._sum = self._checked(self._future.wait())
        else:
            assert self._work is not None
            self._work.wait()
            self._sum = self._gathered([int(n) for n in self._num_rows.tolist()])
        self._work = self._future = None
        self.waited_seconds = time.perf_counter() - start
        self._transition(BucketState.REDUCED)

    def _checked(self, result: object) -> Tensor:
        if isinstance(result, list | tuple) and len(result) == 1:
            (result,) = result
        assert self._comm_hook is not None
        expected = tuple(self._parameter.shape)
        if not isinstance(result, Tensor) or result.shape != expected:
            got = (
                f"one of shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
            )
            raise SynclineError(
                f"communication hook {self._comm_hook.name}, bucket {self.plan.index} of a sparse gradient: expected "
                f"its future to hold a tensor of shape {expected}, got {got}: return the bucket's buffer, reduced"
            )
        return result

    def _gathered(self, num_rows: Sequence[int]) -> Tensor:
        parameter, size = self._parameter, self._transport.size
        widest = max(num_rows)
        row_shape = parameter.shape[1:]
        indices = torch.zeros(widest, dtype=torch.int64, device=parameter.device)
        values = torch.zeros((widest, *row_shape), dtype=parameter.dtype, device=parameter.device)
        if self._mine is not None:
            indices[: num_entries(self._mine)] = stored_indices(self._mine)[0]
            torch.mul(stored_values(self._mine), self._scale, out=values[: num_entries(self._mine)])
        all_indices = torch.zeros(size * widest, dtype=torch.int64, device=parameter.device)
        all_values = torch.zeros((size * widest, *row_shape), dtype=parameter.dtype, device=parameter.device)
        if widest:
            self._transport.all_gather(all_indices, indices).wait()
            self._transport.all_gather(all_values.view(-1), values.view(-1)).wait()
        kept = torch.cat(
            [torch.arange(rank * widest, rank * widest + n) for rank, n in enumerate(num_rows)]
        ).to(parameter.device)
        return sparse_tensor(all_indices[kept][None], all_values[kept], parameter.shape).coalesce()

    def own(self) -> Tensor:
        """Return the rows that this rank contributes, as a dense bucket returns its gradients."""
        return self._parameter.new_zeros(0) if self._mine is None else stored_values(self._mine)

    def own_parts(self) -> list[tuple[int, Tensor]]:
        """Return the same rows with the parameter's index."""
        return [(self.plan.parameters[0], self.own())]

    def handed_out(self) -> tuple[Tensor, list[tuple[int, Tensor]]]:
        """Return the rows of the sum, as a dense bucket returns its reduced gradients."""
        gradient = self._parameter.grad
        if gradient is None:
            return self._parameter.new_zeros(0), []
        values = stored_values(gradient) if gradient.is_sparse else gradient
        return values, [(self.plan.parameters[0], values)]

    def divide(self, divisor: float) -> None:
        """Divide the summed rows by `divisor`."""
        assert self._sum is not None
        stored_values(self._sum).div_(divisor)

    def hand_out(self, skip: frozenset[int], *, any_missing: bool, keeps_tensor: bool = False) -> None:
        """Set `.grad` to the sum, unless no rank used the parameter. The sum has no autograd graph."""
        if self.plan.parameters[0] not in skip:
            self._parameter.grad = self._sum
        self._mine = self._sum = None


def _no_rows(parameter: Tensor) -> Tensor:
    return sparse_tensor(
        torch.zeros(1, 0, dtype=torch.int64, device=parameter.device),
        parameter.new_zeros(0, *parameter.shape[1:]),
        parameter.shape,
        is_coalesced=True,
    )


def _as_sparse(gradient: Tensor) -> Tensor:
    """Return the rows of `gradient`, with rows of the same index added up."""
    return gradient.coalesce() if gradient.is_sparse else gradient.to_sparse(1)
