"""Gradient views: tensors over the reducer's memory, each with a storage of exactly its own bytes.

A view has its parameter's strides if these are dense, else it is contiguous. Autograd gives gradients the parameter's
strides, so adding in place takes one pass.
"""

from __future__ import annotations

import warnings

import torch
from torch.utils.dlpack import from_dlpack

from .._engine import Reducer

_warned_of_sparse = False


def dtype_name(dtype: torch.dtype) -> str:
    """Return the engine's name of a dtype: "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the strides, in elements, if they are dense and do not overlap; else None."""
    if tensor.is_contiguous():
        return tuple(tensor.stride())
    expected = 1
    for stride, size in sorted((t, s) for s, t in zip(tensor.shape, tensor.stride()) if s != 1):
        if stride != expected:
            return None
        expected *= size
    return tuple(tensor.stride())


def gradient_view(parameter: torch.Tensor, reducer: Reducer, index: int) -> torch.Tensor:
    """Return a tensor of the parameter's shape over the reducer's memory of it, which it keeps alive."""
    shape, strides = list(parameter.shape), dense_strides(parameter)
    return from_dlpack(reducer.gradient(index, shape, None if strides is None else list(strides)))


def made_dense(gradient: torch.Tensor, *, warns: bool = True) -> torch.Tensor:
    """Return a strided gradient unchanged, a sparse one densified. `warns`: warn once per process about the latter."""
    global _warned_of_sparse
    if gradient.layout is torch.strided:
        return gradient
    if warns and not _warned_of_sparse:
        _warned_of_sparse = True
        warnings.warn(
            "a sparse gradient was made dense to be averaged: use sparse=False, which costs less, or sparse_gradients='dense'",
            stacklevel=2,
        )
    return gradient.to_dense()


def copy_gradient(view: torch.Tensor, gradient: torch.Tensor, *, warns: bool = True) -> None:
    """Copy a gradient of any layout, strides or dtype into a view, without autograd history."""
    with torch.no_grad():
        view.copy_(made_dense(gradient.detach(), warns=warns))


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return complex numbers as pairs of reals; any other tensor unchanged."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
