"""The mean of buffers over ranks, with pooled running statistics.

[Note: pooling] A rank's running variance describes how its samples spread around the mean of *that rank*. If the means
differ between ranks, the mean of the variances ignores the spread of the means. All ranks have seen equally many
batches, so they have equal weights, as in the mean of gradients. The pooled statistics are then

    mean = mean over ranks of mean_i
    var  = mean over ranks of (var_i + mean_i**2) - mean**2
         = mean of the variances + variance of the means

With weights, as in `sl.average_`, the means over ranks are weighted means. The sums are computed in float64, which has
two consequences:

- Buffers that are equal on all ranks stay the same, bit for bit, for any number of ranks, because a sum of N equal
  24-bit numbers is exact in float64. So that this is also true of float64 and complex128 buffers, these are sent as two
  halves of 26 bits. Variances are an exception if mean**2 / var exceeds 2**27 (2**0 for float64 buffers): their last
  bits may change once.
- For float32 statistics the subtraction of mean**2 loses little precision: the relative error is about
  1e-16 * mean**2 / var.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from syncline.tensors.targets import as_real
from syncline.transport.base import Transport
from syncline.transport.work import CombinedWork, Work

_LOW_BITS = (1 << 27) - 1

_Pair = tuple[Tensor, Tensor]

_Started = tuple[Work, Callable[[], object]]
"""A collective in flight, and a function that writes its result into the buffers."""


# ---------------------------------------------------------------------- pure functions


def to_raw_moments_(means: Tensor, variances: Tensor) -> None:
    """Turn variances into means of squares, in place. Means of squares can be averaged over ranks.

    Args:
        means, variances: float64 tensors of the same shape.
    """
    variances.addcmul_(means, means)


def from_raw_moments_(means: Tensor, squares: Tensor) -> None:
    """Turn means of squares into variances, in place. If rounding makes a variance negative, it becomes 0.

    Args:
        means, squares: float64 tensors of the same shape.

    Examples:
        >>> means, variances = torch.tensor([[-1.0], [3.0]]), torch.tensor([[0.0], [2.0]])  # (num_ranks, 1)
        >>> to_raw_moments_(means, variances)
        >>> mean, variance = means.mean(0), variances.mean(0)
        >>> from_raw_moments_(mean, variance)
        >>> mean.item(), variance.item()
        (1.0, 5.0)
    """
    squares.addcmul_(means, means, value=-1).clamp_(min=0)


def split_halves(x: Tensor) -> Tensor:
    """Split each float64 number in `x` (n,) into two halves whose sum is exactly this number.

    Returns:
        The first halves (26 leading bits of each number), followed by the second halves (the rest), (2n,).
    """
    high = (x.view(torch.int64) & ~_LOW_BITS).view(torch.float64)
    return torch.cat([high, torch.where(x.isfinite(), x - high, 0.0)])


def join_halves(halves: Tensor) -> Tensor:
    """Add the two halves of each number that `split_halves` returned. The halves may have been averaged in between.

    Examples:
        >>> x = torch.tensor([1 / 3, -1e300, float("-inf")], dtype=torch.float64)
        >>> torch.equal(join_halves(split_halves(x) * 7 / 7), x)
        True
    """
    high, low = halves.chunk(2)
    return high + low


# ---------------------------------------------------------------------- over ranks


class BufferAverage(CombinedWork):
    """An average of buffers over ranks, which is in flight. `wait` writes the results into the buffers.

    A running variance is pooled with its mean. Any other floating-point buffer becomes its mean over ranks, and an
    integer buffer its maximum. A bool becomes true if it is true on any rank. There are at most two collectives per
    device, and all of them are in flight at once. Autograd's version counters do not change.

    Args:
        tensors: the buffers, of the same shapes and dtypes on all ranks, in the same order.
        pairs: pairs of a running mean and its running variance, which are pooled. `tensors` contains both tensors.
        transport: the transport between the ranks.
        fraction: the factor by which this rank's floating-point values are multiplied. With 0 no value of this rank
            counts, not even NaN, but the rank receives the results.
        divisor: the number by which the sum over ranks is divided. It is the sum of the factors of all ranks that
            count.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        pairs: Sequence[_Pair],
        transport: Transport,
        *,
        fraction: float = 1.0,
        divisor: float = 1.0,
    ) -> None:
        paired = {id(tensor) for pair in pairs for tensor in pair}
        rest = [tensor for tensor in tensors if id(tensor) not in paired and tensor.numel()]
        started: list[_Started] = []
        for device in dict.fromkeys(tensor.device for tensor in tensors):
            here = [tensor for tensor in rest if tensor.device == device]
            floats = [tensor for tensor in here if tensor.is_floating_point() or tensor.is_complex()]
            integers = [tensor for tensor in here if not (tensor.is_floating_point() or tensor.is_complex())]
            pairs_here = [pair for pair in pairs if pair[0].device == device and pair[0].numel()]
            if floats or pairs_here:
                started.append(_start_means(pairs_here, floats, transport, fraction, divisor))
            if integers:
                started.append(_start_maxima(integers, transport, counts=fraction > 0))
        super().__init__(started)
        self.num_collectives = len(started)


def running_statistics(owners: Iterable[Mapping[str, Tensor | None]], among: Container[int]) -> list[_Pair]:
    """Return the pair of running mean and running variance of each submodule that has both. Each pair occurs once.

    Args:
        owners: the buffers of each submodule, by name.
        among: the `id`s of the tensors to consider. A pair is returned only if both of its tensors are among them.
    """
    found: dict[tuple[int, int], _Pair] = {}
    for owner in owners:
        mean, variance = owner.get("running_mean"), owner.get("running_var")
        if mean is None or variance is None or mean.shape != variance.shape:
            continue
        is_floating = mean.is_floating_point() and variance.is_floating_point()
        if id(mean) in among and id(variance) in among and is_floating and mean.device == variance.device:
            found[id(mean), id(variance)] = (mean, variance)
    return list(found.values())


def _start_means(
    pairs: Sequence[_Pair], others: Sequence[Tensor], transport: Transport, fraction: float, divisor: float
) -> _Started:
    """Start the mean of all floating-point buffers on one device: running means, their variances, and all others.

    They are sent as one float64 vector.
    """
    means, variances = [mean for mean, _ in pairs], [variance for _, variance in pairs]
    targets = [as_real(tensor) for tensor in (*means, *variances, *others)]
    num_paired = sum(mean.numel() for mean in means)
    moments = slice(num_paired), slice(num_paired, 2 * num_paired)
    in_halves = any(target.dtype is torch.float64 for target in targets)
    flat = torch.cat([target.reshape(-1).double() for target in targets])
    to_raw_moments_(*(flat[part] for part in moments))
    wire = split_halves(flat) if in_halves else flat
    wire = wire.to(transport.sending_device(wire.device))
    if not fraction:
        wire.zero_()
    elif fraction != 1:
        wire.mul_(fraction)

    @torch.inference_mode()  # see `_scatter`
    def land() -> None:
        """Compute the averages from the sums over ranks, and write them into the buffers."""
        flat = wire.div_(divisor).to(targets[0].device)
        flat = join_halves(flat) if in_halves else flat
        from_raw_moments_(*(flat[part] for part in moments))
        _scatter(flat, targets)

    return transport.all_reduce(wire), land


def _start_maxima(tensors: Sequence[Tensor], transport: Transport, *, counts: bool) -> _Started:
    """Start the maximum of all integer and bool buffers on one device. They are sent as one int64 vector."""
    targets = [tensor.data for tensor in tensors]
    wire = torch.cat([target.reshape(-1).to(torch.int64) for target in targets])
    wire = wire.to(transport.sending_device(wire.device))
    if not counts:
        wire.fill_(torch.iinfo(torch.int64).min)
    return transport.all_reduce(wire, "max"), lambda: _scatter(wire.to(targets[0].device), targets)


@torch.inference_mode()  # it allows writing to any tensor, including inference tensors
def _scatter(flat: Tensor, targets: Sequence[Tensor]) -> None:
    parts = flat.split([target.numel() for target in targets])
    for target, part in zip(targets, parts, strict=True):
        target.copy_(part.view(target.shape))
