"""Checkpoints: asynchronous, crash-proof, the same bytes at any world size.

The bytes are described in docs/format.md, how they come to be in docs/design/checkpoint.md. Everything that touches the
disk is the engine's; here is only what a model's state consists of and what it is called.
"""

from __future__ import annotations

from .._engine import CheckpointError
from .checkpointer import Checkpointer
from .files import load, save

__all__ = ["CheckpointError", "Checkpointer", "load", "save"]
