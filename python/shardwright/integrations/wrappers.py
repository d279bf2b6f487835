"""What the integrations share: wrapped modules, the optimizers that step for a program's own, whole parameters."""

from __future__ import annotations

import contextlib
import os
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ..checkpoint.model_folder import can_be_replaced
from ..parallel.ddp import DistributedDataParallel
from ..parallel.engine import engine_of
from ..torch_compat.adapters import has_adapters
from ..torch_compat.internals import stores_adapters_alone
from ..wrapping import full_parameters, keep_optimizer, shard_optimizer, unwrap


class Wrappers:
    """The wrappers that an integration made, in order, which is equal on all ranks. It keeps none of them alive."""

    def __init__(self) -> None:
        self._references: list[weakref.ref[DistributedDataParallel]] = []

    def make(self, module: torch.nn.Module, device_ids: Any, **options: Any) -> DistributedDataParallel:
        """Wrap a module. Collective."""
        wrapper = DistributedDataParallel(module, device_ids, **options)
        self._references.append(weakref.ref(wrapper))
        return wrapper

    def __iter__(self) -> Iterator[DistributedDataParallel]:
        """Yield the wrappers in force."""
        alive = [wrapper for reference in self._references if (wrapper := reference()) is not None]
        return (each for each in alive if each._engine.made and each.is_in_force)

    def of(self, module: Any) -> DistributedDataParallel | None:
        """Return the wrapper of `module`, which may be the wrapper itself, compiled or bare."""
        bare = unwrap(module)
        return next((wrapper for wrapper in self if unwrap(wrapper) is bare), None)

    def with_members_of(self, optimizer: torch.optim.Optimizer) -> DistributedDataParallel | None:
        """Return the first wrapper of a module with parameters of an optimizer."""
        members = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return next((each for each in self if any(id(p) in members for p in each.parameters())), None)

    def clipped_by(self, parameters: Iterable[torch.Tensor]) -> DistributedDataParallel | None:
        """Return the wrapper of a module that has gradients of all of `parameters`, and no others."""
        members = {id(p) for p in parameters}
        for wrapper in self:
            own = [p for replica in wrapper._engine.replicas for p in replica.table.module_parameters]
            if members <= {id(p) for p in own} and {id(p) for p in own if p.requires_grad} <= members:
                return wrapper
        return None


def stepping(wrapper: DistributedDataParallel, optimizer: Any, partition: str) -> torch.optim.Optimizer:
    """Return the optimizer that steps in place of the user's. Collective."""
    if wrapper._engine.options.zero:
        return shard_optimizer(wrapper, optimizer, partition=partition)
    return keep_optimizer(wrapper, optimizer)


@contextlib.contextmanager
def whole_parameters(module: Any, *, writable: bool = False) -> Iterator[None]:
    """Return a context in which every rank has whole parameters, as at lower stages anyway. Collective at zero=3."""
    engine = engine_of(module)
    if engine is None or engine.options.zero < 3:
        yield
        return
    with full_parameters(module, writable=writable):
        yield


def writes_in_parts(wrapped: Any, model: Any, place: str) -> bool:
    """Return whether sw.save_pretrained() of a wrapped transformers model does what the model's own method does at `place`."""
    engine = engine_of(wrapped)
    if engine is None or len(engine.replicas) != 1 or engine.replica.model_ranks is not None:
        return False
    stock = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    is_plain = stock is not None and isinstance(model, stock) and type(model).save_pretrained is stock.save_pretrained
    is_plain = is_plain and "save_pretrained" not in vars(model) and unwrap(wrapped) is model
    is_plain = is_plain and getattr(model, "hf_quantizer", None) is None and not model.is_remote_code()
    is_plain = is_plain and not has_adapters(model) and not stores_adapters_alone(model)
    return is_plain and engine.replica.group.host_count == 1 and can_be_replaced(os.path.realpath(place))
