"""The units of a module that runs, and the subclasses that change how they are called; compile_units is one."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .._engine import Error
from ..layout.param_groups import RECOMPUTE, unit_modules
from ..torch_compat.autograd import is_compiled
from ..torch_compat.internals import original_of
from .engine import Engine, engine_of

_logger = logging.getLogger("shardwright")
#: the attribute of a unit's class that is True after compile_units
COMPILED = "_shardwright_compiled"


def outermost_units(model: Any, what: str) -> tuple[Engine | None, torch.nn.Module, list[torch.nn.Module]]:
    """Return the engine of a module, if it has one, the bare module, and its units that lie in no other unit."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{what} needs a torch.nn.Module, got {type(model).__name__}")
    engine = engine_of(model, make=False)
    bare = original_of(model) if engine is None else engine.module
    chosen = unit_modules(bare, "auto" if engine is None else engine.options.units)
    named = [(name, each) for name, each in bare.named_modules() if id(each) in chosen]
    outer = [(name, each) for name, each in named if not _is_inside(each, named)]
    if not outer:
        raise Error(
            f"{what} finds no units in this {type(bare).__name__}: they are modules that sw.fully_shard was called on, those of units= of a "
            "wrapped module, or sibling modules of one class and size, such as the blocks of a transformer"
        )
    if any(isinstance(each, torch.jit.ScriptModule) for _, each in outer):
        raise Error(f"{what} cannot change the call of a module of TorchScript: pass the model from before torch.jit")
    if len(outer) < len(named):
        inner = next(name for name, each in named if _is_inside(each, named))
        _logger.warning("%s: unit %r lies inside another one: only the outer one is changed", what, inner)
    return engine, bare, [each for _, each in outer]


def _is_inside(module: torch.nn.Module, named: Iterable[tuple[str, torch.nn.Module]]) -> bool:
    return any(each is not module and any(part is module for part in each.modules()) for _, each in named)


def change_calls(units: Iterable[torch.nn.Module], make: Callable[[type], dict[str, Any]]) -> None:
    """Give each unit a subclass of its class with the attributes that `make` returns; units of one class share it."""
    made: dict[type, type] = {}
    for unit in units:
        own = type(unit)
        if own not in made:
            body = {
                **{"__module__": own.__module__, "__qualname__": own.__qualname__, "__reduce_ex__": reduce_plainly},
                "_shardwright_original": getattr(own, "_shardwright_original", own),
            }
            made[own] = type(own.__name__, (own,), {**body, **make(own)})
        unit.__class__ = made[own]


def reduce_plainly(self: Any, protocol: Any) -> Any:
    """Pickle and copy as the original class; our hooks refuse a copy while the module is released."""
    state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__  # object's own from Python 3.11
    return object.__new__, (self._shardwright_original,), state


def compile_units(model: torch.nn.Module, **options: Any) -> torch.nn.Module:
    """Compile the forward of each unit of `model` with torch.compile, and leave hooks outside of the graphs.

    Units of one class compile once. The outermost module's own code stays as it is, so gathers at zero=1 to 3 overlap
    as without compilation.

    Parameters
    ----------
    model : Module
        As in checkpoint_units, which may be called before or after.
    **options
        Options of torch.compile. `fullgraph=True` is possible.

    Returns
    -------
    Module
        `model`. The class of each unit becomes a subclass, as in checkpoint_units.

    Raises
    ------
    Error
        If the model has no units, a unit is compiled already, or an instance has a forward of its own.
    ValueError
        If checkpoint_units has a policy: compiled code hides its operations from it.

    Notes
    -----
    Not collective. The first step compiles on every rank: set timeout_s of sw.wrap above that time.
    """
    _, bare, units = outermost_units(model, "compile_units")
    for name, each in bare.named_modules():
        if getattr(type(each), COMPILED, False) or is_compiled(each):
            raise Error(
                f"compile_units found that {name or 'the module'!r} is compiled already: call it once, on modules that are not"
            )
    for each in units:
        if "forward" in vars(each):
            raise Error(
                f"compile_units needs a unit whose class has the forward, and this {type(each).__name__} has its own: delete it"
            )
        if getattr(getattr(type(each), RECOMPUTE, None), "options", None):
            raise ValueError(
                "compile_units hides the operations of a unit from checkpoint_units(policy=): leave one of them out"
            )
    change_calls(units, lambda kind: {"forward": torch.compile(_own_code(kind), **options), COMPILED: True})
    return model


def _own_code(kind: Any) -> Any:
    """Return the forward of a class. One of fully_shard gets code of its own: the compiler counts versions by code."""
    forward = kind.forward
    if getattr(kind, "_shardwright_mark", None) is None:
        return forward
    made = types.FunctionType(
        forward.__code__.replace(), forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__
    )
    made.__kwdefaults__ = forward.__kwdefaults__
    return made
