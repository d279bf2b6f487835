"""The two-step exchange of encoded slices between GPUs, and blocks over it (PowerSGD: compress/device_powersgd.py).

A message has world_size equal slices. In the first step every rank gets its own slice of all messages and folds them,
in rank order; in the second all ranks get all results. Everything is enqueued: arithmetic on torch's current stream,
collectives on the communicator's, and each waits for the other. The host reads no message; where the CPU decides
whether errors are kept, kernels read a verdict in GPU memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, cast

import torch

from .._engine import (
    block_record_bytes,
    block_slice_records,
    device_block_round,
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

    def memory(self) -> tuple[int, int, int]:
        """Return the addresses of the message, of what is received and of the whole result, after begin()."""
        return self._sent.data_ptr(), self._received.data_ptr(), self._whole.data_ptr()

    def result(self) -> torch.Tensor:
        """Return the memory for the fold of scatter()'s pieces, uint8."""
        return self._whole[self.rank * self._slice_bytes :][: self._slice_bytes]

    def gather(self) -> torch.Tensor:
        """Return all ranks' results in rank order, contiguous uint8."""
        whole = self._whole[: self._slice_bytes * self.world_size]
        self.wire_bytes += (self.world_size - 1) * self._slice_bytes
        self.link.comm.all_gather([(whole.data_ptr(), whole.numel(), "uint8")], self.link.current_stream())
        return whole

    def _fold_slice(self, message: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice of begin()'s message in its dtype, averaged over ranks in rank order."""
        pieces, result, size = self.scatter(), self.result().view(message.dtype), self._slice_bytes
        own, other = self.rank, int(self.rank == 0)
        rest = pieces[other].data_ptr() - other * size  # received pieces are evenly spaced
        stream, dtype = self.link.current_stream(), dtype_name(result.dtype)
        places = result.data_ptr(), pieces[own].data_ptr(), rest
        device_fold(self.link.comm, *places, result.numel(), size, own, self.world_size, dtype, True, stream)
        return result

    def average_plain(self, flat: torch.Tensor, share: int | None, keeps_slice: bool) -> None:
        """Average flat memory in place, without compression; with `keeps_slice` only this rank's `share` elements."""
        if self.world_size == 1:
            return
        share = share or slice_numel(flat.numel(), self.world_size)
        message = self.begin(share * flat.element_size()).view(flat.dtype)
        message[: flat.numel()].copy_(flat)
        message[flat.numel() :].zero_()
        if keeps_slice:
            flat[self.rank * share : (self.rank + 1) * share].copy_(self._fold_slice(message))
        else:
            self._fold_slice(message)
            flat.copy_(self.gather().view(flat.dtype)[: flat.numel()])


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
    """A BlockState on a GPU: the engine enqueues a bucket's rounds, a pass as one launch over all parts of a message."""

    _rest = torch.empty(0, dtype=torch.float32, device="cpu")
    _flags = torch.empty(0, dtype=torch.float32, device="cpu")

    def average(self, bucket: Any) -> torch.Tensor:
        buffer: torch.Tensor = bucket.buffer()
        flat = buffer if buffer.dtype == torch.float32 else buffer.float()
        base, spans = int(buffer.storage_offset()), []
        for gradient, parameter in self.members(bucket):
            offset, numel = int(gradient.storage_offset()) - base, gradient.numel()
            error = self.entry(parameter, gradient)[0]["error"].data_ptr() if self.error_feedback else 0
            spans.append((flat.data_ptr() + 4 * offset, error, offset, numel))
        self._average_spans(spans, *share_of(bucket))
        if flat is not buffer:
            buffer.copy_(flat)
        self.end_bucket(bucket.is_last())
        return buffer

    def _average_spans(self, spans: list[tuple[int, int, int, int]], share: int | None, keeps_slice: bool) -> None:
        exchange = self._device
        cut = self.block, self.bits, spans, share or 0, keeps_slice
        count = block_slice_records(*cut, exchange.rank, exchange.world_size)
        exchange.begin(count * block_record_bytes(self.block, self.bits))
        rest = flags = 0
        if self.error_feedback:
            if self._rest.numel() < count * self.block:
                self._rest = exchange.zeros(count * self.block, torch.float32)
            if not self._flags.numel():
                self._flags = exchange.zeros(exchange.world_size + 1, torch.int32)
            rest, flags = self._rest.data_ptr(), self._flags.data_ptr()
        stream = exchange.link.current_stream()
        exchange.wire_bytes += device_block_round(exchange.link.comm, *cut, *exchange.memory(), rest, flags, stream)
