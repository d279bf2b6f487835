"""Reads of whole tensors of a module, wherever the ranks keep their elements, into memory of one rank or of all.

On hosts a rank copies the slices of all others out of memory that it maps, or that its host has a copy of: no byte is
sent, and a rank that needs no values does nothing. On GPUs the owners of released parameters broadcast their slices.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..layout.memory import private_memory
from ..layout.shard_runs import memory_order
from ..layout.views import dense_strides
from ..torch_compat import cuda
from ..torch_compat.dtensor import is_dtensor
from .sharded_parameter import sharded_of

#: tensors in the memory of a Pool begin at multiples of it
_ALIGNMENT = 64


class Reads:
    """The parameters and buffers of a module, by tensor. `replicas`: those of its engine."""

    def __init__(self, replicas: Sequence[Any]) -> None:
        self._places = {id(p): (r, i) for r in replicas for i, p in enumerate(r.table.module_parameters)}
        #: True if reads of released parameters are collective
        self.sends = any(each.link is not None and each.releases_parameters for each in replicas)

    def place(self, tensor: torch.Tensor) -> tuple[Any, int]:
        """Return the replica of a parameter and its number there; (None, 0) for what each rank has by itself."""
        return self._places.get(id(tensor), (None, 0))

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the shape, strides and dtype of `tensor`, whose values must not be read."""
        replica, index = self.place(tensor)
        found: torch.Tensor = tensor if replica is None else replica.layout_of(index)
        return found

    def is_released(self, tensor: torch.Tensor) -> bool:
        """Return True if each rank has a slice alone."""
        replica, index = self.place(tensor)
        return replica is not None and replica.releases_parameters and bool(replica.parameters().is_released(index))

    def runs(self, tensor: torch.Tensor) -> list[tuple[int, int]]:
        """Return [low, high) in memory order of the elements that each rank owns; all are rank 0's outside of a replica."""
        replica, index = self.place(tensor)
        if replica is None:
            return [(0, tensor.numel())]
        storage = replica.parameters()
        return [storage.run(index, rank) for rank in range(replica.group.world_size)]

    def owner(self, tensor: torch.Tensor) -> int:
        """Return the first rank that owns the first element."""
        return next((rank for rank, (low, high) in enumerate(self.runs(tensor)) if low == 0 < high), 0)

    def own(self, tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
        """Return (first element, memory) of this rank's slice of a released parameter; it may be empty."""
        replica, index = self.place(tensor)
        low, _ = replica.parameters().own_run(index)
        piece = replica.parameters().slice(index)
        return low, self.like(tensor).new_empty(0) if piece is None else piece.detach()

    def read(self, tensor: torch.Tensor, out: torch.Tensor) -> None:
        """Copy all elements to flat `out`, in memory order and cast to its dtype. Not for released parameters of a GPU."""
        replica, index = self.place(tensor)
        if self.is_released(tensor):
            replica.parameters().read_whole(index, out)
        else:
            data = tensor.detach()
            out.copy_(memory_order(data, self.like(tensor)))

    def gather(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of whole tensors on every rank, flat. Collective over a GPU's ranks if some are released."""
        made = [flat_like(self.like(each)) for each in tensors]
        sends: dict[int, tuple[Any, dict[int, list[torch.Tensor]]]] = {}
        for tensor, out in zip(tensors, made):
            replica, _ = self.place(tensor)
            if not (self.is_released(tensor) and replica.link is not None):
                self.read(tensor, out)
                continue
            low, piece = self.own(tensor)
            out[low : low + piece.numel()] = piece
            roots = sends.setdefault(id(replica), (replica, {}))[1]
            for rank, (low, high) in enumerate(self.runs(tensor)):
                if low < high and replica.slicing.first_owner(replica.slicing.of_rank[rank]) == rank:
                    roots.setdefault(rank, []).append(out[low:high])
        for replica, roots in sends.values():
            for rank, parts in sorted(roots.items()):
                replica.backend.broadcast(parts, rank, f"whole parameters of {replica.label}")
        return made


def flat_like(like: torch.Tensor) -> torch.Tensor:
    """Return flat memory for the elements of `like`, where it lies."""
    if cuda.runtime.holds(like):
        return cuda.runtime.zeros(like.numel(), like.dtype, like)
    return torch.empty(like.numel(), dtype=like.dtype, device=like.device)


def shaped(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return flat elements in memory order with the shape and the strides of `like`."""
    strides = dense_strides(like)
    return flat.view(like.shape) if strides is None else flat.as_strided(like.shape, strides, flat.storage_offset())


def named_whole(module: torch.nn.Module, *, remove_duplicate: bool = True) -> dict[str, torch.Tensor]:
    """Return the parameters by name: of the DTensors of fully_shard the whole ones, whose values a Reads finds."""
    named = module.named_parameters(remove_duplicate=remove_duplicate)
    return {name: p if (cut := sharded_of(p)) is None or cut.whole is None else cut.whole for name, p in named}


def check_plain(named: Mapping[str, torch.Tensor], call: str) -> None:
    """Raise NotImplementedError for a DTensor, TypeError for a tensor without plain elements."""
    for name, each in named.items():
        if is_dtensor(each):
            raise NotImplementedError(f"{call}: {name!r} is a DTensor: use sw.full_state_dict")
        if torch.nn.parameter.is_lazy(each) or each.layout is not torch.strided or each.is_meta or each.is_quantized:
            raise TypeError(f"{call}: {name!r} has no plain elements: it is a {type(each).__name__} on {each.device}")


class Pool:
    """Memory of two chunks of `capacity` bytes, which take turns. A chunk of which the program keeps a tensor is left to it.

    Each tensor has a storage of its own, so a program may save or send one without the others.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity, self._memory = max(capacity, 1), list[mmap.mmap]()

    def take(self, needs: Sequence[tuple[int, torch.dtype]]) -> list[torch.Tensor]:
        """Return flat tensors of these numbers of elements and dtypes, with undefined contents."""
        places, size = [], 0
        for numel, dtype in needs:
            places.append(size)
            size += aligned(numel * dtype.itemsize)
        memory = self._free(size)
        return [
            torch.frombuffer(memory, dtype=dtype, count=numel, offset=at)
            if numel
            else torch.empty(0, dtype=dtype, device="cpu")
            for at, (numel, dtype) in zip(places, needs)
        ]

    def _free(self, size: int) -> mmap.mmap:
        probe = mmap.mmap(-1, 1)  # has as many references as memory without tensors
        *counts, free = [sys.getrefcount(each) for each in (*self._memory, probe)]
        held = [each for each, count in zip(self._memory, counts) if count > free]
        fits = [each for each, count in zip(self._memory, counts) if count <= free and len(each) >= size]
        made = fits[0] if fits else private_memory(max(size, self._capacity))
        self._memory = [*held[-1:], made]
        return made


def aligned(nbytes: int) -> int:
    """Return the bytes that a tensor takes in a Pool."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
