"""fully_shard: zero=3 with private parameters, composed by hand and in place, as torch's FSDP2 does it.

    for block in model.blocks:
        sw.fully_shard(block)
    sw.fully_shard(model)
    optimizer = sw.shard_optimizer(model, torch.optim.AdamW(model.parameters()))

The instance's class becomes a subclass made for it, which is the only mark that is left. The outermost module makes the engine
when it is first needed: by shard_optimizer, by its first forward, or by whatever asks for whole parameters.
"""

from __future__ import annotations

import copyreg
import dataclasses
import weakref
from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Any

import torch

from ._engine import Error
from .data_parallel import DistributedDataParallel
from .offload import offload_kind
from .precision import Precision
from .unit_schedule import Unit, UnitSchedule
from .units import mark_of


@dataclasses.dataclass
class Mark:
    """What fully_shard said of a module, and what became of it.

    Attributes
    ----------
    wrapper : DistributedDataParallel or None
        Of the outermost module, once it is made.
    """

    original: type
    reshard_after_forward: bool
    options: dict[str, Any]
    precision: Precision | None = None
    wrapper: DistributedDataParallel | None = None
    _schedule: weakref.ref[UnitSchedule] | None = None
    _unit: int = 0

    def join(self, schedule: UnitSchedule, unit: int) -> None:
        """The module became a unit."""
        self._schedule, self._unit = weakref.ref(schedule), unit

    def place(self) -> tuple[UnitSchedule, Unit] | None:
        """The module's unit; None before there is one, and after its end."""
        schedule = self._schedule() if self._schedule is not None else None
        return (schedule, schedule.units[self._unit]) if schedule is not None and schedule.units else None

    def make(self, module: torch.nn.Module) -> None:
        """The engine, with `module` the outermost, unless it is inside of one that has an engine. Collective then."""
        if self.place() is None:
            self.wrapper = None
            precision = _policies(module)
            self.wrapper = DistributedDataParallel(
                module, zero=3, share_parameters=False, precision=precision, **self.options
            )


def _policies(module: torch.nn.Module) -> dict[str, Any] | None:
    """What fully_shard said of precision, of `module` and of those inside it."""
    marks = {name: mark_of(each) for name, each in module.named_modules()}
    return {name: mark.precision for name, mark in marks.items() if mark is not None and mark.precision} or None


class FullySharded(torch.nn.Module):
    """What the class of a module inherits from after fully_shard."""

    _shardwright_mark: Mark

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mark = self._shardwright_mark
        mark.make(self)
        if mark.wrapper is None:
            return super().__call__(*args, **kwargs)
        wrapper = mark.wrapper
        wrapper._pre_forward()
        if wrapper._precision is None:
            return wrapper._post_forward(super().__call__(*args, **kwargs))
        args, kwargs = wrapper._precision.enter(args, kwargs)
        try:
            output = super().__call__(*args, **kwargs)
        finally:
            wrapper._precision.leave()
        return wrapper._post_forward(wrapper._precision.cast_output(output))

    def _placed(self) -> tuple[UnitSchedule, Unit]:
        mark = self._shardwright_mark
        mark.make(self)
        place = mark.place()
        assert place is not None
        return place

    def unshard(self) -> None:
        """Makes the parameters of this module's unit whole until reshard(). Of an inner unit: after the outermost is made."""
        schedule, unit = self._placed()
        schedule.pin(unit)

    def reshard(self) -> None:
        """Releases this module's unit, now or once nothing runs in it."""
        schedule, unit = self._placed()
        schedule.unpin(unit)

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside add to `.grad` locally. Of the outermost module."""
        return self._outermost("no_sync").no_sync()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backwards from now on average gradients. Of the outermost module; `recurse` is accepted for FSDP2's sake."""
        self._outermost("set_requires_gradient_sync").set_requires_gradient_sync(requires_gradient_sync)

    def _outermost(self, what: str) -> DistributedDataParallel:
        wrapper = wrapper_of(self)
        if wrapper is None:
            raise Error(f"{what}() is asked of the outermost module that sw.fully_shard was called on")
        return wrapper

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is of the class that was before; our hooks refuse it while the module is released."""
        state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__  # object's own from Python 3.11
        return copyreg.__newobj__, (self._shardwright_mark.original,), state  # type: ignore[attr-defined]


def fully_shard(
    module: torch.nn.Module,
    *,
    device_mesh: Any = None,
    reshard_after_forward: bool = True,
    precision: Any = None,
    offload: Any = None,
    ignored_params: Collection[Any] = (),
    **options: Any,
) -> torch.nn.Module:
    """Makes `module` a unit: its parameters are whole while it runs, and each rank has its slices otherwise. In place.

    Call it on inner modules first, and last on the outermost one, whose unit is what is left. The outermost unit is whole
    from its forward to the end of its backward.

    Parameters
    ----------
    module : Module
    device_mesh, ignored_params, **options
        See Options; those of the outermost module count.
    reshard_after_forward : bool
        Whether the unit is released between its forward and its backward.
    precision : {"bf16", "fp16", "fp32"} or Precision, optional
        In what the module computes, and modules inside it that have none of their own; see wrap.
    offload : {"cpu", "nvme:<folder>"}, optional
        Of the outermost module: where shard_optimizer puts the optimizer's state; see wrap.

    Returns
    -------
    Module
        `module`, whose class is now a subclass with unshard(), reshard(), no_sync() and set_requires_gradient_sync().

    Raises
    ------
    Error
        fully_shard was called on it before.

    Notes
    -----
    Not collective. The engine is made, collectively, when the outermost module is first run, or given to shard_optimizer,
    full_parameters or the like; parameters then have rank 0's values.
    """
    if not isinstance(module, torch.nn.Module) or isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)):
        raise TypeError(f"fully_shard needs a torch.nn.Module that is run itself, got {type(module).__name__}")
    offload_kind(offload)
    policy = None if precision is None else Precision.of(precision)
    if not isinstance(reshard_after_forward, bool):
        raise TypeError(f"reshard_after_forward must be True or False, got {reshard_after_forward!r}")
    if mark_of(module) is not None:
        raise Error(f"fully_shard was called on this {type(module).__name__} already")
    original = type(module)
    kept = {"device_mesh": device_mesh, "ignored_params": ignored_params, "offload": offload, **options}
    mark = Mark(original, reshard_after_forward, kept, policy)
    body = {"_shardwright_mark": mark, "__module__": original.__module__, "__qualname__": original.__qualname__}
    module.__class__ = type(original.__name__, (FullySharded, original), body)
    return module


def wrapper_of(module: torch.nn.Module) -> DistributedDataParallel | None:
    """The wrapper of a module that was wrapped, or fully_shard was called on last; None for any other.

    Collective where it makes the engine of the latter.
    """
    module = getattr(module, "_orig_mod", module)
    if isinstance(module, DistributedDataParallel):
        return module
    if not isinstance(module, FullySharded):
        return None
    module._shardwright_mark.make(module)
    return module._shardwright_mark.wrapper
