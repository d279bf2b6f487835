"""The tensors and texts that make a checkpoint. Nothing here touches the disk.

Every rank knows the shared content: model, optimizer, and one line and rows for each rank's own state. Rank 0 adds its own.
"""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import functools
import hashlib
import json
import random
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from ..._engine import CheckpointError
from ...formats import tree
from ...optim.moments import portable
from ...torch_compat.dtensor import is_dtensor
from ..device_staging import DeviceStaging
from ..joined import averaging, sharded_of
from ..slices import Boxes, Sliced, check_placements, slice_of_dtensor
from .composed import apart
from .names import ModelTensors, check_savable, dtype_name, stored_shape
from .optimizer_extras import further_state

#: (source, begin, nbytes, address, eager, on_device)
Source = tuple[int, int, int, int, bool, bool]
#: holders of a source: all with equal values, all but rank 0 writes, or each a part (csrc/checkpoint/plan.h)
BY_ALL, BY_FIRST, IN_PARTS = 0, 1, 2
#: arguments of CheckpointPlan: groups of tensors, and texts
Entries = tuple[list[tuple[str, bool, int, str, list[tuple[str, str, list[int], int]]]], list[tuple[str, int, int]]]
MODEL_METADATA = {"format": "pt"}
_PACKED = struct.Struct("=6Q")
_MT19937_BYTES = 4 * (624 + 1)  # its numbers and its position


@dataclasses.dataclass
class Group:
    """Tensors, or Sliced, that become one series of safetensors files, in order."""

    stem: str
    tensors: dict[str, Any]
    metadata: dict[str, str]
    numbered: bool = False
    max_file_bytes: int = 0
    #: names that every form of snapshot copies at once, because code outside the optimizer writes to them
    eager: frozenset[str] = frozenset()
    #: names of tensors that may differ between ranks: the file holds rank 0's
    first: frozenset[str] = frozenset()

    def plan_entry(self) -> tuple[str, bool, int, str, list[tuple[str, str, list[int], int]]]:
        dtypes = {f"complex.{n}": t.dtype for n, t in self.tensors.items() if t.is_complex()}
        complex_ones = {key: str(dtype).removeprefix("torch.") for key, dtype in dtypes.items()}
        metadata = tree.dumps(self.metadata | complex_ones).decode().strip()
        entries = []
        for name, tensor in self.tensors.items():
            holder = IN_PARTS if isinstance(tensor, Sliced) else BY_FIRST if name in self.first else BY_ALL
            if holder != IN_PARTS:
                check_savable(name, tensor)
            entries.append((name, dtype_name(name, tensor.dtype), stored_shape(tensor), holder))
        return (self.stem, self.numbered, self.max_file_bytes, metadata, entries)


class Ahead(Protocol):
    """The first groups of a content, and their sources, which have the first `count` numbers."""

    groups: list[Group]
    sources: list[Source]
    count: int


@dataclasses.dataclass
class Content:
    """Groups and texts of one save."""

    groups: list[Group]
    staging: DeviceStaging
    #: files that every rank holds whole
    texts: dict[str, bytes] = dataclasses.field(default_factory=dict)
    #: files in parts: bytes of the file, first byte of this rank's part, the part; a bytearray is read in place
    lines: dict[str, tuple[int, int, bytes | bytearray]] = dataclasses.field(default_factory=dict)
    #: the memory that sources point into, until the snapshot is taken
    held: list[Any] = dataclasses.field(default_factory=list)
    #: the groups before `groups`, with sources that are already known
    ahead: Ahead | None = None

    def entries(self) -> Entries:
        """Return the arguments of the plan: equal entries give equal plans."""
        texts = [(path, len(text), BY_ALL) for path, text in self.texts.items()]
        texts += [(path, nbytes, IN_PARTS) for path, (nbytes, _, _) in self.lines.items()]
        return [group.plan_entry() for group in self.groups], texts

    def slice_tensors(self, boxes: Boxes) -> None:
        """Replace every DTensor by a Sliced."""
        for group in self.groups:
            for name, tensor in group.tensors.items():
                if is_dtensor(tensor):
                    check_placements(name, tensor)
                    group.tensors[name] = slice_of_dtensor(tensor, boxes, stays=self.staging.takes)

    def sources(self, needed: Sequence[int] | None = None) -> list[Source]:
        """Return this rank's sources in ascending order: of replicated content those in `needed` (None: all), and its parts."""
        wanted = None if needed is None else set(needed)
        found: list[Source] = []
        number = -1
        if self.ahead is not None:
            found, number = list(self.ahead.sources), self.ahead.count - 1
            self.held.append(self.ahead)
        for group in self.groups:
            for name, tensor in group.tensors.items():
                number += 1
                eager = name in group.eager
                if isinstance(tensor, Sliced):
                    mine, count = tensor.turn
                    for first, memory in tensor.parts if number % count == mine else ():
                        if memory.numel():
                            on_device = self.staging.takes(memory)
                            memory = memory if on_device else memory.cpu()
                            self.held.append(memory)
                            begin = first * tensor.dtype.itemsize
                            found.append((number, begin, memory.nbytes, memory.data_ptr(), eager, on_device))
                elif tensor.numel() and (wanted is None or number in wanted):
                    bytes_of, on_device = self.staging.memory_of(tensor)
                    self.held.append(bytes_of)
                    size = bytes_of.numel() * bytes_of.element_size()
                    found.append((number, 0, size, bytes_of.data_ptr(), eager, on_device))
        for text in self.texts.values():
            number += 1
            if text and (wanted is None or number in wanted):
                found.append((number, 0, len(text), self._keep(text), True, False))
        for _, begin, line in self.lines.values():
            number += 1
            found.append((number, begin, len(line), self._keep(line), True, False))
        return found

    def _keep(self, text: bytes | bytearray) -> int:
        memory = torch.frombuffer(text if isinstance(text, bytearray) else bytearray(text), dtype=torch.uint8)
        self.held.append(memory)
        return memory.data_ptr()


def packed(sources: Sequence[Source]) -> bytes:
    """Return sources as CheckpointSaver.keep() takes them, too: without a Python object a number."""
    return b"".join(_PACKED.pack(*each) for each in sources)


def digest_of(entries: Entries) -> bytes:
    """Return a digest of the arguments of a plan, which take more memory than the plan."""
    found = hashlib.blake2b(digest_size=16)
    for each in (entries[1], *entries[0]):
        found.update(repr(each).encode("utf-8", "surrogatepass"))
    return found.digest()


def model_index(plan: Any, names: Sequence[str]) -> bytes:
    """Return the text of transformers' index of a plan's model files; b"" for one file. `names` of the plan's first sources."""
    files = [(path, pieces) for path, _, _, pieces in plan.files() if path.startswith("model")]
    if len(files) < 2:
        return b""
    weight_map = {names[source]: path for path, pieces in files for source, _, _ in pieces}
    total = sum(size for _, pieces in files for _, _, size in pieces)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def model_group(found: ModelTensors, max_file_bytes: int) -> Group:
    """Return the group of model*.safetensors: parameters, then buffers. The metadata maps each tied name to its tensor."""
    metadata = MODEL_METADATA | found.tied | MODEL_METADATA  # a tied name 'format' must not replace the entry
    buffers = frozenset(found.buffers)
    return Group("model", found.all(), metadata, max_file_bytes=max_file_bytes, eager=buffers, first=buffers)


def optimizer_content(
    optimizer: Any, found: ModelTensors, max_file_bytes: int, states: Mapping[Any, Mapping[str, Any]] | None = None
) -> tuple[Group, dict[str, Any]]:
    """Return the group of optimizer-*.safetensors and the tree of optimizer.json, from `states` or the optimizer's own state."""
    names = parameter_names(optimizer, found)
    whole = optimizer.state if states is None else states
    tensors: dict[str, Any] = {}
    further = further_state(optimizer)
    body: dict[str, Any] = {"groups": group_options(optimizer, names, tensors)}
    if further:
        body["further"] = {key: tree.encode(value, f"further.{key}", tensors) for key, value in further.items()}
    eager = frozenset(tensors)  # a scheduler writes to these outside the optimizer's step
    place = {name: index for index, name in enumerate(found.parameters)}
    parameters = {p: names[id(p)] for group in optimizer.param_groups for p in group["params"]}
    state = {}
    for parameter, name in sorted(parameters.items(), key=lambda pair: place.get(pair[1], len(place))):
        values = apart(portable(whole.get(parameter, {}), parameter))
        entry = {str(key): _encode_state(values[key], str(key), name, tensors) for key in sorted(values, key=str)}
        if entry:
            state[name] = entry
    stray = [key for key in whole if key not in parameters]
    if stray:
        raise CheckpointError(
            f"{type(optimizer).__name__} keeps state under {len(stray)} keys that are not its parameters: not savable; at zero >= 1 pass the "
            "optimizer that sw.wrap or sw.shard_optimizer returned"
        )
    body["state"] = state
    group = optimizer_group(tensors, max_file_bytes)
    group.eager = group.first = eager
    return group, body


def optimizer_group(tensors: dict[str, Any], max_file_bytes: int) -> Group:
    return Group("optimizer", tensors, {"format": "pt"}, numbered=True, max_file_bytes=max_file_bytes)


def group_options(optimizer: Any, names: Mapping[int, str], tensors: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
    """Encode the optimizer's groups: their options, and the names of their parameters."""
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key != "params"}
        encoded = tree.encode(options, f"param_groups.{number}", tensors)
        if "$dict" in encoded:
            raise CheckpointError(
                f"param_groups.{number} has an option whose name is not a string or begins with '$': not savable"
            )
        groups.append({**encoded, "params": [names[id(p)] for p in group["params"]]})
    return groups


def _encode_state(value: Any, key: str, parameter: str, tensors: dict[str, Any]) -> Any:
    """Encode as tree.encode() does, with names of tensors that end in the parameter's: exp_avg.layer.weight."""
    if isinstance(value, Sliced):
        _add(f"{key}.{parameter}", value, tensors)
        return {"$tensor": f"{key}.{parameter}"}
    inner: dict[str, torch.Tensor] = {}
    node = tree.encode(value, key, inner)
    for name, tensor in inner.items():
        _add(f"{name}.{parameter}", tensor, tensors)
    return _with_suffix(node, f".{parameter}") if inner else node


def _add(name: str, tensor: Any, tensors: dict[str, Any]) -> None:
    if name in tensors:
        raise CheckpointError(f"two entries of the optimizer's state would be called '{name}': not savable")
    tensors[name] = tensor


def _with_suffix(node: Any, suffix: str) -> Any:
    if isinstance(node, list):
        return [_with_suffix(item, suffix) for item in node]
    if isinstance(node, dict):
        if len(node) == 1 and next(iter(node)) in ("$tensor", "$numpy"):
            ((kind, name),) = node.items()
            return {kind: name + suffix}
        return {key: _with_suffix(item, suffix) for key, item in node.items()}
    return node


def parameter_names(optimizer: Any, found: ModelTensors) -> dict[int, str]:
    """Map id(parameter) to its name; one outside the model is called `param_groups.<group>.<index>`."""
    known = {id(tensor): name for name, tensor in found.parameters.items()}
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            known.setdefault(id(parameter), f"param_groups.{number}.{index}")
    return known


def random_state(tensors: dict[str, torch.Tensor], kept: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the states of this process's random generators as a tree. `kept` caches those that are slow to encode."""
    kept = {} if kept is None else kept
    python = random.getstate()
    if kept.get("state") != python:
        kept["node"], kept["state"] = tree.encode(python, "random.python", tensors), python
    found = {"python": kept["node"], "torch": tree.encode(torch.get_rng_state(), "random.torch", tensors)}
    found["numpy"] = _numpy_tree(sys.modules.get("numpy"), tensors, kept)
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    return found | {"cuda": tree.encode(cuda, "random.cuda", tensors)}


def _numpy_tree(numpy: Any, tensors: dict[str, torch.Tensor], kept: dict[str, Any]) -> Any:
    if numpy is None:
        return None
    mark = _numpy_mark(numpy) if _has_numpy_mark(numpy) else None
    if mark is None or kept.get("numpy_mark") != mark:
        held: dict[str, torch.Tensor] = {}
        kept["numpy"] = tree.encode(_numpy_state(numpy), "random.numpy", held), held
        kept["numpy_mark"] = mark
    tensors |= kept["numpy"][1]
    return kept["numpy"][0]


def _numpy_mark(numpy: Any) -> tuple[bytes, bytes] | None:
    """Return bytes that change with numpy.random's state: get_state() converts 624 numbers one by one. None: no MT19937."""
    holder = numpy.random.get_state.__self__  # has a pending normal number; the rest is in its generator's struct
    generator = holder._bit_generator
    if type(generator).__name__ != "MT19937":
        return None
    return _bytes_of(holder), ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)


def _bytes_of(value: Any) -> bytes:
    """Return the bytes of an object beyond its count of references."""
    skipped = ctypes.sizeof(ctypes.c_ssize_t)
    return ctypes.string_at(id(value) + skipped, type(value).__basicsize__ - skipped)


@functools.cache
def _has_numpy_mark(numpy: Any) -> bool:
    """Return True if _numpy_mark() works with this numpy: a pending normal number shows in the object."""
    if sys.implementation.name != "cpython":  # where id() is no address
        return False
    try:
        trial, marks = numpy.random.RandomState(0), []
        for _ in range(3):
            marks.append(_bytes_of(trial))
            trial.standard_normal()  # the second one is the one that was pending
        return marks[0] != marks[1] != marks[2] and bool(_numpy_mark(numpy))
    except Exception:  # a numpy of another make
        return False


def _numpy_state(numpy: Any) -> Any:
    """Return numpy.random.get_state(), which converts the numbers of the state twice."""
    found = numpy.random.get_state(legacy=False)
    if found["bit_generator"] != "MT19937":
        return found
    return "MT19937", found["state"]["key"], found["state"]["pos"], found["has_gauss"], found["gauss"]


def set_random_state(states: Mapping[str, Any]) -> None:
    """Set the random generators from a decoded tree of random_state()."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if states.get("numpy") is not None:
        import numpy

        numpy.random.set_state(states["numpy"])
    if states.get("cuda") is not None and torch.cuda.is_available():
        for device, state in zip(range(torch.cuda.device_count()), states["cuda"]):  # this process may have fewer GPUs
            torch.cuda.set_rng_state(state, device)


def seed_anew(mark: str) -> None:
    """Seed the random generators from the digest of torch's seed and `mark`, so that equal programs draw different numbers."""
    seed = int.from_bytes(hashlib.sha256(f"{torch.initial_seed()} {mark}".encode()).digest()[:8], "little") >> 1
    random.seed(seed)
    torch.manual_seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


def try_random_state(states: Mapping[str, Any]) -> None:
    """Raise an error if set_random_state() would. Sets the states in temporary generators, except those of CUDA."""
    random.Random().setstate(states["python"])
    torch.Generator().set_state(states["torch"])
    numpy = sys.modules.get("numpy")  # without numpy its state is not needed
    if numpy and states.get("numpy") is not None:
        numpy.random.RandomState().set_state(states["numpy"])
    if not all(each.dtype == torch.uint8 and each.ndim == 1 for each in states.get("cuda") or ()):
        raise CheckpointError("the state of a CUDA generator is not a tensor of bytes")


def stateful_tree(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Encode the state of an object with state_dict(), of a list, tuple or dict of such, or a dict of plain values."""
    if value is None:
        return None
    _check_whole(value, name)
    if hasattr(value, "state_dict"):
        return tree.encode(value.state_dict(), name, tensors)
    if isinstance(value, (list, tuple)):
        return [stateful_tree(item, f"{name}.{index}", tensors) for index, item in enumerate(value)]
    if isinstance(value, dict):
        for key, item in value.items():
            _check_whole(item, f"{name}.{key}")
        nodes = {}
        for key, item in value.items():
            encode = stateful_tree if hasattr(item, "state_dict") else tree.encode
            nodes[key] = encode(item, f"{name}.{key}", tensors)
        return tree.mapping(nodes, name, tensors)
    raise CheckpointError(
        f"{name} is a {type(value).__name__}: give an object with state_dict() and load_state_dict(), or a dict of plain values"
    )


def _check_whole(value: Any, name: str) -> None:
    """Raise CheckpointError for an optimizer or a wrapped module in slices. Makes no engine: rank 0 may be the only caller."""
    is_released = isinstance(value, torch.nn.Module) and any(
        replica.releases_parameters for each in averaging(value) for replica in getattr(each, "made", ())
    )
    if is_released or sharded_of(value):
        raise CheckpointError(
            f"{name} is {'a module' if is_released else 'an optimizer'} of which each rank holds slices: give all modules and all "
            "optimizers in lists or dicts, such as Checkpointer(directory, [a, b], [optimizer_a, optimizer_b])"
        )


def holds_shards(value: Any) -> bool:
    """Return whether a stateful value has DTensors, without calling state_dict(): modules are searched directly."""
    if isinstance(value, torch.nn.Module):
        return any(map(is_dtensor, (*value.parameters(), *value.buffers())))
    if isinstance(value, Mapping):
        return any(map(holds_shards, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(holds_shards, value))
    return is_dtensor(value)


def unlike_stateful(value: Any, state: Any, name: str) -> str:
    """Return the reason why load_stateful() cannot distribute a decoded state; "" if it can."""
    if value is None or state is None or hasattr(value, "load_state_dict"):
        return ""
    if not isinstance(value, (list, tuple)):
        return "" if isinstance(state, dict) else f"{name}: the checkpoint holds no dict"
    if not isinstance(state, list) or len(value) != len(state):
        count = len(state) if isinstance(state, list) else "no list of"
        return f"{name}: the checkpoint holds {count} objects, this program has {len(value)}"
    reasons = (unlike_stateful(item, of_it, f"{name}.{index}") for index, (item, of_it) in enumerate(zip(value, state)))
    return next(filter(None, reasons), "")


def load_stateful(value: Any, state: Any) -> None:
    """Load a decoded state of stateful_tree() into `value`."""
    if value is None or state is None:
        return
    if hasattr(value, "load_state_dict"):
        value.load_state_dict(_with_counters(value, state))
    elif isinstance(value, (list, tuple)):
        for item, item_state in zip(value, state):
            load_stateful(item, item_state)
    else:
        for key, item_state in state.items():
            if hasattr(value.get(key), "load_state_dict"):
                value[key].load_state_dict(_with_counters(value[key], item_state))
            else:
                value[key] = item_state


def _with_counters(value: Any, state: Any) -> Any:
    """Return `state` with a Counter where the object has one: schedulers with milestones call its methods."""
    live, kind = getattr(value, "__dict__", {}), collections.Counter
    if not isinstance(state, dict):
        return state
    return {key: kind(item) if isinstance(live.get(key), kind) else item for key, item in state.items()}
