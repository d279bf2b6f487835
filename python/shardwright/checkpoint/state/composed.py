"""Optimizer state in wrapper subclasses, such as torchao's 8-bit moments: the tensors inside are the entries of a checkpoint.

A wrapper subclass has a shape and no memory; `__tensor_flatten__` names its inner tensors and gives its other values. The
entry `exp_avg` becomes `exp_avg.codes`, `exp_avg.scale` and `exp_avg.$class`, two strings: the class and its values as
JSON. A load makes the object by `__tensor_unflatten__` of a class that its package registered with
torch.serialization.add_safe_globals, so that a file names no other code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from ..._engine import CheckpointError
from ...formats import tree
from ...layout.memory import has_memory, without_memory
from ...torch_compat.dtensor import is_dtensor

_CLASS = ".$class"


def is_composed(value: Any) -> bool:
    """Return True for a wrapper subclass of a registered class."""
    if not isinstance(value, torch.Tensor) or is_dtensor(value) or not hasattr(value, "__tensor_flatten__"):
        return False
    return not has_memory(value) and type(value) in torch.serialization.get_safe_globals()


def apart(state: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return a parameter's state with the inner tensors of wrapper subclasses as separate entries."""
    if not any(map(is_composed, state.values())):
        return state
    found: dict[Any, Any] = {}
    for key, value in state.items():
        if not is_composed(value):
            found[key] = value
            continue
        names, context = value.__tensor_flatten__()
        found |= {f"{key}.{name}": getattr(value, name) for name in names}
        found[f"{key}{_CLASS}"] = [_name_of(type(value)), json.dumps(tree.encode(context, f"{key}{_CLASS}", {}))]
    return found


def together(state: dict[Any, Any], shape: torch.Size) -> dict[Any, Any]:
    """Invert apart(), for a parameter of `shape`. Raise CheckpointError if a class is not registered here."""
    for mark in [key for key in state if isinstance(key, str) and key.endswith(_CLASS)]:
        key = mark.removesuffix(_CLASS)
        name, context = state.pop(mark)
        known = {_name_of(each): each for each in torch.serialization.get_safe_globals() if isinstance(each, type)}
        if name not in known:
            raise CheckpointError(
                f"the checkpoint's '{key}' of the optimizer's state is a {name}: import its package before the load, or register "
                "the class with torch.serialization.add_safe_globals"
            )
        inner = {each.removeprefix(f"{key}."): state.pop(each) for each in [*state] if str(each).startswith(f"{key}.")}
        kind: Any = known[name]
        state[key] = kind.__tensor_unflatten__(inner, tree.decode(json.loads(context), {}), shape, None)
    return state


def check_sliceable(name: str, state: Mapping[Any, Any], *, is_whole: bool) -> None:
    """Raise CheckpointError for sliced state that no checkpoint can hold. `is_whole`: this rank has a whole parameter's."""
    for key, value in state.items():
        if is_composed(value) and not is_whole:
            raise CheckpointError(
                f"'{key}' of the state of parameter {name} is a {type(value).__name__} over a slice, whose blocks depend on the number "
                "of ranks: give sw.wrap partition='tensor'"
            )
        is_odd = isinstance(value, torch.Tensor) and not is_dtensor(value) and not is_composed(value)
        if is_odd and not has_memory(value):
            raise CheckpointError(
                f"'{key}' of the state of parameter {name} is {without_memory(value)}. A checkpoint holds plain tensors, and "
                "subclasses with __tensor_flatten__ that torch.serialization.add_safe_globals knows"
            )


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
