"""The arguments of DistributedDataParallel, checked by torch's rules on each rank before any communication."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from syncline._torch.modules import is_slice, prepare_for_tensor_parallel
from syncline.buffers.policies import BufferPolicy
from syncline.checks import checked_choice, checked_kind, checked_number, checked_truth, what_it_is
from syncline.compression import Compression
from syncline.ddp.selection import Selection
from syncline.gradients.bucket_plan import MIB, BucketCaps
from syncline.gradients.options import OnNonFinite
from syncline.gradients.riders.replica_watch import ReplicaCheck
from syncline.sharded.one_copy import one_copy_of
from syncline.strategies import EveryStep, Strategy
from syncline.transport.base import Transport

__all__ = [
    "check_compression",
    "check_reduce_dtype",
    "check_sharded",
    "checked_buffers",
    "checked_caps",
    "checked_delayed",
    "checked_device_ids",
    "checked_on_nonfinite",
    "checked_replica_check",
    "checked_strategy",
    "checked_truths",
    "group_of_mesh",
]


def checked_truths(**given: object) -> list[bool]:
    """Return torch's boolean arguments, checked, in the order in which they are given (see `checked_truth`)."""
    return [checked_truth(name, value) for name, value in given.items()]


def checked_delayed(named: Any, trigger: nn.Parameter | None) -> Sequence[tuple[str, nn.Parameter]]:
    """Return the parameters whose gradients are reduced last, by torch's rules."""
    if (named is None) != (trigger is None):
        raise ValueError(
            "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time"
        )
    if named is None:
        return ()
    checked_kind("param_to_hook_all_reduce", trigger, Tensor, "a parameter")
    pairs: list[Any] = list(named) if isinstance(named, Iterable) and not isinstance(named, str) else [None]
    if not all(
        isinstance(pair, Sequence) and [isinstance(pair[0], str), len(pair)] == [True, 2] for pair in pairs
    ):
        raise TypeError(
            f"expected delay_all_reduce_named_params to be pairs of a name and a parameter, got {named!r}"
        )
    return pairs


def check_reduce_dtype(reduce_dtype: object) -> None:
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


def checked_device_ids(
    module: nn.Module,
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
) -> tuple[list[int] | None, int | None]:
    """Return the devices of inputs and outputs, by torch's rules; None leaves them where they are."""
    is_list = isinstance(device_ids, Sequence) and not isinstance(device_ids, str)
    if device_ids is not None and not (is_list and all(map(_is_device, device_ids))):
        raise TypeError(f"expected device_ids to be a list of one device, or None, got {device_ids!r}")
    if output_device is not None and not _is_device(output_device):
        raise TypeError(f"expected output_device to be a device, or None, got {output_device!r}")
    devices = {p.device for p in module.parameters()}
    types = {device.type for device in devices}
    if not device_ids and not output_device:  # as in torch, 0 counts as not given, even on CPU
        return None, None
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(
            f"device_ids can only be None or contain a single element, got {list(device_ids)}: one process drives "
            "one device"
        )
    if len(devices) > 1 or types == {"cpu"}:
        where = ", ".join(sorted(map(str, devices)))
        raise ValueError(
            "DistributedDataParallel device_ids and output_device arguments only work with single-device GPU modules; "
            f"this one lives on {where}, got device_ids={device_ids}, output_device={output_device}: leave them out"
        )
    if not device_ids:
        return None, None
    first = _index_of(device_ids[0])
    return [first], first if output_device is None else _index_of(output_device)


def _is_device(device: object) -> bool:
    return isinstance(device, int | str | torch.device) and not isinstance(device, bool)


def _index_of(device: int | torch.device) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


def checked_buffers(
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
            stacklevel=3,
        )
    if buffers is not None:
        checked_choice("buffers", buffers, get_args(BufferPolicy))
    init_buffers = True
    if forward_sync_buffers is None:
        init_buffers = forward_sync_buffers = broadcast_buffers is not False
    return buffers or ("broadcast" if forward_sync_buffers else "none"), init_buffers


def checked_caps(bucket_cap_mb: float | None, listed_mb: Any) -> BucketCaps | None:
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


def checked_strategy(strategy: object) -> Strategy[Any]:
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


def checked_replica_check(replica_check: object, *, sharded: bool) -> ReplicaCheck | None:
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
            "sl.ReplicaCheck(on_divergence='repair') does not go with sharded=True, where parameters lie in memory "
            "that ranks share: give on_divergence='raise' or 'warn'"
        )
    return replica_check


def checked_on_nonfinite(policy: OnNonFinite, strategy: Strategy[Any]) -> OnNonFinite:
    """Return the policy for gradients that are not finite.

    Raises:
        TypeError, ValueError: there is no such policy, or replicas drift under the strategy, so that ranks do not agree
            on anything in a backward.
    """
    checked_choice("on_nonfinite", policy, get_args(OnNonFinite))
    if policy != "ignore" and strategy.drifts:
        raise ValueError(
            f"on_nonfinite={policy!r} does not go with strategy={strategy}, under which ranks step by themselves and "
            "agree on nothing in a backward: leave it out, and look at the gradients of each rank before its step "
            "(ddp.clip_grad_norm_(max_norm, error_if_nonfinite=True)); or use EveryStep()"
        )
    return policy


def check_compression(compression: object, chosen: Selection, *, sharded: bool) -> None:
    """Raise if these gradients cannot be compressed."""
    if compression is None:
        return
    if not isinstance(compression, Compression):
        raise TypeError(f"expected compression to be one of sl.compression, or None, got {compression!r}")
    if sharded:
        raise ValueError(
            "sharded=True does not go with compression= (each rank reduces its share of the gradients, which no "
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


def check_sharded(
    module: nn.Module,
    chosen: Selection,
    *,
    sharded: bool,
    num_ranks: int,
    mixed_precision: Any,
    skips_unused: bool,
    reduce_dtype: torch.dtype | None,
    strategy: Strategy[Any],
) -> None:
    """Raise if `sharded=True` cannot be combined with another argument, or if a shared module needs it."""
    if num_ranks == 1:
        return
    if not sharded:
        copy = one_copy_of(module)
        if copy is not None and copy.is_common:
            raise ValueError(
                f"the parameters of {type(module).__name__} are one copy for all ranks (sl.share_), which every rank "
                "would step: give sharded=True"
            )
        return
    named = [*chosen.trained, *chosen.delayed]
    refusals = {
        f"strategy={strategy} (there is no drift where each rank steps its share)": strategy.drifts,
        "mixed_precision= (its low-precision copies are filled from whole parameters)": mixed_precision
        is not None,
        "skip_all_reduce_unused_params=True (a share has to be reduced in every step)": skips_unused,
        f"sparse gradients ({', '.join(sorted(chosen.sparse))}), which have no flat spans": bool(
            chosen.sparse
        ),
        "reduce_dtype= for parameters of several types": reduce_dtype is not None
        and len({p.dtype for _, p in named if p.dtype.is_floating_point}) > 1,
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
                f"{first} and {second} are two parameters in the same memory; sharded=True would part them: make them "
                "one parameter (tied), or copies"
            )


def group_of_mesh(
    process_group: dist.ProcessGroup | Transport | None, device_mesh: Any, module: nn.Module
) -> dist.ProcessGroup | Transport | None:
    if device_mesh is None:
        return process_group
    checked_kind("device_mesh", device_mesh, DeviceMesh, "a torch.distributed.device_mesh.DeviceMesh")
    if process_group is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh.ndim != 1:
        raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
    if is_slice(device_mesh):
        prepare_for_tensor_parallel(module)
    group: dist.ProcessGroup = device_mesh.get_group(mesh_dim=0)
    return group
