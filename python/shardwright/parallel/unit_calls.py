"""The units of a module that runs, and the subclasses that change how they are called; compile_units is one."""

from __future__ import annotations

import copyreg
import logging
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .._engine import Error
from ..layout.param_groups import unit_modules
from ..torch_compat.internals import original_of
from .engine import Engine, engine_of

__all__ = ["change_calls", "compile_units", "outermost_units"]

_logger = logging.getLogger("shardwright")




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
                **{"__module__": own.__module__, "__qualname__": own.__qualname__, "__reduce_ex__": _reduce},
                "_shardwright_original": getattr(own, "_shardwright_original", own),
            }
            made[own] = type(own.__name__, (own,), {**body, **make(own)})
        unit.__class__ = made[own]


def _reduce(self: Any, protocol: Any) -> Any:
    """Pickle and copy as the original class."""
    state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__
    return copyreg.__newobj__, (self._shardwright_original,), state  # type: ignore[attr-defined]
