"""DistributedDataParallel: wires a module's hooks to the parts that synchronize it.

The flow of one step is drawn in `docs/architecture.md`.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils._pytree import tree_map_only

from syncline.contract import Contract
from syncline.events import BackwardRecord
from syncline.explain import Evidence, Plan, contract_of, explain
from syncline.plan.buckets import MIB, BucketCaps, HostLoad, automatic_caps
from syncline.sync.agreement import agree, describe_tensors
from syncline.sync.buffers import BufferSync
from syncline.sync.gradients import GradientOptions, GradientSync
from syncline.sync.items import checked_num_items
from syncline.sync.tensors import TensorBroadcaster
from syncline.transport.base import Statistics, Transport
from syncline.world import transport_of, world

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(nn.Module):
    """Keeps the replicas of a module equal: gradients are averaged over all ranks during backward.

    A drop-in for `torch.nn.parallel.DistributedDataParallel`. What is synchronized when is printed by
    `print(ddp.contract)`; what happened in the last step, by `print(ddp.explain())`.

    Args:
        module: the replica on this rank; at least one parameter requires grad. Names, shapes, dtypes, strides,
            `requires_grad` and order of parameters and buffers must be the same on all ranks.
        device_ids: for a module on one accelerator, the one device its inputs are moved to. None on CPU and for
            a module on several devices.
        output_device: accepted as torch does (outputs stay where the module leaves them).
        dim: accepted as torch does; not used.
        broadcast_buffers: make buffers rank 0's, at construction and before a forward (None means True).
        init_sync: broadcast parameters and buffers from rank 0 at construction. With False the caller vouches
            that they are equal.
        process_group: the group to synchronize over: a `torch.distributed` process group, a Syncline transport,
            or None for the default group (or a world of one, where torch.distributed is not initialised).
        bucket_cap_mb: the largest bucket in MiB (of 2**20 bytes). None lets Syncline choose: on one host whose
            cores all compute, few large buckets; elsewhere 1 MiB first and 25 MiB after, as torch.
        find_unused_parameters: a parameter without gradient counts as zero instead of being an error; one that no
            rank used keeps its `.grad` untouched.
        check_reduction: deprecated in torch; accepted, not used.
        gradient_as_bucket_view: after a synchronized backward `.grad` is a view of the bucket, which saves the
            memory of one copy of all gradients, and time.
        static_graph: the set of used parameters does not change over time; implies find_unused_parameters.
        forward_sync_buffers: torch 2.13's name for the part of `broadcast_buffers` that concerns forward: with
            False, buffers are still broadcast at construction. Give one of the two.

    Raises:
        TypeError: `module` is not a `torch.nn.Module`.
        ValueError: nothing requires grad, `device_ids` does not fit the module, or a size is not positive.
        RuntimeError: the module has lazy parameters that were not initialised.
        ContractMismatch: the ranks were given different modules or arguments; the same text on every rank.

    Example:
        >>> import torch, syncline as sl
        >>> ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1))
        >>> ddp(torch.ones(3, 2)).sum().backward()
        >>> ddp.module.weight.grad
        tensor([[3., 3.]])
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | Transport | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        *,
        forward_sync_buffers: bool | None = None,
    ) -> None:
        super().__init__()
        if broadcast_buffers is not None and forward_sync_buffers is not None:
            raise ValueError(
                "expected broadcast_buffers or forward_sync_buffers, got both: the second is torch 2.13's name for "
                "the part of the first that concerns forward"
            )
        trained = _trained_parameters(module)
        self._input_device = _input_device(module, device_ids, output_device)
        caps = _checked_caps(bucket_cap_mb)
        self.module = module
        self.dim = dim
        init_buffers = broadcast_buffers is not False
        self.broadcast_buffers = init_buffers and forward_sync_buffers is not False
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self._transport = transport = transport_of(process_group)
        hosts = _gather_hosts(transport)
        options = GradientOptions(
            caps=caps or automatic_caps(hosts, device_type=trained[0][1].device.type),
            as_bucket_view=gradient_as_bucket_view,
            allow_unused=find_unused_parameters or static_graph,
        )
        buffers = BufferSync(module, transport, enabled=self.broadcast_buffers)
        num_tensors, num_bytes = _size_of(list(module.parameters()))
        self._plan = Plan(
            module=type(module).__name__,
            transport=transport.name,
            num_ranks=transport.size,
            num_hosts=len(hosts),
            num_parameters=num_tensors,
            parameter_bytes=num_bytes,
            num_gradients=len(trained),
            gradient_bytes=_size_of([p for _, p in trained])[1],
            num_buffers=buffers.size()[0],
            buffer_bytes=buffers.size()[1],
            init_sync=init_sync,
            init_buffers=init_sync and init_buffers,
            broadcast_buffers=self.broadcast_buffers,
            as_bucket_view=gradient_as_bucket_view,
            allow_unused=options.allow_unused,
        )
        _agree_on(module, contract_of(self._plan), options, transport)
        if init_sync:
            _broadcast_module(module, transport, buffers=init_buffers)
        self._gradients = GradientSync(trained, transport, options)
        self._buffers_sync = buffers
        # The hooks hold the synchronizer, never this module: dropping the wrapper takes the hooks off.
        weakref.finalize(self, self._gradients.remove_hooks)

    # ------------------------------------------------------------------ a step

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward, buffers synchronized first where that is due."""
        self._buffers_sync.before_forward(next_is_due=torch.is_grad_enabled() and self._gradients.enabled)
        if self._input_device is not None:
            device = self._input_device
            inputs, kwargs = tree_map_only(
                Tensor, lambda t: t.to(device, non_blocking=True), (inputs, kwargs)
            )
        return self.module(*inputs, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards that *run* inside only accumulate; the next one outside reduces all of it.

        What counts is where the backward runs. (torch's class reads the switch in forward.)

        Example:
            >>> import torch, syncline as sl
            >>> ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1))
            >>> with ddp.no_sync():
            ...     ddp(torch.ones(1, 2)).sum().backward()
            >>> ddp(torch.ones(1, 2)).sum().backward()
            >>> ddp.module.bias.grad
            tensor([2.])
        """
        before = self._gradients.enabled
        self._gradients.enabled = False
        try:
            yield
        finally:
            self._gradients.enabled = before

    @contextmanager
    def normalize_by(self, num_items: int) -> Iterator[None]:
        """Divide by the global number of items instead of averaging over ranks.

        Put it around forward and backward of a loss that is the *sum* over `num_items` (tokens, samples).
        `.grad` becomes the sum of the gradients over ranks and accumulated micro-batches, divided by the sum of
        their items: exact, however unequal the batches are. The counts travel with the last bucket.

        In float16 the undivided sums must fit: 65,504 is the largest number there.

        Args:
            num_items: items behind this rank's loss; 0 is fine on some ranks (run the backward all the same), on
                all of them it is an error.

        Raises:
            TypeError: not an integer.
            ValueError: negative; nested blocks; 0 items on all ranks; counted and uncounted micro-batches mixed.
            SynclineError: used on some ranks only.

        Example:
            >>> import torch, syncline as sl
            >>> ddp = sl.DistributedDataParallel(torch.nn.Linear(1, 1))
            >>> for batch in (torch.ones(3, 1), torch.ones(1, 1)):
            ...     with ddp.normalize_by(len(batch)):
            ...         ddp(batch).sum().backward()
            >>> ddp.module.weight.grad
            tensor([[1.]])
        """
        with self._gradients.normalizer.block(checked_num_items(num_items)):
            yield

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next backward synchronizes: what `no_sync` switches, and some frameworks set."""
        return self._gradients.enabled

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._gradients.enabled = value

    # ------------------------------------------------------------------ what is, and what was

    @property
    def contract(self) -> Contract:
        """What is synchronized, when and how; after the first step, with what was last done."""
        return contract_of(self._plan, self._evidence())

    def explain(self) -> str:
        """One step as a timeline, in words: recorded after the first step, planned before it."""
        return explain(
            self._plan, self._evidence(), [b.plan for b in self._gradients.buckets], self._gradients.names
        )

    @property
    def last_step(self) -> BackwardRecord | None:
        """The most recent backward as it was recorded on this rank; None before the first."""
        return self._gradients.ledger.last()

    def statistics(self) -> Statistics:
        """Collectives, bytes and time waiting, of everything that used this module's transport on this rank."""
        return self._transport.statistics()

    @property
    def device(self) -> torch.device:
        """Where the module's first parameter lives."""
        return self._gradients.parameters[0].device

    def _evidence(self) -> Evidence:
        return Evidence(
            rank=self._transport.rank,
            backward=self._gradients.ledger.last(),
            buffers=self._buffers_sync.last_forward(),
        )


# ---------------------------------------------------------------------- construction, checked


def _trained_parameters(module: object) -> list[tuple[str, nn.Parameter]]:
    """The parameters that require grad, each once, by name."""
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"expected a torch.nn.Module, got {type(module).__name__}: wrap the model itself, not its "
            "parameters, its output or its class"
        )
    lazy = [name for name, p in module.named_parameters() if isinstance(p, UninitializedParameter)]
    if lazy:
        raise RuntimeError(
            f"{type(module).__name__} has lazy parameters without a shape ({', '.join(lazy[:5])}): run one "
            "forward with a real batch, then wrap it"
        )
    trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    if not trained:
        num = len(list(module.parameters()))
        raise ValueError(
            f"{type(module).__name__} has no parameter that requires grad ({num} parameters in all), so there is "
            "nothing to reduce: use the module itself, and sl.broadcast_(module) to make ranks equal once"
        )
    for name, submodule in module.named_modules():
        if isinstance(submodule, nn.Embedding | nn.EmbeddingBag) and submodule.sparse:
            raise ValueError(
                f"{name or type(submodule).__name__} has sparse=True: sparse gradients are not reduced yet, "
                "use sparse=False"
            )
    return trained


def _input_device(
    module: nn.Module,
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
) -> torch.device | None:
    """Where inputs are moved to, by torch's rules; None leaves them alone."""
    devices = {p.device for p in module.parameters()}
    types = {device.type for device in devices}
    if not device_ids and output_device is None:
        return None
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError(
            f"expected at most one entry in device_ids, got {list(device_ids)}: one process drives one device"
        )
    if len(devices) > 1 or types == {"cpu"}:
        where = ", ".join(sorted(map(str, devices)))
        raise ValueError(
            "device_ids and output_device are for a module on one accelerator; this one lives on "
            f"{where}, got device_ids={device_ids}, output_device={output_device}: leave them out"
        )
    if not device_ids:
        return None
    (first,) = device_ids
    return first if isinstance(first, torch.device) else torch.device(types.pop(), first)


def _checked_caps(bucket_cap_mb: float | None) -> BucketCaps | None:
    if bucket_cap_mb is None:
        return None
    if not bucket_cap_mb > 0:
        raise ValueError(f"expected bucket_cap_mb above 0 (MiB), got {bucket_cap_mb}")
    cap_bytes = int(bucket_cap_mb * MIB)
    return BucketCaps(cap_bytes=cap_bytes, first_cap_bytes=cap_bytes)


def _gather_hosts(transport: Transport) -> list[HostLoad]:
    """Who shares a host with whom, and how busy its cores are; the same list on every rank."""
    mine = [world().host, len(os.sched_getaffinity(0)), torch.get_num_threads()]
    rows = [json.loads(row) for row in transport.all_gather_bytes(json.dumps(mine).encode())]
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
    return hosts


def _agree_on(module: nn.Module, contract: Contract, options: GradientOptions, transport: Transport) -> None:
    lines = [
        f"contract: {contract.title}",
        *contract.lines(),
        f"buckets: up to {options.caps.cap_bytes} bytes, the first up to {options.caps.first_cap_bytes}",
        *describe_tensors(module.named_parameters(), kind="parameter"),
        *describe_tensors(module.named_buffers(), kind="buffer"),
    ]
    agree(
        transport,
        f"DistributedDataParallel({type(module).__name__})",
        lines,
        remedy="Build the same module with the same arguments on every rank, then wrap it.",
    )


def _broadcast_module(module: nn.Module, transport: Transport, *, buffers: bool) -> None:
    tensors = [*module.parameters(), *(module.buffers() if buffers else ())]
    TensorBroadcaster([t.detach() for t in tensors], transport).start(0).wait()


def _size_of(tensors: Sequence[Tensor]) -> tuple[int, int]:
    return len(tensors), sum(t.numel() * t.element_size() for t in tensors)
