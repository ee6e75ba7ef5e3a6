"""Errors of verbs, which every rank raises alike. Ranks are threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest

from syncline.transport import ThreadsTransport, run_ranks

__all__ = ["error_of_all"]

E = TypeVar("E", bound=Exception)


def error_of_all(kind: type[E], program: Callable[[ThreadsTransport], object], num_ranks: int = 2) -> E:
    """Run a program that raises an error on every rank, and return that of rank 0.

    Each rank must raise exactly this class with the same text, and must be able to use the transport afterwards.
    """

    def rank(transport: ThreadsTransport) -> E:
        with pytest.raises(kind) as caught:
            program(transport)
        assert type(caught.value) is kind
        transport.barrier().wait()  # nothing is left over that a peer would wait for
        return caught.value

    errors = run_ranks(num_ranks, rank)
    assert {str(error) for error in errors} == {str(errors[0])}
    return errors[0]
