"""PowerSGD on a GPU: the engine enqueues a bucket's rounds; a pass handles all matrices of a bucket in one launch."""

from __future__ import annotations

from typing import Any

import torch

from .._engine import device_powersgd_round, device_powersgd_sizes
from ..layout.bucket import share_of
from ..layout.views import dtype_name
from .device_exchange import OnDevice
from .powersgd import PowerSGDState, rows_in_memory

#: addresses of gradient, memory, left, right, basis; rows, columns, rank; seed; dtype of the memory; True: a new basis
MatrixRow = tuple[int, int, int, int, int, int, int, int, int, str, bool]


class DevicePowerSGDState(OnDevice, PowerSGDState):
    """A PowerSGDState whose exchange, state and scratch memory are on a GPU."""

    _flag = torch.empty(0, dtype=torch.int32, device="cpu")
    _scratch = torch.empty(0, dtype=torch.float32, device="cpu")

    def average(self, bucket: Any) -> torch.Tensor:
        buffer: torch.Tensor = bucket.buffer()
        if self.iter < self.start_powerSGD_iter:
            self._device.average_plain(buffer, *share_of(bucket))
        else:
            flat = buffer if buffer.dtype == torch.float32 else buffer.float()
            self._average_compressed(bucket, flat, int(buffer.storage_offset()))
            if flat is not buffer:
                buffer.copy_(flat)
        self.end_bucket(bucket.is_last())
        return buffer

    def _average_compressed(self, bucket: Any, flat: torch.Tensor, base: int) -> None:
        matrices: list[MatrixRow] = []
        small: list[tuple[int, int]] = []
        for gradient, parameter in self.members(bucket):
            address = flat.data_ptr() + 4 * (int(gradient.storage_offset()) - base)
            if self.codec.shapes(self.number_of(parameter, gradient)):
                matrices.append(self._matrix(parameter, gradient, address))
            elif gradient.numel():
                small.append((address, gradient.numel()))
        self._average_matrices(matrices, small)

    def _matrix(self, parameter: torch.Tensor, gradient: torch.Tensor, address: int) -> MatrixRow:
        entry, is_new = self.entry(parameter, gradient)
        rows, rank, index = rows_in_memory(gradient), entry["left"].shape[0], sum(map(ord, self.name_of(parameter)))
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
