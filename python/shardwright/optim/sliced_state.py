"""The state of a sliced optimizer: in memory, on the wire, and as torch's functions read it."""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch

from .._engine import Error
from ..layout.views import dtype_name
from .master_weights import LOW, has_own_masters, masters_in_place
from .moments import is_records

#: the state dict's key for a rank's slices
MARK = "shardwright_slices"


class SlicedState:
    """A rank's slices of an optimizer's state: "layout", "groups" and "state". It can be copied and loaded, not saved.

    `if rank == 0: torch.save(optimizer.state_dict())` would save only rank 0's slices, and the loss would show at the
    resume. Not a mapping, so torch.distributed.checkpoint does not flatten it but pickles it, which raises.
    """

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content

    def __repr__(self) -> str:
        rank, world_size = self.content["layout"][:2]
        return f"SlicedState(rank {rank} of {world_size}, {len(self.content['state'])} parameters)"

    def __copy__(self) -> SlicedState:
        return SlicedState(self.content)

    def __deepcopy__(self, memo: dict[int, Any]) -> SlicedState:
        return SlicedState(copy.deepcopy(self.content, memo))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        rank, world_size = self.content["layout"][:2]
        raise Error(
            f"this state_dict() of an optimizer holds the slices of rank {rank} of {world_size} and cannot be saved: save "
            "sw.full_optimizer_state_dict(module, optimizer), called on every rank, or state_dict() after "
            "optimizer.consolidate_state_dict(to=0), or let sw.Checkpointer save it"
        )


def description_of(state: Mapping[str, Any], piece: torch.Tensor | None) -> str:
    """Return, as JSON, each entry's form on the wire: slices, a small tensor's value, or unchanged."""
    described = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            dtype = dtype_name(value.dtype)
            sliced = piece is not None and value.shape == piece.shape and key != "step"
            how = "records" if is_records(key, value) else "sliced" if sliced else "tensor"
            described[key] = (how, dtype, value.tolist() if how == "tensor" else None)
        else:
            described[key] = ("value", "", value)
    return json.dumps(described)


def beside(state: Mapping[str, Any], piece: torch.Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state with its tensors on the device of `piece`; step counts only where the step needs them there."""
    counts_there = group.get("capturable") or group.get("fused")
    return {
        key: value.to(piece.device) if isinstance(value, torch.Tensor) and (key != "step" or counts_there) else value
        for key, value in state.items()
    }


# for torch.distributed.checkpoint.state_dict ------------------------------------------------------------------------
#
# Its functions run on every rank. They read `optimizer.state` for the names of state, take a step of zeros if there is
# none, and then read state_dict(). A sliced optimizer returns gathered whole state; without any, that of a first step,
# which it does not keep.


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
            for _, copied in copies.values():
                copied.grad = torch.zeros_like(copied)
            masters = [copied for piece, copied in copies.values() if id(piece) in has_master and copied.dtype in LOW]
            with masters_in_place(inner, masters):
                inspect.unwrap(type(inner).step)(inner)  # skips the hooks and counts of a real step
        return {piece: dict(inner.state[copied]) for piece, copied in copies.values() if copied in inner.state}
    finally:
        inner.state.clear()
        for group, rate in zip(inner.param_groups, rates):
            if "lr" in group:
                group["lr"] = rate
        if store is not None:
            inner.store = store
