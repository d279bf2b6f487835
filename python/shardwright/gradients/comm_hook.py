"""A user's communication hook in torch's protocol: torch's own hooks run unchanged.

Instead of the engine's fold, the hook gets each bucket at the end of the round (or earlier, on a thread: gradients/comm_thread.py), in
order, as an object that answers what torch.distributed.GradBucket answers, and returns a future of the result. Padding between parameters is zero.
Parameters that no rank used keep their bytes, whatever the hook does to the bucket.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from .._engine import Error, Reducer
from ..layout.shard_mesh import Slicing
from ..layout.views import dense_strides, dtype_name

#: cuts lie on such boundaries (csrc/tensor/layout.h)
_SLICE_BYTES = 128


class GradBucket:
    """What torch.distributed.GradBucket is to a hook, and, for hooks of our own, what a bucket of ours knows besides."""

    def __init__(self, bucket: _Bucket, flat: torch.Tensor, index: int, is_last: bool, used: list[bool]) -> None:
        self._bucket = bucket
        self._buffer = flat
        self._index = index
        self._is_last = is_last
        self._used = used

    def index(self) -> int:
        """Position of the bucket in the round, from 0."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """The whole bucket, one-dimensional: this rank's contributions, not divided. Written in place as one likes."""
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        """Views of buffer(), one a parameter, of its shape."""
        base = self._buffer.storage_offset()
        return [
            self._buffer.as_strided(*layout, base + o) for layout, o in zip(self._bucket.layouts, self._bucket.offsets)
        ]

    def parameters(self) -> list[torch.Tensor]:
        """The parameters, in the order of gradients()."""
        return self._bucket.parameters

    def is_last(self) -> bool:
        """Whether no bucket follows in this round."""
        return self._is_last

    def used(self) -> list[bool]:
        """Whether some rank used the parameter in this round, in the order of parameters(). torch's bucket has no such thing."""
        return self._used

    def slice_numel(self) -> int:
        """Elements of each rank's slice of the bucket. torch's bucket has no such thing."""
        return self._bucket.slice_numel

    def keeps_slice(self) -> bool:
        """Whether the result is wanted in this rank's slice of buffer() alone. torch's bucket has no such thing."""
        return self._bucket.keeps_slice

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replaces buffer(), by one of the same number of elements."""
        if buffer.numel() != self._buffer.numel():
            raise ValueError(f"set_buffer needs {self._buffer.numel()} elements, got {buffer.numel()}")
        self._buffer = buffer


class HookRunner:
    """Runs `hook(state, bucket)` for the buckets of a reducer.

    Parameters
    ----------
    reducer : Reducer
    parameters : sequence of Parameter
        As attached to the reducer.
    like : sequence of Tensor
        Tensors with their shapes and strides: a parameter may be released.
    world_size : int
    state : object
        Passed to the hook.
    hook : callable
        `hook(state, bucket)` gives a Future of a tensor (or of a list of one), or the tensor itself.
    wanted : Wanted
    over_all : bool
        The hook gives the mean over all ranks, whatever was asked for: it is multiplied by all ranks over those that count
        (join). Else what it gives is taken as it is.
    """

    def __init__(
        self,
        reducer: Reducer,
        parameters: tuple[torch.nn.Parameter, ...],
        like: Sequence[torch.Tensor],
        world_size: int,
        state: object,
        hook: Callable[[Any, Any], Any],
        wanted: Wanted | None = None,
        *,
        over_all: bool = False,
    ) -> None:
        self._used_by_any = reducer.used_by_any
        self._divisor, self._world_size = reducer.divisor, world_size
        self._over_all = over_all
        self._state = state
        self._hook = hook
        self._buckets = [
            _Bucket(reducer, bucket, parameters, like, world_size, wanted or Wanted())
            for bucket in range(reducer.bucket_count)
        ]
        self._position = self._previous = -1

    def __call__(self, bucket: int, is_last: bool, is_early: bool = False) -> None:
        self.job(bucket, is_last, is_early)()

    def job(self, bucket: int, is_last: bool, is_early: bool) -> Callable[[], None]:
        """What the hook is to do with a bucket, of its place in the round as jobs are asked for, by whatever thread.

        `is_early`: before ranks have said what they used, since this one used all of it.
        """
        # a round that an exception cut short is followed by one that begins again
        self._position = self._position + 1 if bucket > self._previous else 0
        self._previous = bucket
        it = self._buckets[bucket]
        used = [True] * len(it.indices) if is_early else [self._used_by_any(index) for index in it.indices]
        return functools.partial(self._average, it, self._position, is_last, used, is_early)

    def finish_early(self, buckets: Iterable[int]) -> None:
        """Of buckets averaged before ranks have said whether they count: at the end of the round."""
        for bucket in buckets:
            self._divide(self._buckets[bucket].flat())

    def _divide(self, flat: torch.Tensor) -> None:
        """Means over all ranks become means over those that count."""
        count = self._count()
        if count != self._world_size:
            flat.mul_(self._world_size / count)

    def _count(self) -> int:
        """Ranks that the mean is over."""
        return self._divisor() if self._over_all else self._world_size

    @torch.no_grad()
    def _average(self, bucket: _Bucket, position: int, is_last: bool, used: list[bool], is_early: bool = False) -> None:
        flat = bucket.flat()
        parts = zip(used, bucket.offsets, bucket.parameters)
        kept = [(part := flat[o : o + p.numel()], part.clone()) for is_used, o, p in parts if not is_used]
        self._reduce(bucket, flat, position, is_last, used)
        if not is_early:
            self._divide(flat)
        for part, before in kept:
            part.copy_(before)

    def _reduce(self, bucket: _Bucket, flat: torch.Tensor, position: int, is_last: bool, used: list[bool]) -> None:
        bucket.clear_padding(flat)
        result = _value_of(self._hook(self._state, GradBucket(bucket, flat, position, is_last, used)))
        if result.numel() != flat.numel():
            raise Error(
                f"the communication hook {_name(self._hook)} returned {result.numel()} elements "
                f"for a bucket of {flat.numel()}"
            )
        if result.data_ptr() != flat.data_ptr() or result.dtype != flat.dtype:
            flat.copy_(result.reshape(-1))


class SlicedHookRunner(HookRunner):
    """The same where a rank keeps its slices of the averages apart from the buckets (zero >= 2, in a pool).

    A bucket is then a slot that others use too; the hook leaves the average in this rank's slice of it, and it goes on from
    there. A contribution on top of a standing average came without it: the owner adds its share of that to the result.
    A user's hook is asked for the whole result, in buckets of the length that they have at zero=0: the order in which its collectives add may
    depend on that. So is ours where a slice has several owners (a mesh of two dimensions): it knows one owner a slice.
    """

    def __init__(
        self,
        reducer: Reducer,
        parameters: tuple[torch.nn.Parameter, ...],
        like: Sequence[torch.Tensor],
        slicing: Slicing,
        pieces: list[torch.Tensor],
        state: object,
        hook: Callable[[Any, Any], Any],
        wanted: Wanted,
        *,
        over_all: bool = False,
    ) -> None:
        super().__init__(reducer, parameters, like, len(slicing.of_rank), state, hook, wanted, over_all=over_all)
        self._standing_ranks = reducer.standing_ranks
        self._pieces = pieces
        self._slicing = slicing

    @torch.no_grad()
    def _average(self, bucket: _Bucket, position: int, is_last: bool, used: list[bool], is_early: bool = False) -> None:
        flat = bucket.flat()
        self._reduce(bucket, flat, position, is_last, used)
        self._divide(flat)
        begin = self._slicing.own * (bucket.numel // self._slicing.count)
        for index, offset, is_used in zip(bucket.indices, bucket.offsets, used):
            piece = self._pieces[index]
            if is_used and piece.numel():
                at = max(begin, offset)
                self._keep(piece, flat[at : at + piece.numel()], self._standing_ranks(index) / self._count())

    @staticmethod
    def _keep(piece: torch.Tensor, average: torch.Tensor, standing: float) -> None:
        if standing == 0:
            piece.copy_(average)
        elif standing == 1:
            piece.add_(average)
        else:
            piece.mul_(standing).add_(average)


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Of a bucket's result: where it lies, and how much of it counts.

    Attributes
    ----------
    in_slots : bool
        Buckets lie in slots, which others use too: where one lies is asked anew each time.
    slice_alone : bool
        This rank's slice of the result is enough.
    """

    in_slots: bool = False
    slice_alone: bool = False


class _Bucket:
    """What lies where in a bucket."""

    def __init__(
        self,
        reducer: Reducer,
        bucket: int,
        parameters: tuple[torch.nn.Parameter, ...],
        like: Sequence[torch.Tensor],
        world_size: int,
        wanted: Wanted,
    ) -> None:
        self.indices = [i for i in reducer.bucket_parameters(bucket) if parameters[i].numel()]
        self.parameters: list[torch.Tensor] = [parameters[i] for i in self.indices]
        self.offsets = [reducer.place(i)[1] for i in self.indices]
        self.layouts = [(p.shape, dense_strides(p) or _contiguous_strides(p)) for p in (like[i] for i in self.indices)]
        self.keeps_slice = wanted.slice_alone
        self._in_slots = wanted.in_slots
        _, self.numel, name, _ = reducer.bucket_shape(bucket)
        dtype = getattr(torch, name)
        for parameter in self.parameters:
            if parameter.dtype != dtype:
                raise Error(f"a bucket of {dtype} holds a gradient of {dtype_name(parameter.dtype)}")
        ends = [o + p.numel() for o, p in zip(self.offsets, self.parameters)]
        # as if every rank had a slice of its own: a compressor's bits do not depend on who keeps what
        self.slice_numel = _slice_numel(max(ends, default=0), world_size, dtype)
        self._end = self.numel if wanted.slice_alone else max(ends, default=0)
        self._gaps = [(a, b) for a, b in zip([0, *ends], [*self.offsets, self._end]) if b > a]
        self._memory = reducer.bucket, bucket
        self._flat: torch.Tensor | None = None
        self._dtype = dtype

    def flat(self) -> torch.Tensor:
        """All of it, one-dimensional; without the padding at its end where the whole result is wanted."""
        if self._in_slots or self._flat is None:  # a slot may have moved
            get, bucket = self._memory
            self._flat = from_dlpack(get(bucket))[: self._end]
        return self._flat

    def clear_padding(self, flat: torch.Tensor) -> None:
        for start, end in self._gaps:
            flat[start:end].zero_()


def _slice_numel(numel: int, world_size: int, dtype: torch.dtype) -> int:
    """Elements of a slice, as the engine's layout cuts a bucket of `numel` into one a rank."""
    aligned = _SLICE_BYTES // dtype.itemsize
    return -(-numel // (world_size * aligned)) * aligned


def _contiguous_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta").stride()


def _value_of(result: Any) -> torch.Tensor:
    if hasattr(result, "wait"):  # torch.futures.Future, or the C++ one beneath it, or a Work's
        result = result.wait()
    if isinstance(result, (list, tuple)) and len(result) == 1:
        result = result[0]
    if not isinstance(result, torch.Tensor):
        raise Error(f"a communication hook must return a Future of a tensor, got {type(result).__name__}")
    return result


def _name(hook: Callable[..., Any]) -> str:
    return getattr(hook, "__name__", type(hook).__name__)
