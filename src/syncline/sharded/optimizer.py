"""The training step of a module with `sharded=True`: each rank reduces and steps its shard.

A training step has these parts, in this order:

1. Backward reduces each bucket so that this rank's span holds the mean (`gradients/shard.py`).
2. `clip_grad_norm_` combines the norms of all ranks' spans. With a GradScaler, ranks combine the infinities that it
   found (`gradients/shard.py`).
3. `step` waits until every rank's backward has ended, because no rank may write values that another rank reads.
4. `step` lets the optimizer step this rank's shards.
5. With one copy per host, `step` waits until all ranks have written. With one copy per rank, it gathers the spans.

An optimizer that updates each element independently (`is_elementwise`) can step a flat span of several parameters.
Other optimizers need whole parameters.
"""

from __future__ import annotations

import functools
import json
import logging
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from syncline.gradients.shard import BucketShard
from syncline.gradients.shard_plan import bounds_of
from syncline.liveness.board import StepPhase
from syncline.optimizers.attached import weakly
from syncline.sharded.attached import AttachedShards
from syncline.sharded.sharing import OneCopy, one_copy_of, remember_one_copy
from syncline.sharded.state import ShardedModule, spread
from syncline.transport.base import Transport
from syncline.words import format_count

_LOG = logging.getLogger("syncline")

_ELEMENTWISE = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.NAdam,
    optim.RAdam,
    optim.Adamax,
    optim.Adagrad,
    optim.Adadelta,
    optim.RMSprop,
    optim.Rprop,
    optim.ASGD,
)

_REFUSED = {
    optim.LBFGS: "its update needs all parameters at once",
    optim.SparseAdam: "its gradients are sparse and cannot be cut into spans",
}


def is_elementwise(optimizer: Optimizer, given: bool | None) -> bool:
    """Return whether an optimizer updates each element independently and can thus step flat spans of parameters.

    Otherwise it steps whole parameters. This is right if the update of a parameter depends on no other parameter (Muon,
    Shampoo, LAMB, Adafactor).

    Args:
        optimizer: the optimizer.
        given: the user's answer. Pass None to decide by the class of the optimizer; the answer for an unknown class is
            False.

    Raises:
        ValueError: an optimizer of this class can step no shard (LBFGS, SparseAdam).

    Examples:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.zeros(2, 2))
        >>> is_elementwise(optim.AdamW([weight]), None), is_elementwise(optim.Adafactor([weight]), None)
        (True, False)
    """
    for kind, reason in _REFUSED.items():
        if isinstance(optimizer, kind):
            raise ValueError(
                f"with sharded=True, a {type(optimizer).__name__} cannot step a shard, because {reason}: wrap the "
                "module without sharded=True, or use another optimizer"
            )
    return type(optimizer) in _ELEMENTWISE if given is None else given


class Sharding:
    """The parameters, shards and optimizers of one module with `sharded=True`.

    The constructor moves the parameters into their final memory. It is a collective call.

    Args:
        module: the module.
        named: the trained parameters with their names, in the order of their indices.
        bucket_shards: the `BucketShard` of each bucket.
        lane: the transport between the ranks. No other code uses it.
        by_parameter: whether each flat span ends where its parameter ends, so that it never covers two parameters.
        former: the shards over another group of ranks, whose optimizers and values the new shards take over. Call
            `settle` as soon as all ranks have taken them over.
    """

    def __init__(
        self,
        module: nn.Module,
        named: Sequence[tuple[str, Tensor]],
        bucket_shards: Sequence[BucketShard],
        lane: Transport,
        *,
        by_parameter: bool,
        former: Sharding | None = None,
    ) -> None:
        former = self._former = None if former is None else former.settled()
        """The shards to which this rank returns if another rank is lost before all have the new ones."""
        self.num_moves: int = 0 if former is None else former.num_moves
        """The number of times that the shards have moved to other ranks."""
        self.optimizers: list[AttachedShards] = [] if former is None else former.optimizers
        self._whole = module
        self.confirms: bool = former is not None and former.confirms
        """Whether the ranks confirm that all of them are about to step, so that either all or none make a step."""
        self.num_received = 0
        """The number of steps after which this rank has received the shards of all other ranks."""
        self._module = ShardedModule(
            names=[name for name, _ in named],
            index_of={id(parameter): index for index, (_, parameter) in enumerate(named)},
            bucket_shards=bucket_shards,
            lane=lane,
            by_parameter=by_parameter,
        )
        self._frozen = {id(p) for p in module.parameters() if not p.requires_grad}
        """The ids of the parameters that are not trained, because they do not require a gradient."""
        self._team = bucket_shards[0].team
        self._has_private = not all(bucket_shard.is_common for bucket_shard in bucket_shards)
        """Whether each rank has its own copy of some parameters."""
        self.num_copies = 0 if self._has_private else lane.size // self._team.size
        """The number of copies of the parameters, one per host. It is 0 if each rank has its own copy."""
        owners = [] if former is None else former.owners_in(lane)
        for bucket_shard in bucket_shards:
            if self._team.position == 0 or not bucket_shard.is_common:
                bucket_shard.take_values()
        lane.barrier().wait()  # the first rank of each team has written the values that the others read next
        for bucket_shard in bucket_shards:
            bucket_shard.adopt()
        before = one_copy_of(module)
        shared = [] if before is None else before.named
        rest = [(name, tensor) for name, tensor in shared if id(tensor) not in self._module.index_of]

        def check() -> None:
            for bucket_shard in bucket_shards:
                bucket_shard.check_adopted()

        self.copy = OneCopy([*named, *rest], lane, num_copies=self.num_copies, check=check)
        remember_one_copy(module, self.copy)
        if former is not None:
            self._follow(owners)

    def settle(self) -> None:
        """Keep these shards, because all ranks have them."""
        if self._former is not None:
            self._former = None
            self.num_moves += 1
            for attached in self.optimizers:
                attached.settle()

    def settled(self) -> Sharding:
        """Return these shards, or the former ones if not all ranks had these when a rank was lost."""
        for attached in self.optimizers:
            attached.go_back()
        found = self if self._former is None else self._former.settled()
        for bucket_shard in found._module.bucket_shards:
            bucket_shard.adopt()
        return found

    def owners_in(self, lane: Transport) -> list[int | None]:
        """Return for each shard a rank of another group that has it; None if it is lost. A collective call.

        Afterwards all ranks of the group have the same parameters. The values of a lost shard come from the rank that
        has received shards most often. They may lack the last step.

        Args:
            lane: the transport between the ranks of the other group.
        """
        rows = [
            json.loads(row)
            for row in lane.all_gather_bytes(json.dumps([self._team.position, self.num_received]).encode())
        ]
        positions = [position for position, _ in rows]
        owners = [
            positions.index(position) if position in positions else None
            for position in range(self._team.size)
        ]
        if self.num_copies != 1:
            best = max(range(lane.size), key=lambda rank: (rows[rank][1], -rank))
            members = [best if owner is None else owner for owner in owners]
            for bucket_shard in self._module.bucket_shards:
                spread(bucket_shard.values, bucket_shard.bounds, members, lane)
        return owners

    def _follow(self, owners: Sequence[int | None]) -> None:
        """Move the state of the optimizers to the new shards. A collective call."""
        whole = {index for attached in self.optimizers if attached.whole for index in attached.group_of}
        plans = [one.plan for one in self._module.bucket_shards]
        for bucket_shard, cuts in zip(
            self._module.bucket_shards, bounds_of(plans, self._team.size, whole=whole), strict=True
        ):
            bucket_shard.set_bounds(cuts)
        follows = (self._module, owners, weakly(self._find_together), self._around_step)
        lost = [name for attached in self.optimizers for name in attached.follow(*follows)]
        self._mark_stepped()
        if self._module.lane.rank == 0:
            _warn_of(lost)

    def dissolve(self, transport: Transport) -> None:
        """Give the optimizers whole parameters again, because this rank is the only one.

        Args:
            transport: the transport of this rank alone.
        """
        settled = self.settled()
        owners = settled.owners_in(transport)
        _warn_of([name for attached in settled.optimizers for name in attached.dissolve(transport, owners)])
        remember_one_copy(self._whole, OneCopy(self.copy.named, transport, num_copies=1))

    def _mark_stepped(self) -> None:
        """Record in the stand-ins which parameters an attached optimizer steps."""
        stepped = {index for one in self.optimizers for index in one.group_of}
        for bucket_shard in self._module.bucket_shards:
            for index, stand_in in zip(bucket_shard.plan.parameters, bucket_shard.stand_ins, strict=True):
                stand_in.is_stepped = index in stepped

    def confirm(self) -> None:
        """Let the ranks confirm each step from now on, before any of them makes it."""
        self.confirms = True

    def attach(
        self,
        optimizer: Optimizer,
        elementwise: bool | None,
        *,
        has_begun: bool,
        replaced: Sequence[Optimizer] = (),
    ) -> AttachedShards:
        """Replace an optimizer's parameters by this rank's shards.

        Args:
            optimizer: the optimizer.
            elementwise: whether the optimizer can step flat spans. Pass None to decide by its class.
            has_begun: whether gradients were already reduced with the present bounds of the shards.
            replaced: the attached optimizers that the new optimizer replaces.

        Raises:
            ValueError: the optimizer has parameters that are not sharded. Or the optimizer needs whole parameters, a
                bound of the shards splits one of them, and the bounds can no longer change.
        """
        whole = not is_elementwise(optimizer, elementwise)
        gone = [one for one in self.optimizers if any(one.optimizer is other for other in replaced)]
        staying = [one for one in self.optimizers if one not in gone]
        taken = {index for attached in staying for index in attached.group_of}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._check_parameter(parameter, optimizer, taken)
        own = {
            self._module.index_of[id(p)]
            for g in optimizer.param_groups
            for p in g["params"]
            if p.requires_grad
        }
        if whole:
            self._move_bounds(own, staying, has_begun=has_begun)
        for one in gone:
            one.release(type(optimizer).__name__)
        self.optimizers = staying
        attached = AttachedShards(
            optimizer,
            self._module,
            whole=whole,
            find_together=weakly(self._find_together),
            around_step=self._around_step,
        )
        self.optimizers = [*staying, attached]
        self._mark_stepped()
        for bucket_shard in attached.bucket_shards:
            for shard in bucket_shard.shards:  # gradients that were reduced before count too
                if bucket_shard.has_gradients and shard in attached.shards:
                    shard.parameter.grad = shard.guarded
        return attached

    def _check_parameter(self, parameter: Tensor, optimizer: Optimizer, taken: set[int]) -> None:
        index = self._module.index_of.get(id(parameter))
        kind = type(optimizer).__name__
        if index is None and (parameter.requires_grad or id(parameter) not in self._frozen):
            raise ValueError(
                f"expected an optimizer of sharded parameters only, got a {kind} with a parameter of shape "
                f"{tuple(parameter.shape)} that is not sharded. It belongs to another module, or was given to ignore=. "
                "Put such parameters into an optimizer of their own, and do not attach that optimizer"
            )
        if index in taken:
            raise ValueError(
                f"a parameter cannot be stepped by two attached optimizers, but {self._module.names[index or 0]} "
                "already belongs to an optimizer that was attached before: give this parameter to one of them only"
            )

    def _move_bounds(self, whole: set[int], staying: Sequence[AttachedShards], *, has_begun: bool) -> None:
        """Move the bounds of spans so that they split no parameter in `whole`.

        They also split no parameter of an optimizer in `staying` that steps whole parameters.
        """
        for attached in staying:
            if attached.whole:
                whole = whole | set(attached.group_of)
        bucket_shards = self._module.bucket_shards
        bounds = bounds_of([one.plan for one in bucket_shards], self._team.size, whole=whole)
        changed = {
            bucket_shard: cuts
            for bucket_shard, cuts in zip(bucket_shards, bounds, strict=True)
            if bucket_shard.bounds != tuple(cuts)
        }
        again = [attached for attached in staying if not changed.keys().isdisjoint(attached.bucket_shards)]
        if changed and (has_begun or any(attached.has_state for attached in again)):
            raise ValueError(
                "this optimizer steps whole parameters, so the bounds of the shards must not split its parameters, but "
                "the bounds can no longer change: attach this optimizer before the first backward, and before other "
                "attached optimizers have state"
            )
        for bucket_shard, cuts in changed.items():
            bucket_shard.set_bounds(cuts)
        for attached in again:
            attached.cut()

    # ------------------------------------------------------------------ the step

    def _around_step(self, attached: AttachedShards, step: Callable[[], Any]) -> Any:
        board = self._module.lane.board
        board.phase = StepPhase.OPTIMIZER_STEP
        attached.use_plain_gradients()
        attached.open_step.prepare(step, [shard.parameter for shard in attached.shards])
        self.copy.wait_to_write()
        if self.confirms and not self.copy.is_common:
            self._module.lane.barrier().wait()
        result = attached.open_step.make()
        if self._has_private:
            self._gather(attached)
        self.copy.wait_to_read(attached.members)
        attached.open_step.close()
        self.num_received += 1
        board.phase = StepPhase.AFTER_STEP
        return result

    @torch.no_grad()
    def _gather(self, attached: AttachedShards) -> None:
        """Send the parameters that this rank has stepped, and receive all others. This is a collective call."""
        lane, works = self._module.lane, []
        for bucket_shard in attached.bucket_shards:
            if bucket_shard.is_common:
                continue
            each = bucket_shard.values.numel() // lane.size
            bounds = bucket_shard.bounds
            if all(bounds[rank] == rank * each for rank in range(lane.size + 1)):
                own = bucket_shard.values[bounds[lane.rank] : bounds[lane.rank + 1]].clone()
                works.append(lane.all_gather(bucket_shard.values, own))
                continue
            works += [
                lane.broadcast(bucket_shard.values[bounds[rank] : bounds[rank + 1]], rank)
                for rank in range(lane.size)
                if bounds[rank] < bounds[rank + 1]
            ]
        for work in works:
            work.wait()

    def _find_together(self, found: Tensor) -> None:
        """Set `found` to its maximum over all ranks. A GradScaler sets it to 1 if it finds an infinity or NaN."""
        lane = self._module.lane
        on_any = found.detach().reshape(1).to(lane.sending_device(found.device))
        with lane.board.called("GradScaler"):
            lane.all_reduce(on_any, "max").wait()
        found.copy_(on_any.view(found.shape))

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> Tensor:
        """Clip the gradients as `DistributedDataParallel.clip_grad_norm_` does. This is a collective call."""
        if not norm_type > 0:
            raise ValueError(f"with sharded=True, expected norm_type above 0, got {norm_type}")
        counting = [bucket_shard for bucket_shard in self._module.bucket_shards if bucket_shard.has_gradients]
        gradients = [bucket_shard.gradient for bucket_shard in counting if bucket_shard.gradient.numel()]
        total = self._total_norm(gradients, float(norm_type), counting)
        if error_if_nonfinite and not bool(total.isfinite()):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
                "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
                "`error_if_nonfinite=False`"
            )
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.mul_(factor.to(gradient.device))
        return total

    def _total_norm(
        self, gradients: Sequence[Tensor], order: float, counting: Sequence[BucketShard]
    ) -> Tensor:
        """Return the norm of the whole gradients, to which all ranks contribute their shards.

        Each rank combines the gathered norms of one team in rank order, so that all ranks get the same bits.

        Args:
            gradients: the gradients of this rank's spans.
            order: the order of the norm.
            counting: the shards of all buckets that have gradients.
        """
        lane, home = self._module.lane, self._module.bucket_shards[0].values.device
        device = lane.sending_device(home)
        parts = [_norm(gradient, order).to(device) for gradient in gradients]
        own = torch.linalg.vector_norm(
            torch.stack(parts) if parts else torch.zeros(1, dtype=torch.float64, device=device), order
        )
        norms = torch.zeros(lane.size, dtype=torch.float64, device=device)
        with lane.board.called("clip_grad_norm_"):
            lane.all_gather(norms, own.view(1)).wait()
        total = torch.linalg.vector_norm(norms[list(self._team.members)], order)
        dtypes = [bucket_shard.dtype.to_real() for bucket_shard in counting] or [torch.float32]
        rounded: Tensor = total.to(functools.reduce(torch.promote_types, dtypes)).to(home)
        return rounded

    # ------------------------------------------------------------------ description

    def describe(self) -> list[str]:
        """Return one line of text for each attached optimizer. The lines must be equal on all ranks."""
        return [
            f"{attached.describe()}, parameters {zlib.crc32(repr(sorted(attached.group_of.items())).encode()):08x}"
            for attached in self.optimizers
        ]


def _warn_of(lost: Sequence[str]) -> None:
    if lost:
        _LOG.warning(
            "syncline: a part of the optimizer's state was lost with a rank, so it begins anew for %s: %s",
            format_count(len(lost), "parameter"), ", ".join(lost),
        )  # fmt: skip


def _norm(gradient: Tensor, order: float) -> Tensor:
    """Return the norm of a gradient in double precision, in which the order of summation hardly matters."""
    dtype = torch.complex128 if gradient.dtype.is_complex else torch.float64
    norm: Tensor = torch.linalg.vector_norm(gradient, order, dtype=dtype)
    return norm
