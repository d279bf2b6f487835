"""Trees of plain values as JSON, with tensors stored separately by name. Reading a tree executes no code.

A value that JSON cannot express is an object with one key that begins with `$` (docs/format.md).
"""

from __future__ import annotations

import base64
import json
import marshal
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .._engine import CheckpointError
from .lazy import Lazy, has_numpy

_SPECIAL_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
_DECODERS: dict[str, Any] = {"$size": torch.Size, "$device": torch.device, "$float": _SPECIAL_FLOATS.__getitem__}


def encode(value: Any, name: str, tensors: dict[str, Any]) -> Any:
    """Return `value` as JSON. Add its tensors, also Lazy ones, to `tensors` under names that begin with `name`.

    A value of a subclass of a plain type becomes the plain type: an IntEnum an int, a named tuple a tuple, a Counter a dict.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (torch.Tensor, Lazy)):
        return {"$tensor": _add(value, name, tensors)}
    if type(value).__module__ == "numpy":
        return _encode_numpy(value, name, tensors)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, complex):
        return {"$complex": [encode(value.real, name, tensors), encode(value.imag, name, tensors)]}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"$device": str(value)}
    if isinstance(value, torch.Size):
        return {"$size": [int(item) for item in value]}
    if type(value) is OrderedDict:
        return {"$ordered": [[encode(k, name, tensors), encode(v, f"{name}.{k}", tensors)] for k, v in value.items()]}
    if isinstance(value, Mapping):
        return mapping({key: encode(item, f"{name}.{key}", tensors) for key, item in value.items()}, name, tensors)
    if isinstance(value, (list, tuple, set, frozenset)):
        ordered = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        items = [encode(item, f"{name}.{index}", tensors) for index, item in enumerate(ordered)]
        return items if isinstance(value, list) else {"$tuple" if isinstance(value, tuple) else "$set": items}
    raise CheckpointError(
        f"{name} is a {type(value).__qualname__}: a checkpoint holds numbers, strings, bytes, lists, tuples, sets, dicts, tensors, and "
        "torch's dtypes, sizes and devices"
    )


def _add(tensor: torch.Tensor | Lazy, name: str, tensors: dict[str, Any]) -> str:
    """Add a tensor and return its name, made unique: x in {"a": {"b": x}} and y in {"a.b": y} would share a.b."""
    number, free = 1, name
    while free in tensors:
        number += 1
        free = f"{name}#{number}"
    tensors[free] = tensor
    return free


def mapping(nodes: Mapping[Any, Any], name: str, tensors: dict[str, Any]) -> Any:
    """Return the tree of a dict with values that are already trees."""
    if all(isinstance(key, str) and not key.startswith("$") for key in nodes):
        return dict(nodes)
    return {"$dict": [[encode(key, name, tensors), node] for key, node in nodes.items()]}


def _encode_numpy(value: Any, name: str, tensors: dict[str, Any]) -> Any:
    import numpy

    if isinstance(value, numpy.generic):
        return encode(value.item(), name, tensors)
    if isinstance(value, numpy.ndarray):
        array = torch.from_numpy(numpy.ascontiguousarray(value).reshape(value.shape).copy())
        return {"$numpy": _add(array, name, tensors)}
    raise CheckpointError(
        f"{name} is a numpy {type(value).__qualname__}: a checkpoint holds numpy arrays and numbers only"
    )


def decode(node: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the value of a tree: the inverse of encode()."""
    if isinstance(node, list):
        return [decode(item, tensors) if type(item) in (dict, list) else item for item in node]
    if not isinstance(node, dict):
        return node
    if len(node) == 1:
        ((key, item),) = node.items()
        if key.startswith("$"):
            return _decode_special(key, item, tensors)
    return {key: decode(item, tensors) for key, item in node.items()}


def _decode_special(key: str, item: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if key in ("$tensor", "$numpy"):
        if item not in tensors:
            raise CheckpointError(f"the checkpoint names a tensor '{item}' that it does not hold")
        if key == "$numpy" and not has_numpy():
            raise CheckpointError(f"the checkpoint holds '{item}' as a numpy array: install numpy to load it")
        return tensors[item] if key == "$tensor" else tensors[item].numpy()
    if key == "$tuple":
        return tuple(decode([*item], tensors))
    if key == "$set":
        return {_hashable(decode(entry, tensors)) for entry in item}
    if key == "$dict":
        return {_hashable(decode(name, tensors)): decode(entry, tensors) for name, entry in item}
    if key == "$ordered":
        return OrderedDict((_hashable(decode(name, tensors)), decode(entry, tensors)) for name, entry in item)
    if key in _DECODERS:
        return _DECODERS[key](item)
    if key == "$complex":
        return complex(*(decode(part, tensors) for part in item))
    if key == "$bytes":
        return base64.b64decode(item, validate=True)
    if key == "$dtype":
        dtype = getattr(torch, item, None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"the checkpoint names a dtype '{item}' that this torch does not have")
        return dtype
    raise CheckpointError(
        f"the checkpoint holds a value of a kind '{key}' that this program does not know: use a newer shardwright"
    )


def _hashable(value: Any) -> Any:
    """Convert a set to a frozenset, also inside tuples: members of sets and keys must be hashable."""
    if isinstance(value, set):
        return frozenset(value)
    return tuple(_hashable(item) for item in value) if isinstance(value, tuple) else value


def tensor_names(node: Any) -> list[str]:
    """Return the names of the tensors that a tree refers to, in tree order."""
    names: list[str] = []
    _add_names([node], names)
    return names


def _add_names(nodes: Iterable[Any], names: list[str]) -> None:
    for node in nodes:
        kind = type(node)  # leaves are handled without a call: the state of a generator has hundreds
        if kind is list:
            _add_names(node, names)
        elif kind is dict:
            if len(node) == 1 and next(iter(node)) in ("$tensor", "$numpy"):
                names += node.values()
            else:
                _add_names(node.values(), names)


def dumps(node: Any) -> bytes:
    """Return the text of a tree. Equal trees give equal bytes."""
    return (json.dumps(node, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n").encode("utf-8")


def mark(value: Any) -> bytes | None:
    """Return bytes that only equal plain values of equal types share, ten times faster than dumps(). None: not plain."""
    try:
        return marshal.dumps(value, 2)  # later versions write references, which differ between equal values
    except ValueError:
        return None


def loads(text: bytes) -> Any:
    return json.loads(text.decode("utf-8"))
