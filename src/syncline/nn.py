"""Batch normalization over the batches of all ranks.

Let x be the samples of all ranks, n their number per channel, and dy the gradient of the output y. Then:

    y  = (x - mean) * invstd * weight + bias             one all_gather: count, mean, M2 of each rank
    dx = (dy - sum(dy)/n - (x - mean) * invstd**2 * sum(dy * (x - mean))/n) * invstd * weight
                                                         one all_reduce: the two sums

M2 is the sum of squared deviations from a rank's own mean. The moments of all ranks are pooled by the formula of Chan,
Golub and LeVeque (1979), which is extended here from two sets to any number of sets. The formula avoids cancellation if
a mean is large, and gives every sample the same weight even if batch sizes differ. Moments and sums are computed in
float32, or in float64 for float64 inputs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.parameter import is_lazy

from syncline._torch.modules import COPIED_WITH_A_LAYER, BatchNorm
from syncline.checks import checked_count, checked_kind, checked_number, checked_truth, suggests_arguments
from syncline.session.world import transport_of
from syncline.transport.base import Transport

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(nn.SyncBatchNorm):
    """A layer for batch normalization over the batches of all ranks, for every device and transport.

    It can be used in place of `torch.nn.SyncBatchNorm`, its base class. In training, outputs, gradients and running
    statistics equal those of one process that normalizes the concatenated batches of all ranks. Batches may differ in
    size, and may be empty on some ranks. In eval mode, or with one rank, this layer is plain batch normalization.
    Gradients of `weight` and `bias` stay local; `DistributedDataParallel` averages them.

    Every rank must run the forward and the backward of each such layer equally often and in the same order. If
    ranks take different paths through the model (`find_unused_parameters`), give the layers a separate group, so that
    their collectives are not matched with those of the gradients.

    Args:
        num_features: the number of channels C of an input (N, C, ...).
        eps: a number that is added to the variance to avoid a division by zero.
        momentum: the weight of the newest batch in the running statistics. None stands for the mean over all batches.
        affine: whether the layer has a weight and a bias that are learned.
        track_running_stats: whether the layer has running statistics. Without them, eval mode uses the statistics of
            the local batch.
        process_group: the ranks whose batches are normalized together: a torch.distributed process group, a Syncline
            transport, or None for the default group. If torch.distributed is not initialised, the default group is this
            process alone.
        device: the device of parameters and buffers.
        dtype: the dtype of parameters and floating-point buffers.
        bias: whether the layer has a bias. False is possible only if the BatchNorm of the installed torch has this
            argument.

    Raises:
        ValueError: an argument is invalid. Forward raises it if the input has the wrong number of dimensions or
            channels, or if all ranks together have less than two values per channel in training.
        TypeError: an argument has a wrong type. Forward raises it if the input is not floating-point.

    Examples:
        >>> from syncline.transport.threads import run_ranks
        >>> def program(transport):
        ...     layer = SyncBatchNorm(1, process_group=transport)
        ...     return layer(torch.tensor([[0.0], [2.0 * transport.rank]])), layer.running_mean.item()
        >>> outputs, means = zip(*run_ranks(2, program))
        >>> round(torch.cat(outputs).mean().item(), 6), [round(mean, 6) for mean in means]
        (0.0, [0.05, 0.05])
    """

    process_group: Any  # None, a dist.ProcessGroup or a Transport

    @suggests_arguments
    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: dist.ProcessGroup | Transport | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(
            checked_count("num_features", num_features, at_least=0),
            checked_number("eps", eps, at_least=0),
            None if momentum is None else checked_number("momentum", momentum),
            checked_truth("affine", affine),
            checked_truth("track_running_stats", track_running_stats),
            _checked_group(process_group),
            device,
            dtype,
            **({} if checked_truth("bias", bias) else {"bias": False}),
        )

    def forward(self, input: Tensor) -> Tensor:
        """Normalize `input` (N, C, ...). In training mode this is a collective call."""
        self._check_input(input)
        transport = transport_of(self.process_group) if self.training else None
        if transport is None or transport.size == 1:
            return BatchNorm.forward(self, input)
        lane = transport.common_lane("batch norm")
        y, mean, var, num_values = _sync_batch_norm(input, self.weight, self.bias, self.eps, lane)
        if self.track_running_stats:
            self._update_running_statistics(mean, var, num_values)
        return y

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, process_group: dist.ProcessGroup | Transport | None = None
    ) -> nn.Module:
        """Replace all BatchNorm layers in `module` by layers of this class, also torch's SyncBatchNorm layers.

        Each new layer takes over the parameters, buffers, hooks, training mode and all other attributes of the layer
        that it replaces. A layer that occurs several times is replaced by the same new layer everywhere.

        Args:
            module: the module, which is changed in place. If it is itself a BatchNorm layer, it is not changed.
            process_group: see `SyncBatchNorm`.

        Returns:
            `module`, or the new layer if `module` is a BatchNorm layer.

        Raises:
            TypeError: an argument has a wrong type. Also raised if a BatchNorm layer is lazy, or belongs to a subclass
                whose own forward would be lost. `module` is not changed then.

        Examples:
            >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
            >>> [type(layer).__name__ for layer in SyncBatchNorm.convert_sync_batchnorm(model)]
            ['Linear', 'SyncBatchNorm']
        """
        checked_kind("module", module, nn.Module, "a torch.nn.Module")
        _checked_group(process_group)
        for name, layer in module.named_modules():
            if isinstance(layer, BatchNorm):
                _check_convertible(name, layer)
        converted: dict[int, nn.Module] = {}
        for owner in list(module.modules()):
            for name, child in owner._modules.items():
                if isinstance(child, BatchNorm):
                    owner._modules[name] = converted.setdefault(
                        id(child), cls._taking_over(child, process_group)
                    )
        return cls._taking_over(module, process_group) if isinstance(module, BatchNorm) else module

    @classmethod
    def _taking_over(cls, layer: BatchNorm, process_group: object) -> SyncBatchNorm:
        new = cls.__new__(cls)
        # All other dictionaries stay the same objects, so that handles of registered hooks can still remove them.
        state = {
            name: copy.copy(value) if name in COPIED_WITH_A_LAYER else value
            for name, value in vars(layer).items()
        }
        new.__dict__.update(state, process_group=process_group)
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> SyncBatchNorm:
        """Return a deep copy of the layer that uses the same group. Groups and transports cannot be copied."""
        memo[id(self.process_group)] = self.process_group
        new = memo[id(self)] = self.__new__(type(self))
        new.__dict__.update(copy.deepcopy(vars(self), memo))
        return new

    def _check_input(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(
                f"expected an input (N, C, ...) with at least 2 dimensions, got shape {tuple(input.shape)}"
            )
        if input.size(1) != self.num_features or not self.num_features:
            raise ValueError(
                f"expected an input (N, C, ...) with C = num_features = {self.num_features} channels, and at least one "
                f"channel, got shape {tuple(input.shape)}"
            )
        if not input.is_floating_point():
            raise TypeError(f"expected a floating-point input, got {input.dtype}")

    @torch.no_grad()
    def _update_running_statistics(self, mean: Tensor, var: Tensor, num_values: Tensor) -> None:
        momentum = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        unbiased = var * (num_values / (num_values - 1))
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            if running is not None:
                running.lerp_(new.to(running.dtype), momentum or 0.0)


def _checked_group(group: Any) -> Any:
    if group is None or group is dist.GroupMember.NON_GROUP_MEMBER:  # for non-members, no forward may run
        return group
    return checked_kind(
        "process_group", group, dist.ProcessGroup | Transport, "a process group or a Transport"
    )


def _check_convertible(name: str, layer: BatchNorm) -> None:
    kind, where = type(layer).__name__, f" at {name}" if name else ""
    if any(is_lazy(tensor) for tensor in (*layer.parameters(), *layer.buffers())):
        raise TypeError(
            f"expected BatchNorm layers with known shapes, got a lazy {kind}{where}: before the conversion, run one "
            "forward with a real batch, which creates the parameters"
        )
    forward = cast("Callable[..., Tensor]", type(layer).forward)
    known = (BatchNorm.forward, nn.SyncBatchNorm.forward, SyncBatchNorm.forward)
    if forward not in known or "forward" in vars(layer):
        raise TypeError(
            f"expected torch's BatchNorm layers, got a {kind}{where}, whose own forward would be lost: split this "
            "layer into a plain BatchNorm and another module, or convert only submodules that do not contain it"
        )


# ---------------------------------------------------------------------- moments over all ranks


def pool_moments(counts: Tensor, means: Tensor, m2s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the moments of all samples from the moments of each rank's batch.

    Args:
        counts: the number of values per channel on each rank, (num_ranks, 1). It can be 0.
        means: the mean of each rank, (num_ranks, C). It must be finite even if the count is 0.
        m2s: the sums of squared deviations from each rank's own mean, (num_ranks, C).

    Returns:
        The number of values per channel (), their mean (C,), and their biased variance (C,).

    Examples:
        >>> counts, means, m2s = torch.tensor([[2.0], [2.0]]), torch.tensor([[1.0], [4.0]]), torch.zeros(2, 1)
        >>> [x.tolist() for x in pool_moments(counts, means, m2s)]
        [4.0, [2.5], [2.25]]
    """
    total = counts.sum()
    fractions = counts / total  # (num_ranks, 1)
    # Average the differences from the first mean, so that equal means give exactly this mean.
    mean = means[0] + (fractions * (means - means[0])).sum(0)
    return total, mean, m2s.sum(0) / total + (fractions * (means - mean).square()).sum(0)


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean (C,) and M2 (C,) of this rank's batch x (N, C, ...).

    M2 is the sum of squared deviations from the mean. If the batch is empty, the mean and M2 are zeros.
    """
    dims = _all_but_channels(x)
    mean = x.sum(dims) / max(1, x.numel() // x.size(1))
    return mean, (x - _per_channel(mean, x)).square_().sum(dims)


def _gather_moments(x: Tensor, transport: Transport) -> tuple[Tensor, Tensor, Tensor]:
    """Return the number of values (), their mean (C,) and their biased variance (C,) over all ranks.

    The function makes one all_gather.
    """
    num_local, num_channels = x.numel() // x.size(1), x.size(1)
    # A count above 2**24 is rounded in float32, as all other values are.
    mine = torch.cat([*_moments(x), x.new_full((1,), num_local)])  # (2C + 1,)
    mine = mine.to(transport.sending_device(x.device))
    rows = mine.new_empty(transport.size * mine.numel())
    transport.all_gather(rows, mine).wait()
    means, m2s, counts = rows.to(x.device).view(transport.size, -1).split([num_channels, num_channels, 1], 1)
    # If this rank has two values, the total is above 1 anyway, and reading it would block on a GPU.
    if num_local <= 1 and (num_values := int(counts.sum())) <= 1:
        raise ValueError(
            f"expected more than 1 value per channel in training, got {num_values} over all {transport.size} ranks: "
            "use a larger batch, or call eval() on the module"
        )
    return pool_moments(counts, means, m2s)


# ---------------------------------------------------------------------- forward and backward


class _SyncBatchNormFunction(torch.autograd.Function):
    """The autograd function of batch normalization over all ranks.

    It maps (x, weight, bias, eps, transport) to (y, mean, biased variance, number of values).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, transport: Transport
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        num_values, mean, var = _gather_moments(wide, transport)
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(var + eps), num_values)
        ctx.transport = transport
        ctx.bias_dtype = None if bias is None else bias.dtype
        # Use the kernel of eval mode, which normalizes by given statistics.
        y = F.batch_norm(x, mean, var, _as(weight, mean), _as(bias, mean), eps=eps)
        ctx.mark_non_differentiable(mean, var, num_values)
        return y, mean, var, num_values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd, num_values = ctx.saved_tensors
        dims = _all_but_channels(x)
        dy = dy.to(mean.dtype)
        centered = x.to(mean.dtype) - _per_channel(mean, x)
        sum_dy, sum_dy_centered = dy.sum(dims), (dy * centered).sum(dims)
        dweight = sum_dy_centered * invstd if ctx.needs_input_grad[1] else None
        dbias = sum_dy if ctx.needs_input_grad[2] else None
        dx = None
        if ctx.needs_input_grad[0]:
            sums = torch.cat([sum_dy, sum_dy_centered]).to(ctx.transport.sending_device(x.device))
            ctx.transport.all_reduce(sums).wait()
            mean_dy, mean_dy_centered = (sums.to(x.device) / num_values).chunk(2)
            scale = invstd if weight is None else invstd * weight.to(invstd.dtype)
            dx = centered.mul_(_per_channel(-invstd.square() * mean_dy_centered, x)).add_(dy)
            dx = dx.sub_(_per_channel(mean_dy, x)).mul_(_per_channel(scale, x)).to(x.dtype)
        return (
            dx,
            None if dweight is None else dweight.to(weight.dtype),
            None if dbias is None else dbias.to(ctx.bias_dtype),
            None,
            None,
        )


_sync_batch_norm: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]] = _SyncBatchNormFunction.apply


def _as(tensor: Tensor | None, other: Tensor) -> Tensor | None:
    return None if tensor is None else tensor.to(other.dtype)


def _all_but_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _per_channel(values: Tensor, x: Tensor) -> Tensor:
    return values.view(1, -1, *[1] * (x.dim() - 2))
