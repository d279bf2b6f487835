"""Tensors that are spread over ranks: who holds which bytes of them, and how a save gets by without a whole copy.

A slice is a run of a tensor's elements in row-major order, so a range of its bytes in the file. Blocks are written by the
rank that holds most of them, and what such a block lacks, the bytes on the far side of a cut, is exchanged once before the
snapshot. A load is the reverse, without an exchange: each rank reads its ranges.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from .._engine import CheckpointError
from ..optim.sharded import ShardedOptimizer, small_tensor
from ..torch_compat import cuda

Ranges = Sequence[tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class Sliced:
    """What one rank holds of a tensor.

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
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[tuple[int, torch.Tensor], ...]
    live: tuple[torch.Tensor, ...] = ()
    copy: torch.Tensor | None = None

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


def is_dtensor(tensor: Any) -> bool:
    return hasattr(tensor, "to_local") and hasattr(tensor, "placements")


def check_placements(name: str, tensor: Any) -> None:
    """Raises CheckpointError for a DTensor whose local part is no box of the whole."""
    known = {"Shard", "Replicate"}
    other = [p for p in tensor.placements if type(p).__name__ not in known]
    if other:
        raise CheckpointError(
            f"tensor '{name}' is a DTensor placed as {other[0]!r}: a checkpoint holds those of Shard and Replicate"
        )


def _local_box(tensor: Any) -> tuple[Sequence[int], Sequence[int]]:
    try:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    except ImportError:  # before torch 2.5
        from torch.distributed._tensor._utils import compute_local_shape_and_global_offset
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return shape, offsets


def slice_of_dtensor(tensor: Any, stays: Callable[[torch.Tensor], bool] = lambda _: False) -> Sliced:
    """The part of a DTensor that this rank holds; a copy of it where it is not plain memory, of the CPU's or of where it `stays`."""
    local = tensor.to_local().detach()
    shape, offsets = _local_box(tensor)
    memory = local.resolve_conj().resolve_neg()
    memory = (memory if stays(memory) else memory.cpu()).contiguous().reshape(tuple(shape))
    parts = parts_of_box(tuple(tensor.shape), offsets, memory)
    return Sliced(
        tensor.dtype, tuple(tensor.shape), parts, (local,), None if memory.data_ptr() == local.data_ptr() else memory
    )


def is_sliced(model: torch.nn.Module, optimizer: Any) -> bool:
    """Whether some of a training's state is spread over ranks. Alike on all of them."""
    return isinstance(optimizer, ShardedOptimizer) or any(is_dtensor(p) for p in model.parameters())


# our own: the optimizer -------------------------------------------------------------------------------------------------


def sliced_state(
    optimizer: ShardedOptimizer, tables: Sequence[Mapping[str, str]]
) -> dict[torch.Tensor, dict[str, Any]]:
    """Parameter -> its state, as far as this rank holds it, of describe_state() of all ranks.

    Parameters that are not row-major are gathered whole, one after the other: collective for those.
    """
    found: dict[torch.Tensor, dict[str, Any]] = {}
    for number, parameter in enumerate(_parameters(optimizer)):
        if not is_row_major(optimizer.layout_of(parameter)):
            found[parameter] = optimizer.gathered_state(parameter)
            continue
        texts = [table[str(number)] for table in tables if str(number) in table]
        if texts:
            found[parameter] = _values(optimizer, parameter, json.loads(texts[0]))
    return found


def describe_state(optimizer: ShardedOptimizer) -> dict[str, str]:
    """The number of a parameter -> what this rank's slice of it has for state; without those that it has none of."""
    described = {}
    for number, parameter in enumerate(_parameters(optimizer)):
        text, state, _ = optimizer.held_state(parameter)
        if state:
            described[str(number)] = text
    return described


def _values(optimizer: ShardedOptimizer, parameter: torch.Tensor, described: Mapping[str, Any]) -> dict[str, Any]:
    _, state, low = optimizer.held_state(parameter)
    values: dict[str, Any] = {}
    for key, (kind, dtype, value) in described.items():
        if kind == "sliced":
            held = (state[key],) if key in state else ()
            parts = tuple((low, each.detach().resolve_conj().contiguous().reshape(-1)) for each in held)
            values[key] = Sliced(getattr(torch, dtype), tuple(parameter.shape), parts, held)
        else:
            values[key] = small_tensor(value, dtype) if kind == "tensor" else value
    return values


def _parameters(optimizer: Any) -> list[torch.Tensor]:
    return list({p: None for group in optimizer.param_groups for p in group["params"]})


def is_row_major(tensor: torch.Tensor) -> bool:
    """Whether a run of its memory is a run of its bytes in the file."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


# our own: parameters ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def own_parameters(model: Any) -> Iterator[dict[int, Sliced]]:
    """id(parameter) -> the slice that this rank may write, at zero >= 1; when it is left, every rank has all of them.
    Collective. What is not named, each rank has whole and writes itself."""
    replica = model._engine()
    memory = replica.parameters()
    slices = {}
    for index, parameter in enumerate(replica.table.parameters):
        if memory.is_published(index) and is_row_major(parameter):
            low, high = memory.own_run(index)
            part = memory.flat(index)[low:high].detach()
            copy = torch.empty(part.shape, dtype=part.dtype, device="cpu") if cuda.runtime.holds(part) else None
            held = (low, part if copy is None else copy)
            live = parameter if copy is None else part
            slices[id(parameter)] = Sliced(parameter.dtype, tuple(parameter.shape), (held,), (live,), copy)
    with replica.writing():
        try:
            yield slices
        finally:  # of a load that failed, too: the others wait for it
            memory.publish()
            replica.count_writes(replica.table.parameters)


# who writes what --------------------------------------------------------------------------------------------------------


def merge_holdings(
    tables: Sequence[Sequence[tuple[int, Ranges]]], sizes: Mapping[int, int], names: Mapping[int, str]
) -> list[tuple[int, int, int, int]]:
    """(source, begin, nbytes, rank), ascending, each byte once, of every rank's [(source, [(begin, nbytes)])].

    Ranks that hold the same range take turns. CheckpointError where ranges overlap otherwise, or leave a hole.
    """
    holders: dict[int, dict[tuple[int, int], list[int]]] = {source: {} for source in sizes}
    for rank, table in enumerate(tables):
        for source, ranges in table:
            for begin, nbytes in ranges:
                holders[source].setdefault((begin, nbytes), []).append(rank)
    merged = []
    for source in sorted(holders):
        at = 0
        for (begin, nbytes), ranks in sorted(holders[source].items()):
            if begin != at:
                break
            merged.append((source, begin, nbytes, ranks[source % len(ranks)]))
            at += nbytes
        if at != sizes[source]:
            raise CheckpointError(f"no single rank holds byte {at} of '{names[source]}', which is spread over ranks")
    return merged
