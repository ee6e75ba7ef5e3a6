"""What happens once, when a module is wrapped: the ranks agree on it, and start from the same values."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from syncline.buffers.policies import BufferPolicy
from syncline.contract import Contract, Rules, compared_lines
from syncline.ddp.selection import Selection
from syncline.equality.fingerprint import fingerprints
from syncline.gradients.bucket_plan import HostLoad
from syncline.gradients.options import GradientOptions
from syncline.gradients.riders.replica_watch import ReplicaCheck
from syncline.report.explain import Plan, ReplicaRule, Sizes
from syncline.session.world import world
from syncline.strategies import Spec
from syncline.tensors.broadcasting import TensorBroadcaster
from syncline.transport.agreement import agree, describe_tensors, exchange
from syncline.transport.base import Transport

__all__ = [
    "TITLE",
    "Hosts",
    "agree_on_module",
    "are_of_the_bare_module",
    "broadcast_values",
    "describe_new_values",
    "gather_hosts",
    "plan_after_change",
    "plan_of",
    "refuse",
    "spec_of",
]


TITLE = "sl.DistributedDataParallel"
"""What ranks agree on; the module's name is part of the lines."""

_HOST = struct.Struct("<16sII")


class Hosts(NamedTuple):
    """On which hosts the ranks are."""

    loads: list[HostLoad]
    of_rank: tuple[int, ...]
    """The number of each rank's host, in the order in which they first occur."""


def gather_hosts(transport: Transport) -> Hosts:
    """Who shares a host with whom, and how busy its cores are; the same on every rank."""
    host = hashlib.sha256(world().host.encode()).digest()[:16]
    mine = _HOST.pack(host, len(os.sched_getaffinity(0)), torch.get_num_threads())
    rows = [_HOST.unpack_from(row) for row in exchange(transport, TITLE, [], payload=mine)]
    hosts = []
    for name in sorted({row[0] for row in rows}):
        here = [row for row in rows if row[0] == name]
        hosts.append(
            HostLoad(
                num_ranks=len(here),
                num_cores=min(row[1] for row in here),
                num_threads_per_rank=max(row[2] for row in here),
            )
        )
    names = list(dict.fromkeys(row[0] for row in rows))
    return Hosts(hosts, tuple(names.index(row[0]) for row in rows))


def refuse(transport: Transport, fault: Exception) -> NoReturn:
    """This rank's arguments make no sense: so that no other waits for it, take part in `gather_hosts` and say why.

    Raises:
        TypeError, ValueError: on every rank.
    """
    if transport.size > 1:
        exchange(transport, TITLE, [], fault=fault)
    raise fault


def plan_of(
    module: nn.Module,
    chosen: Selection,
    options: GradientOptions,
    transport: Transport,
    *,
    num_hosts: int,
    init_sync: bool,
    init_buffers: bool,
    buffer_policy: BufferPolicy,
    rules: Rules | None,
    compression: str | None,
    replica_check: ReplicaCheck | None,
) -> Plan:
    """What is known when a module is wrapped."""
    return Plan(
        module=type(module).__name__,
        transport=transport.name,
        num_ranks=transport.size,
        num_hosts=num_hosts,
        sizes=_sizes(chosen),
        init_sync=init_sync,
        init_buffers=init_buffers,
        buffer_policy=buffer_policy,
        as_bucket_view=options.as_bucket_view,
        allow_unused=options.allow_unused,
        sharded=options.sharded,
        on_nonfinite=options.on_nonfinite,
        rules=rules,
        compression=compression,
        replica_check=None
        if replica_check is None
        else ReplicaRule(replica_check.every, replica_check.on_divergence),
        reduce_dtype=None
        if options.reduce_dtype is None
        else str(options.reduce_dtype).removeprefix("torch."),
    )


def spec_of(chosen: Selection, transport: Transport, hosts: Hosts) -> Spec:
    """What a strategy is told of the situation."""
    return Spec(
        rank=transport.rank,
        num_ranks=transport.size,
        hosts=hosts.of_rank,
        sizes_numel=tuple(parameter.numel() for _, parameter in (*chosen.trained, *chosen.delayed)),
    )


def plan_after_change(plan: Plan, chosen: Selection) -> Plan:
    """The plan of a module whose tensors have changed since it was wrapped."""
    return replace(plan, sizes=_sizes(chosen))


def agree_on_module(
    chosen: Selection,
    contract: Contract,
    options: GradientOptions,
    transport: Transport,
    *,
    new_values: Sequence[str] = (),
    remedy: str = "Build the same module with the same arguments on every rank, then wrap it.",
) -> None:
    """Check that every rank wraps the same; a collective call.

    Raises:
        ContractMismatch: they do not; the same text on every rank.
    """
    lines = [
        f"contract: {contract.title}",
        *compared_lines(contract),
        f"buckets: up to {options.caps.cap_bytes} bytes, the first up to {options.caps.of(0)}",
        f"caps of the first buckets: {list(options.caps.listed_bytes)}",
        f"static graph: {options.static_graph}, sparse: {sorted(options.sparse)}, delayed: {sorted(options.delayed)}",
        f"unused buckets are skipped: {options.skip_unused}",
        *(f"ignored: {name}" for name in chosen.ignored),
        *describe_tensors(chosen.parameters, kind="parameter"),
        *describe_tensors(chosen.buffers, kind="buffer"),
        *new_values,
    ]
    agree(
        transport,
        TITLE,
        lines,
        remedy=remedy,
    )


def broadcast_values(chosen: Selection, transport: Transport, *, src: int, buffers: bool) -> None:
    """Make parameters, and buffers if asked, those of rank `src`."""
    tensors = [p for _, p in chosen.parameters] + ([b for _, b in chosen.buffers] if buffers else [])
    TensorBroadcaster([t.detach() for t in tensors], transport).start(src).wait()


def describe_new_values(chosen: Selection, before: Selection) -> list[str]:
    """One line for each tensor that `before` did not have yet, with a fingerprint of its values."""
    known = {id(tensor) for _, tensor in (*before.parameters, *before.buffers)}
    new = [(name, t.detach()) for name, t in (*chosen.parameters, *chosen.buffers) if id(t) not in known]
    numbers = fingerprints([tensor for _, tensor in new])
    return [f"values of {name}: {number:016x}" for (name, _), number in zip(new, numbers, strict=True)]


def are_of_the_bare_module(keys: Sequence[str], module: nn.Module) -> bool:
    """Whether keys of a state_dict are the module's own, without the wrapper's `module.` before them.

    Example:
        >>> net = nn.Sequential()
        >>> net.module = nn.Linear(1, 1)  # its own keys look like a wrapper's
        >>> are_of_the_bare_module(["module.weight"], net), are_of_the_bare_module(["module.module.weight"], net)
        (True, False)
    """
    if not any(key.startswith("module.") for key in keys):
        return True
    if "module" not in module._modules:
        return False
    own = set(module.state_dict(keep_vars=True))
    num_bare = sum(key in own for key in keys)
    return num_bare > sum(key.removeprefix("module.") in own for key in keys if key.startswith("module."))


def _sizes(chosen: Selection) -> Sizes:
    reduced = [*chosen.trained, *chosen.delayed]
    return Sizes(
        num_parameters=len(chosen.parameters),
        parameter_bytes=_num_bytes(chosen.parameters),
        num_gradients=len(reduced),
        gradient_bytes=_num_bytes(reduced),
        num_buffers=len(chosen.buffers),
        buffer_bytes=_num_bytes(chosen.buffers),
    )


def _num_bytes(named: Sequence[tuple[str, Tensor]]) -> int:
    return sum(tensor.numel() * tensor.element_size() for _, tensor in named)
