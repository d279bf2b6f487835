"""The forms in which entries of one parameter's sliced state travel between ranks and devices."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch


def from_memory_order(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a copy of flat values in memory order with the shape of `like`."""
    return flat.as_strided(like.shape, like.contiguous().stride()).clone()


def description_of(state: Mapping[str, Any], piece: torch.Tensor | None) -> str:
    """Return, as JSON, each entry's form on the wire: slices, a small tensor's value, or unchanged."""
    described = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            sliced = piece is not None and value.shape == piece.shape and key != "step"
            described[key] = ("sliced", dtype, None) if sliced else ("tensor", dtype, value.tolist())
        else:
            described[key] = ("value", "", value)
    return json.dumps(described)


def small_tensor(value: Any, dtype: str) -> torch.Tensor:
    """Return the tensor of a ("tensor", dtype, value) entry of description_of()."""
    return torch.tensor(value, dtype=getattr(torch, dtype), device="cpu")


def beside(state: Mapping[str, Any], piece: torch.Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state with its tensors on the device of `piece`.

    As in torch's own loading, a step count keeps its device, except for forms of the step that need it on the GPU.
    """
    counts_there = group.get("capturable") or group.get("fused")
    return {
        key: value.to(piece.device) if isinstance(value, torch.Tensor) and (key != "step" or counts_there) else value
        for key, value in state.items()
    }


def copied(value: Any) -> Any:
    """Return an entry that shares no memory with the state."""
    return value.clone() if isinstance(value, torch.Tensor) else value
