"""The state of a compressor given to wrap(), and its hook."""

from __future__ import annotations

from typing import Any

from .._engine import Codec
from ..options.compress import Compressor
from ..options.compressors import POWERSGD_FIELDS, Bf16, Fp16, Int4, Int8, PowerSGD
from .hooks import Halves
from .state import BlockState, CompressionState, PowerSGDState


def make_state(compress: Compressor, exchange: Any, device: Any = None) -> Halves | CompressionState:
    """Return the state of a compressor over `exchange`, or over the DeviceExchange `device`. state.codec compresses."""
    if isinstance(compress, (Fp16, Bf16)):
        return Halves(compress.dtype, exchange)
    state: BlockState | PowerSGDState
    blocks, factors = BlockState, PowerSGDState
    if device is not None:
        from .device_exchange import DeviceBlockState as blocks
        from .device_exchange import DevicePowerSGDState as factors
    if isinstance(compress, (Int8, Int4)):
        state = blocks(None, compress.bits, compress.block, compress.error_feedback)
    elif isinstance(compress, PowerSGD):
        settings = {name: getattr(compress, field) for name, field in POWERSGD_FIELDS.items()}
        state = factors(None, wire_dtype=compress.wire_dtype, error_dtype=compress.error_dtype, **settings)
    else:
        raise TypeError(f"{compress!r} is none of sw.Fp16, Bf16, Int8, Int4 and PowerSGD")
    state.use_exchange(exchange if device is None else device)
    return state


class CodecTraffic:
    """The bytes that this rank sends through the codec of a reducer."""

    def __init__(self, codec: Codec, reducer: Any) -> None:
        self._codec, self._reducer = codec, reducer

    @property
    def wire_bytes(self) -> int:
        """Return all bytes sent so far."""
        return self._codec.sent_bytes

    @property
    def bucket_wire_bytes(self) -> tuple[int, ...]:
        """Return those of the last round, by bucket."""
        shapes = ((b, self._reducer.bucket_shape(b)) for b in range(self._reducer.bucket_count))
        return tuple(self._codec.bucket_sent_bytes(b) for b, (*_, takes_part) in shapes if takes_part)
