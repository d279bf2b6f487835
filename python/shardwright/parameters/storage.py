"""Parameters in the layout of their gradients' buckets, and the slice of each that a rank owns (zero >= 1).

A rank's optimizer steps on the slices that the rank owns, and publish() makes the updates visible to all ranks. There
are two forms. *Private*: each rank has all parameters, and slices are gathered after the step. *Shared*: a host has one
copy, and publish() is a barrier that also brings the slices of other hosts. The backend decides where buckets lie and
how slices travel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch

from .._engine import Reducer
from ..backend.base import Backend, Request
from ..layout.shard_runs import Copies, Storage, itemsize_of, make_dense, share_of
from ..torch_compat.weak import weakly


class ParameterMemory(Storage):
    """Parameters of a table, moved into buckets. Making it is collective.

    A parameter keeps its identity, shape and strides (strides that overlap or leave gaps become contiguous). Its data moves
    to a storage of exactly its bytes. Memory: the layout's size, once for each rank or each host.

    `shared`: one copy a host (on a mesh of two dimensions, one a replica on the host), with rank 0's values; else one a
    rank. `without`: numbers of parameters that lie elsewhere.
    """

    def __init__(
        self, backend: Backend, reducer: Reducer, request: Request, *, shared: bool, without: Collection[int] = ()
    ) -> None:
        super().__init__(reducer, request.table, request.slicing, request.label)
        self.shared, self._backend = shared, backend
        self._moved: set[int] = set()  # buckets
        self._flat: dict[int, torch.Tensor] = {}  # index -> tensor at the parameter's current address
        moving = [i for i, p in enumerate(self._table.parameters) if (p.requires_grad or shared) and i not in without]
        self._buckets: Any = backend.empty(reducer, {reducer.place(i)[0] for i in moving}, request, shared=shared)
        self.reason = self._buckets.reason
        self.is_mapped = bool(self._buckets.mapped())
        self.settle: Any = self._buckets.settle
        self.mapped: Any = self._buckets.mapped
        if shared and self._buckets.is_copied:  # each copy starts with the values of its first rank
            backend.broadcast(self._table.parameters, 0, f"parameters of {self._label}")
        for index in moving:
            self.adopt(index)
        self._is_written = False  # True inside writable(), where each rank has separate parameters
        self._casts = False  # True if some ranks make casts, so that all need a barrier after them
        self._narrow: dict[int, torch.Tensor] = {}  # the shared casts, by parameter number
        self._narrow_of: dict[int, torch.Tensor] = {}  # the same by id of the parameter
        self._mine: list[int] = []  # numbers of the casts that this rank makes
        if shared:
            backend.fence(f"parameters of {self._label} shared")
            self._make_casts(request)

    def hook_arranger(self) -> Callable[[bool], None] | None:
        arrange: Callable[[bool], None] | None = self._buckets.arrange_hooks
        return arrange

    def _make_casts(self, request: Request) -> None:
        """Make one cast per host of the parameters with which modules compute in 16 bits. Collective.

        A rank that shares with no other casts in its forwards, since it may write to its parameters freely.
        """
        group = self._backend.group
        self._casts = bool(request.compute_dtypes) and group.shares(self._slicing)
        beside = group.sharers(self._slicing)
        for index, dtype in request.compute_dtypes.items() if len(beside) > 1 else ():
            bucket, begin, _ = self._reducer.place(index)
            self._narrow[index] = self._buckets.narrow(bucket, begin, self._table.parameters[index], dtype)
        self._narrow_of = {id(self._table.parameters[index]): each for index, each in self._narrow.items()}
        self._mine = sorted(self._narrow)[beside.index(self._slicing.rank) :: len(beside)]
        self._cast(self._mine)

    def _cast(self, indices: Iterable[int]) -> None:
        """Refresh these casts, while no rank computes with them. Collective."""
        if self._casts:
            with torch.no_grad():
                for index in indices:
                    narrow = self._narrow[index]
                    narrow.copy_(self._flat[index].as_strided(narrow.shape, narrow.stride()))
            self._backend.fence(f"casts of the parameters of {self._label}")

    def follow(self, copies: Copies) -> None:
        if self._narrow:
            copies.follow(weakly(self._source_of))

    def _source_of(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter if self._is_written else self._narrow_of.get(id(parameter), parameter)

    def accept_writes(self) -> None:
        for each in self._narrow.values():
            torch.autograd.graph.increment_version(each)

    def adopt(self, index: int) -> None:
        """Move a parameter, and add its whole bucket to those that publish() gathers."""
        parameter = self._table.parameters[index]
        bucket, begin, _ = self._reducer.place(index)
        self._moved.add(bucket)
        if parameter.requires_grad:
            self._stepped.add(bucket)
        moved = self._buckets.tensor(bucket, begin, parameter)
        if moved is None:
            make_dense(parameter)
            return
        if self._buckets.is_home:
            moved.copy_(parameter.data)
        parameter.data = moved
        self._flat[index] = moved.as_strided((moved.numel(),), (1,))

    def give_back(self, together: bool = False) -> None:
        """Give this rank private copies of parameters that the host shares."""
        self._buckets.close()
        for index in self._flat if self.shared else ():
            parameter = self._table.parameters[index]
            if parameter.data_ptr() == self._flat[index].data_ptr():
                parameter.data = parameter.data.clone(memory_format=torch.preserve_format)

    def flat(self, index: int) -> torch.Tensor:
        """Return all elements of a parameter in memory order: a one-dimensional alias of its bucket memory."""
        if index in self._flat:
            return self._flat[index]
        data = self._table.parameters[index].data
        return data.as_strided((data.numel(),), (1,), data.storage_offset())

    def slice(self, index: int) -> torch.Tensor | None:
        """Return this rank's elements of a parameter; None if it owns none. Empty ones belong to the first slice."""
        low, high = self.own_run(index)
        flat = self.flat(index)
        return flat[low:high] if low < high or (flat.numel() == 0 and self._slicing.own == 0) else None

    @property
    def bytes_held(self) -> int:
        """Return the bytes of parameters on this rank; on the whole host if they are shared."""
        shapes = [self._reducer.bucket_shape(bucket) for bucket in self._moved]
        casts = sum(each.nbytes for each in self._narrow.values())
        return sum(numel * itemsize_of(dtype) for _, numel, dtype, _ in shapes) + casts

    def words(self) -> torch.Tensor:
        """Return all memory that parameters were moved to, as words of 4 bytes."""
        found: torch.Tensor = self._buckets.words()
        return found

    def span(self, index: int) -> tuple[int, int]:
        """Return (first, count) of the words in which a parameter lies.

        It fills all of them, except for the last one of 16-bit elements or bytes.
        """
        bucket, begin, numel = self._reducer.place(index)
        offset, _, dtype, _ = self._reducer.bucket_shape(bucket)
        if index not in self._flat:
            return 0, 0
        return (offset + begin * itemsize_of(dtype)) // 4, -(-numel * itemsize_of(dtype) // 4)

    def is_moved(self, index: int) -> bool:
        """Return True if a parameter lies at its final address; a frozen one moves when it is unfrozen."""
        return bool(self.reason) or index in self._flat

    def is_published(self, index: int) -> bool:
        return self.is_moved(index) and self._reducer.place(index)[0] in self._moved

    def publish(self, *, failed: bool | None = None) -> list[int] | None:
        outcomes: list[int] | None = self._buckets.publish(self._stepped, failed, self._ranges_of)
        if self._casts:
            self.cast_stepped()
        return outcomes

    def cast_stepped(self) -> None:
        """Refresh the shared casts after a step, once all ranks see its slices. Collective."""
        self._cast(index for index in self._mine if self.is_stepped(index))

    @contextlib.contextmanager
    def writable(self) -> Iterator[None]:
        """Give each rank separate whole parameters to write to; on exit all get rank 0's values. Collective.

        Cost: if shared, a temporary copy of the parameters on each rank; if private, a broadcast.
        """
        backend, label = self._backend, f"written parameters of {self._label}"
        kept = [(parameter, parameter.data) for parameter in self._table.parameters]
        backend.fence(label)
        if self.shared:
            for parameter, data in kept:
                parameter.data = data.clone(memory_format=torch.preserve_format)
            backend.fence(label)  # no rank writes before every rank has its copy
        self._is_written = self.shared
        try:
            yield
            if self.shared and self._buckets.is_copied:
                backend.broadcast(self._table.parameters, 0, label)
            if self.shared and self._buckets.is_home:
                for parameter, data in kept:
                    data.copy_(parameter.data)
        finally:
            if self.shared:
                self._is_written = False
                for parameter, data in kept:
                    parameter.data = data
                backend.fence(label)
                self._cast(self._mine)
            else:
                backend.broadcast(self._table.parameters, 0, label)

    def pieces(self, index: int) -> list[tuple[int, int, torch.Tensor]]:
        if not self.shared:
            return super().pieces(index)
        low, high = share_of(self._backend.group, self._slicing, self._flat[index].numel())
        return [(low, high, self.flat(index)[low:high])]

    @contextlib.contextmanager
    def filling(self) -> Iterator[None]:
        label = f"loaded parameters of {self._label}"
        if self.shared:
            self._backend.fence(label)  # no rank reads the old values any longer
        yield
        if self.shared:
            self._backend.fence(label)
            self._cast(self._mine)

    def _ranges_of(self, rank: int) -> Sequence[tuple[int, int]]:
        ranges = []
        for index, parameter in enumerate(self._table.parameters):
            low, high = self.run(index, rank)
            if low < high and self._reducer.place(index)[0] in self._moved:
                size = parameter.element_size()
                ranges.append((parameter.data_ptr() + low * size, (high - low) * size))
        return ranges
