"""DistributedDataParallel: wires a module's hooks to the parts that synchronize it.

The flow of one step is drawn in `docs/architecture.md`. Those parts are held by a `Replica` (`replica.py`); what
torch's class is asked for beyond its documented methods is in `torch_names.py`.
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
from syncline.transport.base import Statistics, Transport

__all__ = ["DistributedDataParallel"]


AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


class DistributedDataParallel(TorchNames, SynchronizedModule, nn.parallel.DistributedDataParallel):  # type: ignore[misc, override]
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
        bucket_cap_mb: the largest bucket in MiB (of 2**20 bytes). None lets Syncline choose: 8 MiB in shared memory;
            over Gloo on one host whose cores all compute, few large buckets; elsewhere 1 MiB first and 25 MiB after,
            as torch.
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
        skip_all_reduce_unused_params: with `find_unused_parameters`, a bucket that no rank used is not sent; which
            ones these are, the ranks tell each other in one small collective at the start of backward.
        bucket_cap_mb_list: caps in MiB of the first buckets, one by one; the last goes on. `bucket_cap_mb` then
            counts no more.
        batched_grad_copy: accepted; gradients are copied in batches in any case.
        forward_sync_buffers: torch 2.13's name for the part of `broadcast_buffers` that concerns forward: with
            False, buffers are still broadcast at construction. Wins over `broadcast_buffers`.
        lazy_bucket_allocation: torch 2.15's; accepted, buckets are allocated here.
        buffers: what becomes of buffers before a forward: "broadcast" (rank 0's, as in torch), "average" (running
            statistics pooled, see `docs/buffers.md`) or "none". Not together with torch's two arguments for it.
        compression: how gradients are encoded to be averaged, one of `sl.compression`; None sends them as they are. See
            `docs/compression.md`.
        ignore: names or shell patterns (`"head.*"`) of parameters and buffers that are left alone: neither broadcast
            nor reduced. The same on all ranks.
        reduce_dtype: what floating gradients are added up in, say torch.float32 for a bfloat16 module; None means
            their own type.
        sharded: each rank reduces its share of the gradients and steps the optimizer for it (`attach` it); on one host
            the parameters are one copy for all ranks. See `docs/sharded.md`.
        strategy: when and how parameters meet: `sl.LocalSGD`, `sl.DiLoCo`, `sl.Gossip`, `sl.ParameterServer`,
            `sl.Manual`; None is `sl.EveryStep()`. Under the others replicas drift apart between two meetings, and
            buffers meet when parameters do, by default pooled (`buffers="average"`). See `docs/strategies.md`.
        replica_check: `sl.ReplicaCheck(every=100)` compares replicas while training, a slice in each step. See
            `docs/replica-check.md`.
        on_nonfinite: what all ranks do where a gradient of one of them is NaN or infinite. "ignore": nothing, and the
            mean is not finite either. "raise": `NonFiniteGradient` at the end of this backward. "skip": the step of
            every optimizer is left undone (`attach` each of them). "zero": such elements count as zero. Rank and
            parameter are named. A `torch.amp.GradScaler` that is in use looks after it by itself, so that these
            policies stand back. See `docs/nothing-silent.md`.

    Raises:
        TypeError: `module` is not a `torch.nn.Module`.
        ValueError: `device_ids` does not fit the module, a size is not positive, a pattern matches nothing,
            parameters are on several types of device, or torch's own SyncBatchNorm is used on CPU.
        RuntimeError: nothing requires grad, or the module has tensors without a shape or without values.
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
        nn.Module.__init__(self)  # torch's own __init__ would build its reducer
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
        if sharded and transport.size == 1:  # so that sl.write_shared is the same alone
            remember_one_copy(module, OneCopy(list(module.named_parameters()), transport, num_copies=1))

    # ------------------------------------------------------------------ a step

    @NotTraced
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward, buffers synchronized first where that is due."""
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
            output = self._run_ddp_forward(*inputs, **kwargs)  # torch's, which subclasses replace
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
            # A re-entrant checkpoint's backward runs inside of the one that begins at an output.
            when_backward_reaches_any(output, replica.gradients.outermost_hook())
        if (
            synchronizes
            and self.training
            and replica.transport.size > 1
            and (
                replica.gradients.decide is None or replica.reduces()  # asked where it is a question
            )
        ):
            replica.gradients.forwards.forward_ended(output)
        board.phase = "after forward"
        return output

    # ------------------------------------------------------------------ what is registered

    def attach(
        self, optimizer: AnyOptimizer, *, elementwise: bool | None = None, replace: bool | None = None
    ) -> AnyOptimizer:
        """Let the optimizer's settings and steps be checked against the other ranks'.

        With each synchronized backward the ranks compare learning rates and other numbers of `param_groups`, and how
        often `step` was called: a difference is an error on all ranks, before anyone steps. A step whose gradients
        were not reduced (the last backward ran under `no_sync`) is an error too. Attach on all ranks.

        Under `on_nonfinite="skip"` an attached optimizer leaves a step undone whose gradients are not finite.

        With `sharded=True` every optimizer has to be attached: it gets this rank's shards for parameters, and state it
        has is cut to them. Its `state_dict()` becomes a collective call.

        Several may be attached. A new one is added to those that have other parameters of this module. It takes the
        place of one whose parameters it all has, as when a notebook makes its optimizer anew: that one is no longer
        compared, nor kept in memory, and its `step` raises. For one that has some of its parameters and others,
        `replace` says which of the two is meant.

        Args:
            optimizer: of parameters of this module (others may be among them). A scheduler or a GradScaler may be
                made before or after.
            elementwise: with `sharded=True`, whether the optimizer treats all elements alike, so that a shard may be a
                flat span of several parameters. None: so it is known of torch's own (AdamW, SGD and others); any other
                steps whole parameters, which is right if each one's update depends on that parameter alone.
            replace: whether it takes the place of those that have parameters of it. False: it steps beside them, which
                `sharded=True` does not allow. None: as said above.

        Returns:
            The same object; its `step` is replaced by a function that checks first. Attached again, it stays as it is.

        Raises:
            TypeError: not an optimizer.
            ValueError: it has none of this module's parameters; it has some of those of an attached one, which has
                others, and `replace` is None; or it cannot be sharded.
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
        """Clip the norm of all reduced gradients together, as `torch.nn.utils.clip_grad_norm_`.

        Reduced gradients are equal on all ranks, and so is the norm: nothing is sent. With `sharded=True` the ranks
        add up the norms of their shares, in one small collective. Gradients of parameters under `ignore=` are left out,
        for they differ. Under a GradScaler, call `scaler.unscale_(optimizer)` first.

        Args:
            max_norm: the largest norm.
            norm_type: of the norm; `math.inf` for the largest element.
            error_if_nonfinite: raise where the norm is NaN or infinite.
            foreach: use the multi-tensor implementation; None chooses.

        Returns:
            The norm before clipping, of shape ().

        Raises:
            SynclineError: the gradients have not been reduced: the last backward ran under `no_sync`.
            RuntimeError: the norm is not finite, if asked.

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
        """Let `hook(state, bucket)` reduce each bucket in place of all_reduce, as in torch.

        The hook gets undivided gradients (a `GradBucket` with torch's methods), divides by itself, and returns a
        `torch.futures.Future` of the reduced flat tensor. Register it on all ranks, once, between the
        same two backwards. The hooks that torch ships call torch.distributed themselves, over the group they are given.

        Args:
            state: handed to the hook in each call.
            hook: the hook.

        Raises:
            TypeError: not callable.
            ValueError: annotations that say it is something else.
            RuntimeError: there is one already, or a backward is running.

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
        before = self._replica.gradients.enabled
        self._replica.gradients.enabled = False
        try:
            yield
        finally:
            self._replica.gradients.enabled = before

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
            ValueError: negative; nested blocks; 0 items on all ranks; counted and uncounted micro-batches mixed; a
                communication hook was registered.
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
        """Let the means of metrics over all ranks ride behind the next gradients, at no collective of their own.

        Call it on all ranks, with the same names, between the forward and the backward. After a synchronized backward
        the means are in `ddp.last_step.metrics`, the same bits on every rank. Values of micro-batches under `no_sync`
        are averaged with those of the backward that synchronizes. `sl.mean` is for everything else.

        Args:
            weight: how much this rank counts, say the number of samples behind its values: finite, at least 0.
            metrics: by name, numbers or tensors of one element, on any device. They are read when the last bucket is
                sent, and travel as float32.

        Raises:
            TypeError: a value is no real number.
            ValueError: the weight is negative, infinite or NaN; or there is no metric.
            ContractMismatch: ranks report different names; raised by the next backward, on every rank.
            SynclineError: a new name inside of `join`, where ranks without inputs cannot follow.

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
        """Make the buffers of all ranks equal now, by their policy ("none": rank 0's); a collective call.

        After the last step each rank has the running statistics of its own last batch: call it before a checkpoint
        or an evaluation.

        Example:
            >>> import torch, syncline as sl
            >>> ddp = sl.DistributedDataParallel(torch.nn.BatchNorm1d(2))
            >>> ddp(torch.ones(3, 2)).sum().backward()
            >>> ddp.sync_buffers_()
        """
        replica = self._replica
        replica.transport.board.phase = "sync_buffers_"
        agree(replica.transport, "sync_buffers_", [f"module: {type(self.module).__name__}"])
        replica.buffers.equalize()

    def sync_parameters_(self) -> None:
        """Make the replicas of all ranks equal now, out of turn; a collective call.

        Under a strategy that lets replicas drift, run a round of it (an average, an outer step): before an evaluation,
        before a checkpoint, at the end. Buffers are synchronized by their policy. Under `EveryStep` parameters are
        equal already, and only buffers are synchronized.

        Raises:
            ContractMismatch: the ranks have done different numbers of steps, or attached optimizers differ.

        Example:
            >>> import torch, syncline as sl
            >>> ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1), strategy=sl.LocalSGD(8))
            >>> ddp.sync_parameters_()
        """
        if self._replica.rounds is None:
            self.sync_buffers_()
            return
        self._replica.rounds.sync_parameters()
        self._replica.divergence.met(by_writing=False)

    @property
    def last_round(self) -> RoundRecord | None:
        """The most recent meeting of parameters as it was recorded on this rank; None before the first."""
        return None if self._replica.rounds is None else self._replica.rounds.last

    @property
    def outer_optimizer(self) -> Optimizer | None:
        """Under `DiLoCo`, the outer optimizer, for a schedule of its learning rate, say; otherwise None."""
        rounds = self._replica.rounds
        return None if rounds is None else rounds.outer_optimizer

    def sync_state_dict(self) -> dict[str, Any]:
        """Return the state of synchronization beside the module and its optimizer: save it with them, on each rank.

        The strategy's progress and, under `DiLoCo`, what the ranks agreed on last and the outer optimizer; residuals of
        compression, which are this rank's own. Call it on all ranks, between two steps.

        Example:
            >>> import torch, syncline as sl
            >>> ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1), strategy=sl.DiLoCo(8))
            >>> ddp.load_sync_state_dict(ddp.sync_state_dict())
        """
        return self._replica.sync_state_dict()

    def load_sync_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `sync_state_dict` returned, on the same rank of as many; local.

        Raises:
            ValueError: it was saved under another strategy or compression, or of another module.
        """
        self._replica.load_sync_state_dict(state)

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
        """For `torch.distributed.algorithms.join.Join`, also beside other joinables."""
        replica = self._replica
        replica.refuse_sharded(NOT_WITH_JOIN)
        self._has_joined = True
        self._divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        replica.agree_before_join()
        return ShadowHook(replica.transport, replica.gradients, replica.buffers, self._make_all_equal_to)

    @property
    def join_device(self) -> torch.device:
        """Where `Join` puts its own tensors."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """What `Join` counts over."""
        assert self.process_group is not None
        return self.process_group

    def _make_all_equal_to(self, src: int) -> None:
        self._authoritative_rank = src
        replica = self._replica
        broadcast_values(replica.selection, replica.transport, src=src, buffers=replica.buffers.enabled)

    # ------------------------------------------------------------------ what is, and what was

    @property
    def contract(self) -> Contract:
        """What is synchronized, when and how; after the first step, with what was last done."""
        return contract_of(self._replica.plan, self._replica.evidence())

    def explain(self) -> str:
        """One step as a timeline, in words: recorded after the first step, planned before it."""
        gradients = self._replica.gradients
        return explain(
            self._replica.plan,
            self._replica.evidence(looks_ahead=True),
            [b.plan for b in gradients.layout.buckets],
            gradients.names,
        )

    @property
    def last_step(self) -> BackwardRecord | None:
        """The most recent backward as it was recorded on this rank; None before the first.

        Printed, a summary; `pprint.pprint(ddp.last_step)` prints all of it.
        """
        return self._replica.gradients.ledger.last()

    def statistics(self) -> Statistics:
        """Collectives, bytes and time waiting, of everything that used this module's transport on this rank."""
        return self._replica.transport.statistics()

    def train(self, mode: bool = True) -> Self:
        """As `torch.nn.Module.train`."""
        nn.Module.train(self, mode)
        return self

    # ------------------------------------------------------------------ saved and loaded

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Keys come with `module.` before them, as torch's class writes them, or without."""
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
        """Over the default group. Hooks and optimizers have to be registered again."""
        nn.Module.__setstate__(self, state)  # torch's own would build its reducer
