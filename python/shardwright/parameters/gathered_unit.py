"""A unit: parameters that are whole or released together, and what they are while they are released."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .._engine import sample_crc32c
from ..layout.local_parameters import module_parameter
from ..layout.memory import address_of
from ..layout.param_groups import UnitPlan
from ..torch_compat import autograd as _hooks
from ..torch_compat.dtensor import held_tensor, is_dtensor
from .read_guard import Released, change_classes, guarded_classes
from .sharded_parameter import ShardedParameter, show_sharded, show_whole

#: without a frame of Python per parameter
_version_of = operator.attrgetter("_version")

#: samples of a parameter besides its first and last bytes
_SAMPLES = 8


#: why a unit stays whole while no module runs in it. Not at all. A second backward may follow, or one without a hook, or
#: an output is a view of a parameter. unshard(). The same for fully_shard, until the unit's next run ends.
NOT_PINNED, UNTIL_STEP, BY_USER, UNTIL_RUN = range(4)


class Member(NamedTuple):
    """A parameter of a unit: its number in the table, its name, and its data when it is whole."""

    number: int
    name: str
    parameter: torch.nn.Parameter
    whole: torch.Tensor


class Span:
    """Parameters that modules use, and the clocks of their forwards for which a backward may follow: `live`."""

    def __init__(self, numbers: Sequence[int] = ()) -> None:
        self.numbers, self.live = [*numbers], set[int]()


class Unit:
    """Parameters that are whole or released together.

    `units` are the engine's, which know whether the unit is whole. `use`: of all its parameters, in both forms. `running` has the clock at the beginning of each running
    forward; `opened`, for each open backward, that of its forward, and its graph task. `forms`: the form in which each
    running forward computes. `ran_apart`: the clocks of forwards whose graphs hold views of memory apart.
    """

    is_compute_form = is_outermost = False
    #: the clock of the latest forward, and whether an input required a gradient; recorded if a listener asks for it
    last_run: tuple[int, bool] | None = None
    notes_runs = False
    #: of fully_shard: the parameters of which one object or the other stands in the module
    rows: Sequence[ShardedParameter] = ()

    def __init__(self, units: Any, number: int, plan: UnitPlan, members: Sequence[Member]) -> None:
        self._units, self.number = units, number
        self.name = plan.name
        self.module = weakref.ref(plan.module)
        self.reshard_after_forward = plan.reshard_after_forward
        self.indices = [each.number for each in members]
        self.names = [each.name for each in members]
        self.parameters = [each.parameter for each in members]
        self.module_parameters = [module_parameter(parameter) for parameter in self.parameters]
        self._has_dtensors = any(map(is_dtensor, self.module_parameters))
        self._guarded, self._own = guarded_classes(Released, self.names, self.module_parameters)
        self._sees_writes: bool = not units.is_collective  # else a read of values would wait for a GPU
        self.compute_form: ComputeForm | None = None
        self.forms: list[Unit] = []
        self.running: list[int] = []
        self.opened: list[tuple[int, int]] = []
        self.ran_apart: set[int] = set()
        self.use = Span(plan.indices)
        self.pin = NOT_PINNED
        self._in_place = [each.whole for each in members]
        self.shapes = [(each.whole.shape, each.whole.stride()) for each in members]
        self.lie_in(None)
        self.released_addresses: list[int] = []  # of the parameters' data, as whole_addresses
        self._make_placeholders()
        self._samples: list[int] | None = None
        self.note_versions()

    def _make_placeholders(self) -> None:
        """Make one NaN a parameter (for integers 0xff bytes), expanded to its shape; a host's are compared as bytes."""
        self._bytes: dict[torch.dtype, bytearray] = {}
        self._blank: dict[torch.dtype, bytes] = {}
        following = {}
        for dtype in dict.fromkeys(parameter.dtype for parameter in self.parameters):
            count = sum(parameter.dtype == dtype for parameter in self.parameters)
            if self._sees_writes:
                self._blank[dtype] = b"\xff" * (dtype.itemsize * count)
                self._bytes[dtype] = bytearray(self._blank[dtype])
                scalars = torch.frombuffer(self._bytes[dtype], dtype=dtype)
            else:
                size = count * dtype.itemsize
                scalars = torch.full((size,), 0xFF, dtype=torch.uint8, device=self._in_place[0].device).view(dtype)
            following[dtype] = iter(scalars.unbind())
        self.placeholders = [next(following[p.dtype]).expand(p.shape) for p in self.parameters]
        self.released_addresses = [each.data_ptr() for each in self.placeholders]

    # where the parameters lie ---------------------------------------------------------------------------------------

    def lie_in(self, whole: list[torch.Tensor] | None) -> None:
        """Set the data that the parameters have when they are whole: memory apart, or with None their place."""
        self.whole = self._in_place if whole is None else whole
        self.whole_addresses = [each.data_ptr() for each in self.whole]

    def lose_place(self) -> None:
        """Gather this unit apart from now on."""
        self._in_place = []
        self.lie_in(None)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return True if `tensor` is in this unit's memory."""
        if self._has_dtensors and is_dtensor(tensor):
            tensor = held_tensor(tensor)
        address = address_of(tensor) if self.whole else 0
        for first, whole in zip(self.whole_addresses, self.whole):
            if first <= address < first + whole.nbytes:
                return True
        return False

    def show_whole(self) -> None:
        """Make the parameters whole and readable."""
        with _hooks.unguarded():
            for parameter, each in zip(self.parameters, self.whole):
                parameter.data = each
        change_classes(self.module_parameters, self._own)
        if self.rows:
            show_whole(self.rows)

    def show_released(self) -> None:
        """Make the parameters NaN, so that reading them raises an error."""
        with _hooks.unguarded():
            for parameter, each in zip(self.parameters, self.placeholders):
                parameter.data = each
        change_classes(self.module_parameters, self._guarded)
        if self.rows:
            self._show_sharded(self.compute_form)

    def _show_sharded(self, other: Unit | None) -> None:
        """Put the DTensors into the module, unless the `other` form of this unit is whole."""
        if other is None or not self._units.is_whole(other.number):
            show_sharded(self.rows)

    def show_slots(self) -> None:
        """Put the right object of each parameter into the module, after a precision policy has left it."""
        form = self.compute_form
        if self._units.is_whole(self.number) or (form is not None and self._units.is_whole(form.number)):
            show_whole(self.rows)
        else:
            self._show_sharded(None)

    def give_up(self, *, whole: bool = True) -> None:
        """Stop managing the parameters: they are readable, or released for the last time."""
        for kind in self._guarded.values():
            kind._shardwright_is_orphan = True  # type: ignore[attr-defined]
        if whole:
            change_classes(self.module_parameters, self._own)
            show_whole([each for each in self.rows if each.leaf is None])

    def span(self) -> list[tuple[int, int]]:
        """Return (address, bytes) of the memory of the whole unit, if it has any."""
        if not (self.whole and self._units.is_whole(self.number)):
            return []
        begin = min(self.whole_addresses)
        return [(begin, max(at + each.nbytes for at, each in zip(self.whole_addresses, self.whole)) - begin)]

    def name_at(self, offset: int) -> str:
        """Return the parameter at a byte of the unit."""
        first = min(self.whole_addresses)
        places = sorted((address - first, name) for address, name in zip(self.whole_addresses, self.names))
        return next(name for begin, name in reversed(places) if begin <= offset)

    # writes by the program ------------------------------------------------------------------------------------------

    def take_written(self) -> str | None:
        """Return the name of a parameter whose placeholder was written to (on hosts) or replaced, and release it again."""
        with _hooks.unguarded():
            found = list(map(torch.Tensor.data_ptr, self.parameters))
        if self._bytes == self._blank and found == self.released_addresses:
            return None
        written = [
            name
            for name, now, placeholder, address in zip(self.names, found, self.placeholders, self.released_addresses)
            if now != address or (self._bytes and not _is_blank(placeholder))
        ]
        for dtype, blank in self._blank.items():
            self._bytes[dtype][:] = blank
        self.show_released()
        return written[0] if written else None  # another NaN counts as no write: the next gather overwrites it

    def note_versions(self) -> None:
        self._versions = self._read_versions()
        if self._samples is not None:
            self._samples = self._read_samples()

    def note_samples(self) -> None:
        """Record samples of the whole values, because a program can write to them through `.data` until the step."""
        if self._samples is None and self._sees_writes:
            self._samples = self._read_samples()

    def _read_samples(self) -> list[int]:
        return [
            sample_crc32c(address, whole.nbytes, max(whole.nbytes // _SAMPLES, 64))
            for address, whole in zip(self.whole_addresses, self.whole)
        ]

    def _read_versions(self) -> list[int]:
        return list(map(_version_of, self.parameters))  # which are whole, and so not guarded

    def find_written(self) -> str | None:
        """Return the name of a parameter written since note_versions(), or through `.data` since note_samples(), which ends."""
        before, now = [self._versions], [self._read_versions()]
        if self._samples is not None:
            before.append(self._samples)
            now.append(self._read_samples())
            self._samples = None
        if before == now:
            return None
        changes = zip(self.names * len(now), itertools.chain(*before), itertools.chain(*now))
        return next(name for name, old, new in changes if old != new)


def _is_blank(placeholder: torch.Tensor) -> bool:
    """Return True if a placeholder is a NaN, or for integers still of 0xff bytes."""
    scalar = placeholder.as_strided((1,), (1,))
    if placeholder.is_floating_point() or placeholder.is_complex():
        return bool(torch.isnan(scalar).all())
    return bool((scalar.view(torch.uint8) == 0xFF).all())


class ComputeForm(Unit):
    """A unit in the dtypes of a precision policy, in memory of its own, which modules read through views of it."""

    is_compute_form = True

    def __init__(self, units: Any, number: int, plan: UnitPlan, members: Sequence[Member], unit: Unit) -> None:
        super().__init__(units, number, plan, members)
        self.unit, self.use = unit, unit.use
        self._positions = {id(parameter): position for position, parameter in enumerate(self.parameters)}

    def _make_placeholders(self) -> None:
        """Make none: the parameters are shown by the unit itself."""

    def memory_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a parameter's values in its compute dtype."""
        return self.whole[self._positions[id(parameter)]]

    def show_whole(self) -> None:
        """Show the parameters in their slots, where views of this memory or copies of the unit's, if that is whole, replace them."""
        if not self._units.is_whole(self.unit.number):
            show_whole(self.unit.rows)

    def show_released(self) -> None:
        """Show the DTensors, unless the unit itself is whole."""
        self.unit._show_sharded(self.unit)

    def take_written(self) -> str | None:
        return None if self._units.is_whole(self.unit.number) else self.unit.take_written()

    def count_writes(self) -> None:
        """Bump the version counter, so that autograd detects changed saved values."""
        _hooks.increment_versions(self.whole)

    def _read_versions(self) -> list[int]:
        return list(map(_version_of, self.whole))
