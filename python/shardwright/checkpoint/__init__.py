"""Checkpoints: asynchronous, crash-proof, the same bytes at any world size.

The bytes are described in docs/format.md, how they come to be in docs/design/checkpoint.md. Everything that touches the
disk is the engine's; here is only what a model's state consists of and what it is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._engine import CheckpointError
from .checkpointer import Checkpointer
from .files import load, save

if TYPE_CHECKING:
    from .dcp import StorageReader, StorageWriter

__all__ = ["CheckpointError", "Checkpointer", "StorageReader", "StorageWriter", "load", "save"]


def __getattr__(name: str) -> Any:
    if name in ("StorageReader", "StorageWriter"):  # imports torch.distributed.checkpoint, which few need
        from . import dcp

        return getattr(dcp, name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
