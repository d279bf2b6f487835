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
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from .._engine import DeviceUnits, Reducer
from ..backend.device_link import DeviceLink, alias
from ..layout.param_groups import UnitPlan, mark_of
from ..layout.shard_runs import itemsize_of, make_dense
from ..layout.views import dtype_name
from ..torch_compat import cuda
from .sharded_groups import ReleasedParameters, releasable
from .storage import ParameterMemory

if TYPE_CHECKING:
    from ..backend.base import Backend, Request

#: alignment of buckets in a place
_ALIGNMENT = 128


def narrowed(request: Request, released: Collection[int]) -> dict[int, torch.dtype]:
    """Return the dtypes of parameters that are cast as they are gathered."""
    parameters = request.table.parameters
    return {
        index: dtype
        for index, dtype in request.compute_dtypes.items()
        if index in released and parameters[index].dtype is torch.float32  # the kernel's unit
    }


def rows_in_groups(request: Request) -> list[tuple[str, int, str, bool, int]]:
    """Return reducer rows such that each bucket holds parameters of one unit and compute dtype, or never-released ones."""
    members = releasable(request)
    narrow = narrowed(request, {index for each in members for index in each})
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


class Places:
    """DeviceUnits with the methods of Units, and a digest of what was gathered, in its order.

    `stream` returns torch's current stream. `make_apart` allocates memory apart for a unit and returns (address,
    tensors). Inside a join `announce` tells joined ranks to gather the same unit.
    """

    def __init__(
        self,
        engine: DeviceUnits,
        stream: Callable[[], int],
        make_apart: weakref.WeakMethod[Callable[[int], tuple[int, list[torch.Tensor]]]],
    ) -> None:
        self._engine, self._stream, self._make_apart = engine, stream, make_apart
        self.holder, self.stats = engine.holder, engine.stats
        self.digest = 0
        self.announce: Callable[[int], None] | None = None

    def _note(self, unit: int) -> None:
        if self.announce is not None:
            self.announce(unit)
        self.digest = zlib.crc32(unit.to_bytes(4, "little"), self.digest)

    def gather(self, unit: int) -> None:
        """Begin to gather a unit into its place."""
        self._note(unit)
        self._engine.gather(unit)

    def take(self, unit: int) -> None:
        """Make torch's current stream wait for a unit."""
        self._engine.take(unit, self._stream())

    def gather_apart(self, unit: int) -> list[torch.Tensor]:
        """Return the unit's tensors in memory apart."""
        make = self._make_apart()
        assert make is not None
        address, tensors = make(unit)
        self._note(unit)
        self._engine.gather_apart(unit, address, self._stream())
        return tensors

    def release(self, unit: int) -> None:
        self._engine.release(unit, self._stream())

    def take_write(self, unit: int) -> int:
        """Return -1: a write through an older view is not seen on a GPU."""
        return -1

    def update(self) -> None:
        """Note that slices were written."""
        self._engine.update(self._stream())


class _Form(NamedTuple):
    """A unit or its compute form: the number of its plan, each bucket's first byte and dtype, and its bytes."""

    number: int
    is_computed_with: bool
    at: dict[int, tuple[int, str]]
    nbytes: int


class DeviceUnitMemory(ReleasedParameters):
    """Parameters of a table on the GPU, sliced and released. Making it is collective; values are rank 0's.

    The reducer is one made with rows_in_groups(); units are gathered over `row`. Memory of a rank: its slices, the
    places, and parameters that are never released.
    """

    def __init__(self, backend: Backend, row: DeviceLink, reducer: Reducer, request: Request) -> None:
        super().__init__(backend, reducer, request)
        table, link, plans = self._table, backend.link, request.plans or ()
        assert link is not None
        self._link, self._row = link, row
        self._cast_to = narrowed(request, self._released)
        self._pieces: dict[int, torch.Tensor] = {}  # a bucket's slice
        link.broadcast(table.parameters, 0)
        #: the parameters that are never released
        self._kept = ParameterMemory(backend, reducer, request, shared=False, without=self._released)
        self.flat = self._kept.flat
        for index in self._released:
            make_dense(table.parameters[index])
            if table.parameters[index].requires_grad:
                self.adopt(index)
        self._plan_places(plans, depth_of(plans, request.options.prefetch))
        self._slices = {index: self._slice(index) for index in sorted(self._released)}
        self._write_slices()
        self._places = Places(self._make_units(plans), link.current_stream, weakref.WeakMethod(self._make_apart))
        self._places.update()
        self._make_schedule(self._places, plans, places=self._numbers, depth=request.options.prefetch)

    # layout

    def _slice(self, index: int) -> torch.Tensor:
        """Return this rank's elements of a parameter; may be empty."""
        bucket, first, count = self.run_in_slice(index, self._slicing.rank)
        if bucket not in self._pieces:
            _, numel, dtype, _ = self._reducer.bucket_shape(bucket)
            like = self._table.parameters[index].data
            self._pieces[bucket] = cuda.runtime.zeros(numel // self._slicing.count, getattr(torch, dtype), like)
        return self._pieces[bucket][first : first + count]

    def _plan_places(self, plans: Sequence[UnitPlan], depth: int) -> None:
        """Plan the forms of units and the places in which they lie."""
        self._forms = [self._plan_form(number, False) for number in range(len(plans))]
        self._forms += [
            self._plan_form(n, True) for n, each in enumerate(self._unit_members) if self._cast_to.keys() & each
        ]
        sizes = [*{form.number: form.nbytes for form in self._forms}.values()]  # a unit's, or its compute form's
        self._unit_sizes = [(plan.name, size) for plan, size in zip(plans, sizes)]
        self._numbers = choose_places(plans, sizes, depth)
        spans = [0] * (max(self._numbers) + 1)
        for place, size in zip(self._numbers, sizes):
            spans[place] = max(spans[place], size)
        self._unit_bytes, self._spans = sum(spans), spans
        self._like = cuda.runtime.zeros(0, torch.uint8, self._table.parameters[0].data)

    def _make_units(self, plans: Sequence[UnitPlan]) -> DeviceUnits:
        """Return the units, then the compute forms. A unit with a compute form leaves its place to that."""
        zeros = cuda.runtime.zeros
        memory = [zeros(span, torch.uint8, self._like) for span in self._spans]
        apart = {form.number for form in self._forms if form.is_computed_with}
        specs = []
        for number, form in enumerate(self._forms):
            place = self._numbers[form.number]
            # Tensors of a unit without a place are never read: they only have its shapes, strides and dtypes.
            tensors = zip(self._unit_members[form.number], self._tensors(number, memory[place]))
            (self._computed_with if form.is_computed_with else self._whole).update(tensors)
            address = 0 if form.number in apart and not form.is_computed_with else memory[place].data_ptr()
            runs = []
            for bucket, (first, dtype) in form.at.items():
                piece, own = self._pieces[bucket], self._reducer.bucket_shape(bucket)[2]
                runs.append((piece.data_ptr(), first, piece.numel() * itemsize_of(dtype), own, dtype))
            specs.append((plans[form.number].name or self._label, place, address, runs))
        return DeviceUnits(self._row.comm, len(self._spans), specs)

    def _plan_form(self, number: int, is_computed_with: bool) -> _Form:
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
        return _Form(number, is_computed_with, at, size)

    def _tensors(self, form: int, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return the parameters of a form that lies in `memory`, each with a storage of its own."""
        found = []
        for index in self._unit_members[self._forms[form].number]:
            data = self._table.parameters[index].data if index not in self._whole else self._whole[index]
            bucket, begin, _ = self._reducer.place(index)
            first, dtype = self._forms[form].at[bucket]
            address = memory.data_ptr() + first + begin * itemsize_of(dtype)
            found.append(alias(self._link, memory, address, dtype, data.shape, data))
        return found

    def _make_apart(self, unit: int) -> tuple[int, list[torch.Tensor]]:
        memory = cuda.runtime.zeros(self._forms[unit].nbytes, torch.uint8, self._like)
        return memory.data_ptr(), self._tensors(unit, memory)

    def digest(self) -> int:
        """Return a digest of the units gathered so far, equal on all ranks."""
        return self._places.digest

    # the interface of all memories for the optimizer and the replica

    def adopt(self, index: int) -> None:
        """Record that a parameter trains: released ones are sliced from the start."""
        if index in self._released:
            self._stepped.add(self._reducer.place(index)[0])
        else:
            self._kept.adopt(index)

    def is_stepped(self, index: int) -> bool:
        return super().is_stepped(index) if index in self._released else self._kept.is_stepped(index)

    def piece(self, index: int) -> torch.Tensor:
        """Return this rank's elements of a released parameter; may be empty."""
        return self._slices[index]

    def is_published(self, index: int) -> bool:
        return self._kept.is_published(index)

    def is_moved(self, index: int) -> bool:
        return index in self._released or self._kept.is_moved(index)

    def slice(self, index: int) -> torch.Tensor | None:
        return super().slice(index) if index in self._released else self._kept.slice(index)

    def publish(self, *, failed: bool | None = None, sliced: bool = True) -> None:
        """Publish slices that every rank has updated on torch's current stream. Collective.

        The next use of a unit gathers it again. `sliced`: ranks have also updated slices of never-released parameters,
        and lack one another's. Cost: the bytes of those and of units that stay whole. The host does not wait.
        """
        if sliced:
            self._kept.publish()
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
        return self._kept.bytes_held + sum(piece.nbytes for piece in self._pieces.values())

    def give_back(self, together: bool = False) -> None:
        """Give the parameters back to this rank: whole if all ranks call this, else unchanged."""
        self.schedule.surrender(whole=together)
