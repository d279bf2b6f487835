"""Sliced parameters, gathered in units while they are used: private parameters at zero=3, on a host.

What is common to hosts and GPUs (parameters/device_groups.py) is in ReleasedParameters. Each rank's slice of a
parameter lies in an arena that the host's ranks map. The parameter also has a range of addresses, which has pages only while its unit is whole. A parameter with a 16-bit compute dtype has slices of that
dtype too, cast after each step, and a second range of addresses, into which they are gathered. A released parameter's
data is one NaN of its own, expanded to its shape. With several hosts the part of each host's lowest rank has a copy of
all slices, so a unit is gathered without a message. On a mesh of two dimensions each replica that spans hosts has such
a copy. The schedule (parameters/unshard_schedule.py) decides when units are gathered and released.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.dlpack import from_dlpack

from .._engine import Arena, Reducer, Units, block_encode, block_record_bytes
from ..layout.param_groups import UnitPlan, mark_of
from ..layout.shard_runs import (
    OUTCOME_BYTES,
    Copies,
    Storage,
    itemsize_of,
    make_dense,
    memory_order,
    outcome_sets,
    populate,
    share_of,
)
from ..layout.views import dense_strides, dtype_name
from ..torch_compat.engine_storage import engine_tensor
from ..torch_compat.weak import weakly
from .gathered_unit import Member
from .unshard_schedule import UnitSchedule

if TYPE_CHECKING:
    from ..backend.base import Backend, Request

#: parameters of at most this many bytes are never released: a gather costs more than the memory is worth
_SMALL_BYTES = 128
_ALIGNMENT = 128
#: the size of a page, in which units' memory is counted
_CHUNK_BYTES = 2 << 20
#: elements of a record of 8-bit integers. Slices end at multiples of it, so values do not depend on the world size
_BLOCK, _BITS = 32, 8
#: bytes of an element of a 16-bit dtype
_NARROW_BYTES = 2


class ReleasedParameters(Storage):
    """Parameters in units, which a schedule gathers and releases; the code common to hosts and GPUs."""

    releases = True
    schedule: UnitSchedule

    def __init__(self, backend: Backend, reducer: Reducer, request: Request) -> None:
        super().__init__(reducer, request.table, request.slicing, request.label)
        self._backend = backend
        #: the parameters that each unit releases
        self._unit_members = releasable(request)
        self._released = {index for each in self._unit_members for index in each}
        # tensors over the memory of releasable parameters when they are whole, and the same in compute dtypes
        self._whole: dict[int, torch.Tensor] = {}
        self._computed_with: dict[int, torch.Tensor] = {}
        self._slices: dict[int, torch.Tensor] = {}  # this rank's elements of each parameter; may be empty
        self._unit_sizes: list[tuple[str, int]] = []  # (name, bytes)
        self._unit_bytes = 0  # of the memory that units share

    def _make_schedule(self, units: Any, plans: Sequence[UnitPlan], **options: Any) -> None:
        """Make the schedule, and give each module of fully_shard its unit."""
        names, parameters = self._table.names, self._table.parameters
        members, compute_members = (
            [[Member(i, names[i], parameters[i], whole[i]) for i in each if i in whole] for each in self._unit_members]
            for whole in (self._whole, self._computed_with)
        )
        abort = self._backend.abort
        self.schedule = UnitSchedule(units, plans, members, abort, compute_members=compute_members, **options)
        for number, plan in enumerate(plans):
            for mark in filter(None, map(mark_of, plan.modules)):
                mark.join(self.schedule, number)

    def is_released(self, index: int) -> bool:
        """Return whether a parameter is whole only while its unit runs."""
        return index in self._released

    def slice(self, index: int) -> torch.Tensor | None:
        """Return this rank's elements of a parameter; None if it owns none. Empty ones belong to the first slice."""
        piece = self._slices[index]
        empty = self._table.parameters[index].numel() == 0
        return piece if piece.numel() or (empty and self._slicing.own == 0) else None

    def like(self, index: int) -> torch.Tensor:
        return self._whole.get(index, self._table.parameters[index])

    def layouts(self) -> list[torch.Tensor]:
        return [self.like(index) for index in range(len(self._table.parameters))]

    def places(self) -> Callable[[], list[int]]:
        return self.addresses

    def addresses(self) -> list[int]:
        """Return the expected address of every parameter's data now."""
        expected = self.schedule.addresses()
        return [expected[i] if i in expected else p.data_ptr() for i, p in enumerate(self._table.parameters)]

    def stats(self) -> dict[str, Any]:
        return self.schedule.stats()

    def accept_writes(self) -> None:
        self.schedule.accept_writes()

    def mapped(self) -> list[tuple[int, int]]:
        return self.schedule.mapped() if self.is_mapped else []

    def hook_arranger(self) -> Callable[[bool], None] | None:
        return lambda is_compiling: self.schedule.arrange_hooks()

    def follow(self, copies: Copies) -> None:
        copies.follow(weakly(self.schedule.source_of), self.schedule.computed_with)
        self.schedule.on_release = weakref.WeakMethod(copies.forget)
        self.schedule.policy = weakref.WeakMethod(copies.is_in_force)

    def plan(self) -> dict[str, Any]:
        return {
            "units": [f"{name or self._label}: {size} bytes" for name, size in self._unit_sizes],
            "unit_bytes": self._unit_bytes,
        }

    def _write_slices(self) -> None:
        """Copy this rank's elements out of whole parameters."""
        self.write_slices(self._slices)

    def write_slices(self, indices: Iterable[int]) -> None:
        """Copy this rank's elements of these whole parameters to its slices."""
        for index in indices:
            low, high = self.own_run(index)
            if low < high:
                data = self._table.parameters[index].data
                self._slices[index].copy_(memory_order(data, data)[low:high])

    @contextlib.contextmanager
    def writable(self) -> Iterator[None]:
        """Give each rank whole parameters to write to inside; afterwards all have rank 0's. Collective.

        Cost: the parameters' bytes on each rank, and a broadcast.
        """
        backend, label = self._backend, f"written parameters of {self._label}"
        with self.schedule.everything():
            backend.fence(label)  # all ranks have read the slices before any rank writes them
            try:
                yield
            finally:
                backend.broadcast(self._table.parameters, 0, label)
                self._write_slices()
                self.schedule.accept_writes()
        backend.fence(label)
        self._gather_pinned_anew()

    def _gather_pinned_anew(self) -> None:
        """Gather the units that stay whole. Collective where gathers are."""
        self.schedule.gather_pinned()

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        try:
            with self.schedule.everything():
                yield
        finally:
            self.schedule.gather_pinned()


class UnitMemory(ReleasedParameters):
    """Parameters of a table, sliced and released. Making it is collective; values are rank 0's.

    `coded`: units are gathered from records of 8-bit integers, which each rank encodes from its float32 slices after
    every step. Memory of a rank: its slices, their 16-bit casts or records, and the pages of units that are whole at
    once. Pages for the outermost unit and the largest other one are kept between uses.
    """

    is_mapped = True

    def __init__(self, backend: Backend, reducer: Reducer, request: Request, *, coded: bool = False) -> None:
        super().__init__(backend, reducer, request)
        group, slicing, table, label = backend.group, self._slicing, self._table, self._label
        plans = request.plans or ()
        self._group, self.one_copy = group, group.is_apart(slicing)
        self._home = group.home_of(slicing)
        #: compute dtypes of parameters that have 16-bit slices
        self._narrow = {} if coded else {i: d for i, d in request.compute_dtypes.items() if i in self._released}
        self._plan_slices()
        what = f"slices of the parameters of {label}"
        self._arena = group.comm.arena(self._part_bytes + OUTCOME_BYTES * group.world_size, what, of_hosts=True)
        self._outcomes: list[tuple[int, torch.Tensor]] = []
        if group.host_count == 1 and not slicing.is_replicated:  # only then can publish() carry `failed`
            self._outcomes = outcome_sets(self._arena, self._part_bytes, group.world_size, 0)
        self._populate()
        self._codes: Arena | None = None
        if coded:
            size = -(-self._slice_bytes // (4 * _BLOCK)) * block_record_bytes(_BLOCK, _BITS)
            self._codes = group.comm.arena(max(size, _ALIGNMENT), f"records of the parameters of {label}")
        if request.building is None:
            group.broadcast(table.parameters, 0, f"parameters of {label}")
        for parameter in table.parameters:
            make_dense(parameter)
        self._slices = {index: self._slice(index) for index in range(len(table.parameters))}
        if request.building is None:
            self._write_slices()
        else:
            request.building.fill(self, table, plans, group.comm)
            self._derive()
        self._refreshed = [
            (i, p, self._owned(i)) for i, p in enumerate(table.parameters) if i not in self._released and p.numel()
        ]
        self._make_schedule(self._make_units(plans), plans, coded=coded)
        group.comm.barrier(f"slices of the parameters of {label}")

    def _plan_slices(self) -> None:
        """Plan the first byte of each bucket, in a rank's part (its slice of each) or in the host's copy."""
        self._offsets: list[int] = []
        self._part_bytes = self._slice_bytes = 0
        for bucket in range(self._reducer.bucket_count):
            begin, numel, dtype, _ = self._reducer.bucket_shape(bucket)
            self._offsets.append(begin if self.one_copy else self._slice_bytes)
            self._slice_bytes += numel // self._slicing.count * itemsize_of(dtype)
            self._part_bytes = begin + numel * itemsize_of(dtype) if self.one_copy else self._slice_bytes
        self._narrow_offsets: dict[int, int] = {}
        for bucket in sorted({self._reducer.place(index)[0] for index in self._narrow}):
            numel = self._reducer.bucket_shape(bucket)[1]
            self._narrow_offsets[bucket] = self._part_bytes
            self._part_bytes += _aligned((numel if self.one_copy else numel // self._slicing.count) * _NARROW_BYTES)
        for index, parameter in enumerate(self._table.parameters):
            if parameter.requires_grad:
                self.adopt(index)

    def _populate(self) -> None:
        buckets = [self._reducer.bucket_shape(bucket)[:3] for bucket in range(self._reducer.bucket_count)]
        if not self.one_copy:
            populate(self._arena, [(0, self._part_bytes)])
        elif self._group.rank == self._home:
            ranges = [(offset, numel * itemsize_of(dtype)) for offset, numel, dtype in buckets]
            ranges += [(offset, buckets[b][1] * _NARROW_BYTES) for b, offset in self._narrow_offsets.items()]
            populate(self._arena, ranges)

    def _place(self, bucket: int, rank: int, *, narrow: bool = False) -> tuple[int, int]:
        """Return (rank, first byte): the part that holds a rank's slice or its 16-bit cast, and where."""
        _, numel, dtype, _ = self._reducer.bucket_shape(bucket)
        offset = self._narrow_offsets[bucket] if narrow else self._offsets[bucket]
        if not self.one_copy:
            return rank, offset
        width = numel // self._slicing.count
        item = _NARROW_BYTES if narrow else itemsize_of(dtype)
        return self._home, offset + self._slicing.of_rank[rank] * width * item

    def _encode(self) -> None:
        """Encode records from this rank's float32 slices. No unit may be gathered meanwhile."""
        if self._codes is None:
            return
        places = [
            from_dlpack(arena.tensor(0, "uint8", [1], None, self._group.rank)).data_ptr()
            for arena in (self._arena, self._codes)
        ]
        for bucket, offset in enumerate(self._offsets):
            _, numel, dtype, _ = self._reducer.bucket_shape(bucket)
            if dtype == "float32":
                record = offset // (4 * _BLOCK) * block_record_bytes(_BLOCK, _BITS)
                numel //= self._slicing.count
                block_encode(_BLOCK, _BITS, places[1] + record, places[0] + offset, 0, numel)

    def _slice(self, index: int, rank: int | None = None, *, narrow: bool = False) -> torch.Tensor:
        """Return the elements of a parameter that a rank owns (default: this rank), or their cast; may be empty."""
        rank = self._group.rank if rank is None else rank
        bucket, first, count = self.run_in_slice(index, rank)
        dtype = dtype_name(self._narrow[index]) if narrow else self._reducer.bucket_shape(bucket)[2]
        part, offset = self._place(bucket, rank, narrow=narrow)
        return engine_tensor(self._arena.tensor(offset + first * itemsize_of(dtype), dtype, [count], None, part))

    @functools.cached_property
    def _casts(self) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        """Return (index, 16-bit slice, slice) of each slice that this rank casts: its own, or its part of the host's
        copy.
        """
        if not self.one_copy:
            pairs = [(i, self._slice(i, narrow=True), self._slices[i]) for i in self._narrow]
            return [pair for pair in pairs if pair[1].numel()]
        beside = self._group.sharers(self._slicing)
        mine = sorted(self._narrow)[beside.index(self._group.rank) :: len(beside)]
        return [pair for index in mine for pair in self._casts_of(index)]

    def _casts_of(self, index: int) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        pairs = zip(self._owned(index, narrow=True), self._owned(index))
        return [(index, narrow, piece) for (_, _, narrow), (_, _, piece) in pairs]

    def _cast(self) -> None:
        """Cast slices after a step. No unit may be gathered meanwhile."""
        for index, narrow, piece in self._casts:
            if self.is_stepped(index):
                narrow.copy_(piece)

    def _owned(self, index: int, *, narrow: bool = False) -> list[tuple[int, int, torch.Tensor]]:
        """Return (low, high, slice or its cast) of every rank of this replica that owns some of a parameter."""
        runs = [(rank, *self.run(index, rank)) for rank in self._slicing.replica()]
        return [(low, high, self._slice(index, rank, narrow=narrow)) for rank, low, high in runs if low < high]

    def _write_slices(self) -> None:
        super()._write_slices()
        self._derive()

    def write_slices(self, indices: Iterable[int]) -> None:
        """Copy this rank's elements of whole parameters; the rank that has the host's one copy fills all of it."""
        if not self.one_copy:
            super().write_slices(indices)
        elif self._group.rank == self._home:
            for index in indices:
                data = self._table.parameters[index].data
                self.write_whole(index, memory_order(data, data))

    def read_slices(self, indices: Iterable[int]) -> None:
        """Copy these parameters from all ranks' slices to the memory where they are whole now."""
        for index in indices:
            data = self._table.parameters[index].data
            flat = memory_order(data, data)
            for low, high, piece in self._owned(index):
                flat[low:high] = piece

    def pieces(self, index: int) -> list[tuple[int, int, torch.Tensor]]:
        if not self.one_copy:
            return [(*self.own_run(index), self._slices[index])]
        first, end = share_of(self._group, self._slicing, self.like(index).numel())
        cut = [(max(low, first), min(high, end), low, piece) for low, high, piece in self._owned(index)]
        return [(a, b, piece[a - low : b - low]) for a, b, low, piece in cut if a < b]

    @contextlib.contextmanager
    def filling(self) -> Iterator[None]:
        comm, label = self._group.comm, f"loaded parameters of {self._label}"
        self.schedule.release_all()
        comm.barrier(label)  # no rank gathers the old values any longer
        yield
        comm.barrier(label)
        self._derive()
        with torch.no_grad():
            self.read_slices(i for i in range(len(self._table.parameters)) if i not in self._released)
        self.schedule.accept_writes()
        comm.barrier(label)
        self._gather_pinned_anew()

    def _derive(self) -> None:
        """Make casts and records of slices."""
        casts = self._casts
        if self.one_copy:  # the host's other ranks do not see this rank's writes yet
            mine = self._narrow if self._group.rank == self._home else ()
            casts = [cast for index in mine for cast in self._casts_of(index)]
        for _, narrow, piece in casts:
            narrow.copy_(piece)
        self._encode()

    def _make_units(self, plans: Sequence[UnitPlan]) -> Units:
        members = self._unit_members
        forms: list[tuple[int, Collection[int]]] = [(number, ()) for number in range(len(plans))]
        forms += [(number, self._narrow) for number, indices in enumerate(members) if self._narrow.keys() & indices]
        specs, places = [], []
        sizes = [0] * len(plans)
        for form, (number, narrow) in enumerate(forms):
            size, runs, offsets = self._plan_unit(members[number], narrow)
            specs.append((plans[number].name or self._label, size, runs))
            places += [(index, form, offset) for index, offset in offsets.items()]
            sizes[number] = size  # its compute form comes later and overwrites this
        self._unit_sizes = [(plan.name, size) for plan, size in zip(plans, sizes)]
        spans = [-(-size // _CHUNK_BYTES) * _CHUNK_BYTES for size in sizes]
        kept = sum(span for plan, span in zip(plans[1:], spans[1:]) if not plan.reshard_after_forward)
        self._unit_bytes = spans[0] + max([kept, *spans[1:]])
        codes = {} if self._codes is None else {"codes": self._codes}
        units = Units(self._arena, specs, self._unit_bytes, f"units of {self._label}", **codes)
        for index, form, offset in places:
            data = self._table.parameters[index].data
            strides = dense_strides(data)
            assert strides is not None
            is_computed_with = form >= len(plans)
            dtype = self._narrow.get(index, data.dtype) if is_computed_with else data.dtype
            capsule = units.tensor(form, offset, data.numel(), dtype_name(dtype), list(data.shape), list(strides))
            (self._computed_with if is_computed_with else self._whole)[index] = engine_tensor(capsule)
        return units

    def _plan_unit(
        self, indices: list[int], narrow: Collection[int] = ()
    ) -> tuple[int, list[tuple[int, int, int, int, bool]], dict[int, int]]:
        """Return the bytes of a unit, its runs, and the first byte of each parameter; those of `narrow` are 16-bit.

        Neighbours in a bucket stay neighbours in the unit.
        """
        size, offsets = 0, {}
        pieces: list[list[int]] = []  # bucket, bytes of an element, first and last element, target of the first element
        for index in sorted(indices, key=lambda index: self._reducer.place(index)[:2]):
            bucket, begin, numel = self._reducer.place(index)
            own = itemsize_of(self._reducer.bucket_shape(bucket)[2])
            item = _NARROW_BYTES if index in narrow else own
            step = _ALIGNMENT * item // own  # neighbours in the bucket are aligned to it
            if pieces and pieces[-1][:2] == [bucket, item] and _aligned(pieces[-1][3] * item, step) == begin * item:
                pieces[-1][3] = begin + numel
            else:
                size = _aligned(size)
                pieces.append([bucket, item, begin, begin + numel, size])
            offsets[index] = size
            size += _aligned(numel * item, step)
        runs = []
        for bucket, item, begin, end, target in pieces:
            _, numel, dtype, _ = self._reducer.bucket_shape(bucket)
            width = numel // self._slicing.count
            coded = self._codes is not None and dtype == "float32"
            for rank in self._slicing.replica():
                first = self._slicing.of_rank[rank] * width
                low, high = max(begin, first), min(end, first + width)
                if low < high:
                    part, offset = self._place(bucket, rank, narrow=item != itemsize_of(dtype))
                    source = offset + (low - first) * item
                    runs.append((target + (low - begin) * item, part, source, (high - low) * item, coded))
        return size, runs, offsets

    # the interface of both kinds of memory for the optimizer and the replica

    def adopt(self, index: int) -> None:
        """Note that a parameter trains: frozen ones are sliced from the start."""
        self._stepped.add(self._reducer.place(index)[0])

    def is_moved(self, index: int) -> bool:
        return True

    def take_writes(self) -> None:
        """Update this rank's slices of parameters that are never released from their current values.

        The program may have written to them, equally on all ranks (a clamped temperature). Called at the start of a
        step, when no rank reads slices.
        """
        with torch.no_grad():
            for index, parameter, _ in self._refreshed:
                low, high = self.own_run(index)
                if low < high and self.is_stepped(index):
                    self._slices[index].copy_(memory_order(parameter.data, parameter.data)[low:high])

    def read_whole(self, index: int, flat: torch.Tensor) -> None:
        """Copy all elements of a parameter, in memory order, to `flat`; a released parameter's from every rank's
        slices.
        """
        if index not in self._whole:
            data = self._table.parameters[index].data
            flat.copy_(memory_order(data, data))
            return
        for low, high, piece in self._owned(index):
            flat[low:high] = piece

    def write_whole(self, index: int, flat: torch.Tensor) -> None:
        """Copy `flat` to the slices, or with several hosts to this host's copy of them.

        One rank calls it for each parameter, between the two barriers of a step.
        """
        for low, high, piece in self._owned(index):
            piece.copy_(flat[low:high])

    def publish(self, *, sliced: bool = True, failed: bool | None = None) -> list[int] | None:
        """Publish slices that every rank has updated. Whole units become stale; their next use gathers them.
        Collective.

        Return which ranks passed `failed`, or None if the barrier does not carry that. `sliced`: each rank has updated
        its own slices alone, which other hosts lack; else ranks may have updated any slice of the host. Cost: one
        barrier (two with records, or with casts over hosts or after updates of any slice), and the bytes of
        never-released parameters. Each host sends its ranks' updates to the others once.
        """
        comm, label = self._group.comm, f"updated parameters of {self._label}"
        outcomes = self._outcomes if failed is not None else []
        if outcomes:
            outcomes.reverse()
            outcomes[0][1][self._group.rank, 0] = bool(failed)
        self.schedule.release_all()
        if self._codes is not None:
            comm.barrier(f"updated slices of {self._label}")  # slices of any rank
            self._encode()
        if self._narrow and not self.one_copy:
            if not sliced:
                comm.barrier(f"updated slices of {self._label}")
            self._cast()
        if self.one_copy and sliced and self._stepped:
            shapes = {bucket: self._reducer.bucket_shape(bucket) for bucket in sorted(self._stepped)}
            ranges = [(self._offsets[b], numel * itemsize_of(dtype)) for b, (_, numel, dtype, _) in shapes.items()]
            comm.all_gather(self._arena, ranges, label, one_copy=True, slices=self._slicing.for_engine())
        else:
            comm.barrier(label)
        if self._narrow and self.one_copy:
            self._cast()
            comm.barrier(f"casts of {self._label}")
        self._refresh()
        return outcomes[0][1][:, 0].tolist() if outcomes else None

    def publish_all(self) -> None:
        stepped, self._stepped = self._stepped, set(range(self._reducer.bucket_count))
        try:
            super().publish_all()
        finally:
            self._stepped = stepped

    def _refresh(self) -> None:
        with torch.no_grad():
            for index, parameter, owned in self._refreshed:
                if not self.is_stepped(index):
                    continue
                flat = memory_order(parameter.data, parameter.data)
                for low, high, piece in owned:
                    flat[low:high].copy_(piece)
        self.schedule.gather_pinned()

    @property
    def bytes_held(self) -> int:
        return self._part_bytes

    def plan(self) -> dict[str, Any]:
        return {**super().plan(), **({} if self._codes is None else {"gather": "int8"})}

    def give_back(self, together: bool = False) -> None:
        """Return whole parameters to this rank. Not collective: slices are read in place."""
        self.schedule.surrender()


def _aligned(nbytes: int, alignment: int = _ALIGNMENT) -> int:
    return -(-nbytes // alignment) * alignment


def releasable(request: Request) -> list[list[int]]:
    """Return the parameters that each unit of a request with plans releases."""
    assert request.plans is not None
    parameters = request.table.parameters
    return [[index for index in plan.indices if _can_be_released(parameters[index])] for plan in request.plans]


def _can_be_released(parameter: torch.Tensor) -> bool:
    """Return whether releasing the parameter saves memory; 0xff is no byte of a bool."""
    return parameter.dtype is not torch.bool and parameter.numel() * parameter.element_size() > _SMALL_BYTES
