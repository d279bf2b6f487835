"""load_pretrained: a model's stored tensors into a wrapped module, each rank the elements that it keeps."""

from __future__ import annotations

from typing import Any

import torch

from .comm.waits import on_every_rank
from .options.name_map import Rename
from .options.names import offers_names
from .parallel.engine import needed_engine
from .parallel.loading import UnmatchedNames, fill_module

__all__ = ["UnmatchedNames", "load_pretrained"]


@offers_names
@on_every_rank("sw.load_pretrained()")
def load_pretrained(
    module: torch.nn.Module,
    place: Any,
    *,
    rename: Rename = None,
    dtype: torch.dtype | str | None = None,
    strict: bool = True,
) -> UnmatchedNames:
    """Load a model's weights into a wrapped module, at any stage and world size. Collective.

    Parameters
    ----------
    module : Module
        A wrapped module on the CPU, or below zero=3 on a GPU.
    place : str, path, mapping of str to Tensor, or iterable of (str, Tensor)
        A Hugging Face folder or a file of safetensors, or an fsspec address of one; a folder of sw.save; a folder of
        torch.distributed.checkpoint; a file of torch.save. Or pairs of name and whole tensor, which every rank passes
        alike and in the same order.
    rename : mapping of str to str, or callable, optional
        As for sw.load: regular expressions and replacements, or a function from a stored name to the module's.
    dtype : torch.dtype or str, optional
        Round floating-point values to it first, as from_pretrained(dtype=) does: a floating-point dtype, or the name
        "bfloat16", "float16" or "float32". Values are then cast to the dtype of the module's tensor.
    strict : bool
        True if a name that only one side has is an error. A tied parameter needs one of its names; several must have
        equal values.

    Returns
    -------
    UnmatchedNames
        (missing, unexpected): names of tensors that `place` lacks, which stay, and names that the module lacks.

    Raises
    ------
    Error
        Inside full_parameters(writable=True); for unmatched names, another shape, a dtype that cannot be cast, values
        that differ between ranks, or a place that a rank cannot read; every rank raises. Nothing has changed then,
        except for pairs, and for files that change, fail or are first compared while they are read.
    TypeError, ValueError
        For a `place` or `dtype` of another kind.
    NotImplementedError
        For released parameters on a GPU.

    Notes
    -----
    Of a DTensor each rank reads its slice of its shard. Extra state that `place` holds goes to set_extra_state(); a module keeps its own otherwise.

    Cost: at zero=3 each rank reads the bytes of its slices, or its part of what a host shares; below that all bytes. A
    cast needs 16 MiB; formats without ranges (torch.distributed.checkpoint) and parameters that are not row-major need
    one whole tensor. Our own folders' blocks are checked as they are read; safetensors have no checksums. Each rank reads
    another 32 KiB of each tensor, which ranks compare.
    """
    engine = needed_engine("load_pretrained", module)
    return fill_module(engine.module, list(engine.replicas), place, rename=rename, dtype=dtype, strict=strict)
