"""The two-step exchange of encoded slices between GPUs, and blocks over it (PowerSGD: compress/device_powersgd.py).

A message has world_size equal slices. In the first step every rank gets its own slice of all messages and folds them,
in rank order; in the second all ranks get all results. Everything is enqueued: arithmetic on torch's current stream,
collectives on the communicator's, and each waits for the other. The host reads no message; where the CPU decides
whether errors are kept, kernels read a verdict in GPU memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch

from .._engine import (
    block_record_bytes,
    device_block_decode,
    device_block_encode,
    device_block_fold,
    device_block_owe,
    device_block_verdict,
    device_cast,
    device_fold,
)
from ..backend.device_link import DeviceLink
from ..layout.bucket import share_of, used_in
from ..layout.views import dtype_name
from ..torch_compat import cuda
from .blocks import BlockState
from .state import CompressionState

_ALIGNMENT = 64


class DeviceExchange:
    """An exchange over the communicator of a link. `like`: any tensor on its GPU.

    begin() returns the message to fill, scatter() the W pieces to fold, result() the memory for the fold, gather() the whole
    result. Memory stays valid until the next begin(), or gather(). Every rank makes the same calls. `wire_bytes` counts what
    this rank has sent to peers, `bucket_wire_bytes` by bucket of the last round.
    """

    takes_part = True

    def __init__(self, link: DeviceLink, like: torch.Tensor) -> None:
        self.link, self.rank, self.world_size = link, link.rank, link.world_size
        self.wire_bytes = 0
        self.bucket_wire_bytes: tuple[int, ...] = ()
        self._before_bucket = self._slice_bytes = 0
        self._buckets: list[int] = []
        self._like = like.detach().new_empty(0)
        self._sent = self._received = self._whole = self._like

    def begin_round(self) -> None:
        """Forget the buckets of an unfinished round."""
        self._before_bucket, self._buckets = self.wire_bytes, []

    def end_bucket(self, is_last: bool) -> None:
        """Attribute bytes sent since the last call to this bucket."""
        self._buckets.append(self.wire_bytes - self._before_bucket)
        self._before_bucket = self.wire_bytes
        if is_last:
            self.bucket_wire_bytes, self._buckets = tuple(self._buckets), []

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory on the GPU that collectives may use."""
        return cuda.runtime.zeros(numel, dtype, self._like)

    def begin(self, slice_bytes: int) -> torch.Tensor:
        """Return the message: uint8, world_size slices of slice_bytes. Its contents are undefined."""
        self._slice_bytes, size = slice_bytes, slice_bytes * self.world_size
        if self._sent.numel() < size:  # the streams have synchronised since a collective used the old tensors
            self._whole, self._sent, self._received = (self.zeros(size, torch.uint8) for _ in range(3))
        return self._sent[:size]

    def scatter(self) -> list[torch.Tensor]:
        """Return this rank's slice of every rank's message, in rank order."""
        slice_bytes, own = self._slice_bytes, self.rank
        size = slice_bytes * self.world_size
        self.wire_bytes += size - slice_bytes
        message, received = self._sent[:size], self._received[:size]
        self.link.comm.exchange((message.data_ptr(), size, "uint8"), received.data_ptr(), self.link.current_stream())
        pieces = list(received.split(slice_bytes))
        pieces[own] = message[own * slice_bytes :][:slice_bytes]
        return pieces

    @property
    def received_address(self) -> int:
        """Return the addresses of scatter()'s pieces: r slices on for rank r, inside the message for this rank."""
        return self._received.data_ptr()

    def result(self) -> torch.Tensor:
        """Return the memory for the fold of scatter()'s pieces, uint8."""
        return self._whole[self.rank * self._slice_bytes :][: self._slice_bytes]

    def gather(self) -> torch.Tensor:
        """Return all ranks' results in rank order, contiguous uint8."""
        whole = self._whole[: self._slice_bytes * self.world_size]
        self.wire_bytes += (self.world_size - 1) * self._slice_bytes
        self.link.comm.all_gather([(whole.data_ptr(), whole.numel(), "uint8")], self.link.current_stream())
        return whole

    def share_flags(self, flags: torch.Tensor) -> int:
        """Sum the int32 that each rank has set, among world_size + 1, into the last one; return its address."""
        world, stream = self.world_size, self.link.current_stream()
        self.wire_bytes += 4 * (world - 1)
        begin, last = flags.data_ptr(), flags.data_ptr() + 4 * world
        self.link.comm.all_gather([(begin, world, "int32")], stream)
        device_fold(self.link.comm, last, 0, begin, 1, 4, -1, world, "int32", False, stream)
        return last

    def floats(self, numel: int) -> torch.Tensor:
        return self.zeros(numel, torch.float32)

    # arithmetic on messages in place; arguments are addresses

    def fold(self, result: int, pieces: list[int], numel: int, dtype: str, op: str) -> None:
        """Fold `pieces` in rank order into `result`: addresses from scatter(), or equal offsets into its pieces."""
        own, size, comm, stream = self.rank, self._slice_bytes, self.link.comm, self.link.current_stream()
        other = int(own == 0)  # received pieces are evenly spaced
        rest = pieces[other] - other * size
        device_fold(comm, result, pieces[own], rest, numel, size, own, self.world_size, dtype, op == "mean", stream)

    def fold_slice(self, message: torch.Tensor, op: str) -> torch.Tensor:
        """Return this rank's slice of begin()'s message in its dtype, averaged or summed over ranks in rank order."""
        if self.world_size == 1:
            return message
        pieces, result = self.scatter(), self.result().view(message.dtype)
        addresses = [piece.data_ptr() for piece in pieces]
        self.fold(result.data_ptr(), addresses, result.numel(), dtype_name(result.dtype), op)
        return result

    def fold_message(self, message: torch.Tensor, op: str) -> torch.Tensor:
        """Return the whole message of begin(), averaged or summed over ranks in rank order."""
        if self.world_size == 1:
            return message
        own = self.fold_slice(message, op)
        return self.gather().view(own.dtype)

    def average_plain(self, flat: torch.Tensor, share: int | None, keeps_slice: bool) -> None:
        """Average flat memory in place, without compression; with `keeps_slice` only this rank's `share` elements."""
        if self.world_size == 1:
            return
        share = share or slice_numel(flat.numel(), self.world_size)
        message = self.begin(share * flat.element_size()).view(flat.dtype)
        message[: flat.numel()].copy_(flat)
        message[flat.numel() :].zero_()
        if keeps_slice:
            flat[self.rank * share : (self.rank + 1) * share].copy_(self.fold_slice(message, "mean"))
        else:
            flat.copy_(self.fold_message(message, "mean")[: flat.numel()])

    def encode_half(self, dtype: str, wire: int, source: int, numel: int, scale: float) -> None:
        """Scale and round float32 values."""
        device_cast(self.link.comm, wire, dtype, source, "float32", numel, scale, self.link.current_stream())

    def decode_half(self, dtype: str, out: int, wire: int, numel: int) -> None:
        """Widen values to float32."""
        device_cast(self.link.comm, out, "float32", wire, dtype, numel, 1.0, self.link.current_stream())

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], verdict: int = 0) -> None:
        """Copy, at most 64 pieces a launch, unless the flag at address `verdict` is set.

        Tensors are one-dimensional, dense and, in a pair, of one dtype; the first of a pair is the target.
        """
        copies = [(to.data_ptr(), source.data_ptr(), to.nbytes) for to, source in pairs if to.numel()]
        if copies:
            self.link.comm.pack(copies, self.link.current_stream(), verdict)


def slice_numel(numel: int, world_size: int) -> int:
    """Return the elements of a slice that holds this fraction of `numel`, a multiple of the alignment of slices."""
    share = -(-numel // world_size)
    return max(_ALIGNMENT, -(-share // _ALIGNMENT) * _ALIGNMENT)


class OnDevice(CompressionState):
    """A state whose exchange and tensors are on a GPU. Its codec only has the entries' shapes and counts rounds."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._held: dict[int, dict[str, torch.Tensor]] = {}
        super().__init__(*arguments, **options)

    @property
    def _device(self) -> DeviceExchange:
        return cast("DeviceExchange", self.exchange)

    def is_made(self, number: int) -> bool:
        return number in self._held

    def read(self, number: int) -> dict[str, torch.Tensor]:
        return {key: tensor.clone().cpu() for key, tensor in self._held[number].items()}

    def write(self, number: int, entry: dict[str, torch.Tensor]) -> None:
        held = self._made(number)
        for key, tensor in entry.items():
            held[key].copy_(tensor)

    def restart(self, rounds: int) -> None:
        self._held = {}
        super().restart(rounds)

    def _made(self, number: int) -> dict[str, torch.Tensor]:
        if number not in self._held:
            shapes = self.codec.shapes(number)
            self._held[number] = {key: self._zeros(shape, self.dtype_of(key)) for key, shape in shapes.items()}
        return self._held[number]

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        numel = torch.Size(shape).numel()
        return self._device.zeros(max(numel, 1), dtype)[:numel].view(shape)

    def entry(self, parameter: torch.Tensor, gradient: torch.Tensor) -> tuple[dict[str, torch.Tensor], bool]:
        """Return the parameter's tensors, and True if they are new (zeros)."""
        number = self.number_of(parameter, gradient)
        is_new = number not in self._held
        return self._made(number), is_new

    def members(self, bucket: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield gradients and parameters of a bucket, without those that no rank used: their error stays."""
        used = used_in(bucket) or itertools.repeat(True)
        for gradient, parameter, is_used in zip(bucket.gradients(), bucket.parameters(), used):
            if is_used:
                yield gradient, parameter
            self._skipped |= not is_used


class DeviceBlockState(OnDevice, BlockState):
    """A BlockState on a GPU. A pass is one launch over all parts of a message."""

    _rest = torch.empty(0, dtype=torch.float32, device="cpu")
    _flags = torch.empty(0, dtype=torch.float32, device="cpu")

    def average(self, bucket: Any) -> torch.Tensor:
        buffer: torch.Tensor = bucket.buffer()
        flat = buffer if buffer.dtype == torch.float32 else buffer.float()
        base, spans, first = int(buffer.storage_offset()), [], 0
        for gradient, parameter in self.members(bucket):
            offset, numel = int(gradient.storage_offset()) - base, gradient.numel()
            error = self.entry(parameter, gradient)[0]["error"] if self.error_feedback else None
            address, of_error = flat.data_ptr() + 4 * offset, 0 if error is None else error.data_ptr()
            spans.append(_Span(address, offset, numel, first, error, of_error))
            first += -(-numel // self.block)
        share, keeps_slice = share_of(bucket)
        self._exchange_records(_owners(spans, first, self._device, share, keeps_slice, self.block), keeps_slice)
        if flat is not buffer:
            buffer.copy_(flat)
        self.end_bucket(bucket.is_last())
        return buffer

    def _exchange_records(self, owners: list[_Owner], keeps_slice: bool) -> None:
        device_exchange = exchange = self._device
        comm, stream = device_exchange.link.comm, device_exchange.link.current_stream()
        size, world, codec = block_record_bytes(self.block, self.bits), exchange.world_size, (self.block, self.bits)
        count = max(1, *(owner.end - owner.begin for owner in owners))
        base = exchange.begin(count * size).data_ptr()
        parts = [part for rank, owner in enumerate(owners) for part in owner.parts(rank * count, self.block)]
        rows = [(base + part.at * size, part.address, part.error, part.numel) for part in parts]
        for rank, owner in enumerate(owners):  # records of zeros
            used = owner.end - owner.begin
            if used < count:
                rows.append((base + (rank * count + used) * size, 0, 0, (count - used) * self.block))
        device_block_encode(comm, *codec, rows, stream)
        own = exchange.scatter()[exchange.rank].data_ptr()
        others, rest = device_exchange.received_address, self._reserve(device_exchange, count)
        wires = (own, others, count * size, exchange.rank, world)
        device_block_fold(comm, *codec, exchange.result().data_ptr(), *wires, count, 1.0 / world, rest, stream)
        take = self._take_own if keeps_slice else self._take_all
        verdict = take(device_exchange, parts, base, count)
        if self.error_feedback:
            owed = [
                (span.error_address + 4 * begin, rest + 4 * place, numel)
                for span, begin, place, numel in owners[exchange.rank].rests(self.block)
            ]
            device_block_owe(comm, *codec, owed, verdict, float(world), stream)

    def _take_all(self, exchange: DeviceExchange, parts: list[_Part], base: int, count: int) -> int:
        """Decode every rank's results and keep errors. Return the address of the verdict."""
        comm, stream, codec = exchange.link.comm, exchange.link.current_stream(), (self.block, self.bits)
        size, verdict = block_record_bytes(self.block, self.bits), self._flags.data_ptr()
        whole = exchange.gather().data_ptr()
        if self.error_feedback:
            device_block_verdict(comm, *codec, verdict, whole, count * exchange.world_size, stream)
        rows = [(part.address, part.error, whole + part.at * size, base + part.at * size, part.numel) for part in parts]
        device_block_decode(comm, *codec, rows, verdict, stream)
        return verdict

    def _take_own(self, exchange: DeviceExchange, parts: list[_Part], base: int, count: int) -> int:
        """Keep the errors of all parts, then decode this rank's results alone. Return the address of the verdict."""
        comm, stream, codec = exchange.link.comm, exchange.link.current_stream(), (self.block, self.bits)
        size, first, verdict = block_record_bytes(self.block, self.bits), exchange.rank * count, 0
        result = exchange.result().data_ptr()
        if self.error_feedback:
            device_block_verdict(comm, *codec, self._flags.data_ptr() + 4 * exchange.rank, result, count, stream)
            verdict = exchange.share_flags(self._flags)
            rows = [
                (each.address, each.error, 0, base + each.at * size, each.numel) for each in parts if not each.is_copy
            ]
            device_block_decode(comm, *codec, rows, verdict, stream)
        own = [each for each in parts if first <= each.at < first + count]
        rows = [(each.address, 0, result + (each.at - first) * size, 0, each.numel) for each in own]
        device_block_decode(comm, *codec, rows, 0, stream)
        return verdict

    def _reserve(self, exchange: DeviceExchange, count: int) -> int:
        """Return the address for the rounding error of the sums; 0 if no rank keeps it. Also allocates the verdicts."""
        if not self.error_feedback:
            return 0
        if self._rest.numel() < count * self.block:
            self._rest = exchange.floats(count * self.block)
        if not self._flags.numel():
            self._flags = exchange.zeros(exchange.world_size + 1, torch.int32)
        return self._rest.data_ptr()


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


def _owners(
    spans: list[_Span], count: int, exchange: DeviceExchange, share: int | None, keeps_slice: bool, block: int
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
