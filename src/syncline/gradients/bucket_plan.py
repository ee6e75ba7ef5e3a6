"""The plan of the buckets: which gradients are reduced together, and in which order. All functions are pure.

A bucket is one flat tensor that is reduced by one collective. Buckets are launched strictly in index order, so that
every rank starts the same collectives in the same order, even if its gradients become ready in another order. All ranks
therefore agree on a plan before they use it.

Inside a bucket the large gradients come first and the small gradients follow. A large gradient is copied into its place
as soon as it is ready, while it is still in the processor's cache. The small gradients are copied in one batched call
when the bucket is launched, because a call takes longer than reading a small gradient from memory.

Method: gradient bucketing with overlap (Li et al., "PyTorch Distributed: Experiences on Accelerating Data
Parallel Training", VLDB 2020, section 3.2.3). `docs/inside/decisions/0002-few-large-buckets.md` gives the reasons for
the default bucket sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

MIB = 1024 * 1024

POOL_BYTES = 96 * MIB
"""Approximate size of the memory pool of sharded buckets. If they need more in total, they use the pool in turn."""

LARGE_GRADIENT_NUMEL = 16 * 1024
"""A gradient with at least this number of elements (64 KiB in fp32) is large: it is copied as soon as it is ready."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterSpec:
    """The facts about one parameter that are needed to plan buckets."""

    name: str
    numel: int
    itemsize_bytes: int
    dtype: str
    """The dtype in which the parameter's gradient is reduced."""
    device: str
    sparse: bool = False
    """Whether the gradient is sparse. The ranks gather the rows of a sparse gradient, without a flat tensor."""
    delayed: bool = False
    """Whether the gradient is sent in one of the last buckets, after all gradients that are not delayed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketCaps:
    """The size limits of buckets, in bytes. A gradient that is larger than the limit gets its own bucket."""

    cap_bytes: int
    first_cap_bytes: int
    """The cap of the first bucket of each dtype and device. With a small first bucket, sending begins earlier."""
    listed_bytes: tuple[int, ...] = ()
    """Caps for the first buckets of each dtype and device, one per bucket. Later buckets have the cap `cap_bytes`."""
    is_default: bool = False
    """Whether the caps were chosen automatically, because the user gave none."""

    @property
    def largest_bytes(self) -> int:
        """The largest cap among `cap_bytes` and `listed_bytes`."""
        return max((self.cap_bytes, *self.listed_bytes))

    def of(self, position: int) -> int:
        """Return the cap of a bucket. Its `position` is its index among the buckets of the same dtype and device."""
        if position < len(self.listed_bytes):
            return self.listed_bytes[position]
        return self.first_cap_bytes if position == 0 else self.cap_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketPlan:
    """The layout of one bucket: the parameters, and the place of each gradient in the flat tensor."""

    index: int
    dtype: str
    device: str
    parameters: tuple[int, ...]
    """Indices of the parameters, in the order of their gradients in the flat tensor. Large gradients come first."""
    offsets: tuple[int, ...]
    """The offset of each gradient's first element from the start of the flat tensor, in elements."""
    num_large: int
    """The number of large gradients, which come first. Each is copied as soon as it is ready."""
    numel: int
    """Number of elements of all gradients and of the gaps between them, without the padding and the tail."""
    tail_numel: int
    """Number of elements of the tail, which is control data behind the gradients. Only the last bucket can have one."""
    itemsize_bytes: int
    sparse: bool = False
    """Whether the bucket holds one sparse gradient. Such a bucket has no flat tensor."""
    numels: tuple[int, ...] = ()
    """Number of elements of each gradient, in the order of `parameters`."""
    padding_numel: int = 0
    """Number of padding elements behind the gradients. The padding lets the bucket be cut into shards of equal size."""

    @property
    def num_gradient_elements(self) -> int:
        """Number of elements of all gradients, without the gaps between them."""
        return sum(self.numels)

    @property
    def payload_bytes(self) -> int:
        """Size of the flat tensor in bytes, including the padding and the tail."""
        return (self.numel + self.padding_numel + self.tail_numel) * self.itemsize_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class HostLoad:
    """The number of ranks and cores of one host, by which `automatic_caps` estimates how busy the host is."""

    num_ranks: int
    num_cores: int
    num_threads_per_rank: int


_IN_PLACE_CAP_BYTES = 8 * MIB

_NUM_OVERLAPPING = 10
"""The least number of buckets between hosts, unless they would be smaller than 1 MiB.

A step waits at least for the last bucket, which is then a tenth of all gradients. More buckets would wait for the
latency of the network more often.
"""

_NUM_OF_LITTLE = 3
"""The least number of buckets between hosts if a compression sends only a small part of each bucket.

Each bucket takes two messages of PowerSGD, which cost more than their bytes."""

_Kind = tuple[str, str, bool]
"""A key (dtype, device, delayed), by which dense gradients are grouped. A bucket holds gradients of one key only."""


def automatic_caps(
    hosts: Sequence[HostLoad],
    *,
    device_type: str,
    reduces_in_place: bool = False,
    gradient_bytes: int | None = None,
    sends_little: bool = False,
) -> BucketCaps:
    """Return the bucket caps to use if the user gave none.

    Communication during backward saves time if something other than the computing cores sends the data: an
    accelerator's copy engines, a network between hosts, or cores that no rank computes on. Then the caps are 1 MiB for
    the first bucket and 25 MiB for the rest, as in torch. Between hosts the network is often slow, and a model of less
    than 250 MiB would have only a few such buckets, of which the last ones are sent when the backward has ended. So
    there are at least ten buckets between hosts, unless they would be smaller than 1 MiB. If a compression leaves only
    a small part of each bucket to send, there are at least three. On one host whose cores all
    compute, each further collective only takes time from the computation, so a few large buckets are faster.

    If the ranks of one host read each other's gradients from memory, an additional bucket costs little, and a bucket
    that is reduced soon after it was filled is still in the last-level cache. Then buckets of medium size are faster.

    Args:
        hosts: the load of each host.
        device_type: the device type of the gradients.
        reduces_in_place: whether ranks read each other's gradients from memory.
        gradient_bytes: the bytes of all gradients of the module; None if they are not known.
        sends_little: whether a compression leaves only a small part of each bucket to send.

    Examples:
        >>> crowded = HostLoad(num_ranks=2, num_cores=2, num_threads_per_rank=1)
        >>> automatic_caps([crowded], device_type="cpu").cap_bytes // MIB
        32
        >>> automatic_caps([crowded, crowded], device_type="cpu").cap_bytes // MIB
        25
        >>> automatic_caps([crowded, crowded], device_type="cpu", gradient_bytes=20 * MIB).cap_bytes // MIB
        2
        >>> few = automatic_caps([crowded] * 2, device_type="cpu", gradient_bytes=21 * MIB, sends_little=True)
        >>> few.cap_bytes // MIB, few.first_cap_bytes // MIB
        (7, 7)
    """
    overlapping = BucketCaps(cap_bytes=25 * MIB, first_cap_bytes=1 * MIB, is_default=True)
    if len(hosts) > 1 and gradient_bytes is not None and sends_little:
        cap_bytes = min(25 * MIB, max(1 * MIB, gradient_bytes // _NUM_OF_LITTLE))
        return BucketCaps(cap_bytes=cap_bytes, first_cap_bytes=cap_bytes, is_default=True)
    if len(hosts) > 1 and gradient_bytes is not None:
        cap_bytes = min(25 * MIB, max(1 * MIB, gradient_bytes // _NUM_OVERLAPPING))
        return BucketCaps(cap_bytes=cap_bytes, first_cap_bytes=1 * MIB, is_default=True)
    if device_type != "cpu" or len(hosts) > 1:
        return overlapping
    if reduces_in_place:
        return BucketCaps(cap_bytes=_IN_PLACE_CAP_BYTES, first_cap_bytes=_IN_PLACE_CAP_BYTES, is_default=True)
    host = hosts[0]
    if host.num_ranks * (host.num_threads_per_rank + 1) <= host.num_cores:
        return overlapping
    return BucketCaps(cap_bytes=32 * MIB, first_cap_bytes=32 * MIB, is_default=True)


def plan_buckets(
    specs: Sequence[ParameterSpec],
    order: Sequence[int],
    *,
    caps: BucketCaps,
    tail_numel: int,
    align_numel: int = 1,
    multiple_of: int = 1,
) -> tuple[BucketPlan, ...]:
    """Assign the parameters to buckets, in the order in which their gradients become ready.

    Args:
        specs: the parameters, by index.
        order: the indices of all parameters, in the order in which their gradients are expected to become ready.
        caps: the size limits of buckets.
        tail_numel: the number of elements of control data to add to the last bucket.
        align_numel: a number of elements. The offset of each gradient in a bucket is a multiple of this number.
        multiple_of: a number of elements. The size of each bucket is padded to a multiple of this number.

    Returns:
        The buckets in launch order. A bucket whose last parameter is earlier in `order` is launched earlier. Buckets
        of delayed parameters are launched last. All dense gradients of a bucket have the same dtype and device.
        A sparse gradient has its own bucket.

    Examples:
        >>> spec = ParameterSpec(name="w", numel=4, itemsize_bytes=4, dtype="float32", device="cpu")
        >>> caps = BucketCaps(cap_bytes=32, first_cap_bytes=16)
        >>> [b.parameters for b in plan_buckets([spec] * 3, [2, 1, 0], caps=caps, tail_numel=7)]
        [(2,), (1, 0)]
    """
    if sorted(order) != list(range(len(specs))):
        raise ValueError(
            f"expected `order` to contain the index of every parameter exactly once ({len(specs)} parameters), got the "
            f"indices {list(order)}"
        )
    plans: list[BucketPlan] = []
    groups = _group(specs, order, caps)
    for group in groups:
        first = specs[group[0]]
        large = [i for i in group if specs[i].numel >= LARGE_GRADIENT_NUMEL]
        indices = [*large, *(i for i in group if specs[i].numel < LARGE_GRADIENT_NUMEL)]
        offsets, numel = [], 0
        for index in indices:
            numel += -numel % align_numel
            offsets.append(numel)
            numel += specs[index].numel
        plans.append(
            BucketPlan(
                index=len(plans),
                dtype=first.dtype,
                device=first.device,
                parameters=tuple(indices),
                offsets=tuple(offsets),
                num_large=0 if first.sparse else len(large),
                numel=numel,
                tail_numel=tail_numel if group is groups[-1] else 0,
                itemsize_bytes=first.itemsize_bytes,
                sparse=first.sparse,
                numels=tuple(specs[index].numel for index in indices),
                padding_numel=-numel % multiple_of,
            )
        )
    return tuple(plans)


def _group(specs: Sequence[ParameterSpec], order: Sequence[int], caps: BucketCaps) -> list[list[int]]:
    """Return one list of parameter indices per bucket, in the order in which the buckets are complete."""
    groups: list[list[int]] = []
    filling: dict[_Kind, list[int]] = {}
    filled_bytes: Counter[_Kind] = Counter()
    num_groups: Counter[_Kind] = Counter()
    for index in order:
        spec = specs[index]
        if spec.sparse:
            groups.append([index])
            continue
        kind = (spec.dtype, spec.device, spec.delayed)
        size_bytes = spec.numel * spec.itemsize_bytes
        # The first bucket of each kind gets the small cap, so that sending starts early for each dtype and device.
        if kind not in filling or filled_bytes[kind] + size_bytes > caps.of(num_groups[kind] - 1):
            filling[kind] = []
            groups.append(filling[kind])
            filled_bytes[kind] = 0
            num_groups[kind] += 1
        filling[kind].append(index)
        filled_bytes[kind] += size_bytes
    position = {index: at for at, index in enumerate(order)}
    return sorted(groups, key=lambda group: (specs[group[0]].delayed, position[group[-1]]))
