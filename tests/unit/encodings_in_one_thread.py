"""Ranks of an averaging in one thread: their generators' requests are answered here, without any transport."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from syncline.compression.base import Averaged, Averaging, Compression, Gather, Gathered, Layout, Mean, Sum
from syncline.compression.exchange import Averager

__all__ = ["averagers", "layouts", "mean_of_ranks", "residual"]


def layouts(
    shapes: Sequence[tuple[int, ...]], num_ranks: int, dtype: torch.dtype = torch.float32
) -> list[Layout]:
    return [
        Layout(shapes=tuple(shapes), dtype=dtype, device=torch.device("cpu"), rank=rank, num_ranks=num_ranks)
        for rank in range(num_ranks)
    ]


def averagers(
    compression: Compression,
    shapes: Sequence[tuple[int, ...]],
    num_ranks: int,
    dtype: torch.dtype = torch.float32,
) -> list[Averager]:
    return [Averager(compression, layout) for layout in layouts(shapes, num_ranks, dtype)]


def mean_of_ranks(ranks: Sequence[Averager], values: Sequence[Tensor]) -> Tensor:
    """One averaging; the mean, which must have the same bits on all ranks."""
    means = answered(
        [rank.mean(v.to(rank.layout.dtype, copy=True)) for rank, v in zip(ranks, values, strict=True)]
    )
    for mean in means[1:]:
        assert torch.equal(mean.view(torch.uint8), means[0].view(torch.uint8))
    return means[0]


def answered(averagings: Sequence[Averaging]) -> list[Tensor]:
    replies: list[Any] = [None] * len(averagings)
    while True:
        requests: list[Any] = []
        means: list[Tensor] = []
        for averaging, reply in zip(averagings, replies, strict=True):
            try:
                requests.append(averaging.send(reply))
            except StopIteration as ended:
                means.append(ended.value)
        assert not (means and requests), "some ranks have ended, others ask for more"
        if means:
            return means
        assert len({type(request) for request in requests}) == 1
        replies = replies_to(requests)


def replies_to(requests: Sequence[Any]) -> list[Any]:
    """A tensor of its own for every rank; what was given away is spoilt."""
    first, num_ranks = requests[0], len(requests)
    if isinstance(first, Mean | Sum):
        sent = [request.values if isinstance(first, Mean) else request.codes for request in requests]
        total = torch.stack([tensor.double() for tensor in sent]).sum(0)
        if isinstance(first, Mean):
            total = total / num_ranks
        result = total.to(sent[0].dtype)
        for tensor in sent:
            tensor.copy_(result)  # as an all_reduce in place does
        return [Averaged(result.clone()) if isinstance(first, Mean) else result.clone() for _ in sent]
    if isinstance(first, Gather):
        values = torch.stack([request.values for request in requests])
        beside = None if first.beside is None else torch.stack([request.beside for request in requests])
        return [Gathered(values.clone(), None if beside is None else beside.clone()) for _ in requests]
    rows = torch.stack([request.rows for request in requests])
    return [rows[:, rank].clone() for rank in range(num_ranks)]


def residual(averager: Averager) -> Tensor:
    """What is kept for the next averaging, flat."""
    return torch.cat([tensors["residual"] for tensors in averager.memory()])
