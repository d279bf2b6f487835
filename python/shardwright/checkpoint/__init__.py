"""Checkpoints: asynchronous, crash-proof, the same bytes at any world size.

docs/format.md describes the bytes; docs/design/checkpoint.md describes how a save writes them. This folder collects and
names the state of a training; the engine reads and writes the disk.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .._engine import CheckpointError

if TYPE_CHECKING:
    from .checkpointer import Checkpointer
    from .dcp import StorageReader, StorageWriter, dcp_to_torch_save, torch_save_to_dcp
    from .files import load, save, step_of
    from .model_folder import save_pretrained

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "StorageReader",
    "StorageWriter",
    "dcp_to_torch_save",
    "load",
    "save",
    "save_pretrained",
    "step_of",
    "torch_save_to_dcp",
]


#: imported at first use: `shardwright ckpt ls` needs no torch, and few programs need torch.distributed.checkpoint
_HOMES = {"Checkpointer": "checkpointer", "load": "files", "save": "files", "step_of": "files"}
_HOMES |= {"save_pretrained": "model_folder"}
_HOMES |= dict.fromkeys(("StorageReader", "StorageWriter", "dcp_to_torch_save", "torch_save_to_dcp"), "dcp")


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
