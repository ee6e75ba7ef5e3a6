"""Check that loaded objects are equal on all ranks, bit for bit."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from syncline.checkpoint.encoding import encode
from syncline.checkpoint.tensor_file import checksum, memory_of
from syncline.equality.fingerprint import (
    Difference,
    differences,
    fingerprint_of_number,
    fingerprints,
    first_of,
    minority_of,
)
from syncline.errors import ReplicaDivergence
from syncline.transport.agreement import exchange
from syncline.transport.base import Transport

__all__ = ["agree_on_loaded"]


def agree_on_loaded(
    transport: Transport, title: str, contents: Mapping[str, Any], *, fault: Exception | None = None
) -> None:
    """Raise unless `contents` are equal on all ranks; a collective call.

    The cost is one pass over memory (at the speed of XXH3 for tensors on the CPU) and one small collective. Strides and
    devices may differ.

    Args:
        transport: the transport between the ranks.
        title: the name of the call, for messages.
        contents: values that `encode` accepts, by name.
        fault: see `exchange`.

    Raises:
        ReplicaDivergence: a value differs. The message names it and the ranks that agree; it is the same on every rank.

    Example:
        >>> import torch
        >>> from syncline.transport.threads import run_ranks
        >>> def program(transport):
        ...     agree_on_loaded(transport, "loading", {"model": {"weight": torch.tensor([transport.rank // 2])}})
        >>> try:
        ...     run_ranks(3, program)
        ... except ReplicaDivergence as error:
        ...     print(error.tensor, error.minority_ranks)
        model.weight (2,)
    """
    trees: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    digest = b""
    try:
        for name, content in contents.items():
            trees[name], found = encode(content, name)
            tensors |= found
        if transport.size > 1 and fault is None:
            digest = _digest(trees, tensors)
    except Exception as error:
        fault = error
    told = exchange(transport, title, [], payload=digest, fault=fault, refusal="could not be loaded")
    if len(set(told)) > 1:
        _tell(transport, title, trees, tensors)


def _digest(trees: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """Return 32 bytes that are equal on two ranks if their contents are equal."""
    elsewhere = {name: tensor for name, tensor in tensors.items() if not tensor.is_cpu}
    found = dict(zip(elsewhere, map(str, fingerprints(list(elsewhere.values()))), strict=True))
    lines = [
        f"{name} {tensor.dtype} {tuple(tensor.shape)} {found.get(name) or checksum(memory_of(tensor.contiguous()))}"
        for name, tensor in tensors.items()
    ]
    return hashlib.sha256(json.dumps([trees, lines], sort_keys=True).encode()).digest()


def _tell(transport: Transport, title: str, trees: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Find and raise the differences, by fingerprints that are the same on all kinds of devices."""
    found_here = zip(tensors.items(), fingerprints(list(tensors.values())), strict=True)
    mine = {
        name: fingerprint_of_number(f"{tensor.dtype} {tuple(tensor.shape)} {found}")
        for (name, tensor), found in found_here
    }
    mine |= {
        f"{name}, what is not a tensor": fingerprint_of_number(_text(tree)) for name, tree in trees.items()
    }
    rows = [json.loads(row) for row in transport.all_gather_bytes(json.dumps(mine).encode())]
    names = list(dict.fromkeys(name for row in rows for name in row))
    found = differences(names, [[row.get(name, -1) for name in names] for row in rows])
    if found:
        raise _divergence(title, found, len(names), transport.size)


def _text(tree: Any) -> str:
    return json.dumps(tree, sort_keys=True)


def _divergence(title: str, found: list[Difference], num_leaves: int, num_ranks: int) -> ReplicaDivergence:
    problem = (
        f"{title}: expected what is the same for all ranks to be the same on all {num_ranks} after it was loaded, but "
        f"{len(found)} of {num_leaves} tensors and others differ, the first of them {found[0].name}. Who is equal with "
        "whom:"
    )
    remedy = (
        "Either the ranks have read different files (is the path of the same file system on all hosts?), or what was "
        "loaded changes it (a load_state_dict, or a hook on it, that goes by the rank). Do not train on with this"
    )
    return ReplicaDivergence(
        "\n".join([problem, *first_of(found), remedy]),
        tensor=found[0].name,
        num_differing=len(found),
        minority_ranks=minority_of(found),
    )
