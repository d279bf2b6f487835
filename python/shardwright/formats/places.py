"""The stored tensors of a place by name: a Hugging Face folder, a folder of ours, of dcp, a file of torch.save."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from .._engine import CheckpointError, CheckpointFolder
from ..layout.memory import has_memory
from ..options.places import absolute_path, address_of
from . import tree
from .dcp import EXTRA, is_dcp, model_of
from .lazy import Lazy
from .model_files import model_files, read_safetensors
from .stored import Stored
from .unpickle import model_state, without_placeholders


def stored_tensors(place: Any) -> dict[str, Any]:
    """Return the tensors of a model at `place`, a path or a mapping of names to tensors, by name: Lazy, or extra state."""
    if isinstance(place, Mapping):
        return {name: stored_value(name, value) for name, value in place.items()}
    path = os.fspath(place)
    address = address_of(path)
    if address is not None and not os.path.lexists(path):
        from .remote_files import remote_tensors

        return remote_tensors(address)
    if not os.path.lexists(path):
        absolute_path("the place", path)  # refuses addresses
        raise CheckpointError(
            f"'{path}' does not exist: pass the folder or file of a model on this host, not its name on a hub"
        )
    ours = CheckpointFolder.find(path) if os.path.isdir(path) else None
    folder = None if ours is None else CheckpointFolder(ours)
    files = model_files(path if ours is None else ours)
    if not files and is_dcp(path):
        return model_of(path)
    if not files:
        raise CheckpointError(f"'{path}' holds no model: no safetensors, torch.save, dcp or Shardwright checkpoint")
    found: dict[str, Any] = {}
    for file in files:
        read = read_safetensors(file, folder) if file.endswith(".safetensors") else _of_torch_file(file)
        twice = next((name for name in read if name in found), None)
        if twice is not None:
            raise CheckpointError(f"'{path}' holds the tensor '{twice}' twice")
        found |= read
    if folder is not None:
        found |= _extra_state_of(folder)
    return found


def stored_value(name: str, value: Any) -> Any:
    """Return the Lazy of a tensor, or a module's extra state. Raise CheckpointError for any other value."""
    if isinstance(value, Lazy) or (not isinstance(value, torch.Tensor) and str(name).endswith(EXTRA)):
        return value
    if isinstance(value, Stored):
        return value.lazy
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and has_memory(value):
        if not (value.is_meta or value.is_quantized or value.is_nested):
            return Lazy.of(value)
    raise CheckpointError(f"{name!r} is a {type(value).__name__}, not a dense tensor with memory")


def _of_torch_file(path: str) -> dict[str, Any]:
    """Return what a state dict, or one under a key that programs use, holds. Tensors stay mapped on disk."""
    odd: list[str] = []
    items = model_state(path)[2].items()
    state = {n: without_placeholders(v, n, odd) if str(n).endswith(EXTRA) else v for n, v in items}
    if odd:
        raise CheckpointError(f"'{path}' holds {odd[0]}, which cannot be read: leave it out")
    return {n: stored_value(n, v) for n, v in state.items() if isinstance(v, torch.Tensor) or str(n).endswith(EXTRA)}


def _extra_state_of(folder: CheckpointFolder) -> dict[str, Any]:
    """Return what get_extra_state() of each module gave, by names such as "0._extra_state"."""
    if "state.json" not in folder.files:
        return {}
    try:
        nodes = dict(tree.loads(folder.read_bytes("state.json"))["model_extra_state"])
        needed, tensors = set(tree.tensor_names(nodes)), dict[str, torch.Tensor]()
        paths = [path for path in folder.files if path.startswith("state") and path.endswith(".safetensors")]
        for path in paths if needed else ():
            read = read_safetensors(os.path.join(folder.path, path), folder)
            tensors |= {name: each.read() for name, each in read.items() if name in needed}
        return {name: tree.decode(node, tensors) for name, node in nodes.items()}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"'{folder.path}', state.json: it is not what a save writes ({type(error).__name__}: {error})"
        ) from None
