"""Checks that a tensor has memory. All code takes the address of a program's tensor here, or after a check made here.

Wrapper subclasses (quantised weights that contain tensors of codes and scales), meta and fake tensors, functorch's
wrappers and tensors with freed storage have elements but no memory: data_ptr() is 0, or raises. A read crashes.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .._engine import Error

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_RESIDENT = bytes(each & 1 for each in range(256))
_LIBC = ctypes.CDLL(None, use_errno=True)


def address_of(tensor: torch.Tensor) -> int:
    """Return the address of the first element; 0 if the tensor has no memory."""
    if tensor.layout is not torch.strided or tensor.is_meta or getattr(type(tensor), "has_no_address", False):
        return 0
    try:
        return tensor.data_ptr()
    except RuntimeError:  # a fake tensor, or one of functorch's
        return 0


def bytes_of(tensor: torch.Tensor) -> bytes:
    """Return a copy of a tensor's elements as bytes in row-major order, from any device. Needs no numpy."""
    made = bytearray(tensor.numel() * tensor.element_size())
    if made:
        torch.frombuffer(made, dtype=tensor.dtype).view(tensor.shape).copy_(tensor.detach())
    return bytes(made)


def reserved(numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, mmap.mmap]:
    """Return a tensor over addresses whose pages exist once they are written, and the mapping."""
    memory = mmap.mmap(-1, numel * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_NOHUGEPAGE)  # a page holds one parameter, so is_resident() is exact
    return torch.frombuffer(memory, dtype=dtype, count=numel), memory


def private_memory(nbytes: int) -> mmap.mmap:
    """Return memory of this process, in huge pages if the kernel has some: a disk takes one request for each page."""
    memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def is_resident(address: int, nbytes: int) -> bool:
    """Return True if any page of private memory, of which `address` begins a page, exists."""
    pages = -(-nbytes // mmap.PAGESIZE)
    found = ctypes.create_string_buffer(pages)
    failed = _LIBC.mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), found)
    return not failed and any(found.raw.translate(_RESIDENT))


def has_memory(tensor: torch.Tensor) -> bool:
    """Return True if every element has memory."""
    return tensor.numel() == 0 or address_of(tensor) != 0


def without_memory(tensor: torch.Tensor) -> str:
    """Describe a tensor without memory, for messages."""
    return (
        f"a {type(tensor).__name__} of shape {tuple(tensor.shape)} without memory of its own (its data_ptr() is 0): "
        "it wraps other tensors, is fake, or its storage was freed"
    )


def check_sendable(tensors: Iterable[torch.Tensor], label: str) -> None:
    """Raise for a tensor without memory. Ranks have the same tensors, so all of them raise."""
    for tensor in tensors:
        if not has_memory(tensor):
            raise Error(f"{label}: {without_memory(tensor)}; its bytes cannot be sent to the other ranks")


def copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict with copies of its tensors; tied entries stay tied."""
    copies: dict[int, torch.Tensor] = {}  # keyed by address
    return {name: _copied(value, copies) for name, value in state.items()}


def _copied(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    place = address_of(value) or id(value)
    if place not in copies or copies[place].shape != value.shape:
        copies[place] = value.clone()
    return copies[place]


def trim() -> None:
    """Give free pages inside the heap back to the system, with glibc."""
    getattr(_LIBC, "malloc_trim", id)(0)
