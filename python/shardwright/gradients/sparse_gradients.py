"""Sparse gradients at zero=0 on the host: rows of an embedding are gathered, added in rank order, averaged, stay sparse.

**Idea.** The engine's buckets leave out parameters of sparse embeddings. At the end of each round every rank sends the
indices and values of its `.grad` in one exchange of bytes and builds the same coalesced mean, with the bits of the
dense fold.

**Alternatives.** Dense buckets move all rows; torch's sparse all-reduce adds in the order of its own exchange.

**Cost.** One exchange a round for all sparse parameters: W * nnz * (row bytes + 8) bytes reach each rank.

**How it fails.** A rank whose backward failed has abandoned the round, and the others raise there, before the exchange.
A dense gradient (from a dense use of the parameter) is sent as its nonzero rows, and the mean is dense on all ranks.
"""

from __future__ import annotations

import math
import struct
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from .._engine import Error, HostComm
from ..layout.bucket import Bucket
from ..layout.memory import bytes_of
from ..layout.param_table import ParameterTable
from ..torch_compat import autograd as _hooks
from .comm_hook import value_of

__all__ = ["SparseGradients", "find_sparse"]

_USED, _DENSE = 1, 2
#: flags, then the number of indices that follow
_HEAD = struct.Struct("<BQ")
_NO_GRADIENT: Any = types.SimpleNamespace(grad=None)
#: sums of halves are in float32, as in the engine's fold
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def find_sparse(module: torch.nn.Module, table: ParameterTable) -> frozenset[int]:
    """Return the indices of the trained parameters that only sparse embeddings use."""
    sparse: set[int] = set()
    dense: set[int] = set()
    for each in module.modules():
        is_sparse = isinstance(each, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and each.sparse
        (sparse if is_sparse else dense).update(id(p) for p in each._parameters.values() if p is not None)
    return frozenset(i for i, p in enumerate(table.parameters) if id(p) in sparse - dense and p.requires_grad)


class SparseGradients:
    """The gradients of a module's sparse parameters, and their exchange. `user_hook`: (state, hook) of a user, or None."""

    def __init__(self, table: ParameterTable, comm: HostComm, reducer: Any, reduce: str, label: str) -> None:
        self._parameters = {index: table.parameters[index] for index in sorted(table.sparse)}
        self._comm, self._reducer, self._label = comm, reducer, label
        self._is_mean = reduce == "mean"
        self._touched: set[int] = set()  # used since the last exchange
        #: True while a backward that does not synchronise runs
        self.is_local = False
        dense = [i for i, p in enumerate(table.parameters) if p.requires_grad and i not in table.sparse]
        self._open = reducer.hook(dense[0] if dense else min(table.sparse))
        self.user_hook: tuple[object, Callable[[Any, Any], Any]] | None = None

    def hook(self, index: int) -> Callable[[torch.Tensor], None]:
        """Return the post-accumulate-grad hook of a parameter."""
        announce, reference = self._reducer.open_round, weakref.ref(self)

        def on_gradient(_: torch.Tensor) -> None:
            alive = reference()
            if alive is None:
                return
            alive._touched.add(index)
            announce()
            if not alive.is_local:
                alive._open(_NO_GRADIENT)  # open the engine's round as any gradient does, without a contribution

        return on_gradient

    def use_all(self) -> None:
        """Mark every present gradient as a contribution to the next round."""
        self._touched.update(index for index, parameter in self._parameters.items() if parameter.grad is not None)

    @torch.no_grad()
    def exchange(self, *, contributes: bool = True) -> None:
        """Set `.grad` of each parameter that some rank used to the mean of all ranks' gradients. Collective."""
        mine = [self._pack(index, contributes) for index in self._parameters]
        gathered = self._gather(b"".join(mine))
        self._touched.clear()
        places = [0] * len(gathered)
        for position, parameter in enumerate(self._parameters.values()):
            flags, parts = 0, []
            for rank, data in enumerate(gathered):
                found, indices, values, places[rank] = _unpack(data, places[rank], parameter)
                flags |= found
                parts.append((indices, values))
            if flags & _USED:
                mean = self._mean(parameter, parts) if self.user_hook is None else self._by_hook(position, parameter)
                if contributes:
                    parameter.grad = mean.to_dense() if flags & _DENSE else mean

    def _gather(self, packed: bytes) -> list[bytes]:
        label = f"sparse gradients of {self._label}"
        if not _hooks.profiler_enabled():
            return self._comm.all_gather_bytes(packed, label)
        with _hooks.collective_range("all_gather", label, [(len(packed), torch.uint8)]):
            return self._comm.all_gather_bytes(packed, label)

    def _pack(self, index: int, contributes: bool) -> bytes:
        gradient = self._parameters[index].grad if contributes else None
        flags = _USED if contributes and index in self._touched else 0
        if gradient is None:
            return _HEAD.pack(flags, 0)
        if not gradient.is_sparse:
            flags |= _DENSE
        if self.user_hook is not None:  # the hook sends the gradient
            return _HEAD.pack(flags, 0)
        whole = as_sparse(gradient)
        values = bytes_of(whole.values())
        return _HEAD.pack(flags, whole.indices().shape[1]) + bytes_of(whole.indices()) + values

    def _mean(self, parameter: torch.Tensor, parts: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """Return the mean of (indices, values) of each rank, added in rank order."""
        places = torch.unique(torch.cat([indices for indices, _ in parts]))
        total = torch.zeros(
            (len(places), *parameter.shape[1:]), dtype=_WIDER.get(parameter.dtype, parameter.dtype), device="cpu"
        )
        for indices, values in parts:
            at = torch.searchsorted(places, indices)  # a rank's own indices are distinct
            total[at] += values.to(total.dtype)
        if self._is_mean:
            total *= torch.tensor(1 / self._reducer.divisor(), dtype=total.dtype, device="cpu")
        return torch.sparse_coo_tensor(
            places.unsqueeze(0).to(parameter.device),
            total.to(parameter.dtype).to(parameter.device),
            parameter.shape,
            is_coalesced=True,
            check_invariants=False,
        )

    def _by_hook(self, position: int, parameter: torch.Tensor) -> torch.Tensor:
        assert self.user_hook is not None
        state, hook = self.user_hook
        gradient = parameter.grad
        if gradient is None:
            gradient = torch.sparse_coo_tensor(
                torch.empty(1, 0, dtype=torch.int64, device=parameter.device),
                torch.empty(0, *parameter.shape[1:], dtype=parameter.dtype, device=parameter.device),
                parameter.shape,
                is_coalesced=True,
                check_invariants=False,
            )
        number, is_last = self._reducer.bucket_count + position, position == len(self._parameters) - 1
        bucket = Bucket(as_sparse(gradient), None, [parameter], number, is_last)
        result = value_of(hook(state, bucket))
        if result.shape != parameter.shape:
            raise Error(
                "the communication hook must return a Future of a sparse tensor of the parameter's shape for a sparse bucket"
            )
        return as_sparse(result)


def as_sparse(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient as a coalesced tensor of rows."""
    return (gradient.detach() if gradient.is_sparse else gradient.detach().to_sparse(1)).coalesce()


def _unpack(data: bytes, at: int, parameter: torch.Tensor) -> tuple[int, torch.Tensor, torch.Tensor, int]:
    """Return a rank's next parameter as (flags, indices, values, offset after them)."""
    flags, count = _HEAD.unpack_from(data, at)
    at += _HEAD.size
    row = math.prod(parameter.shape[1:])
    middle, end = at + 8 * count, at + count * (8 + row * parameter.element_size())
    if count == 0:
        return (
            flags,
            torch.empty(0, dtype=torch.int64, device="cpu"),
            parameter.new_empty(0, *parameter.shape[1:], device="cpu"),
            at,
        )
    indices = torch.frombuffer(bytearray(data[at:middle]), dtype=torch.int64)
    values = torch.frombuffer(bytearray(data[middle:end]), dtype=parameter.dtype).reshape(count, *parameter.shape[1:])
    return flags, indices, values, end
