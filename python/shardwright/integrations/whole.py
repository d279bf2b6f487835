"""Whole parameters for programs that read or write them: at zero=3 a rank may hold only slices."""

from __future__ import annotations

import contextlib
from typing import Any

from ..parallel.engine import engine_of
from ..wrapping import whole_replicas


def whole_parameters(module: Any, *, writable: bool = False) -> contextlib.AbstractContextManager[None]:
    """Return a context in which every rank has whole parameters. Collective at zero=3. At lower stages each rank has
    them anyway, and all ranks must write the same values."""
    engine = engine_of(module)
    if engine is None or engine.options.zero < 3:
        return contextlib.nullcontext()
    return whole_replicas(engine.replicas, writable=writable)
