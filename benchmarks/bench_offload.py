"""Benchmark of a step of sw.optim.AdamW with its state in a file (offload="nvme:<folder>") against the disk alone.

In the same run the disk reads and writes as many bytes at the same time, past the page cache. The faster of one and two
threads per direction counts, with requests of 8 MiB. SW_BENCH_DIR names a folder on the measured disk (default: the
working directory). A row without a goal times the same step in memory.
"""

from __future__ import annotations

import gc
import mmap
import os
import tempfile
import threading
from typing import Any

import common
import shardwright as sw
import torch
import torch.distributed as dist
from shardwright.comm.process_group import host_group

GOAL = 0.8
REQUEST_BYTES = 8 << 20
DISK_THREADS = (1, 2)  # threads per direction
STATE_BYTES = 8  # bytes per element: two float32 moments


class Disk:
    """Read and write all bytes of the state's own file, in the blocks of a step, with `count` threads per direction."""

    def __init__(self, folder: str, nbytes: int, count: int) -> None:
        names = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        files = [
            each for each in names if os.path.islink(each) and os.readlink(each).startswith(os.path.abspath(folder))
        ]
        self._file = next(each for each in map(_reopened, files) if os.fstat(each).st_size >= nbytes)
        self._requests = [(at, min(REQUEST_BYTES, nbytes - at)) for at in range(0, nbytes, REQUEST_BYTES)]
        self._count = count
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # huge pages keep a request in few segments
        self._buffers = [mmap.mmap(-1, REQUEST_BYTES, flags=private) for _ in range(2 * count)]
        for buffer in self._buffers:  # not zeros, since a virtual disk may skip writing them; valid as moments
            buffer.madvise(mmap.MADV_HUGEPAGE)
            buffer[:] = torch.rand(REQUEST_BYTES // 4).numpy().tobytes()

    def _move(self, call: Any, number: int) -> None:
        """Issue every count-th request. Writers are half a file away from readers."""
        writes, lane = divmod(number, self._count)
        own = self._requests[lane :: self._count]
        half = len(own) // 2 if writes else 0
        for at, size in own[half:] + own[:half]:
            if call(self._file, [memoryview(self._buffers[number])[:size]], at) != size:
                raise OSError("short read or write")

    def __call__(self) -> None:
        calls = [os.preadv] * self._count + [os.pwritev] * self._count
        threads = [threading.Thread(target=self._move, args=each) for each in zip(calls, range(len(calls)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _reopened(path: str) -> int:
    return os.open(path, os.O_RDWR | os.O_DIRECT)


def trainable(numel: int, offload: str | None) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a wrapped module with gradients, and its optimizer."""
    torch.manual_seed(0)
    each = min(numel, 4 << 20)
    module = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(each)) for _ in range(numel // each))
    optimizer = sw.optim.AdamW(module.parameters(), lr=1e-3)
    model, optimizer = sw.wrap(module, optimizer, zero=0, offload=offload)
    for p in module:
        p.grad = torch.randn(each)
    return model, optimizer


def verify(folder: str) -> None:
    models = [trainable(3 << 20, offload) for offload in (None, f"nvme:{folder}")]
    for _ in range(3):
        for _, optimizer in models:
            optimizer.step()
    if not all(map(torch.equal, models[0][0].parameters(), models[1][0].parameters())):
        raise AssertionError("a step through the file has other bits")


def time_steps(rank: int, world_size: int, folder: str, numel: int, rounds: int, budget_s: float) -> Any:
    group = host_group(dist.group.WORLD, 1800.0)
    verify(folder)
    gc.collect()
    kept = [trainable(numel, None), trainable(numel, f"nvme:{folder}")]
    if not sw.describe()["models"][-1]["offload_io"].startswith("past"):
        raise SystemExit(f"{folder}: through the page cache")
    work = {"memory": kept[0][1].step, "offload": kept[1][1].step}
    work |= {f"disk{count}": Disk(folder, STATE_BYTES * numel, count) for count in DISK_THREADS}
    return common.interleave(work, group.comm.barrier, rounds=rounds, budget_s=budget_s)


def main() -> None:
    report, quick = common.begin("offload", __doc__)
    parent = os.environ.get("SW_BENCH_DIR", ".")
    for numel in (16 << 20,) if quick else (16 << 20, 64 << 20):
        rounds, budget_s = common.effort(quick)
        with tempfile.TemporaryDirectory(dir=parent, prefix="bench-offload-") as folder:
            times = common.timings(common.run_ranks(1, time_steps, folder, numel, rounds, budget_s))
        disk = min((times[f"disk{count}"] for count in DISK_THREADS), key=lambda timing: timing.median)
        moved = 2 * STATE_BYTES * numel
        report.add_times(
            f"AdamW step, {numel >> 20} Mi elements, {moved >> 20} MiB moved",
            times["offload"],
            disk,
            "the disk alone",
            larger=True,
            goal=GOAL,
            disk_GBps=moved / disk.median / 1e9,
            in_memory_ms=times["memory"].median * 1e3,
        )


if __name__ == "__main__":
    main()
