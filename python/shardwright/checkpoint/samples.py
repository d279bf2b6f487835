"""A check that what every rank holds alike is alike, by a few cache lines of each tensor.

A checkpoint has each block from one rank, so that ranks which drifted apart (plain modules whose gradients are not averaged) would be
mixed in it. Reading all values would cost a pass; training apart changes every tensor, and so the lines that are looked at.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from .._engine import CheckpointError, sample_crc32c
from ..layout.memory import has_memory
from ..torch_compat import cuda
from .content import parameter_names
from .names import ModelTensors

_logger = logging.getLogger("shardwright")

Samples = dict[str, int]
_STRIDE = 1 << 20


def take_samples(found: ModelTensors, optimizer: Any) -> Samples:
    """Name -> checksum, of parameters and of `optimizer`'s state (None: of parameters alone). Without buffers, which are rank 0's;
    without what is spread over ranks, on a GPU, not row-major, or of a class of its own."""
    return {
        name: sample_crc32c(t.data_ptr(), t.nbytes, _STRIDE) for name, t in _named(found, optimizer) if _is_plain(t)
    }


def _named(found: ModelTensors, optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from found.parameters.items()
    if optimizer is None:
        return
    names = parameter_names(optimizer, found)
    for parameter, values in optimizer.state.items():
        if isinstance(values, Mapping) and id(parameter) in names:
            for key, value in values.items():
                if isinstance(value, torch.Tensor):
                    yield f"{key}.{names[id(parameter)]}", value


def _is_plain(tensor: torch.Tensor) -> bool:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return False  # a class of its own keeps its values where it likes
    on_cpu = tensor.is_cpu and not cuda.runtime.holds(tensor)
    return on_cpu and has_memory(tensor) and tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj())


def digest(samples: Samples) -> int:
    """One number for all of them."""
    return zlib.crc32(repr(sorted(samples.items())).encode("utf-8", "backslashreplace"))


def first_apart(samples_of_all: Sequence[Samples]) -> str:
    """Return which tensor's sample is not the same on all ranks that have one; "": none's."""
    seen: dict[str, tuple[int, int]] = {}
    for rank, samples in enumerate(samples_of_all):
        for name, crc in samples.items():
            first, expected = seen.setdefault(name, (rank, crc))
            if crc != expected:
                return f"'{name}' has other values on rank {rank} than on rank {first}"
    return ""


def check_alike(samples_of_all: Sequence[Samples], *, is_averaged: bool) -> None:
    """Raises CheckpointError for a tensor whose sample is not the same on all ranks. Where a wrapper averages gradients, ranks can
    drift by roundings alone (processors that are not alike): then that is a line in the log."""
    apart = first_apart(samples_of_all)
    if apart and is_averaged:
        _logger.warning("%s: the checkpoint has some blocks of each", apart)
    elif apart:
        raise CheckpointError(
            f"{apart}, and a checkpoint would have some of each: ranks hold the same (average their gradients, or broadcast rank 0's "
            "values), or state that is a rank's own goes in dataloader=[...]"
        )
