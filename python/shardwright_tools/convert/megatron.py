"""Megatron-Core's checkpoints in format "torch_dist": a folder of torch.distributed.checkpoint and common.pt.

Megatron stacks the layers of a block: the first dimension of `decoder.layers.mlp.linear_fc1.weight` counts layers. The
reader splits it into `decoder.layers.0.mlp.linear_fc1.weight` and so on, the names of the modules. Optimizer state also
has names, unless Megatron's distributed optimizer wrote flat buffers.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from shardwright.formats.dcp import METADATA, Stored, read_values
from shardwright.formats.unpickle import Placeholder, load_torch_file, without_placeholders

from .contents import MASTER, Contents, Lazy

_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(\w+)\.(.+)")
_OPTIMIZER = re.compile(r"(?:chained_\d+\.)?optimizer\.")
#: a stacked tensor: "layers" without the number of a layer after it
_STACK = re.compile(r"(.*\blayers)\.(?!\d+\.)(.+)")
#: more than any metadata.json of this form has
_FORM_BYTES = 1 << 16
#: more layers than any model has
_LAYERS = 4096
#: a layer of a tensor counts as this at least: Megatron's files have a longer header before each
_LAYER_BYTES = 64
_KEYS = dict.fromkeys(("fp32_param", "master_param", "param"), MASTER)


def is_megatron(path: str) -> bool:
    place = os.path.join(path, "metadata.json")
    if not os.path.isfile(place):  # one that cannot end, such as a pipe
        return False
    try:
        with open(place, "rb") as file:
            form = json.loads(file.read(_FORM_BYTES))
    except (OSError, ValueError, RecursionError):
        return False
    is_ours = isinstance(form, dict) and form.get("sharded_backend") == "torch_dist"
    return is_ours and os.path.isfile(os.path.join(path, METADATA))


def read_megatron(path: str) -> Contents:
    left_out: list[str] = []
    values = {".".join(map(str, key)): value for key, value in read_values(path, left_out).items()}
    common = _common(path, left_out)
    contents = Contents({}, left_out=left_out)
    flat = [name for name in values if _OPTIMIZER.match(name) and not _STATE.fullmatch(name)]
    tensors = {name: each for name, each in values.items() if isinstance(each, Lazy) and name not in flat}
    stacks = _stacks(path, tensors, common.pop("layers", None), left_out)
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


def _stacks(path: str, tensors: Mapping[str, Lazy], layers: Any, left_out: list[str]) -> dict[str, int]:
    """Map each block of stacked layers to its number of layers, and name each block that stays stacked.

    Two or more tensors of a block that agree in their first dimension decide; a single one needs the arguments' number.
    The metadata may claim any size, so the bytes of the files bound the number of layers.
    """
    blocks: dict[str, list[tuple[str, Lazy]]] = {}
    for name, each in tensors.items():
        state = _STATE.fullmatch(name)
        found = _STACK.fullmatch(state[2] if state else name)
        if found:
            blocks.setdefault(found[1], []).append((found[2], each))
    room = sum(each.stat().st_size for each in os.scandir(path) if each.is_file())
    stacks = {}
    for block, members in blocks.items():
        lengths = [each.shape[0] if each.shape else 0 for _, each in members]
        shortest, longest = min(lengths), max(lengths)
        needed = sum(max(each.nbytes, longest * _LAYER_BYTES) for _, each in members)
        if shortest != longest:
            why = f"their first dimensions are from {shortest} to {longest}"
        elif longest < 1:
            why = "their tensors have no first dimension, or one of 0"
        elif len({name for name, _ in members}) == 1 and longest != layers:
            why = f"the one parameter has a first dimension of {longest}, and args.num_layers is {layers}"
        elif longest > _LAYERS:
            why = f"a first dimension of {longest} is above {_LAYERS}"
        elif needed > room:
            why = f"a first dimension of {longest} needs more bytes than the files have"
        else:
            stacks[block] = longest
            room -= needed
            continue
        left_out.append(f"the layers of '{block}' apart: they stay stacked, as {why}")
    return stacks


def _layers(name: str, each: Lazy, stacks: Mapping[str, int]) -> list[tuple[str, Lazy]]:
    """Return (name, tensor) for each layer of a stacked tensor; for any other tensor, return it alone."""
    found = _STACK.fullmatch(name)
    if not found or found[1] not in stacks or not isinstance(each.read, Stored):
        return [(name, each)]
    row = each.read.row
    return [
        (f"{found[1]}.{n}.{found[2]}", Lazy(each.dtype, each.shape[1:], functools.partial(row, n)))
        for n in range(stacks[found[1]])
    ]


def _take_optimizer(contents: Contents, body: Any) -> None:
    """Read the optimizer's options from common.pt, which does not list the parameters of a group."""
    if not contents.state:
        return
    groups, steps = [], []
    body = body if isinstance(body, dict) else {}
    members = list(body.values()) if all(str(key).isdigit() for key in body) else [body]  # several are stored by number
    inner = [each.get("optimizer", each) for each in members if isinstance(each, dict)]  # of an optimizer with masters
    for member in (each for each in inner if isinstance(each, dict)):
        own = member.get("param_groups")
        groups += [dict(each) for each in own if isinstance(each, dict)] if isinstance(own, (list, tuple)) else []
        state = member.get("state")
        steps += [state["common_step"]] if isinstance(state, dict) and "common_step" in state else []
    steps += [each.pop("step") for each in groups if "step" in each]
    shared = {k: v for k, v in groups[0].items() if all(_same(g.get(k), v) for g in groups[1:])} if groups else {}
    if steps and all(_same(each, steps[0]) for each in steps):
        step = Lazy.of(steps[0]) if isinstance(steps[0], torch.Tensor) else steps[0]
        for each in contents.state.values():
            each.setdefault("step", step)
    elif steps or any("exp_avg" in each and "step" not in each for each in contents.state.values()):
        contents.left_out.append(
            f"the optimizer's step, of which common.pt has {'unequal values' if steps else 'none'}"
        )
    shared.pop("params", None)
    contents.groups = [{**shared, "params": [name for name in contents.model if name in contents.state]}]
    if not groups:
        contents.left_out.append("the optimizer's options, which common.pt does not have in a known form")
    if len(groups) > 1:
        contents.left_out.append(
            f"which of the optimizer's {len(groups)} groups each parameter had: all are in one, with the options that are "
            "equal in all"
        )


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return (one == other) is True  # arrays have no one answer
