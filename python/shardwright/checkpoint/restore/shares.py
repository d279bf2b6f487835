"""Shares: what all ranks of a host read alike, cut into one part a rank.

Each rank reads its part past the page cache, and takes the others' parts from their memory. So every byte crosses the disk
once a host, at the disk's speed: the page cache reads slower than a disk of a few GB/s delivers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ...layout.memory import has_memory
from ...torch_compat.dtensor import is_dtensor
from ..state.stored import Stored


class Place(NamedTuple):
    """A range of a file and its address. `is_live`: the address holds a value that the training uses."""

    path: str
    begin: int
    nbytes: int
    address: int
    is_live: bool

    def cut(self, first: int, end: int) -> Place:
        """Return bytes [first, end)."""
        return Place(self.path, self.begin + first, end - first, self.address + first, self.is_live)


def places_of(new: Iterable[tuple[Stored, torch.Tensor]], live: Iterable[tuple[Stored, torch.Tensor]]) -> list[Place]:
    """Return the places of tensors that can be read into in place, in the order of the files.

    A tensor whose memory overlaps another is left out: its old values would already be overwritten when they are kept.
    """
    reads = [(*each, False) for each in new] + [(*each, True) for each in live]
    found = [
        (target.data_ptr(), each, is_live) for each, target, is_live in reads if each.nbytes and is_in_place(target)
    ]
    places: list[Place] = []
    end_of_last = 0
    for address, stored, is_live in sorted(found, key=lambda each: each[0]):
        if address >= end_of_last:
            places.append(Place(stored.path, stored.begin, stored.nbytes, address, is_live))
            end_of_last = address + stored.nbytes
    return sorted(places)


def digest_of(places: Iterable[Place]) -> str:
    """Return a digest that is equal on ranks that read the same ranges; "" without any."""
    text = "\n".join(f"{path} {begin} {nbytes} {is_live}" for path, begin, nbytes, _, is_live in places)
    return hashlib.sha256(text.encode()).hexdigest() if text else ""


class Shares:
    """The parts of `places`, one for each rank of the host.

    Parameters
    ----------
    places : sequence of Place
        Of this rank, in the order of the files; the ranges are equal on all ranks.
    rank : int
    rooms : sequence of int
        Bytes of each rank that can keep old values of live tensors.
    """

    def __init__(self, places: Sequence[Place], rank: int, rooms: Sequence[int]) -> None:
        self.places, self.rank, self._rooms = places, rank, rooms
        total, count = sum(place.nbytes for place in places), len(rooms)
        bounds = [total * each // count for each in range(count + 1)]
        self.parts = [list(_between(places, low, high)) for low, high in zip(bounds, bounds[1:])]

    def ahead(self, rank: int) -> list[Place]:
        """Return what a rank reads before the verdict: new tensors, and live ones as far as its room goes."""
        room, found = self._rooms[rank], []
        for place in self.parts[rank]:
            nbytes = min(place.nbytes, room) if place.is_live else place.nbytes
            room -= nbytes if place.is_live else 0
            if nbytes:
                found.append(place.cut(0, nbytes))
        return found

    def rest(self) -> list[Place]:
        """Return what this rank reads after the verdict."""
        done = {place.address: place.nbytes for place in self.ahead(self.rank)}
        cut = (place.cut(done.get(place.address, 0), place.nbytes) for place in self.parts[self.rank])
        return [place for place in cut if place.nbytes]


def _between(places: Sequence[Place], low: int, high: int) -> Iterator[Place]:
    """Yield the bytes [low, high) of all places, counted through them."""
    at = 0
    for place in places:
        first, end = max(low - at, 0), min(high - at, place.nbytes)
        if first < end:
            yield place.cut(first, end)
        at += place.nbytes


def is_in_place(target: Any) -> bool:
    """Return True if a file's bytes can be read into the memory of `target` itself."""
    if not isinstance(target, torch.Tensor) or is_dtensor(target) or target.device.type != "cpu":
        return False
    return target.is_contiguous() and has_memory(target) and not target.is_conj() and not target.is_neg()


def in_own_order(places: Sequence[Place], rank: int, world_size: int) -> list[Place]:
    """Return the places, rotated to start with this rank's share of the bytes."""
    before = sum(place.nbytes for place in places) * rank // world_size
    first = 0
    while first < len(places) and before >= places[first].nbytes:
        before -= places[first].nbytes
        first += 1
    return [*places[first:], *places[:first]]
