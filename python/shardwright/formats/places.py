"""The stored tensors of a place by name: a Hugging Face folder, a folder of ours, of dcp, a file of torch.save."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from .._engine import CheckpointError, CheckpointFolder
from .dcp import is_dcp, model_of
from .lazy import Lazy
from .model_files import MODEL_KEYS, model_files, read_safetensors
from .unpickle import load_torch_file

__all__ = ["stored_tensors"]


def stored_tensors(place: Any) -> dict[str, Lazy]:
    """Return the tensors of a model at `place`, a path or a mapping of names to tensors, by name.

    Raises
    ------
    CheckpointError
        No reader knows the files, or they are damaged.
    """
    if isinstance(place, Mapping):
        return {name: Lazy.of(tensor) for name, tensor in place.items()}
    path = os.fspath(place)
    if not os.path.lexists(path):
        raise CheckpointError(f"'{path}' does not exist")
    ours = CheckpointFolder.find(path) if os.path.isdir(path) else None
    folder = None if ours is None else CheckpointFolder(ours)
    files = model_files(path if ours is None else ours)
    if not files and is_dcp(path):
        return model_of(path)
    if not files:
        raise CheckpointError(f"'{path}' holds no model: no safetensors, torch.save, dcp or Shardwright checkpoint")
    found: dict[str, Lazy] = {}
    for file in files:
        read = read_safetensors(file, folder) if file.endswith(".safetensors") else _of_torch_file(file)
        twice = next((name for name in read if name in found), None)
        if twice is not None:
            raise CheckpointError(f"'{path}' holds the tensor '{twice}' twice")
        found |= read
    return found


def _of_torch_file(path: str) -> dict[str, Lazy]:
    """Return the tensors of a state dict, or of one under a key that programs use. They stay mapped on disk."""
    body = load_torch_file(path)
    state = next((body[k] for k in MODEL_KEYS if isinstance(body, dict) and isinstance(body.get(k), Mapping)), body)
    if not isinstance(state, Mapping):
        raise CheckpointError(f"'{path}' holds a {type(body).__name__}, not a state dict")
    return {name: Lazy.of(value) for name, value in state.items() if isinstance(value, torch.Tensor)}
