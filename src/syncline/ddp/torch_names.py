"""The undocumented methods and attributes of torch's DistributedDataParallel that users and frameworks use.

They are supported as far as possible, because other code uses them: Lightning (`reducer`, `_set_static_graph`,
`_register_builtin_comm_hook`), Accelerate and Megatron (`bucket_bytes_cap`,
`_set_params_and_buffers_to_ignore_for_model`), torch.compile (`_inside_ddp_forward`), torchrec, and torch's own tests.
Methods that drive torch's reducer raise an error that names the alternative (see `REFUSED`). Methods and attributes
that Syncline does not define are inherited from torch, and work unchanged. A test covers every name.
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
from syncline.ddp.replica import UNCHANGED, Replica
from syncline.errors import SynclineError
from syncline.gradients.comm_hook import checked_comm_hook
from syncline.session.world import transport_of
from syncline.tensors.broadcasting import TensorBroadcaster
from syncline.transport.base import Transport

if TYPE_CHECKING:
    from syncline.gradients.reducer import GradientSync


_FORWARD = "call the wrapper itself, which runs the whole forward"
_JOIN = "use `with ddp.join():`, or torch's Join with the wrapper in its list"
_BUFFERS = "call ddp.sync_buffers_()"
_DELAYED = "give delay_all_reduce_named_params when you wrap the module"
_CASTS = "give mixed_precision= when you wrap the module"
_IN_BACKWARD = (
    "register optimizers that step inside backward before the first step; the wrapper finds them by itself"
)

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
    "_passing_sync_batchnorm_handle": "use sl.nn.SyncBatchNorm, which needs no handle",
    "_post_forward": _FORWARD,
    "_pre_forward": _FORWARD,
    "_register_accum_grad_hook": "wrap the module, which installs the hooks",
    "_register_delay_all_reduce_hook": _DELAYED,
    "_root_copy_hook": _CASTS,
    "_setup_in_backward_optimizers": _IN_BACKWARD,
    "_sync_buffers": _BUFFERS,
    "_sync_final_model": _JOIN,
    "_sync_module_buffers": _BUFFERS,
}
"""The methods of torch's class that drive torch's reducer, each with the alternative that its error names."""


class _NoReducer:
    """A replacement for torch's reducer, for code that calls the reducer itself. Most methods do nothing.

    Args:
        gradients: the synchronization of gradients. It knows which parameters were used.
    """

    def __init__(self, gradients: GradientSync) -> None:
        self._gradients = gradients

    def _get_local_used_map(self) -> Tensor:
        """Return an int32 tensor that holds, for each parameter, how many ranks used it in the last backward."""
        return torch.tensor(self._gradients.reduction.usage.num_ranks_using, dtype=torch.int32)

    def _rebuild_buckets(self) -> bool:
        return False

    def prepare_for_forward(self) -> None:
        pass

    def prepare_for_backward(self, tensors: Iterable[Tensor]) -> None:
        """Let the next backward be reduced also if its forward ran under `no_sync` (`trigger_sync_in_backward`)."""
        self._gradients.controls.announce_reduction()

    def _delay_all_reduce(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"reducer.{name} is not supported, because Syncline does not use torch's reducer. Print ddp.contract to "
            "see what is synchronized, and ddp.explain() or ddp.last_step to see what the last step did"
        )


class TorchNames:
    """The undocumented interface of torch's class. Only `DistributedDataParallel` inherits from this class."""

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

    # ------------------------------------------------------------------ facts

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The torch.distributed process group with the ranks of this wrapper; None if there is none."""
        return self._replica.transport.group

    @process_group.setter
    def process_group(self, group: dist.ProcessGroup | None) -> None:
        self._update_process_group(group)

    @property
    def device(self) -> torch.device:
        """The device of the module's first parameter."""
        return self._replica.gradients.parameters[0].device

    @property
    def is_multi_device_module(self) -> bool:
        """True if the parameters are on more than one device."""
        return len({parameter.device for parameter in self._module_parameters}) > 1

    reducer = property(lambda self: _NoReducer(self._replica.gradients))
    """A replacement for torch's reducer, whose methods mostly do nothing."""
    device_type = property(lambda self: self.device.type)
    """The type of the module's device, such as "cpu" or "cuda"."""
    bucket_bytes_cap = property(lambda self: self._replica.config.gradients.caps.largest_bytes)
    """The largest bucket cap in bytes. torch.compile splits graphs by this size."""
    bucket_bytes_cap_list = property(lambda self: list(self._replica.config.gradients.caps.listed_bytes))
    """The caps of the first buckets in bytes, from `bucket_cap_mb_list`; empty if that argument was not given."""
    bucket_bytes_cap_default = property(lambda self: self._replica.config.gradients.caps.is_default)
    """Whether Syncline chose the bucket caps, because the user gave none."""
    parameters_to_ignore = property(lambda self: set(self._replica.selection.ignored))
    """The names of the parameters and buffers that are not synchronized."""
    modules_buffers = property(lambda self: list(self.named_module_buffers.values()))
    """The synchronized buffers that the module has now."""
    _has_rebuilt_buckets = property(lambda self: self._replica.gradients.layout.order_is_learnt)
    _distributed_rank = property(lambda self: self._replica.transport.rank)

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """The synchronized buffers that the module has now, by name."""
        ignored = self.parameters_to_ignore
        return {name: b for name, b in self.module.named_buffers() if name not in ignored}

    @property
    def _module_parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self._replica.selection.parameters]

    @property
    def _comm_hooks(self) -> list[tuple[Callable[..., Any], object]]:
        hook = self._replica.gradients.layout.comm_hook
        return [] if hook is None else [(hook.hook, hook.state)]

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Return those entries of torch's logging data that Syncline knows, by name."""
        replica, gradients = self._replica, self._replica.gradients
        last, hook, error = (
            gradients.ledger.last(),
            gradients.layout.comm_hook,
            gradients.reduction.out_of_step,
        )
        parameters = self._module_parameters
        plans = gradients.layout.plans
        bucket_sizes = ", ".join(str(plan.numel * plan.itemsize_bytes) for plan in plans)
        data: dict[str, Any] = {
            "world_size": replica.transport.size,
            "rank": replica.transport.rank,
            "backend_name": replica.transport.name,
            "module_name": type(self.module).__name__,
            "iteration": gradients.step,
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
            "has_error": int(error.text is not None),
            "comm_hook": None if hook is None else hook.name,
            "error": error.text,
            "unused_parameter_size": None if last is None else len(last.unused),
            "num_buckets_reduced": None if last is None else len(last.buckets),
        }
        return {name: value for name, value in data.items() if value is not None}

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        if sample_rate < 1:
            raise ValueError(
                f"expected sample_rate to be at least 1; got {sample_rate}. Pass 1, because Syncline records every step"
            )

    # ------------------------------------------------------------------ switches

    @property
    def require_backward_grad_sync(self) -> bool:
        """True if the next backward reduces gradients. `no_sync` changes this flag, and some frameworks set it."""
        return self._replica.gradients.controls.enabled

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._replica.gradients.controls.enable(value)

    @property
    def require_forward_param_sync(self) -> bool:
        """True if buffers are due in the next forward. `forward_sync_buffers` can turn their synchronization off.

        It is False if the last forward ran under `no_sync` or `no_grad`.
        """
        return self._replica.buffers.due

    @require_forward_param_sync.setter
    def require_forward_param_sync(self, value: bool) -> None:
        self._replica.buffers.due = value

    @property
    def forward_sync_buffers(self) -> bool:
        """True if the synchronization of buffers before forwards is turned on."""
        return self._replica.buffers.enabled

    @forward_sync_buffers.setter
    def forward_sync_buffers(self, value: bool) -> None:
        self._replica.buffers.enabled = value

    broadcast_buffers = forward_sync_buffers

    def will_sync_module_buffers(self) -> bool:
        """Return whether the next forward synchronizes buffers."""
        replica = self._replica
        return replica.buffers.due and replica.buffers.are_sent

    def _set_static_graph(self) -> None:
        """Behave from now on as if `static_graph=True` had been given. Call this method before the first backward."""
        if self.static_graph:
            warnings.warn(
                "static_graph is already True: leave out the call of _set_static_graph()", stacklevel=2
            )
            return
        if self._replica.gradients.state.num_backwards:
            raise RuntimeError(
                "_set_static_graph should be called before training loop starts, but it was called after step "
                f"{self._replica.gradients.step}. Call it right after you wrap the module"
            )
        self.static_graph = True
        self._replica.use_static_graph()

    def _update_process_group(self, new_process_group: dist.ProcessGroup | Transport | None) -> None:
        """Synchronize over another group from now on. A collective call of that group.

        The replicas of the ranks in the new group must already be equal.

        Raises:
            ValueError: the wrapper is inside of `sl.diverge`, is sharded, or has a strategy under which replicas drift.
        """
        self._replica.drift.refuse(UNCHANGED)
        self._replica.refuse_sharded(f"the bounds of the shards are fixed, so {UNCHANGED}")
        self._replica.use_transport(transport_of(new_process_group))

    def _remove_autograd_hooks(self) -> None:
        self._replica.gradients.remove_hooks()

    def _check_default_group(self) -> None:
        if self._replica.transport is not transport_of(None):
            raise RuntimeError(
                "only a wrapper over the default group can be pickled or copied, but this wrapper is over "
                f"{self._replica.transport.name}. Pickle or copy ddp.module instead, and wrap the result"
            )

    def _check_reducer_finalized(self) -> None:
        if self._replica.gradients.is_in_backward:
            raise RuntimeError(
                f"rank {self._replica.transport.rank}: expected the previous backward to have ended, but it is still "
                "running, or an exception has interrupted it. Run backward to its end before this call"
            )

    @property
    def require_manual_backward_finalization(self) -> bool:
        """Whether a user must call `finalize_backward`. Always False, because backward itself waits for all
        gradients."""
        return False

    @require_manual_backward_finalization.setter
    def require_manual_backward_finalization(self, required: bool) -> None:
        if required:
            self.finalize_backward()

    def finalize_backward(self) -> None:
        """Raise an error, because backward itself waits for all gradients."""
        raise SynclineError(
            "finalize_backward() is not supported, because loss.backward() returns only when all gradients are "
            "reduced. Leave out the call, and do not set require_manual_backward_finalization to True"
        )

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Do nothing, because the wrapper never clones outputs."""

    def _assign_modules_buffers(self) -> None:
        """Do nothing, because Syncline looks up the buffers when it needs them."""

    def _clear_grad_buffer(self) -> None:
        """Do nothing, because delayed gradients have ordinary buckets, not a buffer of their own."""

    def _set_sparse_metadata(self, global_unique_ids: object) -> None:
        """Do nothing, because Syncline exchanges sparse rows without metadata."""

    # ------------------------------------------------------------------ other ways to register a hook

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        kinds: Any = dist.BuiltinCommHookType  # type: ignore[attr-defined]
        hooks = {
            kinds.ALLREDUCE: default_hooks.allreduce_hook,
            kinds.FP16_COMPRESS: default_hooks.fp16_compress_hook,
        }
        if comm_hook_type not in hooks:
            raise ValueError(
                f"expected comm_hook_type to be one of {', '.join(map(str, hooks))}; got {comm_hook_type}"
            )
        hook = checked_comm_hook(self.process_group, hooks[comm_hook_type], label=str(comm_hook_type))
        self._replica.registered.use_comm_hook(hook)

    def _register_fused_optim(self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any) -> None:
        try:
            as_overlapped(optim, optim_params, *args, **kwargs).register_ddp(self)
        except NotImplementedError as error:
            raise RuntimeError(
                f"expected an optimizer class that can step inside a communication hook; got {optim}: {error}"
            ) from error

    def _register_buffer_comm_hook(
        self, state: object, hook: Callable[..., Any], comm_hook_location: Any = None
    ) -> None:
        if not callable(hook):
            raise TypeError(f"expected the buffer hook to be callable; got a {type(hook).__name__}")
        after = comm_hook_location is None or comm_hook_location.name == "POST_FORWARD"
        self._replica.drift.refuse(
            "buffers are synchronized in parameter syncs, which never call a buffer hook"
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
        """Broadcast tensors from one rank, as buffer hooks for torch's class request it. A collective call.

        Args:
            bufs: the tensors. Pass None to broadcast all synchronized buffers.
            bucket_size: accepted for compatibility with torch. Not used.
            authoritative_rank: the rank whose values are broadcast.
        """
        tensors = self.modules_buffers if bufs is None else bufs
        self._distributed_broadcast_coalesced(tensors, bucket_size, authoritative_rank)

    def _distributed_broadcast_coalesced(
        self, tensors: Sequence[Tensor], buffer_size: int | None, authoritative_rank: int = 0
    ) -> None:
        broadcaster = TensorBroadcaster([tensor.detach() for tensor in tensors], self._replica.transport)
        broadcaster.start(authoritative_rank).wait()


def _refusal(name: str, instead: str) -> Callable[..., None]:
    def refuse(self: object, *args: object, **kwargs: object) -> None:
        raise SynclineError(
            f"{name}() is not supported, because Syncline does not use torch's reducer. Instead, {instead}"
        )

    refuse.__name__, refuse.__doc__ = name, f"Raise an error. Instead, {instead}."
    return refuse


for _name, _instead in REFUSED.items():
    setattr(TorchNames, _name, _refusal(_name, _instead))
