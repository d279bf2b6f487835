"""Parameters that are whole only while they are used: the code common to host and GPUs."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..layout.param_groups import UnitPlan, mark_of
from ..layout.shard_runs import Copies, SliceRuns, Storage, memory_order
from ..torch_compat.weak import weakly
from .unshard_schedule import UnitSchedule

if TYPE_CHECKING:
    from ..backend.base import Backend
    from ..layout.param_table import ParameterTable

#: parameters of at most this many bytes are never released: a gather costs more than the memory is worth
_SMALL_BYTES = 128


class ReleasedParameters(Storage, SliceRuns):
    """Parameters in units, which a schedule gathers and releases.

    Attributes
    ----------
    schedule : UnitSchedule
    """

    releases = True
    schedule: UnitSchedule
    _backend: Backend
    _label: str
    #: tensors over the memory of releasable parameters when they are whole
    _whole: dict[int, torch.Tensor]
    #: the same in compute dtypes, for units with modules that compute in 16 bits
    _computed_with: dict[int, torch.Tensor]
    #: this rank's elements of each parameter; may be empty
    _slices: dict[int, torch.Tensor]
    #: (name, bytes) of each unit
    _unit_sizes: list[tuple[str, int]]
    #: bytes of the memory that units share
    _unit_bytes: int

    def _members(self, indices: list[int]) -> list[tuple[int, str, torch.nn.Parameter, torch.Tensor]]:
        return [(i, self._table.names[i], self._table.parameters[i], self._whole[i]) for i in indices]

    def _compute_members(self, indices: list[int]) -> list[tuple[int, str, torch.nn.Parameter, torch.Tensor]]:
        found = [index for index in indices if index in self._computed_with]
        return [(i, self._table.names[i], self._table.parameters[i], self._computed_with[i]) for i in found]

    def _tell_marks(self, plans: Sequence[UnitPlan]) -> None:
        """Give each module of fully_shard its unit."""
        for number, plan in enumerate(plans):
            for module in plan.modules:
                mark = mark_of(module)
                if mark is not None:
                    mark.join(self.schedule, number)

    def is_released(self, index: int) -> bool:
        """Return whether a parameter is whole only while its unit runs."""
        return index in self._whole

    if TYPE_CHECKING:  # methods of the class that this one is mixed into

        def slice(self, index: int) -> torch.Tensor | None: ...

    def like(self, index: int) -> torch.Tensor:
        """Return a tensor with a parameter's shape, strides and dtype, released or not. Its values must not be read."""
        return self._whole.get(index, self._table.parameters[index])

    def layouts(self) -> list[torch.Tensor]:
        """Return like() of every parameter."""
        return [self.like(index) for index in range(len(self._table.parameters))]

    def places(self) -> Callable[[], list[int]]:
        return self.addresses

    def addresses(self) -> list[int]:
        """Return the expected address of every parameter's data now."""
        expected = self.schedule.addresses()
        return [expected.get(i, p.data_ptr()) for i, p in enumerate(self._table.parameters)]

    def stats(self) -> dict[str, Any]:
        return self.schedule.stats()

    def accept_writes(self) -> None:
        self.schedule.accept_writes()

    def hook_arranger(self) -> Callable[[bool], None] | None:
        return self._arrange_hooks

    def _arrange_hooks(self, is_compiling: bool) -> None:
        self.schedule.arrange_hooks()

    def follow(self, copies: Copies) -> None:
        copies.follow(weakly(self.schedule.source_of), self.schedule.computed_with)
        self.schedule.on_release = weakref.WeakMethod(copies.forget)
        self.schedule.policy = weakref.WeakMethod(copies.is_in_force)

    def plan(self) -> dict[str, Any]:
        """Return facts for describe()."""
        return {
            "units": [f"{name or self._label}: {size} bytes" for name, size in self._unit_sizes],
            "unit_bytes": self._unit_bytes,
        }

    def _write_slices(self) -> None:
        """Copy this rank's elements out of whole parameters."""
        for index, piece in self._slices.items():
            low, high = self.own_run(index)
            if low < high:
                data = self._table.parameters[index].data
                piece.copy_(memory_order(data, data)[low:high])

    def _gather_pinned_anew(self) -> None:
        """Gather the units that stay whole. Collective where gathers are."""
        self.schedule.gather_pinned()

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

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Return a context in which all parameters are whole."""
        try:
            with self.schedule.everything():
                yield
        finally:
            self.schedule.gather_pinned()


def releasable(table: ParameterTable, plans: Sequence[UnitPlan]) -> list[list[int]]:
    """Return the parameters that each unit releases."""
    return [[index for index in plan.indices if _can_be_released(table.parameters[index])] for plan in plans]


def _can_be_released(parameter: torch.Tensor) -> bool:
    """Return whether releasing the parameter saves memory and its dtype has a NaN for the placeholder."""
    floating = parameter.dtype.is_floating_point or parameter.dtype.is_complex
    return floating and parameter.numel() * parameter.element_size() > _SMALL_BYTES
