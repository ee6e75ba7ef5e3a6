"""A compression as a communication hook, of torch's class or ours: `register_comm_hook(HookState(...), hook)`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from syncline.checks import checked_kind
from syncline.compression.averager import joined_state, parted_state
from syncline.compression.base import Compression
from syncline.compression.exchange import MeanExchange
from syncline.session.world import transport_of
from syncline.transport.base import Transport

__all__ = ["AnyGradBucket", "HookState", "hook"]


class AnyGradBucket(Protocol):
    """What a communication hook is given: torch's `dist.GradBucket`, or ours."""

    def index(self) -> int: ...
    def buffer(self) -> Tensor: ...
    def gradients(self) -> list[Tensor]: ...
    def parameters(self) -> list[Tensor]: ...
    def is_last(self) -> bool: ...


def hook(state: HookState, bucket: Any) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients, compressed.

    The first phase of a bucket starts here, further ones when later buckets come, all in the order of the calls; with
    the last bucket everything is waited for.

    Args:
        state: with the compression, and what it keeps.
        bucket: a `dist.GradBucket`, or one of ours.

    Returns:
        A future of the bucket's buffer, which holds the mean over all ranks.

    Raises:
        ValueError: gradients are sparse, or not real floating numbers.
    """
    return state.average(bucket)


# torch compares annotations with classes, and takes text for a wrong one.
hook.__annotations__.clear()


class HookState:
    """What `hook` is registered with: a compression, between which ranks, and what it keeps for each parameter.

    When buckets are laid out anew (torch and Syncline do it after the first backward), what was kept goes on with its
    parameters.

    Args:
        compression: how gradients are encoded.
        group: whose gradients are averaged: a `torch.distributed` process group, a Syncline transport, or None for the
            default group. A collective call where that group has not been used yet.
        module: by whose parameter names `state_dict` calls what is kept; only for that.

    Example:
        >>> import torch, syncline as sl
        >>> ddp = sl.DistributedDataParallel(torch.nn.Linear(8, 8))
        >>> ddp.register_comm_hook(sl.compression.HookState(sl.compression.Cast()), sl.compression.hook)
        >>> print(ddp.contract["gradients"].how)
        by communication hook Cast(dtype=bfloat16)
    """

    def __init__(
        self,
        compression: Compression,
        group: dist.ProcessGroup | Transport | None = None,
        *,
        module: nn.Module | None = None,
    ) -> None:
        if not isinstance(compression, Compression):
            raise TypeError(
                f"expected compression to be one of sl.compression, say Cast(), got {compression!r}"
            )
        if module is not None:
            checked_kind("module", module, nn.Module, "a torch.nn.Module")
        self.compression = compression
        self._kept: dict[str, Mapping[str, Tensor]] = {}
        """By name, what was loaded and not used yet."""
        self._forget_buckets()
        self._names: dict[int, str] | None = None
        self._transport: Transport | None = None
        self.use(transport_of(group), module)

    def _forget_buckets(self) -> None:
        self._buckets: dict[int, _Bucket] = {}
        self._under_way: list[tuple[_Bucket, Tensor, _Future]] = []
        self._carried: dict[int, _Carried] = {}
        """By the id of a parameter, what its former bucket has kept."""

    def use(self, transport: Transport, module: nn.Module | None) -> None:
        """Between these ranks from now on, and of this module; what is kept goes on."""
        if module is not None:
            self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        if transport is not self._transport:
            self._carry()
            self._transport = transport

    # ------------------------------------------------------------------ during backward

    @torch.no_grad()
    def average(self, bucket: AnyGradBucket) -> torch.futures.Future[Tensor]:
        """See `hook`."""
        for earlier, *_ in self._under_way:
            earlier.exchange.advance()
        buffer = bucket.buffer()
        known = self._bucket(bucket, buffer)
        known.exchange.start(buffer)
        future = _Future(self, buffer.device)
        self._under_way.append((known, buffer, future))
        if bucket.is_last():
            self.finish()
        return future

    @torch.no_grad()
    def finish(self) -> None:
        """Complete all that is under way: a phase of each bucket in turn, in the order in which they were started."""
        waiting = [known.exchange for known, *_ in self._under_way]
        while waiting:
            for exchange in waiting:
                exchange.advance()
            waiting = [exchange for exchange in waiting if not exchange.has_arrived]
        arrived, self._under_way = self._under_way, []
        for known, buffer, future in arrived:
            buffer.copy_(known.exchange.wait())
            future.set_result(buffer)

    def _bucket(self, bucket: AnyGradBucket, buffer: Tensor) -> _Bucket:
        """What averages it; made anew where it is not of the same parameters as last time."""
        index = bucket.index()
        if buffer.is_sparse:
            raise ValueError(
                f"bucket {index} has a sparse gradient, which {self.compression} cannot encode: make it dense "
                "(sparse=False), or use no compression"
            )
        parameters = bucket.parameters()
        members = tuple(map(id, parameters))  # == of tensors would compare elements
        known = self._buckets.get(index)
        if known is not None and known.fits(members, buffer):
            return known
        if known is not None:
            self._carry()
        if self._transport is None:  # unpickled
            self._transport = transport_of(None)
        shapes = [_shape_in_memory(gradient) for gradient in bucket.gradients() or parameters]
        known = _Bucket(self.compression, parameters, shapes, buffer, self._transport)
        for position, member in enumerate(members):
            carried = self._carried.pop(member, None)
            if carried is not None and known.accepts(position, carried.tensors):
                known.exchange.remember(position, carried.tensors)
            elif self._names is not None and (loaded := self._kept.pop(self._names.get(member, ""), None)):
                known.exchange.remember(position, loaded)
        self._buckets[index] = known
        return known

    def _carry(self) -> None:
        """Buckets change: remember what they keep by parameter. Those under way are new already."""
        for index, known in list(self._buckets.items()):
            if not known.exchange.is_under_way:
                kept = zip(known.parameters, known.exchange.memory(), strict=False)
                self._carried.update((id(p), _Carried(p, tensors)) for p, tensors in kept)
                del self._buckets[index]

    # ------------------------------------------------------------------ saved and loaded

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of what this rank keeps, as `<parameter>.<name>`. Residuals differ: every rank has to save its own.

        Raises:
            ValueError: the module is not known, so parameters have no names.
            SynclineError: a backward is under way.
        """
        return joined_state(self._by_name())

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on with what `state_dict` gave, on the same rank of as many.

        Raises:
            ValueError: the module is not known; or the state is of parameters that it does not have.
        """
        names = self._checked_names()
        given = parted_state(state)
        unknown = sorted(set(given).difference(names.values()))
        if unknown:
            raise ValueError(
                f"expected the state of parameters of this module, got one of {', '.join(unknown)}"
            )
        # From now on as if nothing had been kept before; buckets take up what is theirs when they come.
        self._forget_buckets()
        self._kept = {
            name: {kind: t.clone() for kind, t in tensors.items()} for name, tensors in given.items()
        }

    def _by_name(self) -> dict[str, Mapping[str, Tensor]]:
        names = self._checked_names()
        kept = dict(self._kept)
        kept.update((names[m], carried.tensors) for m, carried in self._carried.items() if m in names)
        for known in self._buckets.values():
            members = zip(known.members, known.exchange.memory(), strict=False)
            kept.update((names[member], tensors) for member, tensors in members if member in names)
        return kept

    def _checked_names(self) -> dict[int, str]:
        if self._names is None:
            raise ValueError(
                "what is kept is saved by parameter names: give the module, HookState(compression, module=model)"
            )
        return self._names

    def __getstate__(self) -> dict[str, Any]:
        """Without connections; what is kept only where parameters have names."""
        kept = {} if self._names is None else parted_state(self.state_dict())
        return {"compression": self.compression, "_kept": kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Over the default group."""
        self._forget_buckets()
        self._names = self._transport = None
        vars(self).update(state)


class _Carried(NamedTuple):
    """What was kept of a parameter."""

    parameter: Tensor
    """It is held, so that no other gets its id."""
    tensors: Mapping[str, Tensor]


class _Bucket:
    """One bucket, as it was when its parameters came together for the first time."""

    def __init__(
        self,
        compression: Compression,
        parameters: Sequence[Tensor],
        shapes: Sequence[tuple[int, ...]],
        buffer: Tensor,
        transport: Transport,
    ) -> None:
        self.parameters = parameters
        self.members = tuple(map(id, parameters))
        self._kind = (buffer.numel(), buffer.dtype, buffer.device)
        self.exchange = MeanExchange(
            compression, shapes, dtype=buffer.dtype, device=buffer.device, transport=transport
        )

    def fits(self, members: tuple[int, ...], buffer: Tensor) -> bool:
        """Whether it is still the same."""
        return self.members == members and self._kind == (buffer.numel(), buffer.dtype, buffer.device)

    def accepts(self, position: int, kept: Mapping[str, Tensor]) -> bool:
        """Whether what was kept of a parameter is still of its shape."""
        own = self.exchange.memory()[position]
        return {name: tensor.shape for name, tensor in own.items()} == {
            name: tensor.shape for name, tensor in kept.items()
        }


class _Future(torch.futures.Future[Tensor]):
    """Whoever waits for it before the last bucket has come (there may be none) completes what is under way."""

    def __init__(self, state: HookState, device: torch.device) -> None:
        super().__init__(devices=None if device.type == "cpu" else [device])
        self._state = state

    def wait(self) -> Tensor:
        if not self.done():
            self._state.finish()
        return super().wait()


def _shape_in_memory(gradient: Tensor) -> tuple[int, ...]:
    """The sizes in the order in which elements lie in a flat tensor: of channels_last weights, channels come last."""
    strides: tuple[int, ...] = gradient.stride()
    order = sorted(range(gradient.dim()), key=lambda dim: -strides[dim])
    return tuple(gradient.shape[dim] for dim in order)
