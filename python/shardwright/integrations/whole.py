"""Whole parameters for programs that read or write them, which at zero=3 a rank may not have."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..layout.memory import address_of
from ..parallel.ddp import DistributedDataParallel
from ..wrap import full_parameters


@contextlib.contextmanager
def whole_parameters(wrapper: DistributedDataParallel | None, *, writable: bool = False) -> Iterator[None]:
    """Give every rank whole parameters inside. Collective at zero=3; below, each rank has them, and all write the same."""
    if wrapper is None or wrapper._zero < 3:
        yield
        return
    with full_parameters(wrapper, writable=writable):
        yield


def copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict with copies of its tensors; tied entries stay tied."""
    copies: dict[int, torch.Tensor] = {}  # keyed by address
    return {name: _copied(value, copies) for name, value in state.items()}


def _copied(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    place = address_of(value) or id(value)
    if place not in copies or copies[place].shape != value.shape:
        copies[place] = value.clone()
    return copies[place]
