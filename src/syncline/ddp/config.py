"""The configuration of a wrapper: the arguments of DistributedDataParallel, checked once, in one frozen value.

The arguments are checked by torch's rules, on each rank before any communication. Then the ranks compare the values of
`Config.compared`: data, never words.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, get_args

import torch
from torch import nn

from syncline.buffers.policies import BufferPolicy
from syncline.checks import (
    checked_choice,
    checked_flag,
    checked_number,
    checked_truth,
    what_it_is,
)
from syncline.compression import Compression
from syncline.ddp.inputs import MixedPrecision
from syncline.ddp.selection import Selection
from syncline.gradients.bucket_plan import MIB, BucketCaps, automatic_caps
from syncline.gradients.options import GradientOptions, OnNonFinite
from syncline.gradients.riders.replica_watch import ReplicaCheck
from syncline.sharded.sharing import one_copy_of
from syncline.strategies import EveryStep, Strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """How one wrapped module is synchronized."""

    gradients: GradientOptions
    buffers: BufferPolicy
    init_sync: bool
    """Whether parameters are broadcast from rank 0 at construction."""
    init_buffers: bool
    """Whether buffers are broadcast from rank 0 at construction, too."""
    ignore: tuple[str, ...]
    """Names or patterns of tensors that do not take part, including tensors that are added later."""
    strategy: Strategy[Any]
    compression: Compression | None
    replica_check: ReplicaCheck | None

    def compared(self) -> dict[str, object]:
        """Return the values that must be equal on all ranks, by argument.

        The buffer policy, the strategy and `ignore` are compared by what follows from them (see `Plan.compared`).
        """
        options = self.gradients
        return {
            "init_sync": self.init_sync,
            "compression": None if self.compression is None else self.compression.in_words(),
            "reduce_dtype": options.reduce_dtype,
            "sharded": options.sharded,
            "replica_check": self.replica_check,
            "on_nonfinite": options.on_nonfinite,
            "find_unused_parameters or static_graph": options.allow_unused,
            "skip_all_reduce_unused_params": options.skip_unused,
            "static_graph": options.static_graph,
            "buckets": f"up to {options.caps.cap_bytes} bytes, the first up to {options.caps.of(0)}",
            "caps of the first buckets": list(options.caps.listed_bytes),
            "sparse gradients": sorted(options.sparse),
            "delayed gradients": sorted(options.delayed),
        }

    def with_gradients(self, **changed: Any) -> Config:
        """Return a copy with other options of gradient synchronization."""
        return replace(self, gradients=replace(self.gradients, **changed))


def checked_config(
    module: nn.Module,
    chosen: Selection,
    flags: Mapping[str, bool],
    *,
    num_ranks: int,
    init_sync: object,
    buffers: BufferPolicy | None,
    broadcast_buffers: bool | None,
    forward_sync_buffers: bool | None,
    bucket_cap_mb: float | None,
    bucket_cap_mb_list: Any,
    ignore: Sequence[str],
    lowered: MixedPrecision | None,
    reduce_dtype: torch.dtype | None,
    sharded: bool,
    strategy: object,
    compression: Compression | None,
    replica_check: object,
    on_nonfinite: OnNonFinite,
) -> Config:
    """Return the configuration of a wrapper. Arguments have the wrapper's names.

    Args:
        module: the module.
        chosen: the tensors that take part.
        flags: torch's boolean arguments, checked.
        num_ranks: the number of ranks.
        lowered: the module in lower precision, whose `reduce_dtype` is used if none is given.

    Raises:
        TypeError, ValueError: an argument is wrong, or cannot be combined with another one.
    """
    init_sync = checked_truth("init_sync", init_sync)
    checked_flag("sharded", sharded)
    _check_reduce_dtype(reduce_dtype)
    caps = _checked_caps(bucket_cap_mb, bucket_cap_mb_list)
    strategy = _checked_strategy(strategy)
    replica_check = _checked_replica_check(replica_check, sharded=sharded)
    on_nonfinite = _checked_on_nonfinite(on_nonfinite, strategy)
    if strategy.drifts and (buffers, forward_sync_buffers) == (None, None) and broadcast_buffers is not False:
        buffers, broadcast_buffers = "average", None
    policy, init_buffers = _checked_buffers(buffers, broadcast_buffers, forward_sync_buffers)
    find_unused, static_graph = flags["find_unused_parameters"], flags["static_graph"]
    skips_unused = flags["skip_all_reduce_unused_params"]
    config = Config(
        gradients=GradientOptions(
            caps=caps or automatic_caps([], device_type=""),
            as_bucket_view=flags["gradient_as_bucket_view"] and not sharded,
            allow_unused=find_unused or static_graph,
            skip_unused=skips_unused and find_unused and not static_graph,
            static_graph=static_graph,
            reduce_dtype=lowered.reduce_dtype
            if lowered is not None and reduce_dtype is None
            else reduce_dtype,
            sparse=chosen.sparse,
            delayed=frozenset(name for name, _ in chosen.delayed),
            sharded=sharded and num_ranks > 1,
            on_nonfinite=on_nonfinite,
        ),
        buffers=policy,
        init_sync=init_sync,
        init_buffers=init_sync and init_buffers,
        ignore=tuple(ignore),
        strategy=strategy,
        compression=compression,
        replica_check=replica_check,
    )
    _check_compression(compression, chosen, sharded=sharded)
    if config.gradients.sharded:
        _check_sharded(config, chosen, lowers=lowered is not None, skips_unused=skips_unused)
    elif num_ranks > 1:
        _check_not_shared(module)
    return config


def checked_truths(**given: object) -> dict[str, bool]:
    """Return torch's boolean arguments by name, checked (see `checked_truth`)."""
    return {name: checked_truth(name, value) for name, value in given.items()}


def _check_reduce_dtype(reduce_dtype: object) -> None:
    """Raise unless gradients can be added up in `reduce_dtype`.

    Raises:
        TypeError: it is not a torch.dtype.
        ValueError: it is an integer, complex or one-byte floating type.
    """
    if reduce_dtype is None:
        return
    text = f"expected reduce_dtype to be a floating type, say torch.float32, or None, got {reduce_dtype!r}"
    if not isinstance(reduce_dtype, torch.dtype):
        raise TypeError(text)
    if not reduce_dtype.is_floating_point or reduce_dtype.itemsize < 2:
        raise ValueError(text)


def _checked_buffers(
    buffers: BufferPolicy | None, broadcast_buffers: bool | None, forward_sync_buffers: bool | None
) -> tuple[BufferPolicy, bool]:
    """Return the buffer policy, and whether buffers are broadcast at construction."""
    if broadcast_buffers is not None:
        broadcast_buffers = checked_truth("broadcast_buffers", broadcast_buffers)
    if forward_sync_buffers is not None:
        forward_sync_buffers = checked_truth("forward_sync_buffers", forward_sync_buffers)
    if buffers is not None and (broadcast_buffers is not None or forward_sync_buffers is not None):
        raise ValueError(
            "expected buffers=, or torch's broadcast_buffers= or forward_sync_buffers=, got both: give "
            f"buffers={buffers!r} alone"
        )
    if broadcast_buffers is not None and forward_sync_buffers is not None:
        warnings.warn(
            "both broadcast_buffers and forward_sync_buffers were given: forward_sync_buffers wins",
            FutureWarning,
            stacklevel=4,
        )
    if buffers is not None:
        checked_choice("buffers", buffers, get_args(BufferPolicy))
    init_buffers = True
    if forward_sync_buffers is None:
        init_buffers = forward_sync_buffers = broadcast_buffers is not False
    return buffers or ("broadcast" if forward_sync_buffers else "none"), init_buffers


def _checked_caps(bucket_cap_mb: float | None, listed_mb: Any) -> BucketCaps | None:
    """Return the bucket caps, or None if none are given. As in torch, a list overrides the single value."""
    if listed_mb is not None and (not isinstance(listed_mb, Sequence) or isinstance(listed_mb, str)):
        raise TypeError(
            f"expected bucket_cap_mb_list to be a list of sizes (MiB), or None, got {listed_mb!r}"
        )
    if bucket_cap_mb is not None:
        bucket_cap_mb = checked_number("bucket_cap_mb", bucket_cap_mb, above=0)
    if listed_mb:
        caps_mb = [
            checked_number(f"bucket_cap_mb_list[{at}]", cap, above=0) for at, cap in enumerate(listed_mb)
        ]
        listed_bytes = tuple(int(cap * MIB) for cap in caps_mb)
        return BucketCaps(
            cap_bytes=listed_bytes[-1], first_cap_bytes=listed_bytes[0], listed_bytes=listed_bytes
        )
    if bucket_cap_mb is None:
        return None
    cap_bytes = int(bucket_cap_mb * MIB)
    return BucketCaps(cap_bytes=cap_bytes, first_cap_bytes=cap_bytes)


def _checked_strategy(strategy: object) -> Strategy[Any]:
    """Return the strategy, or `EveryStep` if none is given.

    Raises:
        TypeError: `strategy` is not a strategy.
    """
    if strategy is None:
        return EveryStep()
    if isinstance(strategy, Strategy):
        return strategy
    given = what_it_is(strategy) if isinstance(strategy, type) else repr(strategy)
    hint = (
        ": call it with its arguments"
        if isinstance(strategy, type) and issubclass(strategy, Strategy)
        else ""
    )
    raise TypeError(
        f"expected strategy to be a strategy, say sl.LocalSGD(every=8), or None, got {given}{hint}"
    )


def _checked_replica_check(replica_check: object, *, sharded: bool) -> ReplicaCheck | None:
    """Return the check of replicas, or None.

    Raises:
        TypeError: `replica_check` is not a `ReplicaCheck`.
        ValueError: it cannot be combined with `sharded`.
    """
    if replica_check is None:
        return None
    if not isinstance(replica_check, ReplicaCheck):
        hint = ": call it, sl.ReplicaCheck()" if replica_check is ReplicaCheck else ""
        raise TypeError(
            f"expected replica_check to be sl.ReplicaCheck(...) or None, got {replica_check!r}{hint}"
        )
    if sharded and replica_check.on_divergence == "repair":
        raise ValueError(
            "sl.ReplicaCheck(on_divergence='repair') does not go with sharded=True, where parameters are in memory "
            "that all ranks use: give on_divergence='raise' or 'warn'"
        )
    return replica_check


def _checked_on_nonfinite(policy: OnNonFinite, strategy: Strategy[Any]) -> OnNonFinite:
    """Return the policy for gradients that are not finite.

    Raises:
        TypeError, ValueError: there is no such policy, or replicas drift under the strategy, so that ranks do not agree
            on anything in a backward.
    """
    checked_choice("on_nonfinite", policy, get_args(OnNonFinite))
    if policy != "ignore" and strategy.drifts:
        raise ValueError(
            f"on_nonfinite={policy!r} does not go with strategy={strategy}, under which ranks step independently and "
            "agree on nothing in a backward: leave it out, and look at the gradients of each rank before its step "
            "(ddp.clip_grad_norm_(max_norm, error_if_nonfinite=True)); or use EveryStep()"
        )
    return policy


def _check_compression(compression: object, chosen: Selection, *, sharded: bool) -> None:
    """Raise if these gradients cannot be compressed."""
    if compression is None:
        return
    if not isinstance(compression, Compression):
        raise TypeError(f"expected compression to be one of sl.compression, or None, got {compression!r}")
    if sharded:
        raise ValueError(
            "sharded=True does not go with compression= (each rank reduces its shard of the gradients, which no "
            "encoding does): leave one of them out"
        )
    if chosen.sparse:
        raise ValueError(
            f"compression= does not go with sparse gradients ({', '.join(sorted(chosen.sparse))}): make them dense "
            "(sparse=False), or leave it out"
        )
    for name, parameter in (*chosen.trained, *chosen.delayed):
        if not parameter.dtype.is_floating_point:
            raise ValueError(
                f"compression= encodes real floating numbers, but {name} is {parameter.dtype}: leave it out"
            )


def _check_not_shared(module: nn.Module) -> None:
    copy = one_copy_of(module)
    if copy is not None and copy.is_common:
        raise ValueError(
            f"the parameters of {type(module).__name__} are one copy for all ranks (sl.share_), which every rank "
            "would step: give sharded=True"
        )


def _check_sharded(config: Config, chosen: Selection, *, lowers: bool, skips_unused: bool) -> None:
    """Raise if `sharded=True` cannot be combined with another argument, or with these parameters."""
    named = [*chosen.trained, *chosen.delayed]
    floating = {p.dtype for _, p in named if p.dtype.is_floating_point}
    sparse = ", ".join(sorted(chosen.sparse))
    refusals = {
        f"strategy={config.strategy} (there is no drift where each rank steps its shard)": config.strategy.drifts,
        "mixed_precision= (its low-precision copies are filled from whole parameters)": lowers,
        "skip_all_reduce_unused_params=True (a shard has to be reduced in every step)": skips_unused,
        f"sparse gradients ({sparse}), which have no flat spans": bool(sparse),
        "reduce_dtype= for parameters of several types": config.gradients.reduce_dtype is not None
        and len(floating) > 1,
    }
    for what, is_there in refusals.items():
        if is_there:
            raise ValueError(f"sharded=True does not go with {what}: leave one of them out")
    _check_that_none_overlap(named)


def _check_that_none_overlap(named: Sequence[tuple[str, torch.Tensor]]) -> None:
    ranges = sorted(
        (p.device.index or 0, p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), name)
        for name, p in named
        if p.numel()
    )
    for (device, _, end, first), (other_device, start, _, second) in pairwise(ranges):
        if device == other_device and start < end:
            raise ValueError(
                f"{first} and {second} are two parameters in the same memory; sharded=True would separate them: "
                "make them one parameter (tied), or copies"
            )
