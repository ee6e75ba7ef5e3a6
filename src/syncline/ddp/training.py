"""The methods of the wrapper that a training loop calls besides forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Joinable
from torch.optim import Optimizer

from syncline._torch.modules import is_in_join
from syncline.checks import checked_number, checked_truth, suggests_arguments
from syncline.ddp.torch_names import TorchNames
from syncline.gradients.comm_hook import checked_comm_hook
from syncline.gradients.riders.items import checked_num_items
from syncline.gradients.riders.metrics import check_metric

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


@suggests_arguments
class TrainingMethods(TorchNames, Joinable):
    """The methods of the wrapper for a training loop. Only `DistributedDataParallel` inherits from this class."""

    def __init__(self) -> None:
        """Initialize what `super(DistributedDataParallel, self).__init__()` initializes under torch's class.

        Subclasses that wrap the parts of a module by themselves, such as mmengine's, call it instead of the
        constructor.
        """
        nn.Module.__init__(self)  # type: ignore[arg-type]  # the wrapper is a module
        Joinable.__init__(self)

    def attach(
        self, optimizer: AnyOptimizer, *, elementwise: bool | None = None, replace: bool | None = None
    ) -> AnyOptimizer:
        """Attach an optimizer, so that the ranks compare its settings and the number of its steps.

        Attach the optimizer on all ranks. In each synchronized backward the ranks compare the learning rates and other
        settings in `param_groups`, and the number of calls of `step`. A difference raises an error on all ranks, before
        any optimizer steps. A step also raises an error if the last backward ran under `no_sync`, because its gradients
        were not reduced.

        Under `on_nonfinite="skip"`, an attached optimizer discards a step whose gradients are not finite.

        With `sharded=True` you must attach every optimizer. The parameters of the optimizer are then replaced by this
        rank's shards, and its state is cut in the same way. `optimizer.state_dict()` becomes a collective call.

        You may attach several optimizers. A new optimizer is added if it has no parameter of this module in common with
        an attached optimizer. It replaces an attached optimizer if it has all parameters of that optimizer, for example
        when a notebook creates its optimizer again. A replaced optimizer is no longer compared or kept in memory, and
        its `step` raises an error. If the new optimizer has only some parameters of an attached optimizer, choose by
        `replace`.

        Args:
            optimizer: an optimizer of parameters of this module. It may also have other parameters. You may create
                schedulers and GradScalers before or after this call.
            elementwise: whether the optimizer updates each element independently of all other elements. It matters only
                with `sharded=True`. If True, a shard is a flat span over several parameters. If False, a shard consists
                of whole parameters, which is correct if the update of a parameter depends on no other parameter. None
                lets Syncline decide: True for AdamW, SGD and other optimizers of torch that update each element
                independently, False for all other optimizers.
            replace: True replaces all attached optimizers that have any parameter of the new one. False keeps them, so
                that several optimizers can step the same parameter. With `sharded=True`, only one optimizer can step a
                parameter. None applies the rule in the text above.

        Returns:
            The same optimizer, whose `step` now checks the gradients and settings first. If the optimizer was attached
            before, the call has no effect.

        Raises:
            TypeError: `optimizer` is not an optimizer.
            ValueError: `optimizer` has no parameter of this module; it has only some parameters of an attached
                optimizer, and `replace` is None; or it cannot be sharded.
            RuntimeError: optimizers of this module step inside backward.

        Examples:
            >>> import torch, syncline as sl
            >>> ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1))
            >>> optimizer = ddp.attach(torch.optim.AdamW(ddp.parameters()))
            >>> print(ddp.contract["optimizer"].when)
            never: equal by construction
        """
        self._replica.registered.attach(optimizer, elementwise=elementwise, replaces=replace)
        return optimizer

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Clip the total norm of all reduced gradients, as `torch.nn.utils.clip_grad_norm_` does.

        Reduced gradients are equal on all ranks. So their norm is equal too, and nothing is sent. With `sharded=True`,
        the ranks combine the norms of their shards in one small collective. Gradients of parameters under `ignore=`
        do not count, because they differ between ranks. With a GradScaler, call `scaler.unscale_(optimizer)` first.

        Args:
            max_norm: the largest norm that is allowed. Gradients with a larger norm are scaled down to it.
            norm_type: the order of the norm, such as 2. With `math.inf` it is the largest absolute value of an element.
            error_if_nonfinite: raise an error if the norm is NaN or infinite.
            foreach: use the implementation for many tensors at once. None lets torch choose. With `sharded=True` it has
                no effect.

        Returns:
            The norm before clipping, of shape ().

        Raises:
            SynclineError: the gradients were not reduced, because the last backward ran under `no_sync`.
            RuntimeError: the norm is not finite, and `error_if_nonfinite` is True.

        Examples:
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
        replica.registered.refuse_unreduced("clip_grad_norm_()")
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
        """Register a communication hook, as in torch: a function `hook(state, bucket)` that reduces each bucket.

        The hook receives the gradients undivided, in a `GradBucket` with torch's methods. It must divide them
        itself, and return a `torch.futures.Future` of the reduced flat tensor. Register one hook on all ranks, at the
        same point between two backwards. The hooks that torch provides call torch.distributed directly, over the
        process group that you pass as `state`.

        Args:
            state: the first argument of each call of the hook.
            hook: the function `hook(state, bucket)`.

        Raises:
            TypeError: the hook is not callable.
            ValueError: the annotations of the hook are wrong, the module is sharded, or it has a compression.
            RuntimeError: a hook is already registered, or a backward is running.

        Examples:
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
        self._replica.registered.use_comm_hook(checked_comm_hook(state, hook))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients in `.grad` without reducing them.

        `no_sync` applies to the backward passes that *run* inside the block. In torch's class, the place
        of the forward decides instead. The next backward outside the block reduces all accumulated gradients.

        Examples:
            >>> import torch, syncline as sl
            >>> ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1))
            >>> with ddp.no_sync():
            ...     ddp(torch.ones(1, 2)).sum().backward()
            >>> ddp(torch.ones(1, 2)).sum().backward()
            >>> ddp.module.bias.grad
            tensor([2.])
        """
        with self._replica.gradients.controls.disabled():
            yield

    @contextmanager
    def normalize_by(self, num_items: int) -> Iterator[None]:
        """Divide the sum of the gradients by the number of items on all ranks, instead of by the number of ranks.

        Put this block around the forward and backward of a loss that is the *sum* over `num_items` tokens or samples.
        `.grad` becomes the sum of the gradients over ranks and accumulated micro-batches, divided by the total number
        of items. This is exact even if batches differ in size. The numbers of items are sent with the last bucket.

        The sums are divided only after they are reduced. In float16 a sum must not exceed 65,504, the largest float16.

        Args:
            num_items: the number of items in this rank's loss. A rank can have 0 items if another rank has some, but it
                must still run the backward.

        Raises:
            TypeError: `num_items` is not an integer.
            ValueError: `num_items` is negative, or 0 on all ranks; blocks are nested; micro-batches inside and outside
                of a block are mixed; or the registered communication hook divides the gradients.
            SynclineError: only some ranks use `normalize_by`.

        Examples:
            >>> import torch, syncline as sl
            >>> ddp = sl.DistributedDataParallel(torch.nn.Linear(1, 1))
            >>> for batch in (torch.ones(3, 1), torch.ones(1, 1)):
            ...     with ddp.normalize_by(len(batch)):
            ...         ddp(batch).sum().backward()
            >>> ddp.module.weight.grad
            tensor([[1.]])
        """
        gradients = self._replica.gradients
        hook = gradients.layout.comm_hook
        if hook is not None:
            hook.refuse_own_division("Use only one of normalize_by and the hook")
        with gradients.state.normalizer.block(checked_num_items(num_items)):
            yield

    def report(self, *unnamed: object, weight: float | Tensor = 1.0, **metrics: float | Tensor) -> None:
        """Average metrics over all ranks. The values travel with the next gradients, without a separate collective.

        Call this method on all ranks, with the same names, between forward and backward. After a synchronized backward
        `ddp.last_step.metrics` holds the means, which are equal bit for bit on every rank. Values that you report for
        micro-batches under `no_sync` are averaged together with the values of the next synchronized backward. To
        average values at any other time, use `sl.mean`.

        Args:
            unnamed: nothing. A metric without a name is an error.
            weight: the weight of this rank's values, such as its number of samples. It must be finite and at least 0.
            metrics: the values by name: numbers, or tensors of one element on any device. They are read when the last
                bucket is sent, and are sent as float32.

        Raises:
            TypeError: a value is not a real number, or has no name.
            ValueError: the weight is negative, infinite or NaN; or no metric was given.
            ContractMismatch: the ranks report different names. The next backward raises this error, on every rank.
            SynclineError: a name is new inside `join`, where the ranks without inputs cannot report it.

        Examples:
            >>> import torch, syncline as sl
            >>> ddp = sl.DistributedDataParallel(torch.nn.Linear(2, 1))
            >>> loss = ddp(torch.ones(4, 2)).square().mean()
            >>> ddp.report(loss=0.25, accuracy=0.5, weight=4)
            >>> loss.backward()
            >>> ddp.last_step.metrics
            {'loss': 0.25, 'accuracy': 0.5}
        """
        if unnamed:
            raise TypeError("name the metric: ddp.report(loss=loss)")
        if not metrics:
            raise ValueError("expected at least one metric by name, as in ddp.report(loss=loss); got none")
        values = {name: check_metric(name, value) for name, value in metrics.items()}
        weight = checked_number("weight", weight, at_least=0)
        self._replica.registered.report(values, weight, inside_join=is_in_join(self))
