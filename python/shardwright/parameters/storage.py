"""Parameters in the layout of their gradients' buckets, and the slice of each that a rank owns (zero >= 1).

A rank's optimizer steps on the slices that the rank owns, and publish() makes the updates visible to all ranks. There
are two forms. *Private*: each rank has all parameters, and slices are gathered after the step. *Shared*: a host has one
copy, and publish() is a barrier that also brings the slices of other hosts. The engine's Store knows where buckets lie
and how slices travel (docs/design/store.md).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch

from .._engine import Reducer
from ..backend.base import Backend, Request
from ..layout.shard_runs import Copies, Storage
from ..torch_compat.autograd import increment_versions
from ..torch_compat.engine_storage import engine_tensor
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
        self._flat: dict[int, torch.Tensor] = {}  # index -> tensor at the parameter's current address
        self._store, self._gathers = backend.store(reducer, request, shared=shared)
        self.reason = self._store.reason
        self.is_stepped: Any = self._store.is_stepped
        self.is_mapped = bool(self._store.mapped())
        #: True if there are several copies of the values, each of which begins with those of its first rank
        self._is_copied = shared and (backend.group.host_count > 1 or self._slicing.is_replicated)
        if self._is_copied:
            backend.broadcast(self._table.parameters, 0, f"parameters of {self._label}")
        for index, parameter in enumerate(self._table.parameters):
            if (parameter.requires_grad or shared) and index not in without:
                self.adopt(index)
        self._is_written = False  # True inside writable(), where each rank has separate parameters
        self._narrow: dict[int, torch.Tensor] = {}  # the shared casts, by id of the parameter
        if shared:
            backend.fence(f"parameters of {self._label} shared")
            self._make_casts(request)

    def hook_arranger(self) -> Callable[[bool], None] | None:
        arrange: Callable[[bool], None] | None = None if self._gathers is None else self._gathers.arrange_hooks
        return arrange

    def settle(self) -> None:
        if self._gathers is not None:
            self._gathers.settle()

    def _make_casts(self, request: Request) -> None:
        """Make one cast per host of the parameters with which modules compute in 16 bits. Collective."""
        for index in request.compute_dtypes:
            parameter = self._table.parameters[index]
            cast = self._store.whole(index, list(parameter.shape), list(parameter.stride()), True)
            if cast is not None:
                self._narrow[id(parameter)] = engine_tensor(cast)
        self._store.cast(True)

    def follow(self, copies: Copies) -> None:
        if self._narrow:
            copies.follow(weakly(self._source_of))

    def _source_of(self, parameter: torch.Tensor) -> torch.Tensor:
        return parameter if self._is_written else self._narrow.get(id(parameter), parameter)

    def accept_writes(self) -> None:
        increment_versions([*self._narrow.values()])

    def adopt(self, index: int) -> None:
        """Move a parameter. If it trains, publish() gathers its whole bucket from now on."""
        parameter = self._table.parameters[index]
        if parameter.requires_grad:
            self._store.adopt(index)
        moved = self._backend.tensor(self._store, index, parameter)
        if self._store.is_home:
            moved.copy_(parameter.data)
        parameter.data = moved
        self._flat[index] = moved.as_strided((moved.numel(),), (1,))

    def give_back(self, together: bool = False) -> None:
        """Give this rank private copies of parameters that the host shares."""
        if self._gathers is not None:
            self._gathers.close()
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
        return int(self._store.bytes_held)

    def mapped(self) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = self._store.mapped()
        return found

    def words(self) -> torch.Tensor:
        """Return the memory that the host's ranks share, as words of 4 bytes."""
        return engine_tensor(self._store.words())

    def span(self, index: int) -> tuple[int, int]:
        """Return (first, count) of the words of a parameter. It may fill a part of the last one."""
        found: tuple[int, int] = self._store.span(index)
        return found

    def is_moved(self, index: int) -> bool:
        """Return True if a parameter lies at its final address; a frozen one moves when it is unfrozen."""
        return index in self._flat

    is_published = is_moved

    def publish(self, *, failed: bool | None = None) -> list[int] | None:
        outcomes: list[int] | None = self._store.publish(failed)
        return outcomes

    def cast_stepped(self) -> None:
        """Refresh the shared casts after a step, once all ranks see its slices. Collective."""
        self._store.cast()

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
            if self._is_copied:
                backend.broadcast(self._table.parameters, 0, label)
            if self.shared and self._store.is_home:
                for parameter, data in kept:
                    data.copy_(parameter.data)
        finally:
            if self.shared:
                self._is_written = False
                for parameter, data in kept:
                    parameter.data = data
                backend.fence(label)
                self._store.cast(True)
            else:
                backend.broadcast(self._table.parameters, 0, label)

    def pieces(self, index: int) -> list[tuple[int, int, torch.Tensor]]:
        if not self.shared:
            return super().pieces(index)
        return [(low, high, engine_tensor(memory)) for low, high, memory in self._store.pieces(index)]

    @contextlib.contextmanager
    def filling(self) -> Iterator[None]:
        label = f"loaded parameters of {self._label}"
        if self.shared:
            self._backend.fence(label)  # no rank reads the old values any longer
        yield
        if self.shared:
            self._backend.fence(label)
            self._store.cast(True)
