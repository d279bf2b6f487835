"""A stand-in for FSDP2: torch's tests of compositions run with our fully_shard, optimizers and PipelineStage.

What a test of FSDP2 does, and ours is called otherwise: an optimizer over the parameters of a sharded module is given to
shard_optimizer; `full_tensor()` of a parameter or gradient is its entry in full_state_dict() or full_gradients(); a gradient
counts as a DTensor, which says that it is in slices. Parameters stay what they are.
"""

from __future__ import annotations

import types
import weakref
from typing import Any

import torch

#: modules that fully_shard was called on, the outermost last
_modules: list[weakref.ref[torch.nn.Module]] = []
_is_installed = False
#: what was gathered since the last step: tests ask for one tensor after another
_whole: dict[tuple[int, bool], dict[str, torch.Tensor]] = {}


class _Sliced(type):
    def __instancecheck__(cls, value: Any) -> bool:
        from torch.distributed.tensor import DTensor

        return isinstance(value, DTensor) or (_is_installed and _place_of(value) is not None)


class Sliced(metaclass=_Sliced):
    """The class of DTensors, and of gradients of a module that was fully sharded."""


def _roots() -> list[torch.nn.Module]:
    return [module for module in (each() for each in reversed(_modules)) if module is not None]


def _place_of(value: Any) -> tuple[torch.nn.Module, str, bool] | None:
    """Return (outermost module, name, True for a gradient) of a parameter or gradient."""
    for module in _roots():
        for name, parameter in module.named_parameters():
            if parameter is value or (value is not None and parameter.grad is value):
                return module, name, parameter is not value
    return None


def install(torch: Any) -> None:
    """Put ours in the places of torch's."""
    import shardwright as sw
    import shardwright.optim  # noqa: F401  its classes are torch's own's
    from torch.distributed import fsdp, pipelining
    from torch.distributed.tensor import DTensor
    from torch.optim.optimizer import register_optimizer_step_post_hook
    from torch.testing._internal import common_fsdp

    global _is_installed
    _is_installed = True

    def fully_shard(module: Any, *, reshard_after_forward: Any = None, **options: Any) -> Any:
        sw.fully_shard(module, reshard_after_forward=reshard_after_forward is not False, **options)
        _modules.extend(map(weakref.ref, module if isinstance(module, list) else [module]))
        return module

    fsdp.fully_shard = common_fsdp.fully_shard = fully_shard
    pipelining.PipelineStage = sw.PipelineStage
    whole = DTensor.full_tensor

    def full_tensor(self: Any, **options: Any) -> Any:
        place = _place_of(self)
        if place is None:
            return whole(self, **options)
        module, name, is_gradient = place
        key = id(module), is_gradient
        if key not in _whole:
            _whole[key] = (sw.full_gradients if is_gradient else sw.full_state_dict)(module)
        return _whole[key][name]

    DTensor.full_tensor = torch.Tensor.full_tensor = full_tensor
    register_optimizer_step_post_hook(lambda *_: _whole.clear())

    def sliced(kind: type) -> Any:
        def make(parameters: Any, **options: Any) -> Any:
            given = list(parameters)
            optimizer = kind(given, **options)
            for module in _roots():
                if {id(each) for each in given} == {id(each) for each in module.parameters()}:
                    return sw.shard_optimizer(module, optimizer)
            return optimizer

        return make

    for name in ("Adam", "AdamW", "SGD"):
        setattr(torch.optim, name, sliced(getattr(torch.optim, name)))


def adopt(module: types.ModuleType) -> None:
    """Give a file of tests what counts as a DTensor here."""
    if _is_installed and hasattr(module, "DTensor"):
        module.DTensor = Sliced  # type: ignore[attr-defined]


def replace_functions() -> None:
    """Put ours in the places of torch's functions, with the parameters and optimizers that it makes."""
    import shardwright as sw
    from torch.distributed import _composable, fsdp
    from torch.distributed._composable.fsdp import fully_shard as module
    from torch.testing._internal import common_fsdp

    for name in ("fully_shard", "register_fsdp_forward_method", "share_comm_ctx"):
        ours = getattr(sw, name)
        for place in (fsdp, _composable.fsdp, module, common_fsdp):
            if hasattr(place, name):
                setattr(place, name, ours)
