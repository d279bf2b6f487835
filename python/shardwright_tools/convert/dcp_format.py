"""Folders of torch.distributed.checkpoint, which FSDP, FSDP2, torchtitan and Megatron (megatron.py) write.

torch's own reader and writer handle one tensor at a time; metadata is unpickled without executing code.
"""

from __future__ import annotations

import collections
import io
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from shardwright._engine import CheckpointError
from shardwright.formats.dcp import METADATA, parts_of, read_values, split_path
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem

from .contents import Contents, Lazy, replaced
from .folders import Progress


def read_dcp(path: str) -> Contents:
    """Return the contents of a folder that torch.distributed.checkpoint wrote."""
    folders = [path] if os.path.isfile(os.path.join(path, METADATA)) else list(parts_of(path).values())
    values: dict[tuple[Any, ...], Any] = {}
    left_out: list[str] = []
    for folder in folders:
        values |= read_values(folder, left_out)
    contents = _sorted(values)
    contents.take_step()
    contents.left_out += left_out
    return contents


def _sorted(values: Mapping[tuple[Any, ...], Any]) -> Contents:
    """Sort entries into model, optimizer and the rest, by the components of their paths."""
    apart = {path: split_path(path) for path in values}
    optimizer = {rest: values[p] for p, (kind, rest) in apart.items() if kind == "optimizer"}
    has_model = any(kind == "model" for kind, _ in apart.values())
    contents = Contents({})
    for path, (kind, rest) in apart.items():
        value = values[path]
        if kind == "model" or (kind == "other" and not has_model and isinstance(value, Lazy)):
            name = ".".join(map(str, rest))
            if isinstance(value, Lazy):
                if name in contents.model:
                    raise CheckpointError(f"the folder holds the tensor '{name}' of the model twice")
                contents.model[name] = value
            elif value is not None:
                contents.extra.setdefault("model_extra_state", {})[name] = value
        elif kind == "other":
            contents.extra[".".join(map(str, path))] = value
    if optimizer:
        _take_optimizer(contents, optimizer)
    return contents


def _take_optimizer(contents: Contents, entries: Mapping[tuple[Any, ...], Any]) -> None:
    """Read the optimizer's entries: nested, in the form of get_optimizer_state_dict(), or flattened to one key each."""
    groups: dict[int, dict[str, Any]] = collections.defaultdict(dict)
    flat_options: dict[str, dict[str, Any]] = collections.defaultdict(dict)
    unknown: dict[str, Any] = {}
    by_length = sorted(contents.model, key=len, reverse=True)
    for path, value in entries.items():
        flat = ".".join(map(str, path))
        if len(path) == 3 and path[0] == "param_groups" and str(path[1]).isdigit():
            groups[int(path[1])][str(path[2])] = value
        elif len(path) == 3 and path[0] == "state":
            contents.state.setdefault(str(path[1]), {})[str(path[2])] = value
        elif (named := _named(flat, by_length)) is not None:
            kind, name, key = named
            (contents.state.setdefault(name, {}) if kind == "state" else flat_options[name])[key] = value
        else:
            unknown[flat] = value
    ordered = [groups[number] for number in sorted(groups)]
    if not ordered:  # one group for each set of equal options
        sets: dict[str, dict[str, Any]] = {}
        for name, each in flat_options.items():
            sets.setdefault(repr(sorted(each.items())), {**each, "params": []})["params"].append(name)
        ordered = list(sets.values())
    if all("params" in group for group in ordered) and ordered:
        contents.groups = ordered
    else:
        contents.state = {}
        contents.left_out += ["the optimizer's state, of a form that names no parameters"]
    contents.extra |= {f"optimizer.{name}": value for name, value in unknown.items() if not isinstance(value, Lazy)}
    contents.left_out += [f"optimizer.{name}" for name, value in unknown.items() if isinstance(value, Lazy)]


def _named(flat: str, names: Sequence[str]) -> tuple[str, str, str] | None:
    """Return (kind, parameter, key) of a name such as state.layer.weight.exp_avg."""
    kind, _, rest = flat.partition(".")
    if kind not in ("state", "param_groups"):
        return None
    name, _, key = rest.rpartition(".")
    if name in names:
        return kind, name, key
    longest = next((n for n in names if rest.startswith(f"{n}.")), None)
    return None if longest is None else (kind, longest, rest[len(longest) + 1 :])


class _LazyPlanner(DefaultSavePlanner):
    """A planner that plans tensors without data and reads each one when it is written."""

    def __init__(self, lazy: Mapping[int, Lazy], progress: Progress) -> None:
        super().__init__()
        self._lazy, self._progress = lazy, progress

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        stand_in = self.state_dict.get(write_item.index.fqn)
        if id(stand_in) not in self._lazy:
            return super().resolve_data(write_item)
        each = self._lazy[id(stand_in)]
        self._progress(each.nbytes)
        return each.read()


def write_dcp(contents: Contents, output: str, progress: Progress) -> None:
    """Write a folder for dcp.load with "model", "optim" and "step"; other state has keys of its own."""
    lazy: dict[int, Lazy] = {}
    held = []

    def stand_in(each: Lazy) -> torch.Tensor:
        made = torch.empty(each.shape, dtype=each.dtype, device="meta")
        held.append(made)
        lazy[id(made)] = each
        return made

    state: dict[str, Any] = {"model": {**contents.model, **{n: contents.model[k] for n, k in contents.tied.items()}}}
    if contents.groups is not None:
        state["optim"] = {"state": contents.state, "param_groups": contents.groups}
    state = contents.with_extra({**state, "step": contents.step})
    writer = FileSystemWriter(output, sync_files=True)
    dcp.save(replaced(state, stand_in), storage_writer=writer, planner=_LazyPlanner(lazy, progress), no_dist=True)
