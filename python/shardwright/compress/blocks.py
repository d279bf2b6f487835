"""Block-scaled integers on the wire: encode a bucket's parameters to records, fold and decode them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from .._engine import block_decode, block_encode, block_fold, block_is_finite, block_record_bytes
from ..comm.exchange import Exchange, check_place
from ..layout.bucket import share_of
from .state import CompressionState


class BlockState(CompressionState):
    """The state of int8_compress_hook and int4_compress_hook.

    Parameters
    ----------
    process_group : ProcessGroup or None
        None: the default group.
    bits : {8, 4}
    block : int
        Elements that share a scale: a multiple of 32 in [32, 4096]. ValueError for others, as for bits.
    error_feedback : bool
        Add the rounding error of a step to the next step, on the rank where it arose. The owner of a slice also takes
        the rounding error of the mean, times W: the sum over steps of applied means plus the ranks' mean error is that
        of the mean gradients. Costs a float32 an element. A value that is not finite leaves a bucket's error unchanged.
    named_parameters : iterable of (str, Parameter), optional
        Names for state_dict().
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
        self.bits, self.block, self.error_feedback = bits, block, error_feedback
        self._rest = torch.empty(0, dtype=torch.float32, device="cpu")
        super().__init__(process_group, named_parameters)

    def settings(self) -> dict[str, Any]:
        return {"bits": self.bits, "block": self.block, "error_feedback": self.error_feedback}

    def uses_entries(self) -> bool:
        return self.error_feedback

    def average(self, bucket: Any) -> torch.Tensor:
        buffer = bucket.buffer()
        check_place(self.exchange, buffer)
        flat = buffer if buffer.dtype == torch.float32 else buffer.float()
        spans, first = [], 0
        for gradient, parameter in self.members(bucket):
            offset = gradient.storage_offset() - buffer.storage_offset()
            error = None
            if self.error_feedback:
                error = self.entry(parameter, {"error": (gradient.numel(),)})[0]["error"]
            address, of_error = flat.data_ptr() + 4 * offset, 0 if error is None else error.data_ptr()
            spans.append(_Span(address, offset, gradient.numel(), first, error, of_error))
            first += -(-gradient.numel() // self.block)
        share, keeps_slice = share_of(bucket)
        owners = _owners(spans, first, self.exchange, share, keeps_slice, self.block)
        self._exchange_records(self.exchange, owners, keeps_slice)
        if flat is not buffer:
            buffer.copy_(flat)
        self.end_bucket(bucket.is_last())
        return buffer

    def _exchange_records(self, exchange: Exchange, owners: list[_Owner], keeps_slice: bool) -> None:
        size = self._record_bytes
        count = max(1, *(owner.end - owner.begin for owner in owners))
        message = exchange.begin(count * size)
        parts = [part for rank, owner in enumerate(owners) for part in owner.parts(rank * count, self.block)]
        base = message.data_ptr()
        for part in parts:
            block_encode(self.block, self.bits, base + part.at * size, part.address, part.error, part.numel)
        for rank, owner in enumerate(owners):  # pad with records of zeros
            message[(rank * count + owner.end - owner.begin) * size : (rank + 1) * count * size].zero_()
        # The message stays until the next begin(), so decoding may read it as "own".
        pieces, result = exchange.scatter(), exchange.result()
        if self.error_feedback and self._rest.numel() < count * self.block:
            self._rest = torch.empty(count * self.block, dtype=torch.float32, device="cpu")
        rest = self._rest[: count * self.block] if self.error_feedback else None
        places = [piece.data_ptr() for piece in pieces]
        rest_address = rest.data_ptr() if rest is not None else 0
        block_fold(self.block, self.bits, result.data_ptr(), places, count, 1.0 / exchange.world_size, rest_address)
        if keeps_slice:
            keep = self._take_slice(exchange, parts, result, base, count)
        else:
            keep = self._take_whole(exchange, parts, base, count)
        if keep and rest is not None:
            owners[exchange.rank].add_rest(rest.mul_(exchange.world_size), self.block)

    def _take_whole(self, exchange: Exchange, parts: list[_Part], base: int, count: int) -> bool:
        """Decode every owner's results. Return True if errors were updated."""
        size = self._record_bytes
        whole = exchange.gather().data_ptr()
        keep = self.error_feedback and block_is_finite(self.block, self.bits, whole, count * exchange.world_size)
        for part in parts:
            at = part.at * size
            error = part.error if keep else 0
            block_decode(self.block, self.bits, part.address, whole + at, error, base + at, part.numel)
        return keep

    def _take_slice(self, exchange: Exchange, parts: list[_Part], result: torch.Tensor, base: int, count: int) -> bool:
        """Decode only this rank's results. Return True if the errors of all parts were updated."""
        size, first = self._record_bytes, exchange.rank * count
        keep = exchange.agree(block_is_finite(self.block, self.bits, result.data_ptr(), count)) and self.error_feedback
        for part in parts:  # the decoded message replaces the gradient here; the result overwrites it below
            if keep and not part.is_copy:
                at = base + part.at * size
                block_decode(self.block, self.bits, part.address, at, part.error, at, part.numel)
        for part in parts:
            if first <= part.at < first + count:
                at = result.data_ptr() + (part.at - first) * size
                block_decode(self.block, self.bits, part.address, at, 0, 0, part.numel)
        return keep


class _Span(NamedTuple):
    """One parameter's run in a bucket: its address and first element, its first record, its error."""

    address: int
    offset: int
    numel: int
    first: int
    error: torch.Tensor | None
    error_address: int


class _Part(NamedTuple):
    """Consecutive records of one parameter in one owner's slice of the message."""

    at: int  # the number of the first record in the message
    address: int
    error: int
    numel: int
    is_copy: bool  # the previous owner also has this record


class _Owner:
    """The rank that folds records [begin, end), and owns those from `own` on; the previous rank owns the one before.

    A record belongs to the rank whose slice holds its first element. With kept slices, the rank whose slice begins
    inside a record folds it too.
    """

    def __init__(self, begin: int, own: int, end: int, spans: list[_Span]) -> None:
        self.begin, self.own, self.end = begin, own, end
        self._spans = spans

    def parts(self, place: int, block: int) -> Iterator[_Part]:
        """Yield the parts of a slice that begins at record `place` of the message."""
        for low, high in ((self.begin, self.own), (self.own, self.end)):
            for span in self._spans:
                begin = max(low, span.first)
                end = min(high, span.first + -(-span.numel // block))
                if begin < end:
                    skip = (begin - span.first) * block
                    numel = min((end - begin) * block, span.numel - skip)
                    error = span.error_address + 4 * skip if span.error_address else 0
                    at = place + begin - self.begin
                    yield _Part(at, span.address + 4 * skip, error, numel, low < self.own)

    def rests(self, block: int) -> Iterator[tuple[_Span, int, int, int]]:
        """Yield (span, begin, place, numel): elements that take rounding errors, from `place` behind `begin`."""
        for span in self._spans:
            start = span.first * block
            low, high = max(start, self.own * block), min(start + span.numel, self.end * block)
            if low < high and span.error is not None:
                yield span, low - start, low - self.begin * block, high - low

    def add_rest(self, rest: torch.Tensor, block: int) -> None:
        """Add the rounding error of the folds to the owner's error; `rest` covers the records from `begin` on."""
        for span, begin, place, numel in self.rests(block):
            assert span.error is not None
            span.error[begin : begin + numel] += rest[place : place + numel]


def _owners(
    spans: list[_Span], count: int, exchange: Exchange, share: int | None, keeps_slice: bool, block: int
) -> list[_Owner]:
    """Return the owners of `count` records: equal parts if the bucket does not know the ranks' slices."""
    world = exchange.world_size
    if share is None:
        each = max(1, -(-count // world))
        bounds = [min(rank * each, count) for rank in range(world + 1)]
        return [_Owner(low, low, high, spans) for low, high in zip(bounds, bounds[1:])]
    owners = []
    for rank in range(world):
        own = _first_record(spans, rank * share, count, block)
        begin = _record_across(spans, rank * share, own, block) if keeps_slice else own
        owners.append(_Owner(begin, own, _first_record(spans, (rank + 1) * share, count, block), spans))
    return owners


def _first_record(spans: list[_Span], element: int, count: int, block: int) -> int:
    """Return the first record that begins at `element` of the bucket or after it; it may be the next span's."""
    for span in spans:
        if element < span.offset + span.numel:
            return span.first + -(-max(element - span.offset, 0) // block)
    return count


def _record_across(spans: list[_Span], element: int, own: int, block: int) -> int:
    """Return the record that crosses `element`; `own` if there is none."""
    for span in spans:
        inside = element - span.offset
        if 0 < inside < span.numel and inside % block:
            return span.first + inside // block
    return own
