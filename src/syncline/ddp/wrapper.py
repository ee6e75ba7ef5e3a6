"""The class DistributedDataParallel, which connects a module to the parts that synchronize it.

A `Replica` (`replica.py`) holds those parts. `torch_names.py` has the undocumented methods and attributes of torch's
class that frameworks use. `docs/inside/architecture.md` shows the flow of one step.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline._torch.autograd import UNPROFILED, is_profiling, profiled
from syncline._torch.modules import (
    NotTraced,
    is_compiler_in_use,
    is_in_join,
    metadata_of,
    while_in_forward_of_ddp,
    with_join_disabled,
)
from syncline._torch.tensors import outside_of_transforms, tree_map_only
from syncline.buffers.policies import BufferHook, BufferPolicy
from syncline.checks import checked_flag, checked_truth, suggests_arguments
from syncline.compression import Compression
from syncline.contract import Contract
from syncline.ddp.config import checked_config, checked_truths
from syncline.ddp.join import JoinMethods
from syncline.ddp.replica import Replica
from syncline.ddp.report import contract_of
from syncline.ddp.selection import checked_delayed, select
from syncline.ddp.timeline import explain
from syncline.ddp.training import TrainingMethods
from syncline.ddp.wrapping import (
    MixedPrecision,
    are_of_the_bare_module,
    checked_device_ids,
    gather_hosts,
    group_of_mesh,
    refusals,
)
from syncline.events import OBSERVERS, ForwardEnded
from syncline.gradients.options import OnNonFinite
from syncline.gradients.riders.replica_look import LOOKS, Looks
from syncline.gradients.riders.replica_watch import ReplicaCheck
from syncline.gradients.wrapper_protocol import SynchronizedModule
from syncline.liveness.board import StepPhase
from syncline.records import BackwardRecord, RoundRecord
from syncline.session.world import transport_of
from syncline.sharded.sharing import OneCopy, remember_one_copy
from syncline.strategies import Strategy
from syncline.transport.agreement import agree
from syncline.transport.base import Transport
from syncline.transport.statistics import Statistics

_FLAGS = (
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "static_graph",
    "skip_all_reduce_unused_params",
    "batched_grad_copy",
    "lazy_bucket_allocation",
)
"""The names of torch's boolean arguments. As in torch, the wrapper has an attribute for each of them."""


@suggests_arguments
class DistributedDataParallel(  # type: ignore[misc, override]
    TrainingMethods, JoinMethods, SynchronizedModule, nn.parallel.DistributedDataParallel
):
    """A data-parallel wrapper, which averages gradients over all ranks during backward and so keeps the replicas equal.

    You can use it in place of `torch.nn.parallel.DistributedDataParallel`, without other changes to your code. It is a
    subclass of that class, so `isinstance` checks in frameworks succeed, but torch's reducer never runs.

    `print(ddp.contract)` shows what is synchronized and when. `print(ddp.explain())` shows what happened in the last
    step. `docs/reference/compatibility.md` describes each argument and method that torch's class has.

    Args:
        module: the module of this rank. At least one parameter must require grad. The parameters and buffers must have
            the same names, shapes, dtypes, strides, `requires_grad` and order on all ranks.
        device_ids: a list of one device, to which inputs are moved before forward, for a module on one accelerator.
            Give None on CPU, and for a module on several devices.
        output_device: accepted for compatibility with torch. It has no effect: outputs are not moved.
        dim: accepted for compatibility with torch. It has no effect.
        broadcast_buffers: broadcast buffers from rank 0 at construction and before a forward. None means True.
        init_sync: broadcast parameters and buffers from rank 0 at construction. With False, you guarantee that they are
            equal on all ranks.
        process_group: the group to synchronize over: a `torch.distributed` process group or a Syncline transport. None
            means the default group, or a world of one rank if torch.distributed is not initialized.
        bucket_cap_mb: the largest size of a bucket in MiB (2**20 bytes). None lets Syncline choose. In shared memory
            of one host the size is 8 MiB. Between hosts it is a tenth of all gradients, from 1 to 25 MiB, and a third
            with `PowerSGD`, which sends little. Over Gloo, if the ranks keep all cores of one host busy, Syncline uses
            few large buckets. In all other cases the first bucket has up to 1 MiB, and each further bucket up to 25
            MiB, as in torch. `syncline plan` compares sizes.
        find_unused_parameters: count a missing gradient as zero instead of raising an error. The `.grad` of a parameter
            that no rank used does not change.
        check_reduction: deprecated in torch. It has no effect.
        gradient_as_bucket_view: make `.grad` a view of the bucket after a synchronized backward. This saves time, and
            as much memory as all gradients need.
        static_graph: a promise that the same parameters get gradients in every backward, each the same number of times.
            The first backward records these numbers. This allows re-entrant and repeated activation checkpoints, and
            implies `find_unused_parameters`.
        delay_all_reduce_named_params: the parameters whose gradients are reduced last, in separate buckets, as pairs
            (name, parameter).
        param_to_hook_all_reduce: the parameter that triggers the reduction of the delayed gradients in torch. Give it
            if and only if you give `delay_all_reduce_named_params`.
        mixed_precision: torch's `_MixedPrecision`. Forward then runs on low-precision copies of the parameters.
        device_mesh: a mesh of one dimension, whose group is used. Give it instead of `process_group`.
        skip_all_reduce_unused_params: with `find_unused_parameters`, do not send a bucket if no rank used any of its
            parameters. The ranks find these buckets in one small collective at the start of backward.
        bucket_cap_mb_list: caps of the first buckets in MiB, in order. The last cap applies to all further buckets, and
            `bucket_cap_mb` is not used.
        batched_grad_copy: accepted for compatibility with torch. Gradients are always copied in batches.
        forward_sync_buffers: whether buffers are broadcast before a forward, as in torch 2.13. It overrides
            `broadcast_buffers` in forwards. With False, buffers are still broadcast at construction.
        lazy_bucket_allocation: accepted for compatibility with torch 2.15. It has no effect.
        buffers: how buffers are synchronized before a forward. "broadcast" sends those of rank 0, as in torch.
            "average" averages them, and pools running statistics (see `docs/answers/buffers.md`). "none" does not
            synchronize them. This argument cannot be combined with `broadcast_buffers` or `forward_sync_buffers`.
        compression: how gradients are encoded before they are sent: one of `sl.compression`. None sends them unchanged.
            See `docs/guides/compression.md`.
        ignore: the names of parameters and buffers that are neither broadcast nor reduced, or shell patterns for their
            names, such as `"head.*"`. They must match the same names on all ranks.
        reduce_dtype: the dtype in which floating-point gradients are summed, such as torch.float32 for a bfloat16
            module. None sums each gradient in its own dtype.
        sharded: let each rank reduce only its shard of the gradients, and step only its shard of the parameters. You
            must `attach` every optimizer. If possible, the ranks of a host use one copy of the parameters. See
            `docs/guides/sharded.md`.
        strategy: when and how parameters are synchronized: `sl.LocalSGD`, `sl.DiLoCo`, `sl.Gossip`,
            `sl.ParameterServer` or `sl.Manual`. None means `sl.EveryStep()`. Under all other strategies, replicas
            drift apart between two parameter syncs. Buffers are then synchronized together with the parameters, by
            default with `buffers="average"`. See `docs/guides/strategies.md`.
        replica_check: how replicas are compared during training. By default the ranks compare all parameters in the
            steps 1, 2, 4, 8, ..., and warn once if they differ; not under strategies that let replicas drift. None
            compares nothing. `sl.ReplicaCheck(every=100)` compares one slice per step, and raises an error. See
            `docs/guides/replica-check.md`.
        on_nonfinite: what all ranks do if a gradient of any rank is NaN or infinite, so that the mean is not finite
            either. "warn" warns once, "ignore" does nothing. "raise" raises `NonFiniteGradient` at the end of the
            backward. "skip" discards the step of every optimizer; you must `attach` each optimizer. "zero" counts such
            elements as zero. All policies but "ignore" name the rank and the parameter. While a `torch.amp.GradScaler`
            is in use, it handles such gradients, and these policies do not apply. See `docs/guides/nothing-silent.md`.

    Raises:
        TypeError: `module` is not a `torch.nn.Module`, or another argument has a wrong type.
        ValueError: an argument has a wrong value or cannot be combined with another one, the parameters are on several
            types of device, or the module uses torch's own SyncBatchNorm on CPU.
        RuntimeError: no parameter requires grad, or the module has tensors without a shape or without values.
        ContractMismatch: the ranks were given different modules or arguments. The text is the same on every rank.

    Examples:
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
        replica_check: ReplicaCheck | Looks | None = LOOKS,
        on_nonfinite: OnNonFinite = "warn",
    ) -> None:
        arguments = dict(locals())
        super().__init__()  # not torch's own, which would build its reducer
        transport = transport_of(group_of_mesh(process_group, device_mesh, module))
        with refusals(transport):
            flags = checked_truths({name: arguments[name] for name in _FLAGS})
            if checked_truth("check_reduction", check_reduction):
                text = "check_reduction is deprecated in torch, and has no effect. Leave it out"
                warnings.warn(text, FutureWarning, stacklevel=3)
            delayed = checked_delayed(delay_all_reduce_named_params, param_to_hook_all_reduce)
            chosen = select(module, ignore=ignore, delayed=delayed)
            self.device_ids, self.output_device = checked_device_ids(module, device_ids, output_device)
            config = checked_config(arguments, flags, chosen, num_ranks=transport.size)
        self.module = module
        self.dim = dim
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self.mixed_precision = mixed_precision
        for name, flag in flags.items():
            setattr(self, name, flag)
        self._lowered = None
        if mixed_precision is not None:
            self._lowered = MixedPrecision(module, mixed_precision, chosen.ignored)
        hosts = gather_hosts(transport)
        if config.gradients.caps.is_default:
            config = config.with_gradients(caps=hosts.caps_for(chosen, transport, config.compression))
        self._replica = Replica(module, chosen, transport, config, hosts)
        if sharded and transport.size == 1:  # so that sl.write_shared also works with one rank
            remember_one_copy(module, OneCopy(list(module.named_parameters()), transport, num_copies=1))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            module = vars(self).get("_modules", {}).get("module")
            if module is None or name.startswith("__") or not hasattr(module, name):
                raise
            text = f"{error}; the model is ddp.module: ddp.module.{name}"
        raise AttributeError(text)

    # ------------------------------------------------------------------ a step

    @NotTraced
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module's forward. Before that, synchronize the buffers if this forward has to."""
        replica, inside_join = self._replica, is_in_join(self)
        buffer_hook = replica.registered.buffer_hook
        synchronizes = torch.is_grad_enabled() and replica.gradients.controls.enabled
        board, began_at = replica.transport.board, perf_counter()
        board.phase = StepPhase.FORWARD if self.training else StepPhase.EVAL_FORWARD
        if synchronizes:
            board.step = replica.gradients.step + 1
        with outside_of_transforms():
            if torch.is_grad_enabled():
                # `self.module` would look it up in Python code.
                replica.before_forward(
                    vars(self)["_modules"]["module"], synchronizes=synchronizes, inside_join=inside_join
                )
            replica.gradients.forward_begins()
            if inside_join:
                self._joined_forward_begins(synchronizes=synchronizes)
            elif buffer_hook is None:
                if replica.buffers.before_forward(next_is_due=synchronizes) and synchronizes:
                    replica.before_forward_of_equal_buffers()
            else:
                self._before_hooked_forward(buffer_hook, next_is_due=synchronizes)
        if self.device_ids:
            device = torch.device(self.device_type, self.device_ids[0])
            inputs, kwargs = tree_map_only(
                Tensor, lambda t: t.to(device, non_blocking=True), (inputs, kwargs)
            )
        computed_from = perf_counter()
        with profiled("forward") if is_profiling() else UNPROFILED:
            output = self._run_ddp_forward(*inputs, **kwargs)
        if torch.is_grad_enabled():
            is_counted = synchronizes and self.training
            replica.gradients.forward_ended(output, owner=replica, is_counted=is_counted)
        if buffer_hook is not None and buffer_hook.after_forward:
            self._run_buffer_hook(buffer_hook)
        board.phase = StepPhase.AFTER_FORWARD
        if OBSERVERS.forward_ended:
            self._emit_forward(began_at, computed_from)
        return output

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module. Subclasses override this method of torch's class."""
        replica = self._replica
        # The context sets an attribute of torch's class, which costs 10 us: Python drops what it has cached about the
        # class. Only the compiler reads the attribute, and the search for a module that is wrapped twice.
        is_read = is_compiler_in_use() or replica.was_changed or not replica.gradients.step
        with while_in_forward_of_ddp(self) if is_read else UNPROFILED:
            module = vars(self)["_modules"]["module"]
            return (
                module(*inputs, **kwargs) if self._lowered is None else self._lowered(module, inputs, kwargs)
            )

    def _emit_forward(self, began_at: float, computed_from: float) -> None:
        gradients, buffers = self._replica.gradients, self._replica.buffers
        event = ForwardEnded(
            source=gradients.ledger.source,
            step=gradients.step + 1,
            began_at=began_at,
            computed_from=computed_from,
            ended_at=perf_counter(),
            is_training=self.training,
            buffers=buffers.last_forward() if buffers.were_sent else None,
            contract=lambda: self.contract,
            explain=self.explain,
        )
        for receive in OBSERVERS.forward_ended:
            receive(event)

    def _before_hooked_forward(self, hook: BufferHook, *, next_is_due: bool) -> None:
        hook.is_due = self._replica.buffers.leave_to_hook(next_is_due=next_is_due)
        if not hook.after_forward:
            self._run_buffer_hook(hook)

    def _run_buffer_hook(self, hook: BufferHook) -> None:
        if hook.is_due:
            self._replica.gradients.controls.wait_for(hook.run(self.named_module_buffers))

    def sync_buffers_(self) -> None:
        """Make the buffers equal on all ranks now, by the buffer policy. A collective call.

        Under the policy "none", the buffers of rank 0 are broadcast. Call this method before a checkpoint or an
        evaluation, because after a step the running statistics of a rank include a batch that no other rank has seen.

        Examples:
            >>> import torch, syncline as sl
            >>> ddp = sl.DistributedDataParallel(torch.nn.BatchNorm1d(2))
            >>> ddp(torch.ones(3, 2)).sum().backward()
            >>> ddp.sync_buffers_()
        """
        replica = self._replica
        with replica.transport.board.called("sync_buffers_"):
            agree(replica.transport, "sync_buffers_", [f"module: {type(self.module).__name__}"])
            replica.buffers.sync()

    def sync_parameters_(self) -> None:
        """Make the replicas equal on all ranks now, outside the strategy's schedule. A collective call.

        Under a strategy that lets replicas drift, this runs a parameter sync of the strategy, such as an average or an
        outer step. Call this method before an evaluation, before a checkpoint, and at the end of training. Buffers are
        synchronized by the buffer policy. Under `EveryStep` the parameters are already equal, so only buffers are
        synchronized. The same holds if a mean is due, and a comparison of hashes finds that the values are equal.

        Raises:
            ContractMismatch: the ranks have run different numbers of steps, or their attached optimizers differ.

        Examples:
            >>> import torch, syncline as sl
            >>> ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1), strategy=sl.LocalSGD(8))
            >>> ddp.sync_parameters_()
        """
        if self._replica.drift.rounds is None:
            self.sync_buffers_()
            return
        self._replica.drift.rounds.sync_parameters()
        self._replica.drift.divergence.record_equal(by_writing=False)

    @property
    def last_round(self) -> RoundRecord | None:
        """The record of the last parameter sync on this rank; None before the first sync, and under `EveryStep`."""
        return None if self._replica.drift.rounds is None else self._replica.drift.rounds.last

    @property
    def outer_optimizer(self) -> Optimizer | None:
        """The outer optimizer of `DiLoCo`, whose learning rate you can schedule; None under other strategies."""
        rounds = self._replica.drift.rounds
        return None if rounds is None else rounds.outer_optimizer

    def sync_state_dict(self) -> dict[str, Any]:
        """Return the state of the strategy and of the compression, for a checkpoint.

        Call this method on all ranks, between two steps. Save the result on each rank, with the states of the module
        and the optimizer. The state contains the progress of the strategy. Under `DiLoCo` it also contains the
        parameters on which the ranks last agreed, and the state of the outer optimizer. With a compression, it contains
        the residuals, which differ between ranks.

        Examples:
            >>> import torch, syncline as sl
            >>> ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1), strategy=sl.DiLoCo(8))
            >>> ddp.load_sync_state_dict(ddp.sync_state_dict())
        """
        return self._replica.state.state_dict()

    def load_sync_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `sync_state_dict` returned on the same rank, in a world of the same size. Nothing is sent.

        Raises:
            TypeError: `state` is not a mapping.
            ValueError: the state was saved under another strategy or compression, or from another module.
        """
        self._replica.state.load_state_dict(state)

    # ------------------------------------------------------------------ contract and records

    @property
    def contract(self) -> Contract:
        """A table of what is synchronized, when and how. After a step it also shows the last synchronizations."""
        return contract_of(self._replica.plan, self._replica.evidence())

    def explain(self, *, verbose: bool = False) -> str:
        """Return a timeline of one step, in words: of the last recorded step, or of the plan before the first step.

        The last sentence draws the conclusion: what synchronization cost, and which rank the others waited for.

        Args:
            verbose: whether to name each safety check that travels with the gradients.
        """
        gradients = self._replica.gradients
        return explain(
            self._replica.plan,
            self._replica.evidence(looks_ahead=True),
            gradients.layout.plans,
            gradients.names,
            verbose=checked_flag("verbose", verbose),
        )

    @property
    def last_step(self) -> BackwardRecord | None:
        """The record of the last backward on this rank; None before the first backward.

        `print(ddp.last_step)` prints a summary. `pprint.pprint(dataclasses.asdict(ddp.last_step))` prints every field.
        """
        return self._replica.gradients.ledger.last()

    def statistics(self) -> Statistics:
        """Return statistics of this wrapper's transport on this rank: collectives, bytes, waiting time, stragglers."""
        replica = self._replica
        return replace(
            replica.transport.statistics(), stragglers=tuple(replica.gradients.state.stragglers.records)
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters, as `torch.nn.Module.zero_grad` does.

        Raises:
            UnreducedGradients: some parameters got no gradient in the last backward. Every rank raises it.
        """
        replica = vars(self).get("_replica")  # a subclass that wraps parts of its module has none
        if replica is not None and replica.gradients.waits_for_more:
            replica.gradients.finish("zero_grad()")
        super().zero_grad(set_to_none)

    def train(self, mode: bool = True) -> Self:
        """Set the training mode, as `torch.nn.Module.train` does."""
        nn.Module.train(self, mode)
        return self

    # ------------------------------------------------------------------ saving and loading

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load a state of the wrapper, whose keys begin with `module.`, or a state of the bare module."""
        keys = [key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)]
        if are_of_the_bare_module(keys, self.module):
            values = {key: state_dict.pop(prefix + key) for key in keys}
            state_dict.update({f"{prefix}module.{key}": value for key, value in values.items()})
            # torch looks up the version of each submodule's state here, by the path that the submodule has now.
            metadata = metadata_of(state_dict) or {}
            found = {path: metadata[path] for path, _ in self.module.named_modules() if path in metadata}
            metadata.update({f"module.{path}".removesuffix("."): one for path, one in found.items()})
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __getstate__(self) -> dict[str, Any]:
        self._replica.refuse_sharded(
            "a wrapper cannot be copied or pickled, because the copy would not have the shards"
        )
        self._replica.drift.refuse(
            "a wrapper cannot be copied or pickled, because the copy would lack the state of the strategy"
        )
        self._check_default_group()
        return with_join_disabled(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled wrapper, over the default group. Hooks and optimizers must be registered again."""
        nn.Module.__setstate__(self, state)  # because torch's own would build its reducer
