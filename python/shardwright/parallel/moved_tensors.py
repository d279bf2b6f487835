"""Tensors that leave memory and come back: to a file without a name, or from a GPU to pinned host memory.

A Store takes tensors in the order of a forward, and expects them back in the reverse order: each that is taken brings
the one that was put before it on its way.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch

from .._engine import StateFile

_PAGE_BYTES = 4096
_GROWTH_BYTES = 64 << 20
#: bytes of a request; the file has one such buffer for writes and one for reads
_REQUEST_BYTES = 4 << 20
#: tensors that wait to be written, at most: they are still in memory
_WAITING = 2
_serials = itertools.count()


class Moved(Protocol):
    """A tensor that left memory. Its place is free again once this object is gone."""

    def begin(self) -> None:
        """Begin to bring the tensor back."""

    def get(self) -> torch.Tensor:
        """Return the tensor, and begin to bring back the one that was put before it."""


class Store(Protocol):
    """A place for tensors out of memory."""

    def put(self, tensor: torch.Tensor) -> Moved: ...


class Pages:
    """The pages of a file in which tensors lie; a tensor's own are used again by one of the same size."""

    def __init__(self, file: StateFile, growth_bytes: int) -> None:
        self._file, self._growth_bytes = file, growth_bytes
        self._next = self._end = 0
        self._free: dict[int, list[int]] = {}

    def grow(self, nbytes: int) -> None:
        self._next = self._file.grow(nbytes)
        self._end = self._next + nbytes

    def take(self, size: int, before_growth: Callable[[], object] = lambda: None) -> tuple[int, bool]:
        """Return the address of `size` bytes in whole pages, and True if they are new: they hold zeros."""
        if free := self._free.get(size):
            return free.pop(), False
        if self._end - self._next < size:
            before_growth()
            try:
                self.grow(max(size, self._growth_bytes))
            except OSError:
                self.grow(size)
        address, self._next = self._next, self._next + size
        return address, True

    def give_back(self, address: int, size: int) -> None:
        self._free.setdefault(size, []).append(address)


def in_pages(nbytes: int) -> int:
    """Round bytes up to whole pages."""
    return -(-nbytes // _PAGE_BYTES) * _PAGE_BYTES


class FileStore:
    """A file in `folder`, which grows to what it holds at once. It bypasses the page cache if the folder can.

    One thread writes and one reads, both without the GIL. At most two tensors wait to be written.
    """

    def __init__(self, folder: str, label: str) -> None:
        self._file = StateFile(folder, f"shardwright-{label}-{os.getpid()}-{next(_serials)}.inputs", _REQUEST_BYTES)
        self.folder, self._pages = folder, Pages(self._file, _GROWTH_BYTES)
        self._writer, self._reader = (ThreadPoolExecutor(1, f"shardwright-{name}") for name in ("writes", "reads"))
        self._writes: collections.deque[Future[None]] = collections.deque()
        self._latest_read: Future[None] | None = None
        self._latest: weakref.ref[_InFile] | None = None

    @property
    def nbytes(self) -> int:
        return self._file.nbytes

    def put(self, tensor: torch.Tensor, after: Callable[[], object] | None = None) -> _InFile:
        """Write a dense tensor, once `after` returns. Raise OSError if the disk is full, or an earlier write failed."""
        while self._writes and (self._writes[0].done() or len(self._writes) >= _WAITING):
            _wait(self._writes.popleft())
        size = in_pages(tensor.nbytes)
        address, _ = self._pages.take(size, self._settle)
        write = self._writer.submit(self._write, address, tensor.detach(), after)
        self._writes.append(write)
        moved = _InFile(self, address, size, tensor, write, self._latest)
        self._latest = weakref.ref(moved)
        return moved

    def _settle(self) -> None:
        for move in (*self._writes, self._latest_read):  # one thread alone changes the file's size
            _wait(move)

    def _write(self, address: int, tensor: torch.Tensor, after: Callable[[], object] | None) -> None:
        if after is not None:
            after()
        self._file.store(address, tensor.data_ptr(), tensor.nbytes)

    def read(self, moved: _InFile, target: torch.Tensor) -> Future[None]:
        self._latest_read = self._reader.submit(self._read, moved.write, moved.address, target)
        return self._latest_read

    def _read(self, write: Future[None], address: int, target: torch.Tensor) -> None:
        write.result()
        self._file.fetch(address, target.data_ptr(), target.nbytes)

    def take_back(self, address: int, size: int, write: Future[None]) -> None:
        """Use a tensor's pages again, after its write, which need not begin any more."""
        write.cancel()
        write.add_done_callback(lambda _: self._pages.give_back(address, size))


def _wait(move: Future[None] | None) -> None:
    """Wait for a read or a write, and raise its error; one that a tensor's end has cancelled, or that waited for it, has none."""
    if move is not None:
        with contextlib.suppress(CancelledError):
            move.result()


class _InFile:
    """A tensor in a file."""

    def __init__(
        self, store: FileStore, address: int, size: int, tensor: torch.Tensor, write: Future[None], before: Any
    ) -> None:
        self._store, self._size, self._before = store, size, before
        self.address, self.write = address, write
        self._like = torch.empty_like(tensor, device="meta", requires_grad=False)
        self._target: torch.Tensor | None = None
        self._read: Future[None] | None = None

    def begin(self) -> None:
        if self._read is None:
            self._target = torch.empty_like(self._like, device="cpu")
            self._read = self._store.read(self, self._target)

    def get(self) -> torch.Tensor:
        self.begin()
        before = None if self._before is None else self._before()
        if before is not None:
            before.begin()
        assert self._read is not None and self._target is not None
        self._read.result()
        found, self._target, self._read = self._target, None, None  # a second backward reads again
        return found

    def __del__(self) -> None:
        self._store.take_back(self.address, self._size, self.write)


class DeviceStore:
    """Pinned host memory for tensors of a GPU, or a file behind it. Copies run on a stream of their own."""

    def __init__(self, file: FileStore | None = None) -> None:
        self.file = file
        self.stream: Any = None
        self._latest: weakref.ref[_OnHost] | None = None

    def put(self, tensor: torch.Tensor) -> _OnHost:
        if self.stream is None:
            self.stream = torch.cuda.Stream(tensor.device)
        host = torch.empty_like(tensor, device="cpu", pin_memory=True, requires_grad=False)
        self.stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self.stream):
            host.copy_(tensor.detach(), non_blocking=True)
            copied = self.stream.record_event()
        tensor.record_stream(self.stream)  # whose memory torch reuses after the copy
        place: Any = host if self.file is None else self.file.put(host, copied.synchronize)
        moved = _OnHost(self, place, tensor.device, self._latest)
        self._latest = weakref.ref(moved)
        return moved


class _OnHost:
    """A tensor of a GPU in host memory, or in a file."""

    def __init__(self, store: DeviceStore, place: Any, device: torch.device, before: Any) -> None:
        self._store, self._place, self._device, self._before = store, place, device, before
        self._coming: tuple[torch.Tensor, Any] | None = None

    def begin(self) -> None:
        if self._coming is None and isinstance(self._place, torch.Tensor):
            self._copy(self._place)
        elif self._coming is None:
            self._place.begin()  # its copy to the GPU begins in get(), since the host would wait for the file

    def _copy(self, host: torch.Tensor) -> None:
        with torch.cuda.stream(self._store.stream):
            found = host.to(self._device, non_blocking=True)
            self._coming = found, self._store.stream.record_event()

    def get(self) -> torch.Tensor:
        if self._coming is None:
            self._copy(self._place if isinstance(self._place, torch.Tensor) else self._place.get())
        before = None if self._before is None else self._before()
        if before is not None:
            before.begin()
        assert self._coming is not None
        (found, arrived), self._coming = self._coming, None
        current = torch.cuda.current_stream(self._device)
        current.wait_event(arrived)
        found.record_stream(current)
        return found
