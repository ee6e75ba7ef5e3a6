"""The reduce kernels: the same bits as a plain reference, on every instruction set that this processor has.

A NaN is compared as a NaN: which of two NaNs an addition hands on is the processor's choice.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from syncline.native import find_library, library
from syncline.transport import REDUCE_OPS
from syncline.transport.shared_memory.engine import code_of

pytestmark = pytest.mark.skipif(find_library() is None, reason="the native core was not built")

REALS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
NUMELS = (0, 1, 7, 1023, 1024, 1025, 5000)
NUM_SOURCES = (1, 2, 3, 4, 5, 17)
CPUINFO = Path("/proc/cpuinfo")
INSTRUCTION_SETS = ("baseline", "avx2", "avx512")


def instruction_sets() -> dict[str, int]:
    """Those of this processor, by name."""
    names = [library().isa(i) for i in range(len(INSTRUCTION_SETS))]
    return {name.decode(): i for i, name in enumerate(names) if name is not None}


def native(isa: int, sources: list[Tensor], op: str, target: Tensor | None = None) -> Tensor:
    """What the kernel makes of the sources."""
    dtype = sources[0].dtype
    target = torch.empty_like(sources[0]) if target is None else target
    pointers = torch.tensor([source.data_ptr() for source in sources])
    number = code_of(0, dtype, op) >> 8 & 0xFF
    numel = sources[0].numel()
    arguments = (target.data_ptr(), pointers.data_ptr(), len(sources), numel, number, REDUCE_OPS.index(op))
    assert library().reduce(isa, *arguments) == 0
    return target


def reference(sources: list[Tensor], op: str) -> Tensor:
    """One source after the other, in the type that sums are taken in, rounded once."""
    dtype = sources[0].dtype
    accumulated, *others = [source.to(WIDE.get(dtype, dtype)) for source in sources]
    for x in others:
        if op in ("sum", "mean"):
            accumulated = accumulated + x
        elif op == "product":
            accumulated = accumulated * x
        else:
            wins = accumulated > x if op == "max" else accumulated < x
            accumulated = torch.where(wins | (accumulated != accumulated), accumulated, x)
    if op == "mean":
        accumulated = accumulated / torch.tensor(len(sources), dtype=accumulated.dtype)
    return accumulated.to(dtype)


def bits(tensor: Tensor) -> Tensor:
    """The bits of each number; of a NaN, only that it is one."""
    if tensor.dtype.is_floating_point:
        tensor = torch.where(tensor.isnan(), torch.full_like(tensor, torch.nan), tensor)
    return tensor.view(BITS[tensor.dtype.itemsize])


def values(dtype: torch.dtype, numel: int, num_sources: int) -> list[Tensor]:
    """Any bits whatever (infinity, NaN and subnormal numbers among them), and numbers around 1."""
    generator = torch.Generator().manual_seed(numel)
    sources = []
    for _ in range(num_sources):
        raw = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        source = raw.view(dtype) if numel else torch.empty(0, dtype=dtype)
        if dtype.is_floating_point:
            near = torch.rand(numel, generator=generator, dtype=torch.float64) + 0.5
            pick = torch.rand(numel, generator=generator) < 0.8
            source = torch.where(pick, near.to(dtype), source)
        sources.append(source.clone())
    return sources


def test_the_core_knows_an_instruction_set() -> None:
    found = instruction_sets()
    assert "baseline" in found
    assert set(found) <= set(INSTRUCTION_SETS)
    assert library().isa(-1) is None
    assert library().isa(len(INSTRUCTION_SETS)) is None
    assert library().reduce(len(INSTRUCTION_SETS), None, None, 0, 0, 0, 0) == -1


@pytest.mark.skipif(not CPUINFO.is_file(), reason="needs /proc/cpuinfo")
def test_the_instruction_sets_are_those_that_the_kernel_lists() -> None:
    flags = set(CPUINFO.read_text().split())
    needed = {"baseline": set(), "avx2": {"avx2"}, "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"}}
    expected = {name for name, features in needed.items() if features <= flags}
    assert set(instruction_sets()) == expected


def test_every_instruction_set_has_the_reference_s_bits() -> None:
    for dtype, op in itertools.product((*REALS, *INTEGERS), REDUCE_OPS):
        if op == "mean" and not dtype.is_floating_point:
            continue
        for num_sources, numel in itertools.product(NUM_SOURCES, NUMELS):
            sources = values(dtype, numel, num_sources)
            expected = bits(reference(sources, op))
            for name, isa in instruction_sets().items():
                what = f"{name}: {op} of {num_sources} x {numel} {dtype}"
                assert torch.equal(bits(native(isa, sources, op)), expected), what


def test_the_target_may_be_any_one_of_the_sources() -> None:
    cases = itertools.product((*REALS, *INTEGERS), ("sum", "max"), (1, 2, 3, 5), (7, 1025))
    for dtype, op, num_sources, numel in cases:
        untouched = values(dtype, numel, num_sources)
        expected = bits(reference(untouched, op))
        for isa, place in itertools.product(instruction_sets().values(), range(num_sources)):
            sources = [source.clone() for source in untouched]
            native(isa, sources, op, target=sources[place])
            what = f"{op} of {num_sources} x {numel} {dtype} into source {place}"
            assert torch.equal(bits(sources[place]), expected), what
            for other in set(range(num_sources)) - {place}:
                assert torch.equal(bits(sources[other]), bits(untouched[other])), what


def every_half(dtype: torch.dtype) -> Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def test_every_half_there_is_survives_unchanged() -> None:
    for dtype, isa in itertools.product(WIDE, instruction_sets().values()):
        every = every_half(dtype)
        assert every.isnan().any()
        assert every.isinf().sum() == 2
        copy = native(isa, [every], "sum")
        assert torch.equal(bits(copy), bits(every)), (dtype, isa)
        assert torch.equal(copy.view(torch.int16) < 0, every.view(torch.int16) < 0), (dtype, isa)


def test_every_half_there_is_is_rounded_to_the_nearest_even() -> None:
    for dtype in WIDE:
        every, generator = every_half(dtype), torch.Generator().manual_seed(0)
        for num_sources, op, _ in itertools.product((2, 3), REDUCE_OPS, range(4)):
            orders = [torch.randperm(len(every), generator=generator) for _ in range(num_sources - 1)]
            sources = [every, *(every[order] for order in orders)]
            expected = bits(reference(sources, op))
            for name, isa in instruction_sets().items():
                assert torch.equal(bits(native(isa, sources, op)), expected), (name, op, num_sources, dtype)


def test_halves_halfway_between_two_go_to_the_even_one() -> None:
    """A number plus half of the distance to the next one, and a little more or less than that."""
    for dtype in WIDE:
        info = torch.finfo(dtype)
        lower = (torch.arange(0, 512, dtype=torch.float32) * info.eps + 1).to(dtype)
        lower = torch.cat([lower, lower * 2**-10, lower * 2**10])
        half = (lower.float().log2().floor().exp2() * info.eps / 2).to(dtype)
        ties = [lower, half]
        for sources in (ties, [-lower, -half], [*ties, half * info.eps], [*ties, -half / 4]):
            expected = reference(sources, "sum")
            for isa in instruction_sets().values():
                assert torch.equal(bits(native(isa, sources, "sum")), bits(expected)), (dtype, isa)
        assert ((reference(ties, "sum").view(torch.int16) & 1) == 0).all(), "the reference rounds to even"


def test_max_and_min_hand_on_nan_from_any_source() -> None:
    cases = itertools.product(REALS, NUM_SOURCES, ("max", "min"), instruction_sets().values())
    for dtype, num_sources, op, isa in cases:
        sources = [torch.full((num_sources + 1,), float(s)).to(dtype) for s in range(num_sources)]
        for s, source in enumerate(sources):
            source[s] = torch.nan
        result = native(isa, sources, op)
        assert result[:-1].isnan().all(), (dtype, num_sources, op, isa)
        assert result[-1].item() == (num_sources - 1 if op == "max" else 0), (dtype, num_sources, op, isa)


def test_integers_wrap_around() -> None:
    for dtype in INTEGERS:
        info = torch.iinfo(dtype)
        modulus = 2**info.bits
        a = [info.max, info.min, info.max, 3]
        b = [1, -1 % modulus if info.min == 0 else -1, info.max, info.max]

        def wrap(number: int, least: int = info.min, modulus: int = modulus) -> int:
            return (number - least) % modulus + least

        sources = [torch.tensor([wrap(n) for n in row], dtype=dtype) for row in (a, b, a)]
        totals = [wrap(2 * x + wrap(y)) for x, y in zip(a, b, strict=True)]
        products = [wrap(x * wrap(y) * x) for x, y in zip(a, b, strict=True)]
        for isa in instruction_sets().values():
            assert native(isa, sources, "sum").tolist() == totals, (dtype, isa)
            assert native(isa, sources, "product").tolist() == products, (dtype, isa)


def test_a_mean_divides_where_a_reciprocal_would_be_off() -> None:
    source = torch.arange(1, 3000, dtype=torch.float32)
    sources = [source, source * 0, source * 0]
    expected = source / 3
    assert not torch.equal(source * (torch.ones(()) / 3), expected), "the difference can be seen"
    for isa in instruction_sets().values():
        assert torch.equal(native(isa, sources, "mean"), expected)


def test_subnormal_halves_count_where_the_processor_takes_subnormal_numbers_for_zero() -> None:
    """Set by torch.set_flush_denormal, and libraries built with -ffast-math. They are normal in fp32."""
    every = torch.arange(0, 2**10, dtype=torch.int16).view(torch.float16)
    expected = bits(every)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        found = [bits(native(isa, [every], "sum")) for isa in instruction_sets().values()]
    finally:
        torch.set_flush_denormal(False)
    for one in found:
        assert torch.equal(one, expected)
