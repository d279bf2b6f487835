"""Folders of torch.distributed.checkpoint, which FSDP, FSDP2, torchtitan and Megatron (megatron.py) write.

torch's own reader and writer handle one tensor at a time; metadata is unpickled without executing code.
"""

from __future__ import annotations

import collections
import io
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from shardwright._engine import CheckpointError
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, WriteItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from .contents import Contents, Lazy, replaced
from .folders import Progress
from .unpickle import Placeholder, Unpickler, load_torch_file, without_placeholders

METADATA = ".metadata"
#: components of names under which programs store the model and the optimizer
_MODEL_KEYS, _OPTIMIZER_KEYS = ("model", "module", "state_dict"), ("optim", "optimizer")
#: names of the folders that accelerate writes for FSDP
_OF_ACCELERATE = re.compile(r"(pytorch_model_fsdp|optimizer)(_\d+)\Z")


class _MetadataUnpickler(Unpickler):
    known = (
        "torch.distributed.checkpoint.metadata",
        "torch.distributed.checkpoint.filesystem",
        "torch.distributed._shard.sharded_tensor.metadata",
    )


class _Reader(FileSystemReader):
    """torch's reader, which unpickles metadata without executing code."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        place = os.path.join(self.path, METADATA)
        try:
            with open(place, "rb") as file:
                found = _MetadataUnpickler(file).load()
            entries = found.state_dict_metadata if isinstance(found, Metadata) else None
        except OSError:
            raise
        except Exception as error:
            raise CheckpointError(f"'{place}' cannot be read: {error or type(error).__name__}") from None
        if not isinstance(entries, dict) or not isinstance(found.storage_data, dict):
            raise CheckpointError(f"'{place}' is not the metadata of torch.distributed.checkpoint's file system writer")
        for each in found.storage_data.values():
            path = getattr(each, "relative_path", None)
            if not isinstance(path, str) or os.path.isabs(path) or ".." in path.split("/"):
                raise CheckpointError(f"'{place}' names the data file {path!r}, which is not in its folder")
        return found


class _Planner(DefaultLoadPlanner):
    """A planner that reads one entry, or one row of its first dimension. It unpickles objects without executing code."""

    def __init__(self, row: int | None = None) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._row = row

    def create_local_plan(self) -> LoadPlan:
        ((name, target),) = self.state_dict.items()
        plan = super().create_local_plan() if self._row is None else LoadPlan([])
        entry = self.metadata.state_dict_metadata[name] if self.metadata else None
        if self._row is not None and isinstance(entry, TensorStorageMetadata):
            offsets = torch.Size([self._row, *[0] * (target.dim() - 1)])
            box = ChunkStorageMetadata(offsets, target.size())
            plan = LoadPlan(create_read_items_for_chunk_list(name, entry, [box]))
        if isinstance(target, torch.Tensor):
            held = sum(math.prod(item.lengths) for item in plan.items)
            if held < target.numel():  # the rest would be what the memory held before
                raise CheckpointError(f"the folder holds {held} of the {target.numel()} elements of '{name}'")
        return plan

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self.state_dict[index.fqn]  # torch's own looks for a shard of this offset

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = load_torch_file(value)


def _read(reader: FileSystemReader, metadata: Metadata, name: str, target: Any, row: int | None = None) -> Any:
    planner = _Planner(row)
    state = {name: target}
    planner.set_up_planner(state, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    reader.read_data(planner.create_local_plan(), planner).wait()
    return state[name]


def is_dcp(path: str) -> bool:
    """Return whether `path` is a folder of this format, or an FSDP folder of accelerate that contains such folders."""
    return os.path.isfile(os.path.join(path, METADATA)) or bool(_parts(path))


def _parts(path: str) -> dict[str, str]:
    """Map "model" and "optimizer" to the folders that accelerate wrote for FSDP."""
    found: dict[str, str] = {}
    for name in sorted(os.listdir(path)) if os.path.isdir(path) else ():
        match = _OF_ACCELERATE.match(name)
        if match and os.path.isfile(os.path.join(path, name, METADATA)):
            found.setdefault("optimizer" if match[1] == "optimizer" else "model", os.path.join(path, name))
    return found


def read_dcp(path: str) -> Contents:
    """Return the contents of a folder that torch.distributed.checkpoint wrote."""
    folders = [path] if os.path.isfile(os.path.join(path, METADATA)) else list(_parts(path).values())
    values: dict[tuple[Any, ...], Any] = {}
    left_out: list[str] = []
    for folder in folders:
        values |= read_values(folder, left_out)
    contents = _sorted(values)
    contents.take_step()
    contents.left_out += left_out
    return contents


def read_values(folder: str, left_out: list[str]) -> dict[tuple[Any, ...], Any]:
    """Map the path of each entry in the state dict to a Lazy or a value."""
    reader = _Reader(folder)
    metadata = reader.read_metadata()
    paths = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    found: dict[tuple[Any, ...], Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        path = tuple(paths.get(name, (name,)))
        if isinstance(entry, TensorStorageMetadata):
            read = Stored(reader, metadata, name, entry)
            found[path] = Lazy(entry.properties.dtype, tuple(entry.size), read)
            continue
        try:
            value = without_placeholders(_read(reader, metadata, name, None), name, left_out)
        except CheckpointError as error:
            left_out.append(f"{name} ({error})")
            continue
        if not isinstance(value, Placeholder):
            found[path] = value
    return found


class Stored:
    """A function that reads a tensor of a folder, or one row of its first dimension without the rows beside it."""

    def __init__(self, reader: FileSystemReader, metadata: Metadata, name: str, entry: TensorStorageMetadata) -> None:
        self._place, self._size, self._dtype = (reader, metadata, name), entry.size, entry.properties.dtype

    def __call__(self) -> torch.Tensor:
        return _read(*self._place, torch.empty(self._size, dtype=self._dtype, device="cpu"))

    def row(self, number: int) -> torch.Tensor:
        target = torch.empty((1, *self._size[1:]), dtype=self._dtype, device="cpu")
        return _read(*self._place, target, number)[0]


def _sorted(values: Mapping[tuple[Any, ...], Any]) -> Contents:
    """Sort entries into model, optimizer and the rest, by the components of their paths."""
    apart = {path: _split(path) for path in values}
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


def _split(path: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
    """Return ("model" | "optimizer" | "other", rest of the path)."""
    parts: list[Any] = list(path)
    if len(parts) == 1 and isinstance(parts[0], str) and "." in parts[0]:  # written without torch's planner
        first, _, rest = parts[0].partition(".")
        parts = [first, rest] if first in (*_MODEL_KEYS, *_OPTIMIZER_KEYS) else parts
    # {"model": ...}, or {"app": {"model": ...}} of an object with state_dict()
    for number, part in enumerate(parts[: min(2, len(parts) - 1)], 1):
        if part in (*_MODEL_KEYS, *_OPTIMIZER_KEYS):
            return "model" if part in _MODEL_KEYS else "optimizer", tuple(parts[number:])
    return "other", path


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
