"""A compression as a communication hook for torch's class or ours: `register_comm_hook(HookState(...), hook)`."""

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


class AnyGradBucket(Protocol):
    """The argument of a communication hook: torch's `dist.GradBucket`, or ours."""

    def index(self) -> int: ...
    def buffer(self) -> Tensor: ...
    def gradients(self) -> list[Tensor]: ...
    def parameters(self) -> list[Tensor]: ...
    def is_last(self) -> bool: ...


def hook(state: HookState, bucket: Any) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients with compression.

    The first phase of a bucket starts here. Later phases start when later buckets arrive, always in the order of the
    calls. The last bucket waits for all of them.

    Args:
        state: contains the compression and its state.
        bucket: a `dist.GradBucket`, or one of ours.

    Returns:
        A future of the bucket's buffer, which then holds the mean over all ranks.

    Raises:
        ValueError: gradients are sparse, or not real floating-point numbers.
    """
    return state.average(bucket)


# torch compares the annotations with classes, and rejects annotations that are strings.
hook.__annotations__.clear()


class HookState:
    """The state of `hook`: a compression, the ranks to average over, and what the compression keeps per parameter.

    When buckets are laid out again (torch and Syncline do this after the first backward), that state stays with its
    parameters.

    Args:
        compression: how gradients are encoded.
        group: the ranks whose gradients are averaged: a `torch.distributed` process group, a Syncline transport, or
            None for the default group. The constructor is a collective call if the group has not been used yet.
        module: gives the parameter names for `state_dict`.

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
        """Loaded state that is not in use yet, by parameter name."""
        self._forget_buckets()
        self._names: dict[int, str] | None = None
        self._transport: Transport | None = None
        self.use(transport_of(group), module)

    def _forget_buckets(self) -> None:
        self._buckets: dict[int, _Bucket] = {}
        self._under_way: list[tuple[_Bucket, Tensor, _Future]] = []
        self._carried: dict[int, _Carried] = {}
        """The state from a parameter's former bucket, by the parameter's id."""

    def use(self, transport: Transport, module: nn.Module | None) -> None:
        """Average over these ranks from now on, for this module; the compression's state is kept."""
        if module is not None:
            self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        if transport is not self._transport:
            self._carry()
            self._transport = transport

    # ------------------------------------------------------------------ during backward

    @torch.no_grad()
    def average(self, bucket: AnyGradBucket) -> torch.futures.Future[Tensor]:
        """Average a bucket; see `hook`."""
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
        """Complete all averages in flight: one phase per bucket in turn, in the order in which they were started."""
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
        """Return the bucket's averager; make a new one if the bucket's parameters have changed."""
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
        """Save the buckets' state by parameter, because buckets change. Buckets in flight are already the new ones."""
        for index, known in list(self._buckets.items()):
            if not known.exchange.is_under_way:
                kept = zip(known.parameters, known.exchange.memory(), strict=False)
                self._carried.update((id(p), _Carried(p, tensors)) for p, tensors in kept)
                del self._buckets[index]

    # ------------------------------------------------------------------ saving and loading

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of this rank's state, with keys `<parameter>.<name>`.

        Residuals differ between ranks, so every rank has to save its own state.

        Raises:
            ValueError: the module is not known, so parameters have no names.
            SynclineError: a backward is in progress.
        """
        return joined_state(self._by_name())

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a state that `state_dict` returned on the same rank, with the same number of ranks.

        Raises:
            ValueError: the module is not known, or it does not have these parameters.
        """
        names = self._checked_names()
        given = parted_state(state)
        unknown = sorted(set(given).difference(names.values()))
        if unknown:
            raise ValueError(
                f"expected the state of parameters of this module, got one of {', '.join(unknown)}"
            )
        # The former state is dropped. Buckets take their part of the new state when they are created.
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
        """Return the state without connections, and per-parameter state only if parameters have names."""
        kept = {} if self._names is None else parted_state(self.state_dict())
        return {"compression": self.compression, "_kept": kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state; the default group is used."""
        self._forget_buckets()
        self._names = self._transport = None
        vars(self).update(state)


class _Carried(NamedTuple):
    """State that was kept of a parameter."""

    parameter: Tensor
    """A reference to the parameter, so that no other object gets its id."""
    tensors: Mapping[str, Tensor]


class _Bucket:
    """One bucket, with the parameters that it had when it was created."""

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
        """Return whether the bucket is unchanged."""
        return self.members == members and self._kind == (buffer.numel(), buffer.dtype, buffer.device)

    def accepts(self, position: int, kept: Mapping[str, Tensor]) -> bool:
        """Return whether the saved state of a parameter has the shapes needed here."""
        own = self.exchange.memory()[position]
        return {name: tensor.shape for name, tensor in own.items()} == {
            name: tensor.shape for name, tensor in kept.items()
        }


class _Future(torch.futures.Future[Tensor]):
    """A future that completes the averages in flight if it is waited for before the last bucket has arrived.

    There may be no last bucket.
    """

    def __init__(self, state: HookState, device: torch.device) -> None:
        super().__init__(devices=None if device.type == "cpu" else [device])
        self._state = state

    def wait(self) -> Tensor:
        if not self.done():
            self._state.finish()
        return super().wait()


def _shape_in_memory(gradient: Tensor) -> tuple[int, ...]:
    """Return the sizes in memory order of the dimensions; channels come last for channels_last weights."""
    strides: tuple[int, ...] = gradient.stride()
    order = sorted(range(gradient.dim()), key=lambda dim: -strides[dim])
    return tuple(gradient.shape[dim] for dim in order)
