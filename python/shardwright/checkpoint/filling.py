"""Bytes of a folder into tensors, every block checked when it is read, and which blocks were."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from .._engine import CheckpointFolder
from .names import plain
from .slices import Sliced, is_dtensor, slice_of_dtensor
from .stored import Stored

_BLOCK_BYTES = 1 << 20
_READERS, _RUN_BLOCKS = 2, 16  # one waits for the disk while another sums up


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A range of a file, and where its bytes go."""

    path: str
    begin: int
    nbytes: int
    address: int


class Filler:
    """Reads one folder into one rank's tensors; every byte is checked once, when it is read.

    Parameters
    ----------
    folder : CheckpointFolder
    rank, world_size : int
        Ranks begin at different places, so that each reads from the disk what the others then find in the page cache.
    """

    def __init__(self, folder: CheckpointFolder, rank: int, world_size: int) -> None:
        self._folder = folder
        self._turn = (rank, world_size)
        self._first_block: dict[str, int] = {}
        self._checked = bytearray(folder.block_count)
        count = 0
        for path, nbytes in folder.files.items():
            self._first_block[path] = count
            count += -(-nbytes // _BLOCK_BYTES)

    def fill(self, reads: Iterable[tuple[Stored, Any]]) -> None:
        """Into tensors, or the slices that are held of them."""
        pieces, landed = [], []
        for stored, target in reads:
            if not stored.nbytes:
                continue
            if isinstance(target, Sliced) or is_dtensor(target):
                sliced = target if isinstance(target, Sliced) else slice_of_dtensor(target)
                ranges = sliced.ranges()
                landed.append(functools.partial(_land_slice, sliced))
            else:
                memory = plain(target)
                ranges = [(0, stored.nbytes, memory.data_ptr())]
                landed.append(functools.partial(_land, target, memory))
            pieces += [_Piece(stored.path, stored.begin + begin, n, address) for begin, n, address in ranges]
        self._read(pieces)
        for land in landed:
            land()

    def verify(self, first: int, end: int) -> None:
        """Checks those of the blocks [first, end) of all files that nothing has been read from."""
        runs: list[list[int]] = []
        for block in range(first, end):
            if self._checked[block]:
                continue
            if runs and runs[-1][1] == block and block - runs[-1][0] < _RUN_BLOCKS:
                runs[-1][1] = block + 1
            else:
                runs.append([block, block + 1])
        with ThreadPoolExecutor(_READERS) as pool:
            list(pool.map(lambda run: self._folder.verify(*run), runs))

    def _read(self, pieces: Iterable[_Piece]) -> None:
        runs = list(_runs(pieces).items())
        turn = len(runs) * self._turn[0] // self._turn[1]
        with ThreadPoolExecutor(_READERS) as pool:
            list(pool.map(lambda run: self._folder.read(run[0][0], run[1]), runs[turn:] + runs[:turn]))
        for (path, _), entries in runs:
            for begin, nbytes, _ in entries:
                first, last = begin // _BLOCK_BYTES, (begin + nbytes - 1) // _BLOCK_BYTES
                at = self._first_block[path]
                self._checked[at + first : at + last + 1] = b"\1" * (last + 1 - first)


def _runs(pieces: Iterable[_Piece]) -> dict[tuple[str, int], list[tuple[int, int, int]]]:
    """(path, number of a run of blocks) -> (begin, bytes, address), ascending: no block is read by two runs."""
    size = _RUN_BLOCKS * _BLOCK_BYTES
    runs: dict[tuple[str, int], list[tuple[int, int, int]]] = {}
    for piece in sorted(pieces, key=lambda each: (each.path, each.begin)):
        at, last = piece.begin, piece.begin + piece.nbytes
        while at < last:
            end = min(last, (at // size + 1) * size)
            runs.setdefault((piece.path, at // size), []).append((at, end - at, piece.address + at - piece.begin))
            at = end
    return runs


def _land(target: torch.Tensor, memory: torch.Tensor) -> None:
    """What was read into `memory` to `target`, which it is an alias of, or a copy."""
    if memory.data_ptr() != target.data_ptr() or target.is_conj() or target.is_neg():
        target.copy_(torch.view_as_complex(memory) if target.is_complex() else memory)
    else:
        torch.autograd.graph.increment_version(target)


def _land_slice(sliced: Sliced) -> None:
    for each in sliced.live:
        if sliced.copy is not None:
            each.copy_(sliced.copy)
        torch.autograd.graph.increment_version(each)
