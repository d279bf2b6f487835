"""Which elements of a parameter a rank owns, and where they lie: what memories of parameters have in common.

Parameters lie as their gradients do: a bucket has the gradients' layout, so a slice of the one is stepped on with a slice of
the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from .gradients import dense_strides
from .slicing import Slicing
from .table import ParameterTable

if TYPE_CHECKING:
    from ._engine import Arena


class SliceRuns:
    """Which elements of each parameter a rank owns.

    Parameters
    ----------
    reducer : Reducer or DeviceRounds
        Its layout places parameters as it places their gradients.
    slicing : Slicing
    """

    def __init__(self, reducer: Any, slicing: Slicing) -> None:
        self._reducer: Any = reducer
        self._slicing = slicing
        self._runs: dict[int, tuple[int, int]] = {}
        self._stepped: set[int] = set()  # buckets with parameters that train, or have

    def is_stepped(self, index: int) -> bool:
        """Whether a parameter trains, or has: one that is frozen later is stepped on for as long as it has a gradient."""
        return self._reducer.place(index)[0] in self._stepped

    def run(self, index: int, rank: int) -> tuple[int, int]:
        """[begin, end) of the elements of a parameter, in memory order, that `rank` owns; empty ones are (0, 0)."""
        bucket, begin, numel = self._reducer.place(index)
        return self._slicing.run(self._reducer.bucket_shape(bucket)[1], (begin, numel), rank)

    def own_run(self, index: int) -> tuple[int, int]:
        """run(index, this rank), kept."""
        if index not in self._runs:
            self._runs[index] = self.run(index, self._slicing.rank)
        return self._runs[index]


class ParameterSlices(SliceRuns):
    """Parameters that lie in buckets, and their slices.

    Parameters
    ----------
    reducer : Reducer or DeviceRounds
        Its layout places parameters as it places their gradients.
    table : ParameterTable
    slicing : Slicing
    label : str
        Of the model, in messages.
    """

    #: why slices are not gathered out of the buckets; empty if they are
    reason = ""
    #: whether a host has one copy
    shared = False

    def __init__(self, reducer: Any, table: ParameterTable, slicing: Slicing, label: str) -> None:
        super().__init__(reducer, slicing)
        self._table, self._label = table, label
        self._moved: set[int] = set()  # buckets
        self._flat: dict[int, torch.Tensor] = {}  # of a parameter, where it lies now

    def flat(self, index: int) -> torch.Tensor:
        """All elements of a parameter in memory order: a one-dimensional alias of the memory that it was moved to."""
        if index in self._flat:
            return self._flat[index]
        data = self._table.parameters[index].data
        return data.as_strided((data.numel(),), (1,), data.storage_offset())

    def is_moved(self, index: int) -> bool:
        """Whether a parameter lies where it will stay; a frozen one moves when it is unfrozen."""
        return index in self._flat

    def is_published(self, index: int) -> bool:
        """Whether publish() makes this rank's slice of a parameter everybody's."""
        return self.is_moved(index) and self._reducer.place(index)[0] in self._moved

    def slice(self, index: int) -> torch.Tensor | None:
        """This rank's elements of a parameter; None if it owns none. Parameters without elements are of the first slice."""
        low, high = self.own_run(index)
        flat = self.flat(index)
        return flat[low:high] if low < high or (flat.numel() == 0 and self._slicing.own == 0) else None

    def take_whole(self, index: int) -> None:
        """A parameter that publish() does not gather was written whole on every rank: nothing is left to do."""

    @property
    def bytes_held(self) -> int:
        """Of parameters, on this rank; where they are shared, on the host."""
        return sum(self._bucket_range(bucket)[1] for bucket in self._moved)

    def _bucket_range(self, bucket: int) -> tuple[int, int]:
        offset, numel, dtype, _ = self._reducer.bucket_shape(bucket)
        return offset, numel * itemsize_of(dtype)


def populate(arena: Arena, ranges: Iterable[tuple[int, int]]) -> None:
    """Pages behind (first byte, bytes) of this rank's part, huge ones where the kernel can: parameters are read in every step."""
    pending: list[int] = []  # neighbours make one range: a huge page may lie across them
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
    """Bytes of an element."""
    return getattr(torch, dtype).itemsize


def memory_order(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The elements of `tensor` in the order in which those of `like`, of the same shape, lie in memory: one-dimensional.

    An alias where the strides agree, else a copy.
    """
    strides = dense_strides(like)
    if strides is None or tensor.stride() != strides or tensor.is_conj() or tensor.is_neg():
        same = torch.empty_strided(
            like.shape, strides or like.contiguous().stride(), dtype=tensor.dtype, device=tensor.device
        )
        same.copy_(tensor)
        tensor = same
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
