"""Whole parameters for programs that read or write them: at zero=3 a rank may hold only slices."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ..parallel.ddp import DistributedDataParallel
from ..wrapping import full_parameters


@contextlib.contextmanager
def whole_parameters(wrapper: DistributedDataParallel | None, *, writable: bool = False) -> Iterator[None]:
    """Return a context in which every rank has whole parameters. Collective at zero=3. At lower stages each rank has
    them anyway, and all ranks must write the same values."""
    if wrapper is None or wrapper._zero < 3:
        yield
        return
    with full_parameters(wrapper, writable=writable):
        yield
