"""Local parameters: plain tensors that represent the DTensors of tensor parallelism to the engine.

A LocalParameter is the `_local_tensor` of a DTensor and shares its memory. Gradient, requires_grad, version and hooks
are read from the DTensor and written to it (docs/design/compose.md).
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import torch

from .._engine import Error
from ..torch_compat import dtensor as _dtensor
from ..torch_compat.internals import subclassed

#: the attribute of a parameter that fully_shard has cut, and of its whole one: what relates both (ShardedParameter)
SHARDED = "_shardwright_sharded"


class LocalParameter(torch.nn.Parameter):
    """The local tensor of a DTensor parameter. The DTensor owns it, so it outlives any wrapper."""

    _owner: Callable[[], torch.Tensor | None]

    @classmethod
    def of(cls, owner: torch.Tensor) -> LocalParameter:
        """Return the local parameter of a DTensor. Create it if needed; it then replaces the local tensor."""
        held = _dtensor.held_tensor(owner)
        if isinstance(held, LocalParameter) and held._owner() is owner:
            return held
        local = _dtensor.waited(held).detach()
        made = subclassed(cls, local)
        made._owner = weakref.ref(owner)
        _dtensor.set_held_tensor(owner, made)
        return made

    @property
    def owner(self) -> Any:
        """Return the DTensor."""
        owner = self._owner()
        if owner is None:
            raise Error("the DTensor of a local parameter has ended")
        return owner

    def is_in_place(self) -> bool:
        """Return True if this is still the DTensor's local tensor."""
        return _dtensor.held_tensor(self.owner) is self

    @property
    def grad(self) -> torch.Tensor | None:
        """Return the local tensor of the DTensor's gradient, redistributed to the parameter's placements."""
        owner = self.owner
        gradient = owner.grad
        if gradient is None:
            return None
        if not _dtensor.is_dtensor(gradient):
            raise Error(f"the gradient of a DTensor parameter is a {type(gradient).__name__}: it must be a DTensor")
        placed = _dtensor.placed_as(gradient, owner)
        held = _dtensor.held_tensor(placed)
        local = _dtensor.waited(held)
        if placed is not gradient or local is not held:
            self.grad = local
        return local

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        owner = self.owner
        gradient = owner.grad
        if value is None:
            owner.grad = None
        elif (
            gradient is None
            or _dtensor.held_tensor(gradient) is not value
            or tuple(gradient.placements) != tuple(owner.placements)
        ):
            owner.grad = _dtensor.like_dtensor(value, owner)

    @grad.deleter
    def grad(self) -> None:
        self.owner.grad = None

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return bool(self.owner.requires_grad)

    @property
    def _version(self) -> int:  # type: ignore[override]
        return int(self.owner._version)

    @property
    def _post_accumulate_grad_hooks(self) -> Any:  # type: ignore[override]
        return self.owner._post_accumulate_grad_hooks

    def register_post_accumulate_grad_hook(self, hook: Callable[..., Any]) -> Any:
        return self.owner.register_post_accumulate_grad_hook(hook)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return a plain tensor, as a copied DTensor's local tensor is."""
        return memo.setdefault(id(self), self.detach().clone(memory_format=torch.preserve_format))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)


def is_local(parameter: torch.Tensor) -> TypeGuard[LocalParameter]:
    """Return True if a parameter of a table is the local part of a DTensor."""
    return isinstance(parameter, LocalParameter)


def local_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return the entry of a parameter table for a module's parameter: a DTensor's local parameter, or itself."""
    held = _dtensor.held_tensor(parameter) if _dtensor.is_dtensor(parameter) else None
    return held if isinstance(held, LocalParameter) else parameter


def end_local_parameters(module: torch.nn.Module) -> None:
    """Replace local parameters by plain tensors: Module.cpu() moves no DTensor with weak references."""
    for parameter in module.parameters():
        held = local_of(parameter)
        if isinstance(held, LocalParameter):
            _dtensor.set_held_tensor(parameter, held.detach())
            held._owner = functools.partial(_same, parameter)  # later saves of an optimizer read the owner


def _same(parameter: torch.Tensor) -> torch.Tensor:
    return parameter


def module_parameter(parameter: torch.Tensor) -> torch.Tensor:
    """Return the module's own parameter for one of a parameter table: a DTensor, or itself."""
    return parameter.owner if is_local(parameter) else parameter


def whole_of(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor of a value in the shape of a table's parameter. Collective over a DTensor's mesh."""
    return _dtensor.full_tensor(value, parameter.owner) if is_local(parameter) else value


def whole_tensor(value: Any) -> Any:
    """Return a DTensor's whole tensor; any other value unchanged. Collective over its mesh."""
    return _dtensor.full_tensor(_dtensor.held_tensor(value), value) if _dtensor.is_dtensor(value) else value


def part_of(parameter: torch.Tensor, value: Any) -> Any:
    """Return this rank's part of a value of a table's parameter. The value may be whole, or a DTensor."""
    if _dtensor.is_dtensor(value):
        return _dtensor.waited(_dtensor.held_tensor(value))
    if is_local(parameter) and isinstance(value, torch.Tensor) and value.dim() and value.shape == parameter.owner.shape:
        return _dtensor.local_part(value, parameter.owner)
    return value


def as_dtensors(state: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """Return `state` with whole tensors converted to DTensors where `like` has a DTensor of equal name and shape."""
    made: Any = copy.copy(state)  # keeps its attributes, such as torch's `_metadata`
    for name, value in state.items():
        live: Any = like.get(name)
        if _dtensor.is_dtensor(live) and isinstance(value, torch.Tensor) and not _dtensor.is_dtensor(value):
            if value.shape == live.shape:
                part = _dtensor.local_part(value, live).contiguous()
                made[name] = _dtensor.placed_like(part, live)
    return made
