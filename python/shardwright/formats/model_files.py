"""The files of a model and the tensors of a safetensors file, which are read in ranges of bytes."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._engine import CheckpointError, CheckpointFolder
from .lazy import TORCH_DTYPES, Lazy, complex_dtype

#: names of files and of indexes of files, in order of preference
FILES = (
    *("model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"),
    *("diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
#: keys under which programs store a model in a file of torch.save
MODEL_KEYS = ("state_dict", "model_state_dict", "model", "module")


def model_files(path: str) -> list[str]:
    """Return the files of a model at `path`, a file or a folder; [] if there are none."""
    if os.path.isfile(path):
        return [path] if path.endswith((".safetensors", ".bin", ".pt", ".pth", ".ckpt")) or _is_torch(path) else []
    first = next((n for each in FILES if os.path.isfile(n := os.path.join(path, each))), "")
    if first.endswith(".index.json"):
        return [os.path.join(path, each) for each in _of_index(first)]
    return [first] if first else []


def _is_torch(path: str) -> bool:
    """Return whether a file begins as one of torch.save: an archive, or a pickle of protocol 2 to 5."""
    with open(path, "rb") as file:
        return file.read(4).startswith((b"PK\3\4", *(bytes([0x80, n]) for n in range(2, 6))))


def _of_index(path: str) -> list[str]:
    with open(path, "rb") as file:
        names = names_of_index(file.read(), path)
    for name in names:
        if not os.path.isfile(os.path.join(os.path.dirname(path), name)):
            raise CheckpointError(f"'{path}' names the file {name!r}, which is not in its folder")
    return names


def names_of_index(text: bytes, path: str) -> list[str]:
    """Return the files that an index names, all of its own folder. Raise CheckpointError for another text."""
    try:
        names = sorted({*json.loads(text)["weight_map"].values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"'{path}' is not an index of model files: {error}") from None
    odd = next((name for name in names if os.path.basename(str(name)) != name), None)
    if odd is not None:
        raise CheckpointError(f"'{path}' names the file {odd!r}, which is not in its folder")
    return names


def read_safetensors(path: str, folder: CheckpointFolder | None = None) -> dict[str, Lazy]:
    """Return the tensors of a safetensors file; of a file of our own `folder`, whose blocks are checked as they are read."""
    with open(path, "rb") as file:
        metadata, entries = CheckpointFolder.header(file.fileno(), path)
        seen = _identity(file.fileno())
    return tensors_of(path, metadata, entries, lambda dtype, shape, at: _at(path, dtype, shape, at, folder, seen))


def tensors_of(path: str, metadata: Any, entries: Any, make: Callable[[Any, Any, int], Lazy]) -> dict[str, Lazy]:
    """Return the tensors of a header of safetensors, each made of dtype, shape and its first byte in the file."""
    if "DCP_SHARDING_INFO" in metadata:
        raise CheckpointError(
            f"'{path}' is one of torch's sharded safetensors files: consolidate them with torch first"
        )
    odd = next(((name, dtype) for name, dtype, *_ in entries if dtype not in TORCH_DTYPES), None)
    if odd is not None:
        raise CheckpointError(f"'{path}': tensor '{odd[0]}' has the dtype {odd[1]}, which this program does not know")
    found = {}
    for name, dtype, shape, begin, _ in entries:
        pairs = complex_dtype(path, metadata, name, dtype, shape)
        found[name] = make(pairs or TORCH_DTYPES[dtype], shape[:-1] if pairs else shape, begin)
    return found


def _identity(descriptor: int) -> tuple[int, ...]:
    """Return what changes if a file is replaced or written: a read begins long after the file was found."""
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _at(
    path: str, dtype: torch.dtype, shape: tuple[int, ...], at: int, folder: CheckpointFolder | None, seen: Any
) -> Lazy:
    """Return the tensor at byte offset `at` of a file that was `seen` with this identity."""

    def load(first: int, nbytes: int, address: int) -> None:
        assert folder is not None
        folder.load([(os.path.basename(path), at + first, nbytes, address, 0)])

    def peek(ranges: Sequence[tuple[int, int, int]]) -> None:
        with open(path, "rb", buffering=0) as file:
            if _identity(file.fileno()) != seen:
                raise CheckpointError(
                    f"'{path}' was replaced or written since the model was loaded from it: load it again, or save to another folder"
                )
            for first, nbytes, _ in ranges if len(ranges) > 1 else ():  # the disk reads them at once
                with contextlib.suppress(OSError):  # a hint, which a file system may lack
                    os.posix_fadvise(file.fileno(), at + first, nbytes, os.POSIX_FADV_WILLNEED)
            for first, nbytes, address in ranges:
                memory, done = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B"), 0
                while done < nbytes:
                    count = os.preadv(file.fileno(), [memory[done:]], at + first + done)
                    if not count:
                        raise CheckpointError(f"'{path}' became shorter while it was read")
                    done += count

    def read(first: int, nbytes: int, address: int) -> None:
        peek([(first, nbytes, address)])

    part = read if folder is None else load
    return Lazy.in_ranges(dtype, shape, part, file=os.path.basename(path), peek=peek)
