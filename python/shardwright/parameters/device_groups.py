"""Sliced parameters on a GPU, gathered in units while they are used (zero=3).

A unit's buckets hold only its parameters, so gathering it is one all-gather per bucket, from slices into a place: GPU
memory that units share (csrc/zero/unit_plan.h). The data of a released parameter is a single NaN, expanded to its shape.
Parameters that are never released lie in ParameterMemory, as at zero=2.

Under a precision policy a unit's place has the size of its compute form: each gather casts this rank's slice into its
part of the place, and gathers the other slices there. The float32 unit itself is then gathered only on request, into
separate memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .._engine import DeviceUnits, Reducer
from ..backend.device_link import DeviceLink, Homes, device_link
from ..layout.param_groups import UnitPlan, mark_of
from ..layout.shard_runs import make_dense, memory_order
from ..layout.views import dense_strides, dtype_name
from ..torch_compat import cuda
from ..torch_compat.engine_storage import engine_tensor
from .sharded_groups import ReleasedParameters, releasable
from .storage import ParameterMemory

if TYPE_CHECKING:
    from ..backend.base import Backend, Request
    from ..layout.param_table import ParameterTable


def narrowed(request: Request, released: Collection[int]) -> dict[int, torch.dtype]:
    """Return the dtypes of parameters that are cast as they are gathered."""
    parameters = request.table.parameters
    return {
        index: dtype
        for index, dtype in request.compute_dtypes.items()
        if index in released and parameters[index].dtype is torch.float32  # the kernel's unit
    }


def rows_in_groups(request: Request) -> list[tuple[Any, ...]]:
    """Return reducer rows such that each bucket holds parameters of one unit and compute dtype, or never-released ones."""
    members = releasable(request)
    narrow = narrowed(request, {index for each in members for index in each})
    kinds = {index: (number, str(narrow.get(index, ""))) for number, each in enumerate(members) for index in each}
    numbers = {kind: number for number, kind in enumerate(sorted(set(kinds.values())), 1)}
    groups = {index: numbers[kind] for index, kind in kinds.items()}
    return [(*row[:4], groups.get(index, 0), *row[5:]) for index, row in enumerate(request.table.rows())]


def _turns(plans: Sequence[UnitPlan], prefetch: int) -> int:
    """Return the places of a level: for the running unit, and as many as it or a module of fully_shard has gathered ahead."""
    marks = [mark_of(module) for plan in plans for module in plan.modules]
    return 1 + max([prefetch, *(len(each) for mark in marks if mark is not None for each in mark.ahead.values())])


class DeviceUnitMemory(ReleasedParameters):
    """Parameters of a table on the GPU, sliced and released. Making it is collective; values are rank 0's.

    Memory of a rank: its slices, the places, and never-released parameters. `at_home`: slices lie in pinned host memory
    (csrc/zero/device_home.h).
    """

    _announce: Callable[[int], None] | None = None

    def __init__(
        self, backend: Backend, row: DeviceLink, reducer: Reducer, request: Request, *, at_home: bool = False
    ) -> None:
        super().__init__(backend, reducer, request)
        table, link, plans = self._table, backend.link, request.plans or ()
        assert link is not None
        if self._extended:
            raise NotImplementedError(
                f"parameter {table.names[min(self._extended)]!r} has an all-gather extension: these are gathered on CPU ranks only"
            )
        is_on_host = table.device is not None
        filler = request.building if table.is_by_rows or is_on_host else None
        if filler is None and is_on_host:
            backend.group.broadcast(table.parameters, 0, f"parameters of {self._label}")
        elif filler is None:
            link.broadcast(table.parameters, 0)
        if not is_on_host:
            self._keep_rest(request)
        for index in self._released:
            make_dense(table.parameters[index])
            if table.parameters[index].requires_grad:
                self.adopt(index)
        self._timeout_s = request.options.timeout_s
        like, depth = cuda.runtime.zeros(0, torch.uint8, table.like.data), request.options.prefetch
        homes = Homes(row, like) if at_home else None
        self._units = DeviceUnits(
            *(row.comm, reducer, link.current_stream),
            allocate=lambda nbytes: cuda.runtime.zeros(nbytes, torch.uint8, like),
            units=self._rows(plans, narrowed(request, self._released)),
            turns=_turns(plans, depth),
            near=max((plan.near for plan in plans), default=0),
            home=homes,
        )
        self.home_bytes = 0 if homes is None else homes.nbytes
        self._keep_near(plans)
        sizes, self._unit_bytes, self._slice_bytes = self._units.sizes()
        computed = dict(zip(self._forms, sizes))  # of a unit with a compute form: that one's
        self._unit_sizes = [(plan.name, computed[number]) for number, plan in enumerate(plans)]
        self._slices = {index: engine_tensor(self._units.slice(index)) for index in sorted(self._released)}
        if filler is None:
            self._write_slices()
        else:
            filler.fill(self, table, plans, backend.group.comm)
        if is_on_host:
            self._move_rest(table)
            self._keep_rest(request)
        self._units.update()
        for form, number in enumerate(self._forms):
            for index in self._unit_members[number]:
                data = table.parameters[index].data
                tensor = engine_tensor(self._units.tensor(form, index, data.shape, dense_strides(data)))
                (self._whole if form < len(plans) else self._computed_with)[index] = tensor
        self._make_schedule(self._units, plans, depth=depth)

    def _move_rest(self, table: ParameterTable) -> None:
        """Move what no unit releases from the host to the GPU."""
        rest = [each for index, each in enumerate(table.parameters) if index not in self._released]
        for tensor in (*rest, *table.buffers.values()):
            tensor.data = cuda.runtime.moved(tensor.data, table.like)

    def _keep_rest(self, request: Request) -> None:
        #: the parameters that are never released
        self._kept = ParameterMemory(self._backend, self._reducer, request, shared=False, without=self._released)
        self.flat = self._kept.flat

    def _keep_near(self, plans: Sequence[UnitPlan]) -> None:
        """Let units stay with fewer ranks of a row between forward and backward. Collective."""
        rows, group = self._slicing.rows(), self._backend.group
        for near in sorted({plan.near for plan in plans if plan.near > 1}):
            parts = [row[at : at + near] for row in rows for at in range(0, len(row), near)]
            link = device_link(group, self._table.like, self._timeout_s, parts)
            for form, number in enumerate(self._forms):
                if plans[number].near == near:
                    self._units.keep_near(form, link.comm)

    def _rows(self, plans: Sequence[UnitPlan], narrow: dict[int, torch.dtype]) -> list[Any]:
        """Return the engine's rows of the units, then of the compute forms. `_forms` has the number of each one's plan."""
        self._forms = [*range(len(plans))]
        self._forms += [number for number, each in enumerate(self._unit_members) if narrow.keys() & each]
        rows = []
        for form, number in enumerate(self._forms):
            plan, cast = plans[number], narrow if form >= len(plans) else {}
            level = sum(any(plan.name.startswith(f"{name}.") for name in other.names) for other in plans[1:])
            parameters = [(index, self._table.parameters[index]) for index in self._unit_members[number]]
            members = [(index, dtype_name(cast.get(index, each.dtype))) for index, each in parameters]
            rows.append((plan.name or self._label, level, not plan.reshard_after_forward, number, members))
        return rows

    def digest(self) -> int:
        """Return a digest of the units gathered so far, equal on all ranks."""
        return self._units.digest()

    # values ---------------------------------------------------------------------------------------------------------

    def write_slices(self, indices: Iterable[int]) -> None:
        super().write_slices(index for index in indices if index in self._released)

    def read_slices(self, indices: Iterable[int]) -> None:
        """Copy these parameters from all ranks' slices to where they lie on the host, before they move. Collective."""
        group = self._backend.group
        for index in indices:
            if index not in self._released:
                continue
            data = self._table.parameters[index].data
            flat = memory_order(data, data)
            low, high = self.own_run(index)
            flat[low:high].copy_(self._slices[index])
            for rank in range(group.world_size):
                low, high = self.run(index, rank)
                if low < high and self._slicing.first_owner(self._slicing.of_rank[rank]) == rank:
                    group.broadcast([flat[low:high]], rank, f"slices of {self._table.names[index]}")

    def pieces(self, index: int) -> list[tuple[int, int, torch.Tensor]]:
        if index not in self._released:
            return self._kept.pieces(index)
        low, high = self.own_run(index)
        return [(low, high, self._slices[index])]

    @contextlib.contextmanager
    def filling(self) -> Iterator[None]:
        self.schedule.release_all()
        yield
        self._gather_pinned_anew()

    # the interface of all memories for the optimizer and the replica

    def adopt(self, index: int) -> None:
        """Record that a parameter trains: released ones are sliced from the start."""
        if index in self._released:
            self._stepped.add(self._reducer.place(index)[0])
        else:
            self._kept.adopt(index)

    def is_stepped(self, index: int) -> bool:
        return super().is_stepped(index) if index in self._released else self._kept.is_stepped(index)

    def own_slice(self, index: int) -> torch.Tensor:
        found = self._slices.get(index)
        return self._table.parameters[index].data.flatten() if found is None else found  # without elements

    def _meet(self) -> None:
        """Let gathers come after what this rank's stream wrote to its slices. They are collectives: no rank reads early."""
        self._units.drop_ahead()
        self._units.follow()

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
            self._units.update()
            self.schedule.gather_pinned()

    @contextlib.contextmanager
    def _unannounced(self) -> Iterator[None]:
        self._units.set_announce(None)
        try:
            yield
        finally:
            self._units.set_announce(self._announce)

    def announce_units(self, announce: Callable[[int], None] | None) -> None:
        """Inside a join: call `announce` with each unit before it is gathered."""
        self._announce = announce
        self._units.set_announce(announce)

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
        return self._kept.bytes_held + self._slice_bytes

    def plan(self) -> dict[str, Any]:
        home = {"parameters_home": "cpu: pinned host memory"} if self.home_bytes else {}
        return {**super().plan(), **home}

    def give_back(self, together: bool = False) -> None:
        """Give the parameters back to this rank: whole if all ranks call this, else unchanged."""
        if together:
            self.schedule.release_all()
        self.schedule.surrender(whole=together)
