"""Compressors for wrap(..., compress=...): formats that travel instead of float32 gradients.

They only declare. compress/make.py makes the objects that compress.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from .._engine import block_record_bytes
from .compress import Compressor
from .names import offers_fields

__all__ = ["Bf16", "Fp16", "Int4", "Int8", "PowerSGD", "check_powersgd"]

_RANK_MAX = 256
_WIRE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ERROR_DTYPES = (torch.float32, torch.bfloat16)
#: name of the hook's parameter -> field of PowerSGD
_FIELDS = {
    "matrix_approximation_rank": "rank",
    "start_powerSGD_iter": "warmup_steps",
    "use_error_feedback": "error_feedback",
    "random_seed": "seed",
}


@dataclasses.dataclass(frozen=True)
class Fp16(Compressor):
    """float16 on the wire, see hooks.fp16_compress_hook."""

    dtype = torch.float16


@dataclasses.dataclass(frozen=True)
class Bf16(Compressor):
    """bfloat16 on the wire, see hooks.bf16_compress_hook."""

    dtype = torch.bfloat16


class _Block(Compressor):
    bits = 0
    block = 0
    error_feedback = False

    def __post_init__(self) -> None:
        if type(self.block) is not int:
            raise TypeError(f"{type(self).__name__}: block must be an integer, got {self.block!r}")
        block_record_bytes(self.block, self.bits)
        if not isinstance(self.error_feedback, bool):
            raise TypeError(f"{type(self).__name__}: error_feedback must be True or False, got {self.error_feedback!r}")


@offers_fields
@dataclasses.dataclass(frozen=True)
class Int8(_Block):
    """8-bit integers, one float32 scale a block of elements. See hooks.BlockState."""

    block: int = 256
    error_feedback: bool = False
    bits = 8


@offers_fields
@dataclasses.dataclass(frozen=True)
class Int4(_Block):
    """4-bit integers, one float32 scale a block of elements. See hooks.BlockState."""

    block: int = 64
    error_feedback: bool = True
    bits = 4


@offers_fields
@dataclasses.dataclass(frozen=True)
class PowerSGD(Compressor):
    """Gradients as matrices of low rank. See hooks.PowerSGDState.

    Parameters
    ----------
    rank : int
        In [1, 256].
    warmup_steps : int
        Rounds at the start that are averaged without compression.
    min_compression_rate : float
        A matrix is compressed if (rows + columns) * rank * rate < rows * columns.
    error_feedback : bool
    seed : int
    wire_dtype : torch.dtype
        The dtype of factors on the wire: float32, bfloat16 or float16.
    error_dtype : torch.dtype
        The dtype of the memory between rounds: float32 or bfloat16.
    """

    rank: int = 4
    warmup_steps: int = 0
    min_compression_rate: float = 2
    error_feedback: bool = True
    seed: int = 0
    wire_dtype: torch.dtype = torch.float32
    error_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        check_powersgd(
            self.rank,
            self.warmup_steps,
            self.min_compression_rate,
            self.error_feedback,
            True,
            self.seed,
            self.wire_dtype,
            self.error_dtype,
            "PowerSGD",
            _FIELDS,
        )


def check_powersgd(
    matrix_approximation_rank: Any,
    start_powerSGD_iter: Any,  # noqa: N803, torch's name
    min_compression_rate: Any,
    use_error_feedback: Any,
    warm_start: Any,
    random_seed: Any,
    wire_dtype: Any,
    error_dtype: Any,
    kind: str = "PowerSGDState",
    names: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raise TypeError or ValueError for a setting of PowerSGD that is out of range.

    `kind`, `names`: the class that the user called, and its names for the parameters where they differ from these.
    """

    def of(name: str) -> str:
        return f"{kind}: {names.get(name, name)}"

    for name, dtype, legal in (
        ("wire_dtype", wire_dtype, _WIRE_DTYPES),
        ("error_dtype", error_dtype, _ERROR_DTYPES),
    ):
        if dtype not in legal:
            raise ValueError(f"{of(name)} must be one of {', '.join(map(str, legal))}, got {dtype!r}")
    for name, value in (("use_error_feedback", use_error_feedback), ("warm_start", warm_start)):
        if not isinstance(value, bool):
            raise TypeError(f"{of(name)} must be True or False, got {value!r}")
    if isinstance(random_seed, bool) or not isinstance(random_seed, int):
        raise TypeError(f"{of('random_seed')} must be an integer, got {random_seed!r}")
    if type(matrix_approximation_rank) is not int or not 1 <= matrix_approximation_rank <= _RANK_MAX:
        raise ValueError(
            f"{of('matrix_approximation_rank')} must be in [1, {_RANK_MAX}], got {matrix_approximation_rank!r}"
        )
    if type(start_powerSGD_iter) is not int or start_powerSGD_iter < 0:
        raise ValueError(f"{of('start_powerSGD_iter')} must be an integer of at least 0, got {start_powerSGD_iter!r}")
    if not isinstance(min_compression_rate, (int, float)) or not min_compression_rate >= 0:
        raise ValueError(f"{of('min_compression_rate')} must be a number of at least 0, got {min_compression_rate!r}")
