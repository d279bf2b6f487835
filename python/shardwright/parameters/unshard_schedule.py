"""Schedule of gathers and releases: a unit is whole around its modules' forwards, and again around their backwards.

Each forward of a unit has a beginning and an end, counted by one clock. Autograd runs the nodes of a graph in the
reverse of the order in which they were made. When the backward reaches the outputs of a forward, the backward of every
forward that began after its end is over. Those units are released. Remaining units are released at the end of the graph
task. Releasing is always safe: code that needs a unit gathers it first.

The engine's type knows whether a unit is whole and where it lies. Its gathers may be collectives (DeviceUnits). While a
unit computes, the units that followed it last time are then gathered ahead. Ranks must run the same units in the same
order; each round compares a digest of it. A unit always lies in the same place, since autograd keeps views of it. If
another unit that must stay whole occupies its place (both run at once, full_parameters(), unshard()), it is gathered
*apart*, into temporary memory.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch

from .._engine import Error
from ..layout.param_groups import UnitPlan
from ..torch_compat import autograd as _hooks
from ..torch_compat.dtensor import is_dtensor
from ..torch_compat.engine_storage import engine_tensor
from ..torch_compat.internals import forward_hooks
from .gathered_unit import BY_USER, NOT_PINNED, UNTIL_RUN, UNTIL_STEP, ComputeForm, Member, Span, Unit
from .sharded_parameter import ShardedParameter, leaf_entry

_NO_TASK = -1
_BY_PROGRAM = (BY_USER, UNTIL_RUN)
_COPY = (
    "this module's parameters are released, and each rank keeps slices of them: {what} inside "
    "`with sw.full_parameters(module)`, or use sw.full_state_dict(module)"
)


class UnitSchedule:
    """The units of one module, and the forwards and backwards that run in each unit.

    `units` are the engine's (Store or DeviceUnits), with compute forms after the units; the first plan is the outermost
    unit's. `compute_members` has each unit's parameters in its compute form, if any. `abort` sends the others the reason why
    this rank stops. `coded`: running modules see parameters decoded from records. `depth` units are gathered ahead, if
    gathers are collectives.
    """

    #: the units, then their compute forms
    units: list[Unit]

    def __init__(
        self,
        units: Any,
        plans: Sequence[UnitPlan],
        members: Sequence[list[Member]],
        abort: Callable[[str], None],
        *,
        coded: bool = False,
        compute_members: Sequence[list[Member]] = (),
        depth: int = 0,
    ) -> None:
        self._units = units
        self._meet: Callable[[], None] | None = None
        #: for each phase, a unit's number -> the units to gather ahead while it runs, if the program names them
        self.ahead: dict[str, dict[int, Callable[[], list[Unit]]]] = {"forward": {}, "backward": {}}
        self._coded, self._abort, self._depth = coded, abort, depth
        self._together: bool = units.is_collective
        self.units = [Unit(units, number, plan, each) for number, (plan, each) in enumerate(zip(plans, members))]
        self._plain = self.units.copy()
        for unit, plan, each in zip(self._plain, plans, compute_members):
            if each:
                unit.compute_form = ComputeForm(units, len(self.units), plan, each, unit)
                self.units.append(unit.compute_form)
                if units.is_collective:  # the form has its place
                    unit.lose_place()
        for form in (self.units[0], self.units[0].compute_form):
            if form is not None:
                form.is_outermost = True
        self._unit_of = {id(parameter): unit for unit in self._plain for parameter in unit.parameters}
        self._clock = itertools.count()
        self._tasks: set[int] = set()
        self._open: list[Unit] = []  # with an open backward
        # of each module with parameters of the outermost unit alone; those that may get a gradient in this backward; those
        # that get none, which no open round has been told yet
        self._holders: dict[int, Span] = {}
        self._due: list[Span] = []
        self._over: list[Span] = []
        self._outermost: list[tuple[int, int]] = []  # the forwards of the outermost unit in this backward
        self._keepers = 0  # the number of open everything() contexts
        self._latest: Unit | None = None  # the unit of the forward that ended last
        self._turning: Unit | None = None  # the unit of the last forward before the previous backward
        self.forget_order()
        self._handles: list[Any] = []
        # a module's two dictionaries of hooks, and our hook in each
        self._hooked: list[tuple[weakref.ref[Any], weakref.ref[Any], int, int]] = []
        #: called with the parameters that are about to be released
        self.on_release: Callable[[], Callable[[Sequence[torch.Tensor]], None] | None] = type(None)
        #: called with parameters that get no gradient in the rest of a backward; returns False while it has no round
        self.pass_over: Callable[..., bool] | None = None
        #: returns whether a called module computes under a policy
        self.policy: Callable[[], Callable[[], bool] | None] = type(None)
        #: returns the number of rounds so far
        self.rounds: Callable[[], int] = int
        #: called if the first round's backward may run others inside it
        self.on_nested_backward: Callable[[], None] = type(None)
        # until the first round: the parameters that its graph has a gradient for
        self._reached: set[int] | None = set()
        self._ran_without_gradients = False
        #: True once unshard() of fully_shard was called
        self._pins_until_run = False
        #: the numbers of all parameters, by id, those that are never released included
        self.number_of: dict[int, int] = {}
        #: called before the next release, if a forked child may read units that are whole
        self.before_reuse: Callable[[], None] | None = None
        for unit in self.units:
            unit.show_released()
        for unit, plan in zip(self.units, plans):
            for module in plan.modules:
                self._hook_forward(unit, module)
        self._hook_states(plans[0].module)
        self._hook_holders(plans[0].module)

    def forget_order(self) -> None:
        """Forget the order of units and record it anew."""
        self._before: dict[str, Unit | None] = {"forward": None, "backward": None}
        self._after: dict[str, dict[int, Unit]] = {"forward": {}, "backward": {}}

    def _hook_forward(self, unit: Unit, module: torch.nn.Module) -> None:
        before = ModuleHook(self, UnitSchedule._before_forward, unit.number)
        after = ModuleHook(self, UnitSchedule._after_forward, unit.number)
        handles = [
            module.register_forward_pre_hook(before, prepend=True),
            module.register_forward_hook(after, always_call=True, with_kwargs=True),
        ]
        self._handles += handles
        first, last = forward_hooks(module)
        self._hooked.append((weakref.ref(first), weakref.ref(last), handles[0].id, handles[1].id))

    def arrange_hooks(self) -> None:
        """Move our hooks before and after all others, later ones included, so that those see whole parameters."""
        for pre_hooks, hooks, before, after in self._hooked:
            first, last = pre_hooks(), hooks()
            if first is not None and before in first and next(iter(first)) != before:
                first.move_to_end(before, last=False)
            if last is not None and after in last and next(reversed(last)) != after:
                last.move_to_end(after)

    def _hook_states(self, module: torch.nn.Module) -> None:
        released = {id(p): unit.number for unit in self._plain for p in unit.module_parameters}
        for each in module.modules():
            numbers = {released[id(p)] for p in each._parameters.values() if id(p) in released}
            for number in sorted(numbers):
                hook = ModuleHook(self, UnitSchedule._before_state_dict, number)
                self._handles.append(each.register_state_dict_pre_hook(hook))

    def _hook_holders(self, module: torch.nn.Module) -> None:
        """Hook the modules with parameters of the outermost unit that a program may call alone, such as an encoder."""
        outermost = self.units[0]
        members = dict(zip(map(id, outermost.module_parameters), outermost.indices))
        held: dict[int, list[int]] = {}
        # torch uses the parameters of its out_proj without calling it
        whole = {
            id(one): id(each)
            for each in module.modules()
            if isinstance(each, torch.nn.MultiheadAttention)
            for one in each.children()
        }
        for each in module.modules():
            own = dict.fromkeys(id(p) for p in each._parameters.values() if id(p) in members)  # one may have two names
            for key in own:
                held.setdefault(key, []).append(whole.get(id(each), id(each)))
            if own and each is not module:
                hook = ModuleHook(self, UnitSchedule._before_holder, 0)
                self._handles.append(each.register_forward_pre_hook(hook, prepend=True))
        for key, holders in held.items():
            if len(holders) == 1 and holders[0] != id(module):
                self._holders.setdefault(holders[0], Span()).numbers.append(members[key])

    def detach(self) -> None:
        """Remove the hooks from the modules."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooked.clear()

    # gathering and releasing --------------------------------------------------------------------------------------

    def _form_of(self, unit: Unit) -> Unit:
        """Return the form in which a module called now computes; inside everything(), which may write, the unit itself."""
        is_in_force = None if unit.compute_form is None or self._keepers else self.policy()
        return unit if is_in_force is None or not is_in_force() else unit.compute_form or unit

    def _gather(self, unit: Unit, in_place: bool = False) -> None:
        """Make a unit whole. `in_place`: the graph that runs next holds views of its place."""
        if self._units.is_whole(unit.number):
            if not (in_place and self._units.is_apart(unit.number)):
                return
            self._release(unit)
        self._check_released(unit)
        exact = not self._coded or self._keepers > 0
        if _hooks.profiler_enabled():
            parts = [(each.numel(), each.dtype) for each in unit.whole]
            name = unit.name or ", ".join(unit.names[:1])
            with _hooks.collective_range("all_gather", f"unit {unit.number}, {name}", parts):
                self._fetch(unit, in_place, exact)
        else:
            self._fetch(unit, in_place, exact)
        unit.show_whole()
        unit.note_versions()

    def _fetch(self, unit: Unit, in_place: bool = True, exact: bool = True) -> None:
        """Gather a unit; not `in_place`: apart if it stays whole for long, or if another unit must stay in its place."""
        apart = not in_place and (self._keepers > 0 or unit.pin in _BY_PROGRAM)
        holder = self._units.gather(unit.number, apart, exact)
        if holder is not None:
            self._units.gather(unit.number, not self._leaves(self.units[holder], unit, in_place), exact)
        if self._units.is_apart(unit.number):
            parts = zip(unit.indices, unit.shapes)
            unit.lie_in([engine_tensor(self._units.tensor(unit.number, index, *shape)) for index, shape in parts])

    def _leaves(self, other: Unit, unit: Unit, in_place: bool) -> bool:
        """Return True if the holder of the place of `unit` could leave it. If not `in_place`, `unit` can lie apart."""
        if not (other.running or other.opened) and other.pin is not UNTIL_STEP:
            self._release(other)
            if other.pin in _BY_PROGRAM or (self._keepers and not other.is_compute_form):
                self._gather(other)  # apart
            return True
        if in_place:
            raise Error(
                f"units {unit.name or 'the outermost'!r} and {other.name or 'the outermost'!r} share memory on a GPU, and the backward "
                "needs both whole at once (create_graph=True, outputs in which no tensor is found, or outputs that are views of a "
                "parameter): pass reshard_after_forward=False, which gives each memory of its own"
            )
        return False

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
        if self._units.is_whole(unit.number):
            written = unit.find_written()
            listener, form = self.on_release(), unit.compute_form
            if listener is not None and not (form is not None and self._units.is_whole(form.number)):
                listener(unit.parameters)
            unit.show_released()
            if self.before_reuse is not None:
                self.before_reuse()
            self._leave(unit)
            if written is not None:
                self._refuse_write(written, "was written to while it was whole for the time of its unit's run only")

    def _leave(self, unit: Unit) -> None:
        if self._units.is_apart(unit.number):
            unit.lie_in(None)
        self._units.release(unit.number)

    def accept_writes(self) -> None:
        """Accept legal writes and the engine's own."""
        for unit in self.units:
            if isinstance(unit, ComputeForm):
                unit.count_writes()
            if self._units.is_whole(unit.number):  # else its next gather notes them
                unit.note_versions()

    def _release_if_idle(self, unit: Unit) -> None:
        if not (unit.running or unit.opened or self._keepers) and unit.pin is NOT_PINNED:
            self._release(unit)

    def release_idle(self) -> None:
        """Release the units in which nothing runs: their slices may have changed."""
        for unit in self.units:
            self._release_if_idle(unit)

    def show_rows(self, rows: Sequence[Sequence[ShardedParameter]], meet: Callable[[], None]) -> None:
        """Show each unit's parameters that fully_shard has cut as DTensors, from now on while the unit is released.

        `meet` makes what ranks wrote to their slices visible, before a gather that the program asks for, and lets them write
        again after it.
        """
        self._meet = meet
        for unit, cut in zip(self._plain, rows):
            unit.rows = cut
            unit.show_slots()

    def show_slots(self) -> None:
        """Put the right object of each of fully_shard's parameters into the module, if a precision policy has left it."""
        for unit in self._plain if self.policy() is not None else ():
            unit.show_slots()

    def release_all(self) -> None:
        """Forget everything gathered: the slices are about to change."""
        if self._together:
            self._drop_ahead()
        self._tasks.clear()
        for each in (self._open, self._due, self._over, self._outermost):
            each.clear()
        for span in self._holders.values():
            span.live.clear()
        for unit in self.units:
            unit.forms.clear()
            unit.running.clear()
            unit.opened.clear()
            unit.ran_apart.clear()
            unit.use.live.clear()
            if unit.pin is UNTIL_STEP:
                unit.pin = NOT_PINNED
            self._release(unit)

    def gather_pinned(self) -> None:
        """Gather the units that are always whole."""
        for unit in self._plain:
            if self._keepers or unit.pin is BY_USER:
                self._gather(unit)

    def gather_beside(self, number: int) -> None:
        """Take part in a gather of other ranks without making a unit whole here."""
        self.release_all()
        self._fetch(self.units[number])
        self._leave(self.units[number])

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
        busy = next((unit for unit in self.units if unit.running or unit.opened or unit.pin is UNTIL_STEP), None)
        if busy is not None:
            raise Error(
                f"whole parameters of {busy.name or 'the outermost unit'!r} were asked for while it runs, or before the backward of its "
                "forward: with gather='int8' it computes with rounded ones, and a backward must see what its forward saw"
            )
        for unit in self.units:
            self._release(unit)

    def surrender(self, *, whole: bool = True) -> None:
        """End the schedule, and give the parameters separate memory; not `whole`: they stay released, as on GPUs one by one."""
        with contextlib.nullcontext() if whole else contextlib.suppress(Error):  # a GPU that failed keeps no hooks
            if self._together:
                self._drop_ahead()
        self.detach()
        units, self.units = self.units, []
        for unit in units:
            if not whole:
                self._abandon(unit)
                continue
            if (self._coded or unit.is_compute_form) and self._units.is_whole(unit.number):
                self._leave(unit)
            if unit.is_compute_form:
                continue
            if not self._units.is_whole(unit.number):
                self._fetch(unit)
            unit.give_up()
            ours = {*unit.whole_addresses, *unit.released_addresses}
            for parameter, each in zip(unit.parameters, unit.whole):
                if parameter.data_ptr() in ours:
                    parameter.data = each.clone(memory_format=torch.preserve_format)
            self._leave(unit)

    def _abandon(self, unit: Unit) -> None:
        unit.give_up(whole=False)
        if self._units.is_whole(unit.number):
            unit.show_released()
            with contextlib.suppress(Error):
                self._leave(unit)

    def pin(self, unit: Unit) -> None:
        """Gather a unit until unpin(); apart, if it has a place, so that other units can use that."""
        if self._meet is not None:
            self._release_if_idle(unit)
            self._meet()
        if self._together and not (unit.running or unit.opened):
            self._release(unit)
        unit.pin = UNTIL_RUN if self._meet is not None else BY_USER
        self._pins_until_run |= self._meet is not None
        self._gather(unit)
        if self._meet is not None:
            self._meet()

    def _end_run(self, unit: Unit) -> None:
        """End what unshard() of fully_shard asked for: the unit's next run is over, in whichever form it computed."""
        for form in (unit, unit.unit) if isinstance(unit, ComputeForm) else (unit,):
            if form.pin is UNTIL_RUN:
                form.pin = NOT_PINNED
                if form is not unit:
                    self._release_if_idle(form)

    def unpin(self, unit: Unit) -> None:
        unit.pin = NOT_PINNED
        self._release_if_idle(unit)

    # gathering ahead ----------------------------------------------------------------------------------------------

    def _look_ahead(self, phase: str, unit: Unit) -> None:
        """Begin to gather the units that followed `unit`, or that the program names, up to one whose place is in use."""
        before = self._before[phase]
        if before is not None and before is not unit:
            self._after[phase][before.number] = unit
        self._before[phase] = unit
        named = self.ahead[phase].get(unit.unit.number if isinstance(unit, ComputeForm) else unit.number)
        for following in self._followers(phase, unit) if named is None else map(self._form_of, named()):
            if not self._units.ahead(following.number, self._keepers > 0 or following.pin is not NOT_PINNED):
                return

    def _followers(self, phase: str, unit: Unit) -> Iterator[Unit]:
        for _ in range(self._depth):
            following = self._after[phase].get(unit.number)
            if following is None:
                return
            unit = following
            yield unit

    def _drop_ahead(self) -> None:
        """Release units that were gathered ahead and not used."""
        self._units.drop_ahead()

    # where a parameter lies ---------------------------------------------------------------------------------------

    def source_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the tensor with which a module computes: the compute form's, the parameter itself, or None while released."""
        unit = self._unit_of.get(id(parameter))
        entry = leaf_entry(parameter) if unit is None and self._meet is not None else None
        if entry is not None:
            found = self.source_of(entry)
            return parameter if found is entry else found
        if unit is None or not self.units:
            is_released = unit is not None or (self._meet is not None and is_dtensor(parameter))
            return None if is_released else parameter
        form = unit.compute_form
        if form is not None and not self._keepers and self._units.is_whole(form.number):
            return form.memory_of(parameter)
        return parameter if self._units.is_whole(unit.number) else None

    @property
    def computed_with(self) -> list[torch.Tensor]:
        """Return the parameters that lie in compute forms."""
        return [p for unit in self.units if unit.is_compute_form for p in unit.parameters]

    def addresses(self) -> dict[int, int]:
        """Map the number of each parameter that can be released to the expected address of its data."""
        found = dict[int, int]()
        for unit in self._plain:
            is_whole = self._units.is_whole(unit.number)
            found.update(zip(unit.indices, unit.whole_addresses if is_whole else unit.released_addresses))
        return found

    def mapped(self) -> list[tuple[int, int]]:
        """Return (address, bytes) of the units that are whole."""
        return [span for unit in self.units for span in unit.span()]

    def state(self, unit: Unit) -> str:
        """Return "sharded", "gathering" or "unsharded"."""
        found: str = self._units.state(unit.number)
        return found

    def stats(self) -> dict[str, Any]:
        return {"units": len(self._plain), **self._units.stats()}

    # hooks of modules -------------------------------------------------------------------------------------

    def _before_forward(self, unit: Unit, *_: Any) -> None:
        if unit is self.units[0]:
            self.arrange_hooks()
        is_outermost = unit.is_outermost
        if unit.compute_form is not None:
            unit.forms.append(self._form_of(unit))
            unit = unit.forms[-1]
        unit.running.append(next(self._clock))
        is_recomputed = _hooks.graph_task_id() != _NO_TASK
        if not is_recomputed and self._tasks:  # no backward runs: an exception ended those still listed
            self._end_tasks(self._tasks.copy())
        self._gather(unit)
        if self._together and not is_recomputed:
            if is_outermost:
                self._before["forward"] = None
            self._look_ahead("forward", unit)

    def _after_forward(self, unit: Unit, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        plain = unit
        if unit.forms:
            unit = unit.forms.pop()
        if not unit.running:
            return  # another hook raised before ours
        begin, end = unit.running.pop(), next(self._clock)
        if plain.notes_runs and torch.is_grad_enabled() and _hooks.graph_task_id() == _NO_TASK:
            plain.last_run = begin, any(each.requires_grad for each in _hooks.find_tensors((args, kwargs)))
        if self._units.is_apart(unit.number):
            unit.ran_apart.add(begin)
        failed = output is None and sys.exc_info()[0] is not None
        differentiable = not failed and torch.is_grad_enabled()
        outputs = [*_hooks.find_tensors(output)]
        hooked = [each for each in outputs if each.grad_fn is not None] if differentiable else []
        hook = _TensorHook(self, unit.number, begin, end)
        for each in hooked:
            each.register_hook(hook)
        if hooked and self.pass_over is not None and _hooks.graph_task_id() == _NO_TASK:
            unit.use.live.add(begin)
        unannounced = differentiable and not hooked and any(p.requires_grad for p in unit.parameters)
        if unannounced or any(map(unit.holds, outputs)):
            self._pin_until_step(unit)
        # the unit that runs last in a forward stays whole until the backward, which begins with it
        if self._pins_until_run:
            self._end_run(unit)
        if unit.is_outermost:
            self._turning, self._latest = self._latest, None
            if self._reached is not None and differentiable:
                self._search(hooked)
            self._ran_without_gradients = False
        else:
            self._ran_without_gradients |= not differentiable
            if not unit.running:
                self._latest = unit
        turns = unit is self._turning and self._meet is None
        if not hooked or (unit.reshard_after_forward and not turns):
            self._release_if_idle(unit)
        if self._together and unit.is_outermost and not unit.running and _hooks.graph_task_id() == _NO_TASK:
            self._drop_ahead()

    @contextlib.contextmanager
    def running(self, unit: Unit, module: torch.nn.Module, args: Any, kwargs: Any) -> Iterator[Callable[[Any], None]]:
        """Return a context that is a forward of a unit's module, through another method. Call the result with its output."""
        outputs: list[Any] = []
        self._before_forward(unit)
        try:
            yield outputs.append
        finally:
            self._after_forward(unit, module, args, kwargs, outputs[-1] if outputs else None)

    def _before_backward(self, unit: Unit, begin: int, end: int) -> None:
        task = _hooks.graph_task_id()
        if not self._tasks:
            self._before["backward"] = None
            self._due = [*self._holders.values()]
            if self._reached is not None and self.pass_over is not None:  # on other ranks they may have run
                self._over = [
                    unit.use
                    for unit in self._plain
                    if not (unit.is_outermost or unit.use.live or self._keepers) and unit.pin is NOT_PINNED
                ]
        if unit.is_outermost and self.pass_over is not None:
            self._outermost.append((begin, end))
        if task not in self._tasks:
            self._tasks.add(task)
            finish = functools.partial(_end_task, weakref.ref(self), task)
            # A failed backward releases its units at once, on its caller's thread. On a GPU one of torch's threads may
            # drop it later, and the next forward releases them.
            _hooks.queue_at_end(finish, None if self._together else finish)
        ended = []  # a comprehension is a call more for each unit
        for other in self._open:
            if min(other.opened)[0] > end:
                ended.append(other)
        if self.pass_over is not None:
            self._pass_over(ended, end)  # before their release: `.grad` of a released parameter takes longer
        for other in ended:
            self._open.remove(other)
            other.opened.clear()
            if self._pins_until_run:
                self._end_run(other)
            self._release_if_idle(other)
        if (begin, task) not in unit.opened:
            if not unit.opened:
                self._open.append(unit)
            unit.opened.append((begin, task))
        self._gather(unit, begin not in unit.ran_apart)
        if torch.is_grad_enabled() and unit.pin is NOT_PINNED:  # create_graph: a backward of this backward will follow
            self._pin_until_step(unit)
        if self._together:
            self._look_ahead("backward", unit)

    def _pass_over(self, units: Iterable[Unit], end: int) -> None:
        """Let no mean wait for parameters that get no gradient any longer: the backward of `units` is over.

        Other ranks' GPUs wait for the mean, and their next gathers behind it, for which this rank may wait in turn. Parameters are those
        that only modules which ran after the forward that ended at `end` use.
        """
        assert self.pass_over is not None
        for unit in units:
            use, plain = unit.use, unit.unit if isinstance(unit, ComputeForm) else unit
            is_used_elsewhere = self._keepers > 0 or unit.pin is not NOT_PINNED or plain.pin is not NOT_PINNED
            if not is_used_elsewhere and use.live and min(use.live) > end:
                self._over.append(use)
            for begin, _ in unit.opened:
                use.live.discard(begin)
        for span in self._due.copy():  # of modules that have not run, and of those that ran after that forward
            if not span.live or min(span.live) > end:
                self._due.remove(span)
                self._over.append(span)
        if self._over:
            self._over = [span for span in self._over if not self._tell_over(span.numbers)]

    def _search(self, outputs: Collection[torch.Tensor]) -> None:
        """Learn from the graph of a forward what a first round would show only once its backward has ended.

        Parameters get a second gradient in a backward inside that one. It is run by a node of reentrant checkpointing, by a
        function that names a backward or inside of which units ran without gradients, around the whole forward, or by what
        no graph shows.
        """
        if self.rounds():
            self._reached = None
            return
        assert self._reached is not None
        leaves, nests = _hooks.search_graph(outputs)
        for leaf in leaves:
            parameter = leaf_entry(leaf) if self._meet is not None else None
            number = self.number_of.get(id(leaf if parameter is None else parameter))
            if number is not None:
                self._reached.add(number)
        if nests or not outputs or self._ran_without_gradients or _hooks.graph_task_id() != _NO_TASK:
            self.on_nested_backward()

    def _tell_over(self, numbers: Sequence[int]) -> bool:
        """Pass over parameters. In the first round only those that get no gradient: those that get a late one are noted."""
        assert self.pass_over is not None
        if self._reached is None:
            return self.pass_over(numbers)
        self.pass_over([each for each in numbers if each in self._reached], True)
        return self.pass_over([each for each in numbers if each not in self._reached])

    def _forget_holders(self) -> None:
        """Forget the forwards inside those of the outermost unit whose backward has ended."""
        for span in self._holders.values():
            for begin, end in self._outermost:
                span.live.difference_update([each for each in span.live if begin < each < end])
        self._due.clear()
        self._over.clear()
        self._outermost.clear()

    def _pin_until_step(self, unit: Unit) -> None:
        if unit.pin is not BY_USER:
            unit.pin = UNTIL_STEP
            unit.note_samples()

    def _end_tasks(self, tasks: Iterable[int]) -> None:
        ended = set(tasks)
        self._tasks -= ended
        opened = []
        for unit in self._open:  # remove all of them before the first release, which may raise
            for each in unit.opened.copy():
                if each[1] in ended:
                    unit.opened.remove(each)
                    unit.use.live.discard(each[0])
            opened.append(unit)
            if self._pins_until_run:
                self._end_run(unit)
        self._open = [unit for unit in opened if unit.opened]
        if not self._tasks and self.pass_over is not None:
            self._forget_holders()
        for unit in opened:
            self._release_if_idle(unit)
        if self._together and not self._tasks:
            with contextlib.suppress(Error):  # the next forward raises the communicator's error
                self._drop_ahead()

    def _before_holder(self, unit: Unit, module: torch.nn.Module, *_: Any) -> None:
        """Gather the unit of a module called outside its unit's forward, and pin it until the step. Its pages are kept."""
        span = None if self.pass_over is None else self._holders.get(id(module))
        if span is not None and torch.is_grad_enabled() and _hooks.graph_task_id() == _NO_TASK:
            span.live.add(next(self._clock))
        form = self._form_of(unit)
        if not self._units.is_whole(form.number):
            self._gather(form)
            self._pin_until_step(form)

    def _before_state_dict(self, unit: Unit, *_: Any) -> None:
        if self._meet is not None:
            self._show_state(unit)
        else:
            self.refuse(unit, "take the state_dict")

    def _show_state(self, unit: Unit) -> None:
        """Show a unit's DTensors, unless it runs or full_parameters() is open. A backward gathers it again."""
        for form in (unit, unit.compute_form):
            if form is not None and not (form.running or self._keepers):
                form.pin = NOT_PINNED
                self._release(form)

    def show_states(self) -> None:
        """Show all DTensors, which a program is about to read or load."""
        for unit in self._plain:
            self._show_state(unit)

    def refuse(self, unit: Unit, what: str) -> None:
        """Raise Error if `unit` is released."""
        if not self._units.is_whole(unit.number):
            raise Error(_COPY.format(what=what))


def _end_task(schedule: weakref.ref[UnitSchedule], task: int) -> None:
    alive = schedule()
    if alive is not None:
        alive._end_tasks([task])


class ModuleHook:
    """A hook in a module's dictionaries that calls its owner's method, with unit `number`. In a copy it does nothing."""

    def __init__(self, owner: Any, method: Callable[..., None], number: int | None = None) -> None:
        self._owner = weakref.ref(owner)
        self._method = method
        self._number = number

    @_hooks.disable_compile
    def __call__(self, *arguments: Any) -> None:
        owner = self._owner()
        if owner is None:
            return
        if self._number is None:
            self._method(owner, *arguments)
        elif owner.units:
            self._method(owner, owner.units[self._number], *arguments)

    def __deepcopy__(self, memo: Any) -> Any:
        return self._copy("copy it")

    def __reduce__(self) -> Any:
        return self._copy("pickle it").__reduce__()

    def _copy(self, what: str) -> NoHook:
        owner = self._owner()
        if owner is not None and self._number is not None and owner.units:
            owner.refuse(owner.units[self._number], what)
        return NoHook()


class NoHook:
    """A hook that replaces one of ours in a copied module."""

    def __call__(self, *arguments: Any) -> None:
        pass

    def __reduce__(self) -> Any:
        return (NoHook, ())


class _TensorHook:
    def __init__(self, schedule: UnitSchedule, number: int, begin: int, end: int) -> None:
        self._schedule = weakref.ref(schedule)
        self._arguments = (number, begin, end)

    def __call__(self, gradient: torch.Tensor) -> None:
        schedule = self._schedule()
        if schedule is not None and schedule.units:
            number, begin, end = self._arguments
            schedule._before_backward(schedule.units[number], begin, end)
