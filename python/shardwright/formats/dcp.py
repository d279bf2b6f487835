"""Readers of folders of torch.distributed.checkpoint. torch's own reader handles one tensor at a time; metadata is
unpickled without executing code.
"""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from .._engine import CheckpointError
from .lazy import Lazy
from .unpickle import Placeholder, Unpickler, load_torch_file, without_placeholders

METADATA = ".metadata"
#: the end of torch's name for what get_extra_state() returns
EXTRA = "_extra_state"
#: components of names under which programs store the model and the optimizer
_MODEL_KEYS, _OPTIMIZER_KEYS = ("model", "module", "state_dict"), ("optim", "optimizer")
#: names of the folders that accelerate writes for FSDP
OF_ACCELERATE = re.compile(r"(pytorch_model_fsdp|optimizer)(_\d+)\Z")


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
    return os.path.isfile(os.path.join(path, METADATA)) or bool(parts_of(path))


def parts_of(path: str) -> dict[str, str]:
    """Map "model" and "optimizer" to the folders that accelerate wrote for FSDP."""
    found: dict[str, str] = {}
    for name in sorted(os.listdir(path)) if os.path.isdir(path) else ():
        match = OF_ACCELERATE.match(name)
        if match and os.path.isfile(os.path.join(path, name, METADATA)):
            found.setdefault("optimizer" if match[1] == "optimizer" else "model", os.path.join(path, name))
    return found


def model_of(path: str) -> dict[str, Any]:
    """Return the tensors and extra state of the model in a folder: those under a key that programs use, else all but an optimizer's."""
    folder = path if os.path.isfile(os.path.join(path, METADATA)) else parts_of(path).get("model", path)
    values: dict[tuple[Any, ...], Any] = {}
    for at, value in read_values(folder, []).items():
        end = next((n for n, part in enumerate(at, 1) if str(part).endswith(EXTRA)), None)
        if end is None or end == len(at):  # torch's planner flattens a dict that get_extra_state() returned
            values |= {at: value} if isinstance(value, Lazy) or end else {}
            continue
        inner = values.setdefault(at[:end], {})
        for part in at[end:-1]:
            inner = inner.setdefault(part, {})
        inner[at[-1]] = value.read() if isinstance(value, Lazy) else value
    apart = [(*split_path(at), value) for at, value in values.items()]
    kind = "model" if any(each == "model" for each, _, _ in apart) else "other"
    return {".".join(map(str, rest)): value for each, rest, value in apart if each == kind}


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


def split_path(path: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
    """Return ("model" | "optimizer" | "other", rest of the path)."""
    parts: list[Any] = list(path)
    if len(parts) == 1 and isinstance(parts[0], str) and "." in parts[0]:  # written without torch's planner
        first, _, rest = parts[0].partition(".")
        parts = [first, rest] if first in (*_MODEL_KEYS, *_OPTIMIZER_KEYS) else parts
    # {"model": ...}, or {"app": {"model": ...}} of an object with state_dict()
    for place, part in enumerate(parts[:2]):
        if part in _OPTIMIZER_KEYS and len(parts) > place + 1:
            return "optimizer", tuple(parts[place + 1 :])
        if part in _MODEL_KEYS and len(parts) > place + 1:
            return "model", tuple(parts[place + 1 :])
    return "other", path
