"""Byte ranges of sharded tensors that this rank holds.

A part is a run of elements in row-major order, hence a range of bytes in the file. A save writes that range and a load
reads it; neither needs to know the parts of other ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from .._engine import CheckpointError
from ..layout.local_parameters import module_parameter
from ..layout.memory import has_memory, without_memory
from ..layout.shard_mesh import Slicing
from ..optim import moments
from ..optim.sharded import ShardedOptimizer
from ..parameters.sharded_groups import ReleasedParameters
from ..parameters.sharded_parameter import plain_part
from ..torch_compat import cuda
from ..torch_compat.dtensor import is_dtensor, local_box
from .joined import engines_of, members_of, sharded_of
from .state.composed import apart, check_sliceable

#: one entry of a sliced optimizer's state: (kind, dtype, shape). A CUT entry is sliced like its parameter and has no shape
#: of its own, nor have RECORDS, blocks of int8; a VALUE is not a tensor and has neither
Entry = tuple[str, str, tuple[int, ...]]
CUT, RECORDS, WHOLE, VALUE = "cut", "records", "whole", "value"


@dataclasses.dataclass(frozen=True)
class Sliced:
    """A rank's parts of a tensor, which has `dtype` and `shape` as a whole."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    #: (first element, memory), ascending in row-major order; memory is flat, on the CPU or, in a save, on a GPU
    parts: tuple[tuple[int, torch.Tensor], ...]
    #: what `parts` alias or were copied from: version counters reveal writes
    live: tuple[torch.Tensor, ...] = ()
    #: the copy of live[0] that `parts` alias, if they do not alias live[0] itself
    copy: torch.Tensor | None = None
    #: (this rank's number among the ranks that hold the same parts, their count): one of them writes
    turn: tuple[int, int] = (0, 1)

    def numel(self) -> int:
        return math.prod(self.shape)

    def is_complex(self) -> bool:
        return self.dtype.is_complex

    def ranges(self) -> list[tuple[int, int, int]]:
        """Return (first byte in the whole tensor, bytes, address) of each part."""
        size = self.dtype.itemsize
        return [(first * size, m.numel() * size, m.data_ptr()) for first, m in self.parts if m.numel()]


def box_ranges(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return (first element, count) of each row-major run of the box of `sizes` at `offsets` in an array.

    >>> box_ranges((4, 6), (1, 0), (2, 6))
    [(6, 12)]
    >>> box_ranges((4, 6), (1, 2), (2, 3))
    [(8, 3), (14, 3)]
    """
    if 0 in sizes:
        return []
    whole = len(shape)
    while whole > 0 and sizes[whole - 1] == shape[whole - 1]:
        whole -= 1
    if whole == 0:
        return [(0, math.prod(shape))]
    strides = [math.prod(shape[d + 1 :]) for d in range(whole)]
    run, base = sizes[whole - 1] * strides[-1], offsets[whole - 1] * strides[-1]
    outer = itertools.product(*(range(o, o + n) for o, n in zip(offsets[: whole - 1], sizes[: whole - 1])))
    return [(base + sum(i * s for i, s in zip(index, strides)), run) for index in outer]


def check_placements(name: str, tensor: Any) -> None:
    """Raise CheckpointError if the local part of a DTensor is not a box of the whole tensor."""
    other = [p for p in tensor.placements if type(p).__name__ not in ("Shard", "Replicate")]
    if other:
        raise CheckpointError(
            f"tensor '{name}' is a DTensor placed as {other[0]!r}: a checkpoint supports Shard and Replicate only"
        )


class Boxes:
    """A cache of boxes of DTensors, for `members`, ranks of torch's default group. `replicas`: see Peers.replicas."""

    def __init__(self, members: Sequence[int], replicas: Mapping[Any, tuple[int, int]] = {}) -> None:
        self._members, self._replicas = frozenset(members), replicas
        self._found: dict[Any, tuple[tuple[int, ...], tuple[int, ...], tuple[int, int]]] = {}

    def of(self, tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, int]]:
        """Return shape and offsets of this rank's box, and its turn to write it."""
        key = (id(tensor.device_mesh), tuple(tensor.placements), tuple(tensor.shape))
        found = self._found.get(key)
        if found is None:
            mine, same = _turn_of(tensor, self._members)
            index, count = self._replicas.get(tensor.device_mesh, (0, 1))
            found = self._found[key] = (*local_box(tensor), (index * same + mine, count * same))
        return found


def placed_parts(parameter: Any, first: int, memory: torch.Tensor) -> tuple[tuple[int, torch.Tensor], ...]:
    """Convert a run of this rank's part of a parameter, from element `first` on, to runs of the whole tensor."""
    if not is_dtensor(parameter):
        return ((first, memory),)
    return _cut_by_box(parameter.shape, *local_box(parameter), first, memory)


def _cut_by_box(
    whole: Sequence[int], shape: Sequence[int], offsets: Sequence[int], first: int, memory: torch.Tensor
) -> tuple[tuple[int, torch.Tensor], ...]:
    done, end, parts = 0, first + memory.numel(), []
    for begin, numel in box_ranges(whole, offsets, shape):
        low, high = max(first, done), min(end, done + numel)
        if low < high:
            parts.append((begin + low - done, memory[low - first : high - first]))
        done += numel
    return tuple(parts)


def _turn_of(tensor: Any, members: frozenset[int]) -> tuple[int, int]:
    """Return (this rank's number, count) among the `members` that hold the same part of a DTensor."""
    mesh, place = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if place is None or all(type(p).__name__ == "Shard" for p in tensor.placements):
        return 0, 1
    index = tuple(c if type(p).__name__ == "Shard" else slice(None) for c, p in zip(place, tensor.placements))
    same = [rank for rank in mesh.mesh[index].flatten().tolist() if rank in members]
    mine = int(mesh.mesh[tuple(place)])
    return (same.index(mine), len(same)) if mine in same else (0, 1)


def slice_of_dtensor(tensor: Any, boxes: Boxes, stays: Callable[[torch.Tensor], bool] = lambda _: False) -> Sliced:
    """Return this rank's part of a DTensor. Copies it unless it is plain CPU memory or stays(memory) is true."""
    with torch.no_grad():
        local = plain_part(tensor).detach()
    if not has_memory(local):
        raise CheckpointError(f"a checkpoint holds plain tensors, and this DTensor is over {without_memory(local)}")
    shape, offsets, turn = boxes.of(tensor)
    memory = local.resolve_conj().resolve_neg()
    memory = (memory if stays(memory) else memory.cpu()).contiguous().reshape(shape)
    parts = _cut_by_box(tensor.shape, shape, offsets, 0, memory.reshape(-1))
    copy = memory if memory.data_ptr() != local.data_ptr() else None
    return Sliced(tensor.dtype, tuple(tensor.shape), parts, (local,), copy, turn)


def is_sliced(model: torch.nn.Module, optimizer: Any) -> bool:
    """Return whether ranks hold slices of the model or the optimizer. The result is equal on all ranks."""
    return bool(sharded_of(optimizer)) or any(is_dtensor(p) for p in model.parameters())


def describe_state(of: Any) -> dict[int, dict[str, Entry]]:
    """Map numbers of parameters with elements on this rank to the entries of their state, of all sliced optimizers in `of`."""
    described = {}
    for number, (optimizer, parameter) in enumerate(_parameters(of)):
        state, piece, _ = optimizer.held_state(parameter)
        if state:
            layout = optimizer.layout_of(parameter)
            is_whole = piece is not None and piece.numel() == layout.numel() and is_row_major(layout)
            check_sliceable(str(number), state, is_whole=is_whole)
            state = apart(state)
            described[number] = {str(key): _entry(str(key), value, piece) for key, value in state.items()}
    return described


def _entry(key: str, value: Any, piece: torch.Tensor | None) -> Entry:
    if not isinstance(value, torch.Tensor):
        return VALUE, "", ()
    dtype = str(value.dtype).removeprefix("torch.")
    if moments.is_records(key, value):
        return RECORDS, dtype, ()
    if piece is not None and value.shape == piece.shape and key != "step":
        return CUT, dtype, ()
    return WHOLE, dtype, tuple(value.shape)


def compact(described: Mapping[int, Mapping[str, Entry]]) -> list[Any]:
    """Return JSON [entries, [first, last, first, last, ...]] for each distinct set: most parameters share one."""
    kinds: dict[tuple[tuple[str, Entry], ...], list[int]] = {}
    for number, entries in sorted(described.items()):
        runs = kinds.setdefault(tuple(entries.items()), [])
        if runs and runs[-1] == number - 1:
            runs[-1] = number
        else:
            runs += [number, number]
    return [[entries, runs] for entries, runs in kinds.items()]


def expand(kinds: Sequence[Any]) -> dict[int, dict[str, Entry]]:
    """Invert compact()."""
    found: dict[int, dict[str, Entry]] = {}
    for entries, runs in kinds:
        keys = {key: (how, dtype, tuple(shape)) for key, (how, dtype, shape) in entries}
        for first, last in zip(runs[::2], runs[1::2]):
            found |= dict.fromkeys(range(first, last + 1), keys)
    return found


def held_values(of: Any) -> dict[int, dict[str, Any]]:
    """Map numbers of parameters to their non-tensor entries, if this rank has the first element and so reports them."""
    found = {}
    for number, (optimizer, parameter) in enumerate(_parameters(of)):
        state, piece, first = optimizer.held_state(parameter)
        values = {str(key): value for key, value in apart(state).items() if not isinstance(value, torch.Tensor)}
        if values and piece is not None and first == 0 and optimizer.replica_of(parameter).slicing.speaks:
            found[number] = values
    return found


def sliced_state(
    of: Any, described: Mapping[int, Mapping[str, Entry]], values: Mapping[int, Mapping[str, Any]]
) -> dict[torch.Tensor, dict[str, Any]]:
    """Map parameters to the parts of their state on this rank. Collective if some are not row-major: it gathers their state."""
    found: dict[torch.Tensor, dict[str, Any]] = {}
    for whole in members_of(of):
        found |= {} if isinstance(whole, ShardedOptimizer) else whole.state
    for number, (optimizer, parameter) in enumerate(_parameters(of)):
        if number not in described:
            continue
        replica = optimizer.replica_of(parameter)
        turn, mesh = _turn_among_owners(replica.slicing), replica.table.model_mesh
        speaks = mesh is None or mesh.speaks(parameter)
        begins = speaks and not (is_dtensor(parameter) and any(local_box(parameter)[1]))
        if not is_row_major(optimizer.layout_of(parameter)):
            found[parameter] = optimizer.gathered_state(parameter)
            continue
        state, piece, first = optimizer.held_state(parameter)
        state = apart(state)
        found[parameter] = entries = {}
        for key, (kind, dtype, shape) in described[number].items():
            if kind == VALUE:
                entries[key] = values.get(number, {}).get(key)
                continue
            full = tuple(parameter.shape) if kind == CUT else shape
            if kind == RECORDS:
                full = (moments.blocks(optimizer.layout_of(parameter).numel()), moments.RECORD)
            made = Sliced(getattr(torch, dtype), full, (), turn=turn)
            if key in state and (begins and piece is not None and first == 0 if kind == WHOLE else speaks):
                flat = state[key].detach().resolve_conj().contiguous().reshape(-1)
                begin = moments.run(first, first)[0] if kind == RECORDS else 0
                parts = placed_parts(parameter, first, flat) if kind == CUT else ((begin, flat),)
                made = dataclasses.replace(made, parts=parts, live=(state[key],))
            entries[key] = made
    return found


def _turn_among_owners(slicing: Slicing) -> tuple[int, int]:
    """Return (this rank's number, count) among the owners of its slice."""
    return slicing.replica_of_rank[slicing.rank], max(slicing.replica_of_rank) + 1


def _parameters(of: Any) -> list[tuple[ShardedOptimizer, torch.Tensor]]:
    """Return (its optimizer, parameter) of the sliced optimizers in `of`, in order."""
    return [(o, p) for o in sharded_of(of) for p in {p: None for group in o.param_groups for p in group["params"]}]


def is_row_major(tensor: torch.Tensor) -> bool:
    """Return whether memory order equals file order, so that a run of memory is a run of bytes in the file."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def replicas_of(model: Any) -> list[Any]:
    """Return the replicas of a module of sw.wrap, or of those in it; none of fully_shard, whose DTensors are as any others."""
    made = (replica for engine in engines_of(model) for replica in engine.replicas)
    return [each for each in made if not each.parameters().rows]


def fills_slices(replica: Any) -> bool:
    """Return whether a load can write slices of parameters, which requires released parameters to be row-major."""
    memory = replica.parameters() if replica.zero else None
    if not isinstance(memory, ReleasedParameters):
        return bool(replica.zero)
    return all(is_row_major(memory.like(i)) for i in range(len(replica.table.parameters)) if memory.is_released(i))


def loads_slices(model: Any) -> bool:
    """Return True if a load writes only this rank's slices of the model."""
    replicas = replicas_of(model)
    return bool(replicas) and all(map(fills_slices, replicas))


@contextlib.contextmanager
def own_parameters(replica: Any) -> Iterator[dict[int, Sliced]]:
    """Yield own_slices(); publish all slices at exit. Collective. Requires fills_slices()."""
    memory = replica.parameters()
    slices = own_slices(replica)
    with replica.access, replica.access.writing():
        if memory.shared:  # no rank writes before all have told their forked children
            replica.backend.fence(f"parameters of {replica.label} before they are loaded")
        try:
            yield slices
        finally:  # also after a failed load: the other ranks call the same collective
            memory.publish_all()
            replica.access.count_writes(replica.table.module_parameters)


def own_slices(replica: Any) -> dict[int, Sliced]:
    """Map id(parameter) to the slice that this rank writes; publishing completes it. Ranks write all others whole."""
    memory = replica.parameters()
    slices = {}
    for index, parameter in enumerate(replica.table.parameters):
        is_released = isinstance(memory, ReleasedParameters) and memory.is_released(index)
        if is_released or (memory.is_published(index) and is_row_major(parameter)):
            low, high = memory.own_run(index)
            piece = memory.slice(index) if is_released else memory.flat(index)[low:high].detach()
            piece = parameter.new_empty(0) if piece is None else piece.detach()
            copy = torch.empty(piece.shape, dtype=piece.dtype, device="cpu") if cuda.runtime.holds(piece) else None
            live = parameter if copy is None and not is_released else piece
            own = module_parameter(parameter)
            parts = placed_parts(own, low, piece if copy is None else copy)
            slices[id(own)] = Sliced(parameter.dtype, tuple(own.shape), parts, (live,), copy)
    return slices


def held_bytes(model: torch.nn.Module, optimizer: Any, world_size: int) -> int:
    """Estimate the bytes of model and optimizer that this rank writes: its slices and 1/W of the rest."""
    slices, _ = released_slices(model)
    own = sum(memory.nbytes for each in slices.values() for _, memory in each.parts)
    held: list[tuple[bool, Any]] = [(is_dtensor(p), p) for p in model.parameters() if id(p) not in slices]
    for each in members_of(optimizer):
        values = (value for state in each.state.values() if isinstance(state, Mapping) for value in state.values())
        is_cut = isinstance(each, ShardedOptimizer)
        held += [(is_cut or is_dtensor(value), value) for value in values if isinstance(value, torch.Tensor)]
    own += sum((t.to_local() if is_dtensor(t) else t).nbytes for is_own, t in held if is_own)
    return own + sum(t.nbytes for is_own, t in held if not is_own) // world_size


def released_slices(model: Any) -> tuple[dict[int, Sliced], set[int]]:
    """Return (id(parameter) -> this rank's slice, ids of those that are not row-major) for released parameters."""
    found: dict[int, Sliced] = {}
    others: set[int] = set()
    for replica in (each for each in replicas_of(model) if each.releases_parameters):
        memory, mesh = replica.parameters(), replica.table.model_mesh
        assert isinstance(memory, ReleasedParameters)
        turn = _turn_among_owners(replica.slicing)
        for index, parameter in enumerate(replica.table.parameters):
            if not memory.is_released(index):
                continue
            own, (low, _) = module_parameter(parameter), memory.own_run(index)
            if not is_row_major(memory.like(index)):
                others.add(id(own))
                continue
            piece = None if mesh is not None and not mesh.speaks(own) else memory.slice(index)
            parts = () if piece is None else placed_parts(own, low, piece.detach())
            live = () if piece is None else (piece,)
            found[id(own)] = Sliced(parameter.dtype, tuple(own.shape), parts, live, None, turn)
    return found, others
