"""Sliced parameters, gathered in units while they are used: private parameters at zero=3, on a host.

What is common to hosts and GPUs (parameters/device_groups.py) is in ReleasedParameters. The engine's Store has each
rank's slice of a parameter in memory that the host's ranks map. A range of addresses has pages only while its unit is
whole. A 16-bit compute dtype has both, too (docs/design/store.md). A released parameter's data is
one NaN of its own, expanded to its shape. With several hosts each host has a copy of all slices, so a unit is gathered
without a message. The schedule (parameters/unshard_schedule.py) decides when units are gathered and released.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .._engine import Error, Reducer, StateFile, Store
from ..layout.param_groups import UnitPlan, mark_of
from ..layout.shard_runs import Copies, Storage, make_dense, memory_order
from ..layout.views import dtype_name
from ..torch_compat.autograd import unguarded
from ..torch_compat.engine_storage import engine_tensor
from ..torch_compat.weak import weakly
from .gather_extensions import Extensions
from .gathered_unit import Member
from .sharded_parameter import sharded_of
from .unshard_schedule import UnitSchedule

if TYPE_CHECKING:
    from ..backend.base import Backend, Request

#: parameters of at most this many bytes are never released: a gather costs more than the memory is worth
_SMALL_BYTES = 128
#: bytes written to a file's pages, after which they begin to leave memory
_SETTLED_BYTES = 64 << 20


class ReleasedParameters(Storage):
    """Parameters in units, which a schedule gathers and releases; the code common to hosts and GPUs."""

    releases = True
    schedule: UnitSchedule
    #: makes the ranks' slices visible; collective on hosts
    _meet: Callable[[], None]

    def __init__(self, backend: Backend, reducer: Reducer, request: Request) -> None:
        super().__init__(reducer, request.table, request.slicing, request.label)
        self._backend = backend
        #: of fully_shard
        self.rows = list(map(sharded_of, request.table.parameters)) if request.table.is_by_rows else []
        #: called when a program has put another DTensor into the place of one
        self.on_adoption: Callable[[], Callable[[], None] | None] = type(None)
        #: the parameters that each unit releases
        self._unit_members = releasable(request)
        self._released = {index for each in self._unit_members for index in each}
        #: the parameters with an all-gather extension, of which no unit has memory
        self._extended = {index for index, each in enumerate(self.rows) if each.is_extended}
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
        abort, reducer = self._backend.abort, self._reducer
        self._unit_rows = [[self.rows[index] for index in plan.indices] for plan in plans] if self.rows else []
        self.schedule = UnitSchedule(units, plans, members, abort, compute_members=compute_members, **options)
        reducer.send_first(True)
        self.schedule.rounds = lambda: reducer.rounds
        self.schedule.on_nested_backward = functools.partial(reducer.send_first, False)
        for table in (self._table.parameters, self._table.module_parameters):
            self.schedule.number_of.update({id(each): number for number, each in enumerate(table)})
        for number, plan in enumerate(plans):
            for mark in filter(None, map(mark_of, plan.modules)):
                mark.join(self.schedule, number)

    def show_rows(self) -> None:
        """Show released parameters of fully_shard as DTensors over this rank's slices from now on."""
        for index, each in enumerate(self.rows):
            each.lie_in(self.own_slice(index))
        self.schedule.show_rows(self._unit_rows, weakly(self.meet))

    def own_slice(self, index: int) -> torch.Tensor:
        """Return this rank's elements of a parameter; may be empty."""
        return self._slices[index]

    def meet(self) -> None:
        """Make visible to all ranks what a program wrote to the DTensors of this one. Collective."""
        with unguarded():
            changed = [each for each in self.rows if each.has_changed()]
        adopted = self.on_adoption() if any([each.adopt() for each in changed]) else None
        if adopted is not None:
            adopted()
        self._meet()

    def is_released(self, index: int) -> bool:
        """Return whether a parameter is whole only while its unit runs."""
        return index in self._released or index in self._extended

    def slice(self, index: int) -> torch.Tensor | None:
        """Return this rank's elements of a parameter; None if it owns none. Empty ones belong to the first slice."""
        if index in self._extended:
            self.rows[index].check_values("a read of slices")
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
        if self._extended:
            raise Error(
                f"full_parameters(writable=True): parameter {self._table.names[min(self._extended)]!r} has an all-gather extension, of which a whole "
                "value is no value to keep: write to its DTensor"
            )
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
        if self.rows:
            self._backend.fence(f"reads of the parameters of {self._label}")


class UnitMemory(ReleasedParameters):
    """Parameters of a table, sliced and released. Making it is collective; values are rank 0's.

    `coded`: units are gathered from records of 8-bit integers, which each rank encodes from its float32 slices after
    every step. Memory of a rank: its slices, their 16-bit casts or records, and the pages of units that are whole at
    once. Pages for the outermost unit and the largest other one are kept between uses. `folder`: slices, casts and
    records lie in a file there, of the host's first rank, whose pages leave memory after each step.
    """

    is_mapped = True

    def __init__(
        self, backend: Backend, reducer: Reducer, request: Request, *, coded: bool = False, folder: str | None = None
    ) -> None:
        super().__init__(backend, reducer, request)
        self._folder, self._unsettled, self.is_in_file = folder, 0, folder is not None
        group, table, label = backend.group, self._table, self._label
        plans = request.plans or ()
        units = zip(plans, self._unit_members)
        self._comm, self._coded = group.comm, coded
        self._kinds = [(p.dtype, p.numel()) for p in table.parameters]
        self._store = Store(
            reducer,
            "units",
            group.host_of,
            label,
            slices=self._slicing.for_engine(),
            narrow=[(index, dtype_name(dtype)) for index, dtype in request.compute_dtypes.items()],
            units=[(plan.name or label, members, not plan.reshard_after_forward) for plan, members in units],
            coded=coded,
            folder=folder,
        )
        self.one_copy = self._store.one_copy
        self.adopt: Any = self._store.adopt
        self.is_stepped: Any = self._store.is_stepped
        self._unit_bytes = self._store.unit_bytes
        self._unit_sizes = [(plan.name, size) for plan, size in zip(plans, self._store.unit_sizes())]
        if request.building is None:
            group.broadcast(table.parameters, 0, f"parameters of {label}")
        for parameter in table.parameters:
            make_dense(parameter)
        self._slices = {index: engine_tensor(self._store.slice(index)) for index in range(len(table.parameters))}
        if request.building is None:
            self._write_slices()
        else:
            request.building.fill(self, table, plans, group.comm)
            self._store.derive()
        for index in self._released:
            data = table.parameters[index].data
            for narrow, found in ((False, self._whole), (True, self._computed_with)):
                capsule = self._store.whole(index, list(data.shape), list(data.stride()), narrow)
                if capsule is not None:
                    found[index] = engine_tensor(capsule)
        #: the parameters that are never released
        self._kept = [(i, p) for i, p in enumerate(table.parameters) if not self.is_released(i) and p.numel()]
        self._make_schedule(self._store, plans, coded=coded)
        extended = [self.rows[index].leaf for index in sorted(self._extended)]
        self._extensions = Extensions(group, self._slicing, extended, label) if extended else None
        self._comm.barrier(f"slices of the parameters of {label}")

    def is_moved(self, index: int) -> bool:
        return True

    def _meet(self) -> None:
        """Make the ranks' slices visible, casts and other hosts included. Cost: a barrier, or a gather between hosts."""
        self._store.publish(None, all=True)
        if self._extensions is not None:  # no rank reads the old outputs any longer
            self._extensions.write()

    @property
    def bytes_held(self) -> int:
        return self._store.bytes_held

    def plan(self) -> dict[str, Any]:
        coded = {"gather": "int8"} if self._coded else {}
        home = {"parameters_home": f"nvme:{self._folder}: a {self._store.home}"} if self._folder else {}
        return {**super().plan(), **coded, **home}

    # values ---------------------------------------------------------------------------------------------------------

    def _write_slices(self) -> None:
        super()._write_slices()
        self._store.derive()

    def write_slices(self, indices: Iterable[int]) -> None:
        """Copy this rank's elements of whole parameters; the rank that has the host's one copy fills all of it."""
        for index in indices:
            flat = self._as_made(index, self._table.parameters[index])
            self._store.write(index, flat.data_ptr(), "mine")
            self.note_written(index)

    def note_written(self, index: int) -> None:
        low, high = self.own_run(index)
        self._unsettled += (high - low) * self._kinds[index][0].itemsize if self.is_in_file else 0
        if self._unsettled >= _SETTLED_BYTES:
            self._unsettled = 0
            self._store.settle()

    def leave_with(self, file: StateFile) -> None:
        """Let the pages of slices leave memory batch by batch, in steps on the state in `file`."""
        file.let_go(self._store)

    def _as_made(self, index: int, parameter: torch.Tensor) -> torch.Tensor:
        """Return a parameter's values in memory order and in its own dtype: a program may have replaced its data.

        Raises Error for another number of elements.
        """
        dtype, numel = self._kinds[index]
        if parameter.numel() != numel:
            raise Error(
                f"the data of parameter {self._table.names[index]!r} has {parameter.numel()} elements, and had {numel} when the module "
                "was wrapped: write into it instead of replacing it"
            )
        data = parameter.data
        return memory_order(data, data).to(dtype)

    def _read(self, index: int, flat: torch.Tensor) -> None:
        """Copy a parameter from all ranks' slices to one-dimensional memory of any dtype."""
        dtype, numel = self._kinds[index]
        if flat.dtype is dtype and flat.numel() == numel and flat.is_contiguous():
            self._store.read(index, flat.data_ptr())
            return
        own = torch.empty(numel, dtype=dtype, device="cpu")
        self._store.read(index, own.data_ptr())
        flat.copy_(own)

    def read_slices(self, indices: Iterable[int]) -> None:
        """Copy these parameters from all ranks' slices to the memory where they are whole now."""
        for index in indices:
            parameter = self._table.parameters[index]
            make_dense(parameter)
            self._read(index, memory_order(parameter.data, parameter.data))

    def read_whole(self, index: int, flat: torch.Tensor) -> None:
        """Copy all elements of a parameter, in memory order, to `flat`; a released one's from every rank's slices."""
        if self.is_released(index):
            if index in self._extended:
                self.rows[index].check_values("a read of whole parameters")
            self._read(index, flat)
        else:
            data = self._table.parameters[index].data
            flat.copy_(memory_order(data, data))

    def write_whole(self, index: int, flat: torch.Tensor) -> None:
        """Copy `flat` to the host's slices. One rank calls it for each parameter, between the two barriers of a step."""
        self._store.write(index, self._as_made(index, flat).data_ptr(), "all")

    def pieces(self, index: int) -> list[tuple[int, int, torch.Tensor]]:
        return [(low, high, engine_tensor(memory)) for low, high, memory in self._store.pieces(index)]

    @contextlib.contextmanager
    def filling(self) -> Iterator[None]:
        label = f"loaded parameters of {self._label}"
        self.schedule.release_all()
        self._comm.barrier(label)  # no rank gathers the old values any longer
        yield
        self._comm.barrier(label)
        self._store.derive()
        self.read_slices(index for index, _ in self._kept)
        self.schedule.accept_writes()
        self._comm.barrier(label)
        self._gather_pinned_anew()

    def take_writes(self, *, everything: bool = False) -> None:
        """Update this rank's slices of never released parameters, which the program may have written to, before a step."""
        for index, parameter in self._kept:
            if everything or self.is_stepped(index):
                flat = memory_order(parameter.data, parameter.data)
                if (flat.dtype, flat.numel()) != self._kinds[index]:
                    flat = self._as_made(index, parameter)
                self._store.write(index, flat.data_ptr(), "own")

    def publish(self, *, sliced: bool = True, failed: bool | None = None, everything: bool = False) -> list[int] | None:
        """Publish slices that every rank has updated. Whole units become stale; their next use gathers them.
        Collective.

        Return which ranks passed `failed`, or None if the barrier does not carry that. `sliced`: each rank has updated
        its own slices alone, which other hosts lack; else ranks may have updated any slice of the host. Cost: one
        barrier (two with records, or with casts over hosts or after updates of any slice), and the bytes of
        never-released parameters. Each host sends its ranks' updates to the others once.
        """
        self.schedule.release_all()
        outcomes = self._store.publish(failed, foreign=not sliced, all=everything)
        for index, parameter in self._kept:
            if everything or self.is_stepped(index):
                flat = memory_order(parameter.data, parameter.data)
                address = flat.data_ptr()
                if (flat.dtype, flat.numel()) == self._kinds[index] and address == parameter.data_ptr():
                    self._store.read(index, address)
                else:
                    self.read_slices([index])
        self.schedule.gather_pinned()
        return outcomes

    def publish_all(self) -> None:
        self.take_writes(everything=True)
        self.publish(everything=True)

    def give_back(self, together: bool = False) -> None:
        """Return whole parameters to this rank. Not collective: slices are read in place."""
        self.schedule.surrender()


def releasable(request: Request) -> list[list[int]]:
    """Return the parameters that each unit of a request with plans releases."""
    assert request.plans is not None
    parameters, is_by_rows = request.table.parameters, request.table.is_by_rows
    return [
        [i for i in plan.indices if (_is_cut(parameters[i]) if is_by_rows else _can_be_released(parameters[i]))]
        for plan in request.plans
    ]


def _is_cut(parameter: torch.Tensor) -> bool:
    """Return whether a unit has memory for a parameter of fully_shard."""
    sharded = sharded_of(parameter)
    return bool(parameter.numel()) and (sharded is None or not sharded.is_extended)


def _can_be_released(parameter: torch.Tensor) -> bool:
    """Return whether releasing the parameter saves memory; 0xff is no byte of a bool."""
    return parameter.dtype is not torch.bool and parameter.numel() * parameter.element_size() > _SMALL_BYTES
