"""Filler: read a folder's bytes into tensors, check each block as it is read, and record the checked blocks."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..._engine import CheckpointFolder
from ...layout.memory import has_memory
from ..slices import Boxes, Sliced, is_dtensor, slice_of_dtensor
from ..state.names import plain
from ..state.stored import Stored

_BLOCK_BYTES = 1 << 20
Span = tuple[str, int, int]
"""(path, first, end) of blocks of a file"""
_READERS, _READERS_ALONE = 2, 4  # some wait for the disk while others compute checksums and copy


class _Piece(NamedTuple):
    """A range of a file, its destination address, and the address that receives the old values."""

    path: str
    begin: int
    nbytes: int
    address: int
    undo: int = 0


class Filler:
    """A reader of one folder into one rank's tensors. It checks every byte once, as it reads it.

    Parameters
    ----------
    folder : CheckpointFolder
    rank, world_size : int
        Ranks start at different offsets: each reads a share from the disk that the others then find in the page cache.
        Bytes that only one rank needs bypass the page cache.
    """

    def __init__(self, folder: CheckpointFolder, rank: int, world_size: int) -> None:
        self._folder = folder
        self._turn = (rank, world_size)
        self._boxes = Boxes(())
        self._first_block: dict[str, int] = {}
        self._checked = bytearray(folder.block_count)
        self._kept: list[_Piece] = []
        self._ahead: dict[tuple[str, int, int], int] = {}
        """(path, begin, address) -> bytes from there on that fill_ahead() has read"""
        count = 0
        for path, nbytes in folder.files.items():
            self._first_block[path] = count
            count += -(-nbytes // _BLOCK_BYTES)

    def fill(self, reads: Iterable[tuple[Stored, Any]]) -> None:
        """Read stored tensors into tensors or slices."""
        shared, own, landed = [], [], []
        for stored, target in reads:
            if not stored.nbytes:
                continue
            sliced = self._sliced(target)
            if sliced is not None:
                own += [_Piece(stored.path, stored.begin + begin, n, at) for begin, n, at in sliced.ranges()]
                landed.append(functools.partial(_land_slice, sliced))
            else:
                memory = plain(target)
                address = memory.data_ptr()
                there = self._ahead.get((stored.path, stored.begin, address), 0)
                if there < stored.nbytes:
                    shared.append(_Piece(stored.path, stored.begin + there, stored.nbytes - there, address + there))
                landed.append(functools.partial(_land, target, memory))
        alone = self._turn[1] == 1
        self._read(shared, direct=alone, turn=self._turn)
        self._read(own, direct=True)
        for land in landed:
            land()

    def fill_ahead(self, reads: Iterable[tuple[Stored, torch.Tensor]], spare: Sequence[tuple[int, int]]) -> None:
        """Read into live tensors before the ranks know that the folder is sound.

        `spare` memory, (address, nbytes), keeps the old values until take_back(). fill() reads what does not fit in it. A rank
        starts with its share of the files, which it alone reads from the disk.
        """
        pieces: list[_Piece] = []
        room = list(spare)
        for stored, address in self._own_part_first(_apart(_aliased(reads))):
            done = 0
            while room and done < stored.nbytes:
                undo, left = room.pop(0)
                nbytes = min(left, stored.nbytes - done)
                pieces.append(_Piece(stored.path, stored.begin + done, nbytes, address + done, undo))
                done += nbytes
                if left > nbytes:
                    room.insert(0, (undo + nbytes, left - nbytes))
            self._ahead[stored.path, stored.begin, address] = done
        self._kept = pieces
        self._read(pieces, direct=self._turn[1] == 1)

    def _own_part_first(self, places: Sequence[tuple[Stored, int]]) -> Sequence[tuple[Stored, int]]:
        """Return the places in the order of the files, rotated to start with this rank's share."""
        ordered = sorted(places, key=lambda each: (each[0].path, each[0].begin))
        rank, world_size = self._turn
        before = sum(stored.nbytes for stored, _ in ordered) * rank // world_size
        first = 0
        while first < len(ordered) and before >= ordered[first][0].nbytes:
            before -= ordered[first][0].nbytes
            first += 1
        return ordered[first:] + ordered[:first]

    def take_back(self) -> None:
        """Restore the values that fill_ahead() overwrote."""
        for piece in self._kept:
            ctypes.memmove(piece.address, piece.undo, piece.nbytes)
        self._kept, self._ahead = [], {}

    def verify(self, first: int, end: int) -> None:
        """Check the blocks in [first, end), counted over all files, that were not read yet."""
        blocks = ((path, at, -(-self._folder.files[path] // _BLOCK_BYTES)) for path, at in self._first_block.items())
        self.check((path, max(first - at, 0), min(end - at, n)) for path, at, n in blocks)

    def check(self, spans: Iterable[Span]) -> None:
        """Check the blocks of `spans` that were not read yet."""
        pieces = []
        for path, first, end in spans:
            at, nbytes = self._first_block[path], self._folder.files[path]
            for block in range(first, end):
                begin = block * _BLOCK_BYTES
                if not self._checked[at + block]:
                    pieces.append(_Piece(path, begin, min(_BLOCK_BYTES, nbytes - begin), 0))
        self._load(pieces, direct=False)  # into the page cache: fill() reads them next

    def ranges(self, reads: Iterable[tuple[Stored, Any]]) -> Iterator[tuple[str, int, int]]:
        """Yield (path, begin, bytes) of each range that fill() would read."""
        for stored, target in reads:
            sliced = self._sliced(target)
            for begin, nbytes in [(0, stored.nbytes)] if sliced is None else [each[:2] for each in sliced.ranges()]:
                yield stored.path, stored.begin + begin, nbytes

    def _sliced(self, target: Any) -> Sliced | None:
        """Return the parts of a tensor that this rank holds; None: all of it."""
        if is_dtensor(target):
            return slice_of_dtensor(target, self._boxes)
        return target if isinstance(target, Sliced) else None

    def _read(self, pieces: Iterable[_Piece], *, direct: bool, turn: tuple[int, int] = (0, 1)) -> None:
        ordered = sorted(pieces, key=lambda each: (each.path, each.begin))
        self._load(ordered, direct=direct, turn=turn)
        for piece in ordered:
            at = self._first_block[piece.path]
            first, last = piece.begin // _BLOCK_BYTES, (piece.begin + piece.nbytes - 1) // _BLOCK_BYTES
            self._checked[at + first : at + last + 1] = b"\1" * (last + 1 - first)

    def _load(self, pieces: Sequence[_Piece], *, direct: bool, turn: tuple[int, int] = (0, 1)) -> None:
        readers = _READERS_ALONE if self._turn[1] == 1 else _READERS
        self._folder.load([*pieces], readers, direct, turn)


def _aliased(reads: Iterable[tuple[Stored, torch.Tensor]]) -> Iterable[tuple[Stored, int]]:
    """Yield (stored, address) of tensors that can be read into in place."""
    for stored, target in reads:
        if stored.nbytes and not is_dtensor(target) and target.device.type == "cpu" and target.is_contiguous():
            if has_memory(target) and not target.is_conj() and not target.is_neg():
                yield stored, target.data_ptr()


def _apart(places: Iterable[tuple[Stored, int]]) -> list[tuple[Stored, int]]:
    """Drop places that overlap another: their saved old values would already be overwritten."""
    found: list[tuple[Stored, int]] = []
    end_of_last = 0
    for stored, address in sorted(places, key=lambda each: each[1]):
        if address >= end_of_last:
            found.append((stored, address))
            end_of_last = address + stored.nbytes
    return found


def _land(target: torch.Tensor, memory: torch.Tensor) -> None:
    """Copy `memory` to `target` unless they alias; count a write to `target`."""
    if memory.data_ptr() != target.data_ptr() or target.is_conj() or target.is_neg():
        target.copy_(torch.view_as_complex(memory) if target.is_complex() else memory)
    else:
        torch.autograd.graph.increment_version(target)


def _land_slice(sliced: Sliced) -> None:
    for each in sliced.live:
        if sliced.copy is not None:
            each.copy_(sliced.copy)
        torch.autograd.graph.increment_version(each)
