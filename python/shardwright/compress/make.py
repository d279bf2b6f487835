"""The state and the hook of a compressor given to wrap()."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..comm.exchange import Exchange
from ..options.compress import Compressor
from ..options.compressors import POWERSGD_FIELDS, Bf16, Fp16, Int4, Int8, PowerSGD
from . import hooks
from .blocks import BlockState
from .powersgd import PowerSGDState

_Hook = Callable[[Any, Any], Any]


def make_hook(compress: Compressor, exchange: Exchange) -> tuple[Any, _Hook]:
    """Return the state and the communication hook of a compressor over `exchange`."""
    if isinstance(compress, (Fp16, Bf16)):
        dtype = compress.dtype
        return exchange, lambda state, bucket: hooks.run_half(state, bucket, dtype)
    state: BlockState | PowerSGDState
    if isinstance(compress, (Int8, Int4)):
        blocks: type[BlockState] = BlockState
        if exchange.on_device:
            from .device_exchange import DeviceBlockState as blocks
        state = blocks(None, compress.bits, compress.block, compress.error_feedback)
        hook: _Hook = hooks.int8_compress_hook if compress.bits == 8 else hooks.int4_compress_hook
    elif isinstance(compress, PowerSGD):
        factors: type[PowerSGDState] = PowerSGDState
        if exchange.on_device:
            from .device_powersgd import DevicePowerSGDState as factors
        settings = {name: getattr(compress, field) for name, field in POWERSGD_FIELDS.items()}
        state = factors(None, wire_dtype=compress.wire_dtype, error_dtype=compress.error_dtype, **settings)
        hook = hooks.powerSGD_hook
    else:
        raise TypeError(f"{compress!r} is none of sw.Fp16, Bf16, Int8, Int4 and PowerSGD")
    state.use_exchange(exchange)
    return state, hook
