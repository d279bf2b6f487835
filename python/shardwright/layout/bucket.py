"""One bucket with the methods of torch.distributed.GradBucket, for hooks of users and compressors of ours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

#: shape, strides and first element of a gradient in its bucket
Place = tuple[Sequence[int], Sequence[int], int]


class Bucket:
    """Gradients in one flat buffer, each in its `places`; None: `flat` itself is the gradient, which may be sparse."""

    def __init__(
        self,
        flat: torch.Tensor,
        places: Sequence[Place] | None,
        parameters: list[torch.Tensor],
        index: int = 0,
        is_last: bool = True,
        used: list[bool] | None = None,
        slice_numel: int | None = None,
        keeps_slice: bool = False,
    ) -> None:
        self._flat, self._places, self._parameters, self._used = flat, places, parameters, used
        self._index, self._is_last, self._slice = index, is_last, (slice_numel, keeps_slice)

    @classmethod
    def over(cls, flat: torch.Tensor, bucket: Any, places: Sequence[Place], *slicing: Any) -> Bucket:
        """Return `bucket`, ours or torch's, with other memory and slices."""
        facts = bucket.index(), bucket.is_last(), used_in(bucket)
        return cls(flat, places, list(bucket.parameters()), *facts, *slicing)

    def index(self) -> int:
        """Return the position of the bucket in the round, from 0. Sparse ones are behind all others."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """Return the whole bucket, one-dimensional: this rank's contributions, not divided. A hook may write to it."""
        return self._flat

    def gradients(self) -> list[torch.Tensor]:
        """Return one view of buffer() for each parameter, in its shape."""
        if self._places is None:
            return [self._flat]
        base = self._flat.storage_offset()
        return [self._flat.as_strided(shape, strides, base + first) for shape, strides, first in self._places]

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters, in the order of gradients()."""
        return self._parameters

    def is_last(self) -> bool:
        """Return True if no bucket follows in this round."""
        return self._is_last

    def used(self) -> list[bool]:
        """Return, for each of parameters(), True if some rank used it in this round."""
        return self._used or [True] * len(self._parameters)

    def slice_numel(self) -> int | None:
        """Return the elements of each rank's slice of the bucket, if ranks own slices."""
        return self._slice[0]

    def keeps_slice(self) -> bool:
        """Return True if only this rank's slice of buffer() needs the result."""
        return self._slice[1]

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replace buffer() by a tensor of the same number of elements."""
        if buffer.numel() != self._flat.numel():
            raise ValueError(f"set_buffer needs {self._flat.numel()} elements, got {buffer.numel()}")
        self._flat = buffer


def places_of(gradients: Iterable[torch.Tensor], flat: torch.Tensor) -> list[Place]:
    """Return the places of views in `flat`."""
    return [(each.shape, each.stride(), int(each.storage_offset() - flat.storage_offset())) for each in gradients]


def used_in(bucket: Any) -> list[bool] | None:
    """Return used() of a bucket; None if it is torch's, which does not know."""
    return bucket.used() if hasattr(bucket, "used") else None


def share_of(bucket: Any) -> tuple[int | None, bool]:
    """Return (elements of a rank's slice of a bucket, or None if unknown; True if only that slice is needed)."""
    return (bucket.slice_numel(), bucket.keeps_slice()) if hasattr(bucket, "slice_numel") else (None, False)


def real_bucket(bucket: Any) -> Any:
    """Return `bucket`, or a view of it as real numbers if it is complex, for compressors."""
    if not bucket.buffer().is_complex():
        return bucket
    flat = torch.view_as_real(bucket.buffer()).view(-1)
    places, (share, keeps_slice) = places_of(map(torch.view_as_real, bucket.gradients()), flat), share_of(bucket)
    return Bucket.over(flat, bucket, places, share and 2 * share, keeps_slice)
