"""Image: the files of one step in a memfd, each at a block boundary, and a table for each rank that wrote to it.

Bytes of the memfd:

    [0, data)                    files: block n of the plans lies at n MiB. Only what this host's ranks wrote has pages
    data + i * TABLE_BYTES       the table of the i-th rank

A table is a prefix, a head (JSON), runs and tallies:

    prefix   magic (8 bytes), bytes of head, runs, tallies (4 each), crc32 of all but itself (4)
    head     step, nonce, rank, world_size, data, branch (rollbacks before it); rank 0's also has files, in the order of blocks:
             (path, bytes, bytes before its first tensor)
    runs     (begin, nbytes), 8 bytes each: what the rank wrote
    tallies  checksums of the blocks, as in csrc/checkpoint/tally.h

A rank clears its prefix, writes its runs, then the table, then the prefix. A table is valid if and only if its checksum
is right, so a rank that is killed at any moment leaves a valid table of complete data, or none. Writing calls of one
rank must not overlap.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import mmap
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..._engine import CheckpointError
from ..folder.partial import closed_in_children
from .client import Client

TABLE_BYTES = 64 << 20  # of address space; a table has as many pages as bytes
_MAGIC = b"swimage3"
_PREFIX = struct.Struct("<8sIIII")
_RUN = struct.Struct("=QQ")


@dataclasses.dataclass(frozen=True)
class Table:
    """The record of what one rank wrote of one step."""

    head: dict[str, Any]
    runs: bytes
    tallies: bytes

    def encode(self) -> bytes:
        head = json.dumps(self.head).encode()
        parts = head, self.runs, self.tallies
        rest, lengths = b"".join(parts), [*map(len, parts)]
        return _PREFIX.pack(_MAGIC, *lengths, _checksum(lengths, rest)) + rest

    @classmethod
    def decode(cls, data: Any) -> Table | None:
        """Return the table at the start of `data`; None if there is no complete table."""
        magic, head, runs, tallies, checksum = _PREFIX.unpack_from(data)
        end = _PREFIX.size + head + runs + tallies
        if magic != _MAGIC or end > min(len(data), TABLE_BYTES):
            return None
        rest = bytes(data[_PREFIX.size : end])
        if _checksum([head, runs, tallies], rest) != checksum:
            return None
        return cls(json.loads(rest[:head]), rest[head : head + runs], rest[head + runs :])

    def each_run(self) -> Iterator[tuple[int, int]]:
        """Yield (begin, nbytes)."""
        return _RUN.iter_unpack(self.runs)

    @classmethod
    def each_of(cls, encoded: bytes) -> Iterator[Table]:
        """Yield the tables in a concatenation of tables."""
        at = 0
        while at < len(encoded) and (table := cls.decode(memoryview(encoded)[at:])) is not None:
            yield table
            at += len(table.encode())


def _checksum(lengths: Sequence[int], rest: bytes) -> int:
    return zlib.crc32(rest, zlib.crc32(struct.pack("<8s3I", _MAGIC, *lengths)))


class Image:
    """A mapped image. It owns `fd`; `meta` has "data", the bytes before the tables, and "tables", their number.

    `disk_fd` is `fd` where the image lies on a disk: what is written there has its space first. -1: it lies in memory.
    """

    def __init__(self, fd: int, meta: dict[str, int], *, on_disk: bool = False) -> None:
        self.fd, self.data, self.tables = fd, meta["data"], meta["tables"]
        self.disk_fd = fd if on_disk else -1
        try:
            found = os.fstat(fd)
            self.file = found.st_dev, found.st_ino
            self._map = mmap.mmap(fd, found.st_size)
            self._map.madvise(mmap.MADV_DONTFORK)
        except BaseException as error:
            self.close()
            if isinstance(error, (OSError, ValueError)):
                raise CheckpointError(f"an image of a step cannot be mapped: {error}") from error
            raise
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        _live.add(self)

    def __del__(self) -> None:
        self.close()

    @classmethod
    def make(cls, client: Client, name: str, data: int, tables: int) -> Image:
        meta = {"data": data, "tables": tables}
        _, fd = client.ask("make", name, nbytes=data + max(tables, 1) * TABLE_BYTES, meta=meta)
        return cls(fd, meta, on_disk=client.on_disk)

    @classmethod
    def open(cls, client: Client, name: str) -> Image:
        answer, fd = client.ask("open", name)
        return cls(fd, answer["meta"], on_disk=client.on_disk)

    @property
    def address(self) -> int:
        return self._bytes.data_ptr()

    @property
    def view(self) -> memoryview:
        return memoryview(self._map)

    def reserve(self, begin: int, nbytes: int) -> None:
        """Give a range that is about to be written its space on the disk."""
        if self.disk_fd >= 0 and nbytes:
            os.posix_fallocate(self.disk_fd, begin, nbytes)

    def clear(self, index: int) -> None:
        """Make table `index` invalid."""
        at = self.data + index * TABLE_BYTES
        self.reserve(at, _PREFIX.size)
        self._map[at : at + _PREFIX.size] = bytes(_PREFIX.size)

    def write(self, index: int, table: Table) -> None:
        """Write a cleared table, its prefix last."""
        encoded = table.encode()
        if len(encoded) > TABLE_BYTES:
            raise CheckpointError(f"a rank wrote {len(encoded)} bytes of runs: a table has at most {TABLE_BYTES}")
        at = self.data + index * TABLE_BYTES
        self.reserve(at, len(encoded))
        self._map[at + _PREFIX.size : at + len(encoded)] = encoded[_PREFIX.size :]
        self._map[at : at + _PREFIX.size] = encoded[: _PREFIX.size]

    def table(self, index: int) -> Table | None:
        at = self.data + index * TABLE_BYTES
        return Table.decode(self.view[at : at + TABLE_BYTES])

    def each_table(self) -> Iterator[Table]:
        """Yield the valid tables."""
        return filter(None, map(self.table, range(self.tables)))

    def close(self) -> None:
        """Close the file descriptor. The last reference to the memory unmaps it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _forget(self) -> None:
        """Close the descriptors in a forked child, the map's, too, which has no name here. The child has no memory of the image."""
        self.fd = -1
        # never unmap: the child may have other memory at this address by then
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._map))
        nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for fd in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                found = os.fstat(fd)
                if (found.st_dev, found.st_ino) == self.file:
                    os.dup2(nothing, fd, inheritable=False)
        os.close(nothing)


_live = closed_in_children(Image._forget)
