"""fully_shard: zero=3 with private parameters, applied module by module and in place, like torch's FSDP2.

    for block in model.blocks:
        sw.fully_shard(block)
    sw.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())

Parameters become DTensors over each rank's rows, and the instance's class a subclass made for it. The outermost module
makes the engine when it is first needed: in its first forward, or in a function that needs whole parameters
(docs/design/fully_shard.md).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import glob
import math
import os
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, overload

import torch

from .._engine import Error
from ..comm.process_group import in_rank_order, resolve_group
from ..gradients.sharded_gradient import ShardedGradient
from ..layout.local_parameters import SHARDED
from ..layout.param_groups import mark_of
from ..options.checks import offload_kinds
from ..options.keywords import FullyShardOptions
from ..options.options import Options, describes_options, refuse_options
from ..options.precision import Precision
from ..parameters.building import Values
from ..parameters.gathered_unit import Unit
from ..parameters.rows import find_rows
from ..parameters.sharded_parameter import ShardedParameter, shared_memory
from ..parameters.unshard_schedule import UnitSchedule
from ..torch_compat.autograd import graph_task_id
from ..torch_compat.dtensor import flattened, is_dtensor, mesh_of_group, step_on_local_tensors
from ..torch_compat.foreign_wrappers import guard_from_wrappers, note_fully_shard
from ..torch_compat.internals import fsdp2_groups, fsdp_module_of_torch, fsdp_policy, offload_policy_of_torch
from ..torch_compat.weak import weakly
from .engine import Engine, engine_of, register_face
from .unit_calls import reduce_plainly

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclasses.dataclass(eq=False, repr=False)
class Mark:
    """The mark of fully_shard on a module: its options and its unit; with groups= one unit for each part.

    `near`: the number of ranks that keep the unit after its forward; 0: all of them.
    `releases_outermost`: the program asked for it by name. `is_list`: fully_shard got several modules, which form one unit
    and share this mark. `engine`: of an outermost module.
    `ahead`: for each phase the units to gather ahead, if the program names them. `divide_factor`: the divisor of gradients
    that the program sets. `placement`: FSDP2's shard_placement_fn. `rows`: the unit's parameters, cut over `mesh`. `inner`: of
    the outermost module, the marks inside it. `outer`: the outermost module that fully_shard was called on around it, if it
    takes part there. `_owner`: the engine that runs it.
    `position`: its place among the marks of that engine.
    """

    reshard_after_forward: bool
    options: dict[str, Any]
    precision: Precision | None = None
    is_list: bool = False
    syncs: bool = True
    all_reduces: bool = True
    reduce_hook: Callable[[torch.Tensor], None] | None = None
    near: int = 0
    releases_outermost: bool = False
    engine: Engine | None = None
    ahead: dict[str, list[Mark]] = dataclasses.field(default_factory=dict)
    divide_factor: float | None = None
    _own: list[tuple[ShardedParameter, int]] = dataclasses.field(default_factory=list)
    _handles: list[Any] = dataclasses.field(default_factory=list)
    placement: Callable[[torch.nn.Parameter], Any] | None = None
    _units: list[tuple[weakref.ref[UnitSchedule], int]] = dataclasses.field(default_factory=list)
    rows: list[ShardedParameter] = dataclasses.field(default_factory=list)
    mesh: Any = None
    inner: list[Mark] = dataclasses.field(default_factory=list)
    outer: Callable[[], FSDPModule | None] = lambda: None
    _owner: Callable[[], Engine | None] = lambda: None
    position: int = 0

    def join(self, schedule: UnitSchedule, unit: int) -> None:
        """Record that the module became a unit."""
        self._units = [(weakref.ref(each), of.number) for each, of in self.places() if each is not schedule]
        self._units.append((weakref.ref(schedule), unit))
        for phase in self.ahead:
            schedule.ahead[phase][unit] = functools.partial(self._units_ahead, phase, weakref.ref(schedule))

    def look_ahead(self, phase: str, marks: list[Mark]) -> None:
        """Gather the units of `marks` ahead while this unit runs."""
        self.ahead[phase] = marks
        for schedule, unit in self.places():
            self.join(schedule, unit.number)

    def _units_ahead(self, phase: str, schedule: weakref.ref[UnitSchedule]) -> list[Unit]:
        return [unit for mark in self.ahead[phase] for of, unit in mark.places() if of is schedule()]

    def places(self) -> list[tuple[UnitSchedule, Unit]]:
        """Return the module's units; none before they are made and after they end."""
        found = ((schedule(), unit) for schedule, unit in self._units)
        return [(each, each.units[unit]) for each, unit in found if each is not None and each.units]

    def set_divisor(self, rows: Sequence[ShardedParameter], sums: bool) -> None:
        """Record the unit's parameters, and by what the engine divides their gradients: the ranks of their mesh, or 1 if it sums."""
        for handle in self._handles:  # of an engine that ended
            handle.remove()
        self._own, self._handles = [(each, 1 if sums else each.mesh.size()) for each in rows], []
        self.scale()

    def set_factor(self, factor: float) -> None:
        """Set the program's divisor. Raise Error if gradients wait for their average, which the last one has scaled."""
        gradients = [each.whole.grad for each, _ in self._own if each.whole is not None]
        engine = self._owner()
        kept = engine is not None and any(each.reducer.stays_in_rows for each in engine.made)
        if factor != self.divide_factor and (kept or any(map(_waits, gradients))):
            raise Error(
                f"set_gradient_divide_factor({factor:g}) between micro-batches: their gradients were divided by another factor, and are "
                "not averaged yet: call it before the first micro-batch of a step"
            )
        self.divide_factor = factor
        self.scale()

    def scale(self) -> None:
        """Multiply this unit's gradients where the engine divides by another factor than the program set."""
        engine = self._owner()
        scales = any(self.divide_factor not in (None, divides_by) for _, divides_by in self._own)
        if engine is not None and (scales or engine.options.reduce == "sum"):
            for replica in engine.made:
                replica.gradients.adds_apart = True
        if not scales or self._handles:
            return
        for each, divides_by in self._own:
            parameter = each.whole
            if parameter is not None and (parameter.is_floating_point() or parameter.is_complex()):
                trains = parameter.requires_grad
                parameter.requires_grad_(True)  # a frozen one may train later
                self._handles.append(parameter.register_hook(_GradientScale(weakref.ref(self), divides_by)))
                parameter.requires_grad_(trains)

    def hook_means(self) -> None:
        """Let `reduce_hook`, if there is one, change the means of this unit's parameters."""
        engine = self._owner()
        for replica in engine.made if engine is not None else ():
            own = replica.gradients
            own.reduce_hooks = [each for each in own.reduce_hooks if each[1] is not self.rows]
            if self.reduce_hook is not None:
                own.reduce_hooks.append((self.reduce_hook, self.rows, weakly(self._turn, (1, 0))))
                own.adds_apart = True  # the hook gets a round's mean without the one that stands
        for _, unit in self.places():
            unit.notes_runs = self.reduce_hook is not None

    def _turn(self) -> tuple[int, int]:
        """Return a key that sorts units as FSDP2's backward ends them: in reverse, and those that no gradient leaves at last."""
        runs = [unit.last_run for _, unit in self.places() if unit.last_run is not None and unit.last_run[1]]
        return (0, -max(runs)[0]) if runs else (1, self.position)

    def all_reduces_any(self) -> bool:
        """Return True if this unit, the outermost, or one inside it averages over the rows of its mesh."""
        return self.all_reduces or any(mark.all_reduces for mark in self.inner)

    @property
    def syncs_any(self) -> bool:
        """Return True if this unit, the outermost, or one inside it averages."""
        return self.syncs or any(mark.syncs for mark in self.inner)

    @property
    def runner(self) -> Engine | None:
        """Return the engine that runs this module's forward now: none inside another forward of that engine."""
        engine = self.engine or (self._owner() if graph_task_id() < 0 else None)  # else a recomputation
        return None if engine is None or engine.runs else engine

    def make(self, module: torch.nn.Module) -> None:
        """Make the engine of the outermost module around `module`, unless there is one. Collective if it makes one."""
        outer = self.outer()
        if self.places() or (self.engine is not None and self.engine.is_in_force):
            return
        with torch.inference_mode(False):  # what is made here trains later
            self._make_outermost(module, outer)

    def _make_outermost(self, module: torch.nn.Module, outer: FSDPModule | None) -> None:
        if outer is not None:
            outer._shardwright_mark.make(outer)
            return
        if self.is_list:
            raise Error(
                f"this {type(module).__name__} was passed to sw.fully_shard in a list, and has no engine yet: call sw.fully_shard on the "
                "outermost module too, and run that module first"
            )
        ignored = _ignored(module, self.options["ignored_params"])
        marks = [mark for each in module.modules() if (mark := mark_of(each)) is not None]
        rows = [each for mark in dict.fromkeys(marks) if mark.engine is None for each in mark.rows]
        rows = [each for each in rows if id(each.sharded) not in ignored]
        if not rows:
            return  # nothing to gather or to average
        for each in rows:
            each.adopt()
            each.check_buildable()
        waiting = [each for each in rows if each.waits]
        if waiting and not (self.options["init"] or self.options["weights"] or all(each.is_stored for each in waiting)):
            of_unit = next(ids for mark in marks if (ids := {id(r.sharded) for r in mark.rows if r in waiting}))
            names = [name for name, p in module.named_parameters() if id(p) in of_unit]
            raise RuntimeError(
                "FSDP parameters should be materialized from meta device before training, but the following were still on meta device: "
                f"{names}, of {len(waiting)} in all: call to_empty(device=...) and give them values, or pass init= or weights= to "
                "sw.fully_shard"
            )
        shared = shared_memory(rows)
        for each in rows:
            each.make_whole(shared)
        del shared
        try:
            engine = self._make(module, rows, ignored)
        except BaseException:
            for each in rows:
                each.show(each.sharded)
            raise
        self.inner = [mark for mark in dict.fromkeys(marks) if mark is not self]
        for position, mark in enumerate(dict.fromkeys(marks)):
            mark.position = position
            mark._owner = weakref.ref(engine)
            mark.scale()
            mark.hook_means()
        engine.all_reduces = weakly(self.all_reduces_any, True)

    def _make(self, module: torch.nn.Module, rows: list[ShardedParameter], ignored: set[int]) -> Engine:
        """Make the engine with `module` as outermost, whose whole parameters stand in their slots."""
        resolve_group(self.options.get("process_group"), self.options.get("device_mesh"), trains=True)
        options = {**self.options, "groups": self.options.get("groups") or _groups(module, self.options, ignored)}
        self._check_meshes(module, rows)
        own = _own_rows(module, ignored)
        factors = {mark.divide_factor for mark in own}
        if "reduce" not in options and len(factors) == 1 and factors.isdisjoint((None, self.mesh.size())):
            options["reduce"] = "sum"
        stage = {"zero": 3, "share_parameters": False, "precision": _policies(module)}
        values = Values(options.pop("init"), options.pop("weights"), rows=rows)
        self.engine = engine = Engine(module, Options.from_keywords({**options, **stage}), values=values)
        engine.keep()
        for mark, each in own.items():
            mark.set_divisor(each, engine.options.reduce == "sum")
        guard_from_wrappers(engine, module)
        engine.show_rows()
        return engine

    def _check_meshes(self, module: torch.nn.Module, rows: Collection[ShardedParameter]) -> None:
        """Raise ValueError if an inner call without a mesh has cut over other ranks than this one."""
        mine = set(map(id, rows))
        for name, each in module.named_modules():
            mark = mark_of(each)
            if mark is None or mark.options["device_mesh"] is not None or not any(id(r) in mine for r in mark.rows):
                continue
            if mark.mesh.mesh.tolist() != self.mesh.mesh.tolist():
                raise ValueError(
                    f"sw.fully_shard of the inner module {name!r} got no mesh, and cut its parameters over {mark.mesh}; that of the outermost "
                    f"module got {self.mesh}: pass mesh to both"
                )


def _waits(gradient: torch.Tensor | None) -> bool:
    """Return True for a gradient with parts that are not averaged."""
    if isinstance(gradient, ShardedGradient):
        return gradient._pending is not None
    return gradient is not None


class _GradientScale:
    """A hook of a parameter that multiplies gradients by the engine's divisor over the program's. In a copy it does nothing."""

    def __init__(self, mark: Callable[[], Mark | None] = lambda: None, divides_by: int = 1) -> None:
        self._mark, self._divides_by = mark, divides_by

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        mark = self._mark()
        if mark is None or mark.divide_factor in (None, self._divides_by):
            return gradient
        return gradient * (self._divides_by / mark.divide_factor)

    def __reduce__(self) -> Any:
        return _GradientScale, ()


class Gathered:
    """The handle of a completed unshard()."""

    def wait(self) -> None:
        """Do nothing."""


def _tunes(name: str, why: str) -> Callable[..., None]:
    """Return a method of FSDP2 that only tunes how FSDP2 communicates: it warns once and changes nothing."""

    def method(self: Any, *args: Any, **kwargs: Any) -> None:
        if name not in _warned:
            _warned.add(name)
            warnings.warn(f"{name}() has no effect on sw.fully_shard: {why}", stacklevel=2)

    method.__name__, method.__qualname__ = name, f"FSDPModule.{name}"
    method.__doc__ = f"Accept FSDP2's call without effect: {why}."
    return method


_warned: set[str] = set()
_OWN_TRANSPORT = "the engine has its own communicators"
_OWN_MEMORY = "the engine plans its buffers as it is made"


def _policies(module: torch.nn.Module) -> dict[str, Any] | None:
    """Return the precision options of fully_shard for `module` and the modules inside it."""
    marks = {name: mark_of(each) for name, each in module.named_modules()}
    return {name: mark.precision for name, mark in marks.items() if mark is not None and mark.precision} or None


def _ignored(module: torch.nn.Module, given: Collection[Any]) -> set[int]:
    """Return the ids of ignored parameters, which are given by name or as they are."""
    names = {each for each in given if isinstance(each, str)}
    named = module.named_parameters(remove_duplicate=False) if names else ()
    return {*(id(each) for each in given), *(id(p) for name, p in named if name in names)}


def _own_rows(module: torch.nn.Module, ignored: Collection[int]) -> dict[Mark, list[ShardedParameter]]:
    """Return each mark inside `module` that has parameters, and these."""
    marks = [mark for each in module.modules() if (mark := mark_of(each)) is not None]
    found = {mark: [each for each in mark.rows if id(each.sharded) not in ignored] for mark in marks}
    return {mark: rows for mark, rows in found.items() if rows}


def _groups(
    module: torch.nn.Module, options: dict[str, Any], ignored: Collection[int]
) -> dict[torch.nn.Module, Any] | None:
    """Map the inner modules of DTensors with another mesh than the outermost module (experts) to their meshes."""
    outer, ranks = options.get("device_mesh"), [0]
    if outer is not None:
        ranks = outer.mesh.tolist()
    elif torch.distributed.is_initialized():
        group = options.get("process_group") or torch.distributed.group.WORLD
        ranks = torch.distributed.get_process_group_ranks(group)
    found: dict[Any, Any] = _placed_apart(module, ranks, ignored)
    for each in module.modules():
        mark = mark_of(each)
        mesh = None if mark is None or each is module else mark.options.get("device_mesh")
        own = [p for p in each.parameters() if id(p) not in ignored]
        if mesh is not None and mesh.mesh.tolist() != ranks and own and all(map(is_dtensor, own)):
            found[each] = mesh
    return found or None


def _placed_apart(module: torch.nn.Module, ranks: list[Any], ignored: Collection[int]) -> dict[Any, Any]:
    """Map names of parameters to the meshes of other ranks that shard_placement_fn returns for them."""
    found = {}
    for name, parameter in module.named_parameters():
        above = name.rpartition(".")[0]
        while above and mark_of(module.get_submodule(above)) is None:
            above = above.rpartition(".")[0]
        mark = mark_of(module.get_submodule(above))
        if mark is None or mark.placement is None or id(parameter) in ignored:
            continue
        # not asked again: programs tell parameters by the objects that the call got
        cut = getattr(parameter, SHARDED, None)
        if cut is not None and cut.mesh.mesh.tolist() != ranks:
            found[glob.escape(name)] = cut.mesh
    return found


class FSDPModule(torch.nn.Module):
    """The base class that fully_shard adds to the class of a module."""

    _shardwright_mark: Mark
    _shardwright_original: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(super().__call__, args, kwargs)

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make one of the original class: model[:2] of a Sequential is no unit."""
        original = cls._shardwright_original
        made = original.__new__(original)
        made.__init__(*args, **kwargs)
        return made

    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("FSDP does not support deepcopy. Please use state dict for serialization.")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, also of parameters that are whole."""
        for each in self.modules():
            for cut in getattr(mark_of(each), "rows", ()):
                if set_to_none or cut.sharded.grad is None:
                    cut.sharded.grad = None
                else:
                    cut.sharded.grad.zero_()
        self._shardwright_original.zero_grad(self, set_to_none)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Convert or move the module's DTensors. The next forward takes over what stands in their places."""
        for schedule, _ in self._shardwright_mark.places():
            schedule.show_states()
        return self._shardwright_original._apply(self, *args, **kwargs)

    def _run(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        mark = self._shardwright_mark
        mark.make(self)
        engine = mark.runner
        if engine is None:
            return call(*args, **kwargs)
        syncs = mark.syncs if mark.engine is None else mark.syncs_any
        if engine.require_backward_grad_sync is not syncs and not engine.is_held:
            engine.set_requires_gradient_sync(syncs)
        return engine.run(call, args, kwargs)

    def _placed(self) -> list[tuple[UnitSchedule, Unit]]:
        self._shardwright_mark.make(self)
        return self._shardwright_mark.places()

    def unshard(self, async_op: bool = False) -> Gathered | None:
        """Gather this module's unit until reshard(), with `async_op` as FSDP2 does. An inner one needs the outermost's engine."""
        for schedule, unit in self._placed():
            schedule.pin(unit)
        return Gathered() if async_op else None

    def reshard(self) -> None:
        """Release this module's unit, now or as soon as none of its modules runs."""
        for schedule, unit in self._placed():
            schedule.unpin(unit)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backwards add up on each rank. For the outermost module."""
        self._outermost("no_sync")
        return self._without_sync()

    @contextlib.contextmanager
    def _without_sync(self) -> Iterator[None]:
        marks = [mark for each in self.modules() if (mark := mark_of(each)) is not None]
        before = [mark.syncs for mark in marks]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for mark, syncs in zip(marks, before):
                mark.syncs = syncs
            self.set_requires_gradient_sync(self._shardwright_mark.syncs, recurse=False)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether backwards average gradients from now on: those of this module's own forwards.

        A forward of the outermost module averages all gradients unless all of its units are told not to. Sums are the same.
        """
        for each in self.modules() if recurse else (self,):
            mark = mark_of(each)
            if mark is not None:
                mark.syncs = bool(requires_gradient_sync)
        engine = self._shardwright_mark.engine
        if engine is not None:
            engine.set_requires_gradient_sync(self._shardwright_mark.syncs_any)

    def set_modules_to_forward_prefetch(self, modules: Sequence[torch.nn.Module]) -> None:
        """Gather the units of `modules` while this module's forward runs, not those that followed it last time.

        Call it alike on all ranks, on GPUs before the first run, which makes the places. No effect on the host.
        """
        self._shardwright_mark.look_ahead("forward", _marks_of(modules, "set_modules_to_forward_prefetch"))

    def set_modules_to_backward_prefetch(self, modules: Sequence[torch.nn.Module]) -> None:
        """Gather the units of `modules` while this module's backward runs. See set_modules_to_forward_prefetch."""
        self._shardwright_mark.look_ahead("backward", _marks_of(modules, "set_modules_to_backward_prefetch"))

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accept FSDP2's call without effect: set_requires_gradient_sync() marks the last backward."""

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Accept FSDP2's call without effect: units are always released after a backward."""

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether this unit, with `recurse` those inside it, is released after its forward. The outermost never is."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward must be True or False, got {reshard_after_forward!r}")
        for each in self.modules() if recurse else (self,):
            mark = mark_of(each)
            if mark is None:
                continue
            mark.reshard_after_forward, mark.near = reshard_after_forward, 0
            for _, unit in mark.places():
                for form in () if unit.is_outermost else filter(None, (unit, unit.compute_form)):
                    form.reshard_after_forward = reshard_after_forward

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backwards average over the rows of a mesh (replicate, shard); else each row adds up its own sums.

        Rows add up unless some unit is told to average. `.grad` stands meanwhile; the next mean includes the sums. Over
        hosts it is averaged each time if a row lies on several, which costs fewer bytes; so it is where GPUs fold in rank order.
        """
        for each in self.modules() if recurse else (self,):
            mark = mark_of(each)
            if mark is not None:
                mark.all_reduces = bool(requires_all_reduce)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of this unit's gradients over ranks by `factor`; by default by the number of ranks of their mesh.

        A factor of 1 set on all units before the first run costs nothing: the engine then sums. Any other one multiplies
        each gradient of the unit in a hook, without rounding for powers of two. Call it alike on all ranks, before the first
        micro-batch of a step. With groups= a group's mean is scaled alike.

        Raises
        ------
        ValueError
            For a factor that is not finite and above 0.
        Error
            If gradients of the unit wait for their average: an earlier factor has scaled them.
        """
        if not 0 < factor < math.inf:
            raise ValueError(f"set_gradient_divide_factor needs a finite factor > 0, got {factor!r}")
        self._shardwright_mark.set_factor(factor)

    set_reduce_scatter_divide_factor = set_gradient_divide_factor

    def set_post_optim_event(self, event: Any) -> None:
        """Make torch's current stream wait for `event`, recorded after a step: gathers follow that stream. No effect on the CPU."""
        event.wait()

    def reset_iter_state(self) -> None:
        """Release every unit after an exception in a forward or backward. For the outermost module."""
        self._outermost("reset_iter_state")
        for schedule in {id(schedule): schedule for schedule, _ in self._placed()}.values():
            schedule.release_all()

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: Any = None) -> None:
        """Call `hook` after each round with this unit's new means on this rank, flat and in its parameters' order, to change in place.

        It runs before means are added to `.grad`, in FSDP2's order: units that run last come first, and at last those whose inputs
        require no gradient. `stream`: where it runs on a GPU. ValueError for one on a mesh of two dimensions, as FSDP2's.
        """
        mark = self._shardwright_mark
        if stream is not None and mark.mesh.ndim > 1:
            raise ValueError("stream cannot be set when using native HSDP")
        mark.reduce_hook = hook if stream is None else functools.partial(_on_stream, hook, stream)
        mark.hook_means()

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Set whether a parameter that no rank used gets a gradient of zeros. One that some rank used is averaged in any case."""
        for each in self.modules() if recurse else (self,):
            mark = mark_of(each)
            for row in () if mark is None else mark.rows:
                row.zeroes_unused = bool(reduce_scatter_unused_params)

    set_force_sum_reduction_for_comms = _tunes(
        "set_force_sum_reduction_for_comms", "the engine adds and divides itself"
    )
    set_unshard_in_backward = _tunes("set_unshard_in_backward", "a unit is gathered whenever a backward may read it")
    set_custom_all_gather = _tunes("set_custom_all_gather", _OWN_TRANSPORT)
    set_custom_reduce_scatter = _tunes("set_custom_reduce_scatter", _OWN_TRANSPORT)
    set_separate_reduce_scatter_group = _tunes("set_separate_reduce_scatter_group", _OWN_TRANSPORT)
    set_symm_mem_for_comm = _tunes("set_symm_mem_for_comm", _OWN_MEMORY)
    set_allocate_memory_from_process_group_for_comm = _tunes(
        "set_allocate_memory_from_process_group_for_comm", _OWN_MEMORY
    )

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int) -> None:
        """Accept FSDP2's call without effect: the engine plans its buffers as it is made. Raise for what is no count >= 1."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, got {max_input_buffers!r}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be >= 1, got {max_input_buffers}")
        _tunes("set_reduce_scatter_max_input_buffers", _OWN_MEMORY)(self)

    def _outermost(self, what: str) -> Engine:
        engine = engine_of(self)
        if engine is None:
            raise Error(f"{what}() is asked of the outermost module that sw.fully_shard was called on")
        return engine

    __reduce_ex__ = reduce_plainly


def _on_stream(hook: Callable[[torch.Tensor], None], stream: Any, flat: torch.Tensor) -> None:
    device = getattr(torch, flat.device.type)
    current = device.current_stream(flat.device)
    stream.wait_stream(current)
    with device.stream(stream):
        hook(flat)
    current.wait_stream(stream)


def _marks_of(modules: Sequence[Any], what: str) -> list[Mark]:
    marks = [mark_of(each) for each in modules]
    for each, mark in zip(modules, marks):
        if mark is None:
            raise ValueError(f"{what}() needs modules that sw.fully_shard was called on, got a {type(each).__name__}")
    return marks


@overload
def fully_shard(module: torch.nn.Module, **options: Unpack[FullyShardOptions]) -> torch.nn.Module: ...
@overload
def fully_shard(
    module: Sequence[torch.nn.Module], **options: Unpack[FullyShardOptions]
) -> Sequence[torch.nn.Module]: ...


@describes_options(FullyShardOptions, broadcast_buffers=False)
def fully_shard(
    module: Any,
    *,
    mesh: Any = None,
    device_mesh: Any = None,
    reshard_after_forward: bool | int | None = None,
    precision: Any = None,
    offload: Any = None,
    ignored_params: Collection[Any] | None = None,
    dp_mesh_dims: Any = None,
    shard_placement_fn: Callable[[torch.nn.Parameter], Any] | None = None,
    mp_policy: Any = None,
    offload_policy: Any = None,
    init: Any = None,
    weights: Any = None,
    **options: Any,
) -> Any:
    """Make `module` a unit, in place: its parameters are whole while it runs, and else DTensors of each rank's rows.

    Call it on inner modules first and on the outermost one last, and make the optimizer after it, over
    `module.parameters()`. The outermost unit holds the remaining parameters and is whole from its forward to the end of its
    backward. Gradients are DTensors too; the contract is that of FSDP2 (docs/coming-from.md has the differences).

    Parameters
    ----------
    module : Module or sequence of Module
        Several modules form one unit: all are whole while any of them runs. Pass the outermost module alone.
    precision : {"bf16", "fp16", "fp32"} or Precision, optional
        The precision in which the module and inner modules without their own precision compute; see wrap.
    offload : {"cpu", "nvme:<folder>"} or dict of "parameters" and "optimizer" to them, optional
        For the outermost module: where slices lie, and where shard_optimizer keeps the optimizer's state; see wrap.
    mesh, device_mesh
        See Options; `mesh` is FSDP2's name for it. Pass the same to all calls. An inner mesh of other ranks is an error,
        except for a module of DTensors (experts), which then becomes one of the outermost module's `groups`.
    reshard_after_forward : bool or int, optional
        True, the default, if the unit is released between its forward and its backward; the outermost one only if True is given.
        FSDP2's number of ranks to reshard to, a divisor of the slices: 1 keeps the unit whole. On GPUs so many ranks in a row then keep
        it between them until its backward, whose gather stays inside them. Hosts gather without messages in any case.
    init, weights : optional
        For the outermost module, on the meta device: build it in slices as its engine is made; see wrap.

    Other Parameters
    ----------------
    dp_mesh_dims : DataParallelMeshDims, optional
        FSDP2's names of the dimensions of `mesh` over which ranks average: `replicate`, then `shard`; several names are
        flattened. The other dimensions are those of the parameters, which are DTensors on them, or on all of `mesh`.
    shard_placement_fn : callable, optional
        FSDP2's function from a parameter to None, a Shard or a ShardPlacementResult. The whole parameter has the dimension
        that it names first in memory. With a mesh of other ranks the parameter, a DTensor, becomes one of the outermost
        module's `groups`.
    mp_policy : MixedPrecisionPolicy, optional
        FSDP2's `precision`, with fields of the same names. Parameters keep their dtype.
    offload_policy : OffloadPolicy, optional
        FSDP2's policy. CPUOffloadPolicy changes nothing on the CPU, and raises on GPUs, where parameters stay: pass `offload`.
    ignored_params, **options
        See Options; those of the outermost module apply, and `broadcast_buffers` is False. If the outermost module ignores all parameters of an inner
        module, the inner module is not one of its units: it has its own engine and mesh, and needs its own optimizer.

    Returns
    -------
    Module or sequence of Module
        `module`; its class is now a subclass with unshard(), reshard(), no_sync() and set_requires_gradient_sync().

    Raises
    ------
    AssertionError
        If fully_shard was already called on it, or a mesh of two dimensions has no names.
    ValueError
        For a container without a forward, a scalar parameter, or a mesh of more than two dimensions.
    NotImplementedError
        For a parameter with gaps, or one whose dimension other than 0 is not divisible. On all ranks, when the engine is made:
        for an inner module with another mesh, or one that ignores parameters that the outermost module does not ignore.

    Notes
    -----
    Not collective. The outermost module makes the engine, collectively, at its first run or in the first call that
    needs it, such as full_parameters. A rank's rows are those of its own values: give all ranks the same, as with FSDP2.
    Cost: each forward begins and ends with a barrier of the ranks on a host.
    """
    modules = [module] if isinstance(module, torch.nn.Module) else _listed(module)
    for each in modules:
        if not isinstance(each, torch.nn.Module):
            raise TypeError(f"fully_shard needs a torch.nn.Module that is run itself, got {type(each).__name__}")
        if (
            isinstance(each, (torch.nn.ModuleList, torch.nn.ModuleDict))
            and type(each).forward is torch.nn.Module.forward
        ):
            raise ValueError(f"fully_shard does not support containers that do not implement forward: {each}")
    if mesh is not None and device_mesh is not None:
        raise ValueError("mesh and device_mesh were both given, which are two names for one: pass one of them")
    whole_mesh = device_mesh if mesh is None else mesh
    given_mesh = _data_mesh(whole_mesh, dp_mesh_dims)
    offload_kinds(offload)
    refuse_options(options, ("zero", "share_parameters"), "fully_shard", "it is zero=3 with private parameters")
    refuse_options(options, ("clip_grad_norm",), "fully_shard", "call sw.clip_grad_norm_ before the step")
    refuse_options(options, ("partition",), "fully_shard", "give it to sw.shard_optimizer")
    refuse_options(
        options, ("step_in_backward",), "fully_shard", "use sw.wrap(module, optimizer, zero=3, step_in_backward=True)"
    )
    policy = _policy(precision, mp_policy)
    if offload_policy is not None and not isinstance(offload_policy, offload_policy_of_torch()):
        raise TypeError(
            f"fully_shard: offload_policy must be an OffloadPolicy of torch's or None, got {offload_policy!r}"
        )
    if hasattr(offload_policy, "pin_memory") and _device_of(modules) != "cpu":
        raise NotImplementedError(
            f"fully_shard: offload_policy={offload_policy!r} is not supported on GPUs: pass offload='cpu', which moves the optimizer's state"
        )
    releases, near = _releases(reshard_after_forward, given_mesh)
    for each in modules:
        if mark_of(each) is not None:
            raise AssertionError(
                "Each distinct composable distributed API can only be applied to a module once: fully_shard was called on this "
                f"{type(each).__name__} already"
            )
        of_torch = [name for name, inner in each.named_modules() if mark_of(inner) is None and fsdp2_groups(inner)]
        if of_torch and not ignored_params:
            raise Error(
                f"fully_shard was given a {type(each).__name__} of which torch's fully_shard has cut {of_torch[0] or 'the outermost module'!r} "
                "already: call the one or the other on all of its modules"
            )
        wrapped = engine_of(each, make=False)
        if wrapped is not None:
            raise Error(
                f"fully_shard was given a {type(wrapped.module).__name__} that sw.wrap wrapped already: use it as it is, or call fully_shard on "
                "sw.unwrap(module), which replaces its wrapper"
            )
    cuts = [(each, getattr(each, SHARDED, None)) for each in ignored_params or ()]
    given = [each if cut is None else cut.sharded for each, cut in cuts]
    ignored = set().union(*(_ignored(each, given) for each in modules))
    chosen = _in_rank_order(given_mesh, modules)
    over = chosen or mesh_of_group(resolve_group(options.get("process_group"), None, trains=True), _device_of(modules))
    found = find_rows(modules, over, shard_placement_fn, ignored)
    kept = {"device_mesh": chosen, "ignored_params": given, "offload": offload, **options}
    kept |= {"init": init, "weights": weights}
    is_list = not isinstance(module, torch.nn.Module)
    kept.setdefault("broadcast_buffers", False)  # each rank's own, as FSDP2's are
    mark = Mark(releases, kept, policy, is_list=is_list, placement=shard_placement_fn, near=near)
    mark.releases_outermost = releases and reshard_after_forward is not None
    for each in modules:
        original = type(each)
        body = {
            "_shardwright_mark": mark,
            "_shardwright_original": getattr(original, "_shardwright_original", original),
            "__module__": original.__module__,
            "__qualname__": f"FSDP{original.__qualname__}",
        }
        bases = FSDPModule, *fsdp_module_of_torch(), original
        each.__class__ = type(f"FSDP{original.__name__}", bases, body)
        register_face(each, _find_engine)
        note_fully_shard(each)
    data = [name for names in _data_names(dp_mesh_dims) for name in names]
    mark.rows, mark.mesh = [ShardedParameter(*each, data, whole_mesh) for each in found], over
    step_on_local_tensors(SHARDED)
    for cut in mark.rows:
        cut.policy = mp_policy or _policy_of_torch(policy)
    for each in modules:
        for inner in each.modules():
            below = mark_of(inner)
            if below is not None and below is not mark and not all(id(r.sharded) in ignored for r in below.rows):
                below.outer = weakref.ref(modules[0])
    return module


def register_fsdp_forward_method(module: torch.nn.Module, method_name: str) -> None:
    """Let a method of a module that fully_shard was called on run as its forward does: its unit is whole meanwhile.

    Does nothing for other modules, as torch's function of this name. Call it after fully_shard.

    Raises
    ------
    ValueError
        If the module has no such method.
    """
    if mark_of(module) is None:
        return
    method = getattr(type(module), method_name, None)
    if method is None:
        raise ValueError(f"{type(module).__name__} has no method {method_name!r}")

    @functools.wraps(method)
    def run(self: FSDPModule, *args: Any, **kwargs: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with contextlib.ExitStack() as stack:
                places = self._shardwright_mark.places()
                units = [stack.enter_context(s.running(unit, self, args, kwargs)) for s, unit in places]
                output = method(self, *args, **kwargs)
                for note in units:
                    note(output)
                return output

        return self._run(call, args, kwargs)

    setattr(type(module), method_name, run)  # its class is its own


def share_comm_ctx(modules: Sequence[torch.nn.Module]) -> None:
    """Accept FSDP2's call without effect: modules over the same ranks share a communicator."""
    _marks_of(modules, "share_comm_ctx")


def _data_mesh(mesh: Any, dims: Any) -> Any:
    """Return the mesh of (replicate, shard), or of one of them, that dp_mesh_dims names."""
    if mesh is not None and not hasattr(mesh, "get_group"):
        raise TypeError(f"fully_shard: mesh must be a DeviceMesh or None, got {mesh!r}")
    if dims is None:
        return mesh
    if mesh is None:
        raise ValueError(f"dp_mesh_dims={dims!r} names dimensions of a mesh: pass mesh too")
    given = _data_names(dims)
    unknown = [name for names in given for name in names if name not in (mesh.mesh_dim_names or ())]
    if unknown:
        raise ValueError(
            f"dp_mesh_dims: dim name {unknown[0]!r} not found in mesh.mesh_dim_names {mesh.mesh_dim_names}"
        )
    return flattened(mesh, [names for names in given if names])


def _in_rank_order(mesh: Any, modules: Sequence[torch.nn.Module]) -> Any:
    """Return the mesh with rows in the order of their ranks. Raise ValueError if DTensors' own mesh ties it to another order."""
    if mesh is None or torch.distributed.get_rank() not in mesh.mesh.flatten().tolist():
        return mesh
    ordered = in_rank_order(mesh)
    own = (p for each in modules for p in each.parameters() if getattr(p, SHARDED, None) is None)
    if ordered is not mesh and any(map(is_dtensor, own)):
        raise ValueError(
            f"fully_shard of a module of DTensors needs a mesh whose rows have ascending ranks, got {mesh.mesh.tolist()}: order the ranks of "
            "the mesh that has both"
        )
    return ordered


def _data_names(dims: Any) -> list[tuple[str, ...]]:
    """Return the names of the dimensions to replicate and to shard over; none without dp_mesh_dims."""
    both = () if dims is None else (dims.replicate, dims.shard)
    return [(each,) if isinstance(each, str) else tuple(each or ()) for each in both]


def _device_of(modules: Sequence[torch.nn.Module]) -> str:
    """Return the type of the device on which the modules are, or will be."""
    kinds = {p.device.type for each in modules for p in each.parameters()} - {"meta"}
    return kinds.pop() if kinds else "cuda" if torch.cuda.is_available() else "cpu"


def _releases(reshard_after_forward: Any, mesh: Any) -> tuple[bool, int]:
    """Return whether a unit is released after its forward, and the number of ranks that keep it then; 0: all."""
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return reshard_after_forward is not False, 0
    if not isinstance(reshard_after_forward, int):
        raise TypeError(
            f"reshard_after_forward must be True, False, None or a number of ranks, got {reshard_after_forward!r}"
        )
    if mesh is not None:
        slices = mesh.size(mesh.ndim - 1)
    elif torch.distributed.is_initialized():
        slices = torch.distributed.get_world_size()
    else:  # the engine makes the group from the launcher's variables
        slices = int(os.environ.get("WORLD_SIZE") or 1)
    if reshard_after_forward < 1 or slices % reshard_after_forward != 0:
        raise ValueError(
            f"reshard_after_forward as a number must be a divisor of {slices}, got {reshard_after_forward}"
        )
    return reshard_after_forward != 1, reshard_after_forward if reshard_after_forward < slices else 0


def _policy(precision: Any, mp_policy: Any) -> Precision | None:
    """Return the precision of a unit (FSDP2: mp_policy); None for no cast."""
    if mp_policy is None:
        return None if precision is None else Precision.of(precision)
    if precision is not None:
        raise ValueError("precision and mp_policy were both given, which are two names for one: pass one of them")
    names = [field.name for field in dataclasses.fields(Precision) if field.name != "master"]
    lacks = [name for name in names if not hasattr(mp_policy, name)]
    if lacks:
        raise TypeError(f"mp_policy must be a MixedPrecisionPolicy, got {mp_policy!r}, which has no {lacks[0]}")
    policy = Precision(**{name: getattr(mp_policy, name) for name in names}, master=False)
    return None if policy == Precision(master=False) else policy


def _policy_of_torch(policy: Precision | None) -> Any:
    """Return a policy as FSDP2's, for the extensions of tensors."""
    names = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
    return fsdp_policy(**({} if policy is None else {name: getattr(policy, name) for name in names}))


def _listed(modules: Any) -> list[Any]:
    """Return the modules of a list that form one unit. Raise ValueError if they cannot."""
    if not isinstance(modules, (list, tuple)):
        raise TypeError(
            f"fully_shard needs a torch.nn.Module that is run itself, or a list of such, got {type(modules).__name__}"
        )
    inner = {id(part) for each in modules if isinstance(each, torch.nn.Module) for part in list(each.modules())[1:]}
    if not modules or len(set(map(id, modules))) < len(modules) or any(id(each) in inner for each in modules):
        raise ValueError(
            f"fully_shard needs a list of different modules, none of them inside another, got {len(modules)} modules"
        )
    return list(modules)


def _find_engine(module: FSDPModule, make: bool) -> Engine | None:
    mark = module._shardwright_mark
    if make:
        mark.make(module)
    return mark.engine


#: as torch's fully_shard.state(module): what fully_shard keeps of a module, a Mark; None for any other
fully_shard.state = mark_of  # type: ignore[attr-defined]
