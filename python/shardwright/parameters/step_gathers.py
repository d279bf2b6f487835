"""Gathers of parameters after a step on a GPU, which overlap with the next forward (docs/design/gpu.md).

The buckets of one unit's forward are a group with one event. A hook on the unit's module makes torch's current stream
wait for its groups; any other read of a parameter waits for that parameter's groups (read_guard.py).
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections.abc import Collection, Sequence
from typing import Any

import torch

from .._engine import DeviceUnits, Reducer
from ..backend.base import Request
from ..backend.device_link import DeviceLink, alias
from ..layout.param_groups import UnitPlan
from ..layout.shard_runs import itemsize_of
from ..torch_compat import autograd as _hooks
from ..torch_compat import cuda
from ..torch_compat.weak import weakly
from .read_guard import Awaited, change_classes, guarded_classes
from .unshard_schedule import ModuleHook

_logger = logging.getLogger("shardwright")
_NO_OVERLAP = (
    "%s: a unit is compiled, so gathers of parameters after a step no longer overlap with the next forward: their hooks would "
    "break the compiler's graph. prefetch=0 "
    "asks for no overlap, and silences this line"
)


class StepGathers:
    """Whole parameters in torch's memory on a GPU, gathered after each rank has updated its slices. The calls are a private Store's.

    `link` joins the ranks that own all slices together. The request's `forwards` lists the units whose forwards wait for
    their own parameters; if empty, nothing overlaps.
    """

    reason, is_home = "", True

    def __init__(self, link: DeviceLink, reducer: Reducer, request: Request) -> None:
        self._link, self._reducer, self._table, self._label = link, reducer, request.table, request.label
        # C code reads a DTensor's local tensor and bypasses the guard.
        may_wait = _hooks.CAN_BE_UNGUARDED and not link.borrows and request.table.model_mesh is None
        #: the units whose forwards wait for their own parameters
        self.units: Sequence[UnitPlan] = request.forwards if may_wait else ()
        self._guarded, self._own = guarded_classes(
            Awaited, self._table.names, self._table.parameters, weakly(self.arrive)
        )
        self._numbers = {id(parameter): number for number, parameter in enumerate(self._table.parameters)}
        self._memory: dict[int, torch.Tensor] = {}  # by bucket
        self._stepped: set[int] = set()  # buckets
        self._groups: DeviceUnits | None = None
        self._planned: set[int] = set()  # buckets
        self._gathered: list[torch.Tensor] = []  # parameters
        self._lock = threading.RLock()  # held by any thread that reads parameters
        self._around: list[weakref.ref[torch.nn.Module]] = []
        self._handles: list[Any] = []
        if self.units:
            self._hook()

    def tensor(self, index: int, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape of `like` over a parameter's memory in its bucket."""
        bucket, begin, _ = self._reducer.place(index)
        _, numel, dtype, _ = self._reducer.bucket_shape(bucket)
        if bucket not in self._memory:
            self._memory[bucket] = cuda.runtime.zeros(numel, getattr(torch, dtype), self._table.like.data)
        flat = self._memory[bucket]
        return alias(self._link, flat, flat.data_ptr() + begin * itemsize_of(dtype), dtype, like.shape, like)

    def adopt(self, index: int) -> None:
        """Gather the bucket of a parameter that trains from now on."""
        self._stepped.add(self._reducer.place(index)[0])

    def is_stepped(self, index: int) -> bool:
        return self._reducer.place(index)[0] in self._stepped

    @property
    def bytes_held(self) -> int:
        return sum(each.nbytes for each in self._memory.values())

    def mapped(self) -> list[tuple[int, int]]:
        """Return nothing: a forked child cannot use a GPU."""
        return []

    def _hook(self) -> None:
        for number, plan in enumerate(self.units):
            for module in plan.modules:
                self._handles.append(
                    module.register_forward_pre_hook(ModuleHook(self, StepGathers.take_unit, number), prepend=True)
                )
        names = [name for plan in self.units for name in plan.names]
        for name, module in self.units[0].module.named_modules():
            if any(not name or each == name or each.startswith(f"{name}.") for each in names):
                self._around.append(weakref.ref(module))
        self.arrange_hooks()

    def arrange_hooks(self, is_compiling: bool = False) -> None:
        """End the overlap if a unit or a module around one is compiled: guards and hooks would break its graph."""
        modules = (reference() for reference in self._around)
        if self.units and (is_compiling or any(each is not None and _hooks.is_compiled(each) for each in modules)):
            if self._link.rank == 0:
                _logger.warning(_NO_OVERLAP, self._label)
            self.close()

    def close(self) -> None:
        """Gather in the order of torch's stream from now on."""
        self.units = ()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.settle()

    # gathering ------------------------------------------------------------------------------------------------------

    def publish(self, failed: bool | None = None) -> None:
        """Gather the buckets from all ranks' slices, behind torch's current stream. Collective, no wait."""
        self.settle()
        if self._planned != self._stepped and self._link.world_size > 1:
            self._make(self._stepped)
        if self._groups is not None:
            self._groups.gather_anew()
            if self.units:
                change_classes(self._gathered, self._guarded)
            else:
                self.settle()

    def _make(self, buckets: Collection[int]) -> None:
        """Make the engine's units of these buckets, in groups in the order of use by a forward."""
        self._planned = {*buckets}
        order = [plan.indices for plan in self.units]
        self._groups = DeviceUnits(
            *(self._link.comm, self._reducer, self._link.current_stream),
            buckets=[(bucket, self._memory[bucket]) for bucket in sorted(buckets)],
            order=[*itertools.chain(*order)],
            ends=[*itertools.accumulate(map(len, order))],
            label=self._label,
        )
        members = itertools.chain(*map(self._reducer.bucket_parameters, buckets))
        self._gathered = [self._table.parameters[index] for index in members]

    # waiting --------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Make torch's current stream wait for all gathers."""
        if self._groups is not None and self._groups.coming():
            self._take(None)

    def refuse(self, unit: UnitPlan, what: str) -> None:
        """Allow copies: reading a parameter waits for it."""

    def take_unit(self, unit: UnitPlan, *_: object) -> None:
        """Make torch's current stream wait for a unit's parameters."""
        if self._groups is not None and self._groups.coming():
            self._take(unit.indices)

    def arrive(self, parameter: torch.Tensor) -> None:
        """Make torch's current stream wait for a parameter."""
        self._take([self._numbers[id(parameter)]])

    def _take(self, indices: Sequence[int] | None) -> None:
        """Wait for the groups of these parameters; None: for all. The next forward raises a communicator's error."""
        assert self._groups is not None
        with self._lock:
            arrived = self._groups.arrive(indices)
            change_classes([*map(self._table.parameters.__getitem__, arrived)], self._own)
