"""A user's communication hook in torch's protocol: torch's own hooks run unchanged.

Instead of the engine's fold, the hook gets each bucket at the end of the round, in order, as an object that answers
what torch.distributed.GradBucket answers, and returns a future of the result. Padding between parameters is zero.
Parameters that no rank used keep their bytes, whatever the hook does to the bucket.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from ._engine import Error, Reducer
from .gradients import dtype_name


class GradBucket:
    """What torch.distributed.GradBucket is to a hook."""

    def __init__(
        self,
        index: int,
        buffer: torch.Tensor,
        offsets: list[int],
        views: list[torch.Tensor],
        parameters: list[torch.Tensor],
        is_last: bool,
        used: list[bool],
    ) -> None:
        self._index = index
        self._buffer = buffer
        self._offsets = offsets
        self._views = views
        self._parameters = parameters
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
        return [self._buffer.as_strided(v.shape, v.stride(), base + o) for v, o in zip(self._views, self._offsets)]

    def parameters(self) -> list[torch.Tensor]:
        """The parameters, in the order of gradients()."""
        return self._parameters

    def is_last(self) -> bool:
        """Whether no bucket follows in this round."""
        return self._is_last

    def used(self) -> list[bool]:
        """Whether some rank used the parameter in this round, in the order of parameters(). torch's bucket has no such thing."""
        return self._used

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
    parameters, views : sequences of Tensor
        As attached to the reducer.
    state : object
        Passed to the hook.
    hook : callable
        `hook(state, bucket)` gives a Future of a tensor (or of a list of one), or the tensor itself.
    """

    def __init__(
        self,
        reducer: Reducer,
        parameters: tuple[torch.nn.Parameter, ...],
        views: list[torch.Tensor],
        state: object,
        hook: Callable[[Any, Any], Any],
    ) -> None:
        self._used_by_any = reducer.used_by_any
        self._state = state
        self._hook = hook
        self._buckets = [_Bucket(reducer, bucket, parameters, views) for bucket in range(reducer.bucket_count)]
        self._position = 0

    def __call__(self, bucket: int, is_last: bool) -> None:
        with torch.no_grad():
            self._run(self._buckets[bucket], is_last)
        self._position = 0 if is_last else self._position + 1

    def _run(self, bucket: _Bucket, is_last: bool) -> None:
        used = [self._used_by_any(index) for index in bucket.indices]
        kept = [(view, view.clone()) for view, is_used in zip(bucket.views, used) if not is_used]
        bucket.clear_padding()
        argument = GradBucket(
            self._position, bucket.flat, bucket.offsets, bucket.views, bucket.parameters, is_last, used
        )
        result = _value_of(self._hook(self._state, argument))
        if result.numel() != bucket.flat.numel():
            raise Error(
                f"the communication hook {_name(self._hook)} returned {result.numel()} elements "
                f"for a bucket of {bucket.flat.numel()}"
            )
        if result.data_ptr() != bucket.flat.data_ptr() or result.dtype != bucket.flat.dtype:
            bucket.flat.copy_(result.reshape(-1))
        for view, before in kept:
            view.copy_(before)


class _Bucket:
    """A bucket's memory as tensors, and what lies where."""

    def __init__(
        self, reducer: Reducer, bucket: int, parameters: tuple[torch.nn.Parameter, ...], views: list[torch.Tensor]
    ) -> None:
        self.indices = [i for i in reducer.bucket_parameters(bucket) if views[i].numel()]
        self._all_views = views  # the reducer's own list: a view that somebody keeps is replaced in it
        self.parameters: list[torch.Tensor] = [parameters[i] for i in self.indices]
        dtype = getattr(torch, reducer.bucket_dtype(bucket))
        if not self.views:
            self.flat, self.offsets = torch.empty(0, dtype=dtype), []
            return
        whole = from_dlpack(reducer.bucket(bucket))
        for view in self.views:
            if view.dtype != dtype:
                raise Error(f"a bucket of {dtype} holds a gradient of {dtype_name(view.dtype)}")
        self.offsets = [(v.data_ptr() - whole.data_ptr()) // v.element_size() for v in self.views]
        end = self.offsets[-1] + self.views[-1].numel()
        self.flat = whole[:end]
        ends = [o + v.numel() for o, v in zip(self.offsets, self.views)]
        self._gaps = [(a, b) for a, b in zip([0, *ends], self.offsets) if b > a]

    @property
    def views(self) -> list[torch.Tensor]:
        return [self._all_views[i] for i in self.indices]

    def clear_padding(self) -> None:
        for start, end in getattr(self, "_gaps", ()):
            self.flat[start:end].zero_()


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
