"""The GPU interface that a check's body uses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from shardwright import _engine
from shardwright.torch_compat import cuda


class Gpu:
    """A GPU of torch, by default the first one. All ranks of a run share it."""

    backend = "cpu:gloo,cuda:nccl"
    shares_card = True  # of all ranks of a run; each simulated rank has a card of its own

    def __init__(self, index: int = 0) -> None:
        if not torch.cuda.is_available():
            _engine.cuda_devices()  # NotImplementedError: there is no driver, or it shows no GPU
            raise RuntimeError(f"the driver shows a GPU, and torch {torch.__version__} cannot use it")
        torch.cuda.set_device(index)
        self.device = torch.device("cuda", index)

    def put(self, module: torch.nn.Module) -> torch.nn.Module:
        return module.to(self.device)

    def memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device)

    def aside(self) -> Any:
        """Return a context in which CPU tensors belong to the CPU; elsewhere a simulated GPU uses them as its own."""
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def open(self) -> Any:
        """Return a DeviceComm without peers."""
        return cuda.open_gpu(self.device.index, cuda.runtime.libraries())

    def watch(self) -> None:
        """Let a thread watch communicators that are made from now on. Does nothing: on a real GPU it always does."""

    def short_queue(self) -> Any:
        """Return a context in which a stream's queue is short, if possible; a driver's holds about 1000 operations."""
        return contextlib.nullcontext()

    def torchs(self) -> Any:
        """Return a context that gives the place for a program that uses torch alone."""
        return contextlib.nullcontext(self)

    @contextlib.contextmanager
    def side_stream(self) -> Iterator[None]:
        """A context in which torch enqueues on a stream of its own; its default stream then waits for that."""
        stream, default = torch.cuda.Stream(self.device), torch.cuda.current_stream(self.device)
        stream.wait_stream(default)
        with torch.cuda.stream(stream):
            yield
        default.wait_stream(stream)

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """A context in which torch's stream is captured into a CUDA graph."""
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            yield

    @contextlib.contextmanager
    def without_waits(self) -> Iterator[None]:
        """A context in which an operation of torch's that makes the host wait raises."""
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def pinned(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes // 4, dtype=torch.float32, device="cpu", pin_memory=True)

    def milliseconds(self, work: Callable[[], Any], repeat: int) -> float:
        """Return the milliseconds of one `work`, measured on the GPU."""
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
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            yield
        trace.export_chrome_trace(path)


@contextlib.contextmanager
def gpu(rank: int, world_size: int, folder: str) -> Iterator[Gpu]:
    yield Gpu()
