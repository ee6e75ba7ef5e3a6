"""Undocumented names of torch's DistributedDataParallel that users and frameworks call.

Names found in use are supported as far as possible: Lightning (`reducer`, `_set_static_graph`,
`_register_builtin_comm_hook`), Accelerate and Megatron (`bucket_bytes_cap`,
`_set_params_and_buffers_to_ignore_for_model`), torch.compile (`_inside_ddp_forward`), torchrec and torch's own tests
(the rest). Names that reach further into torch's reducer raise an error with the alternative (see `REFUSED`). Other
names work as inherited from torch; a test covers all of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from syncline._torch.optimizers import as_overlapped
from syncline.buffers.policies import BufferHook
from syncline.ddp.replica import Replica
from syncline.errors import SynclineError
from syncline.gradients.comm_hook import checked_comm_hook
from syncline.session.world import transport_of
from syncline.tensors.broadcasting import TensorBroadcaster
from syncline.transport.base import Transport

if TYPE_CHECKING:
    from syncline.gradients.reducer import GradientSync


_FORWARD = "call the wrapper itself, whose forward does all of it"

_JOIN = "use `with ddp.join():`, or torch's Join with the wrapper in it"

_BUFFERS = "call ddp.sync_buffers_()"

_DELAYED = "give delay_all_reduce_named_params when the module is wrapped"

_CASTS = "mixed_precision= casts in forward, by autograd"

_IN_BACKWARD = "optimizers that step inside backward are found before the first step"

REFUSED = {
    "_check_and_sync_module_buffers": _JOIN,
    "_check_global_requires_backward_grad_sync": _JOIN,
    "_ddp_init_helper": "wrap the module again",
    "_delayed_all_reduce_hook": _DELAYED,
    "_find_common_rank": _JOIN,
    "_fire_reducer_autograd_hook": _CASTS,
    "_lazy_init": _IN_BACKWARD,
    "_match_all_reduce_for_bwd_pass": _JOIN,
    "_match_unused_params_allreduce": _JOIN,
    "_module_wait_for_copy_hook": _CASTS,
    "_passing_sync_batchnorm_handle": "modules are checked when they are wrapped; sl.nn.SyncBatchNorm needs no handle",
    "_post_forward": _FORWARD,
    "_pre_forward": _FORWARD,
    "_register_accum_grad_hook": "hooks are put on when the module is wrapped",
    "_register_delay_all_reduce_hook": _DELAYED,
    "_root_copy_hook": _CASTS,
    "_setup_in_backward_optimizers": _IN_BACKWARD,
    "_sync_buffers": _BUFFERS,
    "_sync_final_model": _JOIN,
    "_sync_module_buffers": _BUFFERS,
}
"""Methods of torch's class that drive its reducer, each with its alternative."""


class _NoReducer:
    """A replacement for the reducer of torch's class, for code that prepares it by hand. The methods do nothing.

    Args:
        gradients: the gradient synchronization that supplies the numbers.
    """

    def __init__(self, gradients: GradientSync) -> None:
        self._gradients = gradients

    def _get_local_used_map(self) -> Tensor:
        """Return how many ranks used each parameter in the last backward."""
        return torch.tensor(self._gradients.reduction.usage.num_ranks_using, dtype=torch.int32)

    def _rebuild_buckets(self) -> bool:
        return False

    def prepare_for_forward(self) -> None:
        pass

    def prepare_for_backward(self, tensors: Iterable[Tensor]) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name}: Syncline has no reducer of torch's. What it does is in `ddp.contract`, what it did in "
            "`ddp.explain()` and `ddp.last_step`"
        )


class TorchNames:
    """The part of torch's class beyond its public interface; a base of `DistributedDataParallel` only."""

    module: nn.Module
    find_unused_parameters: bool
    static_graph: bool
    gradient_as_bucket_view: bool
    _replica: Replica

    broadcast_bucket_size = 250 * 1024 * 1024
    use_side_stream_for_tensor_copies = False
    logger = None
    _divide_by_initial_world_size = True
    _has_joined = False
    _delay_all_reduce_all_params = False
    _use_python_reducer = False
    should_finalize_after_backward = False

    if TYPE_CHECKING:

        def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any: ...

    # ------------------------------------------------------------------ facts

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The torch.distributed group under the transport; None if there is none."""
        return self._replica.transport.group

    @process_group.setter
    def process_group(self, group: dist.ProcessGroup | None) -> None:
        self._update_process_group(group)

    @property
    def reducer(self) -> _NoReducer:
        """A replacement for torch's reducer."""
        return _NoReducer(self._replica.gradients)

    @property
    def device(self) -> torch.device:
        """The device of the module's first parameter."""
        return self._replica.gradients.parameters[0].device

    @property
    def device_type(self) -> str:
        """The type of the device: "cpu", "cuda"."""
        return self.device.type

    @property
    def is_multi_device_module(self) -> bool:
        """Whether the parameters are on several devices."""
        return len({parameter.device for parameter in self._module_parameters}) > 1

    @property
    def bucket_bytes_cap(self) -> int:
        """The largest cap, in bytes; torch.compile uses it to split graphs."""
        return self._replica.config.gradients.caps.largest_bytes

    @property
    def bucket_bytes_cap_list(self) -> list[int]:
        """The caps of the first buckets, if they were given as a list."""
        return list(self._replica.config.gradients.caps.listed_bytes)

    @property
    def bucket_bytes_cap_default(self) -> bool:
        """Whether no caps were given."""
        return self._replica.config.gradients.caps.is_default

    @property
    def parameters_to_ignore(self) -> set[str]:
        """Names of the parameters and buffers that are not synchronized."""
        return set(self._replica.selection.ignored)

    @property
    def modules_buffers(self) -> list[Tensor]:
        """The buffers that are synchronized, looked up at each access."""
        return list(self.named_module_buffers.values())

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """The buffers that are synchronized, by name, looked up at each access."""
        ignored = self.parameters_to_ignore
        return {name: b for name, b in self.module.named_buffers() if name not in ignored}

    @property
    def _module_parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self._replica.selection.parameters]

    @property
    def _has_rebuilt_buckets(self) -> bool:
        return self._replica.gradients.layout.order_is_learnt

    @property
    def _comm_hooks(self) -> list[tuple[Callable[..., Any], object]]:
        hook = self._replica.gradients.layout.comm_hook
        return [] if hook is None else [(hook.hook, hook.state)]

    @property
    def _distributed_rank(self) -> int:
        return self._replica.transport.rank

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Return the data that torch's logger would report, as far as they are known."""
        replica = self._replica
        last = replica.gradients.ledger.last()
        parameters = self._module_parameters
        plans = [bucket.plan for bucket in replica.gradients.layout.buckets]
        bucket_sizes = ", ".join(str(plan.numel * plan.itemsize_bytes) for plan in plans)
        data: dict[str, Any] = {
            "world_size": replica.transport.size,
            "rank": replica.transport.rank,
            "backend_name": replica.transport.name,
            "module_name": type(self.module).__name__,
            "iteration": replica.gradients.step,
            "bucket_cap_bytes": self.bucket_bytes_cap,
            "bucket_sizes": bucket_sizes,
            "initial_bucket_sizes": bucket_sizes,
            "broadcast_buffers": int(replica.buffers.enabled),
            "find_unused_parameters": int(self.find_unused_parameters),
            "gradient_as_bucket_view": int(self.gradient_as_bucket_view),
            "static_graph": int(self.static_graph),
            "join_uneven_inputs": int(self._has_joined),
            "is_multi_device_module": int(self.is_multi_device_module),
            "total_parameter_size_bytes": sum(p.numel() * p.element_size() for p in parameters),
            "num_parameter_tensors": len(parameters),
            "dtypes": ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters})),
            "has_rebuilt_buckets": int(self._has_rebuilt_buckets),
            "has_error": int(replica.gradients.reduction.out_of_step.text is not None),
        }
        hook = replica.gradients.layout.comm_hook
        if hook is not None:
            data["comm_hook"] = hook.name
        if replica.gradients.reduction.out_of_step.text is not None:
            data["error"] = replica.gradients.reduction.out_of_step.text
        if last is not None:
            data["unused_parameter_size"] = len(last.unused)
            data["num_buckets_reduced"] = len(last.buckets)
        return data

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            raise ValueError(
                f"expected a sample rate of 1 or more, got {sample_rate}; every step is recorded"
            )

    # ------------------------------------------------------------------ switches

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next backward synchronizes; `no_sync` switches it, and some frameworks set it."""
        return self._replica.gradients.controls.enabled

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._replica.gradients.controls.enable(value)

    @property
    def require_forward_param_sync(self) -> bool:
        """Whether the next forward may synchronize buffers, because the last one ran outside of no_sync and no_grad."""
        return self._replica.buffers.due

    @require_forward_param_sync.setter
    def require_forward_param_sync(self, value: bool) -> None:
        self._replica.buffers.due = value

    @property
    def forward_sync_buffers(self) -> bool:
        """Whether forwards synchronize buffers."""
        return self._replica.buffers.enabled

    @forward_sync_buffers.setter
    def forward_sync_buffers(self, value: bool) -> None:
        self._replica.buffers.enabled = value

    broadcast_buffers = forward_sync_buffers

    def will_sync_module_buffers(self) -> bool:
        """Return whether the next forward sends buffers."""
        replica = self._replica
        return replica.buffers.due and replica.buffers.enabled and bool(replica.selection.buffers)

    def _set_static_graph(self) -> None:
        """Behave as with `static_graph=True` at construction. Only before the first backward."""
        if self.static_graph:
            warnings.warn("static_graph is True already: no need to set it again", stacklevel=2)
            return
        if self._replica.gradients.num_backwards:
            raise RuntimeError(
                "_set_static_graph should be called before training loop starts, got it after step "
                f"{self._replica.gradients.step}"
            )
        self.static_graph = True
        self._replica.use_static_graph()

    def _update_process_group(self, new_process_group: dist.ProcessGroup | Transport | None) -> None:
        """Synchronize over another group from now on; its ranks must be equal already."""
        self._replica.use_transport(transport_of(new_process_group))

    def _remove_autograd_hooks(self) -> None:
        self._replica.gradients.remove_hooks()

    def _check_default_group(self) -> None:
        if self._replica.transport is not transport_of(None):
            raise RuntimeError(
                "a wrapper can be pickled or copied only over the default group: copy its module, and wrap the copy"
            )

    def _check_reducer_finalized(self) -> None:
        if self._replica.gradients.is_in_backward:
            raise RuntimeError(
                "expected the previous backward to have ended: an exception ended it early, or it is still running"
            )

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether torch 2.15's `finalize_backward` has to be called; always False, because backward waits itself."""
        return False

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        if required:
            self.finalize_backward()

    def finalize_backward(self) -> None:
        """Raise: a backward cannot be finalized by hand."""
        raise SynclineError(
            "a backward ends with reduced gradients: it cannot be finalized by hand, and need not be"
        )

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Do nothing, because outputs are never cloned."""

    def _assign_modules_buffers(self) -> None:
        """Do nothing, because buffers are looked up when they are needed."""

    def _clear_grad_buffer(self) -> None:
        """Do nothing, because delayed gradients have ordinary buckets."""

    def _set_sparse_metadata(self, global_unique_ids: object) -> None:
        """Do nothing, because sparse rows are exchanged without metadata."""

    # ------------------------------------------------------------------ other ways to register a hook

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        kinds: Any = dist.BuiltinCommHookType  # type: ignore[attr-defined]
        hooks = {
            kinds.ALLREDUCE: default_hooks.allreduce_hook,
            kinds.FP16_COMPRESS: default_hooks.fp16_compress_hook,
        }
        if comm_hook_type not in hooks:
            raise ValueError(f"expected one of {', '.join(map(str, hooks))}; got {comm_hook_type}")
        hook = checked_comm_hook(self.process_group, hooks[comm_hook_type], label=str(comm_hook_type))
        self._replica.use_comm_hook(hook)

    def _register_fused_optim(self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any) -> None:
        try:
            as_overlapped(optim, optim_params, *args, **kwargs).register_ddp(self)
        except NotImplementedError as error:
            raise RuntimeError(f"{optim} cannot step in a communication hook") from error

    def _register_buffer_comm_hook(
        self, state: object, hook: Callable[..., Any], comm_hook_location: Any = None
    ) -> None:
        if not callable(hook):
            raise TypeError(f"expected a callable buffer hook, got {type(hook).__name__}")
        after = comm_hook_location is None or comm_hook_location.name == "POST_FORWARD"
        self._replica.drift.refuse(
            "buffers are synchronized with parameters, so that a buffer hook would never be called"
        )
        self._replica.registered.use_buffer_hook(BufferHook(state, hook, after_forward=after))

    def _check_comm_hook(self, hook: object) -> None:
        checked_comm_hook(None, hook)

    def _check_sync_bufs_pre_fwd(self) -> bool:
        hook = self._replica.registered.buffer_hook
        return self.will_sync_module_buffers() and (hook is None or not hook.after_forward)

    def _check_sync_bufs_post_fwd(self) -> bool:
        return self.will_sync_module_buffers() and not self._check_sync_bufs_pre_fwd()

    def _default_broadcast_coalesced(
        self,
        bufs: Sequence[Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        """Copy one rank's values of tensors (of the buffers, if none are given) to all ranks; buffer hooks call it."""
        tensors = self.modules_buffers if bufs is None else bufs
        self._distributed_broadcast_coalesced(tensors, bucket_size, authoritative_rank)

    def _distributed_broadcast_coalesced(
        self, tensors: Sequence[Tensor], buffer_size: int | None, authoritative_rank: int = 0
    ) -> None:
        broadcaster = TensorBroadcaster([tensor.detach() for tensor in tensors], self._replica.transport)
        broadcaster.start(authoritative_rank).wait()

    def _before_hooked_forward(self, hook: BufferHook, *, next_is_due: bool) -> None:
        hook.is_due = self._replica.buffers.leave_to_hook(next_is_due=next_is_due)
        if not hook.after_forward:
            self._run_buffer_hook(hook)

    def _run_buffer_hook(self, hook: BufferHook) -> None:
        if hook.is_due:
            self._replica.gradients.controls.wait_for(hook.run(self.named_module_buffers))


def _refusal(name: str, instead: str) -> Callable[..., None]:
    def refuse(self: object, *args: object, **kwargs: object) -> None:
        raise SynclineError(f"{name}: Syncline has no reducer of torch's to do this with; {instead}")

    refuse.__name__, refuse.__doc__ = name, f"Refused: {instead}."
    return refuse


for _name, _instead in REFUSED.items():
    setattr(TorchNames, _name, _refusal(_name, _instead))
