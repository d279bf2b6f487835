"""Bytes on the far side of a cut, from the rank that holds them to the one that writes their block, and to nobody else.

Every rank's outgoing bytes are one stream, whose order all ranks know (the plan's transfers). Streams pass through a window of
fixed size that the ranks of a host all map: in a round each rank copies the next piece of its stream out of live memory into its
slot, and after one meeting whoever writes these bytes takes them from there. The window has two halves, used in turn: a rank that
meets the others over one half is done with the other. So memory is the window, once a host, and what a rank receives is what it
writes.

Over hosts a rank has two streams: what stays on its host goes as above; only what leaves it is carried to the other hosts, once a
host (to all of them where there are more than two).

Where ranks cannot map a window, each has one of its own, and every piece is copied to all of them.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence

import torch

from .._engine import CheckpointError
from .peers import CopiedMemory, Peers, SharedMemory
from .slices import Sliced

#: (source, begin, nbytes, holder, owner)
Transfer = tuple[int, int, int, int, int]
_WINDOW_BYTES, _SLOT_BYTES, _SLOT_BYTES_MIN = 16 << 20, 1 << 20, 64 << 10
_ALIGNMENT = 4096
NEAR, FAR = 0, 1


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A part of a rank's stream, and the memory it comes from or goes to."""

    kind: int
    rank: int
    place: int
    memory: torch.Tensor


class Cuts:
    """One save's transfers, as one rank sees them.

    Parameters
    ----------
    transfers : of all ranks, in the order that all have
    rank : int
    held : what this rank holds of each source
    host_of : the host of each rank

    Attributes
    ----------
    received : list of (source, begin, Tensor)
        What this rank writes and others hold; filled by CutExchange.carry().

    Raises
    ------
    CheckpointError
        Bytes of a transfer are not held here as one run.
    """

    def __init__(
        self, transfers: Sequence[Transfer], rank: int, held: Mapping[int, Sliced], host_of: Sequence[int]
    ) -> None:
        self._length = [[0] * len(host_of) for _ in (NEAR, FAR)]
        self._out: list[_Piece] = []
        self._in: list[_Piece] = []
        self.received: list[tuple[int, int, torch.Tensor]] = []
        memory = torch.empty(sum(each[2] for each in transfers if each[4] == rank), dtype=torch.uint8, device="cpu")
        done = 0
        for source, begin, nbytes, holder, owner in transfers:
            kind = NEAR if host_of[holder] == host_of[owner] else FAR
            place = self._length[kind][holder]
            self._length[kind][holder] += nbytes
            if holder == rank:
                self._out.append(_Piece(kind, holder, place, _bytes_of(held[source], begin, nbytes)))
            if owner == rank:
                self.received.append((source, begin, memory[done : done + nbytes]))
                self._in.append(_Piece(kind, holder, place, memory[done : done + nbytes]))
                done += nbytes

    @property
    def nbytes(self) -> int:
        """What this rank receives."""
        return sum(piece.memory.numel() for piece in self._in)

    def longest(self, kind: int) -> int:
        """Bytes of the longest stream of a kind."""
        return max(self._length[kind])

    def outgoing(self, slot_bytes: int) -> dict[int, list[_Piece]]:
        """Round -> what this rank's streams are made of in it; `place` counts from the round's begin."""
        return _by_round(self._out, slot_bytes)

    def incoming(self, slot_bytes: int) -> dict[int, list[_Piece]]:
        return _by_round(self._in, slot_bytes)


class CutExchange:
    """The window, made at the first save that needs it and kept for the next ones."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        # two halves; over hosts each has room for what stays and for what leaves
        self._kinds = 2 if peers.has_hosts else 1
        fair = _WINDOW_BYTES // (2 * self._kinds * peers.world_size) // _ALIGNMENT * _ALIGNMENT
        self._slot_bytes = max(_SLOT_BYTES_MIN, min(_SLOT_BYTES, fair))
        self._kind_bytes = self._slot_bytes * peers.world_size
        self._window: SharedMemory | CopiedMemory | None = None

    def carry(self, cuts: Cuts) -> None:
        """Fills cuts.received. Collective.

        Raises
        ------
        CheckpointError, or what copying raised
            After all rounds: the other ranks have not waited for this one.
        """
        slot = self._slot_bytes
        rounds = -(-max(cuts.longest(NEAR), cuts.longest(FAR)) // slot)
        if rounds and self._window is None:
            self._window = self._make_window()
        outgoing, incoming = cuts.outgoing(slot), cuts.incoming(slot)
        failure: Exception | None = None
        for turn in range(rounds):
            stride, near = (self._stride(cuts.longest(kind) - turn * slot) for kind in (FAR, NEAR))
            try:
                for piece in outgoing.get(turn, ()) if failure is None else ():
                    self._slot(turn, piece, stride).copy_(piece.memory)
            except Exception as error:
                failure = error
            self._meet(turn, stride, near)
            try:
                for piece in incoming.get(turn, ()) if failure is None else ():
                    piece.memory.copy_(self._slot(turn, piece, stride))
            except Exception as error:
                failure = error
        if failure is not None:
            raise failure

    def _make_window(self) -> SharedMemory | CopiedMemory:
        nbytes, label = 2 * self._kinds * self._kind_bytes, "cuts of a checkpoint"
        try:
            return self._peers.shared_memory(nbytes, label)
        except MemoryError:  # the same on every rank
            return self._peers.copied_memory(nbytes, label)

    def _stride(self, left: int) -> int:
        """Bytes a rank of a stream in a round, `left` bytes before the longest one's end."""
        return max(0, min(self._slot_bytes, -(-left // _ALIGNMENT) * _ALIGNMENT))

    def _begin(self, turn: int, kind: int) -> int:
        return (turn % 2 * self._kinds + kind) * self._kind_bytes

    def _slot(self, turn: int, piece: _Piece, stride: int) -> torch.Tensor:
        assert self._window is not None
        begin = self._begin(turn, piece.kind) + piece.rank * (stride if piece.kind == FAR else self._slot_bytes)
        return self._window.memory[begin + piece.place : begin + piece.place + piece.memory.numel()]

    def _meet(self, turn: int, stride: int, near: int) -> None:
        """Once every rank has filled its slots, and they are where they are read: `stride` bytes of what leaves hosts, `near` of the rest."""
        assert self._window is not None
        if isinstance(self._window, CopiedMemory):
            self._window.copy(self._begin(turn, NEAR), self._slot_bytes, near)
            if self._kinds == 2:
                self._window.copy(self._begin(turn, FAR), stride, stride)
        elif stride and self._kinds == 2:
            self._window.spread(self._begin(turn, FAR), stride * self._peers.world_size)
        else:
            self._window.meet()

    def close(self) -> None:
        """Gives the window back."""
        self._window = None


def _by_round(pieces: Sequence[_Piece], slot_bytes: int) -> dict[int, list[_Piece]]:
    """Cut where a slot ends."""
    found: dict[int, list[_Piece]] = collections.defaultdict(list)
    for piece in pieces:
        done = 0
        while done < piece.memory.numel():
            turn, place = divmod(piece.place + done, slot_bytes)
            some = min(slot_bytes - place, piece.memory.numel() - done)
            found[turn].append(_Piece(piece.kind, piece.rank, place, piece.memory[done : done + some]))
            done += some
    return found


def _bytes_of(sliced: Sliced, begin: int, nbytes: int) -> torch.Tensor:
    """Bytes [begin, begin + nbytes) of the whole, where they lie."""
    size = sliced.dtype.itemsize
    for first, memory in sliced.parts:
        low = begin - first * size
        if 0 <= low and low + nbytes <= memory.numel() * size:
            real = torch.view_as_real(memory).reshape(-1) if memory.is_complex() else memory
            return real.view(torch.uint8)[low : low + nbytes]
    raise CheckpointError(f"bytes [{begin}, +{nbytes}) are not held here as one run")
