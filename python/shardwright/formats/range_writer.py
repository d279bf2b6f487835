"""RangeWriter: this rank's ranges of files that several ranks write, from memory of any dtype, past the page cache."""

from __future__ import annotations

import concurrent.futures
import errno
import mmap
import os
from collections.abc import Iterator

import torch

from ..layout.memory import private_memory

_PAGE = mmap.PAGESIZE
_BUFFER_BYTES = 8 << 20


class RangeWriter:
    """Writes of ascending ranges of one file after another. Memory: two buffers of 8 MiB.

    Whole pages are written past the page cache where the file system can; the first and the last page of a range go
    through it, so that two ranks may write into one page. A thread writes one buffer while the next is filled.
    """

    def __init__(self) -> None:
        self._buffers = [private_memory(_BUFFER_BYTES) for _ in range(2)]
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "shardwright-write")
        self._running: concurrent.futures.Future[None] | None = None
        self._files: list[int] = []
        self._path = ""
        self._base = self._begin = self._end = 0  # in the file: the buffer's first byte, and the bytes that it holds

    def open(self, path: str) -> None:
        """Finish the file before, and begin with an existing one."""
        self.finish()
        self._path = path
        self._files.append(os.open(path, os.O_WRONLY | os.O_CLOEXEC))
        try:
            self._files.append(os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_DIRECT))
        except OSError:  # a file system without it
            self._files.append(self._files[0])

    def write(self, at: int, values: torch.Tensor, dtype: torch.dtype) -> None:
        """Write flat values, cast to `dtype`, from byte `at` on, which is a multiple of its size."""
        done, item = 0, dtype.itemsize
        while done < values.numel():
            place = at + done * item
            if place != self._end or place - self._base >= _BUFFER_BYTES:
                self._flush()
                self._base, self._begin, self._end = place // _PAGE * _PAGE, place, place
            count = min(values.numel() - done, (self._base + _BUFFER_BYTES - place) // item)
            target = torch.frombuffer(self._buffers[0], dtype=dtype, count=count, offset=place - self._base)
            target.copy_(values[done : done + count])
            done += count
            self._end += count * item

    def _flush(self) -> None:
        if self._running is not None:
            self._running.result()
            self._running = None
        if self._begin == self._end:
            return
        memory = memoryview(self._buffers[0])[self._begin - self._base : self._end - self._base]
        self._running = self._thread.submit(_write, (self._files[0], self._files[1]), self._begin, memory)
        self._buffers.reverse()
        self._begin = self._end

    def finish(self) -> None:
        """Make what was written to the file durable."""
        self._flush()
        self._flush()  # waits
        if self._files:
            os.fsync(self._files[0])
        self._close()

    def _close(self) -> None:
        for fd in {*self._files}:
            os.close(fd)
        self._files.clear()
        self._base = self._begin = self._end = 0

    def end(self) -> None:
        """Close everything, also after an error."""
        self._thread.shutdown()
        self._close()


def _write(files: tuple[int, int], at: int, memory: memoryview) -> None:
    for fd, begin, end in _parts(files, at, at + len(memory)):
        while begin < end:
            try:
                begin += os.pwrite(fd, memory[begin - at : end - at], begin)
            except OSError as error:  # a file system with larger pages, or the rest of a write that was cut short
                if error.errno != errno.EINVAL or fd == files[0]:
                    raise
                fd = files[0]


def _parts(files: tuple[int, int], begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield (file, begin, end): whole pages for the one past the cache, the rest for the other."""
    cached, direct = files
    first, last = min(-(-begin // _PAGE) * _PAGE, end), max(end // _PAGE * _PAGE, begin)
    if direct == cached or first >= last:
        yield cached, begin, end
        return
    yield direct, first, last
    yield cached, begin, first
    yield cached, last, end
