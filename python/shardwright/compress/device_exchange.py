"""The two-step exchange of encoded slices between GPUs, and blocks over it (PowerSGD: compress/device_powersgd.py).

Everything is enqueued: arithmetic on torch's current stream, collectives on the communicator's, and each waits for the
other. The host reads no message; where the CPU decides whether errors are kept, kernels read a verdict in GPU memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from .._engine import (
    device_block_decode,
    device_block_encode,
    device_block_fold,
    device_block_owe,
    device_block_verdict,
    device_cast,
    device_fold,
)
from ..backend.device_link import DeviceLink
from ..comm.exchange import Exchange
from ..torch_compat import cuda
from .blocks import BlockState, _Owner, _Part
from .state import CompressionState


class DeviceExchange(Exchange):
    """An exchange over the communicator of a link. `like`: any tensor on its GPU."""

    on_device = True

    def __init__(self, link: DeviceLink, like: torch.Tensor) -> None:
        super().__init__(link.rank, link.world_size)
        self.link = link
        self._like = like.detach().new_empty(0)
        self._sent = self._received = self._like

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return memory on the GPU that collectives may use."""
        return cuda.runtime.zeros(numel, dtype, self._like)

    def _memory(self, size_bytes: int) -> torch.Tensor:
        return self.zeros(size_bytes, torch.uint8)

    def _message(self, slice_bytes: int) -> torch.Tensor:
        size = slice_bytes * self.world_size
        if self._sent.numel() < size:  # the streams have synchronised since a collective used the old tensors
            self._sent, self._received = self._memory(size), self._memory(size)
        return self._sent[:size]

    def _scatter(self, slice_bytes: int) -> list[torch.Tensor]:
        size, own = slice_bytes * self.world_size, self.rank
        message, received = self._sent[:size], self._received[:size]
        stream = self.link.current_stream()
        self.link.comm.exchange((message.data_ptr(), size, "uint8"), received.data_ptr(), stream)
        pieces = list(received.split(slice_bytes))
        pieces[own] = message[own * slice_bytes :][:slice_bytes]
        return pieces

    @property
    def received_address(self) -> int:
        """Return the addresses of scatter()'s pieces: r slices on for rank r, inside the message for this rank."""
        return self._received.data_ptr()

    def _result(self, slice_bytes: int) -> torch.Tensor:
        return self._whole[self.rank * slice_bytes :][:slice_bytes]

    def _gather(self, whole: torch.Tensor, slice_bytes: int) -> None:
        self.link.comm.all_gather([(whole.data_ptr(), whole.numel(), "uint8")], self.link.current_stream())

    def agree(self, ok: bool) -> bool:
        """Return `ok`: streams order the ranks' messages, and the host makes no decision."""
        return ok

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

    def fold(self, result: int, pieces: list[int], numel: int, dtype: str, op: str) -> None:
        own, size, comm, stream = self.rank, self._slice_bytes, self.link.comm, self.link.current_stream()
        other = int(own == 0)  # received pieces are evenly spaced
        rest = pieces[other] - other * size
        device_fold(comm, result, pieces[own], rest, numel, size, own, self.world_size, dtype, op == "mean", stream)

    def encode_half(self, dtype: str, wire: int, source: int, numel: int, scale: float) -> None:
        device_cast(self.link.comm, wire, dtype, source, "float32", numel, scale, self.link.current_stream())

    def decode_half(self, dtype: str, out: int, wire: int, numel: int) -> None:
        device_cast(self.link.comm, out, "float32", wire, dtype, numel, 1.0, self.link.current_stream())

    def copy(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], verdict: int = 0) -> None:
        """Copy, at most 64 pieces a launch, unless the flag at address `verdict` is set."""
        copies = [(to.data_ptr(), source.data_ptr(), to.nbytes) for to, source in pairs if to.numel()]
        if copies:
            self.link.comm.pack(copies, self.link.current_stream(), verdict)


class OnDevice(CompressionState):
    """A state whose exchange and tensors are on a GPU."""

    @property
    def _device(self) -> DeviceExchange:
        return cast("DeviceExchange", self.exchange)

    def _zeros(self, shape: tuple[int, ...], dtype: torch.dtype, parameter: torch.Tensor) -> torch.Tensor:
        return self._device.zeros(max(torch.Size(shape).numel(), 1), dtype)[: torch.Size(shape).numel()].view(shape)

    def _placed(self, tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        return self._zeros(tuple(tensor.shape), tensor.dtype, parameter).copy_(tensor)


class DeviceBlockState(OnDevice, BlockState):
    """A BlockState on a GPU. A pass is one launch over all parts of a message."""

    _flags = torch.empty(0, dtype=torch.float32, device="cpu")

    def _exchange_records(self, exchange: Exchange, owners: list[_Owner], keeps_slice: bool) -> None:
        device_exchange = self._device
        comm, stream = device_exchange.link.comm, device_exchange.link.current_stream()
        size, world, codec = self._record_bytes, exchange.world_size, (self.block, self.bits)
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
        size, verdict = self._record_bytes, self._flags.data_ptr()
        whole = exchange.gather().data_ptr()
        if self.error_feedback:
            device_block_verdict(comm, *codec, verdict, whole, count * exchange.world_size, stream)
        rows = [(part.address, part.error, whole + part.at * size, base + part.at * size, part.numel) for part in parts]
        device_block_decode(comm, *codec, rows, verdict, stream)
        return verdict

    def _take_own(self, exchange: DeviceExchange, parts: list[_Part], base: int, count: int) -> int:
        """Keep the errors of all parts, then decode this rank's results alone. Return the address of the verdict."""
        comm, stream, codec = exchange.link.comm, exchange.link.current_stream(), (self.block, self.bits)
        size, first, verdict = self._record_bytes, exchange.rank * count, 0
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
