"""A communication hook that averages gradients by a compression: `ddp.register_comm_hook(HookState(...), hook)`.

The hook works with torch's DistributedDataParallel and with Syncline's.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from syncline.checks import checked_kind, suggests_arguments
from syncline.compression.base import Compression
from syncline.compression.exchange import MeanExchange, joined_state, parted_state
from syncline.session.world import transport_of
from syncline.transport.base import Transport

_Kept = tuple[
    dict[int, "_Bucket"], dict[int, tuple[Tensor, Mapping[str, Tensor]]], dict[str, Mapping[str, Tensor]]
]
"""The buckets of a `HookState`, and the states of parameters that have no bucket."""


class AnyGradBucket(Protocol):
    """The interface of the bucket that a communication hook gets: torch's `GradBucket`, or Syncline's."""

    def index(self) -> int: ...
    def buffer(self) -> Tensor: ...
    def gradients(self) -> list[Tensor]: ...
    def parameters(self) -> list[Tensor]: ...
    def is_last(self) -> bool: ...


def hook(state: HookState, bucket: Any) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients over all ranks, by the compression of `state`.

    A compression averages a bucket in one or more phases of communication. This call starts the bucket's first phase.
    Calls for later buckets start its later phases, from the bucket after the next one on. So a call does not wait for
    the bucket just before. The call for the last bucket waits for all phases of all buckets.

    Args:
        state: the compression, and its state for each parameter.
        bucket: torch's `dist.GradBucket`, or Syncline's.

    Returns:
        A future whose value is the bucket's buffer, after the mean over all ranks was written into it.

    Raises:
        ValueError: the gradients are sparse, or not real floating-point numbers.
    """
    return state.average(bucket)


# torch compares the annotations with classes, and rejects annotations that are strings.
hook.__annotations__.clear()


class HookState:
    """The first argument of `hook`: a compression, the ranks to average over, and the state of each parameter.

    After the first backward, torch and Syncline form new buckets. The compression's state of a parameter then moves to
    the parameter's new bucket.

    Args:
        compression: the compression of the gradients.
        group: the ranks whose gradients are averaged: a `torch.distributed` process group, a Syncline transport, or
            None for the default group. The constructor is a collective call if the group has not been used yet.
        module: the module that contains the parameters. The names of the parameters become keys in `state_dict`. If it
            is None, the state cannot be saved.

    Examples:
        >>> import torch, syncline as sl
        >>> ddp = sl.DistributedDataParallel(torch.nn.Linear(8, 8))
        >>> ddp.register_comm_hook(sl.compression.HookState(sl.compression.Cast()), sl.compression.hook)
        >>> print(ddp.contract["gradients"].how)
        by communication hook Cast(dtype=bfloat16)
    """

    @suggests_arguments
    def __init__(
        self,
        compression: Compression,
        group: dist.ProcessGroup | Transport | None = None,
        *,
        module: nn.Module | None = None,
    ) -> None:
        if not isinstance(compression, Compression):
            raise TypeError(
                "HookState: expected compression to be a compression such as sl.compression.Cast(), got "
                f"{compression!r}"
            )
        if module is not None:
            checked_kind("module", module, nn.Module, "a torch.nn.Module")
        self.compression = compression
        self._kept: dict[str, Mapping[str, Tensor]] = {}
        """The loaded state of each parameter that has no bucket yet. The keys are parameter names."""
        self._drop_buckets()
        self._kept_before: _Kept | None = None
        self._names: dict[int, str] | None = None
        self._transport: Transport | None = None
        self.use(transport_of(group), module)

    def _drop_buckets(self) -> None:
        self._buckets: dict[int, _Bucket] = {}
        self._under_way: list[tuple[MeanExchange, Tensor, _Future]] = []
        self._carried: dict[int, tuple[Tensor, Mapping[str, Tensor]]] = {}
        """The state of each parameter from its former bucket, by the id of the parameter.

        The parameter is stored beside the state, so that no other object gets the same id."""

    def use(self, transport: Transport, module: nn.Module | None) -> None:
        """Average over the ranks of this transport from now on. The compression keeps its state.

        Args:
            transport: connects the ranks.
            module: the module whose parameter names become the keys of saved states. None keeps the former names.
        """
        if module is not None:
            self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        if transport is not self._transport:
            self._carry()
            self._transport = transport

    def _keep(self) -> None:
        """Remember the present state for `_undo`. Residuals are not copied."""
        for known in self._buckets.values():
            known.exchange._keep()
        self._kept_before = dict(self._buckets), dict(self._carried), dict(self._kept)

    def _undo(self) -> None:
        """Restore the state that `_keep` has remembered, because the gradients averaged since then do not count.

        This drops averages in flight, too. Without a call of `_keep`, nothing is done.
        """
        if self._kept_before is None:
            return
        self._under_way = []
        buckets, carried, kept = self._kept_before
        self._buckets, self._carried, self._kept = dict(buckets), dict(carried), dict(kept)
        for known in self._buckets.values():
            known.exchange._undo()

    # ------------------------------------------------------------------ during backward

    @torch.no_grad()
    def average(self, bucket: AnyGradBucket) -> torch.futures.Future[Tensor]:
        """Average a bucket of gradients, as `hook` describes."""
        buffer = bucket.buffer()
        exchange = self._exchange_of(bucket)
        exchange.start(buffer)
        # A wait for the bucket just before would stop the backward while its messages are in flight, and a wait before
        # this bucket is sent would leave the network idle. The order must not depend on what has arrived, because all
        # ranks must start the same collectives in the same order.
        for earlier, *_ in self._under_way[:-1]:
            earlier.advance()
        future = _Future(self, buffer.device)
        self._under_way.append((exchange, buffer, future))
        if bucket.is_last():
            self.finish()
        return future

    @torch.no_grad()
    def finish(self) -> None:
        """Complete all averages in flight. The buckets take turns, one phase each, in the order of their start."""
        waiting = [exchange for exchange, *_ in self._under_way]
        while waiting:
            for exchange in waiting:
                exchange.advance()
            waiting = [exchange for exchange in waiting if not exchange.has_arrived]
        arrived, self._under_way = self._under_way, []
        for exchange, buffer, future in arrived:
            mean = exchange.wait()
            if mean.data_ptr() != buffer.data_ptr():
                buffer.copy_(mean)
            future.set_result(buffer)

    def _exchange_of(self, bucket: AnyGradBucket) -> MeanExchange:
        """Return the exchange of a bucket. Make a new one if the bucket's parameters have changed."""
        index = bucket.index()
        if bucket.buffer().is_sparse:
            raise ValueError(
                f"bucket {index} has a sparse gradient, which {self.compression} cannot encode. Make the gradient "
                "dense (sparse=False in torch.nn.Embedding), or use no compression"
            )
        known = self._buckets.get(index)
        if known is not None:
            if known.layout == _layout_of(bucket):
                return known.exchange
            self._carry()
        if self._transport is None:  # unpickled
            self._transport = transport_of(None)
        known = self._buckets[index] = _Bucket(self.compression, bucket, self._transport)
        for position, parameter in enumerate(known.parameters):
            _, carried = self._carried.pop(id(parameter), (None, None))
            if carried is not None:
                with suppress(ValueError):  # the state of a tensor whose shape has changed is dropped
                    known.exchange.remember(position, carried)
            elif self._names and (loaded := self._kept.pop(self._names.get(id(parameter), ""), None)):
                known.exchange.remember(position, loaded)
        return known.exchange

    def _carry(self) -> None:
        """Drop buckets that are not in flight, and keep the state of their parameters for the parameters' new buckets.

        A bucket in flight is already a new bucket, so it stays.
        """
        for index, known in list(self._buckets.items()):
            if not known.exchange.is_under_way:
                kept = zip(known.parameters, known.exchange.memory(), strict=False)
                self._carried.update((id(parameter), (parameter, tensors)) for parameter, tensors in kept)
                del self._buckets[index]

    # ------------------------------------------------------------------ saving and loading

    def state_dict(self) -> dict[str, Tensor]:
        """Return a copy of this rank's state, with keys `<name of the parameter>.<name of the state>`.

        Residuals differ between ranks, so every rank has to save its own state.

        Raises:
            ValueError: this object was made without a module, so the names of the parameters are unknown.
            SynclineError: a backward is in progress.
        """
        return joined_state(self._by_name())

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a state that `state_dict` returned on the same rank, with the same number of ranks.

        Raises:
            ValueError: this object was made without a module, or the module lacks parameters that the state contains.
        """
        names = self._checked_names()
        given = parted_state(state)
        unknown = sorted(set(given).difference(names.values()))
        if unknown:
            raise ValueError(
                "HookState: expected a compression state of parameters of this module, got a state of "
                f"{', '.join(unknown)}. The module has no such parameters. Load a state that was saved with this module"
            )
        # The former state is dropped. Buckets take their part of the new state when they are created.
        self._drop_buckets()
        self._kept = {
            name: {kind: t.clone() for kind, t in tensors.items()} for name, tensors in given.items()
        }

    def _by_name(self) -> dict[str, Mapping[str, Tensor]]:
        names = self._checked_names()
        states = {member: tensors for member, (_, tensors) in self._carried.items()}
        for known in self._buckets.values():
            states.update(zip(map(id, known.parameters), known.exchange.memory(), strict=False))
        return self._kept | {names[member]: state for member, state in states.items() if member in names}

    def _checked_names(self) -> dict[int, str]:
        if self._names is None:
            raise ValueError(
                "HookState: the state cannot be saved or loaded without the names of the parameters, which a HookState "
                "takes from its module. Write HookState(compression, module=model)"
            )
        return self._names

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle, without the transport.

        The compression's state of the parameters is included only if the names of the parameters are known.
        """
        kept = {} if self._names is None else parted_state(self.state_dict())
        return {"compression": self.compression, "_kept": kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a pickled state. Gradients are then averaged over the default group."""
        self._drop_buckets()
        self._kept_before = self._names = self._transport = None
        vars(self).update(state)


class _Bucket:
    """A bucket of gradients: its parameters, its layout, and the exchange that averages it."""

    def __init__(self, compression: Compression, bucket: AnyGradBucket, transport: Transport) -> None:
        buffer = bucket.buffer()
        self.parameters = bucket.parameters()
        self.layout = _layout_of(bucket)
        shapes = [_shape_in_memory(tensor) for tensor in bucket.gradients() or self.parameters]
        self.exchange = MeanExchange(
            compression, shapes, dtype=buffer.dtype, device=buffer.device, transport=transport
        )


class _Future(torch.futures.Future[Tensor]):
    """A future whose `wait` completes all averages in flight, even if the hook was not called for the last bucket."""

    def __init__(self, state: HookState, device: torch.device) -> None:
        super().__init__(devices=None if device.type == "cpu" else [device])
        self._state = state

    def wait(self) -> Tensor:
        if not self.done():
            self._state.finish()
        return super().wait()


def _layout_of(bucket: AnyGradBucket) -> tuple[object, ...]:
    """Return the ids of a bucket's parameters, and the size, dtype and device of its buffer."""
    buffer = bucket.buffer()
    return tuple(map(id, bucket.parameters())), buffer.numel(), buffer.dtype, buffer.device


def _shape_in_memory(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor with its dimensions in memory order.

    For a channels_last weight, the number of channels is last in the result.
    """
    strides = tensor.stride()
    return tuple(tensor.shape[dim] for dim in sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))
