"""The steps that run once, when a module is wrapped: the ranks agree on it, and broadcast its first values."""

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
"""The title under which ranks agree. The module's name is in the lines that they compare."""

_HOST = struct.Struct("<16sII")


class Hosts(NamedTuple):
    """The hosts of the ranks."""

    loads: list[HostLoad]
    """The load of each host, sorted by a hash of the host's name."""
    of_rank: tuple[int, ...]
    """The number of each rank's host. Hosts are numbered in the order in which they first occur."""


def gather_hosts(transport: Transport) -> Hosts:
    """Return the hosts of all ranks and the load on their cores, the same on every rank. A collective call."""
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
    """Raise an error about this rank's arguments on all ranks. A collective call.

    The error is sent in place of this rank's part in `gather_hosts`, so that no other rank waits.

    Raises:
        TypeError, ValueError, SynclineError: the text of `fault`, on every rank. The class is SynclineError if `fault`
            is neither of the other two. With one rank, `fault` itself is raised.
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
    """Return the plan of a module: the facts that are known when it is wrapped."""
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
    """Return the situation, which is passed to the strategy: ranks, hosts and parameter sizes."""
    return Spec(
        rank=transport.rank,
        num_ranks=transport.size,
        hosts=hosts.of_rank,
        sizes_numel=tuple(parameter.numel() for _, parameter in (*chosen.trained, *chosen.delayed)),
    )


def plan_after_change(plan: Plan, chosen: Selection) -> Plan:
    """Return the plan of a module whose tensors have changed since it was wrapped."""
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
    """Check that every rank wraps the same module with the same options. A collective call.

    Args:
        chosen: the tensors that take part.
        contract: the contract of the module.
        options: how gradients are reduced.
        transport: connects the ranks.
        new_values: further lines to compare, from `describe_new_values`.
        remedy: advice to the user, for the error.

    Raises:
        ContractMismatch: the ranks differ. The text is the same on every rank.
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
    """Broadcast parameters from rank `src`, and buffers too if `buffers` is True. A collective call."""
    tensors = [p for _, p in chosen.parameters] + ([b for _, b in chosen.buffers] if buffers else [])
    TensorBroadcaster([t.detach() for t in tensors], transport).start(src).wait()


def describe_new_values(chosen: Selection, before: Selection) -> list[str]:
    """Return one line for each tensor that is not in `before`, with a fingerprint of its values."""
    known = {id(tensor) for _, tensor in (*before.parameters, *before.buffers)}
    new = [(name, t.detach()) for name, t in (*chosen.parameters, *chosen.buffers) if id(t) not in known]
    numbers = fingerprints([tensor for _, tensor in new])
    return [f"values of {name}: {number:016x}" for (name, _), number in zip(new, numbers, strict=True)]


def are_of_the_bare_module(keys: Sequence[str], module: nn.Module) -> bool:
    """Return whether the keys of a state_dict are those of the bare module, without the wrapper's prefix `module.`.

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
