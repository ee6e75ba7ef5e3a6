"""The handover of a training state to ranks that are behind, over the transport and without pickle.

Several ranks have the state: the *donors*. Each tensor is sent by one donor, so that the donors share the work. All
small tensors come from the first donor. Buffers can differ between ranks, and those of one module belong together.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from syncline.checkpoint.encoding import decode, encode
from syncline.checkpoint.files import checksum, memory_of
from syncline.errors import SynclineError
from syncline.tensors.targets import as_bytes
from syncline.transport.base import Transport

_CHUNK_BYTES = 16 << 20

_SMALL_BYTES = 64 << 10

_Form = tuple[torch.dtype, torch.Size]


def send_state(
    state: Mapping[str, Any], transport: Transport, to: Sequence[int], donors: Sequence[int]
) -> None:
    """Send this donor's part of a state to other ranks, which call `receive_state`.

    Args:
        state: nested dicts and lists of tensors and plain values, as `state_dict` returns them.
        transport: the transport between the ranks.
        to: the ranks that receive the state.
        donors: the ranks that have the state, and call this function. This rank is one of them.
    """
    if not to:
        return
    tree, tensors = encode(state, "state")
    place = donors.index(transport.rank)
    donor_of = shared_out({name: one.nbytes for name, one in tensors.items()}, len(donors))
    mine = {name: one.detach().cpu().contiguous() for name, one in tensors.items() if donor_of[name] == place}
    forms = {name: [str(one.dtype).removeprefix("torch."), list(one.shape)] for name, one in tensors.items()}
    digests = {name: str(checksum(memory_of(one))) for name, one in mine.items()}
    for rank in to:
        if place == 0:
            _send_text([tree, forms], transport, rank)
        for chunk in _chunks(mine.values()):
            transport.send(chunk, rank).wait()
        _send_text(digests, transport, rank)


def receive_state(
    transport: Transport,
    donors: Sequence[int],
    into: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Receive the state that the donors send by `send_state`.

    Args:
        transport: the transport between the ranks.
        donors: the ranks that have the state.
        into: a state of this rank whose memory may be reused, also if an error follows. Its CPU tensors are overwritten
            and returned, where the donors' state has a tensor of the same name, shape and dtype. This is faster,
            because the allocation of new memory takes longer than the transfer.

    Raises:
        SynclineError: a tensor was damaged in transit.
    """
    tree, forms = _receive_text(transport, donors[0])
    own = {} if into is None else encode(into, "state")[1]
    tensors: dict[str, Tensor] = {}
    for name, (dtype, shape) in forms.items():
        form = getattr(torch, dtype), torch.Size(shape)
        found = own.get(name)
        if found is None or not _can_hold(found, form):
            found = torch.empty(shape, dtype=form[0], device="cpu")
        tensors[name] = found
    donor_of = shared_out({name: one.nbytes for name, one in tensors.items()}, len(donors))
    of_donors = [
        _chunks([one for name, one in tensors.items() if donor_of[name] == place])
        for place in range(len(donors))
    ]
    for chunks in zip_longest(*of_donors):  # the donors send at the same time
        received = [
            transport.recv(chunk, rank)
            for chunk, rank in zip(chunks, donors, strict=True)
            if chunk is not None
        ]
        for work in received:
            work.wait()
    for rank in donors:
        for name, digest in _receive_text(transport, rank).items():
            if str(checksum(memory_of(tensors[name]))) != digest:
                raise SynclineError(
                    f"rank {transport.rank}, handover of the training state: expected {name} to have the checksum "
                    f"{digest}, as rank {rank} has sent it, got another one: the memory or the network of one of the "
                    "hosts is damaged"
                )
    state: dict[str, Any] = decode(tree, tensors)
    return state


def _can_hold(tensor: Tensor, form: _Form) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous() and (tensor.dtype, tensor.shape) == form


def shared_out(sizes_bytes: Mapping[str, int], num_donors: int) -> dict[str, int]:
    """Assign each tensor to a donor, so that all send about equally much. The first donor sends the small tensors.

    Examples:
        >>> shared_out({"a": 10**6, "b": 3 * 10**6, "c": 2 * 10**6, "small": 100}, 2)
        {'a': 1, 'b': 0, 'c': 1, 'small': 0}
    """
    donor_of = {name: 0 for name, size in sizes_bytes.items() if size <= _SMALL_BYTES}
    loads = [0] * num_donors
    for name in sorted(sizes_bytes.keys() - donor_of.keys(), key=lambda name: (-sizes_bytes[name], name)):
        donor_of[name] = loads.index(min(loads))
        loads[donor_of[name]] += sizes_bytes[name]
    return {name: donor_of[name] for name in sizes_bytes}


def _send_text(value: Any, transport: Transport, rank: int) -> None:
    text = bytearray(json.dumps(value).encode())
    transport.send(torch.tensor([len(text)], device="cpu"), rank).wait()
    transport.send(torch.frombuffer(text, dtype=torch.uint8), rank).wait()


def _receive_text(transport: Transport, rank: int) -> Any:
    length = torch.zeros(1, dtype=torch.int64, device="cpu")
    transport.recv(length, rank).wait()
    text = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    transport.recv(text, rank).wait()
    return json.loads(bytes(text.numpy()))


def _chunks(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    for one in tensors:
        if one.numel():
            yield from as_bytes(one).view(-1).split(_CHUNK_BYTES)
