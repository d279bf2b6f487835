"""The GPU of a check's body."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..torch_compat import cuda


class Gpu:
    """A GPU of torch's. By default its first one, which all ranks of a run share."""

    backend = "cpu:gloo,cuda:nccl"

    def __init__(self, index: int = 0) -> None:
        if not torch.cuda.is_available():
            raise NotImplementedError("this torch has no CUDA, or the machine has no GPU")
        torch.cuda.set_device(index)
        self.device = torch.device("cuda", index)

    def put(self, module: torch.nn.Module) -> torch.nn.Module:
        return module.to(self.device)

    def memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device)

    def aside(self) -> Any:
        """Inside, tensors on the CPU are on the CPU."""
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def open(self) -> Any:
        """Return a DeviceComm without peers."""
        return cuda.open_gpu(self.device.index, cuda.runtime.libraries())

    def watch(self) -> None:
        """Communicators from now on are watched by a thread: they always are."""

    def short_queue(self) -> Any:
        """Inside, a stream takes few operations before a call blocks, where that can be arranged: a driver's takes about a thousand."""
        return contextlib.nullcontext()

    def torchs(self) -> Any:
        """Inside, the place of a program that is torch's alone."""
        return contextlib.nullcontext(self)

    def as_it_is(self) -> Any:
        return contextlib.nullcontext(self)

    def pinned(self, size_bytes: int) -> torch.Tensor:
        """Return pinned float32 memory on the host."""
        return torch.empty(size_bytes // 4, dtype=torch.float32, device="cpu", pin_memory=True)

    def milliseconds(self, work: Callable[[], Any], repeat: int) -> float:
        """Return the milliseconds of one `work`, as the GPU sees it."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeat):
            work()
        end.record()
        self.synchronize()
        return float(begin.elapsed_time(end)) / repeat

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int:
        return int(torch.cuda.max_memory_allocated(self.device))

    @contextlib.contextmanager
    def profile(self, path: str) -> Iterator[None]:
        """Write a trace of the block's work."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            yield
        trace.export_chrome_trace(path)


@contextlib.contextmanager
def gpu(rank: int, world_size: int, folder: str) -> Iterator[Gpu]:
    """The default of --place."""
    yield Gpu()


def wall_milliseconds(work: Callable[[], Any], finish: Callable[[], None], repeat: int) -> float:
    """Return the milliseconds of one `work` by the host's clock, with all that it enqueues."""
    begin = time.perf_counter()
    for _ in range(repeat):
        work()
    finish()
    return 1e3 * (time.perf_counter() - begin) / repeat
