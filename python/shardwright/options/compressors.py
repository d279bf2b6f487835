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
from .checks import Check, among, count, switch
from .compress import KINDS, Compressor
from .names import offers_fields

#: name of the hook's parameter -> field of PowerSGD
POWERSGD_FIELDS = {
    "matrix_approximation_rank": "rank",
    "start_powerSGD_iter": "warmup_steps",
    "min_compression_rate": "min_compression_rate",
    "use_error_feedback": "error_feedback",
    "random_seed": "seed",
}


def _check_seed(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r}")


def _check_rate(name: str, value: Any) -> None:
    if not isinstance(value, (int, float)) or not value >= 0:
        raise ValueError(f"{name} must be a number of at least 0, got {value!r}")


_POWERSGD: dict[str, Check] = {
    "wire_dtype": among(torch.float32, torch.bfloat16, torch.float16),
    "error_dtype": among(torch.float32, torch.bfloat16),
    "use_error_feedback": switch,
    "warm_start": switch,
    "random_seed": _check_seed,
    "matrix_approximation_rank": count(1, 256, "in [1, 256]"),
    "start_powerSGD_iter": count(0, float("inf"), "an integer of at least 0"),
    "min_compression_rate": _check_rate,
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
        switch(f"{type(self).__name__}: error_feedback", self.error_feedback)


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
    """Gradients as matrices of low rank; the fields are those of hooks.PowerSGDState.

    `rank` is in [1, 256]. `warmup_steps` rounds at the start are averaged without compression. A matrix is compressed
    if (rows + columns) * rank * min_compression_rate < rows * columns. `wire_dtype`, of factors on the wire, is
    float32, bfloat16 or float16; `error_dtype`, of the memory between rounds, float32 or bfloat16.
    """

    rank: int = 4
    warmup_steps: int = 0
    min_compression_rate: float = 2
    error_feedback: bool = True
    seed: int = 0
    wire_dtype: torch.dtype = torch.float32
    error_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        given = {
            name: getattr(self, POWERSGD_FIELDS.get(name, name), True) for name in _POWERSGD
        }  # it has no warm_start
        check_powersgd(given, "PowerSGD", POWERSGD_FIELDS)


def check_powersgd(
    settings: Mapping[str, Any], kind: str = "PowerSGDState", names: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Raise for a setting of PowerSGDState out of range, by the class and the names that the user gave."""
    for name, check in _POWERSGD.items():
        check(f"{kind}: {names.get(name, name)}", settings[name])


#: the name of each compressor in files and on command lines -> the compressor
COMPRESSORS: dict[str, Compressor] = {
    each.lower(): made for each, made in zip(KINDS, (Fp16(), Bf16(), Int8(), Int4(), PowerSGD()), strict=True)
}


def compressor_named(option: str, name: Any) -> Any:
    """Return the compressor of a name; "auto" and what is no name are returned as they are."""
    if not isinstance(name, str) or name == "auto":
        return name
    if name not in COMPRESSORS:
        raise ValueError(f"{option} must be one of {', '.join(COMPRESSORS)} or auto, got {name!r}")
    return COMPRESSORS[name]
