"""DistributedDataParallel: connects a module to the parts that synchronize it.

A `Replica` (`replica.py`) holds those parts. The names of torch's class that frameworks use without documentation are
in `torch_names.py`. `docs/architecture.md` draws the flow of one step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.optim import Optimizer

from syncline._torch.compilation import NotTraced
from syncline._torch.modules import is_in_join, while_in_forward_of_ddp, with_join_disabled
from syncline._torch.tensors import tree_map_only
from syncline.buffers.policies import BufferPolicy
from syncline.checks import checked_flag, checked_number, checked_truth
from syncline.compression import Compression
from syncline.contract import Contract
from syncline.ddp.arguments import (
    check_compression,
    check_reduce_dtype,
    check_sharded,
    checked_buffers,
    checked_caps,
    checked_delayed,
    checked_device_ids,
    checked_on_nonfinite,
    checked_replica_check,
    checked_strategy,
    checked_truths,
    group_of_mesh,
)
from syncline.ddp.join import NOT_WITH_JOIN, JoinBlock, ShadowHook, joined_forward_begins
from syncline.ddp.mixed_precision import MixedPrecision
from syncline.ddp.replica import NOT_COPIED, Replica
from syncline.ddp.selection import select
from syncline.ddp.torch_names import TorchNames
from syncline.ddp.wrapping import are_of_the_bare_module, broadcast_values, gather_hosts, refuse
from syncline.gradients.bucket_plan import automatic_caps
from syncline.gradients.comm_hook import checked_comm_hook
from syncline.gradients.options import GradientOptions, OnNonFinite
from syncline.gradients.outputs import when_backward_reaches_any
from syncline.gradients.riders.items import checked_num_items
from syncline.gradients.riders.metrics import check_metric
from syncline.gradients.riders.replica_watch import ReplicaCheck
from syncline.gradients.wrapper_protocol import SynchronizedModule
from syncline.liveness.board import EVAL_FORWARD, FORWARD
from syncline.records import BackwardRecord, RoundRecord
from syncline.report.explain import contract_of, explain
from syncline.session.world import transport_of
from syncline.sharded.one_copy import OneCopy, remember_one_copy
from syncline.strategies import Strategy
from syncline.transport.agreement import agree
from syncline.transport.base import Transport
from syncline.transport.statistics import Statistics

__all__ = ["DistributedDataParallel"]


AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


class DistributedDataParallel(TorchNames, SynchronizedModule, nn.parallel.DistributedDataParallel):  # type: ignore[misc, override]
    """A data-parallel wrapper. It averages gradients over all ranks during backward, which keeps the replicas equal.

    It replaces `torch.nn.parallel.DistributedDataParallel` without other changes to your code. It is a subclass of that
    class, so `isinstance` checks in frameworks succeed, but torch's reducer never runs.

    `print(ddp.contract)` shows what is synchronized and when. `print(ddp.explain())` shows what happened in the last
    step. `docs/compatibility.md` describes torch's arguments and methods one by one.

    Args:
        module: the module of this rank. At least one parameter must require grad. Names, shapes, dtypes, strides,
            `requires_grad` and order of parameters and buffers must be the same on all ranks.
        device_ids: for a module on one accelerator, the device to which its inputs are moved. None on CPU and for a
            module on several devices.
        output_device: accepted for compatibility with torch. Outputs stay where the module leaves them.
        dim: accepted for compatibility with torch. Not used.
        broadcast_buffers: broadcast buffers from rank 0 at construction and before a forward. None means True.
        init_sync: broadcast parameters and buffers from rank 0 at construction. With False, you guarantee that they
            are equal.
        process_group: the group to synchronize over: a `torch.distributed` process group or a Syncline transport. None
            is the default group, or a world of one rank if torch.distributed is not initialised.
        bucket_cap_mb: the largest size of a bucket in MiB (2**20 bytes). None lets Syncline choose. In shared memory
            it uses 8 MiB. Over Gloo, on one host whose cores all compute, it uses few large buckets. Elsewhere it uses
            1 MiB for the first bucket and 25 MiB for the rest, as in torch.
        find_unused_parameters: count a missing gradient as zero instead of raising an error. The `.grad` of a parameter
            that no rank used does not change.
        check_reduction: deprecated in torch. Accepted, not used.
        gradient_as_bucket_view: make `.grad` a view of the bucket after a synchronized backward. This saves time, and
            the memory of one copy of all gradients.
        static_graph: state that the same parameters get gradients in every backward, each the same number of times. The
            first backward records this. It allows re-entrant and repeated checkpoints, and implies
            `find_unused_parameters`.
        delay_all_reduce_named_params: named parameters whose gradients are reduced last, in separate buckets.
        param_to_hook_all_reduce: torch's trigger for the delayed parameters. Give both arguments or neither.
        mixed_precision: torch's `_MixedPrecision`. Forward runs on low-precision copies of the parameters.
        device_mesh: a mesh of one dimension, instead of `process_group`.
        skip_all_reduce_unused_params: with `find_unused_parameters`, do not send a bucket that no rank used. The ranks
            find these buckets with one small collective at the start of backward.
        bucket_cap_mb_list: caps of the first buckets in MiB, in order. The last cap applies to all further buckets, and
            `bucket_cap_mb` is not used.
        batched_grad_copy: accepted. Gradients are copied in batches in any case.
        forward_sync_buffers: torch 2.13's name for the part of `broadcast_buffers` that concerns forward. With False,
            buffers are still broadcast at construction. It overrides `broadcast_buffers`.
        lazy_bucket_allocation: accepted for compatibility with torch 2.15. Not used.
        buffers: how buffers are synchronized before a forward: "broadcast" (from rank 0, as in torch), "average"
            (running statistics are pooled, see `docs/buffers.md`) or "none". It cannot be combined with
            `broadcast_buffers` or `forward_sync_buffers`.
        compression: how gradients are encoded, one of `sl.compression`. None sends them unchanged. See
            `docs/compression.md`.
        ignore: names or shell patterns (`"head.*"`) of parameters and buffers that are neither broadcast nor reduced.
            The same on all ranks.
        reduce_dtype: the dtype in which floating-point gradients are summed, such as torch.float32 for a bfloat16
            module. None is the dtype of each gradient.
        sharded: let each rank reduce only its shard of the gradients, and step the optimizer only for that shard
            (`attach` the optimizer). On one host, all ranks use one copy of the parameters. See `docs/sharded.md`.
        strategy: when and how parameters are synchronized: `sl.LocalSGD`, `sl.DiLoCo`, `sl.Gossip`,
            `sl.ParameterServer` or `sl.Manual`. None is `sl.EveryStep()`. Under the other strategies replicas drift
            apart between two parameter syncs. Buffers are then synchronized together with the parameters, by default
            pooled (`buffers="average"`). See `docs/strategies.md`.
        replica_check: `sl.ReplicaCheck(every=100)` compares the replicas during training, one slice per step. See
            `docs/replica-check.md`.
        on_nonfinite: what all ranks do if a gradient of any rank is NaN or infinite. "ignore" does nothing, so the mean
            is not finite either. "raise" raises `NonFiniteGradient` at the end of this backward. "skip" discards the
            step of every optimizer (`attach` each of them). "zero" counts such elements as zero. All but "ignore"
            name the rank and the parameter. While a `torch.amp.GradScaler` is in use, it handles such gradients, and
            these policies do not apply. See `docs/nothing-silent.md`.

    Raises:
        TypeError: `module` is not a `torch.nn.Module`.
        ValueError: `device_ids` does not fit the module, a size is not positive, a pattern matches nothing,
            parameters are on several types of device, or torch's own SyncBatchNorm is used on CPU.
        RuntimeError: nothing requires grad, or the module has tensors without a shape or without values.
        ContractMismatch: the ranks were given different modules or arguments. The text is the same on every rank.

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
        lazy_bucket_allocation: bool = False,
        *,
        buffers: BufferPolicy | None = None,
        compression: Compression | None = None,
        ignore: Sequence[str] = (),
        reduce_dtype: torch.dtype | None = None,
        sharded: bool = False,
        strategy: Strategy[Any] | None = None,
        replica_check: ReplicaCheck | None = None,
        on_nonfinite: OnNonFinite = "ignore",
    ) -> None:
        nn.Module.__init__(self)  # because torch's own __init__ would build its reducer
        Joinable.__init__(self)
        transport = transport_of(group_of_mesh(process_group, device_mesh, module))
        try:
            (
                init_sync,
                find_unused_parameters,
                check_reduction,
                gradient_as_bucket_view,
                static_graph,
                skip_all_reduce_unused_params,
                batched_grad_copy,
                lazy_bucket_allocation,
            ) = checked_truths(
                init_sync=init_sync,
                find_unused_parameters=find_unused_parameters,
                check_reduction=check_reduction,
                gradient_as_bucket_view=gradient_as_bucket_view,
                static_graph=static_graph,
                skip_all_reduce_unused_params=skip_all_reduce_unused_params,
                batched_grad_copy=batched_grad_copy,
                lazy_bucket_allocation=lazy_bucket_allocation,
            )
            if check_reduction:
                warnings.warn(
                    "check_reduction is deprecated in torch and not used: every reduction is checked",
                    FutureWarning,
                    stacklevel=2,
                )
            checked_flag("sharded", sharded)
            check_reduce_dtype(reduce_dtype)
            delayed = checked_delayed(delay_all_reduce_named_params, param_to_hook_all_reduce)
            chosen = select(module, ignore=ignore, delayed=delayed)
            self.device_ids, self.output_device = checked_device_ids(module, device_ids, output_device)
            caps = checked_caps(bucket_cap_mb, bucket_cap_mb_list)
            strategy = checked_strategy(strategy)
            replica_check = checked_replica_check(replica_check, sharded=sharded)
            on_nonfinite = checked_on_nonfinite(on_nonfinite, strategy)
            if (
                strategy.drifts
                and (buffers, forward_sync_buffers) == (None, None)
                and broadcast_buffers is not False
            ):
                buffers, broadcast_buffers = "average", None
            buffer_policy, init_buffers = checked_buffers(buffers, broadcast_buffers, forward_sync_buffers)
            self._lowered = (
                None
                if mixed_precision is None
                else MixedPrecision(module, mixed_precision, frozenset(chosen.ignored))
            )
            if reduce_dtype is None and self._lowered is not None:
                reduce_dtype = self._lowered.reduce_dtype
            check_compression(compression, chosen, sharded=sharded)
            check_sharded(
                module,
                chosen,
                sharded=sharded,
                num_ranks=transport.size,
                mixed_precision=mixed_precision,
                skips_unused=skip_all_reduce_unused_params,
                reduce_dtype=reduce_dtype,
                strategy=strategy,
            )
        except (TypeError, ValueError, RuntimeError) as error:
            refuse(transport, error)
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
        self.lazy_bucket_allocation = lazy_bucket_allocation
        hosts = gather_hosts(transport)
        first_type = [*chosen.trained, *chosen.delayed][0][1].device.type
        options = GradientOptions(
            caps=caps
            or automatic_caps(
                hosts.loads, device_type=first_type, reduces_in_place=transport.reduces_in_place
            ),
            as_bucket_view=gradient_as_bucket_view and not sharded,
            allow_unused=find_unused_parameters or static_graph,
            skip_unused=skip_all_reduce_unused_params and find_unused_parameters and not static_graph,
            static_graph=static_graph,
            reduce_dtype=reduce_dtype,
            sparse=chosen.sparse,
            delayed=frozenset(name for name, _ in chosen.delayed),
            sharded=sharded and transport.size > 1,
            on_nonfinite=on_nonfinite,
        )
        self._replica = Replica(
            module,
            chosen,
            transport,
            options,
            hosts=hosts,
            strategy=strategy,
            init_sync=init_sync,
            init_buffers=init_sync and init_buffers,
            buffer_policy=buffer_policy,
            ignore=ignore,
            compression=compression,
            replica_check=replica_check,
        )
        if sharded and transport.size == 1:  # so that sl.write_shared also works with one rank
            remember_one_copy(module, OneCopy(list(module.named_parameters()), transport, num_copies=1))

    # ------------------------------------------------------------------ a step

    @NotTraced
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module's forward. Synchronize buffers first if that is due."""
        replica = self._replica
        synchronizes = torch.is_grad_enabled() and replica.gradients.enabled
        board = replica.transport.board
        board.phase = FORWARD if self.training else EVAL_FORWARD
        if synchronizes:
            board.step = replica.gradients.step + 1
        if torch.is_grad_enabled():
            replica.before_forward(synchronizes=synchronizes, inside_join=is_in_join(self))
        replica.gradients.forward_begins()
        if is_in_join(self):
            joined_forward_begins(
                self,
                replica.transport,
                replica.gradients,
                replica.buffers,
                synchronizes=synchronizes,
                counts_all_ranks=self._divide_by_initial_world_size,
            )
        elif replica.buffer_hook is None:
            replica.buffers.before_forward(next_is_due=synchronizes)
            if synchronizes and replica.gradients.replicas.watch is not None:
                replica.before_forward_of_equal_buffers()
        else:
            self._before_hooked_forward(replica.buffer_hook, next_is_due=synchronizes)
        if self.device_ids:
            device = torch.device(self.device_type, self.device_ids[0])
            inputs, kwargs = tree_map_only(
                Tensor, lambda t: t.to(device, non_blocking=True), (inputs, kwargs)
            )
        if self._lowered is None:
            output = self._run_ddp_forward(*inputs, **kwargs)  # torch's method, which subclasses override
        else:
            with while_in_forward_of_ddp(self):
                output = self._lowered(inputs, kwargs)
        if torch.is_grad_enabled() and replica.was_changed:
            replica.follow_in_backward(output)
        if replica.gradients.ownership.rivals and torch.is_grad_enabled():
            replica.gradients.ownership.watch(output)
        if replica.buffer_hook is not None and replica.buffer_hook.after_forward:
            self._run_buffer_hook(replica.buffer_hook)
        if self.static_graph and torch.is_grad_enabled():
            # The backward of a re-entrant checkpoint runs inside the backward that begins at an output.
            when_backward_reaches_any(output, replica.gradients.outermost_hook())
        if (
            synchronizes
            and self.training
            and replica.transport.size > 1
            and (
                replica.gradients.decide is None or replica.reduces()  # None: always reduce
            )
        ):
            replica.gradients.forwards.forward_ended(output)
        board.phase = "after forward"
        return output

    # ------------------------------------------------------------------ registration

    def attach(
        self, optimizer: AnyOptimizer, *, elementwise: bool | None = None, replace: bool | None = None
    ) -> AnyOptimizer:
        """Attach an optimizer, so that its settings and steps are compared between ranks.

        In each synchronized backward the ranks compare the learning rates and other numbers of `param_groups`, and the
        number of calls of `step`. A difference raises an error on all ranks, before any optimizer steps. A step is also
        an error if its gradients were not reduced, because the last backward ran under `no_sync`. Attach the optimizer
        on all ranks.

        Under `on_nonfinite="skip"`, an attached optimizer discards a step whose gradients are not finite.

        With `sharded=True` you must attach every optimizer. Its parameters become this rank's shards, and its state is
        cut to match them. Its `state_dict()` becomes a collective call.

        You may attach several optimizers. A new one is added if the attached ones have other parameters of this module.
        It replaces an attached one if it has all parameters of that one, as when a notebook creates its optimizer
        again. The replaced optimizer is no longer compared or kept in memory, and its `step` raises. If the new one has
        only some of the parameters of an attached one, use `replace` to choose.

        Args:
            optimizer: an optimizer of parameters of this module. It may also have other parameters. You may create
                schedulers and GradScalers before or after this call.
            elementwise: with `sharded=True`, whether the optimizer treats all elements alike, so that a shard may be a
                flat span of several parameters. None: Syncline knows this of torch's optimizers (AdamW, SGD and
                others). Any other optimizer then steps whole parameters, which is correct if the update of each
                parameter depends on that parameter alone.
            replace: True replaces all attached optimizers that have any parameter of the new one. False keeps them, so
                that both step, which `sharded=True` does not allow. None applies the rule above.

        Returns:
            The same object. Its `step` is replaced by a function that checks first. Attaching it again has no effect.

        Raises:
            TypeError: it is not an optimizer.
            ValueError: it has no parameter of this module; it has only some parameters of an attached one, and
                `replace` is None; or it cannot be sharded.
            RuntimeError: the module's optimizers step inside backward.

        Example:
            >>> import torch, syncline as sl
            >>> ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1))
            >>> optimizer = ddp.attach(torch.optim.AdamW(ddp.parameters()))
            >>> print(ddp.contract["optimizer"].when)
            never: equal by construction
        """
        self._replica.attach(optimizer, elementwise=elementwise, replaces=replace)
        return optimizer

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Clip the total norm of all reduced gradients, as `torch.nn.utils.clip_grad_norm_` does.

        Reduced gradients are equal on all ranks, so their norm is equal too, and nothing is sent. With `sharded=True`,
        the ranks combine the norms of their shards in one small collective. Gradients of parameters under `ignore=`
        are left out, because they differ between ranks. With a GradScaler, call `scaler.unscale_(optimizer)` first.

        Args:
            max_norm: the largest norm.
            norm_type: the order of the norm. `math.inf` takes the largest element.
            error_if_nonfinite: raise if the norm is NaN or infinite.
            foreach: use the multi-tensor implementation. None chooses automatically.

        Returns:
            The norm before clipping, of shape ().

        Raises:
            SynclineError: the gradients were not reduced, because the last backward ran under `no_sync`.
            RuntimeError: the norm is not finite, and `error_if_nonfinite` is True.

        Example:
            >>> import torch, syncline as sl
            >>> ddp = sl.DistributedDataParallel(torch.nn.Linear(1, 1))
            >>> (100 * ddp(torch.ones(1, 1))).sum().backward()
            >>> ddp.clip_grad_norm_(1.0)
            tensor(141.4214)
        """
        replica = self._replica
        max_norm = checked_number("max_norm", max_norm, at_least=0, finite=False)
        norm_type = checked_number("norm_type", norm_type, above=0, finite=False)
        error_if_nonfinite = checked_truth("error_if_nonfinite", error_if_nonfinite)
        foreach = None if foreach is None else checked_truth("foreach", foreach)
        replica.refuse_unreduced("clip_grad_norm_()")
        if replica.sharding is not None:
            return replica.sharding.clip_grad_norm_(
                max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
            )
        return torch.nn.utils.clip_grad_norm_(
            replica.gradients.parameters,
            max_norm,
            norm_type=norm_type,
            error_if_nonfinite=error_if_nonfinite,
            foreach=foreach,
        )

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Register a communication hook: `hook(state, bucket)` reduces each bucket instead of all_reduce, as in torch.

        The hook receives undivided gradients, as a `GradBucket` with torch's methods. It must divide them, and return
        a `torch.futures.Future` of the reduced flat tensor. Register it once, on all ranks, between the same two
        backwards. The hooks that torch ships call torch.distributed directly, over the group they are given.

        Args:
            state: passed to the hook in each call.
            hook: the hook.

        Raises:
            TypeError: it is not callable.
            ValueError: its annotations are not those of a communication hook.
            RuntimeError: a hook is already registered, or a backward is running.

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
        self._replica.use_comm_hook(checked_comm_hook(state, hook))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients in `.grad` without reducing them.

        `no_sync` applies to backward passes that *run* inside the block. (torch's class decides this in forward.) The
        next backward outside the block reduces everything that was accumulated.

        Example:
            >>> import torch, syncline as sl
            >>> ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1))
            >>> with ddp.no_sync():
            ...     ddp(torch.ones(1, 2)).sum().backward()
            >>> ddp(torch.ones(1, 2)).sum().backward()
            >>> ddp.module.bias.grad
            tensor([2.])
        """
        before = self._replica.gradients.enabled
        self._replica.gradients.enabled = False
        try:
            yield
        finally:
            self._replica.gradients.enabled = before

    @contextmanager
    def normalize_by(self, num_items: int) -> Iterator[None]:
        """Divide gradients by the global number of items, instead of averaging them over ranks.

        Put this block around forward and backward of a loss that is the *sum* over `num_items` (tokens, samples).
        `.grad` becomes the sum of the gradients over ranks and accumulated micro-batches, divided by the total number
        of items. This is exact for batches of unequal size. The counts are sent with the last bucket.

        In float16 the undivided sums must fit: the largest float16 is 65,504.

        Args:
            num_items: the number of items in this rank's loss. Some ranks may have 0 items, but they must still run
                the backward. 0 items on all ranks is an error.

        Raises:
            TypeError: `num_items` is not an integer.
            ValueError: `num_items` is negative, or 0 on all ranks; blocks are nested; micro-batches inside and outside
                of a block are mixed; or the registered communication hook divides the gradients.
            SynclineError: only some ranks use it.

        Example:
            >>> import torch, syncline as sl
            >>> ddp = sl.DistributedDataParallel(torch.nn.Linear(1, 1))
            >>> for batch in (torch.ones(3, 1), torch.ones(1, 1)):
            ...     with ddp.normalize_by(len(batch)):
            ...         ddp(batch).sum().backward()
            >>> ddp.module.weight.grad
            tensor([[1.]])
        """
        gradients = self._replica.gradients
        hook = gradients.comm_hook
        if hook is not None and not hook.averages:
            raise ValueError(
                f"normalize_by cannot divide what communication hook {hook.name} reduces: the hook divides by itself. "
                "Use one or the other"
            )
        with gradients.normalizer.block(checked_num_items(num_items)):
            yield

    def report(self, *, weight: float | Tensor = 1.0, **metrics: float | Tensor) -> None:
        """Average metrics over all ranks. They are sent with the next gradients, without a collective of their own.

        Call it on all ranks, with the same names, between forward and backward. After a synchronized backward the
        means are in `ddp.last_step.metrics`, with the same bits on every rank. Values of micro-batches under `no_sync`
        are averaged together with those of the backward that synchronizes. For other values use `sl.mean`.

        Args:
            weight: the weight of this rank's values, such as its number of samples. Finite, at least 0.
            metrics: numbers or tensors of one element on any device, by name. They are read when the last bucket is
                sent, and are sent as float32.

        Raises:
            TypeError: a value is not a real number.
            ValueError: the weight is negative, infinite or NaN; or no metric was given.
            ContractMismatch: ranks report different names. The next backward raises it, on every rank.
            SynclineError: a name is new inside `join`, where ranks without inputs cannot report it.

        Example:
            >>> import torch, syncline as sl
            >>> ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1))
            >>> loss = ddp(torch.ones(4, 2)).square().mean()
            >>> ddp.report(loss=0.25, accuracy=0.5, weight=4)
            >>> loss.backward()
            >>> ddp.last_step.metrics
            {'loss': 0.25, 'accuracy': 0.5}
        """
        if not metrics:
            raise ValueError("expected at least one metric by name, as in ddp.report(loss=loss), got none")
        values = {name: check_metric(name, value) for name, value in metrics.items()}
        weight = checked_number("weight", weight, at_least=0)
        self._replica.report(values, weight, inside_join=is_in_join(self))

    def sync_buffers_(self) -> None:
        """Make the buffers of all ranks equal now, by their policy. A collective call.

        Under the policy "none", the buffers of rank 0 are broadcast. Call this before a checkpoint or an evaluation,
        because after the last step the running statistics of each rank include its own last batch.

        Example:
            >>> import torch, syncline as sl
            >>> ddp = sl.DistributedDataParallel(torch.nn.BatchNorm1d(2))
            >>> ddp(torch.ones(3, 2)).sum().backward()
            >>> ddp.sync_buffers_()
        """
        replica = self._replica
        replica.transport.board.phase = "sync_buffers_"
        agree(replica.transport, "sync_buffers_", [f"module: {type(self.module).__name__}"])
        replica.buffers.sync()

    def sync_parameters_(self) -> None:
        """Make the replicas of all ranks equal now, outside the strategy's schedule. A collective call.

        Under a strategy that lets replicas drift, this runs one of its parameter syncs (an average, an outer step).
        Call it before an evaluation, before a checkpoint, and at the end of training. Buffers are synchronized by their
        policy. Under `EveryStep` the parameters are already equal, so only buffers are synchronized.

        Raises:
            ContractMismatch: the ranks have run different numbers of steps, or their attached optimizers differ.

        Example:
            >>> import torch, syncline as sl
            >>> ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1), strategy=sl.LocalSGD(8))
            >>> ddp.sync_parameters_()
        """
        if self._replica.rounds is None:
            self.sync_buffers_()
            return
        self._replica.rounds.sync_parameters()
        self._replica.divergence.record_equal(by_writing=False)

    @property
    def last_round(self) -> RoundRecord | None:
        """The record of the most recent parameter sync on this rank; None before the first."""
        return None if self._replica.rounds is None else self._replica.rounds.last

    @property
    def outer_optimizer(self) -> Optimizer | None:
        """The outer optimizer under `DiLoCo`, for example to schedule its learning rate; otherwise None."""
        rounds = self._replica.rounds
        return None if rounds is None else rounds.outer_optimizer

    def sync_state_dict(self) -> dict[str, Any]:
        """Return the state of synchronization. Save it on each rank, with the states of module and optimizer.

        It contains the progress of the strategy and, under `DiLoCo`, the parameters last agreed on and the state of the
        outer optimizer. It also contains the residuals of a compression, which differ per rank. Call it on all ranks,
        between two steps.

        Example:
            >>> import torch, syncline as sl
            >>> ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1), strategy=sl.DiLoCo(8))
            >>> ddp.load_sync_state_dict(ddp.sync_state_dict())
        """
        return self._replica.sync_state_dict()

    def load_sync_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `sync_state_dict` returned, on the same rank of a world of the same size. A local call.

        Raises:
            ValueError: the state was saved under another strategy or compression, or from another module.
        """
        self._replica.load_sync_state_dict(state)

    # ------------------------------------------------------------------ uneven inputs

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> AbstractContextManager[Any]:
        """Return a context in which ranks may run out of inputs at different times, as in torch.

        A rank that leaves its loop early takes part in the collectives of the other ranks, with zeros, until all ranks
        are done. Then the model of the last rank is broadcast to all.

        Args:
            divide_by_initial_world_size: divide gradients by the number of all ranks. With False, divide by the number
                of ranks that still have inputs.
            enable: with False, the context does nothing.
            throw_on_early_termination: raise on every rank as soon as one rank has no inputs left.

        Raises:
            ValueError: the module is not synchronized over a torch.distributed group.
        """
        replica = self._replica
        divide_by_initial_world_size, enable, throw_on_early_termination = checked_truths(
            divide_by_initial_world_size=divide_by_initial_world_size,
            enable=enable,
            throw_on_early_termination=throw_on_early_termination,
        )
        if not enable or replica.transport.size == 1:
            return nullcontext()
        replica.refuse_sharded(NOT_WITH_JOIN)
        replica.refuse_drifting("ranks without inputs cannot follow, so join() is not possible")
        if self.process_group is None:
            raise ValueError(
                "join needs a torch.distributed process group; this module is synchronized over "
                f"{replica.plan.transport}"
            )
        return JoinBlock(
            replica.transport,
            [self],
            throw_on_early_termination=throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook for `torch.distributed.algorithms.join.Join`, which may also hold other joinables."""
        replica = self._replica
        replica.refuse_sharded(NOT_WITH_JOIN)
        self._has_joined = True
        self._divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        replica.agree_before_join()
        return ShadowHook(replica.transport, replica.gradients, replica.buffers, self._make_all_equal_to)

    @property
    def join_device(self) -> torch.device:
        """The device on which `Join` creates its tensors."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The process group over which `Join` counts ranks."""
        assert self.process_group is not None
        return self.process_group

    def _make_all_equal_to(self, src: int) -> None:
        self._authoritative_rank = src
        replica = self._replica
        broadcast_values(replica.selection, replica.transport, src=src, buffers=replica.buffers.enabled)

    # ------------------------------------------------------------------ contract and records

    @property
    def contract(self) -> Contract:
        """The contract: what is synchronized, when and how. After the first step it includes what was last done."""
        return contract_of(self._replica.plan, self._replica.evidence())

    def explain(self) -> str:
        """Return a timeline of one step, in words: the last recorded step, or the plan before the first step."""
        gradients = self._replica.gradients
        return explain(
            self._replica.plan,
            self._replica.evidence(looks_ahead=True),
            [b.plan for b in gradients.layout.buckets],
            gradients.names,
        )

    @property
    def last_step(self) -> BackwardRecord | None:
        """The record of the most recent backward on this rank; None before the first.

        `print(ddp.last_step)` prints a summary, `pprint.pprint(ddp.last_step)` prints every field.
        """
        return self._replica.gradients.ledger.last()

    def statistics(self) -> Statistics:
        """Return the collectives, bytes and waiting time of all uses of this module's transport on this rank."""
        return self._replica.transport.statistics()

    def train(self, mode: bool = True) -> Self:
        """Set the training mode, as `torch.nn.Module.train` does."""
        nn.Module.train(self, mode)
        return self

    # ------------------------------------------------------------------ saving and loading

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load keys that begin with `module.`, as torch's class writes them, or keys without it."""
        keys = [key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)]
        if are_of_the_bare_module(keys, self.module):
            values = {key: state_dict.pop(prefix + key) for key in keys}
            state_dict.update({f"{prefix}module.{key}": value for key, value in values.items()})
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __getstate__(self) -> dict[str, Any]:
        self._replica.refuse_sharded("the parameters lie in memory that a copy or a pickle would not share")
        self._replica.refuse_drifting(NOT_COPIED)
        self._check_default_group()
        return with_join_disabled(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the wrapper over the default group. Hooks and optimizers must be registered again."""
        nn.Module.__setstate__(self, state)  # because torch's own would build its reducer
