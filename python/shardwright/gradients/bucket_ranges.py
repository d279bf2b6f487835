"""Ranges of a profiler around the averages of buckets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..torch_compat import autograd as _hooks

__all__ = ["BucketRanges"]


class BucketRanges:
    """The tracer of a reducer: a range for each bucket as it is posted, and as the end of a round waits for it.

    The thread that posts a bucket also folds it. Buckets are described at once: a tracer does not keep its reducer.
    """

    def __init__(self, reducer: Any, names: Sequence[str], op: str, label: str) -> None:
        self._op = op
        self._buckets: list[tuple[str, list[tuple[int, str]]]] = []
        for bucket in range(reducer.bucket_count):
            _, numel, dtype, _ = reducer.bucket_shape(bucket)
            inside = [names[index] for index in reducer.bucket_parameters(bucket)]
            span = inside[0] if len(inside) == 1 else f"{inside[0]} to {inside[-1]}"
            self._buckets.append((f"bucket {bucket} of {label}, {span}", [(numel, dtype)]))
        self._open: Any = None

    def __call__(self, bucket: int, what: str) -> None:
        """Begin a range ("begin", "wait"), or end the one that is open ("end")."""
        if what == "end":
            begun, self._open = self._open, None
            begun.__exit__(None, None, None)
            return
        op = self._op if what == "begin" else "wait"
        self._open = _hooks.collective_range(op, *self._buckets[bucket])
        self._open.__enter__()
