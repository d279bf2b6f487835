"""Lazy: a stored tensor by dtype and shape, with functions that read it; and safetensors' names of dtypes."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .._engine import CheckpointError
from ..layout.memory import address_of

#: sample() takes so many pieces of a tensor, of at most so many bytes
_PIECES, _PIECE_BYTES = 8, 4096

#: torch's dtype -> safetensors' name; complex numbers are stored as pairs
DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "F32",
    torch.complex128: "F64",
}
for _torch_name, _name in (
    ("uint16", "U16"),
    ("uint32", "U32"),
    ("uint64", "U64"),
    ("float8_e4m3fn", "F8_E4M3"),
    ("float8_e5m2", "F8_E5M2"),
    ("float8_e8m0fnu", "F8_E8M0"),
):
    if hasattr(torch, _torch_name):
        DTYPES[getattr(torch, _torch_name)] = _name
#: safetensors' name -> torch's dtype of real tensors
TORCH_DTYPES: Mapping[str, torch.dtype] = {name: dtype for dtype, name in DTYPES.items() if not dtype.is_complex}


def is_complex_mark(key: str, value: str) -> bool:
    """Return whether an entry records a complex dtype, rather than a tied tensor of a module named `complex`."""
    return key.startswith("complex.") and re.fullmatch(r"complex\d+", value) is not None


def complex_dtype(path: str, marks: Mapping[str, str], name: str, dtype: str, shape: Sequence[int]) -> Any:
    """Return the complex dtype of a tensor, or None. Raise CheckpointError unless its real view has the dtype and shape of the file."""
    key = f"complex.{name}"
    if key not in marks or not is_complex_mark(key, marks[key]):
        return None
    parts = {"complex64": "F32", "complex128": "F64"}.get(marks[key])
    if parts is None or parts != dtype or not shape or shape[-1] != 2:
        raise CheckpointError(f"'{path}' calls '{name}', of {dtype} {list(shape)}, a {marks[key]}: it cannot be one")
    return torch.complex64 if parts == "F32" else torch.complex128


@dataclasses.dataclass(frozen=True)
class Lazy:
    """A tensor that is read only when a writer needs it.

    Attributes
    ----------
    read : callable
        Returns a row-major CPU tensor of `dtype` and `shape`. The caller must not write to it.
    file : str
        The source file of the tensor, a hint for the files to write; "" for no hint.
    part : callable, optional
        Reads part of it: (first byte, bytes, address) writes that range of its row-major bytes to the address. None: the
        format has no ranges.
    peek : callable, optional
        As `part` for several ranges at once, without a check of checksums. None: `part` checks none.
    sources : tuple of Lazy
        The tensors of which this one is made, if any.
    how : str
        How it is made of them.
    stamp : str
        What changes if its bytes do, where reading pieces of it costs a request each. "": its bytes tell.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]
    file: str = ""
    part: Callable[[int, int, int], None] | None = None
    peek: Callable[[Sequence[tuple[int, int, int]]], None] | None = None
    sources: tuple[Lazy, ...] = ()
    how: str = ""
    stamp: str = ""

    @classmethod
    def in_ranges(
        cls, dtype: torch.dtype, shape: tuple[int, ...], part: Callable[[int, int, int], None], **more: Any
    ) -> Lazy:
        """Return a tensor that `part` reads, also whole."""

        def read() -> torch.Tensor:
            tensor = torch.empty(shape, dtype=dtype, device="cpu")
            if tensor.nbytes:
                part(0, tensor.nbytes, tensor.data_ptr())
            return tensor

        return cls(dtype, shape, read, part=part, **more)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Lazy:
        def part(first: int, nbytes: int, address: int) -> None:
            ctypes.memmove(address, address_of(tensor) + first, nbytes)

        is_plain = address_of(tensor) != 0 and tensor.device.type == "cpu" and tensor.is_contiguous()
        is_plain = is_plain and not (tensor.is_conj() or tensor.is_neg())
        read = lambda: tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()  # noqa: E731
        return cls(tensor.dtype, tuple(tensor.shape), read, part=part if is_plain else None)

    def sample(self, pieces: int = _PIECES) -> str:
        """Return a digest of pieces spread over the tensor, the first and the last bytes among them. `part` must be set."""
        digest = hashlib.sha256(self.how.encode())
        if self.stamp:
            digest.update(self.stamp.encode())
            return digest.hexdigest()
        if self.sources:
            last, count = len(self.sources) - 1, min(len(self.sources), pieces)
            for number in range(count):
                source = self.sources[last * number // max(count - 1, 1)]
                digest.update(source.sample(max(pieces // count, 2)).encode())
            return digest.hexdigest()
        size, most = min(_PIECE_BYTES, self.nbytes), max(self.nbytes - _PIECE_BYTES, 0)
        begins = sorted({most * number // (pieces - 1) for number in range(pieces)})
        memory = (ctypes.c_char * (size * len(begins)))()
        address, part = ctypes.addressof(memory), self.part
        ranges = [(at, size, address + number * size) for number, at in enumerate(begins)]
        if size and self.peek is not None:
            self.peek(ranges)
        elif size:
            assert part is not None
            for each in ranges:
                part(*each)
        digest.update(memory)
        return digest.hexdigest()

    def to(self, dtype: torch.dtype) -> Lazy:
        if dtype == self.dtype:
            return self
        return dataclasses.replace(self, dtype=dtype, part=None, peek=None, read=lambda: self.read().to(dtype))

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


def has_numpy() -> bool:
    """Return True if numpy is loaded or can be imported; the package itself never needs it."""
    try:
        import numpy
    except ImportError:
        return False
    return numpy is not None
