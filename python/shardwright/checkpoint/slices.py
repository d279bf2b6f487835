"""Tensors that are spread over ranks: which bytes of them this rank holds.

A slice is a run of a tensor's elements in row-major order, so a range of its bytes in the file: a save writes it there, and a load reads
it from there. Neither needs to know what other ranks hold.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from .._engine import CheckpointError
from ..optim.sharded import ShardedOptimizer
from ..parallel.fully_shard import wrapper_of
from ..parameters.released import ReleasedParameters
from ..torch_compat import cuda

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

#: of an entry of a sliced optimizer's state: how it is held, and of tensors dtype and, unless it is cut as the parameter is, shape
Entry = tuple[str, str, tuple[int, ...]]
CUT, WHOLE, VALUE = "cut", "whole", "value"


@dataclasses.dataclass(frozen=True)
class Sliced:
    """One rank's parts of a tensor.

    Attributes
    ----------
    dtype, shape
        Of the whole.
    parts : tuple of (first element, memory)
        Ascending runs in row-major order; each memory is one-dimensional and contiguous; on the CPU, or in a save on a GPU.
    live : tuple of Tensor
        What `parts` alias or were copied from: their version tells of writes.
    copy : Tensor, optional
        Where `parts` are a copy of live[0]: the copy, of its shape.
    turn : (int, int)
        This rank's number among the ranks that hold the same parts, and their count: one of them writes.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[tuple[int, torch.Tensor], ...]
    live: tuple[torch.Tensor, ...] = ()
    copy: torch.Tensor | None = None
    turn: tuple[int, int] = (0, 1)

    def numel(self) -> int:
        return math.prod(self.shape)

    def is_complex(self) -> bool:
        return self.dtype.is_complex

    def ranges(self) -> list[tuple[int, int, int]]:
        """(first byte in the whole, bytes, address)."""
        size = self.dtype.itemsize
        return [(first * size, m.numel() * size, m.data_ptr()) for first, m in self.parts if m.numel()]


# a box of an array ------------------------------------------------------------------------------------------------------


def box_ranges(shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, int]]:
    """(first element, elements) of the row-major runs that make up the box `sizes` at `offsets` of an array.

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


def parts_of_box(
    shape: Sequence[int], offsets: Sequence[int], memory: torch.Tensor
) -> tuple[tuple[int, torch.Tensor], ...]:
    """`memory`, row-major with the box's shape, as runs of the whole."""
    flat, done, parts = memory.reshape(-1), 0, []
    for first, numel in box_ranges(shape, offsets, memory.shape):
        parts.append((first, flat[done : done + numel]))
        done += numel
    return tuple(parts)


# torch's own slices -----------------------------------------------------------------------------------------------------


def is_dtensor(tensor: Any) -> TypeGuard[DTensor]:
    return hasattr(tensor, "to_local") and hasattr(tensor, "placements")


def check_placements(name: str, tensor: Any) -> None:
    """Raises CheckpointError for a DTensor whose local part is no box of the whole."""
    known = {"Shard", "Replicate"}
    other = [p for p in tensor.placements if type(p).__name__ not in known]
    if other:
        raise CheckpointError(
            f"tensor '{name}' is a DTensor placed as {other[0]!r}: a checkpoint holds those of Shard and Replicate"
        )


@dataclasses.dataclass(frozen=True)
class _Box:
    """Return where a rank's part of DTensors of one shape and placement lies."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    turn: tuple[int, int]


class Boxes:
    """Boxes of DTensors, each computed once: models repeat a few shapes many times.

    Parameters
    ----------
    members : sequence of int
        The ranks that save together, by their numbers in torch's default group.
    """

    def __init__(self, members: Sequence[int]) -> None:
        self._members = frozenset(members)
        self._found: dict[Any, _Box] = {}

    def of(self, tensor: Any) -> _Box:
        key = (id(tensor.device_mesh), tuple(tensor.placements), tuple(tensor.shape))
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = _Box(*_local_box(tensor), _turn_of(tensor, self._members))
        return found


def _local_box(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    try:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    except ImportError:  # before torch 2.5
        from torch.distributed._tensor._utils import (  # type: ignore[import-not-found, no-redef, unused-ignore]
            compute_local_shape_and_global_offset,
        )
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offsets)


def _turn_of(tensor: Any, members: frozenset[int]) -> tuple[int, int]:
    """This rank's number among those of `members` that hold the same part of a DTensor, and their count."""
    mesh, place = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if place is None or all(type(p).__name__ == "Shard" for p in tensor.placements):
        return 0, 1
    index = tuple(c if type(p).__name__ == "Shard" else slice(None) for c, p in zip(place, tensor.placements))
    same = [rank for rank in mesh.mesh[index].flatten().tolist() if rank in members]
    mine = int(mesh.mesh[tuple(place)])
    return (same.index(mine), len(same)) if mine in same else (0, 1)


def slice_of_dtensor(tensor: Any, boxes: Boxes, stays: Callable[[torch.Tensor], bool] = lambda _: False) -> Sliced:
    """The part of a DTensor that this rank holds; a copy of it where it is not plain memory, of the CPU's or of where it `stays`."""
    with torch.no_grad():
        local = tensor.to_local().detach()
    box = boxes.of(tensor)
    memory = local.resolve_conj().resolve_neg()
    memory = (memory if stays(memory) else memory.cpu()).contiguous().reshape(box.shape)
    parts = parts_of_box(tuple(tensor.shape), box.offsets, memory)
    is_copy = memory.data_ptr() != local.data_ptr()
    return Sliced(tensor.dtype, tuple(tensor.shape), parts, (local,), memory if is_copy else None, box.turn)


def is_sliced(model: torch.nn.Module, optimizer: Any) -> bool:
    """Return whether some of a training's state is spread over ranks. Alike on all of them."""
    return isinstance(optimizer, ShardedOptimizer) or any(is_dtensor(p) for p in model.parameters())


# our own: the optimizer -------------------------------------------------------------------------------------------------


def describe_state(optimizer: ShardedOptimizer) -> dict[int, dict[str, Entry]]:
    """The number of a parameter -> the entries of its state, of those that this rank holds some state of."""
    described = {}
    for number, parameter in enumerate(_parameters(optimizer)):
        state, piece, _ = optimizer.held_state(parameter)
        if state:
            described[number] = {str(key): _entry(str(key), value, piece) for key, value in state.items()}
    return described


def _entry(key: str, value: Any, piece: torch.Tensor | None) -> Entry:
    if not isinstance(value, torch.Tensor):
        return VALUE, "", ()
    dtype = str(value.dtype).removeprefix("torch.")
    if piece is not None and value.shape == piece.shape and key != "step":
        return CUT, dtype, ()
    return WHOLE, dtype, tuple(value.shape)


def compact(described: Mapping[int, Mapping[str, Entry]]) -> list[Any]:
    """[entries, [first, last, first, last, ...]], as JSON: most parameters have the same entries."""
    kinds: dict[tuple[tuple[str, Entry], ...], list[int]] = {}
    for number, entries in sorted(described.items()):
        runs = kinds.setdefault(tuple(entries.items()), [])
        if runs and runs[-1] == number - 1:
            runs[-1] = number
        else:
            runs += [number, number]
    return [[entries, runs] for entries, runs in kinds.items()]


def expand(kinds: Sequence[Any]) -> dict[int, dict[str, Entry]]:
    """Return what compact() was given."""
    found: dict[int, dict[str, Entry]] = {}
    for entries, runs in kinds:
        keys = {key: (how, dtype, tuple(shape)) for key, (how, dtype, shape) in entries}
        for first, last in zip(runs[::2], runs[1::2]):
            found |= dict.fromkeys(range(first, last + 1), keys)
    return found


def held_values(optimizer: ShardedOptimizer) -> dict[int, dict[str, Any]]:
    """The number of a parameter -> entries that are no tensors, of parameters of which this rank is the one to tell."""
    found = {}
    for number, parameter in enumerate(_parameters(optimizer)):
        state, piece, first = optimizer.held_state(parameter)
        values = {str(key): value for key, value in state.items() if not isinstance(value, torch.Tensor)}
        if values and piece is not None and first == 0 and optimizer.replica.slicing.speaks:
            found[number] = values
    return found


def sliced_state(
    optimizer: ShardedOptimizer,
    described: Mapping[int, Mapping[str, Entry]],
    values: Mapping[int, Mapping[str, Any]],
) -> dict[torch.Tensor, dict[str, Any]]:
    """Parameter -> its state, as far as this rank holds it.

    Parameters that are not row-major are gathered whole, one after the other: collective for those.

    Parameters
    ----------
    described : what describe_state() says on all ranks together.
    values : of entries that are no tensors; those that are missing are None.
    """
    found: dict[torch.Tensor, dict[str, Any]] = {}
    slicing = optimizer.replica.slicing
    turn = slicing.replica_of_rank[slicing.rank], max(slicing.replica_of_rank) + 1
    for number, parameter in enumerate(_parameters(optimizer)):
        if number not in described:
            continue
        if not is_row_major(optimizer.layout_of(parameter)):
            found[parameter] = optimizer.gathered_state(parameter)
            continue
        state, piece, first = optimizer.held_state(parameter)
        found[parameter] = entries = {}
        for key, (kind, dtype, shape) in described[number].items():
            if kind == VALUE:
                entries[key] = values.get(number, {}).get(key)
                continue
            held: tuple[torch.Tensor, ...] = ()
            if key in state and (kind == CUT or (piece is not None and first == 0)):
                held = (state[key],)
            parts = tuple((first, each.detach().resolve_conj().contiguous().reshape(-1)) for each in held)
            whole = tuple(parameter.shape) if kind == CUT else shape
            entries[key] = Sliced(getattr(torch, dtype), whole, parts, held, None, turn)
    return found


def _parameters(optimizer: Any) -> list[torch.Tensor]:
    return list({p: None for group in optimizer.param_groups for p in group["params"]})


def is_row_major(tensor: torch.Tensor) -> bool:
    """Return whether a run of its memory is a run of its bytes in the file."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


# our own: parameters ----------------------------------------------------------------------------------------------------


def engine_of(model: Any) -> Any:
    """The replica behind a wrapped module, or one that was fully sharded; None for any other."""
    wrapped = wrapper_of(model)
    return None if wrapped is None else wrapped._engine()


def fills_slices(replica: Any) -> bool:
    """Return whether a load can write each rank's slices of parameters: those that are released must be row-major."""
    memory = replica.parameters() if replica.zero else None
    if not isinstance(memory, ReleasedParameters):
        return bool(replica.zero)
    return all(is_row_major(memory.like(i)) for i in range(len(replica.table.parameters)) if memory.is_released(i))


@contextlib.contextmanager
def own_parameters(replica: Any) -> Iterator[dict[int, Sliced]]:
    """id(parameter) -> the slice that this rank may write, where fills_slices(); when it is left, every rank has all of them.
    Collective. What is not named, each rank has whole and writes itself."""
    memory = replica.parameters()
    slices = {}
    for index, parameter in enumerate(replica.table.parameters):
        is_released = isinstance(memory, ReleasedParameters) and memory.is_released(index)
        if is_released or (memory.is_published(index) and is_row_major(parameter)):
            low, high = memory.own_run(index)
            piece = memory.slice(index) if is_released else memory.flat(index)[low:high].detach()
            piece = parameter.new_empty(0) if piece is None else piece.detach()
            copy = torch.empty(piece.shape, dtype=piece.dtype, device="cpu") if cuda.runtime.holds(piece) else None
            held = (low, piece if copy is None else copy)
            live = parameter if copy is None and not is_released else piece
            slices[id(parameter)] = Sliced(parameter.dtype, tuple(parameter.shape), (held,), (live,), copy)
    with replica.writing():
        try:
            yield slices
        finally:  # of a load that failed, too: the others wait for it
            memory.publish_all()
            replica.count_writes(replica.table.parameters)


def held_bytes(model: torch.nn.Module, optimizer: Any, world_size: int) -> int:
    """About what this rank writes of model and optimizer: its slices, and its part of what all ranks hold."""
    slices, _ = released_slices(model)
    whole = sum(p.nbytes for p in model.parameters() if id(p) not in slices and not is_dtensor(p))
    own = sum(memory.nbytes for each in slices.values() for _, memory in each.parts)
    own += sum(p.to_local().nbytes for p in model.parameters() if is_dtensor(p))
    for state in [] if optimizer is None else optimizer.state.values():
        for value in state.values() if isinstance(state, Mapping) else ():
            if is_dtensor(value):
                own += value.to_local().nbytes
            elif isinstance(value, torch.Tensor) and isinstance(optimizer, ShardedOptimizer):
                own += value.nbytes
            elif isinstance(value, torch.Tensor):
                whole += value.nbytes
    return own + whole // world_size


def released_slices(model: Any) -> tuple[dict[int, Sliced], set[int]]:
    """(id(parameter) -> the slice that this rank holds, of parameters that are whole only while they are used; ids of those of them that
    can be saved whole alone, since they are not row-major)."""
    replica = engine_of(model)
    if replica is None or not replica.releases_parameters:
        return {}, set()
    memory, slicing = replica.parameters(), replica.slicing
    assert isinstance(memory, ReleasedParameters)
    turn = slicing.replica_of_rank[slicing.rank], max(slicing.replica_of_rank) + 1
    found, others = {}, set()
    for index, parameter in enumerate(replica.table.parameters):
        if not memory.is_released(index):
            continue
        if not is_row_major(memory.like(index)):
            others.add(id(parameter))
            continue
        piece, (low, _) = memory.slice(index), memory.own_run(index)
        parts = () if piece is None else ((low, piece.detach()),)
        live = () if piece is None else (piece,)
        found[id(parameter)] = Sliced(parameter.dtype, tuple(parameter.shape), parts, live, None, turn)
    return found, others
