"""Compressors for wrap(..., compress=...): formats that travel instead of float32 gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ._engine import block_record_bytes

if TYPE_CHECKING:  # implementations are loaded on first use
    from .compression_state import CompressionState
    from .exchange import Exchange
    from .powersgd import PowerSGDState

__all__ = ["Bf16", "Compressor", "Fp16", "Int4", "Int8", "PowerSGD"]

_Hook = Callable[[Any, Any], Any]


class Compressor:
    """The base of the compressors; all are frozen dataclasses, equal on all ranks."""

    def hook(self, exchange: Exchange) -> tuple[Any, _Hook]:
        """Return the state and the communication hook over `exchange`."""
        raise NotImplementedError


class _Half(Compressor):
    dtype: Any = None

    def hook(self, exchange: Exchange) -> tuple[Any, _Hook]:
        from .hooks import run_half

        dtype = self.dtype
        return exchange, lambda state, bucket: run_half(state, bucket, dtype)


@dataclasses.dataclass(frozen=True)
class Fp16(_Half):
    """float16 on the wire, see hooks.fp16_compress_hook."""

    dtype = torch.float16


@dataclasses.dataclass(frozen=True)
class Bf16(_Half):
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

    def hook(self, exchange: Exchange) -> tuple[Any, _Hook]:
        from .block_compression import BlockState
        from .hooks import int4_compress_hook, int8_compress_hook

        kind = BlockState
        if exchange.on_device:
            from .device_exchange import DeviceBlockState

            kind = DeviceBlockState
        state = kind(None, self.bits, self.block, self.error_feedback)
        state.use_exchange(exchange)
        return state, int8_compress_hook if self.bits == 8 else int4_compress_hook


@dataclasses.dataclass(frozen=True)
class Int8(_Block):
    """8-bit integers, one float32 scale a block of elements. See hooks.BlockState."""

    block: int = 256
    error_feedback: bool = False
    bits = 8


@dataclasses.dataclass(frozen=True)
class Int4(_Block):
    """4-bit integers, one float32 scale a block of elements. See hooks.BlockState."""

    block: int = 64
    error_feedback: bool = True
    bits = 4


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
    alternate : bool
        Take one exchange a bucket instead of two: P and Q alternate.
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
    alternate: bool = False
    wire_dtype: torch.dtype = torch.float32
    error_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        self._state()

    def _state(self, *, on_device: bool = False) -> PowerSGDState:
        from .powersgd import PowerSGDState

        kind = PowerSGDState
        if on_device:
            from .device_powersgd import DevicePowerSGDState

            kind = DevicePowerSGDState
        return kind(
            None,
            self.rank,
            start_powerSGD_iter=self.warmup_steps,
            min_compression_rate=self.min_compression_rate,
            use_error_feedback=self.error_feedback,
            random_seed=self.seed,
            alternate=self.alternate,
            wire_dtype=self.wire_dtype,
            error_dtype=self.error_dtype,
        )

    def hook(self, exchange: Exchange) -> tuple[Any, _Hook]:
        from .hooks import powerSGD_hook

        state: CompressionState = self._state(on_device=exchange.on_device)
        state.use_exchange(exchange)
        return state, powerSGD_hook


def check_compressor(compress: Any, reduce: str) -> None:
    """Raise TypeError or NotImplementedError with a sentence, before anything is created."""
    if compress is None or isinstance(compress, str) and compress == "auto":
        return
    if reduce != "mean":
        raise NotImplementedError(
            f"compress={compress} computes the mean over ranks: reduce must be 'mean', got {reduce!r}"
        )
    if not isinstance(compress, Compressor):
        raise TypeError(
            f"compress must be None, 'auto', sw.Fp16(), sw.Bf16(), sw.Int8(), sw.Int4() or sw.PowerSGD(), got {compress!r}"
        )
