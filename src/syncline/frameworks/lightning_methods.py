"""The methods that make a Syncline strategy of Lightning's `DDPStrategy`, for the Trainer and for Fabric.

Lightning is published as two families of packages, `lightning` and `pytorch_lightning` with `lightning_fabric`. A
strategy of one family is no strategy of the other. So these classes leave the base class open.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from syncline.ddp.wrapper import DistributedDataParallel
from syncline.errors import UnreducedGradients
from syncline.nn import SyncBatchNorm
from syncline.session.world import init, is_joined, shutdown
from syncline.strategies import EveryStep
from syncline.transport import ReduceOp
from syncline.trees import leaves, map_leaves
from syncline.user_code import warn_user
from syncline.verbs import all_reduce_, barrier, gather

if TYPE_CHECKING:
    _DDPStrategy = Any
else:
    _DDPStrategy = object

_STATE = "syncline"
"""The key of a checkpoint under which the states of the synchronization are saved, one per rank."""

_OPERATIONS: dict[str, ReduceOp] = {
    "mean": "sum",
    "avg": "sum",
    "sum": "sum",
    "max": "max",
    "min": "min",
    "product": "product",
}
"""The operation that runs for each of Lightning's operations. A mean is divided afterwards, as Lightning does."""


class SharedMethods(_DDPStrategy):  # type: ignore[misc]
    """The methods that both strategies have: the ranks join, and a module is wrapped.

    Args:
        transport: how tensors are sent, as in `sl.init`.
        kwargs: the other arguments of Lightning's `DDPStrategy`, and all arguments of `sl.DistributedDataParallel`.
    """

    def __init__(self, *args: Any, transport: str = "auto", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._transport = transport
        self._has_joined = False

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register each name of Lightning's `DDPStrategy`, with `syncline` in place of `ddp`."""
        super().register_strategies(_Renaming(strategy_registry))

    def setup_environment(self) -> None:
        """Let Lightning create the process group. Then compare the arguments of the ranks and select the transport."""
        super().setup_environment()
        if not is_joined():
            init(self._transport, timeout=self._timeout, device=self.root_device)
            self._has_joined = True

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all ranks. If a rank is lost, the error names it."""
        if dist.is_initialized():
            barrier()

    def reduced(self, tensor: Any, group: Any, reduce_op: Any) -> bool:
        """Reduce a tensor in place, as Lightning does for logged values. If a rank is lost, the error names it.

        Returns:
            False if Lightning has to reduce the tensor: over another group, or by another operation.
        """
        name = str(reduce_op).rpartition(".")[2].lower()  # "mean", or a ReduceOp of torch
        is_default = group in (None, dist.group.WORLD) and dist.is_initialized()
        if not (is_default and isinstance(tensor, Tensor) and name in _OPERATIONS):
            return False
        values = tensor.detach()
        all_reduce_(values, _OPERATIONS[name])
        if name in ("mean", "avg"):
            values.copy_(values / dist.get_world_size())
        return True

    def wrapped(self, module: nn.Module, device_ids: list[int] | None) -> DistributedDataParallel:
        """Return the module in a wrapper with the arguments that the user gave the strategy."""
        return DistributedDataParallel(module, device_ids=device_ids, **self._ddp_kwargs)

    @property
    def drifts(self) -> bool:
        """Whether replicas differ between two parameter syncs."""
        return not isinstance(self._ddp_kwargs.get("strategy") or EveryStep(), EveryStep)


class TrainerMethods(SharedMethods):
    """The methods of the strategy for the Trainer."""

    optimizers: Any

    def setup(self, trainer: Any) -> None:
        """Wrap the module and create the optimizers. With `sync_batchnorm=True`, also on the CPU."""
        if type(self._layer_sync).__name__ == "TorchSyncBatchNorm":
            self._layer_sync.apply = SyncBatchNorm.convert_sync_batchnorm
        super().setup(trainer)

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        return self.wrapped(model, self.determine_ddp_device_ids())

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all ranks in place, and return it."""
        return tensor if self.reduced(tensor, group, reduce_op) else super().reduce(tensor, group, reduce_op)

    def setup_optimizers(self, trainer: Any) -> None:
        """Create the optimizers of the LightningModule, and attach them."""
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            attach(self.model, optimizer)
        # Lightning wraps the attached optimizers again, with their new methods.
        self.optimizers = self.optimizers

    def setup_precision_plugin(self) -> None:
        """Let all ranks compute the norm for clipping together if each has only its shard of the gradients."""
        super().setup_precision_plugin()
        if self._ddp_kwargs.get("sharded") and isinstance(self.model, DistributedDataParallel):
            self.precision_plugin.clip_grad_by_norm = self._clip_grad_by_norm

    def _clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> Tensor:
        norm: Tensor = self.model.clip_grad_norm_(clip_val)
        return norm

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state of the LightningModule, after a parameter sync if replicas have drifted apart."""
        if self.drifts and isinstance(self.model, DistributedDataParallel):
            self.model.sync_parameters_()
        state: dict[str, Any] = super().lightning_module_state_dict()
        return state

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint, with the states of the synchronization on all ranks."""
        if "optimizer_states" in checkpoint and isinstance(self.model, DistributedDataParallel):
            checkpoint |= gathered_state(self.model)
        super().save_checkpoint(checkpoint, *args, **kwargs)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the states of the optimizers and, in a world of the same size, of the synchronization."""
        super().load_optimizer_state_dict(checkpoint)
        states = checkpoint.get(_STATE, [])
        if len(states) == self.world_size:
            self.model.load_sync_state_dict(states[self.global_rank])
        elif not states and self.model.sync_state_dict():
            warn_user(
                "the checkpoint has no state of the strategy or the compression, so both begin anew. Lightning has "
                "removed the wrapper when trainer.fit returns: save with the ModelCheckpoint callback, or by "
                "trainer.save_checkpoint before the end of fit (in a callback's on_train_end, for example)",
                UserWarning,
            )
        elif states:
            warn_user(
                f"the checkpoint has the states of {len(states)} ranks for the strategy or the compression, but "
                f"{self.world_size} ranks load it. The parameters and optimizers are resumed, and these states are not",
                UserWarning,
            )

    def on_train_end(self) -> None:
        """Make replicas that have drifted apart equal at the end of training."""
        super().on_train_end()
        if self.drifts:
            self.model.sync_parameters_()

    def on_exception(self, exception: BaseException) -> None:
        """Leave the other ranks. Those that wait for this rank raise `PeerFailed`, with the traceback."""
        super().on_exception(exception)
        if isinstance(exception, UnreducedGradients):
            exception.add_note(
                "Under Lightning, give strategy='syncline_find_unused_parameters_true' to the Trainer, or "
                "SynclineStrategy(find_unused_parameters=True)"
            )
        if self._has_joined:
            self._has_joined = False
            shutdown()  # because the exception is being handled, it is sent to the other ranks


class FabricMethods(SharedMethods):
    """The methods of the strategy for Fabric."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("sharded"):
            raise ValueError(
                "expected no sharded=True under Fabric, because its optimizers do not pass zero_grad() on to the "
                "optimizer that has the shards. Use Lightning's Trainer, or sl.DistributedDataParallel without Fabric"
            )
        super().__init__(*args, **kwargs)
        self._wrappers: list[DistributedDataParallel] = []

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Return the wrapped module."""
        self._wrappers.append(self.wrapped(module, self._determine_ddp_device_ids()))
        return self._wrappers[-1]

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Attach the optimizer to the wrappers of the parameters that it trains."""
        for wrapper in self._wrappers:
            attach(wrapper, optimizer)
        own: Optimizer = super().setup_optimizer(optimizer)
        return own

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all ranks in place, and return it."""
        return (
            tensor if self.reduced(tensor, group, reduce_op) else super().all_reduce(tensor, group, reduce_op)
        )

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint, after a parameter sync if replicas have drifted apart."""
        for wrapper in state.values():
            if self.drifts and isinstance(wrapper, DistributedDataParallel):
                wrapper.sync_parameters_()
        super().save_checkpoint(path, state, *args, **kwargs)


def attach(wrapper: DistributedDataParallel, optimizer: Optimizer) -> None:
    """Attach an optimizer to the wrapper if it has parameters of the wrapped module."""
    own = {id(parameter) for parameter in wrapper.parameters()}
    if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        wrapper.attach(optimizer, replace=False)


def gathered_state(wrapper: DistributedDataParallel) -> dict[str, Any]:
    """Return the entry for a checkpoint with the states of the strategy and of the compression on all ranks.

    This is a collective call if there is such a state. Only rank 0 gets the result, with tensors on the CPU.
    """
    own = wrapper.sync_state_dict()
    if not own:
        return {}
    parts = [leaf for _, leaf in leaves(own)]
    described = [list(part.shape) if isinstance(part, Tensor) else part for part in parts]
    by_rank = gather(described, objects=True)
    for index, part in enumerate(parts):
        if isinstance(
            part, Tensor
        ):  # one call per tensor, so that other ranks hold only one tensor of all ranks
            shapes = [of_rank[index] for of_rank in by_rank]
            pieces = gather(part.flatten()).cpu().split([math.prod(shape) for shape in shapes])
            for of_rank, piece in zip(by_rank, pieces, strict=True):
                of_rank[index] = piece.view(of_rank[index]).clone() if dist.get_rank() == 0 else None
    return {_STATE: [_with_leaves(own, of_rank) for of_rank in by_rank]} if dist.get_rank() == 0 else {}


def _with_leaves(tree: Any, new: Iterable[Any]) -> Any:
    """Return a copy of a nested container with other leaves, in order."""
    following = iter(new)
    return map_leaves(tree, lambda path, leaf: next(following))


class _Renaming:
    """A registry of strategies that registers the names of Lightning's `DDPStrategy` for ours."""

    def __init__(self, registry: Any) -> None:
        self._registry = registry

    def register(self, name: str, strategy: type, description: str, **init_params: Any) -> None:
        self._registry.register(
            name.replace("ddp", "syncline"),
            strategy,
            description=description.replace("DDP", "Syncline"),
            override=True,  # because a notebook may import this module again
            **init_params,
        )
