"""Parameters in memory that all ranks of the host map, and the slice of each that a rank owns.

Owning means updating: at zero >= 1 a rank's optimizer steps on its slices alone, and publish() makes the others' updates
visible. Two forms: *private*, each rank has all parameters and slices are gathered after the step; *shared*, a host has one
copy, and publish() is a barrier, in which the slices of other hosts arrive if there are any. Where no memory can be mapped,
private slices are broadcast by their owners instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch.utils.dlpack import from_dlpack

from ._engine import Arena, Reducer
from .gradients import dense_strides
from .parameter_slices import ParameterSlices, itemsize_of, populate
from .process_group import HostGroup
from .slicing import Slicing
from .table import ParameterTable


class ParameterMemory(ParameterSlices):
    """Moves the parameters of a table into mapped memory. Making it is collective.

    Parameters
    ----------
    group : HostGroup
    reducer : Reducer
        Its layout places parameters as it places their gradients.
    table : ParameterTable
    slicing : Slicing
    label : str
        Of the model, in messages.
    shared : bool
        One copy a host (on a mesh of two dimensions, a replica on it), rank 0's values; else one a rank.

    Attributes
    ----------
    reason : str
        Why slices are broadcast instead of gathered; empty if they are not.

    Notes
    -----
    A parameter keeps its identity, shape and strides (or is contiguous from then on, where its strides overlapped or left
    gaps); its data moves. Memory: the layout's size, once a rank or once a host.
    """

    def __init__(
        self,
        group: HostGroup,
        reducer: Reducer,
        table: ParameterTable,
        label: str,
        *,
        slicing: Slicing,
        shared: bool,
    ) -> None:
        super().__init__(reducer, table, slicing, label)
        self.shared = shared
        self._copies = slicing.is_replicated or group.host_count > 1  # more than one, where they are shared
        self._group = group
        self._arena: Arena | None = None
        shapes = [reducer.bucket_shape(bucket) for bucket in range(reducer.bucket_count)]
        sizes = [offset + numel * itemsize_of(dtype) for offset, numel, dtype, _ in shapes]
        self._nbytes = max(sizes)
        try:
            self._arena = group.comm.arena(self._nbytes, f"parameters of {label}", of_hosts=True)
        except MemoryError as error:  # the same on every rank
            if shared:
                raise
            self.reason = str(error)
        if shared and self._copies:  # each is made out of what its first rank has
            group.broadcast(table.parameters, 0, f"parameters of {label}")
        moving = [index for index, parameter in enumerate(table.parameters) if parameter.requires_grad or shared]
        if self._arena is not None and group.rank == self._home:
            populate(self._arena, map(self._bucket_range, {reducer.place(index)[0] for index in moving}))
        for index in moving:
            self.adopt(index)
        if shared:
            group.comm.barrier(f"parameters of {label} shared")

    def adopt(self, index: int) -> None:
        """Moves a parameter, and its whole bucket's range into what publish() gathers."""
        parameter = self._table.parameters[index]
        shape, strides = list(parameter.shape), dense_strides(parameter)
        bucket, begin, _ = self._reducer.place(index)
        offset, _, dtype, _ = self._reducer.bucket_shape(bucket)
        self._moved.add(bucket)
        if parameter.requires_grad:
            self._stepped.add(bucket)
        if self._arena is None:
            if strides is None:
                parameter.data = parameter.data.contiguous()
            return
        capsule = self._arena.tensor(
            offset + begin * itemsize_of(dtype), dtype, shape, None if strides is None else list(strides), self._home
        )
        moved = from_dlpack(capsule)
        if self._group.rank == self._home:
            moved.copy_(parameter.data)
        parameter.data = moved
        self._flat[index] = moved.as_strided((moved.numel(),), (1,))

    def give_back(self, together: bool = False) -> None:
        """Parameters that the host shares become this rank's own again."""
        for index in self._flat if self.shared else ():
            parameter = self._table.parameters[index]
            if parameter.data_ptr() == self._flat[index].data_ptr():
                parameter.data = parameter.data.clone(memory_format=torch.preserve_format)

    def words(self) -> torch.Tensor:
        """All memory that parameters were moved to, as words of 4 bytes."""
        if self._arena is None:
            return torch.empty(0, dtype=torch.int32, device="cpu")
        return from_dlpack(self._arena.tensor(0, "int32", [self._nbytes // 4], None, self._home))

    def span(self, index: int) -> tuple[int, int]:
        """(first, count) of the words that a parameter lies in; it fills all of them, but for the last one of halves or bytes."""
        bucket, begin, numel = self._reducer.place(index)
        offset, _, dtype, _ = self._reducer.bucket_shape(bucket)
        if index not in self._flat:
            return 0, 0
        return (offset + begin * itemsize_of(dtype)) // 4, -(-numel * itemsize_of(dtype) // 4)

    def protect(self, *, writable: bool) -> None:
        """Whether this process may write to the memory that parameters were moved to."""
        if self._arena is not None:
            self._arena.protect(writable)

    def is_moved(self, index: int) -> bool:
        """Whether a parameter lies where it will stay; a frozen one moves when it is unfrozen."""
        return self._arena is None or super().is_moved(index)

    @property
    def _home(self) -> int:
        if not self.shared:
            return self._group.rank
        return self._group.home_of(self._slicing)

    def publish(self) -> None:
        """Every rank has updated its slices: makes them everybody's. Collective.

        Cost: private, the bytes of a rank's slices written world_size - 1 times; shared, one barrier. Over hosts, each sends the
        others what its ranks have updated, once.
        """
        comm, label = self._group.comm, f"updated parameters of {self._label}"
        if self.shared and (not self._group.is_apart(self._slicing) or not self._stepped):
            comm.barrier(label)
        elif self._arena is not None:
            ranges = [self._bucket_range(bucket) for bucket in sorted(self._stepped)]
            comm.all_gather(self._arena, ranges, label, one_copy=self.shared, slices=self._slicing.for_engine())
        else:
            for root in map(self._slicing.first_owner, range(self._slicing.count)):
                ranges = self._ranges_of(root)
                if ranges:
                    comm.broadcast(ranges, root, label)

    @contextlib.contextmanager
    def writable(self) -> Iterator[None]:
        """Inside, each rank has whole parameters of its own to write to; afterwards all have rank 0's. Collective.

        Cost: shared, a copy of the parameters a rank for the time; private, a broadcast.
        """
        comm, label = self._group.comm, f"written parameters of {self._label}"
        kept = [(parameter, parameter.data) for parameter in self._table.parameters]
        comm.barrier(label)
        if self.shared:
            for parameter, data in kept:
                parameter.data = data.clone(memory_format=torch.preserve_format)
            comm.barrier(label)  # nobody writes before everybody has its own
        try:
            yield
            if self.shared and self._copies:
                self._group.broadcast(self._table.parameters, 0, label)
            if self.shared and self._group.rank == self._home:
                for parameter, data in kept:
                    data.copy_(parameter.data)
        finally:
            if self.shared:
                for parameter, data in kept:
                    parameter.data = data
                comm.barrier(label)
            else:
                self._group.broadcast(self._table.parameters, 0, label)

    def _ranges_of(self, rank: int) -> Sequence[tuple[int, int]]:
        ranges = []
        for index, parameter in enumerate(self._table.parameters):
            low, high = self.run(index, rank)
            if low < high and self._reducer.place(index)[0] in self._moved:
                size = parameter.element_size()
                ranges.append((parameter.data_ptr() + low * size, (high - low) * size))
        return ranges
