"""Checkpoints: asynchronous, crash-proof, the same bytes at any world size.

docs/format.md describes the bytes; docs/design/checkpoint.md describes how a save writes them. This folder collects and
names the state of a training; the engine reads and writes the disk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._engine import CheckpointError
from .checkpointer import Checkpointer
from .files import load, save

if TYPE_CHECKING:
    from .dcp import StorageReader, StorageWriter, dcp_to_torch_save, torch_save_to_dcp

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "StorageReader",
    "StorageWriter",
    "dcp_to_torch_save",
    "load",
    "save",
    "torch_save_to_dcp",
]


#: imported at first use: few programs need torch.distributed.checkpoint
_OF_DCP = ("StorageReader", "StorageWriter", "dcp_to_torch_save", "torch_save_to_dcp")


def __getattr__(name: str) -> Any:
    if name in _OF_DCP:
        from . import dcp

        return getattr(dcp, name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
