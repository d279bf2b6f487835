"""A user's communication hook in torch's protocol: torch's own hooks run unchanged.

The hook replaces the engine's fold. It gets each bucket in order, at the end of the round, as an object with the
methods of torch.distributed.GradBucket. It returns a future of the result. Padding between parameters is zero. Parameters that no rank used keep their bytes; the hook cannot change them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from .._engine import Error, Reducer
from ..layout.bucket import Bucket
from ..layout.shard_mesh import Slicing
from ..layout.views import dense_strides, dtype_name
from ..torch_compat import autograd as _hooks

#: slices begin at multiples of this (csrc/tensor/layout.h)
_SLICE_BYTES = 128


class HookRunner:
    """A runner that calls `hook(state, bucket)`, whose result is a tensor or a Future of one, for the buckets of a reducer.

    `like` has the parameters' shapes and strides. `is_ours`: the hook returns the mean over all ranks, which inside a join
    is multiplied by (all ranks / training ranks); a user's result is used unchanged.

    `pieces`, at zero >= 2 in a pool: this rank's slices of the averages, outside the buckets, which share slots. The hook
    leaves the average in the slot, and the owner adds its accumulated average. A user's hook computes whole results, in
    buckets of zero=0's length, since the order of its sums may depend on that. So do ours if a slice has several owners.
    """

    def __init__(
        self,
        reducer: Reducer,
        parameters: tuple[torch.nn.Parameter, ...],
        like: Sequence[torch.Tensor],
        slicing: Slicing,
        state: object,
        hook: Callable[[Any, Any], Any],
        *,
        pieces: Sequence[torch.Tensor] | None,
        is_ours: bool,
    ) -> None:
        self._reducer, self._slicing, self._pieces, self._is_ours = reducer, slicing, pieces, is_ours
        self._state, self._hook, self._world_size = state, hook, len(slicing.of_rank)
        keeps_slice = pieces is not None and is_ours and not slicing.is_replicated
        self._buckets = [
            _Bucket(reducer, bucket, parameters, like, self._world_size, pieces is not None, keeps_slice)
            for bucket in range(reducer.bucket_count)
        ]
        self._position = self._previous = -1

    @torch.no_grad()
    def __call__(self, bucket: int, is_last: bool) -> None:
        # an exception ended the last round early: this one starts at 0
        self._position = self._position + 1 if bucket > self._previous else 0
        self._previous = bucket
        it = self._buckets[bucket]
        self._average(it, self._position, is_last, [self._reducer.used_by_any(index) for index in it.indices])

    def _divide(self, flat: torch.Tensor) -> None:
        """Rescale means over all ranks to means over the ranks that train."""
        count = self._count()
        if count != self._world_size:
            flat.mul_(self._world_size / count)

    def _count(self) -> int:
        return self._reducer.divisor() if self._is_ours else self._world_size

    def _average(self, bucket: _Bucket, position: int, is_last: bool, used: list[bool]) -> None:
        flat, kept = bucket.flat(), []
        if self._pieces is None:
            parts = zip(used, bucket.offsets, bucket.parameters)
            kept = [(part := flat[o : o + p.numel()], part.clone()) for is_used, o, p in parts if not is_used]
        self._reduce(bucket, flat, position, is_last, used)
        self._divide(flat)
        for part, before in kept:
            part.copy_(before)
        if self._pieces is None:
            return
        begin = self._slicing.own * (bucket.numel // self._slicing.count)
        for index, offset, is_used in zip(bucket.indices, bucket.offsets, used):
            piece = self._pieces[index]
            if is_used and piece.numel():
                at, accumulated = max(begin, offset), self._reducer.accumulated_ranks(index) / self._count()
                if accumulated not in (0, 1):
                    piece.mul_(accumulated)
                (piece.add_ if accumulated else piece.copy_)(flat[at : at + piece.numel()])

    def _reduce(self, bucket: _Bucket, flat: torch.Tensor, position: int, is_last: bool, used: list[bool]) -> None:
        bucket.clear_padding(flat)
        places = [(*layout, offset) for layout, offset in zip(bucket.layouts, bucket.offsets)]
        slicing = bucket.slice_numel, bucket.keeps_slice
        given = Bucket(flat, places, bucket.parameters, position, is_last, used, *slicing)
        if _hooks.profiler_enabled():
            label = f"{_name(self._hook)}, bucket {position}"
            with _hooks.collective_range("comm_hook", label, [(flat.numel(), flat.dtype)]):
                result = value_of(self._hook(self._state, given))
        else:
            result = value_of(self._hook(self._state, given))
        if result.numel() != flat.numel():
            raise Error(
                f"the communication hook {_name(self._hook)} returned {result.numel()} elements "
                f"for a bucket of {flat.numel()}"
            )
        if result.data_ptr() != flat.data_ptr() or result.dtype != flat.dtype:
            flat.copy_(result.reshape(-1))


class _Bucket:
    """The positions of parameters in a bucket."""

    def __init__(
        self,
        reducer: Reducer,
        bucket: int,
        parameters: tuple[torch.nn.Parameter, ...],
        like: Sequence[torch.Tensor],
        world_size: int,
        in_slots: bool,
        keeps_slice: bool,
    ) -> None:
        self.indices = [i for i in reducer.bucket_parameters(bucket) if parameters[i].numel()]
        self.parameters: list[torch.Tensor] = [parameters[i] for i in self.indices]
        self.offsets = [reducer.place(i)[1] for i in self.indices]
        self.layouts = [(p.shape, dense_strides(p) or _contiguous_strides(p)) for p in (like[i] for i in self.indices)]
        self.keeps_slice, self._in_slots = keeps_slice, in_slots
        _, self.numel, name, _ = reducer.bucket_shape(bucket)
        dtype = getattr(torch, name)
        for parameter in self.parameters:
            if parameter.dtype != dtype:
                raise Error(f"a bucket of {dtype} holds a gradient of {dtype_name(parameter.dtype)}")
        ends = [o + p.numel() for o, p in zip(self.offsets, self.parameters)]
        # one slice for each rank, so that a compressor's bits do not depend on the owners
        self.slice_numel = _slice_numel(max(ends, default=0), world_size, dtype)
        self._end = self.numel if keeps_slice else max(ends, default=0)
        self._gaps = [(a, b) for a, b in zip([0, *ends], [*self.offsets, self._end]) if b > a]
        self._memory = reducer.bucket, bucket
        self._flat: torch.Tensor | None = None
        self._dtype = dtype

    def flat(self) -> torch.Tensor:
        """Return the whole bucket, one-dimensional, without the padding at its end if the whole result is needed."""
        if self._in_slots or self._flat is None:  # a slot may have moved
            get, bucket = self._memory
            self._flat = from_dlpack(get(bucket))[: self._end]
        return self._flat

    def clear_padding(self, flat: torch.Tensor) -> None:
        for start, end in self._gaps:
            flat[start:end].zero_()


def _slice_numel(numel: int, world_size: int, dtype: torch.dtype) -> int:
    """Return the elements of a slice in the engine's layout of a bucket of `numel` elements, one slice for each rank."""
    aligned = _SLICE_BYTES // dtype.itemsize
    return -(-numel // (world_size * aligned)) * aligned


def _contiguous_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").stride()


def value_of(result: Any) -> torch.Tensor:
    """Return the tensor of a hook's result, which may be a future or a list of one."""
    if hasattr(result, "wait"):  # a torch.futures.Future, its C++ object, or a Work's future
        result = result.wait()
    if isinstance(result, (list, tuple)) and len(result) == 1:
        result = result[0]
    if not isinstance(result, torch.Tensor):
        raise Error(f"a communication hook must return a Future of a tensor, got {type(result).__name__}")
    return result


def _name(hook: Callable[..., Any]) -> str:
    return getattr(hook, "__name__", type(hook).__name__)
