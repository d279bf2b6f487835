"""Safe unpickling: it creates tensors, plain containers and numbers; any other class becomes a placeholder.

A pickle is a program. It calls what find_class() returns, and its opcode BUILD sets attributes of any object. So
find_class() returns only functions without side effects, and BUILD is refused on classes, functions and members of an
enumeration, which outlive the file. Constructors of torch trust their arguments, some of which are addresses: a pickle
may name classes of tensors and storages but not call them, and no call has keywords. Numpy's functions also trust their
arguments (a forged dtype turns bytes into pointers), so this module builds arrays from a numeric dtype and the right
number of bytes. No opcode allocates more than the file holds.
"""

from __future__ import annotations

import collections
import enum
import math
import pickle
import re
import tarfile
import types
from collections.abc import Iterable, Mapping
from typing import IO, Any, ClassVar

import torch

from .._engine import CheckpointError
from ..torch_compat.state_dicts import records_of
from .lazy import has_numpy
from .model_files import MODEL_KEYS


class Placeholder:
    """A stand-in for an object of an unsupported class. It keeps its state and ignores arguments and items."""

    name = "?"
    state: Any = None

    def __new__(cls, *_: Any, **__: Any) -> Placeholder:
        return object.__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    append = extend = __setitem__ = __init__

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __hash__(self) -> int:
        return id(self)


#: module -> names of classes and functions that build plain values
_PLAIN = {
    "builtins": ("set", "frozenset", "complex", "slice", "int", "float", "str", "bool", "dict", "list", "tuple"),
    "collections": ("OrderedDict", "defaultdict", "Counter", "deque"),
    "_codecs": ("encode",),
    "datetime": ("timedelta", "datetime", "date"),
    "pathlib": ("Path", "PosixPath", "PurePosixPath", "PurePath"),
    "torch": ("Size", "device"),
    "torch._utils": ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3"),
    "torch.nn.parameter": ("Parameter", "Buffer"),
    "torch.serialization": ("_get_layout",),
    "torch.storage": ("UntypedStorage", "TypedStorage"),
}  # fmt: skip
#: protocol 2's name of a module -> its name
_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg"}
#: classes that a pickle may name as the type of a tensor or storage, but never call
_NAMED_ALONE = (torch.Tensor, torch.UntypedStorage, torch.TypedStorage)
#: numpy's names of the boolean, integer, float and complex dtypes that torch supports
_NUMERIC = re.compile(r"b1|\?|[iu][1248]|f[248]|c8|c16")


class _NumpyDtype(Placeholder):
    """A numpy dtype from a pickle: a name, with the byte order as state. `dtype`: None unless numeric."""

    name = "numpy.dtype"

    def __init__(self, name: Any = None, *_: Any) -> None:
        import numpy

        is_numeric = isinstance(name, str) and _NUMERIC.fullmatch(name)
        self.dtype: Any = numpy.dtype(name) if is_numeric else None

    def __setstate__(self, state: Any) -> None:
        is_plain = isinstance(state, tuple) and len(state) >= 5 and state[2:5] == (None, None, None)
        is_plain = is_plain and isinstance(state[1], str) and state[1] in ("<", ">", "=", "|")
        self.dtype = self.dtype.newbyteorder(state[1]) if is_plain and self.dtype is not None else None

    def read(self, data: Any, count: int) -> Any:
        """Return `count` numbers of this dtype in native byte order; None unless `data` has exactly their size."""
        import numpy

        if self.dtype is None or type(data) is not bytes or len(data) != count * self.dtype.itemsize:
            return None
        return numpy.frombuffer(data, self.dtype, count).astype(self.dtype.newbyteorder("="))


class _NumpyArray(Placeholder):
    """A numpy array from a pickle: created empty, then given shape, dtype and bytes. `array`: None unless numeric."""

    name = "numpy.ndarray"
    array: Any = None

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) != 5 or not isinstance(state[2], _NumpyDtype):
            return
        _, shape, dtype, is_fortran, data = state
        if isinstance(shape, tuple) and all(type(each) is int and each >= 0 for each in shape):
            numbers = dtype.read(data, math.prod(shape))
            self.array = None if numbers is None else numbers.reshape(shape, order="F" if is_fortran else "C")


def _numpy_scalar(dtype: Any = None, data: Any = None) -> Any:
    """Return a numpy number; a placeholder if its dtype is not numeric."""
    numbers = dtype.read(data, 1) if isinstance(dtype, _NumpyDtype) else None
    return _placeholder("numpy.scalar")() if numbers is None else numbers[0]


def _tensor_of_numpy(data: Any, dtype: Any, *_: Any) -> Any:
    """Return a tensor that torch.save wrote as a numpy array, as it does for devices without storages."""
    if not isinstance(data, _NumpyArray) or data.array is None:
        return _placeholder("numpy.ndarray")()
    return torch.from_numpy(data.array).to(dtype)


def _bytes(data: Any = b"", encoding: str = "latin-1", *_: Any) -> bytes:
    """Return bytes(data, encoding) for text of the file. bytes(n) is refused: it would allocate n bytes."""
    return data.encode(encoding) if isinstance(data, str) else bytes(memoryview(data))


def _check_call(target: Any) -> None:
    if isinstance(target, type) and issubclass(target, _NAMED_ALONE):
        raise pickle.UnpicklingError(f"the pickle calls {target!r}, which trusts its arguments")


def _without_attributes(rebuild: Any, _: Any, arguments: Any, __: Any) -> Any:
    """Return a tensor without the extra attributes with which it was saved."""
    _check_call(rebuild)
    return rebuild(*arguments)


_OWN = {
    ("builtins", "bytes"): _bytes,
    ("builtins", "bytearray"): lambda *arguments: bytearray(_bytes(*arguments)),
    ("torch._tensor", "_rebuild_from_type_v2"): _without_attributes,
    ("torch._utils", "_rebuild_device_tensor_from_numpy"): _tensor_of_numpy,
    ("torch._utils", "_rebuild_parameter"): lambda data, grad, *_: torch.nn.Parameter(data, bool(grad)),
    ("torch._utils", "_rebuild_parameter_with_state"): lambda data, grad, *_: torch.nn.Parameter(data, bool(grad)),
}
_NUMPY = {
    "_reconstruct": lambda *_: _NumpyArray(),
    "scalar": _numpy_scalar,
    "dtype": _NumpyDtype,
    "ndarray": _NumpyArray,
}


class Unpickler(pickle._Unpickler):
    """An unpickler for torch.load and for DCP's metadata. `known`: further modules from which only classes are created.

    It extends pickle's Python implementation, because the C implementation cannot refuse an opcode.
    """

    known: Iterable[str] = ()

    def find_class(self, module: str, name: str) -> Any:
        module = _RENAMED.get(module, module)
        if "." in name:  # a dotted name could reach objects that the module imports
            return _placeholder(f"{module}.{name}")
        if name in _PLAIN.get(module, ()) or (module == "torch" and _is_torch_value(name)):
            return super().find_class(module, name)
        if (module, name) in _OWN:
            return _OWN[module, name]
        if module.split(".")[0] == "numpy" and name in _NUMPY and has_numpy():
            return _NUMPY[name]
        if module in self.known:
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module:
                return found
        return _placeholder(f"{module}.{name}")

    def _build(self) -> None:
        target = self.stack[-2]  # type: ignore[attr-defined]
        if callable(target) or isinstance(target, enum.Enum):
            raise pickle.UnpicklingError(f"the pickle sets attributes of {target!r}, which it did not make")
        self.load_build()  # type: ignore[attr-defined]

    def _reduce(self) -> None:
        _check_call(self.stack[-2])  # type: ignore[attr-defined]
        self.load_reduce()  # type: ignore[attr-defined]

    def _newobj(self) -> None:
        _check_call(self.stack[-2])  # type: ignore[attr-defined]
        self.load_newobj()  # type: ignore[attr-defined]

    def _instantiate(self, target: Any, arguments: Any) -> None:
        """Serve the opcodes INST and OBJ."""
        _check_call(target)
        super()._instantiate(target, arguments)  # type: ignore[misc]

    def _refuse(self) -> None:
        raise pickle.UnpicklingError("the pickle has an opcode that no torch writes")

    dispatch: ClassVar[dict[int, Any]] = {
        **pickle._Unpickler.dispatch,
        pickle.BUILD[0]: _build,
        pickle.REDUCE[0]: _reduce,
        pickle.NEWOBJ[0]: _newobj,
        pickle.NEWOBJ_EX[0]: _refuse,  # a call with keywords
        pickle.BYTEARRAY8[0]: _refuse,  # allocates a size that the file names
        **dict.fromkeys((pickle.EXT1[0], pickle.EXT2[0], pickle.EXT4[0]), _refuse),  # the process's own registry
    }


def _placeholder(name: str) -> type[Placeholder]:
    return type("Placeholder", (Placeholder,), {"name": name})


def _is_torch_value(name: str) -> bool:
    kinds = (torch.dtype, torch.layout, torch.memory_format)
    return isinstance(getattr(torch, name, None), kinds) or name.endswith("Storage") or name == "Tensor"


#: the argument pickle_module of torch.load
_MODULE = types.SimpleNamespace(
    Unpickler=Unpickler, load=lambda file, **options: Unpickler(file, **options).load(), __name__=__name__
)


def load_torch_file(path: str | IO[bytes]) -> Any:
    """Return the value of a file of torch.save, given by path or open. Maps the tensors of a zip file on disk."""
    what = f"'{path}'" if isinstance(path, str) else "the object"
    try:
        records = records_of(path)
        if records is None and tarfile.is_tarfile(path):
            raise CheckpointError(f"{what} is a tar archive: no torch since 0.1.10 writes one")
        if any(name == "constants.pkl" or name.startswith("code/") for name in records or ()):
            raise CheckpointError(f"{what} is a TorchScript archive, whose code torch.load runs: save a state dict")
        is_mapped = isinstance(path, str) and records is not None
        return torch.load(path, map_location="cpu", mmap=is_mapped, weights_only=False, pickle_module=_MODULE)
    except (OSError, CheckpointError):
        raise
    except Exception as error:
        raise CheckpointError(f"{what} is not one of torch.save: {error or type(error).__name__}") from None


def model_state(path: str) -> tuple[Any, str | None, Mapping[Any, Any]]:
    """Return the value of a file, and the state dict in it: all, or what lies under a key that programs use, and that key."""
    body = load_torch_file(path)
    key = next(
        (k for k in MODEL_KEYS if isinstance(body, dict) and isinstance(body.get(k), Mapping | Placeholder)), None
    )
    state = body if key is None else body[key]
    if not isinstance(state, Mapping):
        kind = state.name if isinstance(state, Placeholder) else type(state).__name__
        raise CheckpointError(f"'{path}' holds a {kind}, not a state dict: save module.state_dict()")
    return body, key, state


def without_placeholders(value: Any, name: str, left_out: list[str]) -> Any:
    """Return a value of plain types without its placeholders. Adds a sentence about each to `left_out`."""
    if isinstance(value, _NumpyArray) and value.array is not None:
        return value.array
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
