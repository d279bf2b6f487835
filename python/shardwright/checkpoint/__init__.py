"""Checkpoints: asynchronous, crash-proof, the same bytes at any world size.

docs/format.md describes the bytes; docs/design/checkpoint.md describes how a save writes them. This folder collects and
names the state of a training; the engine reads and writes the disk.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .._engine import CheckpointError as CheckpointError

if TYPE_CHECKING:
    from .checkpointer import Checkpointer as Checkpointer
    from .dcp import StorageReader as StorageReader
    from .dcp import StorageWriter as StorageWriter
    from .dcp import dcp_to_torch_save as dcp_to_torch_save
    from .dcp import torch_save_to_dcp as torch_save_to_dcp
    from .files import load as load
    from .files import save as save
    from .files import step_of as step_of
    from .model_folder import save_pretrained as save_pretrained

#: imported at first use: `shardwright ckpt ls` needs no torch, and few programs need torch.distributed.checkpoint
_HOMES = {"Checkpointer": "checkpointer", "load": "files", "save": "files", "step_of": "files"}
_HOMES |= {"save_pretrained": "model_folder"}
_HOMES |= dict.fromkeys(("StorageReader", "StorageWriter", "dcp_to_torch_save", "torch_save_to_dcp"), "dcp")
__all__ = sorted(["CheckpointError", *_HOMES])


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
