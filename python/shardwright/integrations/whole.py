"""Whole parameters for programs that read or write them, which at zero=3 a rank may not have."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ..parallel.ddp import DistributedDataParallel
from ..wrapping import full_parameters


@contextlib.contextmanager
def whole_parameters(wrapper: DistributedDataParallel | None, *, writable: bool = False) -> Iterator[None]:
    """Give every rank whole parameters inside. Collective at zero=3; below, each rank has them, and all write the same."""
    if wrapper is None or wrapper._zero < 3:
        yield
        return
    with full_parameters(wrapper, writable=writable):
        yield
