"""The state of a sliced optimizer, as torch.distributed.checkpoint.state_dict reads it.

Its functions run on every rank. They read `optimizer.state` for the names of state, take a step of zeros if there is
none, and then read state_dict(). A sliced optimizer returns gathered whole state. If it has no state, it returns that
of a first step and does not keep it.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..master_weights import LOW, has_own_masters, masters_in_place


class StateNames:
    """`optimizer.state` with only the names of each parameter's state. It is true even if empty; else torch would step."""

    def __init__(self, names_of: Callable[[torch.Tensor], list[str]]) -> None:
        self._names_of = names_of

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, parameter: torch.Tensor) -> list[str]:
        return self._names_of(parameter)


@contextlib.contextmanager
def with_state(optimizer: Any) -> Iterator[None]:
    """Inside, give an optimizer without state on any rank the state of a first step. Collective."""
    state, comm = optimizer._inner.state, optimizer.replica.group.comm
    if any(each == b"\1" for each in comm.all_gather_bytes(bytes([bool(state)]), "presence of optimizer state")):
        yield
        return
    state.update(_of_first_step(optimizer))
    try:
        yield
    finally:
        state.clear()


def _of_first_step(optimizer: Any) -> dict[torch.Tensor, dict[str, Any]]:
    """Return the state of this rank's slices after a step of zeros on copies of them."""
    inner = optimizer._inner
    store = inner.__dict__.pop("store", None) if has_own_masters(inner) else None
    rates = [group.get("lr") for group in inner.param_groups]
    copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    try:
        with optimizer._on_slices() as low, torch.no_grad():
            has_master = {id(each) for each in low}
            for group in inner.param_groups:
                pieces, group["params"] = group["params"], [each.detach().clone() for each in group["params"]]
                copies |= {id(copy): (piece, copy) for piece, copy in zip(pieces, group["params"])}
                if "lr" in group:
                    group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
            for _, copy in copies.values():
                copy.grad = torch.zeros_like(copy)
            masters = [copy for piece, copy in copies.values() if id(piece) in has_master and copy.dtype in LOW]
            with masters_in_place(inner, masters):
                inspect.unwrap(type(inner).step)(inner)  # skips the hooks and counts of a real step
        return {piece: dict(inner.state[copy]) for piece, copy in copies.values() if copy in inner.state}
    finally:
        inner.state.clear()
        for group, rate in zip(inner.param_groups, rates):
            if "lr" in group:
                group["lr"] = rate
        if store is not None:
            inner.store = store
