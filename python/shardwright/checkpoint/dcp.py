"""StorageWriter and StorageReader: this format for torch.distributed.checkpoint's save, async_save and load.

torch plans which rank writes which box of a tensor, and sends the results to its coordinator. This file maps each box to ranges
of our files. Two ranks may write into one block: each reports a tally of its part (csrc/checkpoint/tally.h), and the
coordinator merges the tallies. Our code adds no exchange and needs no process group. The engine writes and commits.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import io
import itertools
import logging
import os
import secrets
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, Metadata, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, WriteItemType
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import StorageReader as TorchStorageReader
from torch.distributed.checkpoint.storage import StorageWriter as TorchStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from .._engine import CheckpointError, CheckpointFolder, CheckpointPlan
from ..formats import tree
from ..options.places import absolute_path
from ..torch_compat.dtensor import held_tensor, is_dtensor
from ..torch_compat.state_dicts import load_everything
from .device_staging import DeviceStaging
from .files import MAX_FILE_BYTES, check_step, why_not_there
from .folder.partial import make_folder, of_saves
from .folder.retention import discard
from .peers import os_error
from .slices import Sliced, box_ranges
from .state.content import Content, Group, model_group, optimizer_group
from .state.names import ModelTensors, check_savable, plain
from .state.stored import Stored, stored_tensors

_logger = logging.getLogger("shardwright")
_BLOCK_BYTES = 1 << 20
_THREADS_MAX = 256
_READERS = 2
#: arguments of FileSystemWriter that have no effect here: default and reason
_WITHOUT_EFFECT = {
    "single_file_per_rank": (True, "files hold whole tensors, of any rank"),
    "sync_files": (True, "a checkpoint is durable before it has its name"),
    "per_thread_copy_ahead": (10_000_000, "tensors on a GPU are copied one at a time"),
    "enable_consolidation": (False, "files hold whole tensors at every save"),
    "_extension_registry": (None, "no stream of this format is transformed"),
}
#: the place of a tensor: file, first byte in it, bytes of the file, first block of the file
Place = tuple[str, int, int, int]


def _storage_of(tensor: torch.Tensor) -> int:
    local = held_tensor(tensor) if is_dtensor(tensor) else tensor
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
    """A storage writer for dcp.save and dcp.async_save that writes a checkpoint of this format.

    Parameters
    ----------
    path : path-like
        The folder. The writer removes remains of killed saves to it.
    thread_count : int
        Threads that write this rank's tensors. Each may hold a copy of one.
    cache_staged_state_dict : bool
        As in torch's FileSystemWriter: async_save stages into the same memory each time.
    overwrite : bool
        Replace a checkpoint at `path`, as save(overwrite=True) does: only a folder that is empty or holds nothing but a
        checkpoint is replaced. torch wraps our CheckpointError in its CheckpointException.
    single_file_per_rank, sync_files, per_thread_copy_ahead, enable_consolidation, serialization_format
        Arguments of FileSystemWriter without effect: files are safetensors with whole tensors. A value other than the
        default is logged with the reason.
    _extensions : sequence
        Argument of FileSystemWriter. Must be empty.
    model : str or None
        The key of the model's tensors in the state dict; they become model.safetensors. None: all tensors are the model's.
    optimizer : str
        The key of the optimizer's state, in the form of get_optimizer_state_dict().
    step : int
        Completed steps, for the manifest.
    max_file_bytes : int
        As in save().
    type_check : bool
        As in torch's BlockingAsyncStager: this object stages for async_save.

    Attributes
    ----------
    save_id : str
        The nonce of the next save, or of the last one after it ended.

    Notes
    -----
    All other entries of the state dict go to state.json and state.safetensors, and `load` returns them as `extra`.
    Objects are stored as trees of plain values (docs/format.md), never pickled. Any other object raises CheckpointError.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[Any] | None = None,
        serialization_format: Any = None,
        *,
        enable_consolidation: bool = False,
        model: str | None = "model",
        optimizer: str = "optim",
        step: int = 0,
        max_file_bytes: int = MAX_FILE_BYTES,
        type_check: bool = False,
    ) -> None:
        step = check_step(step)
        if isinstance(thread_count, bool) or not isinstance(thread_count, int) or not 1 <= thread_count <= _THREADS_MAX:
            raise ValueError(
                f"StorageWriter: thread_count must be an integer in [1, {_THREADS_MAX}], got {thread_count!r}"
            )
        if _extensions:
            raise ValueError(
                f"StorageWriter: _extensions must be empty, got {[type(each).__name__ for each in _extensions]}: every reader of "
                "this format finds plain safetensors; FileSystemWriter transforms streams"
            )
        given: dict[str, Any] = {"single_file_per_rank": single_file_per_rank, "sync_files": sync_files}
        given |= {"per_thread_copy_ahead": per_thread_copy_ahead, "enable_consolidation": enable_consolidation}
        _log_without_effect("StorageWriter", given)
        BlockingAsyncStager.__init__(self, cache_staged_state_dict, type_check)
        self.checkpoint_id: str | os.PathLike[str] = path
        self.thread_count = thread_count
        self.overwrite = overwrite
        self.save_id = _new_id()
        self._is_saved = False
        self._keys = (model, optimizer)
        self._step = step
        self._max_file_bytes = max_file_bytes
        self._replaces = ""
        self._layout: _Layout | None = None

    @property
    def path(self) -> str | os.PathLike[str]:
        """The folder. FileSystemWriter has an attribute of this name."""
        return self.checkpoint_id

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of `state_dict`. Before torch 2.5, super() returns the caller's own CPU tensors."""
        if self.cache_staged_state_dict and self.state_dict_cache is None and not torch.cuda.is_available():
            # torch would pin the cache's memory, which needs a GPU
            self.state_dict_cache = BlockingAsyncStager(False, self.type_check).stage(state_dict)
        live: set[int] = set()
        _each_tensor(state_dict, lambda tensor: live.add(_storage_of(tensor)))
        with torch.no_grad():
            staged: dict[str, Any] = _each_tensor(
                super().stage(state_dict), lambda tensor: tensor.clone() if _storage_of(tensor) in live else tensor
            )
        return staged

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self.checkpoint_id = checkpoint_id
        self.save_id, self._is_saved = _new_id(), False

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._layout = None  # drops the layout and the partial folder of a save that failed on another rank
        if not kwargs.get("use_collectives", True):
            raise CheckpointError(
                "StorageWriter: use_collectives=False would make a checkpoint a rank: all ranks write one, which needs "
                "use_collectives=True"
            )
        if self._is_saved:
            self.save_id, self._is_saved = _new_id(), False
        self._replaces = CheckpointFolder.identity(self._folder()) if is_coordinator else ""
        taken = CheckpointFolder.find(self._folder()) if is_coordinator and not self.overwrite else None
        if taken is not None:  # torch's wording, which programs match
            raise CheckpointError(f"Checkpoint already exists and self.overwrite=False: '{taken}'")
        refusal = why_not_there(self._folder(), overwrite=True) if is_coordinator else ""
        if refusal:  # torch raises it on all ranks
            raise CheckpointError(refusal)

    def _folder(self) -> str:
        return absolute_path("path", self.checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return isinstance(checkpoint_id, (str, os.PathLike)) and "://" not in os.fspath(checkpoint_id)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create every file with its header on the coordinator; return plans with the file ranges of all boxes."""
        self._layout = _Layout(self._folder(), self.save_id, plans, self._keys, self._max_file_bytes)
        self._layout.create()
        return [dataclasses.replace(plan, storage_data=(self._layout.partial, self._layout.places)) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        objects = [item for item in plan.items if item.type == WriteItemType.BYTE_IO]
        boxes = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        paths = {os.path.join(plan.storage_data[0], plan.storage_data[1][item.index.fqn][0]) for item in boxes}
        try:
            results = [WriteResult(i.index, 0, _encoded(_object(planner, i), i.index.fqn)) for i in objects]
            write = functools.partial(_write_box, planner, *plan.storage_data)
            with concurrent.futures.ThreadPoolExecutor(self.thread_count) as pool:
                results += (pool.map if self.thread_count > 1 else map)(write, boxes)
            for path in sorted(paths):
                CheckpointPlan.sync(path)
        except BaseException:
            self._layout = None
            raise
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Merge the tallies, write the objects and commit, on the coordinator."""
        assert self._layout is not None
        self._layout.commit(results, self._step, self._replaces)
        self._layout, self._is_saved = None, True


class StorageReader(TorchStorageReader):
    """A storage reader for dcp.load. Reads checkpoints of this format from any writer, at any world size and sharding.

    Parameters
    ----------
    path : path-like
    _extension_registry : ExtensionRegistry, optional
        Argument of FileSystemReader without effect.
    model, optimizer : str or None
        As in StorageWriter: the keys of the state dict, for a folder that save() or a Checkpointer wrote.
    verify : bool
        Check every block that this rank will read before any tensor changes; torch then raises on every rank. False: check
        each block as it is read.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        _extension_registry: Any = None,
        *,
        model: str | None = "model",
        optimizer: str = "optim",
        verify: bool = True,
    ) -> None:
        _log_without_effect("StorageReader", {"_extension_registry": _extension_registry})
        self.checkpoint_id: str | os.PathLike[str] = path
        self.load_id = _new_id()
        self._keys = (model, optimizer)
        self._verify = verify
        self._folder: CheckpointFolder | None = None
        self._found = _Found({}, {}, {}, frozenset())

    @property
    def path(self) -> str | os.PathLike[str]:
        """The folder. FileSystemReader has an attribute of this name."""
        return self.checkpoint_id

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self.checkpoint_id = checkpoint_id
        self.load_id = _new_id()
        self._folder = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return CheckpointFolder.find(os.fspath(checkpoint_id)) is not None

    def read_metadata(self, *args: Any) -> Metadata:
        self._folder = None  # the checkpoint may have been replaced
        try:
            folder = self._open()
        except Exception as error:  # torch 2.11's says only "metadata is None"
            _logger.error("%s", error)
            raise
        found: dict[str, Any] = {name: torch_metadata.BytesStorageMetadata() for name in self._found.objects}
        for name, stored in self._found.tensors.items():
            shape, of_it = torch.Size(stored.torch_shape), torch_metadata.TensorProperties(dtype=stored.torch_dtype)
            chunk = torch_metadata.ChunkStorageMetadata(torch.Size([0] * len(shape)), shape)
            found[name] = torch_metadata.TensorStorageMetadata(of_it, shape, [chunk])
        meta = StorageMeta(checkpoint_id=self.checkpoint_id, save_id=folder.nonce, load_id=self.load_id)
        return Metadata(found, planner_data=self._found.paths, storage_meta=meta)

    def _open(self) -> CheckpointFolder:
        if self._folder is None:
            folder = CheckpointFolder(absolute_path("path", self.checkpoint_id))
            self._found, self._folder = _names(folder, self._keys), folder
        return self._folder

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        folder = self._open()
        if self._verify:
            items = (item for item in plan.items if item.type != LoadItemType.BYTE_IO)
            stored = ((self._found.tensors[item.storage_index.fqn], item) for item in items)
            blocks = {
                (each.path, block * _BLOCK_BYTES)
                for each, item in stored
                for begin, nbytes in _stored_ranges(each, item)
                for block in range(begin // _BLOCK_BYTES, (begin + nbytes - 1) // _BLOCK_BYTES + 1)
            }
            sizes = ((path, begin, folder.files[path] - begin) for path, begin in sorted(blocks))
            folder.load([(path, at, min(_BLOCK_BYTES, n), 0, 0) for path, at, n in sizes], _READERS, False, (0, 1))
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        folder = self._open()
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                value, data = tree.decode(self._found.objects[name], {}), io.BytesIO()
                torch.save(io.BytesIO(value) if name in self._found.streams else value, data)
                data.seek(0)
                planner.load_bytes(item, data)
                continue
            stored, target = self._found.tensors[name], planner.resolve_tensor(item).detach()
            of_stored_dtype = target
            if target.dtype != stored.torch_dtype:  # torch casts
                of_stored_dtype = torch.empty(target.shape, dtype=stored.torch_dtype, device="cpu")
            memory = plain(of_stored_dtype)
            at, reads = memory.data_ptr(), []
            for begin, nbytes in _stored_ranges(stored, item):
                reads.append((stored.path, begin, nbytes, at, 0))
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


class _Layout:
    """The files of a save that torch has planned, on the coordinator."""

    def __init__(
        self, folder: str, nonce: str, plans: Sequence[SavePlan], keys: tuple[str | None, str], max_file_bytes: int
    ) -> None:
        self.folder, self.nonce = folder, nonce
        self.partial = f"{folder}.{self.nonce}.partial"
        self._keys = keys
        self._paths: dict[str, Sequence[Any]] = {}
        shapes: dict[str, Sliced] = {}
        for plan in plans:
            self._paths |= plan.planner_data or {}
            boxes = ((item.index.fqn, item.tensor_data) for item in plan.items)
            shapes |= {n: Sliced(data.properties.dtype, tuple(data.size), ()) for n, data in boxes if data is not None}
        self._stored: dict[str, tuple[str, str]] = {}
        groups: dict[str, dict[str, Any]] = {"model": {}, "optimizer": {}, "state": {}}
        for name in (*filter(shapes.__contains__, self._paths), *(each for each in shapes if each not in self._paths)):
            group, stored_name = self._place(name)
            if stored_name in groups[group]:  # {"a.b": {"c": x}, "b": {"c.a": y}} of an optimizer: both are c.a.b
                group, stored_name = "state", name
            self._stored[name] = group, stored_name
            groups[group][stored_name] = shapes[name]
        self._groups = [
            model_group(ModelTensors(groups["model"]), max_file_bytes),
            *([optimizer_group(groups["optimizer"], max_file_bytes)] if groups["optimizer"] else []),
            Group("state", groups["state"], {"format": "pt"}),
        ]
        self._plan = self._make_plan({})
        sources = [(g.stem, n) for g in self._groups for n in g.tensors]
        files = self._plan.files()
        where = {sources[s]: (path, begin, n, block) for path, n, block, pieces in files for s, begin, _ in pieces}
        self.places: dict[str, Place] = {name: where[place] for name, place in self._stored.items()}

    def _make_plan(self, texts: Mapping[str, bytes]) -> CheckpointPlan:
        lines: Any = {path: (len(text), 0, text) for path, text in texts.items()}
        return CheckpointPlan(*Content(self._groups, DeviceStaging(), lines=lines).entries())

    def _place(self, name: str) -> tuple[str, str]:
        """Return (group, name in the file) of a tensor."""
        model, optimizer = self._keys
        path = self._paths.get(name, (name,))
        if tuple(path[:2]) == (optimizer, "state") and len(path) == 4:
            return "optimizer", f"{path[3]}.{path[2]}"
        if model is None or path[0] == model:
            return "model", name if model is None else name.removeprefix(f"{model}.")
        return "state", name

    def create(self) -> None:
        """Create the partial folder with all tensor files at full size, each with its header."""
        make_folder(os.path.dirname(self.folder))
        for path in of_saves(*os.path.split(self.folder)):
            discard(path)
        try:
            self._plan.create(self.partial)
        except CheckpointError as error:
            raise os_error(f"'{self.folder}' cannot be written: {error}", error.errno) from error
        weakref.finalize(self, _abandon, self._plan, os.getpid())

    def commit(self, results: Sequence[Sequence[WriteResult]], step: int, replaces: str) -> None:
        """Merge the tallies of all ranks, write their objects as texts and rename the partial folder."""
        written = [(each.index.fqn, each.storage_data) for each in itertools.chain(*results)]
        tallies = [tally for name, tally in written if name in self.places]
        encoded = [(name, *each) for name, each in written if name not in self.places]
        objects = {name: node for name, node, _ in encoded}
        streams = [name for name, _, is_stream in encoded if is_stream]
        texts = {"state.json": tree.dumps(self._state(objects, streams, step))}
        if any(group.stem == "optimizer" for group in self._groups):
            texts["optimizer.json"] = tree.dumps(self._optimizer(objects))
        plan = self._make_plan(texts)
        try:
            for path, _, first_block, _ in plan.files():
                if path in texts:
                    tallies = [*tallies, self._write_text(path, texts[path], first_block)]
            plan.commit(
                folder=self.folder, replaces=replaces, nonce=self.nonce, step=step, world_size=len(results), tallies=tallies,
                creator=self._plan,
            )  # fmt: skip
        except BaseException:
            self._plan.abandon()
            raise

    def _write_text(self, path: str, text: bytes, first_block: int) -> bytes:
        memory, path = torch.frombuffer(bytearray(text), dtype=torch.uint8), os.path.join(self.partial, path)
        with open(path, "xb") as file:
            file.truncate(len(text))
        return _write(path, (len(text), first_block), [(0, len(text))], memory)

    def _state(self, objects: Mapping[str, Any], streams: list[str], step: int) -> dict[str, Any]:
        paths = {name: self._paths.get(name, (name,)) for name in objects}
        extra = {name: node for name, node in objects.items() if paths[name][0] != self._keys[1]}
        extra |= {name: {"$tensor": name} for name, (group, _) in self._stored.items() if group == "state"}
        known = {
            "tensors": {name: list(place) for name, place in self._stored.items()},
            "objects": dict(objects),
            "paths": {name: list(path) for name, path in self._paths.items() if tuple(path) != (name,)},
            "streams": streams,
        }
        return {
            "step": step, "scheduler": None, "scaler": None, "user_state": None, "model_extra_state": {}, "extra": extra,
            "dcp": known,
        }  # fmt: skip

    def _optimizer(self, objects: Mapping[str, Any]) -> dict[str, Any]:
        """Build the tree of optimizer.json from the flat names of torch's optimizer state."""
        groups: dict[int, dict[str, Any]] = collections.defaultdict(dict)
        state: dict[str, dict[str, Any]] = collections.defaultdict(dict)
        for name, path in self._paths.items():
            if path[0] != self._keys[1] or len(path) != 4:
                continue
            _, kind, place, key = path
            node = {"$tensor": self._stored[name][1]} if name in self._stored else objects.get(name)
            if kind == "param_groups":
                groups[int(place)][str(key)] = node
            elif kind == "state":
                state[str(place)][str(key)] = node
        return {"groups": [groups[i] for i in sorted(groups)], "state": state}


def _abandon(plan: CheckpointPlan, pid: int) -> None:
    """Remove the partial folder of a save that torch gave up without notice. A committed save has none."""
    if os.getpid() == pid:
        plan.abandon()


def _write(path: str, of_file: Sequence[int], ranges: list[tuple[int, int]], memory: torch.Tensor) -> bytes:
    """Write `memory` to ranges of a file and return the tally for commit(). `of_file`: bytes and first block of the file."""
    nbytes, first_block = of_file
    return CheckpointPlan.write(path, nbytes, first_block, ranges, memory.data_ptr())


def _byte_ranges(
    shape: Sequence[int], dtype: torch.dtype, begin: int, offsets: Sequence[int], sizes: Sequence[int]
) -> list[tuple[int, int]]:
    """Return (first byte, bytes) of each run of a box of a tensor that begins at `begin`."""
    runs = box_ranges(shape, offsets, sizes)
    return [(begin + first * dtype.itemsize, numel * dtype.itemsize) for first, numel in runs]


def _stored_ranges(stored: Stored, item: ReadItem) -> list[tuple[int, int]]:
    return _byte_ranges(stored.torch_shape, stored.torch_dtype, stored.begin, item.storage_offsets, item.lengths)


def _log_without_effect(name: str, given: Mapping[str, Any]) -> None:
    for argument, value in given.items():
        default, reason = _WITHOUT_EFFECT[argument]
        if value != default:
            _logger.info("%s: %s=%r has no effect: %s", name, argument, value, reason)


def _new_id() -> str:
    return "d" + secrets.token_hex(12)


def _write_box(planner: SavePlanner, partial: str, places: Mapping[str, Place], item: WriteItem) -> WriteResult:
    tensor, data = planner.resolve_data(item), item.tensor_data
    assert isinstance(tensor, torch.Tensor) and data is not None
    check_savable(item.index.fqn, tensor)
    memory = plain(tensor)
    path, begin, *of_file = places[item.index.fqn]
    offsets, sizes = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
    ranges = _byte_ranges(tuple(data.size), data.properties.dtype, begin, offsets, sizes)
    return WriteResult(item.index, memory.nbytes, _write(os.path.join(partial, path), of_file, ranges, memory))


def _encoded(value: Any, name: str) -> tuple[Any, bool]:
    """Return (tree of an object, True if it is a stream). The tree of a stream holds its bytes."""
    tensors: dict[str, torch.Tensor] = {}
    is_stream = isinstance(value, io.BytesIO)
    node = tree.encode(value.getvalue() if is_stream else value, name, tensors)
    if tensors:
        raise CheckpointError(f"'{name}' holds tensors or arrays that torch did not plan separately")
    return node, is_stream


def _object(planner: SavePlanner, item: WriteItem) -> Any:
    if hasattr(planner, "lookup_object"):
        return planner.lookup_object(item.index)
    data = planner.resolve_data(item)
    assert not isinstance(data, torch.Tensor)
    return torch.load(data, weights_only=True)


class _Found(NamedTuple):
    """The content of a folder, keyed by torch's names."""

    tensors: dict[str, Stored]
    objects: dict[str, Any]
    #: torch's planner_data: the keys that lead to a value in the nested state dict
    paths: dict[str, tuple[Any, ...]]
    #: objects that were io.BytesIO
    streams: frozenset[str]


def _names(folder: CheckpointFolder, keys: tuple[str | None, str]) -> _Found:
    state = tree.loads(folder.read_bytes("state.json"))
    stored = {stem: stored_tensors(folder, stem) for stem in ("model", "optimizer", "state")}
    known = state.get("dcp")
    if known is not None:
        tensors = {n: stored[group][0][name] for n, (group, name) in known["tensors"].items()}
        paths = known.get("paths", {})
        paths = {name: tuple(paths.get(name, (name,))) for name in (*tensors, *known["objects"])}
        return _Found(tensors, known["objects"], paths, frozenset(known.get("streams", ())))
    model, optimizer = keys
    made = _Found({}, {}, {}, frozenset())

    def add(node: Any, *path: Any) -> None:
        name = ".".join(map(str, path))
        (made.tensors if isinstance(node, Stored) else made.objects)[name] = node
        made.paths[name] = path

    weights, tied = stored["model"]
    for name in (*weights, *(name for name, kept in tied.items() if kept in weights)):
        add(weights[tied.get(name, name)], *(() if model is None else (model,)), name)
    if isinstance(state["extra"], dict) and "$dict" not in state["extra"]:
        for name, node in state["extra"].items():
            tensor = node.get("$tensor") if isinstance(node, dict) else None
            if tensor is not None:
                add(stored["state"][0][tensor], name)
            elif not tree.tensor_names(node):
                add(node, name)
            else:
                _logger.warning("%s: '%s' is left out: its tensors lie inside a container", folder.path, name)
    if "optimizer.json" in folder.files:
        body, moments = tree.loads(folder.read_bytes("optimizer.json")), stored["optimizer"][0]
        entries = [((optimizer, "state", p, k), node) for p, each in body["state"].items() for k, node in each.items()]
        groups = enumerate(body["groups"])
        entries += [((optimizer, "param_groups", i, k), node) for i, group in groups for k, node in group.items()]
        for path, node in entries:
            tensor = node.get("$tensor") if isinstance(node, dict) else None
            add(node if tensor is None else moments[tensor], *path)
    return made


def dcp_to_torch_save(dcp_checkpoint_dir: str | os.PathLike[str], torch_save_path: str | os.PathLike[str]) -> None:
    """Convert a checkpoint of this format to one file of torch.save, as torch's function of this name does for its own.

    Not collective: one process reads all tensors.

    Raises
    ------
    CheckpointError
        The folder is no checkpoint of this format.
    """
    if (
        os.path.exists(os.path.join(dcp_checkpoint_dir, ".metadata"))
        and CheckpointFolder.find(os.fspath(dcp_checkpoint_dir)) is None
    ):
        raise CheckpointError(
            f"'{os.fspath(dcp_checkpoint_dir)}' is a folder of torch's FileSystemWriter: convert it with "
            "torch.distributed.checkpoint.format_utils.dcp_to_torch_save, or with `shardwright ckpt import`"
        )
    # one sentence, where torch gives a traceback
    CheckpointFolder(absolute_path("dcp_checkpoint_dir", dcp_checkpoint_dir))
    torch.save(load_everything(StorageReader(dcp_checkpoint_dir)), torch_save_path)


def torch_save_to_dcp(torch_save_path: str | os.PathLike[str], dcp_checkpoint_dir: str | os.PathLike[str]) -> None:
    """Convert a file of torch.save to a checkpoint of this format, as torch's function of this name does for its own.

    Not collective. The file is loaded with weights_only=True, which executes no code from it.

    Raises
    ------
    CheckpointError
        The file cannot be read so, or holds no dict.
    """
    path = os.fspath(torch_save_path)
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
    except FileNotFoundError:
        raise CheckpointError(f"'{path}' does not exist") from None
    except Exception as error:
        raise CheckpointError(
            f"'{path}' is no file of torch.save with tensors and plain values alone ({type(error).__name__}): `shardwright ckpt "
            "import` takes the model of such a file and names what it leaves out"
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"'{path}' holds a {type(state).__name__}, and a checkpoint needs a dict")
    torch.distributed.checkpoint.save(state, storage_writer=StorageWriter(dcp_checkpoint_dir), no_dist=True)
