"""What memories of parameters that are whole only while they are used have in common, on the host and on GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .table import ParameterTable
from .unit_schedule import UnitSchedule
from .units import UnitPlan, mark_of


class ReleasedParameters:
    """Parameters in units, which a schedule gathers and releases.

    Attributes
    ----------
    schedule : UnitSchedule
    """

    shared = False
    reason = ""
    one_copy = False
    schedule: UnitSchedule
    _table: ParameterTable
    #: tensors of parameters that can be released, where they lie when they are whole
    _whole: dict[int, torch.Tensor]

    def _members(self, indices: list[int]) -> list[tuple[int, str, torch.nn.Parameter, torch.Tensor]]:
        return [(i, self._table.names[i], self._table.parameters[i], self._whole[i]) for i in indices]

    def _tell_marks(self, plans: Sequence[UnitPlan]) -> None:
        """What fully_shard was called on knows its unit from now on."""
        for number, plan in enumerate(plans):
            mark = mark_of(plan.module)
            if mark is not None:
                mark.join(self.schedule, number)

    def is_released(self, index: int) -> bool:
        """Whether a parameter is whole only while its unit runs."""
        return index in self._whole

    def like(self, index: int) -> torch.Tensor:
        """A tensor of a parameter's shape, strides and dtype, whatever stands for it now. Not to be read."""
        return self._whole.get(index, self._table.parameters[index])

    def layouts(self) -> list[torch.Tensor]:
        """like() of every parameter."""
        return [self.like(index) for index in range(len(self._table.parameters))]

    def addresses(self) -> list[int]:
        """Where the data of every parameter should be now."""
        expected = self.schedule.addresses()
        return [expected.get(i, p.data_ptr()) for i, p in enumerate(self._table.parameters)]

    def plan(self) -> dict[str, Any]:
        """For describe(); `unit_bytes` is what units take when they are whole."""
        raise NotImplementedError

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, all parameters are whole."""
        try:
            with self.schedule.everything():
                yield
        finally:
            self.schedule.gather_pinned()
