"""gather: results, refusals, and what it costs. Ranks are threads."""

from __future__ import annotations

import inspect
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.verbs import error_of_all
from torch import Tensor

from syncline import CollectiveMismatch, ContractMismatch, gather, mean
from syncline.tensors.gathering import Round, Row, gather_unequal, plan_rounds
from syncline.transport import Transport, run_ranks

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn),
)
Pair = namedtuple("Pair", ["logits", "labels"])


@dataclass
class Output:
    logits: Tensor
    loss: float


def rows(rank: int, num_rows: int, dtype: torch.dtype = torch.float32, *, dim: int = 0) -> Tensor:
    """Exact in every dtype, and different on every rank."""
    shape = [3, 3, 3]
    shape[dim] = num_rows
    x = (torch.arange(num_rows * 9).view(shape) + rank) % 8
    return torch.complex(x.double(), 7 - x.double()).to(dtype) if dtype.is_complex else x.to(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    same_kind = (a.dtype, a.shape) == (b.dtype, b.shape)
    return same_kind and a.reshape(-1).view(torch.uint8).tolist() == b.reshape(-1).view(torch.uint8).tolist()


# ---------------------------------------------------------------------- tensors and numbers


@pytest.mark.parametrize("lengths", [(2, 2), (1, 4, 2), (0, 3), (0, 0), (3, 0, 0), (5,)])
def test_rows_are_joined_in_rank_order_whatever_their_number(lengths: tuple[int, ...]) -> None:
    for dim in (0, 1, 2, -1, -3):
        check_joined(dim, lengths)


def check_joined(dim: int, lengths: tuple[int, ...]) -> None:
    parts = [[rows(rank, length, dtype, dim=dim) for rank, length in enumerate(lengths)] for dtype in DTYPES]

    def program(t: Transport) -> list[Tensor]:
        mine = [of_dtype[t.rank] for of_dtype in parts]
        before = [part.clone() for part in mine]
        found = gather(mine, dim, group=t)
        assert all(map(same_bits, mine, before))
        return found

    for found in run_ranks(len(lengths), program):
        for result, of_dtype in zip(found, parts, strict=True):
            wide = torch.complex128 if result.is_complex() else torch.float64  # cat lacks some dtypes
            whole = torch.cat([part.to(wide) for part in of_dtype], dim)
            assert same_bits(result, whole.to(result.dtype)), (dim, result.dtype)
            assert result.is_contiguous(), dim


def test_the_same_containers_come_back() -> None:
    def program(t: Transport) -> None:
        x = torch.full((t.rank, 2), float(t.rank))
        values = OrderedDict(
            z=[x, (x.long(), {"a": x.bool()})], a=Pair(x, x[:, 0]), out=Output(x, 0.5 * t.rank), none={}
        )
        found = gather(values, group=t)
        assert [type(found), *found] == [OrderedDict, "z", "a", "out", "none"]
        wanted = torch.tensor([[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]])
        assert torch.equal(found["z"][0], wanted)
        assert torch.equal(found["z"][1][0], wanted.long())
        assert torch.equal(found["z"][1][1]["a"], wanted.bool())
        assert type(found["a"]) is Pair
        assert torch.equal(found["a"].labels, wanted[:, 0])
        assert type(found["out"]) is Output
        assert found["out"].loss.tolist() == [0.0, 0.5, 1.0]
        assert found["none"] == {}

    run_ranks(3, program)


def test_numbers_and_tensors_without_dimensions_become_one_value_per_rank() -> None:
    def program(t: Transport) -> None:
        values = [0.1 + t.rank, t.rank - 2**62, t.rank == 1, 1j * t.rank, torch.tensor(t.rank).bfloat16()]
        found = gather(values, dim=1, group=t)  # a number has no dimension that could be another
        assert [one.dtype for one in found] == [
            *(torch.float64, torch.int64, torch.bool, torch.complex128, torch.bfloat16)
        ]
        assert [one.tolist() for one in found] == [
            *([0.1, 1.1], [-(2**62), 1 - 2**62], [False, True], [0j, 1j], [0.0, 1.0])
        ]
        assert gather(torch.tensor(2.0 * t.rank), group=t).tolist() == [0.0, 2.0]
        assert gather(float(t.rank), group=t).tolist() == [0.0, 1.0]

    run_ranks(2, program)


def test_views_conjugates_and_strides_do_not_matter() -> None:
    def program(t: Transport) -> None:
        x = torch.arange(12.0).view(3, 4) + t.rank
        z = torch.complex(x, x + 1)
        values = [
            x.t().contiguous().t() if t.rank else x,
            x[:, ::2],
            x[:1].expand(3, 4),
            z.conj(),
            z.conj().imag,
            z[:1, :1].conj().imag,  # one element is contiguous
        ]
        plain = [value.clone().resolve_conj().resolve_neg() for value in values]
        for found, wanted in zip(gather(values, group=t), gather(plain, group=t), strict=True):
            assert same_bits(found, wanted)

    run_ranks(2, program)


def test_the_result_is_detached_and_new_also_alone() -> None:
    def program(t: Transport) -> None:
        x = torch.nn.Parameter(torch.ones(2))
        for target in (x, x * 2):
            found = gather(target, group=t)
            assert type(found) is Tensor
            assert not found.requires_grad
            found.zero_()
        assert x.tolist() == [1.0, 1.0]

    for size in (1, 2):
        run_ranks(size, program)
    assert gather({"a": torch.ones(2, 3), "b": 4}, dim=-1)["a"].shape == (2, 3)  # without a group
    assert gather([(1, "two")], objects=True) == [[(1, "two")]]


@pytest.mark.parametrize(("num_leaves", "num_calls"), [(1, 2), (9, 2), (10, 3), (200, 3)])
def test_few_collectives_however_many_tensors(num_leaves: int, num_calls: int) -> None:
    def program(t: Transport) -> Any:
        before = t.statistics().num_calls
        found = gather([torch.full((t.rank + n % 2, 2), n) for n in range(num_leaves)], group=t)
        assert [one[:, 0].tolist() for one in found] == [[n] * (1 + 2 * (n % 2)) for n in range(num_leaves)]
        return before, t.statistics().num_calls

    assert run_ranks(2, program) == [({}, {"all_gather": num_calls})] * 2


# ---------------------------------------------------------------------- the plan


@given(st.lists(st.integers(0, 300), min_size=1, max_size=6), st.integers(1, 200), st.integers(1, 40))
@settings(max_examples=200)
def test_each_byte_is_sent_once_within_the_bounds(lengths: list[int], round_bytes: int, small: int) -> None:
    plan = plan_rounds(lengths, round_bytes=round_bytes, small_bytes=small)
    sent = [[0] * length for length in lengths]
    for one in plan:
        ranks = range(len(lengths)) if one.src is None else [one.src]
        assert len(ranks) * max(one.sizes) <= max(round_bytes, small * len(lengths))
        for rank in ranks:
            for position in range(one.start, one.start + one.sizes[rank]):
                sent[rank][position] += 1
    assert all(count == 1 for row in sent for count in row)
    # More than half of what is sent in a large round are values.
    assert all(
        max(one.sizes) <= small or 2 * sum(one.sizes) > len(lengths) * max(one.sizes)
        for one in plan
        if one.src is None
    )


def test_rows_of_many_rounds_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that begin and end in the middle of rounds; all_gather and broadcast."""
    monkeypatch.setattr(plan_rounds, "__kwdefaults__", {"round_bytes": 64, "small_bytes": 4})
    lengths = (7, 0, 297)  # the end of the longest row is small

    def program(t: Transport) -> list[list[int]]:
        def parts(length: int) -> list[Tensor]:
            return list(torch.zeros(length, dtype=torch.uint8).split([length // 3, 0, length - length // 3]))

        own, found = Row(parts(lengths[t.rank])), [Row(parts(length)) for length in lengths]
        for part in own.parts:
            part.copy_(torch.arange(part.numel()) % 251 + t.rank)
        gather_unequal(t, own, found, torch.device("cpu"))
        assert t.statistics().num_calls == {"all_gather": 1, "broadcast": 15}
        return [torch.cat([*row.parts]).tolist() for row in found]

    results = run_ranks(3, program)
    assert results == [results[0]] * 3
    for rank, length in enumerate(lengths):
        sizes = (length // 3, length - length // 3)
        assert results[0][rank] == [n % 251 + rank for size in sizes for n in range(size)]


def test_small_rows_and_equal_rows_are_one_all_gather() -> None:
    assert plan_rounds([0, 0]) == []
    assert plan_rounds([10, 0, 0]) == [Round(0, (10, 0, 0), None)]
    assert plan_rounds([10**6, 10**6 - 1]) == [Round(0, (10**6, 10**6 - 1), None)]
    assert plan_rounds([10**6, 0]) == [Round(0, (10**6, 0), 0)]


# ---------------------------------------------------------------------- objects


def test_objects_of_any_structure_are_a_list_in_rank_order() -> None:
    everyone: list[Any] = [
        ["täxt \ud800", b"\x00\xff", None, True, 10**400, -0.0],
        {"a": {1: ("tuple", [float("inf")])}, "$b": {}},
        "",
    ]

    def program(t: Transport) -> None:
        found = gather(everyone[t.rank], objects=True, group=t)
        assert found == everyone
        assert repr(found) == repr(everyone)
        assert gather([f"text {t.rank}"] * t.rank, objects=True, group=t) == [[], ["text 1"], ["text 2"] * 2]

    run_ranks(3, program)


def test_objects_above_the_limit_are_refused_before_memory_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(inspect.unwrap(gather).__globals__, "_MAX_OBJECT_BYTES", 1000)

    def program(t: Transport) -> None:
        gather("x" * (400 + 250 * t.rank), objects=True, group=t)  # each alone is below the limit

    text = str(error_of_all(ValueError, program))
    for words in ("up to 1.00 kB for all ranks together, got 1.05 kB", "652 B are of rank 1"):
        assert words in text


def test_other_objects_are_refused_on_every_rank() -> None:
    rows: list[tuple[Any, str]] = [
        (object(), "values is a builtins.object"),
        ({"a": {1, 2}}, "values.a is a builtins.set"),
        ([torch.ones(1)], "values.0 is a tensor"),
        ([Pair(1, 2)], "Pair"),
    ]
    for wrong, words in rows:

        def program(t: Transport, wrong: Any = wrong) -> None:
            gather(wrong if t.rank else "text", objects=True, group=t)

        text = str(error_of_all(TypeError, program))
        assert "refused, nothing was sent\nrank 1: expected values to be strings" in text
        assert words in text
    circle: list[Any] = []
    circle.append(circle)

    def in_a_circle(t: Transport) -> None:
        with pytest.raises(Exception, match="rank 1: RecursionError"):
            gather(circle if t.rank else [], objects=True, group=t)
        assert gather(t.rank, group=t).tolist() == [0, 1]

    run_ranks(2, in_a_circle)


# ---------------------------------------------------------------------- what does not agree


def error_of(kind: type[Exception], values: list[Any], dims: Any = (0, 0)) -> str:
    """The text of the error that each of two ranks raises before values are sent."""

    def program(t: Transport) -> None:
        try:
            gather(values[t.rank], dims[t.rank], group=t)
        finally:
            assert t.statistics().num_calls.keys() == {"all_gather"}

    return str(error_of_all(kind, program))


@pytest.mark.parametrize(
    ("here", "there", "words"),
    [
        (torch.ones(2, 3), torch.ones(5, 4), ["values", "(*, 3) on cpu (rank 0)", "(*, 4) on cpu (rank 1)"]),
        (torch.ones(2, 3), torch.ones(0), ["got      torch.float32 (*,) on cpu (rank 1)"]),
        (torch.ones(2), torch.ones(2).double(), ["got      torch.float64 (*,) on cpu (rank 1)"]),
        ({"a": torch.ones(2)}, {"b": torch.ones(2)}, ["also has  values.b", "lacks  values.a"]),
        ([torch.ones(2)] * 2, [torch.ones(2)], ["lacks  values[1]", "torch.cat"]),
        (torch.ones(2), torch.tensor(2.0), ["got      torch.float32 () on cpu"]),
        ({"loss": 1.0}, {"loss": 1}, ["values.loss", "a float (rank 0)", "an integer (rank 1)"]),
    ],
)
def test_structures_that_differ_are_an_error_with_rank_and_place(
    here: Any, there: Any, words: list[str]
) -> None:
    text = error_of(ContractMismatch, [here, there])
    assert all(one in text for one in (*words, "torch.empty(0, 10)")), text


def test_other_calls_are_an_error() -> None:
    assert "expected 0 (rank 0)" in error_of(ContractMismatch, [torch.ones(2, 2)] * 2, (0, 1))
    error = error_of_all(ContractMismatch, lambda t: gather(1.0, objects=t.rank == 0, group=t))
    assert "objects  True" in str(error)
    other_verb = error_of_all(
        CollectiveMismatch, lambda t: gather(1.0, group=t) if t.rank == 0 else mean(1.0, group=t)
    )
    assert "rank 0: sl.gather" in str(other_verb)


def test_leaves_that_cannot_be_gathered_are_an_error_on_every_rank() -> None:
    for leaf, kind in (("x", "str at values.a"), (None, "NoneType at values.a"), (torch.nn.Tanh(), "Tanh")):
        text = error_of(TypeError, [{"a": 1.0}, {"a": leaf}])
        assert f"got a {kind}" in text
        assert "objects=True" in text
    for dim in (1, -2, 7):
        text = error_of(ValueError, [{"a": torch.ones(2)}] * 2, [dim, dim])
        assert f"dim to be a dimension of values.a, from -1 to 0, got {dim}" in text
    assert "got an integer of 64 bits" in error_of(ValueError, [1, 2**63])
