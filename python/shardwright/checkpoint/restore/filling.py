"""Filler: read a folder's bytes into tensors, check each block as it is read, and record the checked blocks."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..._engine import CheckpointFolder
from ...torch_compat.dtensor import is_dtensor
from ..slices import Boxes, Sliced, slice_of_dtensor
from ..state.names import plain
from ..state.stored import Stored
from .shares import Place, Shares

_BLOCK_BYTES = 1 << 20
Span = tuple[str, int, int]
"""(path, first, end) of blocks of a file"""
_READERS, _READERS_ALONE, _READERS_OF_HOST, _READERS_LEAST = 2, 6, 16, 4
"""threads of a rank, and of all ranks of a host: some wait for the disk while others compute checksums and copy"""
_READER_BLOCKS = 6
"""A thread for fewer blocks costs more to start than it saves."""


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
        self._shares: Shares | None = None
        self._spare: list[tuple[int, int]] = []
        self._rest: list[Place] = []
        self._done: set[tuple[Any, ...]] = set()
        """(path, begin, bytes, address) of tensors that are complete"""
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
                piece = _Piece(stored.path, stored.begin, stored.nbytes, memory.data_ptr())
                if piece[:4] not in self._done:
                    shared.append(piece)
                landed.append(functools.partial(_land, target, memory))
        self._read(shared, direct=self._turn[1] == 1)
        self._read(own, direct=True)
        for land in landed:
            land()

    def share(self, shares: Shares, spare: Sequence[tuple[int, int]]) -> None:
        """Set what read_ahead() reads. `spare` memory, (address, nbytes), keeps old values of live tensors until take_back()."""
        self._shares, self._spare, self._rest = shares, list(spare), shares.parts[shares.rank]

    def read_ahead(self) -> None:
        """Read this rank's part into new tensors, and into live ones as far as the spare memory goes. The ranks do not know yet
        that the folder is sound. Blocks that other ranks read are theirs to check."""
        assert self._shares is not None
        pieces: list[_Piece] = []
        for place in self._shares.ahead(self._shares.rank):
            pieces += self._kept_apart(place) if place.is_live else [_Piece(*place[:4])]
        self._kept = [piece for piece in pieces if piece.undo]
        self._read(pieces, direct=self._reads_past_cache)
        self._rest = self._shares.rest()
        for rank in range(len(self._shares.parts)):
            self._mark(self._shares.ahead(rank))

    def _kept_apart(self, place: Place) -> Iterator[_Piece]:
        """Yield a live place, cut into pieces with spare memory for their old values."""
        done = 0
        while done < place.nbytes:
            undo, left = self._spare.pop(0)
            nbytes = min(left, place.nbytes - done)
            yield _Piece(place.path, place.begin + done, nbytes, place.address + done, undo)
            done += nbytes
            if left > nbytes:
                self._spare.insert(0, (undo + nbytes, left - nbytes))

    def read_rest(self) -> None:
        """Read what remains of this rank's part. Call it after the ranks agreed that the folder is sound."""
        self._read([_Piece(*place[:4]) for place in self._rest], direct=self._reads_past_cache)
        self._rest = []
        if self._shares is not None and not self.is_shared:
            self._done.update(place[:4] for place in self._shares.places)

    def trade(self, send: Callable[[int, list[tuple[int, int]]], None]) -> None:
        """Take the other ranks' parts from their memory: send(rank, ranges) broadcasts ranges of `rank`. Collective."""
        assert self._shares is not None
        for rank, part in enumerate(self._shares.parts):
            send(rank, [(place.address, place.nbytes) for place in part])
        self._done.update(place[:4] for place in self._shares.places)

    @property
    def is_shared(self) -> bool:
        """Return True if the other ranks of the host read the other parts."""
        return self._shares is not None and len(self._shares.parts) > 1

    @property
    def _reads_past_cache(self) -> bool:
        """Return True if no other rank of this host reads the same bytes."""
        return self._turn[1] == 1 or self.is_shared

    def take_back(self) -> None:
        """Restore the values that fill_ahead() overwrote."""
        for piece in self._kept:
            ctypes.memmove(piece.address, piece.undo, piece.nbytes)
        self._kept = []

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

    def _read(self, pieces: Iterable[_Piece], *, direct: bool) -> None:
        ordered = sorted(pieces, key=lambda each: (each.path, each.begin))
        self._load(ordered, direct=direct, turn=(0, 1) if direct else self._turn)
        self._mark(ordered)

    def _mark(self, read: Iterable[_Piece | Place]) -> None:
        """Record that the blocks of ranges are checked."""
        for piece in read:
            at = self._first_block[piece.path]
            first, last = piece.begin // _BLOCK_BYTES, (piece.begin + piece.nbytes - 1) // _BLOCK_BYTES
            self._checked[at + first : at + last + 1] = b"\1" * (last + 1 - first)

    def _load(self, pieces: Sequence[_Piece], *, direct: bool, turn: tuple[int, int] = (0, 1)) -> None:
        blocks = sum(-(-piece.nbytes // _BLOCK_BYTES) for piece in pieces)
        self._folder.load([*pieces], self._readers(blocks, direct), direct, turn)

    def _readers(self, blocks: int, direct: bool) -> int:
        """Return the number of threads for a read of `blocks` blocks."""
        most = _READERS
        if self._turn[1] == 1:
            most = _READERS_ALONE
        elif self.is_shared and direct:
            most = max(_READERS_LEAST, _READERS_OF_HOST // self._turn[1])
        return max(_READERS, min(most, blocks // _READER_BLOCKS))


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
