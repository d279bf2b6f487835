"""The two-step exchange of encoded slices between GPUs, and the compressors over it: blocks and PowerSGD.

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
    device_hosts_sizes,
    device_powersgd_round,
    device_powersgd_sizes,
)
from ..backend.device_link import DeviceLink
from ..layout.bucket import share_of, used_in
from ..layout.views import dtype_name
from ..torch_compat import cuda
from .state import BlockState, CompressionState, PowerSGDState

_ALIGNMENT = 64


class DeviceExchange:
    """An exchange over a link's communicator, which counts what this rank has sent. Every rank makes the same calls."""

    takes_part = True

    def __init__(self, link: DeviceLink, like: torch.Tensor) -> None:
        self.link, self.rank, self.world_size = link, link.rank, link.world_size
        self.wire_bytes = self._before_bucket = 0
        self.bucket_wire_bytes: tuple[int, ...] = ()
        self._buckets: list[int] = []
        self._like = like.detach().new_empty(0)
        self._sent = self._received = self._whole = self._contributions = self._sums = self._like

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
        """Return the message, uint8, of world_size slices, with undefined contents; valid until the next begin()."""
        size = slice_bytes * self.world_size
        if self._sent.numel() < size:  # the streams have synchronised since a collective used the old tensors
            self._whole, self._sent, self._received = (self.zeros(size, torch.uint8) for _ in range(3))
        return self._sent[:size]

    def memory(self) -> tuple[int, int, int]:
        """Return the addresses of the message, of what is received and of the whole result, after begin()."""
        return self._sent.data_ptr(), self._received.data_ptr(), self._whole.data_ptr()

    def hosts(self, flat: torch.Tensor) -> tuple[int, tuple[int, int, int, int]]:
        """Return the number of ranks that add `flat` inside this host before it is encoded; then, for them, addresses
        and elements of flat, contributions and sums. Over one host: 1 and zeros.
        """
        *sizes, count = device_hosts_sizes(self.link.comm, flat.numel())
        if count == 1 and not sizes[0]:
            return 1, (0, 0, 0, 0)
        if self._contributions.numel() < sizes[0]:
            self._contributions, self._sums = (self.zeros(size, torch.uint8) for size in sizes)
        return count, (flat.data_ptr(), flat.numel(), self._contributions.data_ptr(), self._sums.data_ptr())

    def average_plain(self, flat: torch.Tensor, share: int | None, keeps_slice: bool) -> None:
        """Average flat memory in place, without compression; with `keeps_slice` only this rank's `share` elements."""
        rank, world_size = self.rank, self.world_size
        if world_size == 1:
            return
        share = share or max(1, -(-flat.numel() // (world_size * _ALIGNMENT))) * _ALIGNMENT
        size, name = share * flat.element_size(), dtype_name(flat.dtype)
        message = self.begin(size).view(flat.dtype)
        message[: flat.numel()].copy_(flat)
        message[flat.numel() :].zero_()
        comm, stream = self.link.comm, self.link.current_stream()
        sent, received, whole = self.memory()
        comm.exchange((sent, size * world_size, "uint8"), received, stream)
        device_fold(
            comm, whole + rank * size, sent + rank * size, received, share, size, rank, world_size, name, True, stream
        )
        self.wire_bytes += (world_size - 1) * size
        result = self._whole[: size * world_size].view(flat.dtype)
        if keeps_slice:
            own = slice(rank * share, (rank + 1) * share)
            flat[own].copy_(result[own])
        else:
            comm.all_gather([(whole, size * world_size, "uint8")], stream)
            self.wire_bytes += (world_size - 1) * size
            flat.copy_(result[: flat.numel()])


class OnDevice(CompressionState):
    """A state whose exchange and tensors are on a GPU. Its codec only has the entries' shapes and counts rounds."""

    #: rounds at the start without compression
    plain_rounds = 0

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
            made = self._held[number] = {}
            for key, shape in self.codec.shapes(number).items():
                numel = torch.Size(shape).numel()
                made[key] = self._device.zeros(max(numel, 1), self.dtype_of(key))[:numel].view(shape)
        return self._held[number]

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

    def average(self, bucket: Any) -> torch.Tensor:
        buffer: torch.Tensor = bucket.buffer()
        if self.iter < self.plain_rounds:
            self._device.average_plain(buffer, *share_of(bucket))
        else:
            flat = buffer if buffer.dtype == torch.float32 else buffer.float()
            self._average(bucket, flat, int(buffer.storage_offset()))
            if flat is not buffer:
                buffer.copy_(flat)
        self.end_bucket(bucket.is_last())
        return buffer

    def _average(self, bucket: Any, flat: torch.Tensor, base: int) -> None:
        """Enqueue the rounds of a bucket whose values are float32 in `flat`; its buffer begins at element `base`."""
        raise NotImplementedError


class DeviceBlockState(OnDevice, BlockState):
    """A BlockState on a GPU: the engine enqueues a bucket's rounds, a pass as one launch over all parts of a message."""

    _rest = torch.empty(0, dtype=torch.float32, device="cpu")
    _flags = torch.empty(0, dtype=torch.float32, device="cpu")

    def _average(self, bucket: Any, flat: torch.Tensor, base: int) -> None:
        spans, (share, keeps_slice) = list[tuple[int, int, int, int]](), share_of(bucket)
        for gradient, parameter in self.members(bucket):
            offset, numel = int(gradient.storage_offset()) - base, gradient.numel()
            error = self.entry(parameter, gradient)[0]["error"].data_ptr() if self.error_feedback else 0
            spans.append((flat.data_ptr() + 4 * offset, error, offset, numel))
        exchange = self._device
        cut = self.block, self.bits, spans, share or 0, keeps_slice
        count = block_slice_records(*cut, exchange.rank, exchange.world_size)
        exchange.begin(count * block_record_bytes(self.block, self.bits))
        beside, hosts = exchange.hosts(flat)
        rest = flags = 0
        if self.error_feedback:
            if self._rest.numel() < beside * count * self.block:
                self._rest = exchange.zeros(beside * count * self.block, torch.float32)
            if not self._flags.numel():
                self._flags = exchange.zeros(exchange.world_size + 1, torch.int32)
            rest, flags = self._rest.data_ptr(), self._flags.data_ptr()
        stream = exchange.link.current_stream()
        exchange.wire_bytes += device_block_round(
            exchange.link.comm, *cut, *exchange.memory(), rest, flags, *hosts, stream
        )


#: addresses of gradient, memory, left, right, basis; rows, columns, rank; seed; dtype of the memory; True: a new basis
MatrixRow = tuple[int, int, int, int, int, int, int, int, int, str, bool]


class DevicePowerSGDState(OnDevice, PowerSGDState):
    """A PowerSGDState whose exchange, state and scratch memory are on a GPU."""

    _flag = torch.empty(0, dtype=torch.int32, device="cpu")
    _scratch = torch.empty(0, dtype=torch.float32, device="cpu")

    @property
    def plain_rounds(self) -> int:  # type: ignore[override]
        return self.start_powerSGD_iter

    def _average(self, bucket: Any, flat: torch.Tensor, base: int) -> None:
        matrices, small = list[MatrixRow](), list[tuple[int, int]]()
        for gradient, parameter in self.members(bucket):
            address = flat.data_ptr() + 4 * (int(gradient.storage_offset()) - base)
            if self.codec.shapes(self.number_of(parameter, gradient)):
                matrices.append(self._matrix(parameter, gradient, address))
            elif gradient.numel():
                small.append((address, gradient.numel()))
        self._average_matrices(matrices, small)

    def _matrix(self, parameter: torch.Tensor, gradient: torch.Tensor, address: int) -> MatrixRow:
        entry, is_new = self.entry(parameter, gradient)
        rows, rank, index = self.rows_of(gradient), entry["left"].shape[0], sum(map(ord, self.name_of(parameter)))
        seed = (self.random_seed * 1_000_003 + index * 8191 + (0 if self.warm_start else self.iter * 131)) & (2**63 - 1)
        memory = entry["memory"].data_ptr() if "memory" in entry else 0
        left, right, basis = (entry[key].data_ptr() for key in ("left", "right", "basis"))
        sizes = rows, gradient.numel() // rows, rank
        begins = is_new or not self.warm_start
        return address, memory, left, right, basis, *sizes, seed, dtype_name(self.error_dtype), begins

    def _average_matrices(self, matrices: list[MatrixRow], small: list[tuple[int, int]]) -> None:
        exchange = self._device
        given = matrices, small, dtype_name(self.wire_dtype), self.use_error_feedback
        slice_bytes, scratch_numel = device_powersgd_sizes(*given, exchange.world_size)
        exchange.begin(slice_bytes)
        if self._scratch.numel() < scratch_numel:
            self._scratch = exchange.zeros(scratch_numel, torch.float32)
        if not self._flag.numel():
            self._flag = exchange.zeros(2, torch.int32)
        memory = *exchange.memory(), self._scratch.data_ptr(), self._flag.data_ptr()
        stream = exchange.link.current_stream()
        exchange.wire_bytes += device_powersgd_round(exchange.link.comm, *given, *memory, stream)
