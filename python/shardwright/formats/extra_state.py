"""The extra state of modules in a checkpoint's folder, for a load of the model alone (parallel/loading.py)."""

from __future__ import annotations

import os
from typing import Any

import torch

from .._engine import CheckpointError, CheckpointFolder
from . import tree
from .model_files import read_safetensors


def extra_state_of(folder: CheckpointFolder) -> dict[str, Any]:
    """Return what get_extra_state() of each module gave, by names such as "0._extra_state".

    Raise CheckpointError if the folder is damaged.
    """
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
