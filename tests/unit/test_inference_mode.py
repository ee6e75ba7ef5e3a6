"""Verbs and `torch.inference_mode`: tensors made in it, calls in it, waits outside of it. Ranks are threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import syncline as sl
from syncline.tensors import walk
from syncline.transport import Transport, run_ranks

VERBS: dict[str, Callable[..., Any]] = {
    "all_reduce_": lambda x, t, **how: sl.all_reduce_(x, "mean", group=t, **how),
    "broadcast_": lambda x, t, **how: sl.broadcast_(x, 1, group=t, **how),
    "average_": lambda x, t, **how: sl.average_(x, group=t, **how),
    "average_ with weights": lambda x, t, **how: sl.average_(x, 1 + t.rank, group=t, **how),
    "average_ where rank 0 does not count": lambda x, t, **how: sl.average_(x, t.rank, group=t, **how),
}


def a_tensor(rank: int) -> Tensor:
    return torch.arange(6.0) + rank


def a_tree(rank: int) -> list[Tensor]:
    """Alone, packed, with strides, of 16 bits, and with a pending conjugation."""
    x = torch.arange(6.0).view(2, 3) + rank
    return [x, x.clone().t(), x.bfloat16(), torch.complex(x, x + 1).conj(), x.new_full((300_000,), rank)]


def a_module(rank: int) -> nn.Module:
    module = nn.BatchNorm1d(3, dtype=torch.float64)
    for _, tensor in walk(module):
        tensor.data += rank
    return module


def test_inference_mode_changes_no_result() -> None:
    def program(t: Transport) -> None:
        for name, verb in VERBS.items():
            for make in (a_tensor, a_tree, a_module):
                if (name, make) == ("all_reduce_", a_module):
                    continue  # its counter has no mean
                expected = make(t.rank)
                verb(expected, t)
                for is_made_there in (False, True):
                    for ranks_that_call_there in ((), (0,), (0, 1)):
                        for how in ({}, {"async_op": True}):
                            with torch.inference_mode(is_made_there):
                                target = make(t.rank)
                            with torch.inference_mode(t.rank in ranks_that_call_there):
                                result = verb(target, t, **how)
                            if how:
                                result.wait()
                            for (_, got), (_, wanted) in zip(walk(target), walk(expected), strict=True):
                                assert torch.equal(got, wanted), (name, make, got, wanted)

    run_ranks(2, program)


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested", "ignore:.*quantize")
def test_other_layouts_are_refused_by_name_before_anything_is_sent() -> None:
    x = torch.ones(2, 3)
    rows = [x[0], x[1, :2]]
    layouts = {
        "torch.sparse_coo": x.to_sparse(),
        "torch.sparse_csr": x.to_sparse_csr(),
        "a nested tensor": torch.nested.nested_tensor(rows),
        "a nested tensor: pass its parts": torch.nested.nested_tensor(rows, layout=torch.jagged),
        "a quantized tensor": torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    }
    verbs = {
        **VERBS,
        "mean": lambda x, t: sl.mean(x, group=t),
        "gather": lambda x, t: sl.gather(x, group=t),
    }

    def program(t: Transport) -> None:
        for name, verb in verbs.items():
            for words, tensor in layouts.items():
                for target in (tensor, {"a": tensor}):
                    try:
                        # One rank's tensor is dense; it raises as well.
                        verb(target if t.rank else x.clone(), t)
                    except ValueError as error:
                        text = str(error)
                        assert text.splitlines()[0].endswith(": refused, nothing was sent"), text
                        assert f"to be a dense tensor, got {words}" in text, text
                    else:
                        raise AssertionError(f"{name} took {words}")

    run_ranks(2, program)
