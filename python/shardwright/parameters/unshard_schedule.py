"""Schedule of gathers and releases: a unit is whole around its modules' forwards, and again around their backwards.

Each forward of a unit has a beginning and an end, counted by one clock. Autograd runs the nodes of a graph in the
reverse of the order in which they were made. When the backward reaches the outputs of a forward, the backward of every
forward that began after its end is over. Those units are released. Remaining units are released at the end of the graph
task. Releasing is always safe: code that needs a unit gathers it first.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import itertools
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch

from .._engine import Error, sample_crc32c
from ..layout.local_parameters import module_parameter
from ..layout.memory import address_of
from ..layout.param_groups import UnitPlan
from ..torch_compat import autograd as _hooks
from ..torch_compat.dtensor import held_tensor, is_dtensor
from ..torch_compat.internals import forward_hooks
from ..torch_compat.weak import weakly
from .read_guard import ReadGuard

#: without a frame of Python per parameter
_version_of = operator.attrgetter("_version")

_NO_TASK = -1
#: samples of a parameter besides its first and last bytes
_SAMPLES = 8
_COPY = (
    "this module's parameters are released, and each rank keeps slices of them: {what} inside "
    "`with sw.full_parameters(module)`, or use sw.full_state_dict(module)"
)


class Pin(enum.Enum):
    """The reason why a unit stays whole while no module runs in it."""

    NONE = 0
    #: a second backward may follow, or one without a hook; or an output is a view of a parameter
    UNTIL_STEP = 1
    #: unshard()
    BY_USER = 2


class Unit:
    """Parameters that are whole or released together.

    Attributes
    ----------
    running : list of int
        The clock at the beginning of each forward that is running.
    opened : list of (int, int)
        For each backward that has begun: the clock at the beginning of its forward, and its graph task.
    is_whole : bool
        True while the parameters are whole. The schedule sets it on each gather and release, without a query to the
        engine.
    compute_form : ComputeForm, optional
        The unit in the dtypes in which its modules compute under a precision policy.
    forms : list of Unit
        If it has a compute form: the form in which each running forward of its modules computes.
    """

    is_compute_form = is_outermost = False

    def __init__(
        self, number: int, plan: UnitPlan, members: Sequence[tuple[int, str, torch.nn.Parameter, torch.Tensor]]
    ) -> None:
        self.number = number
        self.name = plan.name
        self.module = weakref.ref(plan.module)
        self.reshard_after_forward = plan.reshard_after_forward
        self.indices = [index for index, _, _, _ in members]
        self.names = [name for _, name, _, _ in members]
        self.parameters = [parameter for _, _, parameter, _ in members]
        self.module_parameters = [module_parameter(parameter) for parameter in self.parameters]
        self.whole = [whole for _, _, _, whole in members]
        self._has_dtensors = any(map(is_dtensor, self.module_parameters))
        self._guard = ReadGuard(self.names, self.module_parameters)
        self.compute_form: ComputeForm | None = None
        self.forms: list[Unit] = []
        self.running: list[int] = []
        self.opened: list[tuple[int, int]] = []
        self.pin = Pin.NONE
        self.is_whole = False
        self._make_placeholders()
        self._samples: list[int] | None = None
        self.note_versions()

    def _make_placeholders(self) -> None:
        """Make one NaN a parameter, expanded to its shape."""
        dtypes = {parameter.dtype for parameter in self.parameters}
        self._bytes = {  # addresses of the placeholders' data, compared without a torch operation
            dtype: bytearray(b"\xff" * (dtype.itemsize * sum(p.dtype == dtype for p in self.parameters)))
            for dtype in dtypes
        }
        self._blank = {dtype: bytes(each) for dtype, each in self._bytes.items()}
        self._scalars = {dtype: torch.frombuffer(each, dtype=dtype) for dtype, each in self._bytes.items()}
        following = {dtype: iter(scalars) for dtype, scalars in self._scalars.items()}
        self.placeholders = [next(following[p.dtype]).expand(p.shape) for p in self.parameters]
        self._addresses = [each.data_ptr() for each in self.placeholders]
        self._whole_addresses = [each.data_ptr() for each in self.whole]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return True if `tensor` is in this unit's pages."""
        if self._has_dtensors and is_dtensor(tensor):
            tensor = held_tensor(tensor)
        address = address_of(tensor) if self.whole else 0
        return any(first <= address < first + whole.nbytes for first, whole in zip(self._whole_addresses, self.whole))

    def show_whole(self) -> None:
        """Make the parameters whole and readable."""
        self._guard.lower(self.module_parameters)
        for parameter, each in zip(self.parameters, self.whole):
            parameter.data = each

    def show_released(self) -> None:
        """Make the parameters NaN, so that reading them raises an error."""
        self._guard.lower(self.module_parameters)
        for parameter, each in zip(self.parameters, self.placeholders):
            parameter.data = each
        self._guard.raise_(self.module_parameters)

    def give_up(self, *, whole: bool = True) -> None:
        """Stop managing the parameters: they are readable, or released for the last time."""
        self._guard.is_orphan = True
        if whole:
            self._guard.lower(self.module_parameters)

    def data_pointers(self) -> list[int]:
        """Return the current address of each parameter's data."""
        with _hooks.unguarded():
            return list(map(torch.Tensor.data_ptr, self.parameters))

    def addresses(self) -> list[int]:
        """Return the expected address of each parameter's data now."""
        return self._whole_addresses if self.is_whole else self._addresses

    def all_addresses(self) -> set[int]:
        """Return the legal addresses of the parameters, whole or released."""
        return {*self._whole_addresses, *self._addresses}

    def take_written(self) -> str | None:
        """Return the name of a parameter whose placeholder was written to or replaced while it was released. Release it
        again.
        """
        found = self.data_pointers()
        if self._bytes == self._blank and found == self._addresses:
            return None
        written = [
            name
            for name, now, placeholder, address in zip(self.names, found, self.placeholders, self._addresses)
            if now != address or not bool(torch.isnan(placeholder.as_strided((1,), (1,))).all())
        ]
        for dtype, blank in self._blank.items():
            self._bytes[dtype][:] = blank
        self.show_released()
        return written[0] if written else None  # another NaN than ours is a write, but has no effect on training

    def note_versions(self) -> None:
        self._versions = self._read_versions()
        if self._samples is not None:
            self._samples = self._read_samples()

    def note_samples(self) -> None:
        """Record samples of the whole values, because a program can write to them through `.data` until the step."""
        if self._samples is None:
            self._samples = self._read_samples()

    def forget_samples(self) -> None:
        """Drop the samples of values that were released."""
        self._samples = None

    def _read_samples(self) -> list[int]:
        return [
            sample_crc32c(address, whole.nbytes, max(whole.nbytes // _SAMPLES, 64))
            for address, whole in zip(self._whole_addresses, self.whole)
        ]

    def _read_versions(self) -> list[int]:
        with _hooks.unguarded():
            return list(map(_version_of, self.parameters))

    def find_written(self) -> str | None:
        """Return the name of a parameter written since note_versions(), or through `.data` since note_samples()."""
        before, now = [self._versions], [self._read_versions()]
        if self._samples is not None:
            before.append(self._samples)
            now.append(self._read_samples())
        if before == now:
            return None
        changes = zip(self.names * len(now), itertools.chain(*before), itertools.chain(*now))
        return next(name for name, old, new in changes if old != new)

    def name_at(self, offset: int) -> str:
        """Return the parameter at a byte of the unit."""
        first = min(self._whole_addresses)
        places = sorted((address - first, name) for address, name in zip(self._whole_addresses, self.names))
        return next(name for begin, name in reversed(places) if begin <= offset)


class ComputeForm(Unit):
    """A unit in the dtypes in which its modules compute under a precision policy.

    It has separate memory; while it is whole, the modules' slots hold views of that. The parameters themselves stay
    released.

    Attributes
    ----------
    unit : Unit
        The unit itself.
    """

    is_compute_form = True
    unit: Unit

    def _make_placeholders(self) -> None:
        self._addresses = []
        self._whole_addresses = [each.data_ptr() for each in self.whole]
        self._positions = {id(parameter): position for position, parameter in enumerate(self.parameters)}

    def memory_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a parameter's values in its compute dtype."""
        return self.whole[self._positions[id(parameter)]]

    def show_whole(self) -> None:
        """Do nothing: modules read this memory through views of it."""

    show_released = show_whole

    def take_written(self) -> str | None:
        """Return the name of a parameter whose placeholder was written to, or replaced."""
        return None if self.unit.is_whole else self.unit.take_written()

    def count_writes(self) -> None:
        """Bump the version counter, so that autograd detects changed saved values."""
        for each in self.whole:
            torch.autograd.graph.increment_version(each)

    def _read_versions(self) -> list[int]:
        return list(map(_version_of, self.whole))


class UnitSchedule:
    """The units of one module, and the forwards and backwards that run in each unit.

    Parameters
    ----------
    units : Units
        The engine's units, or an object with their methods.
    plans : sequence of UnitPlan
        The outermost unit first.
    members : sequence of list
        The parameters of each unit: (number in the table, name, parameter, its whole data).
    abort : callable
        A function that sends the other ranks the reason why this rank stops.
    coded : bool
        True if running modules see parameters decoded from records; inside everything() they are exact.
    compute_members : sequence of list, optional
        The parameters of each unit's compute form, with their data there; empty for a unit without one. The engine
        numbers these forms after the units.

    Attributes
    ----------
    units : list of Unit
        The units, then their compute forms.
    ahead : dict
        For "forward" and "backward": a unit's number -> a callable that returns the units to gather ahead while it
        runs, if the program names them. No effect on the host.
    """

    unit_class = Unit
    compute_class: type[ComputeForm] = ComputeForm
    #: True if a failed backward releases its units at once, on its caller's thread; else the next forward does
    ends_failed_backwards = True

    def __init__(
        self,
        units: Any,
        plans: Sequence[UnitPlan],
        members: Sequence[list[tuple[int, str, torch.nn.Parameter, torch.Tensor]]],
        abort: Callable[[str], None],
        *,
        coded: bool = False,
        compute_members: Sequence[list[tuple[int, str, torch.nn.Parameter, torch.Tensor]]] = (),
    ) -> None:
        self._units = units
        self.ahead: dict[str, dict[int, Callable[[], list[Unit]]]] = {"forward": {}, "backward": {}}
        self._coded = coded
        self._abort = abort
        self.units = [self.unit_class(number, plan, each) for number, (plan, each) in enumerate(zip(plans, members))]
        self._plain = self.units.copy()
        for unit, plan, each in zip(self._plain, plans, compute_members):
            if each:
                unit.compute_form = self.compute_class(len(self.units), plan, each)
                unit.compute_form.unit = unit
                self.units.append(unit.compute_form)
        for form in (self.units[0], self.units[0].compute_form):
            if form is not None:
                form.is_outermost = True
        self._unit_of = {id(parameter): unit for unit in self._plain for parameter in unit.parameters}
        self._clock = itertools.count()
        self._tasks: set[int] = set()
        self._keepers = 0  # the number of open everything() contexts
        self._latest: Unit | None = None  # the unit of the forward that ended last
        self._turning: Unit | None = None  # the unit of the last forward before the previous backward
        self._handles: list[Any] = []
        # a module, and our two hooks on it
        self._hooked: list[tuple[weakref.ref[torch.nn.Module], int, int]] = []
        #: called with the parameters that are about to be released
        self.on_release: Callable[[], Callable[[Sequence[torch.Tensor]], None] | None] = type(None)
        #: returns whether a called module computes under a policy
        self.policy: Callable[[], Callable[[], bool] | None] = type(None)
        #: called before the next release, if a forked child may read units that are whole
        self.before_reuse: Callable[[], None] | None = None
        for unit in self.units:
            unit.show_released()
        for unit, plan in zip(self.units, plans):
            for module in plan.modules:
                self._hook_forward(unit, module)
        self._hook_states(plans[0].module)
        self._hook_holders(plans[0].module)

    def _hook_forward(self, unit: Unit, module: torch.nn.Module) -> None:
        before = _ModuleHook(self, type(self)._before_forward, unit.number)
        after = _ModuleHook(self, type(self)._after_forward, unit.number)
        handles = [
            module.register_forward_pre_hook(before, prepend=True),
            module.register_forward_hook(after, always_call=True),
        ]
        self._handles += handles
        self._hooked.append((weakref.ref(module), handles[0].id, handles[1].id))

    def arrange_hooks(self) -> None:
        """Move our hooks before and after all others, later ones included, so that those see whole parameters."""
        for reference, before, after in self._hooked:
            module = reference()
            if module is None:
                continue
            first, last = forward_hooks(module)
            if next(iter(first), before) != before and before in first:
                first.move_to_end(before, last=False)
            if next(reversed(last), after) != after and after in last:
                last.move_to_end(after)

    def _hook_states(self, module: torch.nn.Module) -> None:
        released = {id(p): unit.number for unit in self._plain for p in unit.module_parameters}
        for each in module.modules():
            numbers = {released[id(p)] for p in each.parameters(recurse=False) if id(p) in released}
            for number in sorted(numbers):
                hook = _ModuleHook(self, UnitSchedule._before_state_dict, number)
                self._handles.append(each.register_state_dict_pre_hook(hook))

    def _hook_holders(self, module: torch.nn.Module) -> None:
        """Hook the modules with parameters of the outermost unit that a program may call alone, such as an encoder."""
        members = {id(p) for p in self.units[0].module_parameters}
        for each in module.modules():
            if each is not module and any(id(p) in members for p in each.parameters(recurse=False)):
                hook = _ModuleHook(self, UnitSchedule._before_holder, 0)
                self._handles.append(each.register_forward_pre_hook(hook, prepend=True))

    def detach(self) -> None:
        """Remove the hooks from the modules."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooked.clear()

    # gathering and releasing --------------------------------------------------------------------------------------

    def _form_of(self, unit: Unit) -> Unit:
        """Return the form of a unit in which a module that is called now computes.

        Inside everything() parameters may be written, so modules compute with casts of their current values.
        """
        is_in_force = None if unit.compute_form is None or self._keepers else self.policy()
        return unit if is_in_force is None or not is_in_force() else unit.compute_form or unit

    def _gather(self, unit: Unit) -> None:
        if not unit.is_whole:
            self._check_released(unit)
            gather = self._units.gather_codes if self._coded and not self._keepers else self._units.gather
            if _hooks.profiler_enabled():
                parts = [(each.numel(), each.dtype) for each in unit.whole]
                with _hooks.collective_range("all_gather", f"unit {unit.number}, {unit.name or unit.names[0]}", parts):
                    gather(unit.number)
            else:
                gather(unit.number)
            unit.is_whole = True
            unit.show_whole()
            unit.note_versions()

    def _check_released(self, unit: Unit) -> None:
        """Raise Error, on all ranks, if a parameter was written to while it was released."""
        name, how = unit.take_written(), "was written to while it was released"
        offset = self._units.take_write(unit.number)
        if name is None and offset < 0:
            return
        if name is None:
            name, how = unit.name_at(offset), "was written to, through an older view of it, while it was released"
        self._refuse_write(name, how)

    def _refuse_write(self, name: str, how: str) -> NoReturn:
        message = f"parameter {name!r} {how}, and what was written is lost: write inside `with sw.full_parameters(module, writable=True)`"
        self._abort(message)  # the peers would wait for this rank's gradients
        raise Error(message)

    def _release(self, unit: Unit) -> None:
        if unit.is_whole:
            written = unit.find_written()
            listener = self.on_release()
            if listener is not None and not (unit.compute_form is not None and unit.compute_form.is_whole):
                listener(unit.parameters)
            unit.forget_samples()
            unit.show_released()
            if self.before_reuse is not None:
                self.before_reuse()
            self._units.release(unit.number)
            unit.is_whole = False
            if written is not None:
                self._refuse_write(written, "was written to while it was whole for the time of its unit's run only")

    def accept_writes(self) -> None:
        """Accept legal writes and the engine's own."""
        for unit in self.units:
            if isinstance(unit, ComputeForm):
                unit.count_writes()
            unit.note_versions()

    def _release_if_idle(self, unit: Unit) -> None:
        if not (unit.running or unit.opened or self._keepers) and unit.pin is Pin.NONE:
            self._release(unit)

    def release_all(self) -> None:
        """Forget everything gathered: the slices are about to change."""
        self._tasks.clear()
        for unit in self.units:
            unit.forms.clear()
            unit.running.clear()
            unit.opened.clear()
            if unit.pin is Pin.UNTIL_STEP:
                unit.pin = Pin.NONE
            self._release(unit)

    def gather_pinned(self) -> None:
        """Gather the units that are always whole."""
        for unit in self._plain:
            if self._keepers or unit.pin is Pin.BY_USER:
                self._gather(unit)

    @contextlib.contextmanager
    def everything(self) -> Iterator[None]:
        """Return a context in which all units are whole and exact."""
        if self._coded and not self._keepers:
            self._release_coded()
        self._keepers += 1
        try:
            for unit in self._plain:
                self._gather(unit)
            yield
        finally:
            self._keepers -= 1
            for unit in self.units:
                if self._coded and not self._keepers:
                    self._release(unit)  # gather_pinned() follows
                self._release_if_idle(unit)

    def _release_coded(self) -> None:
        """Release units that hold int8-rounded weights; raise if one is in use."""
        busy = next((unit for unit in self.units if unit.running or unit.opened or unit.pin is Pin.UNTIL_STEP), None)
        if busy is not None:
            raise Error(
                f"whole parameters of {busy.name or 'the outermost unit'!r} were asked for while it runs, or before the backward of its "
                "forward: with gather='int8' it computes with rounded ones, and a backward must see what its forward saw"
            )
        for unit in self.units:
            self._release(unit)

    def surrender(self, together: bool = False) -> None:
        """Give the parameters separate memory, except where their data was replaced, and end the schedule."""
        self.detach()
        units, self.units = self.units, []
        for unit in units:
            if (self._coded or unit.is_compute_form) and unit.is_whole:
                self._units.release(unit.number)
                unit.is_whole = False
            if unit.is_compute_form:
                continue
            if not unit.is_whole:
                self._gather_plainly(unit)
            unit.give_up()
            ours = unit.all_addresses()
            for parameter, whole in zip(unit.parameters, unit.whole):
                if parameter.data_ptr() in ours:
                    parameter.data = whole.clone(memory_format=torch.preserve_format)
            self._units.release(unit.number)

    def _gather_plainly(self, unit: Unit) -> None:
        """Gather a unit for the last time."""
        self._units.gather(unit.number)

    def pin(self, unit: Unit) -> None:
        unit.pin = Pin.BY_USER
        self._gather(unit)

    def unpin(self, unit: Unit) -> None:
        unit.pin = Pin.NONE
        self._release_if_idle(unit)

    def source_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the tensor with which a module computes now: the compute form's, the parameter itself, or None while
        it is released.
        """
        unit = self._unit_of.get(id(parameter))
        if unit is None or not self.units:
            return parameter if unit is None else None
        form = unit.compute_form
        if form is not None and form.is_whole and not self._keepers:
            return form.memory_of(parameter)
        return parameter if unit.is_whole else None

    @property
    def computed_with(self) -> list[torch.Tensor]:
        """Return the parameters that lie in compute forms."""
        return [p for unit in self.units if unit.is_compute_form for p in unit.parameters]

    def addresses(self) -> dict[int, int]:
        """Map the number of each parameter that can be released to the expected address of its data."""
        return {index: address for unit in self._plain for index, address in zip(unit.indices, unit.addresses())}

    def mapped(self) -> list[tuple[int, int]]:
        """Return (address, bytes) of the units that are whole."""
        found = []
        for unit in self.units:
            if unit.is_whole and unit.whole:
                begin = min(unit._whole_addresses)
                end = max(address + each.nbytes for address, each in zip(unit._whole_addresses, unit.whole))
                found.append((begin, end - begin))
        return found

    def stats(self) -> dict[str, Any]:
        return {"units": len(self._plain), **self._units.stats()}

    # hooks of modules -------------------------------------------------------------------------------------

    def _before_forward(self, unit: Unit, *_: Any) -> None:
        if unit is self.units[0]:
            self.arrange_hooks()
        if unit.compute_form is not None:
            unit.forms.append(self._form_of(unit))
            unit = unit.forms[-1]
        unit.running.append(next(self._clock))
        if _hooks.graph_task_id() == _NO_TASK:
            if self._tasks:  # no backward runs: an exception ended those still listed
                self._end_tasks(self._tasks.copy())
        self._gather(unit)

    def _after_forward(self, unit: Unit, module: torch.nn.Module, args: Any, output: Any) -> None:
        if unit.forms:
            unit = unit.forms.pop()
        if not unit.running:
            return  # another hook raised before ours
        begin, end = unit.running.pop(), next(self._clock)
        failed = output is None and sys.exc_info()[0] is not None
        differentiable = not failed and torch.is_grad_enabled()
        hooked = differentiable and self._hook_outputs(unit, begin, end, output)
        unannounced = differentiable and not hooked and any(p.requires_grad for p in unit.parameters)
        if unannounced or any(map(unit.holds, _hooks.find_tensors(output))):
            self._pin_until_step(unit)
        self._note_order(unit)
        if not hooked or (unit.reshard_after_forward and unit is not self._turning):
            self._release_if_idle(unit)

    def _note_order(self, unit: Unit) -> None:
        """Note the unit that runs last in a forward. It stays whole until the backward, which begins with it."""
        if unit.is_outermost:
            self._turning, self._latest = self._latest, None
        elif not unit.running:
            self._latest = unit

    def _hook_outputs(self, unit: Unit, begin: int, end: int, output: Any) -> bool:
        hook = _TensorHook(self, unit.number, begin, end)
        hooked = False
        for tensor in _hooks.find_tensors(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(hook)
                hooked = True
        return hooked

    def _before_backward(self, unit: Unit, begin: int, end: int) -> None:
        task = _hooks.graph_task_id()
        if task not in self._tasks:
            self._tasks.add(task)
            finish = functools.partial(weakly(self._end_tasks), [task])
            _hooks.queue_at_end(finish, finish if self.ends_failed_backwards else None)
        for other in self.units:
            if other.opened and min(other.opened)[0] > end:
                other.opened.clear()
                self._release_if_idle(other)
        if (begin, task) not in unit.opened:
            unit.opened.append((begin, task))
        self._gather(unit)
        if torch.is_grad_enabled() and unit.pin is Pin.NONE:  # create_graph: a backward of this backward will follow
            self._pin_until_step(unit)

    def _pin_until_step(self, unit: Unit) -> None:
        if unit.pin is not Pin.BY_USER:
            unit.pin = Pin.UNTIL_STEP
            unit.note_samples()

    def _end_tasks(self, tasks: Iterable[int]) -> None:
        ended = set(tasks)
        self._tasks -= ended
        opened = []
        for unit in self.units:  # remove all of them before the first release, which may raise
            if unit.opened:
                unit.opened = [each for each in unit.opened if each[1] not in ended]
                opened.append(unit)
        for unit in opened:
            self._release_if_idle(unit)

    def _before_holder(self, unit: Unit, *_: Any) -> None:
        """Gather the unit of a module that is called outside its unit's forward, and pin it until the step. Its pages
        are kept.
        """
        form = self._form_of(unit)
        if not form.is_whole:
            self._gather(form)
            self._pin_until_step(form)

    def _before_state_dict(self, unit: Unit, *_: Any) -> None:
        self.refuse(unit, "take the state_dict")

    def refuse(self, unit: Unit, what: str) -> None:
        """Raise Error if `unit` is released."""
        if not unit.is_whole:
            raise Error(_COPY.format(what=what))


class _ModuleHook:
    """A hook in a module's own dictionaries.

    It refuses to be copied with a released module. In a copy of a whole module it does nothing.
    """

    def __init__(self, schedule: UnitSchedule, method: Callable[..., None], number: int) -> None:
        self._schedule = weakref.ref(schedule)
        self._method = method
        self._number = number

    @_hooks.disable_compile
    def __call__(self, *arguments: Any) -> None:
        schedule = self._schedule()
        if schedule is not None and schedule.units:
            self._method(schedule, schedule.units[self._number], *arguments)

    def __deepcopy__(self, memo: Any) -> Any:
        return self._copy("copy it")

    def __reduce__(self) -> Any:
        return self._copy("pickle it").__reduce__()

    def _copy(self, what: str) -> NoHook:
        schedule = self._schedule()
        if schedule is not None and schedule.units:
            schedule.refuse(schedule.units[self._number], what)
        return NoHook()


class NoHook:
    """A hook that replaces one of ours in a copied module."""

    def __call__(self, *arguments: Any) -> None:
        pass

    def __reduce__(self) -> Any:
        return (NoHook, ())


class _TensorHook:
    """A hook on the outputs of one forward."""

    def __init__(self, schedule: UnitSchedule, number: int, begin: int, end: int) -> None:
        self._schedule = weakref.ref(schedule)
        self._arguments = (number, begin, end)

    def __call__(self, gradient: torch.Tensor) -> None:
        schedule = self._schedule()
        if schedule is not None and schedule.units:
            number, begin, end = self._arguments
            schedule._before_backward(schedule.units[number], begin, end)
