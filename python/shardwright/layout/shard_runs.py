"""The elements of a parameter that a rank owns, and where they lie: common to all forms of parameter memory.

A bucket of parameters has the layout of its gradients, so an optimizer steps on a slice of parameters with the same
slice of gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils.dlpack import from_dlpack

from .param_table import ParameterTable
from .shard_mesh import Slicing
from .views import dense_strides

if TYPE_CHECKING:
    from .._engine import Arena, Reducer


#: slice boundaries are multiples of this (csrc/tensor/layout.h)
_SLICE_BYTES = 128
#: bytes per rank that Outcomes uses
OUTCOME_BYTES = 2 * _SLICE_BYTES


class Copies(Protocol):
    """Low-precision copies of parameters (PrecisionPlan)."""

    def follow(
        self, source: Callable[[torch.Tensor], torch.Tensor | None], in_units: Collection[torch.Tensor] | None = None
    ) -> None:
        """Read parameters from the memory that `source` returns.

        `source` maps a parameter to memory with its values in another dtype, which is viewed; to the parameter itself,
        which is cast; or to None while it is released. `in_units`: the parameters that are gathered in units; modules
        fetch these when they are called.
        """

    def is_in_force(self) -> bool:
        """Return True if a module that is called now computes in its policy's dtype."""

    def forget(self, parameters: Collection[torch.Tensor]) -> None:
        """Put released parameters back in their slots."""


class Storage:
    """The interface to parameters in any memory. At zero=0 this class itself is used: each rank has whole parameters.

    `reason` says why slices are broadcast instead of gathered. `shared`: the ranks of a host share one copy. `releases`:
    a schedule gathers parameters in units and releases them after use.
    """

    reason = ""
    shared = releases = one_copy = False
    #: True if parameters lie in memory that a forked child shares with this rank
    is_mapped = False
    _table: ParameterTable

    def __init__(self, table: ParameterTable) -> None:
        self._table = table

    @property
    def bytes_held(self) -> int:
        """Return the bytes that this storage allocated for parameters; 0 if they stay in their original memory."""
        return 0

    def like(self, index: int) -> torch.Tensor:
        """Return a tensor with a parameter's original shape, strides and dtype. Its values must not be read."""
        return self._table.parameters[index]

    def layouts(self) -> list[torch.Tensor] | None:
        """Return like() of every parameter if parameters lose their shape while released; else None."""
        return None

    def places(self) -> Callable[[], list[int]] | None:
        """Return a function that returns the expected data address of every parameter; None if none moves."""
        return None

    def adopt(self, index: int) -> None:
        """Record that a parameter trains from now on."""

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which all parameters are whole."""
        return contextlib.nullcontext()

    def plan(self) -> dict[str, Any]:
        """Return facts for describe()."""
        return {}

    def stats(self) -> dict[str, Any]:
        """Return counts of gathers."""
        return {}

    def accept_writes(self) -> None:
        """Record that parameters were written by the engine, or where writes are allowed."""

    def mapped(self) -> list[tuple[int, int]]:
        """Return (address, bytes) of the memory of whole parameters that other processes write to as well."""
        return []

    def settle(self) -> None:
        """Make the current stream wait for parameters that are still being gathered after the last step."""

    def hook_arranger(self) -> Callable[[bool], None] | None:
        """Return a function to call at the start of each forward, None if nothing is to do. It keeps parameters whole in
        all hooks of the user's modules, whenever they were registered. Its argument is True if torch's compiler runs
        the forward."""
        return None

    def follow(self, copies: Copies) -> None:
        """Make low-precision copies while parameters are whole."""

    def announce_units(self, announce: Callable[[int], None] | None) -> None:
        """Inside a join, call `announce` with each unit before it is gathered, if joined ranks must also gather it."""

    def gather_anew(self) -> None:
        """Gather units as after a step, at the end of a join, regardless of the units that each rank already has.
        Collective if parameters are gathered in units."""

    def give_back(self, together: bool = False) -> None:
        """Return the parameters to ordinary memory of this rank. `together`: all ranks call this."""


class SliceRuns:
    """The elements of each parameter that a rank owns, in the layout of a reducer's gradients."""

    def __init__(self, reducer: Reducer, slicing: Slicing) -> None:
        self._reducer = reducer
        self._slicing = slicing
        self._runs: dict[int, tuple[int, int]] = {}
        self._stepped: set[int] = set()  # buckets with parameters that train, or have trained

    def is_stepped(self, index: int) -> bool:
        """Return True if a parameter trains or has trained: a step includes a frozen one that has a gradient."""
        return self._reducer.place(index)[0] in self._stepped

    def publish_all(self) -> None:
        """Publish after writes to slices of frozen parameters, and after writes of every rank to whole, unreleased
        parameters. Collective."""
        self.take_writes()
        self.publish()  # type: ignore[attr-defined]

    def take_writes(self) -> None:
        """Update slices in separate memory from values that the program wrote to the parameters."""

    def is_published(self, index: int) -> bool:
        """Return whether publish() copies this rank's slice of a parameter to where the program sees it whole."""
        return False

    def run(self, index: int, rank: int) -> tuple[int, int]:
        """Return [begin, end), in memory order, of the elements of a parameter that `rank` owns; (0, 0) if none."""
        bucket, begin, numel = self._reducer.place(index)
        return self._slicing.run(self._reducer.bucket_shape(bucket)[1], (begin, numel), rank)

    def run_in_slice(self, index: int, rank: int) -> tuple[int, int, int]:
        """Return (bucket, first element in the rank's slice of it, count) of `rank`'s elements of a parameter."""
        bucket, begin, _ = self._reducer.place(index)
        low, high = self.run(index, rank)
        width = self._reducer.bucket_shape(bucket)[1] // self._slicing.count
        first = begin + low - self._slicing.of_rank[rank] * width if low < high else 0
        return bucket, first, high - low

    def own_run(self, index: int) -> tuple[int, int]:
        """Return run(index, this rank), cached."""
        if index not in self._runs:
            self._runs[index] = self.run(index, self._slicing.rank)
        return self._runs[index]


class ParameterSlices(Storage, SliceRuns):
    """Parameters that lie in buckets like their gradients, and their slices."""

    def __init__(self, reducer: Reducer, table: ParameterTable, slicing: Slicing, label: str) -> None:
        SliceRuns.__init__(self, reducer, slicing)
        self._table, self._label = table, label
        self._moved: set[int] = set()  # buckets
        self._flat: dict[int, torch.Tensor] = {}  # index -> tensor at the parameter's current address

    def flat(self, index: int) -> torch.Tensor:
        """Return all elements of a parameter in memory order: a one-dimensional alias of its bucket memory."""
        if index in self._flat:
            return self._flat[index]
        data = self._table.parameters[index].data
        return data.as_strided((data.numel(),), (1,), data.storage_offset())

    def is_moved(self, index: int) -> bool:
        """Return True if a parameter is at its final address. A frozen parameter moves when it is unfrozen."""
        return index in self._flat

    def is_published(self, index: int) -> bool:
        return self.is_moved(index) and self._reducer.place(index)[0] in self._moved

    def slice(self, index: int) -> torch.Tensor | None:
        """Return this rank's elements of a parameter; None if it owns none. Empty ones belong to the first slice."""
        low, high = self.own_run(index)
        flat = self.flat(index)
        return flat[low:high] if low < high or (flat.numel() == 0 and self._slicing.own == 0) else None

    @property
    def bytes_held(self) -> int:
        """Return the bytes of parameters on this rank; on the whole host if they are shared."""
        return sum(self._bucket_range(bucket)[1] for bucket in self._moved)

    def _bucket_range(self, bucket: int) -> tuple[int, int]:
        offset, numel, dtype, _ = self._reducer.bucket_shape(bucket)
        return offset, numel * itemsize_of(dtype)


class Outcomes:
    """One byte per rank behind an arena's parameters: 1 if the rank's step failed. What publishes a step also sends these.

    Steps alternate between two sets: a rank writes one while a slower rank still reads the other.
    """

    def __init__(self, arena: Arena, offset: int, rank: int, world_size: int, part: int) -> None:
        self._offset, self._rank = offset, rank
        self._bytes = from_dlpack(arena.tensor(offset, "uint8", [2, world_size, _SLICE_BYTES], None, part))
        self._turn = 0

    def put(self, failed: bool) -> tuple[int, int]:
        """Write this rank's outcome; return (first byte, bytes) of the set. Each rank has a slice of it."""
        self._turn ^= 1
        self._bytes[self._turn, self._rank, 0] = failed
        size = self._bytes[0].numel()
        return self._offset + self._turn * size, size

    def read(self) -> list[int]:
        """Return every rank's outcome. Call it after they were published."""
        found: list[int] = self._bytes[self._turn, :, 0].tolist()
        return found


def populate(arena: Arena, ranges: Iterable[tuple[int, int]]) -> None:
    """Populate ranges (first byte, bytes) of this rank's part, with huge pages where the kernel can.

    Parameters are read in every step.
    """
    pending: list[int] = []  # merge adjacent ranges: a huge page may span both
    for offset, nbytes in sorted(ranges):
        if pending and pending[1] == offset:
            pending[1] = offset + nbytes
            continue
        if pending:
            arena.populate(pending[0], pending[1] - pending[0])
        pending = [offset, offset + nbytes]
    if pending:
        arena.populate(pending[0], pending[1] - pending[0])


def itemsize_of(dtype: str) -> int:
    """Return the bytes of an element."""
    return getattr(torch, dtype).itemsize


def make_dense(parameter: torch.Tensor) -> None:
    """Make a parameter contiguous if its strides overlap or leave gaps."""
    if dense_strides(parameter) is None:
        parameter.data = parameter.data.contiguous()


def memory_order(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the elements of `tensor`, one-dimensional, in the memory order of `like`, which has the same shape.

    The result is an alias where the strides agree, else a copy.
    """
    strides = dense_strides(like)
    if strides is None or tensor.stride() != strides or tensor.is_conj() or tensor.is_neg():
        same = torch.empty_strided(
            like.shape, strides or like.contiguous().stride(), dtype=tensor.dtype, device=tensor.device
        )
        same.copy_(tensor)
        tensor = same
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
