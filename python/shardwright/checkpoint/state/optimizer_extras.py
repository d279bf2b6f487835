"""State that an optimizer keeps outside `state` and `param_groups`; torch's own optimizers have none.

A save stores further keys of state_dict(), and restore() passes them to load_state_dict(). State of an inner optimizer,
and state in state_dict() that `state` lacks, cannot be stored by parameter: the save raises before it writes. Tensors
in attributes may be caches or state, so they are logged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from ..._engine import CheckpointError
from ...optim.master_weights import MasterOptimizer
from ...optim.sharded import ShardedOptimizer
from ...torch_compat.dtensor import is_dtensor
from ...torch_compat.optimizers import hooks_around
from ..joined import Optimizers

_OF_TORCH = ("state", "param_groups")
_DEPTH = 4


def bare_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside accelerate's wrapper, which takes no step hooks. Other wrappers may have their own state."""
    while isinstance(optimizer, torch.optim.Optimizer) and type(optimizer).__module__.startswith("accelerate."):
        inner = _attributes(optimizer).get("optimizer")
        if inner is None or not hasattr(inner, "param_groups") or optimizer.state is not inner.state:
            break
        optimizer = inner
    return optimizer


def stepping_optimizer(optimizer: Any) -> Any:
    """Return the optimizer that takes step hooks: the inner one of a wrapper that did not call Optimizer.__init__()."""
    while isinstance(optimizer, torch.optim.Optimizer) and "_optimizer_step_pre_hooks" not in _attributes(optimizer):
        inner = _attributes(optimizer).get("optimizer")
        if not hasattr(inner, "param_groups"):
            break
        optimizer = inner
    return optimizer


def further_state(optimizer: Any) -> dict[str, Any]:
    """Return the entries of state_dict() other than torch's keys. Raise CheckpointError for one that cannot be saved or restored."""
    if isinstance(optimizer, Optimizers):
        of_each = {name: further_state(each) for name, each in optimizer.members.items()}
        return {name: further for name, further in of_each.items() if further}
    wrapped, optimizer = optimizer, users_optimizer(optimizer)
    if not _tells_more(optimizer):
        return {}
    call = f"{type(optimizer).__name__}.state_dict()"
    try:
        found = optimizer.state_dict()
    except Exception as error:
        raise CheckpointError(
            f"{call} raises {type(error).__name__}: {error}: its further state is not savable"
        ) from error
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{call} returns a {type(found).__name__} instead of a dict: not savable")
    further = {key: value for key, value in found.items() if key not in _OF_TORCH}
    odd = [key for key in further if not isinstance(key, str) or key.startswith("$")]
    if odd:
        raise CheckpointError(f"{call} has the key {odd[0]!r}, which is not a string or begins with '$': not savable")
    for key, value in further.items():
        if any(is_dtensor(each) for each in _tensors(value, _DEPTH)):
            raise CheckpointError(
                f"{call} has a DTensor under '{key}', outside state and param_groups: a DTensor is savable in the "
                "state of a parameter only"
            )
    if further and wrapped is not optimizer:
        raise CheckpointError(
            f"{call} has {some(further)} beside state and param_groups, and a checkpoint cannot hold them because the "
            "engine wraps the optimizer: pass them in user_state={...}"
        )
    if wrapped is optimizer:
        _check_shown(optimizer, found.get("state"))
    return further


def names_of(optimizer: Any, further: Mapping[str, Any]) -> list[str]:
    """Return the names of entries of further_state(); those of several optimizers begin with the member's name."""
    if not isinstance(optimizer, Optimizers):
        return list(further)
    keys_of = {name: of_it if isinstance(of_it, Mapping) else "?" for name, of_it in further.items()}
    return [f"{name}.{key}" for name, keys in keys_of.items() for key in keys]


def give_back(optimizer: Any, further: Mapping[str, Any]) -> None:
    """Pass the entries of further_state() to load_state_dict(), before `state` is filled."""
    if isinstance(optimizer, Optimizers):
        for name, of_it in further.items():
            give_back(optimizer.members[name], of_it)
        return
    optimizer.load_state_dict({**optimizer.state_dict(), **further})


def check_inside(optimizer: Any, user_state: Any, extra: Any = None) -> None:
    """Raise CheckpointError for an inner optimizer whose state's tensors neither `user_state` nor `extra` has."""
    optimizer = users_optimizer(optimizer)
    passed = list(user_state.values()) if isinstance(user_state, dict) else [user_state]
    for name, value in _attributes(optimizer).items():
        if not isinstance(value, torch.optim.Optimizer) or any(value is each for each in passed):
            continue
        known = {id(each) for each in _tensors(list(optimizer.state.values()), _DEPTH)}
        known |= {id(each) for each in _tensors([user_state, extra], _DEPTH + 2)}
        own = [each for each in _tensors(list(value.state.values()), _DEPTH) if id(each) not in known]
        if not own or value.state is optimizer.state:
            continue
        shown = _tensors(optimizer.state_dict(), _DEPTH + 1) if _tells_more(optimizer) else ()
        if not {id(each) for each in own} <= {id(each) for each in shown}:
            raise CheckpointError(
                f"{type(optimizer).__name__} keeps an optimizer in its attribute '{name}', and its state_dict() lacks that "
                f"optimizer's state: pass it in a Checkpointer's user_state={{'{name}': optimizer.{name}}} as well, or to save() "
                f"as extra={{'{name}': optimizer.{name}.state_dict()}}"
            )


def unseen_attributes(optimizer: Any) -> list[str]:
    """Return the attributes that hold tensors outside parameters, state and state_dict()."""
    optimizer = users_optimizer(optimizer)
    if type(optimizer).__module__.startswith(("torch.optim.", "shardwright.")):
        return []
    held = {
        name: tensors
        for name, value in _attributes(optimizer).items()
        if name not in (*_OF_TORCH, "defaults") and (tensors := list(_tensors(value, _DEPTH)))
    }
    if not held:
        return []
    known = {id(each) for each in _tensors([optimizer.param_groups, list(optimizer.state.values())], _DEPTH + 1)}
    known |= {id(each.grad) for group in optimizer.param_groups for each in group["params"]}
    if _tells_more(optimizer):
        known |= {id(each) for each in _tensors(optimizer.state_dict(), _DEPTH + 1)}
    return sorted(name for name, tensors in held.items() if any(id(each) not in known for each in tensors))


def users_optimizer(optimizer: Any) -> Any:
    """Return the user's optimizer inside the engine's wrappers."""
    while isinstance(optimizer, (ShardedOptimizer, MasterOptimizer)):
        optimizer = optimizer._inner
    return optimizer


def _attributes(optimizer: Any) -> dict[str, Any]:
    return getattr(optimizer, "__dict__", {})


def _tells_more(optimizer: Any) -> bool:
    """Return whether state_dict() may have more entries than those of torch."""
    made = getattr(type(optimizer), "state_dict", None)
    if "state_dict" in _attributes(optimizer) or hooks_around(optimizer, "state_dict")[1]:
        return True
    if type(optimizer).__module__.startswith("shardwright."):
        return False
    return made is not torch.optim.Optimizer.state_dict


def _check_shown(optimizer: Any, shown: Any) -> None:
    """Raise CheckpointError if state_dict() has state of a parameter that `state` lacks."""
    if not isinstance(shown, Mapping):
        return
    positions = dict(enumerate({p: None for group in optimizer.param_groups for p in group["params"]}))
    held = {id(value) for state in optimizer.state.values() if isinstance(state, Mapping) for value in state.values()}
    for number, values in shown.items():
        live = optimizer.state.get(positions[number], {}) if number in positions else {}
        shown_here = values if isinstance(values, Mapping) else {number: values}
        lacking = [key for key, value in shown_here.items() if key not in live and id(value) not in held]
        if lacking:
            raise CheckpointError(
                f"{type(optimizer).__name__}.state_dict() has {some(lacking)} of parameter {number!r}, which its attribute 'state' "
                "lacks: not savable"
            )


def _tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, Mapping):
        for key, each in value.items():
            yield from _tensors(each, depth - 1)
            yield from _tensors(key, 0)
    elif depth and isinstance(value, (list, tuple, set)):
        for each in value:
            yield from _tensors(each, depth - 1)


def some(values: Iterable[Any], text: Callable[[Any], str] = repr, separator: str = ", ") -> str:
    """Return the texts of the first five values and the number of the others, for messages."""
    found = [text(value) for value in values]
    return separator.join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
