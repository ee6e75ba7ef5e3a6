"""Encode a state as JSON and named tensors, and decode it, without pickle.

JSON has no tuples, no keys other than strings, no infinity and no tensors. Values that JSON can hold are stored
unchanged, so they stay readable. Any other value becomes an object with one key that begins with "$":

    {"$tensor": "model.weight"}        a tensor, by the name under which it is stored
    {"$complex": "model.z"}            a complex tensor, stored as real numbers with one more dimension
    {"$part": {"values": ..., ...}}    a part of a tensor, with its start, and the shape and order of the whole tensor
    {"$tuple": [...]}                  a tuple
    {"$dict": [[key, value], ...]}     a dict with a key that is not a string or begins with "$"
    {"$counter": [[key, value], ...]}  a Counter, the type of MultiStepLR's milestones
    {"$float": "nan"}                  a float that JSON cannot hold: nan, inf, -inf
    {"$bytes": "..."}                  bytes, in base 64
    {"$dtype": "torch.float32"}        a dtype; "$device" is for a device, and "$size" for a torch.Size
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from syncline.checkpoint.files import STORABLE
from syncline.sharded.part import TensorPart
from syncline.tensors.targets import check_dense

_KEPT = (str, bool, int, type(None))


def encode(state: Any, name: str) -> tuple[Any, dict[str, Tensor]]:
    """Encode `state` as a value that `json.dumps` accepts, and as a dict of its tensors by name.

    A tensor that occurs twice is stored once. Tensors are not copied.

    Args:
        state: nested dicts, lists and tuples of tensors, numbers, strings, bytes and None. Dtypes, devices and parts
            of tensors (`TensorPart`) are accepted, too.
        name: the name of the whole state. The name of each tensor begins with it.

    Raises:
        TypeError: a value has another type. The message names the place of the value.
        ValueError: a tensor cannot be stored, because it is sparse, on the meta device, or of a subclass that wraps
            other tensors.

    Examples:
        >>> encode({"lr": 0.1, "betas": (0.9, 0.99), "state": {0: torch.zeros(2)}}, "optimizer")[0]
        {'lr': 0.1, 'betas': {'$tuple': [0.9, 0.99]}, 'state': {'$dict': [[0, {'$tensor': 'optimizer.state.0'}]]}}
    """
    encoder = _Encoder()
    return encoder.encode(state, name), encoder.tensors


class _Encoder:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}

    def encode(self, value: Any, place: str) -> Any:
        # Compare exact types. An object of a subclass (numpy.float64, IntEnum) would be decoded as the base class.
        kind = type(value)
        if kind in _KEPT:
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if isinstance(value, Tensor):
            return self._tensor(value, place)
        if kind is TensorPart:
            values = self._tensor(value.values, f"{place}[{value.start}:{value.stop}]")
            return {"$part": {**vars(value), "values": values}}
        if kind is list:
            return [self.encode(one, f"{place}.{index}") for index, one in enumerate(value)]
        if kind is tuple:
            return {"$tuple": [self.encode(one, f"{place}.{index}") for index, one in enumerate(value)]}
        if kind in (dict, OrderedDict, defaultdict):
            if all(type(key) is str and not key.startswith("$") for key in value):
                return {key: self.encode(one, f"{place}.{key}") for key, one in value.items()}
            return {"$dict": self._pairs(value, place)}
        if kind is Counter:
            return {"$counter": self._pairs(value, place)}
        if kind is bytes:
            return {"$bytes": base64.b64encode(value).decode()}
        if kind in (torch.dtype, torch.device):
            return {f"${kind.__name__}": str(value)}
        if kind is torch.Size:
            return {"$size": list(value)}
        raise TypeError(
            f"{place} is a {kind.__module__}.{kind.__qualname__}, which cannot be stored: expected tensors, numbers, "
            "strings, bytes, None, and dicts, lists and tuples of them. Convert the value to these types in "
            "state_dict() and back in load_state_dict(), or leave it out of the state"
        )

    def _pairs(self, value: Mapping[Any, Any], place: str) -> list[list[Any]]:
        pairs = []
        for key, one in value.items():
            if isinstance(key, Tensor):
                raise TypeError(
                    f"{place} is a dict with a tensor as a key, which cannot be stored: expected strings, numbers or "
                    "tuples of them as keys. Convert the keys in state_dict() and back in load_state_dict()"
                )
            pairs.append([self.encode(key, f"{place}, a key"), self.encode(one, f"{place}.{key}")])
        return pairs

    def _tensor(self, tensor: Tensor, place: str) -> dict[str, str]:
        check_dense(place, tensor)
        if id(tensor) not in self._names:
            # Two places in a state can have the same name if keys contain dots.
            others = (f"{place} ({number})" for number in itertools.count(2))
            name = next(one for one in itertools.chain([place], others) if one not in self.tensors)
            values = tensor.detach().resolve_conj().resolve_neg()
            values = torch.view_as_real(values) if values.is_complex() else values
            if values.dtype not in STORABLE:
                raise ValueError(
                    f"{place} is a tensor of {tensor.dtype}, which safetensors files cannot hold: convert it to "
                    "another dtype, such as torch.float32"
                )
            self._names[id(tensor)], self.tensors[name] = name, values
        return {"$complex" if tensor.is_complex() else "$tensor": self._names[id(tensor)]}


def decode(encoded: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Decode a value that `encode` returned. It equals the original, but an OrderedDict or defaultdict becomes a dict.

    Args:
        encoded: the JSON value from `encode`.
        tensors: the tensors, by name.

    Raises:
        KeyError: a tensor is missing.
        ValueError, TypeError: `encode` cannot have returned this value.

    Examples:
        >>> encoded, tensors = encode({"betas": (0.9, float("inf")), 3: torch.ones(1)}, "x")
        >>> decode(encoded, tensors)
        {'betas': (0.9, inf), 3: tensor([1.])}
    """
    if isinstance(encoded, list):
        return [decode(one, tensors) for one in encoded]
    if not isinstance(encoded, dict):
        return encoded
    tag: str
    value: Any
    tag, value = next(iter(encoded.items()), ("", None))
    if not tag.startswith("$"):
        return {key: decode(one, tensors) for key, one in encoded.items()}
    match tag:
        case "$tensor":
            return tensors[value]
        case "$complex":
            return torch.view_as_complex(tensors[value])
        case "$part":
            return TensorPart(
                values=decode(value["values"], tensors),
                start=value["start"],
                shape=tuple(value["shape"]),
                order=tuple(value["order"]),
            )
        case "$tuple":
            return tuple(decode(one, tensors) for one in value)
        case "$dict" | "$counter":
            pairs = {decode(key, tensors): decode(one, tensors) for key, one in value}
            return pairs if tag == "$dict" else Counter(pairs)
        case "$float":
            return float(value)
        case "$bytes":
            return base64.b64decode(value)
        case "$dtype":
            dtype = vars(torch).get(value.removeprefix("torch."))  # getattr would import submodules of torch
            if isinstance(dtype, torch.dtype):
                return dtype
        case "$device":
            with contextlib.suppress(RuntimeError):  # there is no such device
                return torch.device(value)
        case "$size":
            return torch.Size(value)
    raise ValueError(f"expected a value that this version of Syncline can decode, found {encoded!s:.200}")


def tensors_in(encoded: Any) -> Iterator[str]:
    """Yield the names of the tensors in a value that `encode` returned. A name can occur more than once.

    Examples:
        >>> list(tensors_in(encode({"a": torch.zeros(1), "b": (torch.ones(1), 2)}, "x")[0]))
        ['x.a', 'x.b.0']
    """
    if isinstance(encoded, list):
        for one in encoded:
            yield from tensors_in(one)
    elif isinstance(encoded, dict):
        tag, value = next(iter(encoded.items()), ("", None))
        if tag in ("$tensor", "$complex"):
            yield str(value)
        else:
            for one in encoded.values():
                yield from tensors_in(one)
