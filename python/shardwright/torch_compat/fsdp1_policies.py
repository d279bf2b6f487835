"""The modules that an auto_wrap_policy of torch's FSDP1 makes units of. torch keeps the walk of its policies private."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch


def choose_units(
    module: torch.nn.Module, policy: Any, ignored: Collection[torch.nn.Module], ignored_params: Collection[int]
) -> dict[torch.nn.Module, dict[str, Any]]:
    """Map each module inside `module` that `policy` names to the arguments that it changes, inner modules first.

    `policy`: an object of torch's ModuleWrapPolicy or CustomPolicy, or a function of (module, recurse, nonwrapped_numel).
    """
    if hasattr(policy, "_run_policy"):
        chosen = policy._run_policy(module, set(ignored), {})
        return {
            each: chosen[each] for each in reversed(list(module.modules())) if each in chosen and each is not module
        }
    if not callable(policy):
        raise TypeError(f"FullyShardedDataParallel: auto_wrap_policy must be a policy or a function, got {policy!r}")
    found: dict[torch.nn.Module, dict[str, Any]] = {}

    def walk(outer: torch.nn.Module) -> int:
        """Add the units of `outer` to `found`. Return the number of elements in them."""
        numel = sum(each.numel() for each in outer.parameters() if id(each) not in ignored_params)
        if not policy(module=outer, recurse=True, nonwrapped_numel=numel):
            return 0
        taken = sum(walk(each) for each in outer.children() if each not in ignored and each not in found)
        if outer is module or not policy(module=outer, recurse=False, nonwrapped_numel=numel - taken):
            return taken
        found[outer] = {}
        return numel

    walk(module)
    return found


def full_precision_classes(mixed_precision: Any) -> tuple[type, ...]:
    """Return the classes of modules, such as batch norms, that torch's MixedPrecision leaves in their own precision."""
    return tuple(getattr(mixed_precision, "_module_classes_to_ignore", ()))
