"""Attributes and methods of the user's optimizer on the optimizer that wrap() returns.

A library asks an optimizer by hasattr() what it can do: accelerate and transformers call `train()` and `eval()` if they
exist, which in schedule-free optimizers move the parameters. So each public name of the user's optimizer is a name of
ours, and no other. A method of the user's optimizer runs like its step: on what this optimizer steps on, and its writes
become visible.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Forwarding", "reads_only"]

#: GradScaler hands unscaling over to an optimizer that has these; our optimizers unscale before they step
_WITHHELD = frozenset(("grad_scale", "found_inf"))
#: beginnings of names of methods that only read
_READING = ("get", "is_", "has_", "supports_")


def reads_only(name: str) -> bool:
    """Return True for a method that by its name writes to no parameter: get..., is_..., has_... or supports_..."""
    return name.startswith(_READING)


def _is_forwarded(name: str) -> bool:
    return not name.startswith("_") and name not in _WITHHELD


class Forwarding(torch.optim.Optimizer):
    """A base of optimizers that step by the user's optimizer, `_inner`.

    A subclass sets `_forwards` to True at the end of its constructor, and defines _call().
    """

    _inner: torch.optim.Optimizer
    _forwards = False

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
        """Set an attribute where it is: on the user's optimizer if only that one has it."""
        is_ours = name in self.__dict__ or hasattr(type(self), name) or not self._forwards or not _is_forwarded(name)
        if is_ours or not hasattr(self._inner, name):
            super().__setattr__(name, value)
        else:
            setattr(self._inner, name, value)
