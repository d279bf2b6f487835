"""StorageWriter and StorageReader: this format for torch.distributed.checkpoint's save, async_save and load.

torch plans which rank writes which box of a tensor, and sends the results to its coordinator. This file maps each box to ranges
of our files. Two ranks may write into one block: each reports a tally of its part (csrc/checkpoint/tally.h), and the
coordinator joins them. The ranks need no exchange and no process group. The engine writes and commits.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import io
import os
import secrets
import shutil
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import StorageReader as TorchStorageReader
from torch.distributed.checkpoint.storage import StorageWriter as TorchStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from .._engine import CheckpointError, CheckpointFolder, CheckpointPlan
from . import tree
from .content import IN_PARTS, Group
from .files import MAX_FILE_BYTES, absolute_path, check_step, in_words, why_not_there
from .names import check_savable, plain
from .partial import PartialLock, of_saves
from .peers import os_error
from .retention import find, remove
from .slices import Sliced, box_ranges
from .stored import Stored, stored_tensors

_BLOCK_BYTES = 1 << 20
_READERS = 2
#: the place of a tensor: file, first byte in it, bytes of the file, first block of the file
Place = tuple[str, int, int, int]


def _storage_of(tensor: torch.Tensor) -> int:
    local = getattr(tensor, "_local_tensor", tensor)
    return int(local.untyped_storage().data_ptr())


def _each_tensor(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Return `value` with function(tensor) in place of each tensor, inside dicts, lists and tuples."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _each_tensor(item, function) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_each_tensor(item, function) for item in value)
    return value


class StorageWriter(TorchStorageWriter, BlockingAsyncStager):
    """A storage writer for dcp.save and dcp.async_save that makes a checkpoint of this format.

    Parameters
    ----------
    path : path-like
        The folder. The writer removes left-overs of killed saves to it.
    model : str or None
        The key of the model's tensors in the state dict; they become model.safetensors. None: all tensors are the model's.
    optimizer : str
        The key of the optimizer's state, in the form of get_optimizer_state_dict().
    step : int
        Completed steps, for the manifest.
    max_file_bytes : int
        As in save().
    overwrite : bool
        As in save(). Where save() refuses, torch raises its CheckpointException around our CheckpointError.
    cache_staged_state_dict, type_check : bool
        As in torch's BlockingAsyncStager: this object stages for async_save.

    Notes
    -----
    All other entries of the state dict go to state.json and state.safetensors, and `load` returns them as `extra`.
    Objects are stored as trees of plain values (docs/format.md), never pickled. Any other object raises CheckpointError.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        model: str | None = "model",
        optimizer: str = "optim",
        step: int = 0,
        max_file_bytes: int = MAX_FILE_BYTES,
        overwrite: bool = True,
        cache_staged_state_dict: bool = False,
        type_check: bool = False,
    ) -> None:
        step = check_step(step)
        BlockingAsyncStager.__init__(self, cache_staged_state_dict, type_check)
        self.checkpoint_id: str | os.PathLike[str] = path
        self._keys = (model, optimizer)
        self._step = step
        self._max_file_bytes = max_file_bytes
        self._overwrite = overwrite
        self._replaces = ""
        self._layout: _Layout | None = None

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of `state_dict`. Before torch 2.5, super() returns the caller's own CPU tensors."""
        live: set[int] = set()
        _each_tensor(state_dict, lambda tensor: live.add(_storage_of(tensor)))
        with torch.no_grad():
            staged: dict[str, Any] = _each_tensor(
                super().stage(state_dict), lambda tensor: tensor.clone() if _storage_of(tensor) in live else tensor
            )
        return staged

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.checkpoint_id = checkpoint_id

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._layout = None  # drops the layout and the folder of a save that failed on another rank
        self._replaces = CheckpointFolder.identity(self._folder()) if is_coordinator else ""
        refusal = why_not_there(self._folder(), self._overwrite) if is_coordinator else ""
        if refusal:  # torch raises it on all ranks
            raise CheckpointError(refusal)

    def _folder(self) -> str:
        return absolute_path("path", self.checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return isinstance(checkpoint_id, (str, os.PathLike))

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Allocate every file with its header on the coordinator; return plans with the places of all boxes."""
        self._layout = _Layout(self._folder(), plans, self._keys, self._max_file_bytes)
        self._layout.create()
        weakref.finalize(self._layout, _remove, self._layout.partial, self._layout.lock, os.getpid())
        return [dataclasses.replace(plan, storage_data=(self._layout.partial, self._layout.places)) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        partial, places = plan.storage_data
        results: list[WriteResult] = []
        written: set[str] = set()
        tensors: dict[str, torch.Tensor]
        try:
            for item in plan.items:
                if item.type == WriteItemType.BYTE_IO:
                    node = tree.encode(_object(planner, item), item.index.fqn, tensors := {})
                    if tensors:
                        raise CheckpointError(
                            f"'{item.index.fqn}' holds tensors or arrays that torch did not plan separately"
                        )
                    results.append(WriteResult(item.index, 0, node))
                    continue
                tensor, data = planner.resolve_data(item), item.tensor_data
                assert isinstance(tensor, torch.Tensor) and data is not None
                check_savable(item.index.fqn, tensor)
                memory = plain(tensor)
                path, begin, *of_file = places[item.index.fqn]
                path = os.path.join(partial, path)
                ranges = _ranges(
                    tuple(data.size), tuple(data.chunk.offsets), tuple(data.chunk.sizes), data.properties.dtype
                )
                ranges = [(begin + first, nbytes) for first, nbytes in ranges]
                results.append(WriteResult(item.index, memory.nbytes, _write(path, of_file, ranges, memory)))
                written.add(path)
                del memory, tensor  # frees a possible copy before the next one
            for path in sorted(written):
                CheckpointPlan.sync(path)
        except BaseException:
            self._layout = None
            raise
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Join the tallies, write the objects and commit, on the coordinator."""
        assert self._layout is not None
        tallies: list[bytes] = []
        objects: dict[str, Any] = {}
        for each in (result for of_rank in results for result in of_rank):
            if each.index.fqn in self._layout.places:
                tallies.append(each.storage_data)
            else:
                objects[each.index.fqn] = each.storage_data
        self._layout.commit(tallies, objects, self._step, len(results), self._replaces)
        self._layout = None


class StorageReader(TorchStorageReader):
    """A storage reader for dcp.load: reads checkpoints of this format, of any writer, at any world size and sharding.

    Parameters
    ----------
    path : path-like
    model, optimizer : str or None
        As in StorageWriter: the keys of the state dict, for a folder that save() or a Checkpointer wrote.
    verify : bool
        Check every block that this rank will read before any tensor changes; torch then raises on every rank. False: check
        each block as it is read.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        model: str | None = "model",
        optimizer: str = "optim",
        verify: bool = True,
    ) -> None:
        self.checkpoint_id: str | os.PathLike[str] = path
        self._keys = (model, optimizer)
        self._verify = verify
        self._folder: CheckpointFolder | None = None
        self._tensors: dict[str, Stored] = {}
        self._objects: dict[str, Any] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.checkpoint_id = checkpoint_id
        self._folder = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return find(os.fspath(checkpoint_id)) is not None

    def read_metadata(self, *args: Any) -> Metadata:
        self._open()
        found: dict[str, Any] = {name: BytesStorageMetadata() for name in self._objects}
        for name, stored in self._tensors.items():
            shape = torch.Size(stored.shape if stored.complex_dtype is None else stored.shape[:-1])
            chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
            found[name] = TensorStorageMetadata(TensorProperties(dtype=stored.torch_dtype), shape, [chunk])
        return Metadata(found)

    def _open(self) -> CheckpointFolder:
        if self._folder is None:
            self._folder = CheckpointFolder(absolute_path("path", self.checkpoint_id))
            self._tensors, self._objects = _names(self._folder, self._keys)
        return self._folder

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        folder = self._open()
        if self._verify:
            blocks = {
                (path, block * _BLOCK_BYTES)
                for path, ranges in self._reads(plan).items()
                for begin, nbytes in ranges
                for block in range(begin // _BLOCK_BYTES, (begin + nbytes - 1) // _BLOCK_BYTES + 1)
            }
            checks = [
                (path, begin, min(_BLOCK_BYTES, folder.files[path] - begin), 0, 0) for path, begin in sorted(blocks)
            ]
            folder.load(checks, _READERS, False, (0, 1))
        return plan

    def _reads(self, plan: LoadPlan) -> dict[str, list[tuple[int, int]]]:
        found: dict[str, list[tuple[int, int]]] = collections.defaultdict(list)
        for item in plan.items:
            if item.type != LoadItemType.BYTE_IO:
                stored = self._tensors[item.storage_index.fqn]
                ranges = _stored_ranges(stored, item.storage_offsets, item.lengths)
                found[stored.path] += [(stored.begin + begin, nbytes) for begin, nbytes in ranges]
        return found

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        folder = self._open()
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                data = io.BytesIO()
                torch.save(tree.decode(self._objects[name], {}), data)
                data.seek(0)
                planner.load_bytes(item, data)
                continue
            stored, target = self._tensors[name], planner.resolve_tensor(item).detach()
            of_stored_dtype = target
            if target.dtype != stored.torch_dtype:  # torch casts
                of_stored_dtype = torch.empty(target.shape, dtype=stored.torch_dtype, device="cpu")
            memory = plain(of_stored_dtype)
            at, reads = memory.data_ptr(), []
            for begin, nbytes in _stored_ranges(stored, item.storage_offsets, item.lengths):
                reads.append((stored.path, stored.begin + begin, nbytes, at, 0))
                at += nbytes
            if at != memory.data_ptr() + memory.nbytes:
                raise CheckpointError(
                    f"'{name}': the plan reads {at - memory.data_ptr()} bytes into a tensor of {memory.nbytes}"
                )
            folder.load(reads)
            if memory.data_ptr() != target.data_ptr() or target.is_conj() or target.is_neg():
                target.copy_(torch.view_as_complex(memory) if of_stored_dtype.is_complex() else memory)
            planner.commit_tensor(item, target)
            del memory, of_stored_dtype, target
        future: Future[None] = Future()
        future.set_result(None)
        return future


# layout ---------------------------------------------------------------------------------------------------------------


class _Layout:
    """The files of a save that torch has planned, on the coordinator."""

    def __init__(
        self, folder: str, plans: Sequence[SavePlan], keys: tuple[str | None, str], max_file_bytes: int
    ) -> None:
        self.folder, self.nonce = folder, "d" + secrets.token_hex(12)
        self.partial = f"{folder}.{self.nonce}.partial"
        self.lock: PartialLock | None = None
        self._keys = keys
        self._paths: dict[str, Sequence[Any]] = {}
        for plan in plans:
            self._paths |= plan.planner_data or {}
        shapes = {
            item.index.fqn: Sliced(data.properties.dtype, tuple(data.size), ())
            for plan in plans
            for item in plan.items
            if (data := item.tensor_data) is not None
        }
        order = {name: place for place, name in enumerate(self._paths)}
        self._stored: dict[str, tuple[str, str]] = {}
        groups: dict[str, dict[str, Any]] = {"model": {}, "optimizer": {}, "state": {}}
        for name in sorted(shapes, key=lambda each: order.get(each, len(order))):
            group, stored_name = self._stored[name] = self._place(name)
            groups[group][stored_name] = shapes[name]
        self._groups = [
            Group("model", groups["model"], {"format": "pt"}, max_file_bytes=max_file_bytes),
            Group("optimizer", groups["optimizer"], {"format": "pt"}, numbered=True, max_file_bytes=max_file_bytes),
            Group("state", groups["state"], {"format": "pt"}),
        ]
        self._groups = [group for group in self._groups if group.tensors or group.stem != "optimizer"]
        self._plan = self._make_plan({})
        sources = [(g.stem, n) for g in self._groups for n in g.tensors]
        where: dict[tuple[str, str], Place] = {}
        for path, nbytes, first_block, pieces in self._plan.files():
            where |= {sources[source]: (path, begin, nbytes, first_block) for source, begin, _ in pieces}
        self.places = {name: where[place] for name, place in self._stored.items()}

    def _make_plan(self, texts: Mapping[str, bytes]) -> CheckpointPlan:
        return CheckpointPlan([g.plan_entry() for g in self._groups], [(p, len(t), IN_PARTS) for p, t in texts.items()])

    def _place(self, name: str) -> tuple[str, str]:
        """Return (group, name in the file) of a tensor."""
        model, optimizer = self._keys
        path = list(self._paths.get(name, (name,)))
        if path[:2] == [optimizer, "state"] and len(path) == 4:
            return "optimizer", f"{path[3]}.{path[2]}"
        if model is None or path[0] == model:
            return "model", name if model is None else name.removeprefix(f"{model}.")
        return "state", name

    def create(self) -> None:
        """Create the partial folder with every file of tensors, at full size and with its header."""
        CheckpointFolder.make(os.path.dirname(self.folder))
        for path in of_saves(*os.path.split(self.folder)):
            with contextlib.suppress(OSError):
                remove(path)
        os.mkdir(self.partial)
        try:
            self.lock = PartialLock(self.partial)
            self._plan.create_files(self.partial)
        except (OSError, CheckpointError) as error:
            _remove(self.partial, self.lock, os.getpid())
            raise os_error(f"'{self.folder}' cannot be written: {in_words(error)}", error.errno) from error

    def commit(
        self, tallies: list[bytes], objects: Mapping[str, Any], step: int, world_size: int, replaces: str
    ) -> None:
        """Write the texts and rename the partial folder. `tallies`: the ranks' reports of the bytes they wrote."""
        texts = {"state.json": tree.dumps(self._state(objects, step))}
        if any(group.stem == "optimizer" for group in self._groups):
            texts["optimizer.json"] = tree.dumps(self._optimizer(objects))
        plan = self._make_plan(texts)
        try:
            for path, _, first_block, _ in plan.files():
                if path in texts:
                    tallies = [*tallies, self._write_text(path, texts[path], first_block)]
            plan.commit(
                partial=self.partial, folder=self.folder, replaces=replaces, nonce=self.nonce, step=step,
                world_size=world_size, tallies=tallies,
            )  # fmt: skip
            if self.lock is not None:
                self.lock.release(self.folder)
        except BaseException:
            shutil.rmtree(self.partial, ignore_errors=True)
            raise

    def _write_text(self, path: str, text: bytes, first_block: int) -> bytes:
        memory, path = torch.frombuffer(bytearray(text), dtype=torch.uint8), os.path.join(self.partial, path)
        with open(path, "xb") as file:
            file.truncate(len(text))
        return _write(path, (len(text), first_block), [(0, len(text))], memory)

    def _state(self, objects: Mapping[str, Any], step: int) -> dict[str, Any]:
        extra = {name: node for name, node in objects.items() if self._path(name)[0] != self._keys[1]}
        extra |= {name: {"$tensor": name} for name, (group, _) in self._stored.items() if group == "state"}
        return {
            "step": step, "scheduler": None, "scaler": None, "user_state": None, "model_extra_state": {}, "extra": extra,
            "dcp": {"tensors": {name: list(place) for name, place in self._stored.items()}, "objects": dict(objects)},
        }  # fmt: skip

    def _path(self, name: str) -> Sequence[Any]:
        return self._paths.get(name, (name,))

    def _optimizer(self, objects: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tree of optimizer.json, from the flat names of torch's optimizer state."""
        groups: dict[int, dict[str, Any]] = collections.defaultdict(dict)
        state: dict[str, dict[str, Any]] = collections.defaultdict(dict)
        for name in self._paths:
            path = list(self._path(name))
            if path[0] != self._keys[1] or len(path) != 4:
                continue
            _, kind, place, key = path
            node = {"$tensor": self._stored[name][1]} if name in self._stored else objects.get(name)
            if kind == "param_groups":
                groups[int(place)][str(key)] = node
            elif kind == "state":
                state[str(place)][str(key)] = node
        return {"groups": [groups[i] for i in sorted(groups)], "state": state}


def _remove(partial: str, lock: PartialLock | None, pid: int) -> None:
    """Remove the partial folder of an unfinished save, which torch does not report. A committed save has none."""
    if os.getpid() == pid:
        if lock is not None:
            lock.release()
        shutil.rmtree(partial, ignore_errors=True)


def _write(path: str, of_file: Sequence[int], ranges: list[tuple[int, int]], memory: torch.Tensor) -> bytes:
    """Write `memory` to ranges of a file and return the tally for commit(). `of_file`: bytes and first block of the file."""
    nbytes, first_block = of_file
    return CheckpointPlan.write(path, nbytes, first_block, ranges, memory.data_ptr())


def _ranges(
    shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], dtype: torch.dtype
) -> list[tuple[int, int]]:
    """Return (first byte, bytes) of each run of a box."""
    return [(first * dtype.itemsize, numel * dtype.itemsize) for first, numel in box_ranges(shape, offsets, sizes)]


def _stored_ranges(stored: Stored, offsets: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, int]]:
    shape = stored.shape if stored.complex_dtype is None else stored.shape[:-1]
    return _ranges(shape, offsets, sizes, stored.torch_dtype)


def _object(planner: SavePlanner, item: Any) -> Any:
    if hasattr(planner, "lookup_object"):
        return planner.lookup_object(item.index)
    data = planner.resolve_data(item)
    assert not isinstance(data, torch.Tensor)
    return torch.load(data, weights_only=True)


def _names(folder: CheckpointFolder, keys: tuple[str | None, str]) -> tuple[dict[str, Stored], dict[str, Any]]:
    """Return the tensors and objects of a folder by torch's names."""
    state = tree.loads(folder.read_bytes("state.json"))
    stored = {stem: stored_tensors(folder, stem) for stem in ("model", "optimizer", "state")}
    known = state.get("dcp")
    if known is not None:
        return {n: stored[group][0][name] for n, (group, name) in known["tensors"].items()}, known["objects"]
    prefix = "" if keys[0] is None else f"{keys[0]}."
    tensors, tied = stored["model"]
    found = {prefix + name: each for name, each in tensors.items()}
    found |= {prefix + name: tensors[kept] for name, kept in tied.items() if kept in tensors}
    objects = dict(state["extra"]) if isinstance(state["extra"], dict) and "$dict" not in state["extra"] else {}
    objects = {name: node for name, node in objects.items() if not tree.tensor_names(node)}
    if "optimizer.json" in folder.files:
        body = tree.loads(folder.read_bytes("optimizer.json"))
        entries = {
            **{f"state.{p}.{k}": node for p, values in body["state"].items() for k, node in values.items()},
            **{f"param_groups.{i}.{k}": node for i, group in enumerate(body["groups"]) for k, node in group.items()},
        }
        for name, node in entries.items():
            tensor = node.get("$tensor") if isinstance(node, dict) else None
            if tensor is None:
                objects[f"{keys[1]}.{name}"] = node
            else:
                found[f"{keys[1]}.{name}"] = stored["optimizer"][0][tensor]
    return found, objects
