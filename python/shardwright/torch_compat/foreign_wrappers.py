"""Wrappers of torch around a module that is wrapped already: refused while they are made, on every rank.

Two wrappers would average, slice or replace the same parameters, each unaware of the other. Two of torch's own
extension points tell when one is made. DistributedDataParallel and DataParallel register the module as their child.
FullyShardedDataParallel, fully_shard() and replicate() look into each module's registry of composable APIs.

Without torch's private registry, the check of parameters at the next forward finds replaced ones (parameters/drift.py).
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DataParallel
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from .._engine import Error

#: functions of torch that average or slice a module, by which they register
_AVERAGING = ("fully_shard", "replicate")


def _registry_key() -> str | None:
    """Return the attribute in which torch registers composable APIs of a module; None if this torch has none."""
    try:
        from torch.distributed._composable.contract import REGISTRY_KEY
    except ImportError:
        return None
    return str(REGISTRY_KEY)


def is_ours(wrapper: torch.nn.Module) -> bool:
    """Return whether a DistributedDataParallel is ours."""
    return hasattr(type(wrapper), "is_in_force")


def find_wrapper(module: torch.nn.Module, ignored: Collection[str] = ()) -> str | None:
    """Return a wrapper of torch's in or around `module` that averages parameters not named in `ignored` in its own way, or None.

    fully_shard() is not among them: it makes DTensors, whose mesh tells if ours can average beside it.
    """
    key, fsdp = _registry_key(), sys.modules.get("torch.distributed.fsdp")
    ours = _averaged(module, ignored)
    for each in module.modules():
        if isinstance(each, TorchDDP) and not is_ours(each):
            if not ours.isdisjoint(_averaged(each.module, each.parameters_to_ignore)):
                return "DistributedDataParallel of torch's"
        elif fsdp is not None and isinstance(each, fsdp.FullyShardedDataParallel):
            if ours & _averaged(each) - set(map(id, each._ignored_params)):
                return "FullyShardedDataParallel of torch's"
        elif key is not None and OrderedDict.__contains__(each.__dict__.get(key, OrderedDict()), "replicate"):
            if not ours.isdisjoint(_averaged(each)):
                return "module that torch's replicate() was called on"
    return None


def _averaged(module: torch.nn.Module, ignored: Collection[str] = ()) -> set[int]:
    """Return the ids of a module's parameters, without those of names in `ignored`."""
    return {id(p) for name, p in module.named_parameters(remove_duplicate=False) if name not in ignored}


def refuse_wrapper(what: str, label: str) -> None:
    """Raise Error: `what`, another wrapper, was given a module that is wrapped already."""
    raise Error(
        f"{what} was given a {label} that sw.wrap or sw.fully_shard wrapped already, whose gradients both would average: use the wrapped "
        "module as it is, outside of this call (with accelerate: do not give it to prepare()), or give it sw.unwrap(module) once no "
        "wrapper of ours is left"
    )


class _Registry(OrderedDict[str, Any]):
    """torch's registry of the composable APIs of one module; it refuses those that average, while `engine` is in force."""

    engine: weakref.ref[Any]

    def refuse(self, what: str, ignored: Collection[int]) -> None:
        """Raise Error if the module's engine is in force and averages a parameter whose id is not in `ignored`."""
        engine = self.engine()
        if engine is None or not engine.is_in_force:
            return
        if not _averaged(engine.module, engine.parameters_to_ignore) <= set(ignored):
            refuse_wrapper(what, type(engine.module).__name__)

    def __contains__(self, name: object) -> bool:
        what = _asking(sys._getframe(1)) if name in _AVERAGING else None
        if what is not None:
            self.refuse(what, _ignored_by(sys._getframe(1)))
        return super().__contains__(name)

    def __reduce__(self) -> Any:
        return OrderedDict, (list(self.items()),)


def _asking(frame: Any) -> str | None:
    """Return the function or class of torch that is about to wrap; None for one that only looks for wrappers."""
    found = None
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith("torch."):
        if frame.f_code.co_name == "_get_ignored_modules":
            found = "torch's FullyShardedDataParallel"
        elif frame.f_globals["__name__"].startswith("torch.distributed.fsdp._fully_shard."):
            found = "torch's fully_shard()"
        elif frame.f_globals["__name__"].startswith("torch.distributed._composable.replicate"):
            found = "torch's replicate()"
        elif frame.f_code.co_name == "wrapper" and "func" in frame.f_locals:
            found = f"torch's {frame.f_locals['func'].__name__}()"
        frame = frame.f_back
    return found


def _ignored_by(frame: Any) -> set[int]:
    """Return the ids of the parameters that the call of torch's in `frame` was told to ignore, as tensors or modules."""
    found: set[int] = set()
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith("torch."):
        given = {**frame.f_locals, **(frame.f_locals.get("kwargs") or {})}
        for name in ("ignored_params", "ignored_parameters", "ignored_modules"):
            # an iterator is torch's to read
            for each in given[name] if isinstance(given.get(name), Collection) else ():
                found.update(map(id, each.parameters() if isinstance(each, torch.nn.Module) else [each]))
        frame = frame.f_back
    return found


def guard_from_wrappers(engine: Any, face: torch.nn.Module) -> None:
    """Refuse every other wrapper around `face`, or around a part of the engine's module, while the engine is in force."""
    key = _registry_key()
    if key is None:
        return
    _install()
    modules = [face]
    for name, module in engine.module.named_modules():
        inside = (f"{name}.{each}" if name else each for each, _ in module.named_parameters())
        # containers too, on which torch leaves its mark before it looks inside
        if any(each not in engine.parameters_to_ignore for each in inside):
            modules.append(module)
    reference = weakref.ref(engine)
    for module in modules:
        registry = _Registry(module.__dict__.get(key, ()))
        registry.engine = reference
        module.__dict__[key] = registry


def note_fully_shard(module: torch.nn.Module) -> None:
    """Put fully_shard into torch's registry of the composable APIs of a module, as torch's own does."""
    key = _registry_key()
    if key is not None:
        from torch.distributed._composable.contract import RegistryItem

        module.__dict__.setdefault(key, OrderedDict())["fully_shard"] = RegistryItem()


@functools.cache
def _install() -> None:
    register_module_module_registration_hook(_before_child)


def _before_child(outer: torch.nn.Module, name: str, child: torch.nn.Module | None) -> None:
    """Refuse a wrapper of torch that is about to hold a wrapped module."""
    if not isinstance(outer, (TorchDDP, DataParallel)) or child is None or is_ours(outer):
        return
    if isinstance(outer, DataParallel) and not torch.cuda.is_available():
        return  # it only calls the module
    key = _registry_key()
    ignored = _averaged(child) - _averaged(child, getattr(outer, "parameters_to_ignore", ()))
    for each in child.modules():
        registry = each.__dict__.get(key or "")
        if isinstance(registry, _Registry):
            registry.refuse(f"torch's {type(outer).__name__}", ignored)
