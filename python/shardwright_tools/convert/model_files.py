"""Readers and writers of model files: safetensors and torch.save, as one file or several with an index."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Mapping
from typing import Any

import torch
from shardwright._engine import CheckpointError
from shardwright.checkpoint.files import MAX_FILE_BYTES
from shardwright.checkpoint.state.content import MODEL_METADATA, Group, model_index
from shardwright.formats.model_files import model_files, read_safetensors
from shardwright.formats.unpickle import model_state

from .contents import Contents, Lazy, durable_file, leaves, replaced
from .folders import Progress, copy_beside, plan_of, take_beside, write_all

_ALIGNMENT = 64


def read_model(path: str) -> Contents:
    """Return the model in the files at `path`. Skips an optimizer in a file of torch.save: its state has no names."""
    contents = Contents({})
    places: dict[tuple[int, Any, Any, Any], str] = {}
    for each in model_files(path):
        found = read_safetensors(each) if each.endswith(".safetensors") else _of_torch_file(each, contents, places)
        for name, lazy in found.items():
            if name in contents.model:
                raise CheckpointError(f"'{path}' holds the tensor '{name}' twice")
            contents.model[name] = lazy
    if not contents.model:
        raise CheckpointError(f"'{path}' holds no tensors of a model")
    take_beside(contents, path if os.path.isdir(path) else os.path.dirname(path), model_files(path))
    return contents


def _of_torch_file(path: str, contents: Contents, places: dict[Any, str]) -> dict[str, Lazy]:
    """Return the tensors of a state dict. Takes tensors that share memory once."""
    body, key, state = model_state(path)
    if key is not None:
        has_step = type(body.get("step")) is int and body["step"] >= 0
        contents.step = body["step"] if has_step else contents.step
        taken = (key, "step") if has_step else (key,)
        contents.left_out += [f"{k} of {os.path.basename(path)}" for k in body if k not in taken]
    found = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            contents.left_out.append(f"{name}, no tensor")
            continue
        place = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
        if value.numel() and place in places:
            contents.tied[name] = places[place]
            continue
        places[place] = name
        found[name] = Lazy.of(value)
    return found


def write_model(contents: Contents, output: str, progress: Progress) -> None:
    """Write the model to the new folder `output`, in the form that from_pretrained reads."""
    os.mkdir(output)
    metadata = MODEL_METADATA | contents.tied | MODEL_METADATA
    groups = [
        Group(path.removesuffix(".safetensors"), {name: contents.model[name] for name in names}, metadata)
        for path, names in _files(contents.model).items()
    ]
    plan, lazy = plan_of(groups, {})
    plan.create_files(output)
    write_all(plan, output, lazy, {}, progress)
    index = model_index(plan, [name for group in groups for name in group.tensors])
    if index:
        with durable_file(os.path.join(output, "model.safetensors.index.json")) as file:
            file.write(index)
    copy_beside(contents, output)


def _files(model: Mapping[str, Lazy]) -> dict[str, list[str]]:
    """Distribute tensors over files: as in a source of safetensors, else in order, up to MAX_FILE_BYTES each."""
    names_of: dict[str, list[str]] = {}
    if all(each.file.startswith("model") and each.file.endswith(".safetensors") for each in model.values()):
        for name, each in model.items():
            names_of.setdefault(each.file, []).append(name)
    else:
        number = filled = 0
        for name, each in model.items():
            if filled and filled + each.nbytes > MAX_FILE_BYTES:
                number, filled = number + 1, 0
            names_of.setdefault(str(number), []).append(name)
            filled += each.nbytes
    count = len(names_of)
    name = "model-{:05d}-of-{:05d}.safetensors" if count > 1 else "model.safetensors"
    return {name.format(number, count): names for number, names in enumerate(names_of.values(), 1)}


def write_torch_file(contents: Contents, output: str, progress: Progress) -> None:
    """Write one file of torch.save, through a mapped temporary file: torch.save needs all tensors at once."""
    body: dict[str, Any] = {"model": {**contents.model, **{n: contents.model[k] for n, k in contents.tied.items()}}}
    if contents.groups is not None:
        body["optimizer"] = by_position(contents)
    body = contents.with_extra({**body, "step": contents.step})
    shared: dict[int, torch.Tensor] = {}
    size = sum(each.nbytes + _ALIGNMENT for each in {id(e): e for e in leaves(body)}.values())
    with tempfile.TemporaryFile(dir=os.path.dirname(output)) as spool:
        spool.truncate(max(size, 1))
        try:
            memory = mmap.mmap(spool.fileno(), max(size, 1))
        except OSError:  # ENODEV: a file system without mappings; then the tensors are in memory at once
            memory = mmap.mmap(-1, max(size, 1))
        at = 0

        def spooled(each: Lazy) -> torch.Tensor:
            nonlocal at
            if id(each) not in shared:
                made = torch.empty(each.shape, dtype=each.dtype, device="cpu")
                if each.nbytes:
                    made = torch.frombuffer(memory, dtype=each.dtype, count=made.numel(), offset=at).view(each.shape)
                    made.copy_(each.read())
                shared[id(each)] = made
                at += -(-each.nbytes // _ALIGNMENT) * _ALIGNMENT
                progress(each.nbytes)
            return shared[id(each)]

        with durable_file(output) as file:
            torch.save(replaced(body, spooled), file)


def by_position(contents: Contents) -> dict[str, Any]:
    """Return the optimizer's state in the form of torch's state_dict(): keyed by position."""
    numbers = {name: n for n, name in enumerate(dict.fromkeys(n for g in contents.groups or () for n in g["params"]))}
    groups = [
        {**{k: v for k, v in g.items() if k != "params"}, "params": [numbers[n] for n in g["params"]]}
        for g in contents.groups or ()
    ]
    return {"state": {numbers[n]: dict(v) for n, v in contents.state.items() if n in numbers}, "param_groups": groups}
