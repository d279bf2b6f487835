"""Parameters on a GPU of which a rank keeps its slices, gathered in units while they are used (zero=3).

A unit's buckets hold only its parameters, so gathering it is one all-gather a bucket, from slices into a place: GPU
memory that units share. The outermost unit and those that stay whole after their forward have a place each. Of the
others, those inside equally many units take turns with two. A released parameter's data is one NaN, its own, expanded
to its shape. Parameters that are never released lie as at zero=2 (ParameterMemory).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from .._engine import DeviceUnits, Reducer
from ..backend.device_link import DeviceLink, alias
from ..layout.param_groups import UnitPlan
from ..layout.param_table import ParameterTable
from ..layout.shard_runs import itemsize_of, make_dense
from ..layout.views import dtype_name
from ..torch_compat import cuda
from .prefetch import DeviceUnitSchedule, Places
from .released import ReleasedParameters, releasable
from .storage import ParameterMemory

if TYPE_CHECKING:
    from ..backend.base import Backend, Request


def rows_in_groups(table: ParameterTable, plans: Sequence[UnitPlan]) -> list[tuple[str, int, str, bool, int]]:
    """Return the rows of a reducer whose buckets each hold parameters of one unit, or parameters that are never
    released."""
    groups = {index: number for number, members in enumerate(releasable(table, plans), 1) for index in members}
    return [(*row, groups.get(index, 0)) for index, row in enumerate(table.rows())]


def choose_places(plans: Sequence[UnitPlan], sizes: Sequence[int]) -> list[int]:
    """Return the place of each unit; units without bytes may share any."""
    places: list[int] = []
    shared: dict[int, list[int]] = {}  # by depth of nesting: the places, and the next in turn
    count = 0
    for plan, size in zip(plans, sizes):
        depth = sum(any(plan.name.startswith(f"{name}.") for name in other.names) for other in plans[1:])
        turns = shared.setdefault(depth, [])
        if not plan.reshard_after_forward or not size:
            places.append(count)
            count += 1
        elif len(turns) < 2:
            turns.append(count)
            places.append(count)
            count += 1
        else:
            turns.reverse()
            places.append(turns[1])
    return places


class DeviceUnitMemory(ReleasedParameters, ParameterMemory):
    """Parameters of a table on the GPU, sliced and released. Making it is collective; values are rank 0's.

    Parameters
    ----------
    backend : Backend
    row : DeviceLink
        The link over which a unit is gathered.
    reducer : Reducer
        A reducer made with rows_in_groups().
    request : Request
        A request with plans of units.

    Notes
    -----
    Memory a rank: its slices, the places, and parameters that are never released.
    """

    schedule: DeviceUnitSchedule

    def __init__(self, backend: Backend, row: DeviceLink, reducer: Reducer, request: Request) -> None:
        plans, table, link = request.plans, request.table, backend.link
        assert plans is not None and link is not None
        members = releasable(table, plans)
        self._link, self._row = link, row
        self._released = {index for each in members for index in each}
        self._pieces: dict[int, torch.Tensor] = {}  # a bucket's slice
        self._stepped_slices: set[int] = set()  # buckets with released parameters that train, or have trained
        self._whole = {}
        link.broadcast(table.parameters, 0)
        super().__init__(backend, reducer, request, shared=False)
        for index in self._released:
            make_dense(table.parameters[index])
        self._slices = {index: self._slice(index) for index in sorted(self._released)}
        self._write_slices()
        engine = self._make_units(plans, members)
        self._places = Places(engine, link.current_stream, weakref.WeakMethod(self._make_apart))
        self._places.update()
        self.schedule = DeviceUnitSchedule(
            self._places, plans, [self._members(each) for each in members], backend.abort, places=self._numbers
        )
        self._tell_marks(plans)

    # layout

    def _slice(self, index: int) -> torch.Tensor:
        """Return this rank's elements of a parameter; may be empty."""
        bucket, first, count = self.run_in_slice(index, self._slicing.rank)
        if bucket not in self._pieces:
            _, numel, dtype, _ = self._reducer.bucket_shape(bucket)
            like = self._table.parameters[index].data
            self._pieces[bucket] = cuda.runtime.zeros(numel // self._slicing.count, getattr(torch, dtype), like)
        return self._pieces[bucket][first : first + count]

    def _make_units(self, plans: Sequence[UnitPlan], members: Sequence[list[int]]) -> DeviceUnits:
        self._at: list[dict[int, int]] = []  # for each unit: bucket -> first byte
        self._sizes: list[int] = []
        for indices in members:
            at, size = {}, 0
            for bucket in sorted({self._reducer.place(index)[0] for index in indices}):
                _, numel, dtype, _ = self._reducer.bucket_shape(bucket)
                at[bucket], size = size, size + numel * itemsize_of(dtype)
            self._at.append(at)
            self._sizes.append(size)
        self._unit_members = members
        self._unit_sizes = [(plan.name, size) for plan, size in zip(plans, self._sizes)]
        self._numbers = choose_places(plans, self._sizes)
        spans = [0] * (max(self._numbers) + 1)
        for place, size in zip(self._numbers, self._sizes):
            spans[place] = max(spans[place], size)
        self._unit_bytes = sum(spans)
        like = self._table.parameters[0].data
        self._like = cuda.runtime.zeros(0, torch.uint8, like)
        memory = [cuda.runtime.zeros(span, torch.uint8, like) for span in spans]
        specs = []
        for number, (plan, place, at) in enumerate(zip(plans, self._numbers, self._at)):
            for index, tensor in zip(members[number], self._tensors(number, memory[place])):
                self._whole[index] = tensor
            runs = [(self._pieces[b].data_ptr(), first, self._pieces[b].nbytes) for b, first in at.items()]
            specs.append((plan.name or self._label, place, memory[place].data_ptr(), runs))
        return DeviceUnits(self._row.comm, len(spans), specs)

    def _tensors(self, unit: int, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return the parameters of a unit in `memory`, each with its own storage."""
        found = []
        for index in self._unit_members[unit]:
            data = self._table.parameters[index].data if index not in self._whole else self._whole[index]
            bucket, begin, _ = self._reducer.place(index)
            address = memory.data_ptr() + self._at[unit][bucket] + begin * data.element_size()
            found.append(alias(self._link, memory, address, dtype_name(data.dtype), data.shape, data))
        return found

    def _make_apart(self, unit: int) -> tuple[int, list[torch.Tensor]]:
        memory = cuda.runtime.zeros(self._sizes[unit], torch.uint8, self._like)
        return memory.data_ptr(), self._tensors(unit, memory)

    @property
    def digest(self) -> int:
        """Return a digest of the units gathered so far, equal on all ranks."""
        return self._places.digest

    # the interface of all memories for the optimizer and the replica

    def adopt(self, index: int) -> None:
        """Do nothing: released parameters are sliced from the start."""
        if index in self._released:
            self._stepped_slices.add(self._reducer.place(index)[0])
        else:
            super().adopt(index)

    def is_stepped(self, index: int) -> bool:
        return self._reducer.place(index)[0] in self._stepped_slices or super().is_stepped(index)

    def is_released(self, index: int) -> bool:
        """Return True if a parameter is whole only while its unit runs."""
        return index in self._released

    def piece(self, index: int) -> torch.Tensor:
        """Return this rank's elements of a released parameter; may be empty."""
        return self._slices[index]

    def is_moved(self, index: int) -> bool:
        return index in self._released or super().is_moved(index)

    def slice(self, index: int) -> torch.Tensor | None:
        """Return this rank's elements of a parameter; None if it owns none."""
        if index not in self._released:
            return super().slice(index)
        piece = self._slices[index]
        return piece if piece.numel() else None

    def publish(self, *, sliced: bool = True, failed: bool | None = None) -> None:
        """Publish slices that every rank has updated on torch's current stream. Collective.

        Units are gathered anew when they are used. `sliced` says that ranks have also updated slices of parameters that
        are never released, and lack one another's. Cost: the bytes of those, and of units that stay whole. Waits for
        nothing.
        """
        if sliced:
            super().publish()
        self._gather_pinned_anew()

    def _gather_pinned_anew(self) -> None:
        """Reset units to their first state. Collective, on joined ranks, too."""
        with self._unannounced():
            self.schedule.release_all()
            self._places.update()
            self.schedule.gather_pinned()

    @contextlib.contextmanager
    def _unannounced(self) -> Iterator[None]:
        announce, self._places.announce = self._places.announce, None
        try:
            yield
        finally:
            self._places.announce = announce

    def announce_units(self, announce: Callable[[int], None] | None) -> None:
        """Inside a join: have `announce` called with a unit before it is gathered."""
        self._places.announce = announce

    def gather_beside(self, unit: int) -> None:
        """Take part, as a joined rank, in a gather of the training ranks. Collective."""
        with self._unannounced():
            self.schedule.gather_beside(unit)

    def gather_anew(self) -> None:
        """Gather units on all ranks as after a step, regardless of the units that each has gathered. Collective."""
        self.schedule.forget_order()
        self._gather_pinned_anew()

    @property
    def bytes_held(self) -> int:
        """Return the bytes of slices, and of parameters that are never released."""
        return super().bytes_held + sum(piece.nbytes for piece in self._pieces.values())

    def give_back(self, together: bool = False) -> None:
        """Return the parameters to this rank: whole if all ranks do this, else unchanged."""
        self.schedule.surrender(together)
