"""Attributes and methods of the user's optimizer on the optimizer that wrap() returns.

Libraries ask an optimizer by hasattr() what it can do, so each public name of the user's optimizer is a name of ours,
and no other. A method of it runs like its step: on what this optimizer steps on, and its writes become visible. In
schedule-free optimizers, `train()` and `eval()` move the parameters.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Collection
from typing import Any

import torch

from .._engine import Error
from ..torch_compat.internals import TorchDispatchMode, no_torch_function, tree_leaves, without_memory_of

#: GradScaler hands unscaling over to an optimizer that has these; our optimizers unscale before they step
_WITHHELD = frozenset(("grad_scale", "found_inf"))
#: beginnings of names of methods that only read
_READING = ("get", "is_", "has_", "supports_")
#: torch's operations whose result depends on a whole tensor
_REDUCING = frozenset(
    ("_foreach_norm", "amax", "amin", "dot", "linalg_vector_norm", "max", "mean", "min", "norm", "std", "sum", "var")
)


@torch.enable_grad()
def loss_of(closure: Callable[[], Any]) -> Any:
    """Return the result of a step's closure, which reevaluates the model with gradients enabled."""
    return closure()


def reads_only(name: str) -> bool:
    """Return True for a method that by its name writes to no parameter: get..., is_..., has_... or supports_..."""
    return name.startswith(_READING)


def _is_forwarded(name: str) -> bool:
    return not name.startswith("_") and name not in _WITHHELD


class WithoutReductions(TorchDispatchMode):
    """A context in which a method named `name` may not reduce a slice, of one of `shapes`, to a number of this rank alone."""

    def __init__(self, name: str, shapes: Collection[torch.Size]) -> None:
        super().__init__()
        self._name, self._shapes = name, shapes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation; raise Error for a reduction of a slice."""
        operation = func.overloadpacket.__name__
        if self._shapes and operation in _REDUCING:
            given = args[0] if isinstance(args[0], (list, tuple)) else args[:1]
            if any(each.numel() > 1 and each.shape in self._shapes for each in given):
                raise Error(
                    f"optimizer.{self._name}() takes {operation} of a slice, a number of this rank alone where that of a "
                    "whole tensor is meant (as in SAM): use zero=0 for this optimizer"
                )
        return func(*args, **(kwargs or {}))


class NotAveraged(torch.Tensor):
    """The `.grad` of a slice to which ranks have added since it was averaged: it can be cleared, and raises if used."""

    reason: str

    @staticmethod
    def __new__(cls, like: torch.Tensor, reason: str, dtype: torch.dtype | None = None) -> NotAveraged:
        made: NotAveraged = without_memory_of(cls, like, dtype)
        made.reason = reason
        return made

    __torch_function__ = no_torch_function

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"NotAveraged({self.reason})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's stub declares the default, a plain function, not the protocol
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._to_copy.default:  # a master's gradient
            return cls(args[0], args[0].reason, kwargs["dtype"])
        held = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, cls))
        raise Error(held.reason)


class Forwarding(torch.optim.Optimizer):
    """A base of optimizers that step by the user's optimizer, `_inner`, once their constructor sets `_forwards`."""

    _inner: torch.optim.Optimizer
    _forwards = False

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_inner": self._inner, "_forwards": self._forwards}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch does. The user's own class sees it first and may refuse it."""
        if all(group is not param_group for group in self._inner.param_groups):
            self._inner.add_param_group(param_group)
        super().add_param_group(param_group)

    def _call(self, name: str, method: Callable[[], Any]) -> Any:
        """Call a method of the user's optimizer."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        """Return a public attribute of the user's optimizer; a method of it runs by _call()."""
        if not _is_forwarded(name) or "_inner" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value = getattr(self._inner, name)
        if not isinstance(value, types.MethodType) or value.__self__ is not self._inner:
            return value

        @functools.wraps(value)
        def method(*args: Any, **kwargs: Any) -> Any:
            return self._call(name, functools.partial(value, *args, **kwargs))

        return method

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute where it is: on the user's optimizer if only that one has it, `state` on both."""
        is_ours = name in self.__dict__ or hasattr(type(self), name) or not self._forwards or not _is_forwarded(name)
        if is_ours or not hasattr(self._inner, name):
            super().__setattr__(name, value)
            if name == "state" and name in self.__dict__ and self._forwards:
                self._inner.state = value
        else:
            setattr(self._inner, name, value)
