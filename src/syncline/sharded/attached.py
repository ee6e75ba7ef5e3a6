"""Attached optimizers of a sharded module. Their parameters are this rank's shards of the module's parameters."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from syncline._torch.optimizers import state_dict_post_hooks, state_dict_pre_hooks
from syncline.gradients.shard import Shard
from syncline.gradients.shard_plan import Piece, pieces_of, spans_in
from syncline.optimizers.attached import weakly
from syncline.optimizers.contents import keep_saved_types
from syncline.sharded.methods import OpenStep, ReplacedMethods, refuse_methods
from syncline.sharded.part import ShardedState, attach_sharded_state, has_sharded_state, whole_of
from syncline.sharded.state import (
    ShardedModule,
    gather_state,
    kinds_of,
    lost_parameters,
    shard_state,
    slice_state,
)
from syncline.transport.base import Transport


def is_sharded(optimizer: object) -> bool:
    """Return whether each rank has only a shard of the optimizer's state, because it steps only its shard."""
    return isinstance(optimizer, Optimizer) and has_sharded_state(optimizer)


class AttachedShards(ShardedState):
    """A link between an optimizer and this rank's shards, which replace the module's parameters in the optimizer.

    The optimizer stays the same object with the same parameter groups, so that schedulers and scalers keep working. Its
    `state_dict` and `load_state_dict` use torch's ordinary format. Checkpoints use this rank's shard of that format.

    Args:
        optimizer: an optimizer of trained parameters of one module. It may also have frozen parameters of the module.
        module: the module's trained parameters and their shards.
        whole: whether the optimizer steps whole parameters in their own shape. Otherwise it steps flat spans.
        find_together: see `ShardGradient.of`.
        around_step: a function that is called with this object and the optimizer's former step, and runs this step when
            the ranks may write.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        module: ShardedModule,
        *,
        whole: bool,
        find_together: Callable[[Tensor], None],
        around_step: Callable[[AttachedShards, Callable[[], Any]], Any],
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.whole = whole
        self.shards: list[Shard] = []
        self._apart: dict[int, int] = {}
        """A number for each parameter whose state began later than that of others, by the parameter's index."""
        self.open_step = OpenStep()
        self._go_back: Callable[[], object] | None = None
        """A function that undoes `follow`; None after `settle`."""
        self._module = module
        self._find_together = find_together
        self._step_inside(around_step)
        self.groups: list[list[Tensor]] = [list(group["params"]) for group in optimizer.param_groups]
        """The original parameters of each parameter group. The optimizer has shards in their place."""
        self._param_names = [group.pop("param_names", None) for group in optimizer.param_groups]
        flat = [(at, parameter) for at, group in enumerate(self.groups) for parameter in group]
        trained = {
            module.index_of[id(parameter)]: (position, at)
            for position, (at, parameter) in enumerate(flat)
            if id(parameter) in module.index_of
        }
        self._positions = {index: position for index, (position, _) in trained.items()}
        """The position of each trained parameter among the parameters of all groups, by the parameter's index."""
        self.group_of = {index: at for index, (_, at) in trained.items()}
        """The index of each trained parameter's group, by the parameter's index."""
        self.bucket_shards = [
            bucket_shard
            for bucket_shard in module.bucket_shards
            if not set(bucket_shard.plan.parameters).isdisjoint(self.group_of)
        ]
        """The `BucketShard`s of the buckets that contain parameters of this optimizer."""
        self._methods = ReplacedMethods(optimizer)
        self._replace_methods()
        attach_sharded_state(optimizer, self)
        states = {
            position: optimizer.state[parameter]
            for position, (_, parameter) in enumerate(flat)
            if parameter in optimizer.state
        }
        given = {index: states.pop(position, {}) for index, position in self._positions.items()}
        self._idle_state = states
        """The state of frozen parameters, by position. Some optimizers create such state in their constructor."""
        optimizer.state.clear()
        self.cut()
        for shard, state in self._sliced(given):
            optimizer.state[shard.parameter] = state

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer. Its replaced methods keep this object alive, also after the wrapper has been freed."""
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    @property
    def members(self) -> list[Tensor]:
        """All parameters in those buckets that contain parameters of this optimizer."""
        return [parameter for bucket_shard in self.bucket_shards for parameter in bucket_shard.members]

    @property
    def has_state(self) -> bool:
        """Whether the optimizer has state. It would be lost if the shards were cut again."""
        return bool(self.optimizer.state)

    def cut(self) -> None:
        """Create this rank's shards by the present bounds, and make them the optimizer's parameters."""
        self._drop_shards()
        bucket_shards = self._module.bucket_shards
        pieces = pieces_of(
            [bucket_shard.plan for bucket_shard in bucket_shards],
            [bucket_shard.bounds for bucket_shard in bucket_shards],
            bucket_shards[0].team.position,
            self.group_of,
            whole=self.whole,
            by_parameter=self._module.by_parameter,
            apart=self._apart,
        )
        self.shards = [
            bucket_shards[piece.bucket].make_shard(piece, self._find_together)
            for piece in (*pieces, *self._empty_pieces(pieces))
        ]
        for at, group in enumerate(self.optimizer.param_groups):
            group["params"] = [shard.parameter for shard in self.shards if shard.piece.group == at]

    def _drop_shards(self) -> None:
        for bucket_shard in self._module.bucket_shards:
            bucket_shard.shards = [shard for shard in bucket_shard.shards if shard not in self.shards]
        self.shards = []

    def _empty_pieces(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Return one empty piece for each parameter dtype that none of `pieces` has.

        A GradScaler makes one collective call for each dtype that it finds. With the empty pieces, all ranks make the
        same calls.

        Args:
            pieces: the pieces of this rank.
        """
        found = {self._module.bucket_shards[piece.bucket].dtype for piece in pieces}
        empty = []
        for bucket_shard in self.bucket_shards:
            if bucket_shard.dtype not in found:
                found.add(bucket_shard.dtype)
                group = next(self.group_of[i] for i in bucket_shard.plan.parameters if i in self.group_of)
                start = bucket_shard.start
                empty.append(Piece(bucket=bucket_shard.plan.index, start=start, stop=start, group=group))
        return empty

    # ------------------------------------------------------------------ the optimizer's methods

    def _step_inside(self, around_step: Callable[[AttachedShards, Callable[[], Any]], Any]) -> None:
        """Make steps by `around_step`. The optimizer, and not this object, keeps the owner of this method alive."""
        self._around_step = weakly(around_step)
        vars(self.optimizer)["around_step"] = around_step

    def _replace_methods(self) -> None:
        optimizer, former = self.optimizer, self._methods.former
        inner_step, inner_zero = former["step"], former["zero_grad"]

        @functools.wraps(inner_step)
        def step(self_: Optimizer, closure: Callable[[], float] | None = None, **kwargs: Any) -> Any:
            loss = None
            if (
                closure is not None
            ):  # the backwards of all ranks must have ended before any rank writes parameters
                with torch.enable_grad():
                    loss = closure()
            result = self._around_step(self, functools.partial(inner_step, self_, **kwargs))
            return result if closure is None else loss

        @functools.wraps(inner_zero)
        def zero_grad(self_: Optimizer, set_to_none: bool = True) -> None:
            for group in self.groups:
                for parameter in group:
                    parameter.grad = None
            inner_zero(self_, set_to_none=True)

        @functools.wraps(optimizer.state_dict)
        def state_dict(self_: Optimizer) -> dict[str, Any]:
            return self._state_dict()

        @functools.wraps(optimizer.load_state_dict)
        def load_state_dict(self_: Optimizer, state_dict: dict[str, Any]) -> None:
            self._load_shards(state_dict, {})

        def add_param_group(self_: Optimizer, param_group: dict[str, Any]) -> None:
            raise ValueError(
                "with sharded=True, a parameter group cannot be added to an attached optimizer: call add_param_group "
                "before ddp.attach(optimizer)"
            )

        self._methods.replace(optimizer, step, zero_grad, add_param_group, state_dict, load_state_dict)

    def release(self, successor: str) -> None:
        """Detach from the optimizer. Its methods raise an error from now on.

        Args:
            successor: the class name of the optimizer that replaces this optimizer, for the message.
        """
        optimizer = self.optimizer
        attach_sharded_state(optimizer, _Released(refuse_methods(optimizer, successor)))
        self._drop_shards()
        for group, parameters in zip(optimizer.param_groups, self.groups, strict=True):
            group["params"] = parameters
        optimizer.state.clear()

    # ------------------------------------------------------------------ other ranks

    def follow(
        self,
        module: ShardedModule,
        owners: Sequence[int | None],
        find_together: Callable[[Tensor], None],
        around_step: Callable[[AttachedShards, Callable[[], Any]], Any],
    ) -> list[str]:
        """Move the state to new shards, over other ranks. A collective call.

        Args:
            module: the new shards. Their parameters and buckets are the same.
            owners: for each position in the former team, a rank that has the former shard; None if it is lost.
            find_together, around_step: see the constructor.

        Returns:
            The names of the parameters whose state begins anew, because a part of it is lost.
        """
        optimizer, former = self.optimizer, self._module
        shards = [shard for shard in self.shards if shard.piece.start < shard.piece.stop]
        states = [optimizer.state.get(shard.parameter, {}) for shard in shards]
        self._go_back = functools.partial(
            self._restore, dict(vars(self)), [group["params"] for group in optimizer.param_groups],
            dict(optimizer.state),
        )  # fmt: skip
        optimizer.state.clear()
        self.shards = []
        self._module, self._find_together = module, find_together
        self._step_inside(around_step)
        self.bucket_shards = [module.bucket_shards[one.plan.index] for one in self.bucket_shards]
        lost = lost_parameters(former.bucket_shards, owners) & self.group_of.keys()
        newest = 1 + max(self._apart.values(), default=0)
        self._apart = {i: newest if i in lost else self._apart.get(i, 0) for i in self.group_of}
        self.cut()
        for bucket_shard in self.bucket_shards:  # one by one, because all state may be too large for one rank
            at = bucket_shard.plan.index
            here = [(one, state) for one, state in zip(shards, states, strict=True) if one.piece.bucket == at]
            with torch.no_grad():
                pieces, values = [one for one, _ in here], [state for _, state in here]
                gathered = gather_state(pieces, values, [former.bucket_shards[at]], module.lane, owners)
                kept = {index: state for index, state in gathered.items() if index not in lost}
                for shard in self.shards:
                    if shard.piece.bucket == at and (state := slice_state(shard, module, kept)):
                        optimizer.state[shard.parameter] = state
        return [module.names[index] for index in sorted(lost)]

    def dissolve(self, lane: Transport, owners: Sequence[int | None]) -> list[str]:
        """Give the optimizer whole parameters again, because no other rank is left.

        Args:
            lane: the transport of this rank alone.
            owners: see `follow`.

        Returns:
            The names of the parameters whose state begins anew, because a part of it is lost.
        """
        optimizer, module = self.optimizer, self._module
        shards = [shard for shard in self.shards if shard.piece.start < shard.piece.stop]
        states = [optimizer.state.get(shard.parameter, {}) for shard in shards]
        lost = lost_parameters(module.bucket_shards, owners) & self.group_of.keys()
        with torch.no_grad():
            gathered = gather_state(shards, states, self.bucket_shards, lane, owners)
        optimizer.state.clear()
        flat = [parameter for group in self.groups for parameter in group]
        for index, state in gathered.items():
            if index not in lost and index in self._positions:
                optimizer.state[flat[self._positions[index]]] = state
        for position, state in self._idle_state.items():
            optimizer.state[flat[position]] = state
        for group, parameters, names in zip(
            optimizer.param_groups, self.groups, self._param_names, strict=True
        ):
            group["params"] = parameters
            if names is not None:
                group["param_names"] = names
        self._methods.put_back()
        attach_sharded_state(optimizer, None)
        return [module.names[index] for index in sorted(lost)]

    def _restore(
        self, fields: dict[str, Any], parameters: Sequence[list[Tensor]], state: Mapping[Tensor, Any]
    ) -> None:
        vars(self).update(fields)
        for group, before in zip(self.optimizer.param_groups, parameters, strict=True):
            group["params"] = before
        self.optimizer.state.clear()
        self.optimizer.state.update(state)

    def settle(self) -> None:
        """Keep the new shards, because all ranks have them."""
        self._go_back = None

    def go_back(self) -> None:
        """Return to the shards before the last call of `follow`, unless they were settled."""
        if self._go_back is not None:
            self._go_back()
            self._go_back = None

    def use_plain_gradients(self) -> None:
        """Set `.grad` of each shard to a plain tensor, for the optimizer's kernels. Without a gradient, set None."""
        has_gradients = {one.plan.index: one.has_gradients for one in self.bucket_shards}
        for shard in self.shards:
            gradient = shard.parameter.grad
            if gradient is shard.guarded or gradient is shard.gradient:
                is_there = has_gradients[shard.piece.bucket] and shard.gradient.numel()
                shard.parameter.grad = shard.gradient if is_there else None

    # ------------------------------------------------------------------ saving and loading

    def _state_dict(self) -> dict[str, Any]:
        """Gather the optimizer's state, and return it in torch's ordinary format. This is a collective call.

        Every rank gets the same state.
        """
        shards, states = self._shards_with_states()
        with torch.no_grad():
            gathered = gather_state(shards, states, self.bucket_shards, self._module.lane)
        result = self._in_ordinary_form(gathered)
        for hook in state_dict_post_hooks(self.optimizer):
            changed = hook(self.optimizer, result)
            result = result if changed is None else changed
        return result

    def _shard_state_dict(self) -> dict[str, Any]:
        """Return this rank's shard of the state in torch's ordinary format. Nothing is sent.

        A tensor that is split is given by a `TensorPart`. If `join_parts` joins the shards of all ranks, the result is
        equal to that of `state_dict`. If several teams of ranks have the same shards, only the first team returns them.

        A post hook of `state_dict` expects the ordinary format. If the optimizer has such hooks, the method gathers the
        whole state as `state_dict` does, and is a collective call.
        """
        if state_dict_post_hooks(self.optimizer):
            return self._state_dict()
        shards, states = self._shards_with_states()
        if shards and self._module.lane.rank not in self._module.bucket_shards[0].team.members:
            shards, states = [], []
        with torch.no_grad():
            return self._in_ordinary_form(shard_state(shards, states, self._module))

    def _shards_with_states(self) -> tuple[list[Shard], list[dict[str, Any]]]:
        optimizer: Any = self.optimizer
        for hook in state_dict_pre_hooks(self.optimizer):
            hook(optimizer)
        shards = [shard for shard in self.shards if shard.piece.start < shard.piece.stop]
        return shards, [optimizer.state.get(shard.parameter, {}) for shard in shards]

    def _in_ordinary_form(self, state_of: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
        optimizer: Any = self.optimizer
        groups, position = [], 0
        for group, parameters, names in zip(
            optimizer.param_groups, self.groups, self._param_names, strict=True
        ):
            packed = {key: value for key, value in group.items() if key != "params"}
            if names is not None:
                packed["param_names"] = names
            groups.append({**packed, "params": list(range(position, position + len(parameters)))})
            position += len(parameters)
        state = {self._positions[index]: state_of[index] for index in state_of if index in self._positions}
        state.update(self._idle_state)
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    def _load_shards(self, state: Mapping[str, Any], types: Mapping[int, torch.dtype]) -> None:
        """Load this rank's shard from a state in torch's ordinary format. Nothing is sent.

        Args:
            state: the state. Its tensors may be in parts (`PartedTensor`).
            types: the dtype in which each parameter was saved, by the parameter's `id`. If a parameter still has this
                dtype, its state keeps the saved dtypes. Otherwise its state gets the parameter's dtype, as in torch.
        """
        saved = state["param_groups"]
        lengths, expected = [len(group["params"]) for group in saved], [len(group) for group in self.groups]
        if lengths != expected:
            raise ValueError(
                f"expected an optimizer state whose parameter groups have {expected} parameters, got groups with "
                f"{lengths} parameters: load the state of an optimizer with the same groups. That optimizer may be "
                "sharded or not"
            )
        ids = [parameter_id for group in saved for parameter_id in group["params"]]
        state_of = {
            index: state["state"].get(ids[position], {}) for index, position in self._positions.items()
        }
        self._keep_apart(state_of)
        at = {id(shard.parameter): number for number, shard in enumerate(self.shards)}
        with torch.no_grad():
            sliced = self._sliced(state_of)
        packed = {at[id(shard.parameter)]: entries for shard, entries in sliced}
        groups = [
            {
                **{key: value for key, value in group.items() if key not in ("params", "param_names")},
                "params": [at[id(parameter)] for parameter in own["params"]],
            }
            for group, own in zip(saved, self.optimizer.param_groups, strict=True)
        ]
        trained = set(self._positions.values())
        idle_state = {
            position: copy.deepcopy(whole_of(state["state"][its_id]))
            for position, its_id in enumerate(ids)
            if position not in trained and its_id in state["state"]
        }
        self._methods.former["load_state_dict"](self.optimizer, {"state": packed, "param_groups": groups})
        self._idle_state = idle_state
        for shard, entries in sliced:
            bucket_shard, piece = self._module.bucket_shards[shard.piece.bucket], shard.piece
            spans = spans_in(bucket_shard.plan, piece.start, piece.stop)
            if any(types.get(id(bucket_shard.members[at])) == bucket_shard.dtype for at, _, _ in spans):
                with torch.no_grad():
                    keep_saved_types(self.optimizer.state[shard.parameter], entries)

    def _keep_apart(self, state_of: Mapping[int, dict[str, Any]]) -> None:
        """Cut the shards anew, if states with different step counts would be in one piece.

        Such a state was saved after a part of the state had been lost together with a rank.
        """
        apart = kinds_of(state_of)
        if any(apart.values()) and apart != self._apart:
            self._apart = apart
            self.cut()

    def _sliced(self, state_of: Mapping[int, dict[str, Any]]) -> list[tuple[Shard, dict[str, Any]]]:
        """Return the shards that have state, each with its part of the state.

        Args:
            state_of: the state in torch's ordinary format, by parameter index.
        """
        sliced = ((shard, slice_state(shard, self._module, state_of)) for shard in self.shards)
        return [(shard, state) for shard, state in sliced if state]

    # ------------------------------------------------------------------ description

    def describe(self) -> str:
        """Return a text that names the optimizer's class and says whether it steps whole parameters or flat spans.

        Ranks compare this text, and the contract shows it.
        """
        kind = type(self.optimizer).__name__
        if self.whole:
            return f"{kind} by whole parameters"
        return f"{kind} by flat spans" + (" within parameters" if self._module.by_parameter else "")


class _Released(ShardedState):
    """The state of an optimizer that was replaced. To save or load it is an error.

    Args:
        refuse: the function that raises the error.
    """

    def __init__(self, refuse: Callable[..., NoReturn]) -> None:
        self._refuse = refuse

    def _shard_state_dict(self) -> dict[str, Any]:
        self._refuse()

    def _load_shards(self, state: Mapping[str, Any], types: Mapping[int, torch.dtype]) -> None:
        self._refuse()
