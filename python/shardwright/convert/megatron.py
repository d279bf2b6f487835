"""Megatron-Core's distributed checkpoints in format "torch_dist": a folder of torch.distributed.checkpoint and
common.pt.

Names are those of sharded tensors. Megatron stacks the layers of a block: the first dimension of
`decoder.layers.mlp.linear_fc1.weight` counts layers. The reader splits it into `decoder.layers.0.mlp.linear_fc1.weight`
and so on, the names of the modules. Optimizer state has names, too, unless Megatron's distributed optimizer wrote flat
buffers.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from typing import Any

import torch

from .contents import MASTER, Contents, Lazy
from .dcp_format import METADATA, read_values
from .unpickle import Placeholder, load_torch_file, without_placeholders

_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.")
#: a stacked tensor: "layers" without the number of a layer after it
_STACK = re.compile(r"(.*\blayers)\.(?!\d+\.)(.+)")
_KEYS = dict.fromkeys(("fp32_param", "master_param", "param"), MASTER)


def is_megatron(path: str) -> bool:
    """Return True if `path` is a folder of this format."""
    try:
        with open(os.path.join(path, "metadata.json"), encoding="utf-8") as file:
            form = json.load(file)
    except (OSError, ValueError):
        return False
    return (
        isinstance(form, dict)
        and form.get("sharded_backend") == "torch_dist"
        and os.path.isfile(os.path.join(path, METADATA))
    )


def read_megatron(path: str) -> Contents:
    """Return the contents of a folder of this format."""
    left_out: list[str] = []
    values = {".".join(map(str, key)): value for key, value in read_values(path, left_out).items()}
    common = _common(path, left_out)
    contents = Contents({}, left_out=left_out)
    flat = [name for name in values if _OPTIMIZER.match(name) and not _STATE.fullmatch(name)]
    tensors = {name: each for name, each in values.items() if isinstance(each, Lazy) and name not in flat}
    stacks = _stacks(tensors, common.pop("layers", None))
    for name, each in tensors.items():
        found = _STATE.fullmatch(name)
        for own, tensor in _layers(found[2] if found else name, each, stacks):
            if found:
                contents.state.setdefault(own, {})[_KEYS.get(found[1], found[1])] = tensor
            else:
                contents.model[own] = tensor
    for name, value in values.items():
        if name not in tensors and name not in flat and value is not None:
            contents.extra.setdefault("megatron", {})[name] = value
    if flat:
        contents.left_out.append(
            f"'{flat[0]}' and {len(flat) - 1} more of the distributed optimizer, which have no parameters' names: save with "
            "--dist-ckpt-optim-fully-reshardable"
        )
    _take_optimizer(contents, common.pop("optimizer", None))
    step = common.pop("iteration", None)
    contents.step = step if type(step) is int and step >= 0 else 0
    contents.extra |= common
    return contents


def _common(path: str, left_out: list[str]) -> dict[str, Any]:
    """Return the contents of common.pt, plus "layers": the number of layers in Megatron's arguments."""
    place = os.path.join(path, "common.pt")
    found = load_torch_file(place) if os.path.isfile(place) else {}
    if not isinstance(found, dict):
        return {}
    arguments = found.get("args")
    layers = arguments.state.get("num_layers") if isinstance(arguments, Placeholder) and arguments.state else None
    clean = without_placeholders(found, "common.pt", left_out)
    return {**clean, "layers": layers}


def _stacks(tensors: Mapping[str, Lazy], layers: Any) -> dict[str, int]:
    """Map each block of stacked layers to its number of layers. All tensors of a block must have it as first dimension,
    and it must equal the arguments' number of layers, if that is known."""
    lengths: dict[str, set[int]] = {}
    for name, each in tensors.items():
        state = _STATE.fullmatch(name)
        found = _STACK.fullmatch(state[2] if state else name)
        if found:
            lengths.setdefault(found[1], set()).add(each.shape[0] if each.shape else -1)
    return {block: min(all_) for block, all_ in lengths.items() if len(all_) == 1 and layers in (None, *all_)}


def _layers(name: str, each: Lazy, stacks: Mapping[str, int]) -> list[tuple[str, Lazy]]:
    """Return (name, tensor) for each layer of a stacked tensor; for any other tensor, return it alone."""
    found = _STACK.fullmatch(name)
    if not found or found[1] not in stacks:
        return [(name, each)]

    def layer(number: int) -> Lazy:
        def read() -> torch.Tensor:
            return each.read()[number].clone()

        return dataclasses.replace(each, shape=each.shape[1:], read=read)

    return [(f"{found[1]}.{number}.{found[2]}", layer(number)) for number in range(stacks[found[1]])]


def _take_optimizer(contents: Contents, body: Any) -> None:
    """Read the optimizer's options from common.pt, which does not list the parameters of a group."""
    if not contents.state:
        return
    body = body if isinstance(body, dict) else {}
    body = body.get("optimizer", body)  # nested in the state of an optimizer with masters
    groups = [each for each in body.get("param_groups", ()) if isinstance(each, dict)]
    shared = {k: v for k, v in groups[0].items() if all(g.get(k) == v for g in groups[1:])} if groups else {}
    step = shared.pop("step", body.get("state", {}).get("common_step"))
    if isinstance(step, torch.Tensor):
        step = Lazy.of(step)
    for state in contents.state.values():
        if step is not None:
            state.setdefault("step", step)
    shared.pop("params", None)
    contents.groups = [{**shared, "params": [name for name in contents.model if name in contents.state]}]
    if len(groups) > 1:
        contents.left_out.append(
            f"which of the optimizer's {len(groups)} groups each parameter had: all are in one, with the options that are "
            "equal in all"
        )
