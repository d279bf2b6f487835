"""Ranges (begin, bytes) of an image, and agreements of the ranks that read and write images."""

from __future__ import annotations

import hashlib
import secrets
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..._engine import CheckpointError
from ...comm.wire import Wire
from ..peers import Peers

BLOCK_BYTES = 1 << 20
Range = tuple[int, int]
_MEET_S = 60.0


def in_blocks(nbytes: int) -> int:
    """Round up to blocks."""
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Return ranges in order; merge those that touch or overlap.

    >>> merged([(8, 2), (0, 4), (3, 2), (5, 1)])
    [(0, 6), (8, 2)]
    """
    found: list[Range] = []
    for begin, nbytes in sorted(ranges):
        if found and begin <= sum(found[-1]):
            found[-1] = found[-1][0], max(sum(found[-1]), begin + nbytes) - found[-1][0]
        elif nbytes:
            found.append((begin, nbytes))
    return found


def common(ours: Sequence[Range], theirs: Sequence[Range]) -> list[Range]:
    """Return the ranges that two merged lists both have.

    >>> common([(0, 6), (8, 2)], [(4, 5)])
    [(4, 2), (8, 1)]
    """
    found, i, j = [], 0, 0
    while i < len(ours) and j < len(theirs):
        low, high = max(ours[i][0], theirs[j][0]), min(sum(ours[i]), sum(theirs[j]))
        if low < high:
            found.append((low, high - low))
        i, j = (i + 1, j) if sum(ours[i]) == high else (i, j + 1)
    return found


def gaps(ranges: Sequence[Range], end: int) -> list[Range]:
    """Return the ranges of [0, end) that a merged list lacks.

    >>> gaps([(2, 3), (8, 2)], 10)
    [(0, 2), (5, 3)]
    """
    begins = [0, *map(sum, ranges)]
    ends = [*(begin for begin, _ in ranges), end]
    return [(begin, at - begin) for begin, at in zip(begins, ends) if at > begin]


def cut(parcels: Iterable[Sequence[int]], most: int) -> list[list[Any]]:
    """Cut (..., begin, bytes) into lists of at most `most` bytes each.

    >>> cut([(7, 0, 3), (8, 5, 4)], 4)
    [[(7, 0, 3), (8, 5, 1)], [(8, 6, 3)]]
    """
    found: list[list[Any]] = []
    room = 0
    for *tag, begin, nbytes in parcels:
        while nbytes:
            if not room:
                found.append([])
                room = most
            taken = min(nbytes, room)
            found[-1].append((*tag, begin, taken))
            begin, nbytes, room = begin + taken, nbytes - taken, room - taken
    return found


def on_hosts(peers: Peers, call: Callable[[], Any], label: str) -> list[Any]:
    """Return the results of call() on all ranks. If it fails on one, raise the same CheckpointError on all. Collective."""

    def named() -> Any:
        try:
            return call()
        except (CheckpointError, OSError, MemoryError, RuntimeError) as error:
            raise CheckpointError(f"host {socket.gethostname()}: {error or type(error).__name__}") from error

    return peers.together(named, f"memory tier: {label}", keeps=())


def connect_carriers(peers: Peers, name: str, timeout_s: float) -> Wire | None:
    """Return a new wire between the carriers; None on other ranks. Raises the same CheckpointError on all ranks. Collective."""
    answers = peers.exchange(secrets.token_hex(32) if peers.rank == 0 else "", f"wire of {name}")
    secret, made = bytes.fromhex(answers[0]), []

    def connect() -> None:
        if peers.rank in peers.carriers:
            digest = hashlib.sha256(secret).hexdigest()[:16]
            made.append(peers.group.make_wire(f"{name}/{digest}", secret, min(_MEET_S, timeout_s)))

    on_hosts(peers, connect, f"wire of {name}")
    return made[0] if made else None
