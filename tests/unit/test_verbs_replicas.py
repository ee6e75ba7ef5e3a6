"""keep_best_, check_replicas and the fingerprints below it. Ranks are threads."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.verbs import error_of_all
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import syncline as sl
from syncline import ContractMismatch, ReplicaDivergence
from syncline.equality.fingerprint import fingerprints
from syncline.transport import Transport, run_ranks

# ---------------------------------------------------------------------- keep_best_


def test_all_become_what_the_best_rank_has() -> None:
    rows: list[tuple[list[Any], Any, int]] = [
        ([0.1, 0.7, 0.3], "max", 1),
        ([0.1, 0.7, 0.3], "min", 0),
        ([1.0, 2.0, 2.0], "max", 1),
        ([math.nan, 2.0, 3.0], "min", 1),
        ([math.nan, -math.inf, math.nan], "max", 1),
        ([torch.tensor(1), torch.tensor([2.0]), 3], "max", 2),
    ]

    def program(t: Transport) -> None:
        for scores, mode, best in rows:
            tree = {"x": torch.full((2,), float(t.rank)), "n": torch.tensor(t.rank)}
            before = t.statistics()
            assert sl.keep_best_(tree, scores[t.rank], mode, group=t) == best, (scores, mode)
            assert (t.statistics() - before).num_calls == {"all_gather": 1, "broadcast": 1}
            assert [*tree["x"].tolist(), tree["n"].item()] == [best, best, best], (scores, mode)
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0 + t.rank)
        sl.keep_best_(optimizer, t.rank, group=t)  # with its settings
        assert optimizer.param_groups[0]["lr"] == 3.0

    run_ranks(3, program)


@pytest.mark.parametrize(
    ("score", "mode", "kind", "text"),
    [
        ([math.nan, math.nan], "max", ValueError, "got NaN on all 2 ranks"),
        (
            [1.0, torch.zeros(2)],
            "max",
            TypeError,
            "rank 1: expected score to be a number, got tensor([0., 0.])",
        ),
        (["1.0", 1.0], "max", TypeError, "rank 0: expected score to be a number, got '1.0'"),
        ([1.0, 1.0], "best", ValueError, "expected mode to be one of 'max', 'min', got 'best'"),
        ([1.0, 1.0], ("min", "max"), ContractMismatch, "mode"),
    ],
)
def test_scores_that_name_no_best_and_modes_that_differ_are_refused_alike(
    score: list[Any], mode: Any, kind: type[Exception], text: str
) -> None:
    def program(t: Transport) -> None:
        x = torch.tensor([float(t.rank)])
        try:
            sl.keep_best_(x, score[t.rank], mode[t.rank] if isinstance(mode, tuple) else mode, group=t)
        finally:
            assert x.item() == t.rank

    assert text in str(error_of_all(kind, program))


# ---------------------------------------------------------------------- fingerprints

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float8_e4m3fn),
]


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (num_bytes,), dtype=torch.uint8, generator=g)
    return raw.view(dtype).view(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_changed_bit_and_any_two_exchanged_elements_change_it(dtype: torch.dtype) -> None:
    for shape in ((), (1,), (7,), (3, 5), (2, 3, 4), (300, 401)):
        tensor = random_tensor(dtype, shape)
        (before,) = fingerprints([tensor])
        raw = tensor.view(-1).view(torch.uint8)
        for at in {0, raw.numel() // 2, raw.numel() - 1}:
            for bit in (1,) if dtype is torch.bool else (1, 128):
                raw[at] ^= bit
                assert fingerprints([tensor]) != [before], (shape, at, bit)
                raw[at] ^= bit
        assert fingerprints([tensor]) == [before], shape
        if dtype not in (torch.bool, torch.float8_e4m3fn) and tensor.numel() > 1:
            flat = tensor.view(-1)
            flat[0], flat[-1] = flat[-1].clone(), flat[0].clone()
            assert fingerprints([tensor]) != [before], shape


class CallCounter(TorchDispatchMode):
    """A count of the operations of torch that are called inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += 1
        return func(*args, **(kwargs or {}))


def test_small_tensors_together_have_the_fingerprints_that_each_has_alone() -> None:
    sizes = (0, 1, 2, 3, 7, 8, 9, 100, 511, 513, 1024, 1025, 5000)
    values: list[Any] = [random_tensor(dtype, (size,), size) for size in sizes for dtype in DTYPES]
    values += [
        3,
        nn.Parameter(torch.ones(5)),
        torch.randn(6, 5).t(),
        torch.randn(4, 2)[:, 1],
        torch.tensor(2.5),
    ]
    values += [torch.randn(3, dtype=torch.complex64).conj(), torch.ones(3).expand(4, 3)]
    values += [random_tensor(torch.float32, (1000,), seed) for seed in range(40)]  # more than fit together
    assert fingerprints(values) == [one for value in values for one in fingerprints([value])]
    assert len(set(fingerprints(values[-40:]))) == 40


def test_a_small_tensor_costs_few_calls() -> None:
    small = [nn.Parameter(torch.randn(4)) for _ in range(1000)]
    with CallCounter() as counter:
        fingerprints(small)
    assert counter.num_calls < 3 * len(small)


@given(
    st.sampled_from(DTYPES[:8]),
    st.lists(st.integers(0, 9), max_size=3).map(tuple),
    st.integers(0, 3),
    st.integers(0, 7),
)
def test_strides_and_offsets_do_not_matter(
    dtype: torch.dtype, shape: tuple[int, ...], layout: int, offset: int
) -> None:
    tensor = random_tensor(dtype, shape)
    other = torch.empty(offset + tensor.numel(), dtype=dtype)[offset:].view(shape).copy_(tensor)
    if layout == 1 and tensor.dim() > 1:
        other = tensor.transpose(0, -1).contiguous().transpose(0, -1)
    elif layout == 2:
        other = torch.stack([tensor, tensor], -1)[..., 1]
    elif layout == 3 and tensor.is_complex():
        other = tensor.conj().resolve_conj().conj()
    assert fingerprints([tensor]) == fingerprints([other])


def test_large_strided_tensors_are_read_in_chunks_and_signs_do_not_cancel() -> None:
    tensor = torch.arange(600 * 700, dtype=torch.float32).view(600, 700)
    twin = tensor.t().contiguous().t()
    assert fingerprints([tensor, torch.zeros(3)]) == fingerprints([twin, torch.zeros(3)])
    assert fingerprints([torch.ones(3).expand(1000, 3)]) == fingerprints([torch.ones(1000, 3)])
    x = torch.ones(4, dtype=torch.float64)
    y = x * torch.tensor([1.0, -1.0, -1.0, 1.0])
    assert fingerprints([x]) != fingerprints([y])
    assert fingerprints([x * 0]) != fingerprints([x * -0.0])


# ---------------------------------------------------------------------- check_replicas


def replica() -> nn.Sequential:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False))
    module[2].weight = module[0].weight
    for p in module.parameters():
        nn.init.constant_(p, 0.5)
    return module


def diverged(size: int, change: Any) -> ReplicaDivergence:
    """The error of `check_replicas` of a target that depends on the rank."""
    return error_of_all(ReplicaDivergence, lambda t: sl.check_replicas(change(t), group=t), size)


def test_equal_replicas_pass_by_one_small_collective() -> None:
    def program(t: Transport) -> tuple[dict[str, int], int]:
        sl.check_replicas(replica(), group=t)
        return t.statistics().num_calls, t.statistics().total_bytes

    calls, num_bytes = run_ranks(2, program)[0]
    assert calls == {"all_gather": 1}
    assert num_bytes < 1000


@pytest.mark.parametrize("kind", ["buffers", "ignored", "between two meetings", "inside of another module"])
def test_what_the_contract_lets_differ_is_a_note(kind: str) -> None:
    def program(t: Transport) -> str:
        module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        strategy = sl.LocalSGD(8) if kind == "between two meetings" else None
        ignore = ["0.bias"] if kind == "ignored" else []
        ddp = sl.DistributedDataParallel(module, process_group=t, strategy=strategy, ignore=ignore)
        optimizer = ddp.attach(torch.optim.SGD(ddp.parameters(), lr=0.1))
        out = ddp(torch.randn(4, 2, generator=torch.Generator().manual_seed(t.rank)))
        # Before BatchNorm the gradient of a bias is zero but for rounding, so the ranks' biases might stay equal.
        (out.square().sum() + (1 + t.rank) * module[0].bias.sum()).backward()
        optimizer.step()
        target = (
            nn.Sequential(nn.Linear(2, 2).requires_grad_(False), ddp) if kind.startswith("inside") else ddp
        )
        if kind.startswith("inside"):
            nn.init.ones_(target[0].weight), nn.init.ones_(target[0].bias)
        report = sl.check_replicas(target, group=t)
        with pytest.raises(ReplicaDivergence):
            sl.check_replicas(ddp.module, group=t)  # compared whole
        if strategy is None:
            with torch.no_grad():
                module[0].weight[0, 0] += t.rank
            with pytest.raises(ReplicaDivergence, match=r"0.weight, element \[0, 0\]") as caught:
                sl.check_replicas(target, group=t)
            assert "running_mean" not in str(caught.value)
        assert report.num_ranks == 2
        assert all(name in str(report) for name in report.may_differ[:3])
        return ", ".join(report.may_differ)

    inside = "1." if kind.startswith("inside") else ""
    expected = [f"{inside}module.1.running_mean", f"{inside}module.1.running_var"]
    if kind == "ignored":
        expected.insert(0, "module.0.bias")
    if kind == "between two meetings":
        expected = [f"module.{name}" for name in ("0.weight", "0.bias", "1.weight", "1.bias")] + expected
    assert run_ranks(2, program) == [", ".join(expected)] * 2


def test_the_first_tensor_that_differs_and_the_minority_are_named() -> None:
    def change(t: Transport) -> nn.Module:
        module = replica()
        with torch.no_grad():
            if t.rank == 2:
                module[0].weight[1, 1] += 1e-7
                module[1].running_var[0] = -0.0
            if t.rank == 3:
                module[1].num_batches_tracked += 1
        return module

    error = diverged(5, change)
    assert (error.tensor, error.num_differing, error.minority_ranks) == ("0.weight", 3, (2, 3))
    text = str(error)
    assert "3 of 7 tensors and other values differ. The first of them is 0.weight" in text
    assert (
        "\n  0.weight, element [1, 1] of 9  ranks 0, 1, 3, 4 | rank 2\n  1.running_var, element 0 of 3"
        in text
    )
    assert "In the minority: ranks 2, 3." in text


def test_without_a_majority_no_rank_is_blamed_and_many_differences_are_counted() -> None:
    error = diverged(2, lambda t: [torch.zeros(2), torch.full((1,), float(t.rank))])
    assert (error.tensor, error.minority_ranks) == ("[1]", ())
    assert "With two ranks there is no majority" in str(error)
    error = diverged(4, lambda t: torch.tensor(t.rank // 2))
    assert error.minority_ranks == ()
    assert "No more than half of the ranks agree" in str(error)
    assert "  tensor  ranks 0, 1 | ranks 2, 3" in str(error)
    error = diverged(2, lambda t: [torch.tensor(t.rank) for _ in range(9)])
    assert error.num_differing == 9
    assert "\n  and 4 more\n" in str(error)


def test_numbers_of_an_optimizer_are_compared_too() -> None:
    def change(t: Transport) -> torch.optim.Optimizer:
        p = nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.Adam([p], lr=0.1 + (0.1 if t.rank == 1 else 0))
        p.grad = torch.ones(2)
        for _ in range(1 + (t.rank == 1)):
            optimizer.step()
        return optimizer

    error = diverged(3, change)
    assert (error.tensor, error.minority_ranks) == ("state[0].exp_avg", (1,))
    assert "param_groups[0].lr  ranks 0, 2 | rank 1" in str(error)


def test_trees_that_differ_in_shape_are_a_mismatch() -> None:
    error_of_all(ContractMismatch, lambda t: sl.check_replicas(torch.zeros(1 + t.rank), group=t))
    error = error_of_all(TypeError, lambda t: sl.check_replicas(["x"], group=t))
    assert "got a str" in str(error)
