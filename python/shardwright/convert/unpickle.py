"""Unpickling that executes nothing: tensors, plain containers and numbers are made, any other class becomes a placeholder."""

from __future__ import annotations

import collections
import pickle
import types
import zipfile
from collections.abc import Iterable
from typing import IO, Any

import torch

from .._engine import CheckpointError


class Placeholder:
    """An object of a class that is not made. It keeps its state and ignores arguments and items."""

    name = "?"
    state: Any = None

    def __new__(cls, *_: Any, **__: Any) -> Placeholder:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, _: Any, __: Any) -> None:
        pass

    def append(self, _: Any) -> None:
        pass

    def extend(self, _: Any) -> None:
        pass

    def __hash__(self) -> int:
        return id(self)


#: module -> names of classes and functions that build plain values
_PLAIN = {
    "builtins": ("set", "frozenset", "complex", "bytearray", "slice", "int", "float", "str", "bool", "bytes", "dict", "list", "tuple"),
    "collections": ("OrderedDict", "defaultdict", "Counter", "deque"),
    "_codecs": ("encode",),
    "datetime": ("timedelta", "datetime", "date"),
    "pathlib": ("Path", "PosixPath", "PurePosixPath", "PurePath"),
    "torch": ("Size", "device"),
    "torch._utils": (
        *("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter"),
        *("_rebuild_parameter_with_state", "_rebuild_device_tensor_from_numpy"),
    ),
    "torch.nn.parameter": ("Parameter", "Buffer"),
    "torch.serialization": ("_get_layout",),
    "torch.storage": ("UntypedStorage", "TypedStorage"),
}  # fmt: skip
_NUMPY = {"_reconstruct", "scalar", "dtype", "ndarray"}


class Unpickler(pickle.Unpickler):
    """An unpickler for torch.load and for DCP's metadata. `known`: further modules, of which classes alone are made."""

    known: Iterable[str] = ()

    def find_class(self, module: str, name: str) -> Any:
        if name in _PLAIN.get(module, ()) or (module == "torch" and _is_torch_value(name)):
            return super().find_class(module, name)
        if (module, name) == ("torch._tensor", "_rebuild_from_type_v2"):
            return _without_attributes
        if module.split(".")[0] == "numpy" and name in _NUMPY:
            return super().find_class(module, name)
        if module in self.known and "." not in name:  # a dotted name would reach what the module imports
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module:
                return found
        return type("Placeholder", (Placeholder,), {"name": f"{module}.{name}"})


def _without_attributes(rebuild: Any, _: Any, arguments: Any, __: Any) -> Any:
    """Return a tensor that was saved with attributes of its own, without them."""
    return rebuild(*arguments)


def _is_torch_value(name: str) -> bool:
    kinds = (torch.dtype, torch.layout, torch.memory_format)
    return isinstance(getattr(torch, name, None), kinds) or name.endswith("Storage") or name == "Tensor"


def _load(file: Any, **options: Any) -> Any:
    return Unpickler(file, **options).load()


#: the argument pickle_module of torch.load
_MODULE = types.SimpleNamespace(Unpickler=Unpickler, load=_load, __name__="shardwright.convert.unpickle")


def load_torch_file(path: str | IO[bytes]) -> Any:
    """Return the value of a file of torch.save, by path or open. Tensors of a zip file on disk are mapped, not read.

    Raises
    ------
    CheckpointError
        The file is not one of torch.save.
    """
    is_zip = isinstance(path, str) and zipfile.is_zipfile(path)
    try:
        return torch.load(path, map_location="cpu", mmap=is_zip, weights_only=False, pickle_module=_MODULE)
    except OSError:
        raise
    except Exception as error:
        what = f"'{path}'" if isinstance(path, str) else "the object"
        raise CheckpointError(f"{what} is not one of torch.save: {error or type(error).__name__}") from None


def without_placeholders(value: Any, name: str, left_out: list[str]) -> Any:
    """Return a value of plain types without placeholders, and add a sentence for each to `left_out`."""
    if isinstance(value, dict):
        kept = {}
        for key, item in value.items():
            clean = without_placeholders(item, f"{name}.{key}", left_out)
            if not isinstance(clean, Placeholder):
                kept[key] = clean
        return collections.OrderedDict(kept) if type(value) is collections.OrderedDict else kept
    if isinstance(value, (list, tuple)):
        items = [without_placeholders(item, f"{name}.{index}", left_out) for index, item in enumerate(value)]
        if any(isinstance(item, Placeholder) for item in items):
            return Placeholder()
        return value if isinstance(value, torch.Size) else tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, Placeholder):
        left_out.append(f"{name}, of class {value.name}")
    return value
