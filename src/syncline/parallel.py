"""DistributedDataParallel: wires a module's hooks to the parts that synchronize it.

The flow of one step is drawn in `docs/architecture.md`. What torch's class is asked for under private names is in
`torch_names.py`.
"""

from __future__ import annotations

import json
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.utils._pytree import tree_map_only

from syncline.contract import Contract
from syncline.events import BackwardRecord
from syncline.explain import Evidence, Plan, contract_of, explain
from syncline.plan.buckets import MIB, BucketCaps, HostLoad, automatic_caps
from syncline.sync.agreement import agree, describe_tensors
from syncline.sync.buffers import BufferPolicy, BufferSync
from syncline.sync.comm_hook import CommHook, checked_comm_hook
from syncline.sync.compilation import NotTraced
from syncline.sync.gradients import GradientOptions, GradientSync
from syncline.sync.in_backward import optimizers_in_backward
from syncline.sync.items import checked_num_items
from syncline.sync.join import Iteration, ShadowHook, agree_on_iteration
from syncline.sync.mixed_precision import MixedPrecision
from syncline.sync.outputs import tensors_in
from syncline.sync.selection import Selection, select
from syncline.sync.tensors import TensorBroadcaster
from syncline.torch_names import TorchNames
from syncline.transport.base import Statistics, Transport
from syncline.world import transport_of, world

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(TorchNames, nn.parallel.DistributedDataParallel):  # type: ignore[misc, override]
    """Keeps the replicas of a module equal: gradients are averaged over all ranks during backward.

    A drop-in for `torch.nn.parallel.DistributedDataParallel`, of which it is a subclass so that `isinstance` and
    the frameworks that rely on it see what they look for; nothing of torch's reducer runs. What is synchronized when
    is printed by `print(ddp.contract)`; what happened in the last step, by `print(ddp.explain())`.
    `docs/compatibility.md` goes through torch's arguments and methods one by one.

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
        static_graph: which parameters get gradients, and how often in one backward, does not change over time: it is
            learnt in the first. Allows re-entrant and repeated checkpoints; implies find_unused_parameters.
        delay_all_reduce_named_params: named parameters whose gradients travel last, in buckets of their own.
        param_to_hook_all_reduce: torch's trigger for those; given with them or not at all.
        mixed_precision: torch's `_MixedPrecision`: forward on low-precision copies of the parameters.
        device_mesh: a mesh of one dimension instead of `process_group`.
        skip_all_reduce_unused_params: accepted; what no rank used is not touched in any case.
        bucket_cap_mb_list: caps in MiB of the first buckets, one by one.
        batched_grad_copy: accepted; gradients are copied in batches in any case.
        lazy_bucket_allocation: torch 2.15's; accepted, buckets are allocated here.
        forward_sync_buffers: torch 2.13's name for the part of `broadcast_buffers` that concerns forward: with
            False, buffers are still broadcast at construction. Wins over `broadcast_buffers`.
        buffers: what becomes of buffers before a forward: "broadcast" (rank 0's, as in torch), "average" (running
            statistics pooled, see `docs/buffers.md`) or "none". Not together with torch's two arguments for it.
        ignore: names or shell patterns (`"head.*"`) of parameters and buffers that are left alone: neither broadcast
            nor reduced. The same on all ranks.
        reduce_dtype: what floating gradients are added up in, say torch.float32 for a bfloat16 module; None means
            their own type.

    Raises:
        TypeError: `module` is not a `torch.nn.Module`.
        ValueError: `device_ids` does not fit the module, a size is not positive, or a pattern matches nothing.
        RuntimeError: nothing requires grad, or the module has lazy parameters that were not initialised.
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
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        lazy_bucket_allocation: bool = False,
        buffers: BufferPolicy | None = None,
        ignore: Sequence[str] = (),
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)  # torch's own __init__ would build its reducer
        Joinable.__init__(self)
        if (delay_all_reduce_named_params is None) != (param_to_hook_all_reduce is None):
            raise ValueError(
                "delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time"
            )
        if check_reduction:
            warnings.warn(
                "check_reduction is deprecated in torch and not used: every reduction is checked",
                FutureWarning,
                stacklevel=2,
            )
        chosen = select(module, ignore=ignore, delayed=delay_all_reduce_named_params or ())
        self.device_ids, self.output_device = _checked_device_ids(module, device_ids, output_device)
        caps = _checked_caps(bucket_cap_mb, bucket_cap_mb_list)
        group = _group_of_mesh(process_group, device_mesh, module)
        self._buffer_policy, init_buffers = _checked_buffers(buffers, broadcast_buffers, forward_sync_buffers)
        self.module = module
        self.dim = dim
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.mixed_precision = mixed_precision
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.batched_grad_copy = batched_grad_copy
        self.parameters_to_ignore = set(chosen.ignored)
        self._lowered = (
            None
            if mixed_precision is None
            else MixedPrecision(module, mixed_precision, self.parameters_to_ignore)
        )
        if reduce_dtype is None and self._lowered is not None:
            reduce_dtype = self._lowered.reduce_dtype
        self._transport = transport = transport_of(group)
        hosts = _gather_hosts(transport)
        first_type = [*chosen.trained, *chosen.delayed][0][1].device.type
        self._options = GradientOptions(
            caps=caps or automatic_caps(hosts, device_type=first_type),
            as_bucket_view=gradient_as_bucket_view,
            allow_unused=find_unused_parameters or static_graph,
            static_graph=static_graph,
            reduce_dtype=reduce_dtype,
            sparse=chosen.sparse,
            delayed=frozenset(name for name, _ in chosen.delayed),
        )
        self._plan = _plan_of(
            module,
            chosen,
            self._options,
            transport,
            num_hosts=len(hosts),
            init_sync=init_sync,
            init_buffers=init_sync and init_buffers,
            buffer_policy=self._buffer_policy,
        )
        _agree_on(module, chosen, contract_of(self._plan), self._options, transport)
        if init_sync:
            _broadcast(chosen, transport, src=0, buffers=init_buffers)
        self._wire(chosen)

    def _wire(self, chosen: Selection) -> None:
        """Put the hooks on. Not a collective."""
        self._selection = chosen
        self._gradients = GradientSync([*chosen.trained, *chosen.delayed], self._transport, self._options)
        self._buffers_sync = BufferSync(
            self.module, self._transport, policy=self._buffer_policy, ignored=self.parameters_to_ignore
        )
        self._is_agreed = False
        self._hooks_finalizer = weakref.finalize(self, self._gradients.remove_hooks)

    def _wire_again(self) -> None:
        """The same tensors with new hooks, over `_transport` and by `_options` as they are now."""
        delayed = [(n, p) for n, p in self.module.named_parameters() if n in self._options.delayed]
        self._wire(select(self.module, ignore=sorted(self.parameters_to_ignore), delayed=delayed))

    # ------------------------------------------------------------------ a step

    @NotTraced
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward, buffers synchronized first where that is due."""
        synchronizes = torch.is_grad_enabled() and self._gradients.enabled
        if synchronizes and not self._is_agreed and not self._join_config.enable:
            self._agree_before_the_first_step()
        self._gradients.forward_begins()
        if self._join_config.enable:
            self._before_joined_forward(synchronizes=synchronizes)
        elif self._buffer_hook is None:
            self._buffers_sync.before_forward(next_is_due=synchronizes)
        else:
            self._run_buffer_hook(next_is_due=synchronizes)
        if self.device_ids:
            device = torch.device(self.device_type, self.device_ids[0])
            inputs, kwargs = tree_map_only(
                Tensor, lambda t: t.to(device, non_blocking=True), (inputs, kwargs)
            )
        with self._inside_ddp_forward():
            output = (
                self.module(*inputs, **kwargs) if self._lowered is None else self._lowered(inputs, kwargs)
            )
        if self._buffer_hook is not None:
            self._run_buffer_hook_after_forward()
        if self.static_graph and torch.is_grad_enabled():
            # A re-entrant checkpoint's backward runs inside of the one that begins at an output.
            for tensor in tensors_in(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._outermost_begins)
        return output

    def _outermost_begins(self, _: Tensor) -> None:
        self._gradients.outermost_begins()

    def _agree_before_the_first_step(self) -> None:
        """What was registered after construction must be the same on all ranks."""
        self._is_agreed = True
        step = optimizers_in_backward(self._gradients.parameters)
        hook = self._gradients.comm_hook
        agree(
            self._transport,
            f"DistributedDataParallel({type(self.module).__name__}), before its first step",
            [
                f"communication hook: {'none' if hook is None else hook.name}",
                f"buffer hook: {'none' if self._buffer_hook is None else self._buffer_hook.name}",
                f"optimizers step inside backward: {'no' if step is None else 'yes'}",
            ],
            remedy="Register the same on every rank, before the first forward.",
        )
        self._gradients.on_reduced = step

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let `hook(state, bucket)` reduce each bucket in place of all_reduce, as in torch.

        The hook gets undivided gradients (a `GradBucket` with torch's methods), divides by itself, and returns a
        `torch.futures.Future` of the reduced flat tensor. Register it on all ranks, once, before the first
        backward. The hooks that torch ships call torch.distributed themselves, over the group they are given.

        Args:
            state: handed to the hook in each call.
            hook: the hook.

        Raises:
            TypeError: not callable.
            ValueError: annotations that say it is something else.
            RuntimeError: there is one already, or a backward has synchronized.

        Example:
            >>> import torch, syncline as sl
            >>> def as_they_are(state, bucket):
            ...     future = torch.futures.Future()
            ...     future.set_result(bucket.buffer())
            ...     return future
            >>> ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1))
            >>> ddp.register_comm_hook(None, as_they_are)
            >>> print(ddp.contract["gradients"].how)
            by communication hook as_they_are
        """
        self._use_comm_hook(checked_comm_hook(state, hook))

    def _use_comm_hook(self, hook: CommHook) -> None:
        self._gradients.use_comm_hook(hook)
        self._plan = replace(self._plan, comm_hook=hook.name)

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
        hook = self._gradients.comm_hook
        if hook is not None:
            raise ValueError(
                f"normalize_by cannot divide what communication hook {hook.name} reduces: the hook divides by itself. "
                "Use one or the other"
            )
        with self._gradients.normalizer.block(checked_num_items(num_items)):
            yield

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next backward synchronizes: what `no_sync` switches, and some frameworks set."""
        return self._gradients.enabled

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._gradients.enabled = value

    @property
    def require_forward_param_sync(self) -> bool:
        """Whether the next forward may synchronize buffers: the previous one ran outside of no_sync and no_grad."""
        return self._buffers_sync.due

    @require_forward_param_sync.setter
    def require_forward_param_sync(self, value: bool) -> None:
        self._buffers_sync.due = value

    @property
    def forward_sync_buffers(self) -> bool:
        """Whether forwards synchronize buffers."""
        return self._buffers_sync.enabled

    @forward_sync_buffers.setter
    def forward_sync_buffers(self, value: bool) -> None:
        self._buffers_sync.enabled = value

    broadcast_buffers = forward_sync_buffers

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward sends buffers."""
        return self._buffers_sync.due and self._buffers_sync.enabled and bool(self._selection.buffers)

    def equalize_buffers_(self) -> None:
        """Make the buffers of all ranks equal now, by their policy ("none": rank 0's); a collective call.

        After the last step each rank has the running statistics of its own last batch: call it before a checkpoint
        or an evaluation.
        """
        self._buffers_sync.equalize()

    # ------------------------------------------------------------------ uneven inputs

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> AbstractContextManager[Any]:
        """A context in which ranks may run out of inputs at different times, as in torch.

        A rank that leaves its loop early takes part in the others' collectives with zeros until all are done; then
        the model of the last one becomes everybody's.

        Args:
            divide_by_initial_world_size: divide gradients by the number of all ranks; with False, by that of the
                ranks that still have inputs.
            enable: with False the context does nothing.
            throw_on_early_termination: raise on every rank as soon as one has no inputs left.

        Raises:
            ValueError: the module is not synchronized over a torch.distributed group.
        """
        if not enable or self._transport.size == 1:
            return nullcontext()
        if self.process_group is None:
            raise ValueError(
                f"join needs a torch.distributed process group; this module is synchronized over {self._plan.transport}"
            )
        return Join(
            [self],
            throw_on_early_termination=throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For `torch.distributed.algorithms.join.Join`, also beside other joinables."""
        self._has_joined = True
        self._divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        if not self._is_agreed:  # now, for a rank without any input has no first forward
            self._agree_before_the_first_step()
        return ShadowHook(self._transport, self._gradients, self._sync_buffers_of, self._make_all_equal_to)

    @property
    def join_device(self) -> torch.device:
        """Where `Join` puts its own tensors."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """What `Join` counts over."""
        assert self.process_group is not None
        return self.process_group

    def _before_joined_forward(self, *, synchronizes: bool) -> None:
        work = Join.notify_join_context(self)
        if work is not None:
            work.wait()
            if not self._divide_by_initial_world_size:
                self._gradients.num_contributing = int(work.result()[0].item())
        iteration = agree_on_iteration(self._transport, has_inputs=True, synchronizes=synchronizes)
        self._sync_buffers_of(iteration)

    def _sync_buffers_of(self, iteration: Iteration) -> None:
        self._buffers_sync.before_forward(next_is_due=iteration.synchronizes, src=iteration.buffers_from)

    def _make_all_equal_to(self, src: int) -> None:
        self._authoritative_rank = src
        _broadcast(self._selection, self._transport, src=src, buffers=self.forward_sync_buffers)

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

    def _evidence(self) -> Evidence:
        return Evidence(
            rank=self._transport.rank,
            backward=self._gradients.ledger.last(),
            buffers=self._buffers_sync.last_forward(),
        )

    def train(self, mode: bool = True) -> Self:
        """As `torch.nn.Module.train`."""
        nn.Module.train(self, mode)
        return self

    # ------------------------------------------------------------------ saved and loaded

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Keys come with `module.` before them, as torch's class writes them, or without."""
        wanted = f"{prefix}module."
        if not any(key.startswith(wanted) for key in state_dict):
            for key in [key for key in state_dict if key.startswith(prefix)]:
                state_dict[wanted + key.removeprefix(prefix)] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __getstate__(self) -> dict[str, Any]:
        if self._transport is not transport_of(None):
            raise RuntimeError(
                "a wrapper can be pickled or copied only over the default group: copy its module, and wrap the copy"
            )
        state = dict(self.__dict__)
        for name in ("_gradients", "_buffers_sync", "_transport", "_selection", "_hooks_finalizer"):
            del state[name]  # they hold hooks and connections
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Over the default group. A communication hook has to be registered again."""
        nn.Module.__setstate__(self, state)
        self._transport = transport_of(None)
        self._plan = replace(self._plan, comm_hook=None)
        self._wire_again()


# ---------------------------------------------------------------------- construction, checked


def _checked_device_ids(
    module: nn.Module,
    device_ids: Sequence[int | torch.device] | None,
    output_device: int | torch.device | None,
) -> tuple[list[int] | None, int | None]:
    """Where inputs are moved to, by torch's rules; None leaves them alone."""
    devices = {p.device for p in module.parameters()}
    types = {device.type for device in devices}
    if not device_ids and output_device is None:
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


def _index_of(device: int | torch.device) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


def _checked_buffers(
    buffers: BufferPolicy | None, broadcast_buffers: bool | None, forward_sync_buffers: bool | None
) -> tuple[BufferPolicy, bool]:
    """What becomes of buffers before a forward, and whether they are broadcast at construction."""
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
    init_buffers = True
    if forward_sync_buffers is None:
        init_buffers = forward_sync_buffers = broadcast_buffers is not False
    return buffers or ("broadcast" if forward_sync_buffers else "none"), init_buffers


def _checked_caps(bucket_cap_mb: float | None, listed_mb: Sequence[float] | None) -> BucketCaps | None:
    if listed_mb is not None and (not listed_mb or any(not cap > 0 for cap in listed_mb)):
        raise ValueError(f"expected bucket_cap_mb_list to hold sizes above 0 (MiB), got {list(listed_mb)}")
    if bucket_cap_mb is not None and not bucket_cap_mb > 0:
        raise ValueError(f"expected bucket_cap_mb above 0 (MiB), got {bucket_cap_mb}")
    listed_bytes = tuple(int(cap * MIB) for cap in listed_mb or ())
    if bucket_cap_mb is None:
        if not listed_bytes:
            return None
        return BucketCaps(
            cap_bytes=listed_bytes[-1], first_cap_bytes=listed_bytes[0], listed_bytes=listed_bytes
        )
    cap_bytes = int(bucket_cap_mb * MIB)
    return BucketCaps(cap_bytes=cap_bytes, first_cap_bytes=cap_bytes, listed_bytes=listed_bytes)


def _group_of_mesh(
    process_group: dist.ProcessGroup | Transport | None, device_mesh: Any, module: nn.Module
) -> dist.ProcessGroup | Transport | None:
    if device_mesh is None:
        return process_group
    if process_group is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh.ndim != 1:
        raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
    if device_mesh._get_root_mesh() != device_mesh:  # a slice of one with tensor parallelism
        from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

        _pre_dp_module_transform(module)
    group: dist.ProcessGroup = device_mesh.get_group(mesh_dim=0)
    return group


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


def _plan_of(
    module: nn.Module,
    chosen: Selection,
    options: GradientOptions,
    transport: Transport,
    *,
    num_hosts: int,
    init_sync: bool,
    init_buffers: bool,
    buffer_policy: BufferPolicy,
) -> Plan:
    num_tensors, num_bytes = _size_of([p for _, p in chosen.parameters])
    num_buffers, buffer_bytes = _size_of([b for _, b in chosen.buffers])
    reduced = [p for _, p in (*chosen.trained, *chosen.delayed)]
    return Plan(
        module=type(module).__name__,
        transport=transport.name,
        num_ranks=transport.size,
        num_hosts=num_hosts,
        num_parameters=num_tensors,
        parameter_bytes=num_bytes,
        num_gradients=len(reduced),
        gradient_bytes=_size_of(reduced)[1],
        num_buffers=num_buffers,
        buffer_bytes=buffer_bytes,
        init_sync=init_sync,
        init_buffers=init_buffers,
        buffer_policy=buffer_policy,
        as_bucket_view=options.as_bucket_view,
        allow_unused=options.allow_unused,
        reduce_dtype=None
        if options.reduce_dtype is None
        else str(options.reduce_dtype).removeprefix("torch."),
    )


def _agree_on(
    module: nn.Module,
    chosen: Selection,
    contract: Contract,
    options: GradientOptions,
    transport: Transport,
) -> None:
    lines = [
        f"contract: {contract.title}",
        *contract.lines(),
        f"buckets: up to {options.caps.cap_bytes} bytes, the first up to {options.caps.of(0)}",
        f"caps of the first buckets: {list(options.caps.listed_bytes)}",
        f"static graph: {options.static_graph}, sparse: {sorted(options.sparse)}, delayed: {sorted(options.delayed)}",
        *(f"ignored: {name}" for name in chosen.ignored),
        *describe_tensors(chosen.parameters, kind="parameter"),
        *describe_tensors(chosen.buffers, kind="buffer"),
    ]
    agree(
        transport,
        f"DistributedDataParallel({type(module).__name__})",
        lines,
        remedy="Build the same module with the same arguments on every rank, then wrap it.",
    )


def _broadcast(chosen: Selection, transport: Transport, *, src: int, buffers: bool) -> None:
    tensors = [p for _, p in chosen.parameters] + ([b for _, b in chosen.buffers] if buffers else [])
    TensorBroadcaster([t.detach() for t in tensors], transport).start(src).wait()


def _size_of(tensors: Sequence[Tensor]) -> tuple[int, int]:
    return len(tensors), sum(t.numel() * t.element_size() for t in tensors)
