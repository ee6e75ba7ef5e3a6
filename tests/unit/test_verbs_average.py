"""average_: against a float64 reference, what has no mean, and what it refuses. Ranks are threads."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.verbs import error_of_all
from torch import Tensor, nn

import syncline as sl
from syncline import ContractMismatch
from syncline.tensors import TensorReducer, reduction
from syncline.tensors.packing import plan_pieces
from syncline.tensors.targets import parts_of
from syncline.transport import ReduceOp, Transport, Work, run_ranks

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128]


def values(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return (100 * torch.randn(shape, dtype=wide, generator=g)).to(dtype)


def laid_out(tensor: Tensor, layout: int) -> Tensor:
    """The same values in another layout."""
    if layout == 1 and tensor.dim() > 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == 2:
        return torch.stack([tensor, tensor], -1)[..., 0]
    if layout == 3 and tensor.is_complex():
        return tensor.conj().resolve_conj().conj()
    return tensor.clone()


def assert_is_weighted_mean(result: Tensor, parts: list[Tensor], weights: list[float]) -> None:
    """To rounding: relative to what was added up, a unit in the last place for each thing that rounds."""
    wide = torch.complex128 if result.is_complex() else torch.float64
    total = math.fsum(weights)
    scaled = [p.to(wide) * (w / total) for p, w in zip(parts, weights, strict=True) if w > 0]
    exact = sum(scaled[1:], scaled[0])
    size = sum((part.abs() for part in scaled), torch.zeros(()))
    eps = torch.finfo(result.dtype).eps
    num_roundings = 1 if result.dtype.itemsize == 2 else len(parts) + 2
    if result.dtype.itemsize == 2:  # rounded once, and what fp32 left of it
        bound = exact.abs() * eps / 2 * 1.01 + size * 2.0**-20 + torch.finfo(result.dtype).tiny * eps
    else:
        bound = size * eps * num_roundings + torch.finfo(result.dtype).tiny
    assert bool(((result.to(wide) - exact).abs() <= bound).all())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(DTYPES),
            st.lists(st.integers(0, 4), max_size=3).map(tuple),
            st.lists(st.integers(0, 3), min_size=3, max_size=3),
        ),
        min_size=1,
        max_size=5,
    ),
    st.lists(st.sampled_from([0.0, 1.0, 1.0, 1 / 3, 7.0, 1e-3, 1e6]), min_size=1, max_size=3),
    st.booleans(),
)
def test_the_weighted_mean_is_that_of_a_float64_reference(
    leaves: list[tuple[torch.dtype, tuple[int, ...], list[int]]], weights: list[float], asynchronous: bool
) -> None:
    if not any(weights):
        weights[0] = 2.0

    def tree(rank: int, *, as_laid_out: bool) -> list[Any]:
        return [
            {"x": laid_out(values(dtype, shape, 10 * at + rank), layouts[rank] if as_laid_out else 0)}
            for at, (dtype, shape, layouts) in enumerate(leaves)
        ]

    def program(t: Transport) -> list[Any]:
        mine = tree(t.rank, as_laid_out=True)
        strides = [leaf["x"].stride() for leaf in mine]
        if weights[t.rank] == 0:
            for leaf in mine:
                leaf["x"].fill_(math.nan)
        if asynchronous:
            sl.average_(mine, weights[t.rank], group=t, async_op=True).wait()
        else:
            assert sl.average_(mine, weights[t.rank], group=t) is mine
        assert [leaf["x"].stride() for leaf in mine] == strides
        return mine

    results = run_ranks(len(weights), program)
    given_values = [tree(rank, as_laid_out=False) for rank in range(len(weights))]
    for at in range(len(leaves)):
        for result in results:
            assert_is_weighted_mean(result[at]["x"], [one[at]["x"] for one in given_values], weights)
            bits = torch.view_as_real if result[at]["x"].is_complex() else (lambda x: x)
            assert torch.equal(bits(result[at]["x"].resolve_conj()), bits(results[0][at]["x"].resolve_conj()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_values_are_scaled_and_added_up_in_32_bits(dtype: torch.dtype) -> None:
    weights = [1.0, 3.0, 7.0]
    results = run_ranks(3, lambda t: sl.average_(values(dtype, (1000,), t.rank), weights[t.rank], group=t))
    assert_is_weighted_mean(results[0], [values(dtype, (1000,), rank) for rank in range(3)], weights)


@pytest.mark.parametrize("size", [2, 4])
def test_equal_replicas_stay_as_they_are_bit_for_bit(size: int) -> None:
    def program(t: Transport) -> None:
        for dtype in DTYPES:
            x = values(dtype, (1000,), 0)
            x[0] = torch.finfo(dtype).tiny
            if dtype is torch.float16:
                x[1] = torch.finfo(dtype).max  # twice of it is still a number in fp32
            mine = x.clone()
            sl.average_(mine, 0.3, group=t)
            assert torch.equal(mine, x), dtype

    run_ranks(size, program)


class BatchNormed(nn.Module):
    """Something of every kind: tied weights, running statistics, a mask, a floating buffer, frozen integers."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.second = nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(1)
        self.register_buffer("mask", torch.tensor([rank == 1, False]))
        self.register_buffer("scale", torch.tensor(float(rank)))
        self.register_buffer("table", torch.tensor([rank, -rank]))
        nn.init.constant_(self.first.weight, float(rank))
        assert self.norm.running_mean is not None
        assert self.norm.num_batches_tracked is not None
        self.norm.running_mean.fill_(4.0 * rank)
        self.norm.num_batches_tracked.fill_(10 - rank)


@pytest.mark.parametrize(
    ("weights", "asynchronous"), [([1.0, 1.0], True), ([1.0, 3.0], False), ([0.0, 2.0], True)]
)
def test_buffers_of_a_module_become_what_the_documents_say(weights: list[float], asynchronous: bool) -> None:
    def program(t: Transport) -> None:
        module = BatchNormed(t.rank)
        before = [(id(x), x.data_ptr(), x._version) for x in module.state_dict(keep_vars=True).values()]
        if asynchronous:
            sl.average_(module, weights[t.rank], group=t, async_op=True).wait()
        else:
            sl.average_(module, weights[t.rank], group=t)
        share = weights[1] / sum(weights)
        assert module.first.weight.unique().tolist() == [share]
        assert module.second.weight is module.first.weight
        assert module.first.weight.requires_grad
        assert module.norm.running_mean is not None
        assert module.norm.running_var is not None
        assert module.norm.num_batches_tracked is not None
        assert module.norm.running_mean.item() == 4 * share
        assert module.norm.running_var.item() == 1 + 16 * share - (4 * share) ** 2
        counts = weights[0] > 0
        assert module.norm.num_batches_tracked.item() == (10 if counts else 9)
        assert module.mask.tolist() == [True, False]
        assert module.scale.item() == share
        assert module.table.tolist() == ([1, 0] if counts else [1, -1])
        after = [(id(x), x.data_ptr(), x._version) for x in module.state_dict(keep_vars=True).values()]
        assert [x[:2] for x in after] == [x[:2] for x in before]
        assert all(now[2] > then[2] for now, then in zip(after, before, strict=True))

    run_ranks(2, program)


def stepped(rank: int, optimizer_class: Any, num_steps: int, **options: Any) -> Any:
    p = nn.Parameter(torch.zeros(3))
    optimizer = optimizer_class([p], **options)
    for _ in range(num_steps):
        p.grad = torch.full((3,), 1.0 + rank)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("asynchronous", [False, True])
def test_momenta_of_an_optimizer_are_averaged_steps_become_the_maximum(asynchronous: bool) -> None:
    def program(t: Transport) -> None:
        settings = {"lr": torch.tensor(0.1), "weight_decay": 0.1}
        optimizer = stepped(t.rank, torch.optim.Adam, 2 - t.rank, **settings)
        theirs = [stepped(rank, torch.optim.Adam, 2 - rank, **settings) for rank in range(2)]
        (state,) = optimizer.state.values()
        state["history"] = [t.rank + 1, 0.5 * t.rank]
        if asynchronous:
            sl.average_(optimizer, 1.0 + 2 * t.rank, group=t, async_op=True).wait()
        else:
            assert sl.average_(optimizer, 1.0 + 2 * t.rank, group=t) is optimizer
        first, second = (next(iter(o.state.values())) for o in theirs)
        assert state["step"].item() == 2
        assert state["step"].dtype is torch.float32
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(state[name], first[name] / 4 + second[name] * 3 / 4)
        assert state["history"] == [2, 0.375]
        group = optimizer.param_groups[0]  # equal settings are left alone
        assert (group["lr"]._version, group["weight_decay"]) == (0, 0.1)

    run_ranks(2, program)


@pytest.mark.parametrize("kind", [float, torch.tensor])
def test_settings_of_an_optimizer_have_to_be_equal(kind: Any) -> None:
    def program(t: Transport) -> None:
        sl.average_(stepped(t.rank, torch.optim.SGD, 1, lr=kind(0.5 + t.rank)), group=t)

    text = str(error_of_all(ContractMismatch, program))
    assert "param_groups[0].lr" in text
    assert "1.5" in text


@pytest.mark.parametrize(
    ("weight", "kind", "words"),
    [
        ([1.0, math.nan, 1.0], ValueError, ["refused, nothing was sent\nrank 1: ", "got nan"]),
        ([math.inf, -1.0, 1.0], ValueError, ["rank 0: ", "got inf\nrank 1: ", "got -1.0"]),
        (["x", 1.0, 1.0], TypeError, ["rank 0: ", "got 'x'"]),
        ([0, 0, 0], ValueError, ["finite sum above 0, got [0.0, 0.0, 0.0] (in rank order)"]),
        ([1e308, 1e308, 1], ValueError, ["finite sum above 0, got"]),
    ],
)
def test_weights_that_have_no_mean_are_refused_on_every_rank(
    weight: list[Any], kind: type[Exception], words: list[str]
) -> None:
    def program(t: Transport) -> None:
        x = torch.tensor([1.0])
        try:
            sl.average_(x, weight[t.rank], group=t)
        finally:
            assert x.item() == 1.0

    text = str(error_of_all(kind, program, 3))
    assert all(one in text for one in words), text


def test_targets_that_have_no_mean_are_refused_by_name() -> None:
    for leaf in (torch.tensor([1]), torch.tensor([True])):
        error = error_of_all(ValueError, lambda t, leaf=leaf: sl.average_({"b": [leaf]}, group=t))
        assert f"op='mean' is not defined for b[0], which has dtype {leaf.dtype}" in str(error)
    error_of_text = error_of_all(
        TypeError, lambda t: sl.average_({"b": torch.zeros(1) if t.rank == 0 else "x"}, group=t)
    )
    assert "rank 1: " in str(error_of_text)
    assert "got a str at b" in str(error_of_text)
    module = nn.Linear(2, 2)
    mismatch = error_of_all(
        ContractMismatch,
        lambda t: sl.average_(module if t.rank else dict(module.named_parameters()), group=t),
    )
    assert "expected tensors (rank 0)" in str(mismatch)


def test_a_module_of_which_there_is_one_copy_is_refused() -> None:
    module = sl.share_(nn.Linear(2, 2))
    for verb in (sl.average_, sl.all_reduce_, lambda m: sl.keep_best_(m, 1.0)):
        with pytest.raises(ValueError, match="one copy of the parameters of Sequential"):
            verb(nn.Sequential(module))


def test_many_tensors_cost_two_collectives_and_autograd_sees_the_writing() -> None:
    def program(t: Transport) -> None:
        x, weight = torch.ones(3), torch.ones(3, requires_grad=True)
        y = (x * weight).sum()
        sl.average_([x, *(torch.zeros(3) for _ in range(500))], 1.0 + t.rank, group=t)
        assert t.statistics().num_calls == {"all_gather": 1, "all_reduce": 1}
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()

    run_ranks(2, program)


class Counted(Work):
    """A pending operation that calls a function when it has ended."""

    def __init__(self, inner: Work, ended: Callable[[], None]) -> None:
        self._inner, self._ended = inner, ended

    def wait(self, timeout_seconds: float | None = None) -> None:
        self._inner.wait(timeout_seconds)
        self._ended()

    def is_completed(self) -> bool:
        return self._inner.is_completed()


def test_at_most_two_packed_copies_are_under_way_unless_asynchronous(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reduction, "plan_pieces", partial(plan_pieces, cap_bytes=1024))

    def program(t: Transport) -> list[int]:
        tensors = [torch.zeros(64) for _ in range(16)]  # four packed copies
        original, under_way = t.all_reduce, [0]

        def counted(tensor: Tensor, op: ReduceOp = "sum") -> Work:
            under_way.append(under_way[-1] + 1)
            return Counted(original(tensor, op), lambda: under_way.append(under_way[-1] - 1))

        t.all_reduce = counted  # type: ignore[method-assign, assignment]
        TensorReducer(tensors, t, "mean").run()
        found = [max(under_way)]
        TensorReducer(tensors, t, "mean").start().wait()
        return [*found, max(under_way)]

    assert run_ranks(2, program) == [[2, 4]] * 2


@given(st.lists(st.integers(0, 5), max_size=4).map(tuple), st.integers(1, 40))
def test_parts_make_up_a_tensor_by_its_shape_alone(shape: tuple[int, ...], cap_bytes: int) -> None:
    tensor = torch.arange(math.prod(shape), dtype=torch.int16).view(shape)
    parts = parts_of(tensor, cap_bytes)
    assert torch.equal(torch.cat([part.reshape(-1) for part in parts]), tensor.view(-1))
    assert all(part.nbytes <= max(cap_bytes, 2) for part in parts)
    strided = tensor.mT.contiguous().mT if len(shape) > 1 else tensor
    assert [part.shape for part in parts_of(strided, cap_bytes)] == [part.shape for part in parts]
