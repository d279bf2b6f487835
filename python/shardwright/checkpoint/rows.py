"""Rows: each rank's own content in two files, one line of JSON per rank and tensors stacked in rank order.

    ranks/all.jsonl          line r is rank r's tree, padded with spaces: all lines have equal length
    ranks/all.safetensors    `name`: [world_size, *shape], row r is rank r's, where all ranks have such a tensor;
                             `00003.name`: rank 3's, where they differ

A rank writes its line and rows without communication while its line fits and its tensors match the layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .._engine import CheckpointError, CheckpointFolder
from ..formats import tree
from ..layout.memory import bytes_of
from .slices import Sliced
from .state.content import Content, Group
from .state.stored import Stored

LINES, TENSORS = "ranks/all.jsonl", "ranks/all"
_LINE_ALIGNMENT = 4096
#: largest number of bytes of a rank's line; also the limit of a file of values (csrc/checkpoint/plan.h)
VALUES_MAX_BYTES = 256 << 20

#: (name, dtype, shape) of a rank's tensors
Structure = Sequence[tuple[str, str, Sequence[int]]]


def structure_of(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, str, list[int]]]:
    return [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors.items()]


@dataclasses.dataclass(frozen=True)
class Rows:
    """The layout of the two files."""

    rank: int
    world_size: int
    #: bytes of each line, with its newline
    line_bytes: int
    #: (dtype, shape, rank) of the tensors by name; with rank None each rank has a row, and `shape` is that of a row
    entries: Mapping[str, tuple[str, tuple[int, ...], int | None]]

    @classmethod
    def over(cls, of_all: Sequence[tuple[Structure, int]], rank: int) -> Rows:
        """Make the rows from every rank's (structure, bytes of its line)."""
        longest = max(nbytes for _, nbytes in of_all)
        if longest > VALUES_MAX_BYTES // 2:  # a line has room to grow
            raise CheckpointError(
                f"a rank's own values would take {longest} bytes, at most {VALUES_MAX_BYTES // 2} can be saved: save large values as "
                "tensors or arrays"
            )
        line_bytes = -(-(longest + longest // 8 + 2) // _LINE_ALIGNMENT) * _LINE_ALIGNMENT
        tables = [{name: (dtype, tuple(shape)) for name, dtype, shape in structure} for structure, _ in of_all]
        alike = {n: entry for n, entry in tables[0].items() if all(table.get(n) == entry for table in tables)}
        entries: dict[str, tuple[str, tuple[int, ...], int | None]] = {n: (*entry, None) for n, entry in alike.items()}
        for number, table in enumerate(tables):
            entries |= {_of(number, name): (*entry, number) for name, entry in table.items() if name not in entries}
        return cls(rank, len(of_all), line_bytes, entries)

    def fits(self, structure: Structure, nbytes: int) -> bool:
        """Return whether this rank's content fits the layout."""
        mine = {name: (dtype, tuple(shape)) for name, dtype, shape in structure}
        held = ((n, *entry) for n, entry in self.entries.items() if entry[2] in (None, self.rank))
        wanted = {_own_name(name, rank): (dtype, shape) for name, dtype, shape, rank in held}
        return mine == wanted and nbytes < self.line_bytes

    def line(self, text: bytes) -> tuple[int, int, bytes]:
        """Return (bytes of the file, first byte of this rank's line, the line) for the text of its tree."""
        line = text.rstrip(b"\n").ljust(self.line_bytes - 1) + b"\n"
        return self.world_size * self.line_bytes, self.rank * self.line_bytes, line

    def tensors(self, own: Mapping[str, torch.Tensor]) -> dict[str, Sliced]:
        """Return the tensors of the file, each with this rank's parts. `own`: its row-major tensors."""
        found = {}
        for name, (dtype, shape, rank) in self.entries.items():
            row, whole = (self.rank, (self.world_size, *shape)) if rank is None else (0, shape)
            parts: tuple[tuple[int, torch.Tensor], ...] = ()
            if rank in (None, self.rank):
                flat = own[_own_name(name, rank)].reshape(-1)
                parts = ((row * flat.numel(), flat),)
            found[name] = Sliced(getattr(torch, dtype), whole, parts)
        return found


def add_rows(content: Content, rows: Rows, text: bytes, tensors: Mapping[str, torch.Tensor]) -> None:
    """Add the text and the tensors of a rank's own tree to the shared content."""
    each_ranks = rows.tensors({name: dense(each) for name, each in tensors.items()})
    content.groups.append(Group(TENSORS, each_ranks, {"format": "pt"}, eager=frozenset(each_ranks)))
    content.lines[LINES] = rows.line(text)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor detached, resolved and row-major."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _of(rank: int, name: str) -> str:
    return f"{rank:05d}.{name}"


def _own_name(name: str, rank: int | None) -> str:
    """Return the name in a rank's tree: the inverse of _of()."""
    return name if rank is None else name.partition(".")[2]


def has_rows(folder: CheckpointFolder) -> bool:
    return LINES in folder.files


def read_line(folder: CheckpointFolder, rank: int) -> Any:
    """Return a rank's tree from a folder for which has_rows() is true."""
    nbytes, rest = divmod(folder.files[LINES], folder.world_size)
    if rest or nbytes > VALUES_MAX_BYTES:
        raise CheckpointError(f"'{folder.path}/{LINES}' has {folder.files[LINES]} bytes for {folder.world_size} lines")
    memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    folder.load([(LINES, rank * nbytes, nbytes, memory.data_ptr(), 0)])
    try:
        return tree.loads(bytes_of(memory))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"'{folder.path}/{LINES}' is not JSON in line {rank}: {error}") from None


def rows_of(stored: Mapping[str, Stored], rank: int, names: Sequence[str]) -> dict[str, Stored]:
    """Return where the tensors `names` of a rank's tree are stored."""
    found = {}
    for name in names:
        own, every = stored.get(_of(rank, name)), stored.get(name)
        if own is not None:
            found[name] = own
        elif every is not None and every.shape and rank < every.shape[0]:
            nbytes = every.nbytes // every.shape[0]
            place = every.begin + rank * nbytes
            found[name] = dataclasses.replace(every, shape=every.shape[1:], begin=place, nbytes=nbytes)
    return found
