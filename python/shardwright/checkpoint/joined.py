"""Several modules and optimizers as one, for one checkpoint: its names begin with those of the modules.

The same code then saves and loads them, at every stage: a module of wrapped modules has the engines of all, and an
optimizer of optimizers has their groups one after another. Each wrapped module and each optimizer keeps its own stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from ..optim.sharded import ShardedOptimizer
from ..parallel.engine import Engine, engine_of
from ..torch_compat.internals import original_of


class Modules(torch.nn.Module):
    """Several modules under their names. Nothing runs it."""


class Optimizers:
    """Several optimizers under their names: `param_groups` and `state` of all."""

    def __init__(self, members: Mapping[str, Any]) -> None:
        self.members = dict(members)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for each in self.members.values() for group in each.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        """The state of all members, in a dict of its own: a load writes to each member's."""
        return {key: value for each in self.members.values() for key, value in each.state.items()}


def _named(kind: str, given: Any) -> dict[str, Any]:
    """Return the members of a list, under their numbers, or of a dict, by name: its order changes no checkpoint."""
    named = given if isinstance(given, Mapping) else {str(number): each for number, each in enumerate(given)}
    odd = next((n for n in named if not isinstance(n, str) or not n or "." in n or "\0" in n or n[0] in "_$"), None)
    if odd is not None:
        raise ValueError(
            f"{kind}: a name must be a string that is not empty, has no '.' and begins with neither '_' nor '$', got {odd!r}"
        )
    if not named:
        raise ValueError(f"{kind} must be one, or a list or dict of at least one, got {given!r}")
    return dict(sorted(named.items()) if isinstance(given, Mapping) else named)


def join_modules(model: Any) -> Any:
    """Return a list or a dict of modules as one module, whose tensors have the names `<key>.<name>`; any other unchanged."""
    if not isinstance(model, (list, tuple, Mapping)) or isinstance(model, torch.nn.Module):
        return model
    made = Modules()
    for name, each in _named("model", model).items():
        if not isinstance(each, torch.nn.Module):
            raise ValueError(f"model {name!r} must be a torch.nn.Module, got a {type(each).__name__}")
        if any(each is other for other in made._modules.values()):
            raise ValueError(f"model {name!r} is the same module as another one: give each once")
        made._modules[name] = each  # add_module() refuses the names of Module's own attributes
    return made


def join_optimizers(optimizer: Any) -> Any:
    """Return a list or a dict of optimizers as one; any other unchanged. A member may be None."""
    if not isinstance(optimizer, (list, tuple, Mapping)) or hasattr(optimizer, "param_groups"):
        return optimizer
    members = {name: each for name, each in _named("optimizer", optimizer).items() if each is not None}
    seen: dict[int, str] = {}
    for name, each in members.items():
        if not hasattr(each, "param_groups"):
            raise ValueError(f"optimizer {name!r} must be a torch.optim.Optimizer, got a {type(each).__name__}")
        for parameter in (p for group in each.param_groups for p in group["params"]):
            if seen.setdefault(id(parameter), name) != name:
                raise ValueError(
                    f"optimizers {seen[id(parameter)]!r} and {name!r} both have a parameter of shape {list(parameter.shape)}: a "
                    "checkpoint holds one optimizer's state of each"
                )
    return Optimizers(members) if members else None


def members_of(optimizer: Any) -> list[Any]:
    """Return the optimizers that `optimizer` stands for; [] for None."""
    if isinstance(optimizer, Optimizers):
        return list(optimizer.members.values())
    return [] if optimizer is None else [optimizer]


def sharded_of(optimizer: Any) -> list[ShardedOptimizer]:
    """Return the members whose state is sliced."""
    return [each for each in members_of(optimizer) if isinstance(each, ShardedOptimizer)]


def parts_of(model: Any) -> dict[str, Any]:
    """Return the modules that `model` stands for, by name; itself under ""."""
    return dict(model._modules) if isinstance(model, Modules) else {"": model}


def compressors_of(model: Any) -> dict[str, Any]:
    """Return the compressors' states of the modules that `model` stands for, by name; "" for a single module."""
    states = {n: getattr(original_of(m), "compression_state", None) for n, m in parts_of(model).items()}
    return {name: state for name, state in states.items() if state is not None}


def engines_of(model: Any) -> list[Engine]:
    """Return the engine of a module, or else those of the modules in it, in order. Collective as engine_of() is."""
    own = engine_of(model)
    children = model.children() if own is None and isinstance(model, torch.nn.Module) else ()
    return [each for child in children for each in engines_of(child)] if own is None else [own]


def averaging(module: torch.nn.Module) -> Iterator[Engine | TorchDDP]:
    """Yield what averages in a module: engines in force, and torch's DistributedDataParallel. Makes no engine."""
    for each in module.modules():
        engine = engine_of(each, make=False)
        if engine is not None and engine.is_in_force:
            yield engine
        elif engine is None and isinstance(each, TorchDDP):
            yield each
