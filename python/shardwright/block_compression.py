"""Block-scaled integers on the wire: a bucket's parameters to records, their fold, and back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ._engine import block_decode, block_encode, block_fold, block_is_finite, block_record_bytes
from .compression_state import CompressionState
from .exchange import Exchange


class BlockState(CompressionState):
    """State of int8_compress_hook and int4_compress_hook.

    Parameters
    ----------
    process_group : ProcessGroup or None
        None: the default group.
    bits : {8, 4}
    block : int
        Elements that share a scale: a multiple of 32 in [32, 4096].
    error_feedback : bool
        What rounding left out of a step is added to the next one, on the rank where it was left out; the owner of a slice
        takes what rounding the mean left out, times W. So the sum over steps of what was applied and the ranks' mean error is
        the sum of the mean gradients. Costs a float32 an element. A bucket that is not finite anywhere leaves it as it was.
    named_parameters : iterable of (str, Parameter), optional
        Names for state_dict().

    Raises
    ------
    ValueError
        bits or block out of range.
    """

    def __init__(
        self,
        process_group: Any = None,
        bits: int = 8,
        block: int = 256,
        error_feedback: bool = False,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    ) -> None:
        self.kind = f"int{bits}"
        self._record_bytes = block_record_bytes(block, bits)
        self.bits = bits
        self.block = block
        self.error_feedback = error_feedback
        super().__init__(process_group, named_parameters)

    def settings(self) -> dict[str, Any]:
        return {"bits": self.bits, "block": self.block, "error_feedback": self.error_feedback}

    def uses_entries(self) -> bool:
        return self.error_feedback

    def average(self, bucket: Any) -> torch.Tensor:
        """The bucket's buffer, averaged in place."""
        buffer = bucket.buffer()
        flat = buffer if buffer.dtype == torch.float32 else buffer.float()
        spans, first = [], 0
        for gradient, parameter in self.members(bucket):
            offset = gradient.storage_offset() - buffer.storage_offset()
            error = None
            if self.error_feedback:
                error = self.entry(parameter, {"error": (gradient.numel(),)})[0]["error"]
            spans.append(_Span(flat, offset, gradient.numel(), first, error))
            first += -(-gradient.numel() // self.block)
        self._exchange_records(self.exchange, spans, first)
        if flat is not buffer:
            buffer.copy_(flat)
        self.end_bucket(bucket.is_last())
        return buffer

    def _exchange_records(self, exchange: Exchange, spans: list[_Span], count: int) -> None:
        world, size = exchange.world_size, self._record_bytes
        share = max(1, -(-count // world))
        message = exchange.begin(share * size)
        base = message.data_ptr()
        for span in spans:
            block_encode(self.block, self.bits, base + span.first * size, span.address, span.error_address, span.numel)
        message[count * size :].zero_()  # records of zeros
        # The message is overwritten by nobody before the next begin(): it is "own" below.
        pieces, result = exchange.scatter(), exchange.result()
        rest = torch.empty(share * self.block) if self.error_feedback else None
        block_fold(
            self.block,
            self.bits,
            result.data_ptr(),
            [piece.data_ptr() for piece in pieces],
            share,
            1.0 / world,
            rest.data_ptr() if rest is not None else 0,
        )
        whole = exchange.gather()
        keep = rest is not None and block_is_finite(self.block, self.bits, whole.data_ptr(), share * world)
        for span in spans:
            at = span.first * size
            error = span.error_address if keep else 0
            block_decode(self.block, self.bits, span.address, whole.data_ptr() + at, error, base + at, span.numel)
        if keep and rest is not None:
            _add_rest(spans, rest.mul_(world), exchange.rank * share * self.block, self.block)


class _Span:
    """One parameter's part of a bucket: floats, first record, error."""

    def __init__(self, flat: torch.Tensor, offset: int, numel: int, first: int, error: torch.Tensor | None) -> None:
        self.address = flat.data_ptr() + 4 * offset
        self.numel = numel
        self.first = first
        self.error = error
        self.error_address = error.data_ptr() if error is not None else 0


def _add_rest(spans: list[_Span], rest: torch.Tensor, begin: int, block: int) -> None:
    """rest covers elements [begin, begin + len) of the records' own count, in which span.first * block is a span's start."""
    for span in spans:
        start = span.first * block
        low, high = max(start, begin), min(start + span.numel, begin + rest.numel())
        if low < high and span.error is not None:
            span.error[low - start : high - start] += rest[low - begin : high - begin]
