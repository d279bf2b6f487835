"""The state and the hook of a compressor given to wrap()."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..comm.exchange import Exchange
from ..options.compress import Compressor
from ..options.compressors import Bf16, Fp16, Int4, Int8, PowerSGD
from . import hooks
from .blocks import BlockState
from .powersgd import PowerSGDState

__all__ = ["make_hook"]

_Hook = Callable[[Any, Any], Any]


def make_hook(compress: Compressor, exchange: Exchange) -> tuple[Any, _Hook]:
    """Return the state and the communication hook of a compressor over `exchange`."""
    if isinstance(compress, (Fp16, Bf16)):
        dtype = compress.dtype
        return exchange, lambda state, bucket: hooks.run_half(state, bucket, dtype)
    if isinstance(compress, (Int8, Int4)):
        return _make_blocks(compress, exchange)
    if isinstance(compress, PowerSGD):
        return _make_powersgd(compress, exchange)
    raise TypeError(f"{compress!r} is none of sw.Fp16, Bf16, Int8, Int4 and PowerSGD")


def _make_blocks(compress: Int8 | Int4, exchange: Exchange) -> tuple[Any, _Hook]:
    kind = BlockState
    if exchange.on_device:
        from .device_exchange import DeviceBlockState

        kind = DeviceBlockState
    state = kind(None, compress.bits, compress.block, compress.error_feedback)
    state.use_exchange(exchange)
    return state, hooks.int8_compress_hook if compress.bits == 8 else hooks.int4_compress_hook


def _make_powersgd(compress: PowerSGD, exchange: Exchange) -> tuple[Any, _Hook]:
    kind = PowerSGDState
    if exchange.on_device:
        from .device_powersgd import DevicePowerSGDState

        kind = DevicePowerSGDState
    state = kind(
        None,
        compress.rank,
        start_powerSGD_iter=compress.warmup_steps,
        min_compression_rate=compress.min_compression_rate,
        use_error_feedback=compress.error_feedback,
        random_seed=compress.seed,
        wire_dtype=compress.wire_dtype,
        error_dtype=compress.error_dtype,
    )
    state.use_exchange(exchange)
    return state, hooks.powerSGD_hook
