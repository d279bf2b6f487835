"""State dicts and their files: the parts that need private names of torch, or inspect the caller's frame."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import IO, Any

import torch

#: modules whose frames lie between torch's function and the method that it calls
_BETWEEN = ("shardwright.", "torch.nn.", "torch._dynamo.", "torch.utils.", "accelerate.")


def asked_by_torchs_functions() -> bool:
    """Return True inside a call of get_state_dict, set_state_dict and the others of torch.distributed.checkpoint.state_dict.

    Every rank calls these functions, and they expect whole tensors from state_dict(). A program may call state_dict()
    on one rank, where it must not communicate. Only the caller tells the two apart.
    """
    frame = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith(_BETWEEN):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict"


def asked_from_inside() -> bool:
    """Return True if the caller of the method that asks is this package, or torch's functions, which need DTensors."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith(("shardwright.", "torch."))


def hook_loading(module: torch.nn.Module, begin: Callable[..., None], end: Callable[..., None]) -> list[Any]:
    """Call `begin` before load_state_dict() loads `module`, and `end` behind its children. Return the handles.

    A TorchScript module has no such hooks, and is loaded through the module around it.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return []
    # torch 2.4 has no public name for the first
    return [module._register_load_state_dict_pre_hook(begin), module.register_load_state_dict_post_hook(end)]


def load_everything(reader: Any) -> dict[str, Any]:
    """Return the nested state dict of a checkpoint, read by this process alone."""
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, Any] = {}
    _load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return state


def records_of(source: str | IO[bytes]) -> list[str] | None:
    """Return the names of the records of a zip archive of torch.save or torch.jit.save; None if torch.load takes it for none.

    torch.load chooses between a state dict and TorchScript by this list. Another parser may list other records of a
    malicious file. A file keeps its position.
    """
    if isinstance(source, str):
        with open(source, "rb") as file:
            return records_of(file)
    at = source.tell()
    try:
        if not torch.serialization._is_zipfile(source):
            return None
        with torch.serialization._open_zipfile_reader(source) as archive:
            return archive.get_all_records()
    finally:
        source.seek(at)
