"""The handover of a training state from one rank to ranks that are behind, over the transport and without pickle."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from syncline.checkpoint.encoding import decode, encode
from syncline.checkpoint.files import checksum, memory_of
from syncline.errors import SynclineError
from syncline.tensors.targets import as_bytes
from syncline.transport.base import Transport

_CHUNK_BYTES = 16 << 20


def send_state(state: Mapping[str, Any], transport: Transport, to: Sequence[int]) -> None:
    """Send a state to other ranks, which call `receive_state`.

    Args:
        state: nested dicts and lists of tensors and plain values, as `state_dict` returns them.
        transport: the transport between the ranks.
        to: the ranks that receive it.
    """
    tree, tensors = encode(state, "state")
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    forms = {
        name: [str(one.dtype).removeprefix("torch."), list(one.shape), str(checksum(memory_of(one)))]
        for name, one in held.items()
    }
    header = json.dumps([tree, forms]).encode()
    for rank in to:
        transport.send(torch.tensor([len(header)]), rank).wait()
        transport.send(torch.frombuffer(bytearray(header), dtype=torch.uint8), rank).wait()
        for one in held.values():
            for chunk in _chunks(one):
                transport.send(chunk, rank).wait()


def receive_state(transport: Transport, src: int) -> dict[str, Any]:
    """Receive the state that rank `src` sends by `send_state`.

    Raises:
        SynclineError: a tensor was damaged on the way.
    """
    length = torch.zeros(1, dtype=torch.int64)
    transport.recv(length, src).wait()
    header = torch.empty(int(length), dtype=torch.uint8)
    transport.recv(header, src).wait()
    tree, forms = json.loads(bytes(header.numpy()))
    tensors: dict[str, Tensor] = {}
    for name, (dtype, shape, digest) in forms.items():
        one = torch.empty(shape, dtype=getattr(torch, dtype))
        for chunk in _chunks(one):
            transport.recv(chunk, src).wait()
        if str(checksum(memory_of(one))) != digest:
            raise SynclineError(
                f"rank {transport.rank}, handover of the training state: expected {name} with the checksum {digest}, "
                f"as rank {src} has sent it, got another one: the memory or the network of one of the hosts is damaged"
            )
        tensors[name] = one
    state: dict[str, Any] = decode(tree, tensors)
    return state


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    if tensor.numel():
        yield from as_bytes(tensor).view(-1).split(_CHUNK_BYTES)
