"""Safetensors at an address of fsspec, such as s3://bucket/model: each rank requests the ranges of bytes that it keeps."""

from __future__ import annotations

import ctypes
import os
import posixpath
from typing import Any

import torch

from .._engine import CheckpointError, CheckpointFolder
from .lazy import Lazy
from .model_files import FILES, names_of_index, tensors_of

#: what a file system tells of a file that changes as the file does; some tell the time of the question too
_STAMPS = ("size", "ETag", "etag", "md5Hash", "crc32c", "mtime", "LastModified", "last_modified")
#: a header begins with its length in 8 bytes; safetensors' own limit
_LENGTH_BYTES, _HEADER_BYTES_MAX = 8, 100_000_000


def remote_tensors(address: str) -> dict[str, Lazy]:
    """Return the tensors of a safetensors file, or of a folder of them, at an address."""
    import fsspec

    try:
        fs, base = fsspec.core.url_to_fs(address)
        found: dict[str, Lazy] = {}
        for path in _files(fs, base, address):
            read = _File(fs, path).tensors()
            twice = next((name for name in read if name in found), None)
            if twice is not None:
                raise CheckpointError(f"'{address}' holds the tensor '{twice}' twice")
            found |= read
        return found
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"'{address}' cannot be read: {type(error).__name__}: {error}") from error


def _files(fs: Any, base: str, address: str) -> list[str]:
    if fs.isfile(base):
        return [base]
    first = next((n for n in FILES if ".safetensors" in n and fs.isfile(posixpath.join(base, n))), None)
    if first is None:
        there = "exists" if fs.exists(base) else "does not exist"
        raise CheckpointError(
            f"'{address}' {there} and holds no safetensors: a model in another form must be copied to a mounted file system"
        )
    path = posixpath.join(base, first)
    if not first.endswith(".index.json"):
        return [path]
    names = names_of_index(fs.cat_file(path), path)
    missing = next((name for name in names if not fs.isfile(posixpath.join(base, name))), None)
    if missing is not None:
        raise CheckpointError(f"'{path}' names the file {missing!r}, which is not in its folder")
    return [posixpath.join(base, name) for name in names]


class _File:
    """One file of safetensors."""

    def __init__(self, fs: Any, path: str) -> None:
        self._fs, self.path = fs, path
        told = fs.info(path)
        self._size = int(told["size"])
        self._stamp = "; ".join(f"{key} {told[key]}" for key in _STAMPS if told.get(key) is not None)

    def _bytes(self, begin: int, nbytes: int) -> bytes:
        try:
            found: bytes = self._fs.cat_file(self.path, start=begin, end=begin + nbytes)
        except Exception as error:
            raise CheckpointError(f"'{self.path}' cannot be read: {type(error).__name__}: {error}") from error
        if len(found) != nbytes:
            raise CheckpointError(f"'{self.path}' ends at byte {begin + len(found)}, and had {self._size} bytes")
        return found

    def tensors(self) -> dict[str, Lazy]:
        length = int.from_bytes(self._bytes(0, min(_LENGTH_BYTES, self._size)), "little")
        head = self._bytes(0, min(_LENGTH_BYTES + min(length, _HEADER_BYTES_MAX), self._size))
        # the engine reads headers of files: one in memory of the same size, of which only the header has pages
        descriptor = os.memfd_create("shardwright header")
        try:
            os.write(descriptor, head)
            os.truncate(descriptor, self._size)
            metadata, entries = CheckpointFolder.header(descriptor, self.path)
        finally:
            os.close(descriptor)
        return tensors_of(self.path, metadata, entries, self._tensor)

    def _tensor(self, dtype: torch.dtype, shape: tuple[int, ...], at: int) -> Lazy:
        def part(first: int, nbytes: int, address: int) -> None:
            ctypes.memmove(address, self._bytes(at + first, nbytes), nbytes)

        return Lazy.in_ranges(dtype, shape, part, file=posixpath.basename(self.path), stamp=self._stamp)
