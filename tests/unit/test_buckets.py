from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.gradients.bucket_plan import (
    LARGE_GRADIENT_NUMEL,
    MIB,
    BucketCaps,
    HostLoad,
    ParameterSpec,
    automatic_caps,
    plan_buckets,
)

ITEMSIZE_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2}


def spec(numel: int, dtype: str = "float32", device: str = "cpu") -> ParameterSpec:
    return ParameterSpec(
        name="p", numel=numel, itemsize_bytes=ITEMSIZE_BYTES[dtype], dtype=dtype, device=device
    )


def caps(cap_bytes: int, first_cap_bytes: int | None = None) -> BucketCaps:
    return BucketCaps(cap_bytes=cap_bytes, first_cap_bytes=first_cap_bytes or cap_bytes)


def test_buckets_follow_the_order_in_which_gradients_are_ready() -> None:
    plans = plan_buckets([spec(10)] * 4, [3, 1, 0, 2], caps=caps(80), tail_numel=0)
    assert [plan.parameters for plan in plans] == [(3, 1), (0, 2)]
    assert [plan.offsets for plan in plans] == [(0, 10), (0, 10)]


def test_a_parameter_above_the_cap_has_a_bucket_of_its_own() -> None:
    plans = plan_buckets([spec(1), spec(100), spec(1)], [0, 1, 2], caps=caps(40), tail_numel=0)
    assert [plan.parameters for plan in plans] == [(0,), (1,), (2,)]


def test_the_first_bucket_is_smaller() -> None:
    plans = plan_buckets([spec(10)] * 5, range(5), caps=caps(120, first_cap_bytes=40), tail_numel=0)
    assert [plan.parameters for plan in plans] == [(0,), (1, 2, 3), (4,)]


def test_only_the_last_bucket_carries_the_tail() -> None:
    plans = plan_buckets([spec(10)] * 3, range(3), caps=caps(40), tail_numel=14)
    assert [plan.tail_numel for plan in plans] == [0, 0, 14]
    assert plans[-1].payload_bytes == (10 + 14) * 4


def test_dtypes_and_devices_never_share_a_bucket() -> None:
    specs = [spec(4), spec(4, "bfloat16"), spec(4), spec(4, device="cuda:0")]
    plans = plan_buckets(specs, [0, 1, 2, 3], caps=caps(MIB), tail_numel=0)
    assert [plan.parameters for plan in plans] == [(1,), (0, 2), (3,)], (
        "in the order in which they are complete"
    )


def test_large_gradients_come_first_in_a_bucket() -> None:
    specs = [spec(3), spec(LARGE_GRADIENT_NUMEL), spec(2), spec(LARGE_GRADIENT_NUMEL + 1)]
    (plan,) = plan_buckets(specs, range(4), caps=caps(64 * MIB), tail_numel=0)
    assert plan.parameters == (1, 3, 0, 2)
    assert plan.num_large == 2


def test_an_order_that_is_no_permutation_is_refused() -> None:
    with pytest.raises(ValueError, match=r"every parameter exactly once \(2 parameters\), got"):
        plan_buckets([spec(1)] * 2, [0, 0], caps=caps(8), tail_numel=0)


@given(
    sizes=st.lists(
        st.tuples(st.integers(1, 40_000), st.sampled_from(sorted(ITEMSIZE_BYTES))), min_size=1, max_size=30
    ),
    cap_bytes=st.integers(1, 300_000),
    seed=st.randoms(use_true_random=False),
)
def test_every_element_has_exactly_one_place(sizes, cap_bytes, seed) -> None:
    specs = [spec(numel, dtype) for numel, dtype in sizes]
    order = list(range(len(specs)))
    seed.shuffle(order)
    plans = plan_buckets(specs, order, caps=caps(cap_bytes), tail_numel=5)
    assert sorted(i for plan in plans for i in plan.parameters) == list(range(len(specs)))
    position = {index: at for at, index in enumerate(order)}
    completed = [max(position[i] for i in plan.parameters) for plan in plans]
    assert completed == sorted(completed)
    for plan in plans:
        ends = [offset + specs[i].numel for i, offset in zip(plan.parameters, plan.offsets, strict=True)]
        assert list(plan.offsets) == [0, *ends[:-1]]
        assert plan.numel == ends[-1]
        assert len(plan.parameters) == 1 or plan.numel * plan.itemsize_bytes <= cap_bytes


def test_a_crowded_host_gets_few_large_buckets_and_others_overlap() -> None:
    crowded = HostLoad(num_ranks=2, num_cores=2, num_threads_per_rank=1)
    roomy = HostLoad(num_ranks=2, num_cores=16, num_threads_per_rank=4)
    assert automatic_caps([crowded], device_type="cpu").first_cap_bytes == 32 * MIB
    assert automatic_caps([roomy], device_type="cpu").first_cap_bytes == MIB
    assert automatic_caps([crowded, crowded], device_type="cpu").first_cap_bytes == MIB
    assert automatic_caps([crowded], device_type="cuda").first_cap_bytes == MIB
    assert automatic_caps([crowded], device_type="cpu", reduces_in_place=True).cap_bytes == 8 * MIB
    assert automatic_caps([roomy], device_type="cpu", reduces_in_place=True).cap_bytes == 8 * MIB
    assert automatic_caps([crowded, crowded], device_type="cpu", reduces_in_place=True).cap_bytes == 25 * MIB


def test_little_to_send_makes_few_buckets_between_hosts_and_changes_nothing_on_one() -> None:
    load = HostLoad(num_ranks=2, num_cores=2, num_threads_per_rank=1)
    for hosts in ([load], [load] * 2):
        plain, little = (
            automatic_caps(hosts, device_type="cpu", gradient_bytes=21 * MIB, sends_little=sends_little)
            for sends_little in (False, True)
        )
        assert (plain == little) == (len(hosts) == 1)
    assert (little.first_cap_bytes, little.cap_bytes) == (7 * MIB, 7 * MIB)
    for gradient_bytes, cap_bytes in ((1000, MIB), (1000 * MIB, 25 * MIB)):
        caps = automatic_caps([load] * 2, device_type="cpu", gradient_bytes=gradient_bytes, sends_little=True)
        assert caps.cap_bytes == cap_bytes
