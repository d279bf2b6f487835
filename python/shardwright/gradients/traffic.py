"""Bytes that a module's gradients send to peers: in all, a step, and a bucket of the last round."""

from __future__ import annotations

from typing import Any

import torch

from ..comm.exchange import Exchange

__all__ = ["wire_bytes"]


def wire_bytes(
    reducer: Any, world_size: int, slice_count: int, zero: int, compression: tuple[str, Exchange | None] | None
) -> dict[str, Any]:
    """Return the bytes that this rank sends; a compressor's exchange, if there is one, counts its own.

    Plain buckets fold in place: a rank reads W - 1 slices, and at zero 0 and 1 writes as many.
    """
    name, exchange = compression or ("", None)
    if exchange is not None:
        buckets, total = exchange.bucket_wire_bytes, exchange.wire_bytes
    else:
        counts = reducer.stats()
        shots = 1 if zero >= 2 else 2
        slices = slice_count if zero >= 2 else world_size
        shapes = [reducer.bucket_shape(bucket) for bucket in range(reducer.bucket_count)]
        sizes = [numel * (2 if compression else getattr(torch, dtype).itemsize) for _, numel, dtype, on in shapes if on]
        buckets = tuple(shots * (world_size - 1) * (size // slices) for size in sizes)
        total = shots * (world_size - 1) * (counts["bytes"] // slices)
        if compression:  # between GPUs: replaces wider dtypes
            total = sum(buckets) * counts["rounds"]
    row = {"wire_bytes": total, "step_wire_bytes": sum(buckets), "bucket_wire_bytes": buckets}
    return {"compress": name, **row} if compression else row
