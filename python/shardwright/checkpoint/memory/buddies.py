"""Buddies: copies of a host's images on other hosts, which each host's carrier sends in the background of training.

Host h sends to host (h + k) mod H for k in 1..replicas. Carriers use a separate wire, not the bridge's, so copies and
rounds of training never wait for each other. A step is sent as a message about its runs, the runs, and its tables. The
receiver clears its tables first and writes them last, so a partial copy is never valid.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...layout.memory import bytes_of
from .image import Image, Table
from .ranges import cut, merged

_logger = logging.getLogger("shardwright")
_HEAD = struct.Struct("<3Q40x")  # slot, bytes of data, bytes of tables
_WINDOW_BYTES = 64 << 20
_POLL_S = 0.001
_SIZE, _TABLES, _RUNS = 1, 2, 3  # tags; a pair has one sender and one receiver, so the order identifies steps


class Buddies:
    """The senders and receivers of one carrier: `peers` has a pair for each k. make(k, slot, data, tables): (h - k)'s image."""

    def __init__(
        self, wire: Any, peers: Sequence[tuple[int, int]], make: Callable[[int, int, int, int], Image]
    ) -> None:
        self._wire, self._peers, self._make = wire, peers, make
        self._changed = threading.Condition()
        #: image, slot, nonce and tables of the step that is being sent
        self._job: tuple[Image, int, str, int] | None = None
        self._started = 0
        self._sent = [0] * len(peers)
        self._received = [0] * len(peers)  # a peer's step may arrive before ours has started
        self._is_closed = False
        self.moved = 0  # completed transfers, read by waiting threads; need not be exact
        self.failure = ""
        for number in range(len(peers)):
            for body in (self._send_always, self._receive_always):
                threading.Thread(target=self._run, args=(body, number), name="sw-buddies", daemon=True).start()

    @property
    def is_busy(self) -> bool:
        with self._changed:
            return any(count < self._started for count in (*self._sent, *self._received))

    def start(self, image: Image, slot: int, nonce: str, tables: int) -> None:
        """Begin to exchange a step. Not while is_busy. The caller must not change `image` until the exchange ends."""
        with self._changed:
            self._job = image, slot, nonce, tables
            self._started += 1
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Return True once the exchange has ended, whatever its outcome."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.is_busy or bool(self.failure), timeout_s)

    def close(self, gently: bool) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._wire.close(gently)

    def _run(self, body: Callable[[int], None], number: int) -> None:
        try:
            body(number)
        except Exception as error:
            with self._changed:
                if not self._is_closed:
                    self.failure = self.failure or f"{type(error).__name__}: {error}"
                self._changed.notify_all()

    def _next(self, number: int) -> tuple[Image, int, str, int] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._sent[number] < self._started)
            return None if self._is_closed else self._job

    def _count(self, done: list[int], number: int) -> None:
        with self._changed:
            done[number] += 1
            self._changed.notify_all()

    def _send_always(self, number: int) -> None:
        while (job := self._next(number)) is not None:
            image, slot, nonce, count = job
            tables = self._await_tables(image, nonce, count)
            if tables is not None:
                self._send(self._peers[number][0], image, slot, tables)
            self._count(self._sent, number)

    def _await_tables(self, image: Image, nonce: str, count: int) -> list[Table] | None:
        """Return this host's tables of a step after all its ranks have written them; None on close()."""
        found: dict[int, Table] = {}
        while len(found) < count and not self._is_closed:
            for index in (each for each in range(count) if each not in found):
                table = image.table(index)
                if table is not None and table.head["nonce"] == nonce:
                    found[index] = table
            time.sleep(_POLL_S if len(found) < count else 0)
        return [found[index] for index in range(count)] if len(found) == count else None

    def _send(self, rank: int, image: Image, slot: int, tables: Sequence[Table]) -> None:
        encoded = b"".join(table.encode() for table in tables)
        for tag, data in ((_SIZE, _HEAD.pack(slot, image.data, len(encoded))), (_TABLES, encoded)):
            memory = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            self._wire.wait(self._wire.send(rank, tag, memory.data_ptr(), memory.numel()))
        for begin, nbytes in _runs(tables):
            self._wire.wait(self._wire.send(rank, _RUNS, image.address + begin, nbytes))
            self.moved += 1

    def _receive_always(self, number: int) -> None:
        rank = self._peers[number][1]
        images: dict[int, Image] = {}
        while True:
            slot, data, nbytes = _HEAD.unpack(self._wire_receive(rank, _SIZE, _HEAD.size))
            tables = list(Table.each_of(self._wire_receive(rank, _TABLES, nbytes)))
            image = images.get(slot)
            if image is None or (image.data, image.tables) != (data, len(tables)):
                image = images[slot] = self._make(number + 1, slot, data, len(tables))
            for index in range(image.tables):
                image.clear(index)
            for begin, nbytes in _runs(tables):
                self._wire.wait(self._wire.receive(rank, _RUNS, image.address + begin, nbytes))
                self.moved += 1
            for index, table in enumerate(tables):
                image.write(index, table)
            self._count(self._received, number)

    def _wire_receive(self, rank: int, tag: int, nbytes: int) -> bytes:
        memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self._wire.wait(self._wire.receive(rank, tag, memory.data_ptr(), nbytes))
        return bytes_of(memory)


def _runs(tables: Sequence[Table]) -> list[tuple[int, int]]:
    """Return the runs of tables, merged and cut at windows, equal on both sides."""
    runs = merged(run for table in tables for run in table.each_run())
    return [run for window in cut(runs, _WINDOW_BYTES) for run in window]
