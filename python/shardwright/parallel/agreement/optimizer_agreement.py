"""Checks that ranks agree about an optimizer, and that a saved state belongs to the optimizer that loads it.

Ranks with different learning rates silently get different parameters, so ranks compare hyperparameters in wrap() and at
each step. At zero >= 1 the comparison is part of the exchange that begins a step. At zero=0 a step exchanges no data: a
digest travels with the use bits of the next round.
"""

from __future__ import annotations

import json
import numbers
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ..._engine import Error, HostComm
from ...comm.agreement import gather_answers
from ...torch_compat.optimizers import on_meta, takes_hooks

#: keys of a parameter group that are not hyperparameters: implementation options, schedulers' values, newer torch's keys
_BESIDE = frozenset(
    ("params", "indices", "param_names", "foreach", "fused", "capturable", "differentiable", "maximize", "master")
    + ("decoupled_weight_decay", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr", "name")
)
_watched: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
#: types of values that JSON has
_PLAIN = (bool, int, float, str, type(None))
#: (title, parameters, values) of each group, or of all groups together
Row = tuple[str, list[Any], dict[str, Any]]
#: title of the row of operations on gradients; its values are lists
GRADIENTS = "the gradients of a step"


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's values as JSON types."""
    return {key: value if type(value) in _PLAIN else plain(value) for key, value in group.items() if key != "params"}


def plain(value: Any) -> Any:
    """Convert tensors, lists and the like to numbers and text; other objects to their type's name."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, _PLAIN):
        return value
    return repr(value) if isinstance(value, numbers.Number) else repr(type(value))


def agree(comm: HostComm, rows: Callable[[], Iterable[Row]], label: str) -> None:
    """Raise, the same sentence on every rank, unless rows() returns the same on all ranks. Collective."""
    gather_answers(
        *(comm, lambda: json.dumps(list(rows()), sort_keys=True, separators=(",", ":")).encode(), label),
        refusals=(Error, NotImplementedError, TypeError, ValueError),
        compare=lambda gathered: f"ranks disagree about {difference(dict(enumerate(map(json.loads, gathered))))}",
        alike=True,
    )


UNLIKE_BEFORE = "the optimizer: it stepped with different hyperparameters before the last step"


def difference(tables: Mapping[int, list[Any]]) -> str:
    """Return the first difference between the rows of the lowest rank and those of another rank, in words."""
    first = min(tables)
    other = next((rank for rank, table in tables.items() if table != tables[first]), None)
    if other is None:
        return UNLIKE_BEFORE
    for (title, ours, values), (_, theirs, others) in zip(tables[first], tables[other]):
        if ours != theirs:
            return f"the optimizer: {title} holds other parameters on rank {first} and rank {other}"
        key = next((each for each in sorted({*values, *others}) if values.get(each) != others.get(each)), None)
        if key is None:
            continue
        a, b = values.get(key), others.get(key)
        if key.startswith("option "):
            return f"{key}: {a} on rank {first}, {b} on rank {other}; pass the same options on every rank"
        if title == GRADIENTS:
            alone = [_some([item for item in one if item not in two]) for one, two in ((a, b), (b, a))]
            return f"{title}: {key}: {alone[0]} on rank {first} alone, {alone[1]} on rank {other} alone"
        return f"the optimizer: {title} has {key}={a} on rank {first}, {key}={b} on rank {other}"
    return f"the optimizer: {len(tables[first])} groups on rank {first}, {len(tables[other])} on rank {other}"


def _some(items: list[Any]) -> str:
    more = f" and {len(items) - 3} more" if len(items) > 3 else ""
    return ", ".join(map(str, items[:3])) + more or "none"


def rows_of(optimizer: torch.optim.Optimizer | None, names: Mapping[int, Any]) -> list[Row]:
    """Return one row per group. `names`: id of a module's parameter -> name; other parameters appear by their shape."""
    rows: list[Row] = []
    for group in () if optimizer is None else optimizer.param_groups:
        members = list(map(names.get, map(id, group["params"])))
        if None in members:
            members = [[*p.shape] if name is None else name for name, p in zip(members, group["params"])]
        rows.append((f"group {len(rows)}", members, hyperparameters(group)))
    return rows


def given_rows(
    optimizer: torch.optim.Optimizer | None, names: Mapping[int, str], partition: str, clip_grad_norm: float | None
) -> list[Row]:
    """Return the values that ranks compare when wrap() gets an optimizer."""
    kind = "no optimizer" if optimizer is None else f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    return [
        ("it", [], {"class": kind, "partition": partition, "clip_grad_norm": clip_grad_norm}),
        *rows_of(optimizer, names),
    ]


def check_members(
    label: str, members: Mapping[int, Any], groups: Iterable[Mapping[str, Any]], *, all_of_them: bool, first: int = 0
) -> None:
    """Raise ValueError for groups, counted from `first`, with other parameters than `members` of module `label`."""
    given = [(position, parameter) for position, group in enumerate(groups, first) for parameter in group["params"]]
    unwrapped = [(position, parameter) for position, parameter in given if id(parameter) not in members]
    for position, parameter in unwrapped:
        if parameter.is_meta:
            raise ValueError(on_meta(parameter, position))
    if unwrapped and all_of_them:
        position, parameter = unwrapped[0]
        raise ValueError(
            f"optimizer: a parameter of shape {tuple(parameter.shape)} in group {position} is not one of the wrapped {label}: "
            "wrap one ModuleList of both modules, or wrap the other module too and give each an optimizer of its own"
        )
    if unwrapped and len(unwrapped) == len(given):
        raise ValueError(
            f"optimizer: none of its {len(unwrapped)} parameters is one of the wrapped {label}, so it would not train the module: "
            "pass the optimizer that was made from this module's parameters"
        )


def check_groups(outer: torch.optim.Optimizer, inner: torch.optim.Optimizer) -> None:
    """Raise an error unless both have the same groups, since a scheduler may change only one of them."""
    if list(map(id, outer.param_groups)) != list(map(id, inner.param_groups)):
        raise Error(
            "the optimizer passed to sw.wrap no longer has the groups of the one that it returned (add_param_group or "
            "load_state_dict was called on it, or param_groups was assigned to one of them): call them on the optimizer that sw.wrap "
            "returned, and change groups in place"
        )


def unlike_saved(optimizer: Any, groups: Iterable[Mapping[str, Any]]) -> str | None:
    """Return a message if saved groups lack needed keys and have unknown ones: those of another class of optimizer."""
    needed = {key for key in getattr(optimizer, "defaults", ()) if key not in _BESIDE}
    for position, (group, saved) in enumerate(zip(optimizer.param_groups, groups)):
        unknown = sorted({key for key in saved if key not in _BESIDE} - needed - set(group))
        missing = sorted(needed - set(saved))
        if unknown and missing:
            return (
                f"group {position} was saved by another optimizer than {type(optimizer).__name__}: it has {', '.join(unknown)} and lacks "
                f"{', '.join(missing)}"
            )
    return None


def check_saved(optimizer: torch.optim.Optimizer, groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise ValueError for saved groups of another class of optimizer."""
    sentence = unlike_saved(optimizer, groups)
    if sentence is not None:
        raise ValueError(f"optimizer state: {sentence}; nothing was loaded")


def watch_loading(optimizer: torch.optim.Optimizer) -> None:
    """Make the user's optimizer refuse another class's state from now on."""
    if optimizer not in _watched and takes_hooks(optimizer):
        _watched.add(optimizer)
        optimizer.register_load_state_dict_pre_hook(
            lambda each, state: check_saved(each, state.get("param_groups", ()))
        )
