"""Staging of GPU state: saves copy it through pinned memory without a device copy, ordered with torch's stream.

See csrc/checkpoint/device_stage.h.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .._engine import DeviceStage, crc32c
from ..layout.memory import has_memory
from ..torch_compat import cuda
from .state.names import plain, real

#: size of each of three pinned slots
SLOT_BYTES = 8 << 20


class DeviceStaging:
    """Device-to-host staging for one rank's saves, from the first GPU with its state. torch copies from other GPUs."""

    def __init__(self) -> None:
        self._stage: DeviceStage | None = None
        self._ordinal = -1

    def takes(self, tensor: torch.Tensor) -> bool:
        """Return whether a save can read the tensor's GPU memory in place."""
        if not cuda.runtime.stages(tensor):
            return False
        if self._stage is None:
            self._ordinal = cuda.runtime.ordinal(tensor)
            self._stage = DeviceStage(self._ordinal, SLOT_BYTES, cuda.runtime.libraries().get("libcuda"))
        return bool(self._ordinal == cuda.runtime.ordinal(tensor))

    def memory_of(self, tensor: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Return (tensor, is_on_gpu): a real, row-major tensor with the values of `tensor`."""
        found = real(tensor)
        if has_memory(found) and found.is_contiguous() and self.takes(found):
            return found, True
        return plain(tensor), False

    def checksums(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Return the CRC-32C of each tensor's bytes. GPU tensors reach the host in one copy."""
        found = {name: self.memory_of(tensor) for name, tensor in tensors.items() if tensor.numel()}
        flat = [memory.reshape(-1).view(torch.uint8) for memory, on_gpu in found.values() if on_gpu]
        together = iter(torch.cat(flat).cpu().split([each.numel() for each in flat]) if flat else ())
        sums = dict.fromkeys(tensors, 0)
        for name, (memory, on_gpu) in found.items():
            there = next(together) if on_gpu else memory
            sums[name] = crc32c(there.data_ptr(), there.numel() * there.element_size())
        return sums

    def for_saver(self) -> tuple[DeviceStage, int] | None:
        """Return the `device` argument of CheckpointSaver.begin(): stage and stream, or None."""
        return None if self._stage is None else (self._stage, cuda.runtime.current_stream(self._ordinal))

    def stats(self) -> dict[str, int]:
        """Return the counts batches, bytes_down, host_waits and pinned_bytes."""
        return {} if self._stage is None else self._stage.stats()

    def close(self) -> None:
        """Free the pinned memory."""
        self._stage = None
