"""Sliced parameters on a GPU, gathered in units while they are used (zero=3).

A unit's buckets hold only its parameters, so gathering it is one all-gather per bucket, from slices into a place: GPU
memory that units share. The outermost unit and each unit that stays whole after its forward have their own place. The
other units of a nesting depth take turns with two places, or with one more than are gathered ahead. The data of a
released parameter is a single NaN, expanded to its shape. Parameters that are never released lie in
ParameterMemory, as at zero=2.

Under a precision policy a unit's place has the size of its compute form: each gather casts this rank's slice into its
part of the place, and gathers the other slices there. The float32 unit itself is then gathered only on request, into
separate memory.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from .._engine import DeviceUnits, Reducer
from ..backend.device_link import DeviceLink, alias
from ..layout.param_groups import UnitPlan, mark_of
from ..layout.shard_runs import itemsize_of, make_dense
from ..layout.views import dtype_name
from ..torch_compat import cuda
from .prefetch import DeviceUnitSchedule, Places
from .released import ReleasedParameters, releasable
from .storage import ParameterMemory

if TYPE_CHECKING:
    from ..backend.base import Backend, Request

#: alignment of buckets in a place
_ALIGNMENT = 128


def narrowed(request: Request, members: Sequence[list[int]]) -> dict[int, torch.dtype]:
    """Return the dtypes of parameters that are cast as they are gathered."""
    released = {index for each in members for index in each}
    parameters = request.table.parameters
    return {
        index: dtype
        for index, dtype in request.compute_dtypes.items()
        if index in released and parameters[index].dtype is torch.float32  # the kernel's unit
    }


def rows_in_groups(request: Request) -> list[tuple[str, int, str, bool, int]]:
    """Return reducer rows such that each bucket holds parameters of one unit and compute dtype, or never-released ones."""
    assert request.plans is not None
    members = releasable(request.table, request.plans)
    narrow = narrowed(request, members)
    kinds = {index: (number, str(narrow.get(index, ""))) for number, each in enumerate(members) for index in each}
    numbers = {kind: number for number, kind in enumerate(sorted(set(kinds.values())), 1)}
    groups = {index: numbers[kind] for index, kind in kinds.items()}
    return [(*row, groups.get(index, 0)) for index, row in enumerate(request.table.rows())]


def choose_places(plans: Sequence[UnitPlan], sizes: Sequence[int], ahead: int = 1) -> list[int]:
    """Return the place of each unit, if `ahead` units are gathered ahead; units without bytes may share any."""
    places: list[int] = []
    shared: dict[int, list[int]] = {}  # by depth of nesting: the places, and the next in turn
    count = 0
    for plan, size in zip(plans, sizes):
        depth = sum(any(plan.name.startswith(f"{name}.") for name in other.names) for other in plans[1:])
        turns = shared.setdefault(depth, [])
        if not plan.reshard_after_forward or not size:
            places.append(count)
            count += 1
        elif len(turns) < max(2, ahead + 1):
            turns.append(count)
            places.append(count)
            count += 1
        else:
            turns.append(turns.pop(0))
            places.append(turns[-1])
    return places


def depth_of(plans: Sequence[UnitPlan], prefetch: int) -> int:
    """Return the number of units gathered ahead: `prefetch`, or as many as a module of fully_shard names."""
    marks = [mark_of(module) for plan in plans for module in plan.modules]
    return max([prefetch, *(len(each) for mark in marks if mark is not None for each in mark.ahead.values())])


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
    Memory of a rank: its slices, the places, and parameters that are never released.
    """

    schedule: DeviceUnitSchedule

    def __init__(self, backend: Backend, row: DeviceLink, reducer: Reducer, request: Request) -> None:
        plans, table, link = request.plans, request.table, backend.link
        assert plans is not None and link is not None
        members = releasable(table, plans)
        self._link, self._row = link, row
        self._released = {index for each in members for index in each}
        self._cast_to = narrowed(request, members)
        self._pieces: dict[int, torch.Tensor] = {}  # a bucket's slice
        self._stepped_slices: set[int] = set()  # buckets with released parameters that train or have trained
        self._whole = {}
        self._computed_with = {}
        link.broadcast(table.parameters, 0)
        super().__init__(backend, reducer, request, shared=False)
        for index in self._released:
            make_dense(table.parameters[index])
        self._depth = depth_of(plans, request.options.prefetch)
        self._plan_places(plans, members)
        self._slices = {index: self._slice(index) for index in sorted(self._released)}
        self._write_slices()
        engine = self._make_units(plans, members)
        self._places = Places(engine, link.current_stream, weakref.WeakMethod(self._make_apart))
        self._places.update()
        self.schedule = DeviceUnitSchedule(
            *(self._places, plans, [self._members(each) for each in members], backend.abort),
            places=self._numbers,
            depth=request.options.prefetch,
            compute_members=[self._compute_members(each) for each in members],
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

    def _plan_places(self, plans: Sequence[UnitPlan], members: Sequence[list[int]]) -> None:
        """Plan the forms of units and the places in which they lie."""
        computed = [number for number, indices in enumerate(members) if self._cast_to.keys() & indices]
        #: the plan of each form, and whether it is a compute form
        self._forms = [(number, False) for number in range(len(plans))] + [(number, True) for number in computed]
        self._unit_members = members
        self._plan_forms()
        sizes = self._sizes[: len(plans)]
        for form, number in enumerate(computed, len(plans)):
            sizes[number] = self._sizes[form]
        self._unit_sizes = [(plan.name, size) for plan, size in zip(plans, sizes)]
        self._numbers = choose_places(plans, sizes, self._depth)
        spans = [0] * (max(self._numbers) + 1)
        for place, size in zip(self._numbers, sizes):
            spans[place] = max(spans[place], size)
        self._unit_bytes, self._spans, self._computed = sum(spans), spans, computed
        self._like = cuda.runtime.zeros(0, torch.uint8, self._table.parameters[0].data)

    def _make_units(self, plans: Sequence[UnitPlan], members: Sequence[list[int]]) -> DeviceUnits:
        """Return the units, then the compute forms. A unit with a compute form leaves its place to that."""
        zeros = cuda.runtime.zeros
        memory = [zeros(span, torch.uint8, self._like) for span in self._spans]
        computed = self._computed
        specs = []
        for form, (number, is_computed_with) in enumerate(self._forms):
            place = self._numbers[number]
            tensors = self._computed_with if is_computed_with else self._whole
            # Tensors of a unit without a place are never read: they only have its shapes, strides and dtypes.
            tensors.update(zip(members[number], self._tensors(form, memory[place])))
            address = 0 if number in computed and not is_computed_with else memory[place].data_ptr()
            specs.append((plans[number].name or self._label, place, address, self._runs_of(form)))
        return DeviceUnits(self._row.comm, len(self._spans), specs)

    def _plan_forms(self) -> None:
        self._at: list[dict[int, tuple[int, str]]] = []  # for each form: bucket -> its first byte and its dtype
        self._sizes: list[int] = []
        for number, is_computed_with in self._forms:
            at: dict[int, tuple[int, str]] = {}
            size = 0
            for index in sorted(self._unit_members[number], key=lambda index: self._reducer.place(index)[0]):
                bucket = self._reducer.place(index)[0]
                _, numel, dtype, _ = self._reducer.bucket_shape(bucket)
                if is_computed_with and index in self._cast_to:
                    dtype = dtype_name(self._cast_to[index])
                if bucket not in at:
                    at[bucket] = size, dtype
                    size += -(-numel * itemsize_of(dtype) // _ALIGNMENT) * _ALIGNMENT
            self._at.append(at)
            self._sizes.append(size)

    def _runs_of(self, form: int) -> list[tuple[int, int, int, str, str]]:
        runs = []
        for bucket, (first, dtype) in self._at[form].items():
            piece, own = self._pieces[bucket], self._reducer.bucket_shape(bucket)[2]
            runs.append((piece.data_ptr(), first, piece.numel() * itemsize_of(dtype), own, dtype))
        return runs

    def _tensors(self, form: int, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return the parameters of a form that lies in `memory`, each with a storage of its own."""
        found = []
        for index in self._unit_members[self._forms[form][0]]:
            data = self._table.parameters[index].data if index not in self._whole else self._whole[index]
            bucket, begin, _ = self._reducer.place(index)
            first, dtype = self._at[form][bucket]
            address = memory.data_ptr() + first + begin * itemsize_of(dtype)
            found.append(alias(self._link, memory, address, dtype, data.shape, data))
        return found

    def _make_apart(self, unit: int) -> tuple[int, list[torch.Tensor]]:
        memory = cuda.runtime.zeros(self._sizes[unit], torch.uint8, self._like)
        return memory.data_ptr(), self._tensors(unit, memory)

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

        The next use of a unit gathers it again. `sliced`: ranks have also updated slices of never-released parameters,
        and lack one another's. Cost: the bytes of those and of units that stay whole. The host does not wait.
        """
        if sliced:
            super().publish()
        self._gather_pinned_anew()

    def _gather_pinned_anew(self) -> None:
        """Reset units to their first state. Collective, joined ranks included."""
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
        """Inside a join: call `announce` with each unit before it is gathered."""
        self._places.announce = announce

    def gather_beside(self, unit: int) -> None:
        """Take part, as a joined rank, in a gather of the training ranks. Collective."""
        with self._unannounced():
            self.schedule.gather_beside(unit)

    def gather_anew(self) -> None:
        """Gather on all ranks the units that are whole after a step, whatever each rank has gathered. Collective."""
        self.schedule.forget_order()
        self._gather_pinned_anew()

    @property
    def bytes_held(self) -> int:
        """Return the bytes of slices, and of parameters that are never released."""
        return super().bytes_held + sum(piece.nbytes for piece in self._pieces.values())

    def give_back(self, together: bool = False) -> None:
        """Give the parameters back to this rank: whole if all ranks call this, else unchanged."""
        self.schedule.surrender(together)
