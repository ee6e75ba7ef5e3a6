"""The configuration of a wrapper: one frozen value, which holds the checked arguments of DistributedDataParallel.

Each rank checks its arguments before any communication. Arguments that torch has too are checked by torch's rules. Then
the ranks compare the values that `Config.compared` returns.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, get_args

import torch
from torch import nn

from syncline import environment
from syncline.buffers.policies import BufferPolicy
from syncline.checks import checked_choice, checked_flag, checked_number, checked_truth, what_it_is
from syncline.compression import Compression
from syncline.ddp.selection import Selection
from syncline.gradients.bucket_plan import MIB, BucketCaps, automatic_caps
from syncline.gradients.options import GradientOptions, OnNonFinite
from syncline.gradients.riders.replica_look import Looks
from syncline.gradients.riders.replica_watch import ReplicaCheck
from syncline.sharded.sharing import one_copy_of
from syncline.strategies import EveryStep, Strategy
from syncline.tensors.targets import is_expanded


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """The configuration of the synchronization of one wrapped module."""

    gradients: GradientOptions
    buffers: BufferPolicy
    init_sync: bool
    """Whether rank 0 broadcasts its parameters when the wrapper is constructed."""
    init_buffers: bool
    """Whether rank 0 broadcasts its buffers when the wrapper is constructed."""
    ignore: tuple[str, ...]
    """Names of the tensors that are not synchronized, or shell patterns for these names. A pattern also applies to
    tensors that are added later."""
    strategy: Strategy[Any]
    compression: Compression | None
    replica_check: ReplicaCheck | Looks | None

    @property
    def sends_buffers(self) -> bool:
        """Whether buffers are sent at construction or before forwards. If not, ranks do not compare them."""
        return self.init_buffers or self.buffers != "none"

    @property
    def encoding(self) -> str | None:
        """The text that describes the compression; None if gradients are sent unchanged."""
        return None if self.compression is None else self.compression.in_words()

    def compared(self) -> dict[str, object]:
        """Return the values that must be equal on all ranks. The keys of the result name arguments, or describe values.

        `Plan.compared` adds the buffer policy and the strategy. The patterns in `ignore` are not compared here, because
        the ranks compare the names that the patterns match.
        """
        options = self.gradients
        return {
            "init_sync": self.init_sync,
            "compression": self.encoding,
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
        """Return a copy of the configuration with the new values in `changed`, which are options of gradient sync."""
        return replace(self, gradients=replace(self.gradients, **changed))


def checked_config(
    arguments: Mapping[str, Any], flags: Mapping[str, bool], chosen: Selection, *, num_ranks: int
) -> Config:
    """Check the arguments of a wrapper, and return the configuration that they describe.

    Args:
        arguments: the arguments of `DistributedDataParallel`, by name.
        flags: torch's boolean arguments by name, as `checked_truths` returns them.
        chosen: the tensors that are synchronized.
        num_ranks: the number of ranks that synchronize.

    Raises:
        TypeError, ValueError: an argument is wrong, or cannot be combined with another one.
        RuntimeError: a tensor that has to be synchronized is expanded.
    """
    init_sync = checked_truth("init_sync", arguments["init_sync"])
    sharded = checked_flag("sharded", arguments["sharded"])
    reduce_dtype = _checked_reduce_dtype(arguments)
    caps = _checked_caps(arguments["bucket_cap_mb"], arguments["bucket_cap_mb_list"])
    strategy = _checked_strategy(arguments["strategy"])
    replica_check = _checked_replica_check(arguments["replica_check"], sharded=sharded)
    on_nonfinite = _checked_on_nonfinite(arguments["on_nonfinite"], strategy)
    policy, init_buffers = _checked_buffers(arguments, strategy)
    skips_unused, static_graph = flags["skip_all_reduce_unused_params"], flags["static_graph"]
    config = Config(
        gradients=GradientOptions(
            caps=caps or automatic_caps([], device_type=""),
            as_bucket_view=flags["gradient_as_bucket_view"] and not sharded,
            allow_unused=flags["find_unused_parameters"] or static_graph,
            skip_unused=skips_unused and flags["find_unused_parameters"] and not static_graph,
            static_graph=static_graph,
            reduce_dtype=reduce_dtype,
            sparse=chosen.sparse,
            delayed=frozenset(name for name, _ in chosen.delayed),
            sharded=sharded and num_ranks > 1,
            on_nonfinite=on_nonfinite,
        ),
        buffers=policy,
        init_sync=init_sync,
        init_buffers=init_sync and init_buffers,
        ignore=tuple(arguments["ignore"]),
        strategy=strategy,
        compression=_checked_compression(arguments["compression"], chosen, strategy, sharded=sharded),
        replica_check=replica_check,
    )
    if num_ranks > 1:
        _check_writable(config, chosen)
    if config.gradients.sharded:
        lowers = arguments["mixed_precision"] is not None
        _check_sharded(config, chosen, lowers=lowers, skips_unused=skips_unused)
    elif num_ranks > 1:
        _check_not_shared(arguments["module"])
    return config


def _check_writable(config: Config, chosen: Selection) -> None:
    """Raise an error if a parameter or buffer that other ranks would send cannot be written in place.

    Raises:
        RuntimeError: an expanded tensor has to be synchronized.
    """
    parameters = chosen.parameters if config.init_sync or config.strategy.drifts else ()
    buffers = chosen.buffers if config.sends_buffers else ()
    for name, tensor in (*parameters, *buffers):
        if is_expanded(tensor):
            raise RuntimeError(  # as torch does
                f"several elements of {name} use the same memory (shape {tuple(tensor.shape)}, strides "
                f"{tensor.stride()}), so the values of another rank cannot be written into it. Register "
                f"{name}.clone() in its place, or name it in ignore="
            )


def checked_truths(given: Mapping[str, object]) -> dict[str, bool]:
    """Check boolean arguments of torch's API by `checked_truth`, and return them as bools, by name."""
    return {name: checked_truth(name, value) for name, value in given.items()}


def _checked_reduce_dtype(arguments: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype in which gradients are summed.

    Returns None if each gradient is summed in its own dtype.

    Raises:
        TypeError: `reduce_dtype` is not a torch.dtype, or `mixed_precision` is not torch's `_MixedPrecision`.
        ValueError: `reduce_dtype` is not a floating-point dtype, or has only one byte.
    """
    lowered, reduce_dtype = arguments["mixed_precision"], arguments["reduce_dtype"]
    if lowered is not None:
        names = ("param_dtype", "reduce_dtype", "buffer_dtype")
        if not all(isinstance(getattr(lowered, name, ""), torch.dtype | None) for name in names):
            raise TypeError(
                "expected mixed_precision to be torch's _MixedPrecision, whose param_dtype, reduce_dtype and "
                f"buffer_dtype are each a torch.dtype or None; got {lowered!r}"
            )
    if reduce_dtype is None:
        return None if lowered is None else lowered.reduce_dtype or lowered.param_dtype
    text = (
        "expected reduce_dtype to be None or a floating-point dtype of at least 2 bytes, such as torch.float32; got "
        f"{reduce_dtype!r}"
    )
    if not isinstance(reduce_dtype, torch.dtype):
        raise TypeError(text)
    if not reduce_dtype.is_floating_point or reduce_dtype.itemsize < 2:
        raise ValueError(text)
    return reduce_dtype


def _checked_buffers(arguments: Mapping[str, Any], strategy: Strategy[Any]) -> tuple[BufferPolicy, bool]:
    """Check the arguments about buffers, and return the buffer policy, and whether construction broadcasts buffers."""
    policy: BufferPolicy | None = arguments["buffers"]
    names = ("broadcast_buffers", "forward_sync_buffers")
    given = checked_truths({name: arguments[name] for name in names if arguments[name] is not None})
    if policy is not None and given:
        raise ValueError(
            f"buffers={policy!r} cannot be combined with torch's broadcast_buffers= or forward_sync_buffers=, because "
            "these arguments also choose how buffers are synchronized. Give buffers= alone"
        )
    if len(given) == 2:
        warnings.warn(
            "broadcast_buffers and forward_sync_buffers were both given. In forwards, only forward_sync_buffers "
            "applies: leave broadcast_buffers out",
            FutureWarning,
            stacklevel=5,
        )
    if policy is not None:
        if str(policy).lower() in _BUFFERS:
            raise ValueError(f"unknown buffers={policy!r}{_meant(policy, _BUFFERS, 'buffers')}")
        checked_choice("buffers", policy, get_args(BufferPolicy))
    elif strategy.drifts and given in ({}, {"broadcast_buffers": True}):
        policy = "average"
    broadcasts = given.get("broadcast_buffers", True)
    at_forward = given.get("forward_sync_buffers", broadcasts)
    return policy or ("broadcast" if at_forward else "none"), broadcasts or "forward_sync_buffers" in given


def _checked_caps(bucket_cap_mb: Any, listed_mb: Any) -> BucketCaps | None:
    """Check the arguments about bucket caps, and return the caps. As in torch, a list overrides the single cap.

    Returns None if neither argument is given, nor the environment variable for `bucket_cap_mb`.
    """
    if listed_mb is not None and (not isinstance(listed_mb, Sequence) or isinstance(listed_mb, str)):
        raise TypeError(
            f"expected bucket_cap_mb_list to be None or a list of bucket sizes in MiB; got {listed_mb!r}"
        )
    listed_bytes = tuple(
        int(checked_number(f"bucket_cap_mb_list[{at}]", cap, above=0) * MIB)
        for at, cap in enumerate(listed_mb or ())
    )
    caps_bytes = listed_bytes
    if bucket_cap_mb is None:
        bucket_cap_mb = environment.bucket_cap_mb()
    if bucket_cap_mb is not None:
        cap_bytes = int(checked_number("bucket_cap_mb", bucket_cap_mb, above=0) * MIB)
        caps_bytes = listed_bytes or (cap_bytes,)
    if not caps_bytes:
        return None
    return BucketCaps(cap_bytes=caps_bytes[-1], first_cap_bytes=caps_bytes[0], listed_bytes=listed_bytes)


_STRATEGIES = {
    "diloco": "sl.DiLoCo()",
    "localsgd": "sl.LocalSGD(every=8)",
    "gossip": "sl.Gossip()",
    "parameterserver": "sl.ParameterServer()",
    "manual": "sl.Manual()",
    "everystep": "sl.EveryStep()",
    "ddp": "sl.EveryStep()",
}
"""The code to write instead of the name of a strategy. The keys lack underscores and hyphens."""

_COMPRESSIONS = {
    "fp16": "sl.compression.Cast()",
    "float16": "sl.compression.Cast()",
    "half": "sl.compression.Cast()",
    "cast": "sl.compression.Cast()",
    "bf16": "sl.compression.Cast(torch.bfloat16)",
    "bfloat16": "sl.compression.Cast(torch.bfloat16)",
    "int8": "sl.compression.Quantize()",
    "8bit": "sl.compression.Quantize()",
    "quantize": "sl.compression.Quantize()",
    "topk": "sl.compression.TopK()",
    "powersgd": "sl.compression.PowerSGD()",
}

_BUFFERS = {
    "mean": '"average"',
    "avg": '"average"',
    "sync": '"broadcast"',
    "rank0": '"broadcast"',
    "true": '"broadcast"',
    "off": '"none"',
    "false": '"none"',
}


def _meant(given: object, known: Mapping[str, str], argument: str) -> str:
    """Return the end of an error about a text that is given for an argument: what to write instead, or nothing.

    Examples:
        >>> _meant("DiLoCo", _STRATEGIES, "strategy"), _meant("red", _STRATEGIES, "strategy"), _meant(3, {}, "strategy")
        ('; write strategy=sl.DiLoCo()', '', '')
    """
    text = str(given).removeprefix("torch.").lower().translate({ord(sign): None for sign in "_- "})
    near = difflib.get_close_matches(text, known, n=1, cutoff=0.75)
    return f"; write {argument}={known[near[0]]}" if near else ""


def _checked_strategy(strategy: object) -> Strategy[Any]:
    """Check the argument `strategy`, and return it. If it is None, return `EveryStep`.

    Raises:
        TypeError: `strategy` is not a strategy.
    """
    if strategy is None:
        return EveryStep()
    if isinstance(strategy, Strategy):
        return strategy
    given, hint = repr(strategy), _meant(strategy, _STRATEGIES, "strategy")
    if isinstance(strategy, type):
        given = what_it_is(strategy)
        hint = ". Create an object of this class" if issubclass(strategy, Strategy) else ""
    raise TypeError(
        f"expected strategy to be None or a strategy such as sl.LocalSGD(every=8); got {given}{hint}"
    )


def _checked_replica_check(replica_check: object, *, sharded: bool) -> ReplicaCheck | Looks | None:
    """Check the argument `replica_check`, and return it.

    Raises:
        TypeError: `replica_check` is not a `ReplicaCheck`.
        ValueError: `replica_check` repairs replicas, which `sharded=True` does not allow.
    """
    if replica_check is None or isinstance(replica_check, Looks):
        return replica_check
    if not isinstance(replica_check, ReplicaCheck):
        hint = ". Create an object of this class: sl.ReplicaCheck()" if replica_check is ReplicaCheck else ""
        raise TypeError(
            f"expected replica_check to be None or an sl.ReplicaCheck; got {replica_check!r}{hint}"
        )
    if sharded and replica_check.on_divergence == "repair":
        raise ValueError(
            "sl.ReplicaCheck(on_divergence='repair') cannot be combined with sharded=True, because with "
            "sharded=True the parameters can be in memory that several ranks use. Give on_divergence='raise' or 'warn'"
        )
    return replica_check


def _checked_on_nonfinite(policy: OnNonFinite, strategy: Strategy[Any]) -> OnNonFinite:
    """Check the argument `on_nonfinite`, and return it.

    Raises:
        TypeError: the policy is not a string.
        ValueError: the policy is unknown; or all ranks must react together, and replicas drift under the strategy.
    """
    checked_choice("on_nonfinite", policy, get_args(OnNonFinite))
    if policy not in ("ignore", "warn") and strategy.drifts:
        raise ValueError(
            f"on_nonfinite={policy!r} cannot be combined with strategy={strategy}, because under this strategy "
            "each rank steps by itself, so the ranks cannot react together. Either use strategy=sl.EveryStep(), or "
            "leave on_nonfinite out and check the gradients of each rank before its step, by "
            "ddp.clip_grad_norm_(max_norm, error_if_nonfinite=True)"
        )
    return policy


def _checked_compression(
    compression: Any, chosen: Selection, strategy: Strategy[Any], *, sharded: bool
) -> Compression | None:
    """Check the argument `compression`, and return it.

    Raises:
        TypeError: `compression` is not a compression.
        ValueError: the module is sharded, or has gradients that cannot be compressed, or the strategy averages none.
    """
    if compression is None:
        return None
    if not isinstance(compression, Compression):
        raise TypeError(
            f"expected compression to be None or a compression of sl.compression; got {compression!r}"
            f"{_meant(compression, _COMPRESSIONS, 'compression')}"
        )
    if sharded:
        raise ValueError(
            "sharded=True cannot be combined with compression=, because with sharded=True each rank receives only its "
            "shard of the mean, and a compression computes the whole mean. Leave out one of the two arguments"
        )
    if not strategy.averages_gradients:
        raise ValueError(
            f"compression= encodes gradients, but strategy={strategy} never averages any. Leave compression= out, use "
            "a synchronous warm-up (warmup=100), or use sl.DiLoCo(compression=...), which encodes what it sends"
        )
    if chosen.sparse:
        raise ValueError(
            f"compression= cannot encode sparse gradients, and these parameters have sparse gradients: "
            f"{', '.join(sorted(chosen.sparse))}. Create their layers with sparse=False, or leave compression= out"
        )
    for name, parameter in chosen.reduced:
        if not parameter.dtype.is_floating_point:
            raise ValueError(
                f"compression= encodes only gradients of a real floating-point dtype, but the parameter {name} has "
                f"dtype {parameter.dtype}. Leave compression= out"
            )
    return compression


def _check_not_shared(module: nn.Module) -> None:
    """Raise an error if the ranks of a host use one copy of the parameters, because each of them would step that copy.

    Raises:
        ValueError: the ranks of a host use one copy of the parameters, which `sl.share_` made.
    """
    copy = one_copy_of(module)
    if copy is not None and copy.is_common:
        raise ValueError(
            f"sl.share_ has given the ranks of a host one copy of the parameters of {type(module).__name__}. Without "
            "sharded=True, each of these ranks would step the whole copy. Give sharded=True"
        )


def _check_sharded(config: Config, chosen: Selection, *, lowers: bool, skips_unused: bool) -> None:
    """Raise an error if `sharded=True` cannot be combined with another argument, or with the parameters of the module.

    Args:
        config: the configuration of the wrapper.
        chosen: the tensors that are synchronized.
        lowers: whether `mixed_precision` is given.
        skips_unused: whether `skip_all_reduce_unused_params` is True.

    Raises:
        ValueError: an argument or a parameter does not allow `sharded=True`. The text names it.
    """
    floating = {p.dtype for _, p in chosen.reduced if p.dtype.is_floating_point}
    sparse = ", ".join(sorted(chosen.sparse))
    casts_several = config.gradients.reduce_dtype is not None and len(floating) > 1
    refused = {
        f"strategy={config.strategy}, because replicas that consist of shards cannot drift": config.strategy.drifts,
        "mixed_precision=, because the low-precision copies need the whole parameters": lowers,
        "skip_all_reduce_unused_params=True, because every bucket is reduced in every step": skips_unused,
        f"sparse gradients (of {sparse}), because they cannot be cut into flat shards": bool(sparse),
        "reduce_dtype=, because the parameters have several dtypes": casts_several,
    }
    for what, is_given in refused.items():
        if is_given:
            raise ValueError(f"sharded=True cannot be combined with {what}. Use only one of the two")
    ranges = sorted(
        (p.device.index or 0, p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), name)
        for name, p in chosen.reduced
        if p.numel()
    )
    for (device, _, end, first), (other_device, start, _, second) in pairwise(ranges):
        if device == other_device and start < end:
            raise ValueError(
                f"the parameters {first} and {second} use the same memory, but sharded=True would move them to "
                "separate memory. Let the module use one parameter in both places, or give each its own memory"
            )
