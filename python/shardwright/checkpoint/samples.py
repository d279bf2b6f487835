"""A check that replicated tensors are equal on all ranks, which compares a few cache lines of each.

One rank writes each block, so a checkpoint of ranks that diverged (gradients not averaged) would mix their values.
Reading all values would cost a pass over memory. Divergent training changes whole tensors, so samples suffice.
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
from .state.composed import apart
from .state.content import parameter_names
from .state.names import ModelTensors

_logger = logging.getLogger("shardwright")

Samples = dict[str, int]
_STRIDE = 1 << 20


def take_samples(found: ModelTensors, optimizer: Any) -> Samples:
    """Map names of plain CPU parameters, and of plain state of `optimizer`, to checksums. Rank 0 saves buffers."""
    named = ((name, t) for name, t in _named(found, optimizer) if _is_plain(t))
    return {name: sample_crc32c(t.data_ptr(), t.nbytes, _STRIDE) for name, t in named}


def _named(found: ModelTensors, optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from found.parameters.items()
    if optimizer is None:
        return
    names = parameter_names(optimizer, found)
    for parameter, values in optimizer.state.items():
        if isinstance(values, Mapping) and id(parameter) in names:
            for key, value in apart(values).items():
                if isinstance(value, torch.Tensor):
                    yield f"{key}.{names[id(parameter)]}", value


def _is_plain(tensor: torch.Tensor) -> bool:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return False  # a subclass may keep its values elsewhere
    on_cpu = tensor.is_cpu and not cuda.runtime.holds(tensor)
    return on_cpu and has_memory(tensor) and tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj())


def digest(samples: Samples) -> int:
    """Return one checksum over all samples."""
    return zlib.crc32(repr(sorted(samples.items())).encode("utf-8", "backslashreplace"))


def check_alike(samples_of_all: Sequence[Samples], *, is_averaged: bool) -> None:
    """Raise CheckpointError if samples differ between ranks. Log it if gradients are averaged: ranks differ by rounding alone."""
    seen: dict[str, tuple[int, int]] = {}
    each = ((rank, name, crc) for rank, samples in enumerate(samples_of_all) for name, crc in samples.items())
    odd = next(((rank, n, seen[n][0]) for rank, n, crc in each if seen.setdefault(n, (rank, crc))[1] != crc), None)
    if odd is None:
        return
    why = f"'{odd[1]}' has other values on rank {odd[0]} than on rank {odd[2]}"
    if not is_averaged:
        raise CheckpointError(
            f"{why}, and a checkpoint would mix them: average the gradients or broadcast rank 0's values, and pass state of "
            "each rank's own in dataloader=[...]"
        )
    _logger.warning("%s: the checkpoint mixes blocks of both", why)
