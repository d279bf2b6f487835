"""Bound methods that do not keep their object alive, for hooks and callbacks that outlive what they serve."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def weakly(method: Any, otherwise: Any = None) -> Callable[..., Any]:
    """Return `method` with a weak reference to its object. Once the object is gone, a call returns `otherwise`."""
    owner, function = weakref.ref(method.__self__), method.__func__

    def call(*arguments: Any) -> Any:
        alive = owner()
        return otherwise if alive is None else function(alive, *arguments)

    return call
