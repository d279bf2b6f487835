"""What a training consists of: which tensors and texts make a checkpoint. Nothing here touches the disk.

Shared content is the same on every rank, and written once: model and optimizer. Own content is one rank's: its random
generators, its data position, buffers that differ from rank 0's; and rank 0's is all that is small.
"""

from __future__ import annotations

import collections
import dataclasses
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from .._engine import CheckpointError, CheckpointPlan
from . import tree
from .cuts import CutExchange, Cuts
from .device_staging import DeviceStaging
from .names import ModelTensors, check_savable, dtype_name, stored_shape
from .optimizer_extras import further_state
from .peers import Peers
from .slices import Sliced, check_placements, is_dtensor, merge_holdings, slice_of_dtensor

#: (source, begin, nbytes, address, eager, on_device)
Source = tuple[int, int, int, int, bool, bool]
MODEL_METADATA = {"format": "pt"}


@dataclasses.dataclass
class Group:
    """Tensors that become one list of safetensors files, in order.

    `eager`: names that must be copied at the snapshot whatever its form, because more than the optimizer writes them.
    """

    stem: str
    tensors: dict[str, Any]  # Tensor, or Sliced
    metadata: dict[str, str]
    numbered: bool = False
    max_file_bytes: int = 0
    eager: frozenset[str] = frozenset()

    def plan_entry(self) -> tuple[str, bool, int, str, list[tuple[str, str, list[int], bool]]]:
        complex_ones = {
            f"complex.{n}": str(t.dtype).removeprefix("torch.") for n, t in self.tensors.items() if t.is_complex()
        }
        metadata = tree.dumps(self.metadata | complex_ones).decode().strip()
        for name, tensor in self.tensors.items():
            if not isinstance(tensor, Sliced):
                check_savable(name, tensor)
        entries = [(n, dtype_name(n, t.dtype), stored_shape(t), n in self.eager) for n, t in self.tensors.items()]
        return (self.stem, self.numbered, self.max_file_bytes, metadata, entries)


@dataclasses.dataclass
class Content:
    """Groups and texts, and the plan over them.

    Attributes
    ----------
    staging : DeviceStaging
        What is on a GPU is a source there as far as this takes it.
    held : list
        What the sources' addresses point into: keep it until the snapshot is taken.
    received_bytes : int
        Of other ranks' slices, by slice_sources().
    """

    groups: list[Group]
    staging: DeviceStaging
    texts: dict[str, bytes] = dataclasses.field(default_factory=dict)
    held: list[Any] = dataclasses.field(default_factory=list)
    received_bytes: int = 0

    def plan(self) -> CheckpointPlan:
        return CheckpointPlan(
            [group.plan_entry() for group in self.groups], [(path, len(text)) for path, text in self.texts.items()]
        )

    def sources(self, needed: Sequence[int] | None = None) -> list[Source]:
        """Of all tensors and texts, or of those whose numbers are in `needed`."""
        wanted = None if needed is None else set(needed)
        found = []
        number = -1
        for group in self.groups:
            for name, tensor in group.tensors.items():
                number += 1
                if isinstance(tensor, Sliced):
                    continue  # slice_sources() has them
                if tensor.numel() and (wanted is None or number in wanted):
                    bytes_of, on_device = self.staging.memory_of(tensor)
                    self.held.append(bytes_of)
                    size = bytes_of.numel() * bytes_of.element_size()
                    found.append((number, 0, size, bytes_of.data_ptr(), name in group.eager, on_device))
        for text in self.texts.values():
            number += 1
            if text:
                memory = torch.frombuffer(bytearray(text), dtype=torch.uint8)
                self.held.append(memory)
                found.append((number, 0, len(text), memory.data_ptr(), True, False))
        return found

    def slice_tensors(self) -> None:
        """Sliced in the place of every DTensor."""
        for group in self.groups:
            for name, tensor in group.tensors.items():
                if is_dtensor(tensor):
                    check_placements(name, tensor)
                    group.tensors[name] = slice_of_dtensor(tensor, stays=self.staging.takes)

    def sliced(self) -> dict[int, tuple[str, Sliced, bool]]:
        """Number of a source -> (name, what this rank holds of it, eager), of those that are spread over ranks."""
        named = [(n, t, n in group.eager) for group in self.groups for n, t in group.tensors.items()]
        return {i: (n, t, eager) for i, (n, t, eager) in enumerate(named) if isinstance(t, Sliced)}

    def slice_sources(self, plan: CheckpointPlan, peers: Peers, exchange: CutExchange) -> list[Source]:
        """Gives the plan's blocks to those who hold them, and exchanges what they lack: sources of what is spread over
        ranks, as sources() has those of the rest. Collective."""
        sliced = self.sliced()
        held = {number: tensor for number, (_, tensor, _) in sliced.items()}
        sizes = {number: tensor.numel() * tensor.dtype.itemsize for number, tensor in held.items()}
        names = {number: name for number, (name, _, _) in sliced.items()}
        tables = peers.together(
            lambda: [(number, [(b, n) for b, n, _ in tensor.ranges()]) for number, tensor in held.items()],
            "slices of a checkpoint",
        )
        holdings: list[tuple[int, int, int, int]] = []
        made: list[Cuts] = []

        def assign() -> int:
            holdings.extend(merge_holdings(tables, sizes, names))
            made.append(Cuts(plan.assign(holdings, peers.world_size), peers.rank, held, peers.host_of))
            return 0

        peers.together(assign, "cuts of a checkpoint")
        (cuts,) = made
        exchange.carry(cuts)
        self.received_bytes = cuts.nbytes
        found = []
        places = {(n, begin): place for n, t in held.items() for begin, place in self._places(t)}
        for number, begin, nbytes, rank in holdings:
            if rank == peers.rank:
                address, on_device = places[number, begin]
                found.append((number, begin, nbytes, address, sliced[number][2], on_device))
        for number, begin, memory in cuts.received:
            self.held.append(memory)
            found.append((number, begin, memory.numel(), memory.data_ptr(), sliced[number][2], False))
        return sorted(found)

    def _places(self, tensor: Sliced) -> Iterator[tuple[int, tuple[int, bool]]]:
        """First byte in the whole -> (address, whether it is on the GPU), of each part."""
        for first, memory in tensor.parts:
            if not memory.numel():
                continue
            on_device = self.staging.takes(memory)
            there = memory if on_device else memory.cpu()
            self.held.append(there)
            yield first * tensor.dtype.itemsize, (there.data_ptr(), on_device)


# shared ---------------------------------------------------------------------------------------------------------------


def model_group(found: ModelTensors, max_file_bytes: int) -> Group:
    """model*.safetensors: parameters, then buffers; a tied name stands in the metadata."""
    metadata = MODEL_METADATA | found.tied | MODEL_METADATA  # which is not to be lost to a tied name 'format'
    return Group("model", found.all(), metadata, max_file_bytes=max_file_bytes, eager=frozenset(found.buffers))


def optimizer_content(
    optimizer: Any, found: ModelTensors, max_file_bytes: int, states: Mapping[Any, Mapping[str, Any]] | None = None
) -> tuple[Group, dict[str, Any]]:
    """optimizer-*.safetensors and the tree of optimizer.json, of the optimizer's own state or of `states`.

    Tensors are named `<state key>.<parameter>`; a parameter that the model does not have, `param_groups.<group>.<index>`.
    """
    names = parameter_names(optimizer, found)
    whole = optimizer.state if states is None else states
    tensors: dict[str, Any] = {}
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key != "params"}
        encoded = tree.encode(options, f"param_groups.{number}", tensors)
        if "$dict" in encoded:
            raise CheckpointError(
                f"param_groups.{number} has an option whose name is no string, or begins with '$': not savable"
            )
        groups.append({**encoded, "params": [names[id(p)] for p in group["params"]]})
    further = further_state(optimizer)
    body: dict[str, Any] = {"groups": groups}
    if further:
        body["further"] = {key: tree.encode(value, f"further.{key}", tensors) for key, value in further.items()}
    eager = frozenset(tensors)  # a scheduler writes them at its own time, or who knows
    state = {}
    for parameter, name in ordered_parameters(optimizer, names, found):
        values = whole.get(parameter, {})
        entry = {}
        for key in sorted(values, key=str):
            entry[str(key)] = _encode_state(values[key], str(key), name, tensors)
        if entry:
            state[name] = entry
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    stray = [key for key in whole if id(key) not in known]
    if stray:
        raise CheckpointError(
            f"{type(optimizer).__name__} keeps state under {len(stray)} keys that are none of its parameters: not savable"
        )
    body["state"] = state
    group = Group("optimizer", tensors, {"format": "pt"}, numbered=True, max_file_bytes=max_file_bytes)
    group.eager = eager
    return group, body


def positions_of(optimizer: Any) -> dict[int, torch.Tensor]:
    """The number of each parameter in torch's state dicts."""
    return dict(enumerate({p: None for group in optimizer.param_groups for p in group["params"]}))


def _encode_state(value: Any, key: str, parameter: str, tensors: dict[str, Any]) -> Any:
    """As tree.encode(), with the parameter's name at the end: exp_avg.layer.weight."""
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
    """id(parameter) -> name, of all the optimizer's parameters."""
    known = {id(tensor): name for name, tensor in found.parameters.items()}
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            known.setdefault(id(parameter), f"param_groups.{number}.{index}")
    return known


def ordered_parameters(optimizer: Any, names: Mapping[int, str], found: ModelTensors) -> list[tuple[torch.Tensor, str]]:
    """The optimizer's parameters with their names, in the model's order, then those that the model does not have."""
    place = {name: index for index, name in enumerate(found.parameters)}
    pairs = [(p, names[id(p)]) for group in optimizer.param_groups for p in group["params"]]
    return sorted(pairs, key=lambda pair: place.get(pair[1], len(place)))


# own ------------------------------------------------------------------------------------------------------------------


def random_state(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Every random generator of this process, as a tree."""
    numpy = sys.modules.get("numpy")
    states = {
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
        "numpy": numpy.random.get_state(legacy=True) if numpy else None,
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None,
    }
    return {key: tree.encode(value, f"random.{key}", tensors) for key, value in states.items()}


def set_random_state(states: Mapping[str, Any]) -> None:
    """The inverse of random_state(), of a decoded tree."""
    random.setstate(states["python"])
    torch.set_rng_state(states["torch"])
    if states.get("numpy") is not None:
        import numpy

        numpy.random.set_state(states["numpy"])
    if states.get("cuda") is not None and torch.cuda.is_available():
        for device, state in zip(range(torch.cuda.device_count()), states["cuda"]):  # there may be fewer here
            torch.cuda.set_rng_state(state, device)


def stateful_tree(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """The state of an object with state_dict(), of a list, tuple or dict of such, or a dict of plain values."""
    if value is None:
        return None
    if hasattr(value, "state_dict"):
        return tree.encode(value.state_dict(), name, tensors)
    if isinstance(value, (list, tuple)):
        return [stateful_tree(item, f"{name}.{index}", tensors) for index, item in enumerate(value)]
    if isinstance(value, dict):
        nodes = {
            key: stateful_tree(item, f"{name}.{key}", tensors)
            if hasattr(item, "state_dict")
            else tree.encode(item, f"{name}.{key}", tensors)
            for key, item in value.items()
        }
        return tree.mapping(nodes, name, tensors)
    raise CheckpointError(
        f"{name} is a {type(value).__name__}: it needs state_dict() and load_state_dict(), or to be a dict of plain values"
    )


def load_stateful(value: Any, state: Any, name: str) -> None:
    """Gives `value` the (decoded) state that stateful_tree() took."""
    if value is None or state is None:
        return
    if hasattr(value, "load_state_dict"):
        value.load_state_dict(_with_counters(value, state))
    elif isinstance(value, (list, tuple)):
        if len(value) != len(state):
            raise CheckpointError(f"{name}: the checkpoint holds {len(state)} of them, this program has {len(value)}")
        for index, (item, item_state) in enumerate(zip(value, state)):
            load_stateful(item, item_state, f"{name}.{index}")
    else:
        for key, item_state in state.items():
            if hasattr(value.get(key), "load_state_dict"):
                value[key].load_state_dict(_with_counters(value[key], item_state))
            else:
                value[key] = item_state


def _with_counters(value: Any, state: Any) -> Any:
    """`state`, with a Counter where the object has one: a scheduler with milestones asks it for its elements."""
    live = getattr(value, "__dict__", {})
    if not isinstance(state, dict):
        return state
    return {
        key: collections.Counter(item) if isinstance(live.get(key), collections.Counter) else item
        for key, item in state.items()
    }
