"""fully_shard: zero=3 with private parameters, applied module by module and in place, like torch's FSDP2.

    for block in model.blocks:
        sw.fully_shard(block)
    sw.fully_shard(model)
    optimizer = sw.shard_optimizer(model, torch.optim.AdamW(model.parameters()))

The only visible change is the instance's class, which becomes a subclass made for it. The outermost module makes the
engine when it is first needed: in shard_optimizer, in its first forward, or in a function that needs whole parameters.
"""

from __future__ import annotations

import copyreg
import dataclasses
import functools
import glob
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, overload

import torch

from .._engine import Error
from ..layout.param_groups import mark_of
from ..options.checks import offload_kind
from ..options.options import Options, refuse_options
from ..options.precision import Precision
from ..parameters.building import Values
from ..parameters.gathered_unit import Unit
from ..parameters.unshard_schedule import UnitSchedule
from ..torch_compat.dtensor import is_dtensor
from ..torch_compat.foreign_wrappers import guard_from_wrappers
from .engine import Engine, engine_of, register_face


@dataclasses.dataclass(eq=False, repr=False)
class Mark:
    """The mark of fully_shard on a module: its options and its unit; with groups= one unit for each part.

    `is_list`: fully_shard got several modules, which form one unit and share this mark. `engine`: of an outermost module.
    `ahead`: for each phase the units to gather ahead, if the program names them. `divide_factor`: the divisor of gradients
    that the program expects; `divides_by`: the engine's. `placement`: FSDP2's shard_placement_fn.
    """

    reshard_after_forward: bool
    options: dict[str, Any]
    precision: Precision | None = None
    is_list: bool = False
    engine: Engine | None = None
    ahead: dict[str, list[Mark]] = dataclasses.field(default_factory=dict)
    divide_factor: float | None = None
    divides_by: int | None = None
    placement: Callable[[torch.nn.Parameter], Any] | None = None
    _units: list[tuple[weakref.ref[UnitSchedule], int]] = dataclasses.field(default_factory=list)

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

    def check_divide_factor(self) -> None:
        """Raise NotImplementedError if the engine divides gradients by another factor than the program expects."""
        if self.divides_by is not None and self.divide_factor not in (None, self.divides_by):
            factor, self.divide_factor = self.divide_factor, None
            raise NotImplementedError(
                f"set_gradient_divide_factor({factor:g}): gradients are divided by {self.divides_by}: pass reduce='sum' to fully_shard, which "
                "divides by nothing, and divide the loss"
            )

    def make(self, module: torch.nn.Module) -> None:
        """Make the engine with `module` as outermost, unless an outer module has one. Collective if it makes one."""
        if not self.places() and self.is_list:
            raise Error(
                f"this {type(module).__name__} was passed to sw.fully_shard in a list, and has no engine yet: call sw.fully_shard on the "
                "outermost module too, and run that module first"
            )
        if not self.places():
            self.engine = None
            options = {**self.options, "groups": self.options.get("groups") or _groups(module, self.options)}
            _check_divide_factors(module, options)
            stage = {"zero": 3, "share_parameters": False, "precision": _policies(module)}
            values = Values(options.pop("init"), options.pop("weights"))
            self.engine = Engine(module, Options.from_keywords({**options, **stage}), values=values)
            self.engine.keep()
            guard_from_wrappers(self.engine, module)


class Gathered:
    """The handle of a completed unshard()."""

    def wait(self) -> None:
        """Do nothing."""


def _policies(module: torch.nn.Module) -> dict[str, Any] | None:
    """Return the precision options of fully_shard for `module` and the modules inside it."""
    marks = {name: mark_of(each) for name, each in module.named_modules()}
    return {name: mark.precision for name, mark in marks.items() if mark is not None and mark.precision} or None


def _check_divide_factors(module: torch.nn.Module, options: dict[str, Any]) -> None:
    """Record the divisor of gradients for the modules inside `module`. Raise if the program expects another one."""
    mesh, divides_by = options.get("device_mesh"), 1
    if options.get("reduce") != "sum" and (mesh is not None or torch.distributed.is_initialized()):
        divides_by = torch.distributed.get_world_size(options.get("process_group")) if mesh is None else mesh.size()
    ignored = {id(each) for each in options.get("ignored_params", ())}
    for each in module.modules():
        mark = mark_of(each)
        if mark is not None and any(id(p) not in ignored for p in each.parameters()):
            mark.divides_by = divides_by
            mark.check_divide_factor()


def _groups(module: torch.nn.Module, options: dict[str, Any]) -> dict[torch.nn.Module, Any] | None:
    """Map the inner modules of DTensors with another mesh than the outermost module (experts) to their meshes."""
    outer, ranks = options.get("device_mesh"), [0]
    if outer is not None:
        ranks = outer.mesh.tolist()
    elif torch.distributed.is_initialized():
        group = options.get("process_group") or torch.distributed.group.WORLD
        ranks = torch.distributed.get_process_group_ranks(group)
    ignored = {id(each) for each in options.get("ignored_params", ())}
    found: dict[Any, Any] = _placed_apart(module, ranks, ignored)
    for each in module.modules():
        mark = mark_of(each)
        mesh = None if mark is None or each is module else mark.options.get("device_mesh")
        own = [p for p in each.parameters() if id(p) not in ignored]
        if mesh is not None and mesh.mesh.tolist() != ranks and own and all(map(is_dtensor, own)):
            found[each] = mesh
    return found or None


def _placed_apart(module: torch.nn.Module, ranks: list[Any], ignored: set[int]) -> dict[Any, Any]:
    """Map names of parameters to the meshes of other ranks that shard_placement_fn returns for them."""
    found = {}
    for name, parameter in module.named_parameters():
        above = name.rpartition(".")[0]
        while above and mark_of(module.get_submodule(above)) is None:
            above = above.rpartition(".")[0]
        mark = mark_of(module.get_submodule(above))
        if mark is None or mark.placement is None or id(parameter) in ignored:
            continue
        result = mark.placement(parameter)
        mesh = getattr(getattr(result, "mesh_info", None), "mesh", None)
        if result is not None and mesh is None and not hasattr(result, "is_shard"):
            raise TypeError(
                f"shard_placement_fn must return None, a Shard or a ShardPlacementResult, got {result!r} for parameter {name!r}"
            )
        if mesh is not None and mesh.mesh.tolist() != ranks:
            found[glob.escape(name)] = mesh
    return found


class FullySharded(torch.nn.Module):
    """The base class that fully_shard adds to the class of a module."""

    _shardwright_mark: Mark
    _shardwright_original: type

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mark = self._shardwright_mark
        mark.make(self)
        if mark.engine is None:
            return super().__call__(*args, **kwargs)
        return mark.engine.run(super().__call__, args, kwargs)

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
        """Return a context in which backwards add to `.grad` locally. For the outermost module."""
        return self._outermost("no_sync").no_sync()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether backwards average gradients from now on. For the outermost module; `recurse` is ignored."""
        self._outermost("set_requires_gradient_sync").set_requires_gradient_sync(requires_gradient_sync)

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
        for each in self.modules() if recurse else (self,):
            mark = mark_of(each)
            if mark is None:
                continue
            mark.reshard_after_forward = reshard_after_forward
            for _, unit in mark.places():
                for form in () if unit.is_outermost else filter(None, (unit, unit.compute_form)):
                    form.reshard_after_forward = reshard_after_forward

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Accept True, FSDP2's default; NotImplementedError for False, as gradients are averaged over all of a mesh at once."""
        if not requires_all_reduce:
            raise NotImplementedError(
                "set_requires_all_reduce(False) is not supported: a mesh of (replicate, shard) averages over all its ranks at once; use "
                "set_requires_gradient_sync(False)"
            )

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Accept the engine's own divisor of gradients: the number of the outermost module's ranks, or 1 with reduce="sum".

        Raises
        ------
        NotImplementedError
            For another factor; if the engine does not exist yet, raised when it is made.
        """
        self._shardwright_mark.divide_factor = factor
        self._shardwright_mark.check_divide_factor()

    def _outermost(self, what: str) -> Engine:
        engine = engine_of(self)
        if engine is None:
            raise Error(f"{what}() is asked of the outermost module that sw.fully_shard was called on")
        return engine

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as the original class; our hooks refuse a copy while the module is released."""
        state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__  # object's own from Python 3.11
        return copyreg.__newobj__, (self._shardwright_original,), state  # type: ignore[attr-defined]


def _marks_of(modules: Sequence[Any], what: str) -> list[Mark]:
    marks = [mark_of(each) for each in modules]
    for each, mark in zip(modules, marks):
        if mark is None:
            raise ValueError(f"{what}() needs modules that sw.fully_shard was called on, got a {type(each).__name__}")
    return marks


@overload
def fully_shard(module: torch.nn.Module, **options: Any) -> torch.nn.Module: ...
@overload
def fully_shard(module: Sequence[torch.nn.Module], **options: Any) -> Sequence[torch.nn.Module]: ...


def fully_shard(
    module: Any,
    *,
    mesh: Any = None,
    device_mesh: Any = None,
    reshard_after_forward: bool = True,
    precision: Any = None,
    offload: Any = None,
    ignored_params: Collection[Any] = (),
    shard_placement_fn: Callable[[torch.nn.Parameter], Any] | None = None,
    mp_policy: Any = None,
    offload_policy: Any = None,
    init: Any = None,
    weights: Any = None,
    **options: Any,
) -> Any:
    """Make `module` a unit, in place: its parameters are whole while it runs; else each rank keeps only its slices.

    Call it on inner modules first and on the outermost one last; the outermost unit holds the remaining parameters and
    is whole from its forward to the end of its backward.

    Parameters
    ----------
    module : Module or sequence of Module
        Several modules form one unit: all are whole while any of them runs. Pass the outermost module alone.
    mesh, device_mesh
        See Options; `mesh` is FSDP2's name for it. The outermost module's mesh applies. An inner mesh of other ranks is
        an error, except for a module of DTensors (experts), which then becomes one of the outermost module's `groups`.
    ignored_params, **options
        See Options; those of the outermost module apply. If the outermost module ignores all parameters of an inner
        module, the inner module is not one of its units: it has its own engine and mesh, and needs its own optimizer.
    reshard_after_forward : bool
        True if the unit is released between its forward and its backward.
    precision : {"bf16", "fp16", "fp32"} or Precision, optional
        The precision in which the module and inner modules without their own precision compute; see wrap.
    shard_placement_fn : callable, optional
        FSDP2's function from a parameter to None, a Shard or a ShardPlacementResult. Slices are always flat, whatever
        dimension a Shard names. With a mesh of other ranks the parameter, a DTensor, becomes one of the outermost
        module's `groups`.
    offload : {"cpu", "nvme:<folder>"}, optional
        For the outermost module: where shard_optimizer keeps the optimizer's state; see wrap.
    mp_policy : MixedPrecisionPolicy, optional
        FSDP2's `precision`, with fields of the same names. Parameters keep their dtype.
    offload_policy : OffloadPolicy, optional
        FSDP2's policy. CPUOffloadPolicy raises, because parameters stay on their device: pass `offload`.
    init, weights : optional
        For the outermost module, on the meta device: build it in slices as its engine is made; see wrap.

    Returns
    -------
    Module or sequence of Module
        `module`; its class is now a subclass with unshard(), reshard(), no_sync() and set_requires_gradient_sync().

    Raises
    ------
    Error
        If fully_shard was already called on it.
    NotImplementedError
        On all ranks, when the engine is made: for an inner module with another mesh, or one that ignores parameters
        that the outermost module does not ignore.

    Notes
    -----
    Not collective. The outermost module makes the engine, collectively, at its first run or in the first call that
    needs it, such as shard_optimizer or full_parameters; parameters then take rank 0's values.
    """
    modules = [module] if isinstance(module, torch.nn.Module) else _listed(module)
    for each in modules:
        if not isinstance(each, torch.nn.Module) or isinstance(each, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            raise TypeError(f"fully_shard needs a torch.nn.Module that is run itself, got {type(each).__name__}")
    if mesh is not None and device_mesh is not None:
        raise ValueError("mesh and device_mesh were both given, which are two names for one: pass one of them")
    offload_kind(offload)
    refuse_options(options, ("zero", "share_parameters"), "fully_shard", "it is zero=3 with private parameters")
    refuse_options(options, ("clip_grad_norm",), "fully_shard", "call sw.clip_grad_norm_ before the step")
    refuse_options(options, ("partition",), "fully_shard", "give it to sw.shard_optimizer")
    policy = _policy(precision, mp_policy)
    if hasattr(offload_policy, "pin_memory"):
        raise NotImplementedError(
            f"fully_shard: offload_policy={offload_policy!r} is not supported: pass offload='cpu', which moves the optimizer's state"
        )
    if not isinstance(reshard_after_forward, bool):
        raise TypeError(f"reshard_after_forward must be True or False, got {reshard_after_forward!r}")
    for each in modules:
        if mark_of(each) is not None:
            raise Error(f"fully_shard was called on this {type(each).__name__} already")
        wrapped = engine_of(each, make=False)
        if wrapped is not None:
            raise Error(
                f"fully_shard was given a {type(wrapped.module).__name__} that sw.wrap wrapped already: use it as it is, or call fully_shard on "
                "sw.unwrap(module), which replaces its wrapper"
            )
    chosen = device_mesh if mesh is None else mesh
    kept = {"device_mesh": chosen, "ignored_params": ignored_params, "offload": offload, **options}
    kept |= {"init": init, "weights": weights}
    is_list = not isinstance(module, torch.nn.Module)
    mark = Mark(reshard_after_forward, kept, policy, is_list=is_list, placement=shard_placement_fn)
    for each in modules:
        original = type(each)
        body = {
            "_shardwright_mark": mark,
            "_shardwright_original": original,
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
        }
        each.__class__ = type(original.__name__, (FullySharded, original), body)
        register_face(each, _find_engine)
    return module


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


def _find_engine(module: FullySharded, make: bool) -> Engine | None:
    mark = module._shardwright_mark
    if make:
        mark.make(module)
    return mark.engine
