"""The core test: N ranks do what one process does on the concatenated batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import (
    CASES,
    assert_close,
    assert_same_bits,
    train_alone,
    train_synchronized,
)

from support.cases import case
from syncline.transport import Transport, run_ranks


def equal_batches(step: int, rank: int) -> int:
    return 6


def unequal_batches(step: int, rank: int) -> int:
    """From 0 to 12 samples: rank 1 has none in every third step."""
    return 0 if rank == 1 and step % 3 == 0 else 1 + (5 * step + 3 * rank) % 12


SETTINGS: dict[str, dict[str, Any]] = {
    "one bucket": {},
    "many buckets": {"bucket_cap_mb": 0.0001},
    "bucket views": {"gradient_as_bucket_view": True},
    "many bucket views": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0001},
    "unused allowed": {"find_unused_parameters": True},
}


@pytest.mark.parametrize(
    ("num_ranks", "samples", "counted"), [(2, equal_batches, False), (3, unequal_batches, True)]
)
def test_ranks_equal_one_process(num_ranks: int, samples: Callable[[int, int], int], counted: bool) -> None:
    for name in CASES:
        alone = train_alone(name, num_ranks=num_ranks, samples=samples)
        for setting, options in SETTINGS.items():

            def rank(t: Transport, name: str = name, options: dict[str, Any] = options) -> Any:
                return train_synchronized(name, t, rank=t.rank, samples=samples, counted=counted, **options)

            first, *others = run_ranks(num_ranks, rank)
            with case(name, setting):
                for other in others:
                    assert_same_bits(first, other)
                assert_close(name, first, alone)


def test_the_test_sees_a_lost_sample() -> None:
    """The tolerance is tight enough: one sample less on one rank is noticed."""

    def one_less(step: int, rank: int) -> int:
        return 6 - (rank == 1 and step == 3)

    def rank(transport: Transport) -> Any:
        return train_synchronized("gpt", transport, rank=transport.rank, samples=equal_batches, counted=False)

    results = run_ranks(2, rank)
    with pytest.raises(AssertionError, match="step 3, gradient"):
        assert_close("gpt", results[0], train_alone("gpt", num_ranks=2, samples=one_less))


@pytest.mark.ranks(2, timeout=300)
@pytest.mark.parametrize(("samples", "counted"), [(equal_batches, False), (unequal_batches, True)])
def test_two_processes_equal_one_and_repeat_their_bits(
    samples: Callable[[int, int], int], counted: bool
) -> None:
    for name in CASES:
        first, second = (
            train_synchronized(name, None, rank=dist.get_rank(), samples=samples, counted=counted)
            for _ in range(2)
        )
        with case(name):
            assert_same_bits(first, second)
            assert_close(name, first, train_alone(name, num_ranks=2, samples=samples))
            for parameter in first[-1][1]:
                other = parameter.clone()
                dist.broadcast(other, 0)
                assert torch.equal(parameter, other)
