"""A simulated GPU for the --place option of `python -m shardwright.gpu_check`."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from internals import VARIABLE, cuda
from simulated_gpus import SimulatedGpus
from torch.utils._python_dispatch import _disable_current_modes

#: JSON: simulated_gpus.build(), and "text", the library of test_fake_gpu.kernel_text()
PATHS = "SW_TEST_SIMULATION"
QUEUE = 6


class Cpu:
    """The place that runs plain torch."""

    backend, device = "gloo", torch.device("cpu")

    def put(self, module: torch.nn.Module) -> torch.nn.Module:
        return module

    def memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def synchronize(self) -> None:
        pass

    def milliseconds(self, work: Any, repeat: int) -> float:
        begin = time.perf_counter()
        for _ in range(repeat):
            work()
        self.synchronize()
        return 1e3 * (time.perf_counter() - begin) / repeat

    def reset_peak(self) -> None:
        pass

    def peak_bytes(self) -> int:
        return 0

    def profile(self, path: str) -> Any:
        return contextlib.nullcontext()

    def pinned(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes // 4)


class Simulated(Cpu):
    """A rank's simulated GPU."""

    shares_card = False

    def __init__(self, gpus: SimulatedGpus, libcuda: str) -> None:
        self._gpus, self.libcuda = gpus, libcuda
        self.put, self.memory, self.synchronize = gpus.adopt_module, gpus.adopt, gpus.synchronize
        self.aside, self.watch, self.capture = gpus.torch_on_cpu, gpus.watch, gpus.capture

    def open(self) -> Any:
        return cuda.open_gpu(0, cuda.runtime.libraries())

    @contextlib.contextmanager
    def without_waits(self) -> Iterator[None]:
        before = len(self._gpus.devices.waits)
        yield
        assert self._gpus.devices.waits[before:] == []

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[None]:
        self.synchronize()
        with self._gpus.other_stream():
            yield
            self.synchronize()

    @contextlib.contextmanager
    def short_queue(self) -> Iterator[None]:
        self._gpus.limit_queue(QUEUE)
        try:
            yield
        finally:
            self._gpus.limit_queue(0)

    @contextlib.contextmanager
    def torchs(self) -> Iterator[Cpu]:
        with self._gpus.torch_on_cpu(), _disable_current_modes():
            yield Cpu()


@contextlib.contextmanager
def simulated(rank: int, world_size: int, folder: str) -> Iterator[Simulated]:
    paths = json.loads(os.environ[PATHS])
    with SimulatedGpus(paths, folder, "on demand", transport=os.environ.get(VARIABLE, "nccl")) as gpus:
        if paths.get("text"):
            gpus.run_text(paths["text"])
        yield Simulated(gpus, paths["cuda"])
