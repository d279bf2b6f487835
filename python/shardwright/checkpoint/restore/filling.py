"""Filler: what a rank reads of a checkpoint into its tensors, and what it receives from the other ranks of its host.

Ranks of a host that need the same bytes cut them into one part a rank. Each reads its part past the page cache and takes the
others' parts from their memory. So every byte crosses the disk once a host, at the disk's speed: the page cache reads slower
than a disk of a few GB/s delivers.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..._engine import CheckpointFolder
from ...layout.memory import has_memory
from ...torch_compat.dtensor import is_dtensor
from ..slices import Boxes, Sliced, slice_of_dtensor
from ..state.names import plain
from ..state.stored import Stored

_BLOCK_BYTES = 1 << 20
_READERS, _READERS_ALONE, _READERS_OF_HOST, _READERS_LEAST = 2, 6, 16, 4
"""threads of a rank, and of all ranks of a host: some wait for the disk while others compute checksums and copy"""
_READER_BLOCKS = 6
"""A thread for fewer blocks costs more to start than it saves."""


class Place(NamedTuple):
    """A range of a file, its address (0: only check it), the address for old values, and True if the training uses these."""

    path: str
    begin: int
    nbytes: int
    address: int = 0
    undo: int = 0
    is_live: bool = False

    def cut(self, first: int, end: int) -> Place:
        """Return bytes [first, end)."""
        return self._replace(begin=self.begin + first, nbytes=end - first, address=self.address + first)


class Filler:
    """A reader of one folder into one rank's tensors. It checks every byte once, as it reads it."""

    def __init__(self, folder: CheckpointFolder, rank: int, world_size: int) -> None:
        self._folder = folder
        self._turn = (rank, world_size)
        self._boxes = Boxes(())
        self._first_block: dict[str, int] = {}
        self._checked = bytearray(folder.block_count)
        self._places: Sequence[Place] = ()
        self._parts: list[tuple[list[Place], list[Place]]] = []
        self._ahead: list[Place] = []
        self._rest: list[Place] = []
        self._kept: list[Place] = []
        self._done: set[Place] = set()
        """places that are complete"""
        count = 0
        for path, nbytes in folder.files.items():
            self._first_block[path] = count
            count += -(-nbytes // _BLOCK_BYTES)

    def fill(self, reads: Iterable[tuple[Stored, Any]]) -> None:
        """Read stored tensors into tensors or slices."""
        shared, own = [], []
        wholes: list[tuple[torch.Tensor, torch.Tensor]] = []
        slices: list[Sliced] = []
        for stored, target in reads:
            if not stored.nbytes:
                continue
            sliced = self._sliced(target)
            if sliced is not None:
                own += [Place(stored.path, stored.begin + begin, n, at) for begin, n, at in sliced.ranges()]
                slices.append(sliced)
            else:
                wholes.append((target, plain(target)))
                shared.append(Place(stored.path, stored.begin, stored.nbytes, wholes[-1][1].data_ptr()))
        self._read([place for place in shared if place not in self._done], direct=self._turn[1] == 1)
        self._read(own, direct=True)
        for target, memory in wholes:
            if memory.data_ptr() != target.data_ptr() or target.is_conj() or target.is_neg():
                target.copy_(torch.view_as_complex(memory) if target.is_complex() else memory)
            else:
                torch.autograd.graph.increment_version(target)
        for sliced in slices:
            for each in sliced.live:
                if sliced.copy is not None:
                    each.copy_(sliced.copy)
                torch.autograd.graph.increment_version(each)

    def share(self, places: Sequence[Place], rank: int, rooms: Sequence[int], spare: Sequence[tuple[int, int]]) -> None:
        """Read `places` with the ranks of this host, or alone if there is one room. `rooms`: bytes of each rank's `spare` memory."""
        if len(rooms) == 1:  # ranks begin at different bytes, and find the others' in the page cache
            before, first = sum(place.nbytes for place in places) * self._turn[0] // self._turn[1], 0
            while first < len(places) and before >= places[first].nbytes:
                before -= places[first].nbytes
                first += 1
            places = [*places[first:], *places[:first]]
        self._places, self._parts = places, list(_parts(places, rooms))
        ahead, self._rest = self._parts[rank]
        self._ahead = list(_with_undo(ahead, list(spare)))

    def read_ahead(self) -> None:
        """Read this rank's part into new tensors, and before the verdict into live ones as far as the spare memory goes."""
        self._kept = [place for place in self._ahead if place.undo]
        self._read(self._ahead, direct=self._reads_past_cache)
        for ahead, _ in self._parts:  # blocks that other ranks read are theirs to check
            self._mark(ahead)

    def read_rest(self) -> None:
        """Read what remains of this rank's part. Call it after the ranks agreed that the folder is sound."""
        self._read(self._rest, direct=self._reads_past_cache)

    def trade(self, send: Callable[[int, list[tuple[int, int]]], None]) -> None:
        """Take the other ranks' parts from their memory: send(rank, ranges) broadcasts ranges of `rank`. Collective."""
        for rank, (ahead, rest) in enumerate(self._parts if self._is_shared else ()):
            send(rank, [(place.address, place.nbytes) for place in (*ahead, *rest)])
        self._done = {place._replace(is_live=False) for place in self._places}

    @property
    def _is_shared(self) -> bool:
        return len(self._parts) > 1

    @property
    def _reads_past_cache(self) -> bool:
        """Return True if no other rank of this host reads the same bytes."""
        return self._turn[1] == 1 or self._is_shared

    def take_back(self) -> None:
        """Restore the values that read_ahead() overwrote."""
        for place in self._kept:
            ctypes.memmove(place.address, place.undo, place.nbytes)
        self._kept = []

    def verify(self, first: int, end: int) -> None:
        """Check the blocks in [first, end), counted over all files, that were not read yet."""
        blocks = ((path, at, -(-self._folder.files[path] // _BLOCK_BYTES)) for path, at in self._first_block.items())
        self.check((path, max(first - at, 0), min(end - at, n)) for path, at, n in blocks)

    def check(self, spans: Iterable[tuple[str, int, int]]) -> None:
        """Check the blocks of `spans` (path, first, end) that were not read yet."""
        places = []
        for path, first, end in spans:
            at, nbytes = self._first_block[path], self._folder.files[path]
            for begin in (_BLOCK_BYTES * n for n in range(first, end) if not self._checked[at + n]):
                places.append(Place(path, begin, min(_BLOCK_BYTES, nbytes - begin)))
        self._load(places, direct=False)  # into the page cache: fill() reads them next

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

    def _read(self, places: Iterable[Place], *, direct: bool) -> None:
        ordered = sorted(places)
        self._load(ordered, direct=direct, turn=(0, 1) if direct else self._turn)
        self._mark(ordered)

    def _mark(self, read: Iterable[Place]) -> None:
        """Record that the blocks of ranges are checked."""
        for place in read:
            at = self._first_block[place.path]
            first, last = place.begin // _BLOCK_BYTES, (place.begin + place.nbytes - 1) // _BLOCK_BYTES
            self._checked[at + first : at + last + 1] = b"\1" * (last + 1 - first)

    def _load(self, places: Sequence[Place], *, direct: bool, turn: tuple[int, int] = (0, 1)) -> None:
        most = _READERS
        if self._turn[1] == 1:
            most = _READERS_ALONE
        elif self._is_shared and direct:
            most = max(_READERS_LEAST, _READERS_OF_HOST // self._turn[1])
        blocks = sum(-(-place.nbytes // _BLOCK_BYTES) for place in places)
        threads = max(_READERS, min(most, blocks // _READER_BLOCKS))
        self._folder.load([place[:5] for place in places], threads, direct, turn)


def is_in_place(target: Any) -> bool:
    """Return True if a file's bytes can be read into the memory of `target` itself."""
    if not isinstance(target, torch.Tensor) or is_dtensor(target) or target.device.type != "cpu":
        return False
    return target.is_contiguous() and has_memory(target) and not target.is_conj() and not target.is_neg()


def places_of(new: Iterable[tuple[Stored, Any]], live: Iterable[tuple[Stored, Any]]) -> list[Place]:
    """Return the places of tensors that can be read into in place, in the order of the files."""
    found = [
        Place(stored.path, stored.begin, stored.nbytes, target.data_ptr(), is_live=is_live)
        for is_live, reads in ((False, new), (True, live))
        for stored, target in reads
        if stored.nbytes and is_in_place(target)
    ]
    places: list[Place] = []
    end_of_last = 0
    for place in sorted(found, key=lambda each: each.address):
        if place.address >= end_of_last:  # else its old values would be overwritten before they are kept
            places.append(place)
            end_of_last = place.address + place.nbytes
    return sorted(places)


def digest_of(places: Iterable[Place]) -> str:
    """Return a digest that is equal on ranks that read the same ranges; "" without any."""
    text = "\n".join(f"{each.path} {each.begin} {each.nbytes} {each.is_live}" for each in places)
    return hashlib.sha256(text.encode()).hexdigest() if text else ""


def _parts(places: Sequence[Place], rooms: Sequence[int]) -> Iterator[tuple[list[Place], list[Place]]]:
    """Cut `places` into one part per rank. Yield what it reads before the verdict, with live ones as its room allows, and after."""
    total, count = sum(place.nbytes for place in places), len(rooms)
    for rank, room in enumerate(rooms):
        low, high, at = total * rank // count, total * (rank + 1) // count, 0
        ahead, rest = [], []
        for place in places:
            first, end = max(low - at, 0), min(high - at, place.nbytes)
            at += place.nbytes
            if first >= end:
                continue
            middle = first + min(end - first, room) if place.is_live else end
            room -= middle - first if place.is_live else 0
            ahead += [place.cut(first, middle)] if first < middle else []
            rest += [place.cut(middle, end)] if middle < end else []
        yield ahead, rest


def _with_undo(places: Iterable[Place], spare: list[tuple[int, int]]) -> Iterator[Place]:
    """Yield places, the live ones cut into pieces with spare memory for their old values."""
    for place in places:
        done = 0 if place.is_live else place.nbytes
        if not place.is_live:
            yield place
        while done < place.nbytes:
            undo, left = spare.pop(0)
            nbytes = min(left, place.nbytes - done)
            yield place.cut(done, done + nbytes)._replace(undo=undo)
            done += nbytes
            if left > nbytes:
                spare.insert(0, (undo + nbytes, left - nbytes))
