"""The fold: contributions added in rank order in the accumulation dtype, scaled once, rounded once."""

from collections.abc import Sequence

import torch

#: accumulation dtypes that differ from the dtype itself
WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def fold(contributions: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """Return one tensor of the contributions' dtype and shape; `op` is "sum", "mean", "min" or "max"."""
    dtype = contributions[0].dtype
    if dtype.is_complex:  # an element is two reals
        parts = [torch.view_as_real(contribution.resolve_conj().contiguous()) for contribution in contributions]
        return torch.view_as_complex(fold(parts, op))
    accumulation = WIDER.get(dtype, dtype)
    total = contributions[0].to(accumulation, copy=True)
    for contribution in contributions[1:]:
        term = contribution.to(accumulation)
        if op in ("sum", "mean"):
            total = total + term
        else:
            total = torch.minimum(total, term) if op == "min" else torch.maximum(total, term)
    if op == "mean":
        total = total * torch.tensor(1 / len(contributions), dtype=accumulation)
    return total.to(dtype)


def bits_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Compare shape, dtype and bits; any NaN equals any other, +0 is not -0."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.dtype.is_complex:
        left, right = torch.view_as_real(left.contiguous()), torch.view_as_real(right.contiguous())
    left, right = left.reshape(-1), right.reshape(-1)
    left_bytes, right_bytes = (tensor.contiguous().view(torch.uint8) for tensor in (left, right))
    if torch.equal(left_bytes, right_bytes):
        return True
    same = (left_bytes.view(-1, left.itemsize) == right_bytes.view(-1, left.itemsize)).all(1)
    if left.dtype.is_floating_point:
        same |= left.isnan() & right.isnan()
    return bool(same.all())
