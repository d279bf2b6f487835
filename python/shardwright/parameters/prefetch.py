"""The schedule of units on a GPU: the host's, with units gathered ahead of use.

A gather is an asynchronous collective. While a unit computes, the units that followed it last time are gathered into
other places. Ranks must therefore run the same units in the same order; each round compares a digest of it.

A unit always lies in the same place, since autograd keeps views of it. If another unit that must stay whole occupies
its place (both run at once, full_parameters(), unshard()), it is gathered *apart*, into temporary memory.
"""

from __future__ import annotations

import contextlib
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .._engine import DeviceUnits, Error
from ..torch_compat import autograd as _hooks
from .unshard_schedule import ComputeForm, Pin, Unit, UnitSchedule

_NO_TASK = -1


class Places:
    """The engine's units in the order of torch's current stream, with the methods of Units that a schedule calls.

    Parameters
    ----------
    engine : DeviceUnits
    stream : callable
        A function that returns torch's current stream.
    make_apart : WeakMethod
        A method that allocates separate memory for a unit and returns (address, tensors).

    Attributes
    ----------
    apart, coming : set of int
        Units in separate memory, and units whose gather ahead is running.
    digest : int
        A digest of the units gathered so far, in their order.
    """

    def __init__(
        self,
        engine: DeviceUnits,
        stream: Callable[[], int],
        make_apart: weakref.WeakMethod[Callable[[int], tuple[int, list[torch.Tensor]]]],
    ) -> None:
        self._engine, self._stream, self._make_apart = engine, stream, make_apart
        self.apart: set[int] = set()
        self.coming: set[int] = set()
        self.digest = 0
        #: inside a join: tells joined ranks to gather the same unit
        self.announce: Callable[[int], None] | None = None

    def _note(self, unit: int) -> None:
        if self.announce is not None:
            self.announce(unit)
        self.digest = zlib.crc32(unit.to_bytes(4, "little"), self.digest)

    def holder(self, place: int) -> int | None:
        return self._engine.holder(place)

    def begin(self, unit: int) -> None:
        """Gather a unit ahead of time."""
        self._note(unit)
        self._engine.gather(unit)
        self.coming.add(unit)

    def gather(self, unit: int) -> None:
        if unit not in self.coming:
            self.begin(unit)
        self._engine.take(unit, self._stream())  # refused inside a capture: the gather goes on
        self.coming.discard(unit)

    def gather_apart(self, unit: int) -> list[torch.Tensor]:
        """Return the unit's tensors in separate memory."""
        make = self._make_apart()
        assert make is not None
        address, tensors = make(unit)
        self._note(unit)
        self._engine.gather_apart(unit, address, self._stream())
        self.apart.add(unit)
        return tensors

    def release(self, unit: int) -> None:
        if unit in self.apart:
            self.apart.discard(unit)  # torch's allocator orders the release of the memory
        else:
            self._engine.release(unit, self._stream())

    def drop_coming(self) -> None:
        """Release units that were gathered ahead and not used."""
        for unit in sorted(self.coming):
            self.gather(unit)
            self.release(unit)

    def take_write(self, unit: int) -> int:
        """Return -1: a write through an older view is not seen on a GPU."""
        return -1

    def update(self) -> None:
        """Note that slices were written."""
        self._engine.update(self._stream())

    def stats(self) -> dict[str, int]:
        return self._engine.stats()


class DeviceUnit(Unit):
    """A unit on a GPU.

    Attributes
    ----------
    place : int, optional
        None: the unit is always gathered apart.
    ran_apart : set of int
        Clock times of forwards whose graphs hold views of its separate memory.
    needs_place : bool
        True if the graph that runs next holds views of its place.
    """

    place: int | None = 0
    needs_place = False

    def _make_placeholders(self) -> None:
        """Make placeholders like the host's. Nothing reads them: the host would wait for the GPU."""
        self.ran_apart: set[int] = set()
        counts: dict[torch.dtype, int] = {}
        for parameter in self.parameters:
            counts[parameter.dtype] = counts.get(parameter.dtype, 0) + 1
        device = self.parameters[0].device if self.parameters else None
        scalars = {
            dtype: iter(torch.full((count,), float("nan"), dtype=dtype, device=device).unbind())
            for dtype, count in counts.items()
        }
        self.placeholders = [next(scalars[p.dtype]).expand(p.shape) for p in self.parameters]
        self._addresses = [each.data_ptr() for each in self.placeholders]
        self._in_place = self.whole
        self.lie_in(self.whole)

    def lie_in(self, whole: list[torch.Tensor] | None) -> None:
        """Set the data of the unit's parameters when it is whole: tensors of separate memory; None: those of its place."""
        self.whole = self._in_place if whole is None else whole
        self._whole_addresses = [each.data_ptr() for each in self.whole]

    def lose_place(self) -> None:
        """Gather this unit apart from now on."""
        self.place, self._in_place = None, []
        self.lie_in(None)

    def note_samples(self) -> None:
        """Do nothing: reading the GPU would make the host wait."""

    def take_written(self) -> str | None:
        """Return the name of a parameter whose data was replaced while it was released; writes to its data are not
        detected.
        """
        found = self.data_pointers()
        if found == self._addresses:
            return None
        self.show_released()
        return next(name for name, now, address in zip(self.names, found, self._addresses) if now != address)


class DeviceComputeForm(ComputeForm, DeviceUnit):
    """The compute form of a unit on a GPU."""

    def _make_placeholders(self) -> None:
        super()._make_placeholders()
        self.ran_apart = set()
        self._in_place = self.whole


class DeviceUnitSchedule(UnitSchedule):
    """The units of one module on a GPU. See UnitSchedule.

    Parameters
    ----------
    places : sequence of int
        The place of each plan's unit, or of its compute form if it has one; the unit itself then has no place.
    depth : int
        The number of units gathered ahead, unless the program names them (UnitSchedule.ahead).
    """

    unit_class = DeviceUnit
    compute_class = DeviceComputeForm
    #: one of torch's threads may drop a backward later
    ends_failed_backwards = False
    units: list[Any]

    def __init__(self, units: Places, *arguments: Any, places: Sequence[int], depth: int, **options: Any) -> None:
        super().__init__(units, *arguments, **options)
        self._depth = depth
        for unit, place in zip(self._plain, places):
            form = unit.compute_form
            (unit if form is None else form).place = place  # type: ignore[attr-defined]
            if form is not None:
                unit.lose_place()  # type: ignore[attr-defined]
        self._before: dict[str, DeviceUnit | None] = {"forward": None, "backward": None}
        self._after: dict[str, dict[int, DeviceUnit]] = {"forward": {}, "backward": {}}

    # gathering and releasing --------------------------------------------------------------------------------------

    def _gather(self, unit: Any) -> None:
        if unit.is_whole:
            if not (unit.needs_place and unit.number in self._units.apart):
                return
            self._release(unit)
        self._check_released(unit)
        if unit.number in self._units.coming or (self._may_lie_in_place(unit) and self._make_room(unit)):
            self._units.gather(unit.number)
        else:
            unit.lie_in(self._units.gather_apart(unit.number))
        unit.is_whole = True
        unit.show_whole()
        unit.note_versions()

    def _may_lie_in_place(self, unit: DeviceUnit) -> bool:
        if unit.place is None:
            return False
        return unit.needs_place or not (self._keepers or unit.pin is Pin.BY_USER)

    def _make_room(self, unit: DeviceUnit) -> bool:
        """Return True if the place of `unit` is free, or can be made so."""
        assert unit.place is not None
        number = self._units.holder(unit.place)
        if number is None:
            return True
        other = self.units[number]
        if number in self._units.coming:
            self._units.drop_coming()
            return True
        if not (other.running or other.opened) and other.pin is not Pin.UNTIL_STEP:
            self._release(other)
            if other.pin is Pin.BY_USER or (self._keepers and not other.is_compute_form):
                self._gather(other)  # apart
            return True
        if unit.needs_place:
            raise Error(
                f"units {unit.name or 'the outermost'!r} and {other.name or 'the outermost'!r} share memory on a GPU, and the backward "
                "needs both whole at once (create_graph=True, outputs in which no tensor is found, or outputs that are views of a "
                "parameter): pass reshard_after_forward=False, which gives each memory of its own"
            )
        return False

    def _release(self, unit: Any) -> None:
        try:
            super()._release(unit)
        finally:
            unit.lie_in(None)

    def forget_order(self) -> None:
        """Forget the order of units and record it anew."""
        self._before = {"forward": None, "backward": None}
        self._after = {"forward": {}, "backward": {}}

    def gather_beside(self, number: int) -> None:
        """Take part in a gather of other ranks without making a unit whole here."""
        self.release_all()
        self._gather_plainly(self.units[number])
        self._units.release(number)
        self.units[number].lie_in(None)

    def _gather_plainly(self, unit: Any) -> None:
        if unit.place is None:
            unit.lie_in(self._units.gather_apart(unit.number))
        else:
            self._units.gather(unit.number)

    def release_all(self) -> None:
        self._units.drop_coming()
        for unit in self.units:
            unit.ran_apart.clear()
        super().release_all()

    def pin(self, unit: Unit) -> None:
        """Gather as on the host, into separate memory, so that other units can use the place."""
        if not (unit.running or unit.opened):
            self._release(unit)
        super().pin(unit)

    def surrender(self, together: bool = False) -> None:
        """End the schedule. `together`: all ranks call this, so parameters are gathered; else released ones stay
        released.
        """
        if together:
            self._units.drop_coming()
            self.release_all()
            super().surrender()
            return
        with contextlib.suppress(Error):  # even if a GPU failed, the hooks must be removed
            self._units.drop_coming()
        self.detach()
        units, self.units = self.units, []
        for unit in units:
            unit.give_up(whole=False)
            if unit.is_whole:
                unit.show_released()
                with contextlib.suppress(Error):
                    self._units.release(unit.number)

    # hooks of modules -------------------------------------------------------------------------------------

    def _look_ahead(self, phase: str, unit: DeviceUnit) -> None:
        """Start to gather the units that followed `unit` last time, or that the program names, up to one whose place is
        in use.
        """
        before = self._before[phase]
        if before is not None and before is not unit:
            self._after[phase][before.number] = unit
        self._before[phase] = unit
        named = self.ahead[phase].get(unit.unit.number if isinstance(unit, ComputeForm) else unit.number)
        coming = self._followers(phase, unit) if named is None else map(self._form_of, named())
        for following in coming:
            if self._keepers or not self._begin(following):
                return

    def _followers(self, phase: str, unit: DeviceUnit) -> Iterator[DeviceUnit]:
        for _ in range(self._depth):
            following = self._after[phase].get(unit.number)
            if following is None:
                return
            unit = following
            yield unit

    def _begin(self, unit: Any) -> bool:
        """Return True if a unit is being gathered, is whole, or has nothing to gather."""
        if not unit.indices or unit.is_whole or unit.number in self._units.coming:
            return True
        if unit.pin is not Pin.NONE or unit.place is None or self._units.holder(unit.place) is not None:
            return False
        self._units.begin(unit.number)
        return True

    def _before_forward(self, unit: Any, *arguments: Any) -> None:
        super()._before_forward(unit, *arguments)
        if _hooks.graph_task_id() == _NO_TASK:
            if unit.is_outermost:
                self._before["forward"] = None
            self._look_ahead("forward", unit.forms[-1] if unit.forms else unit)

    def _after_forward(self, unit: Any, module: torch.nn.Module, args: Any, output: Any) -> None:
        form = unit.forms[-1] if unit.forms else unit
        if form.running and form.number in self._units.apart:
            form.ran_apart.add(form.running[-1])
        super()._after_forward(unit, module, args, output)
        if unit.is_outermost and not form.running and _hooks.graph_task_id() == _NO_TASK:
            self._units.drop_coming()

    def _before_backward(self, unit: Any, begin: int, end: int) -> None:
        if not self._tasks:
            self._before["backward"] = None
        unit.needs_place = begin not in unit.ran_apart
        try:
            super()._before_backward(unit, begin, end)
        finally:
            unit.needs_place = False
        self._look_ahead("backward", unit)

    def _end_tasks(self, tasks: Any) -> None:
        super()._end_tasks(tasks)
        if not self._tasks:
            with contextlib.suppress(Error):  # the next forward raises the communicator's error
                self._units.drop_coming()
