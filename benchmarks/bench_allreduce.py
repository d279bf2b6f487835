"""Benchmark of float32 all_reduce: in pool memory against the memory's ceiling, and called from Python against torch's
Gloo.

The ceiling is the fastest of five loops (ceiling.c). All ranks run it at once on the pages of the all_reduce, and it
reads and writes W * n bytes in all. The best of 5 in the same run counts.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist
from shardwright.comm.process_group import host_group
from torch.utils.dlpack import from_dlpack

KB, MB = 1 << 10, 1 << 20
LOOPS = ("memcpy", "avx2 copy", "non-temporal copy", "avx2 rewrite", "non-temporal rewrite")
BEST_OF = 5


class Pool:
    """A float32 tensor of `nbytes` in memory that all ranks map, with its all_reduce."""

    def __init__(self, comm: Any, nbytes: int) -> None:
        self._comm = comm
        self.arena = comm.arena(nbytes, f"bench {nbytes}")
        self.nbytes, self.address = nbytes, self.arena.address
        self.tensor = from_dlpack(self.arena.tensor(0, "float32", [nbytes // 4]))

    def all_reduce(self) -> None:
        self._comm.all_reduce(self.address, self.nbytes // 4, "float32", "sum", "bench", self.arena)


def verify(tensor: torch.Tensor, all_reduce: Callable[[], None], rank: int, world_size: int) -> None:
    """Check the sum of small integers, which is exact. Leave zeros, which any number of sums keeps."""
    pattern = torch.arange(tensor.numel(), dtype=torch.int32).remainder_(1021).float()
    torch.mul(pattern, rank + 1, out=tensor)
    all_reduce()
    if not torch.equal(tensor, pattern * (world_size * (world_size + 1) // 2)):
        raise AssertionError(f"rank {rank}: all_reduce of {tensor.numel()} elements gave a wrong sum")
    tensor.zero_()


def time_against_ceiling(
    rank: int, world_size: int, sizes: list[int], rounds: int, budget_s: float, library: str
) -> list[Any]:
    group = host_group(dist.group.WORLD, 60.0)  # closed by the garbage collector
    comm = group.comm
    run = ctypes.CDLL(library).ceiling_run
    run.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
    results = []
    for size in sizes:
        pool = Pool(comm, size)
        verify(pool.tensor, pool.all_reduce, rank, world_size)
        arms: dict[str, Callable[[], None]] = {"ours": pool.all_reduce}
        for index, name in enumerate(LOOPS):
            arms[name] = lambda index=index, pool=pool: run(index, pool.address, pool.nbytes)
        results.append(
            common.interleave(
                arms, comm.barrier, rounds=rounds, budget_s=budget_s / len(sizes), repeat=repeats_of(size)
            )
        )
    return results


def time_against_gloo(rank: int, world_size: int, sizes: list[int], rounds: int, budget_s: float) -> list[Any]:
    group = host_group(dist.group.WORLD, 60.0)  # closed by the garbage collector
    comm = group.comm
    results = []
    for size in sizes:
        pool, private = Pool(comm, size), torch.empty(size // 4)
        gloo = lambda private=private: dist.all_reduce(private)  # noqa: E731
        verify(pool.tensor, pool.all_reduce, rank, world_size)
        verify(private, gloo, rank, world_size)
        repeat = gloo_repeats(size)
        results.append(
            common.interleave(
                {"ours": pool.all_reduce, "gloo": gloo},
                comm.barrier,
                rounds=rounds,
                budget_s=budget_s / len(sizes),
                repeat=repeat,
            )
        )
    return results


def repeats_of(size: int) -> int:
    """Return the number of calls per sample, enough for clock ticks of 10 ms."""
    return max(1, 200 * MB // size)


def gloo_repeats(size: int) -> dict[str, int]:
    gloo = min(50, max(1, 50 * MB // size))
    return {"ours": min(400, 8 * gloo), "gloo": gloo}


def size_name(size: int) -> str:
    return f"{size // MB} MB" if size >= MB else f"{size // KB} KB"


def main() -> None:
    report, quick = common.begin("allreduce", __doc__)
    effort = (common.LEAST_ROUNDS, 1.0) if quick else (15, 12.0)  # (rounds, seconds)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        library = str(Path(folder) / "ceiling.so")
        subprocess.run(
            ["gcc", "-O3", "-shared", "-fPIC", "-o", library, str(Path(__file__).with_name("ceiling.c"))], check=True
        )
        sizes = [25 * MB, 100 * MB, 400 * MB]
        results = common.run_ranks(2, time_against_ceiling, sizes, *effort, library)
    for size, *ranks in zip(sizes, *results):
        times = common.timings(ranks, repeats_of(size))
        fastest = min(LOOPS, key=lambda name: min(times[name].every[:BEST_OF]))
        best, ours = min(times[fastest].every[:BEST_OF]), times["ours"]
        report.add(
            f"pool W=2 {size_name(size)}",
            "ms",
            ours.median * 1e3,
            best * 1e3,
            f"streaming ceiling ({fastest})",
            goal=0.87 if size == 25 * MB else 0.8,
            larger=True,
            samples=len(ours.kept),
            discarded=ours.discarded,
            disturbed=ours.disturbed,
            ours_spread=ours.spread,
            ours_undropped=ours.undropped_median * 1e3,
            ours_best=min(ours.every) * 1e3,
            best_share=best / min(ours.every),
            ours_cpu=ours.cpu * 1e3,
            ceiling_GBps=4 * size / best / 1e9,
        )
    goals = {2: {64 * KB: 7, MB: 8, 25 * MB: 8, 100 * MB: 8}, 4: {MB: 5, 25 * MB: 5, 100 * MB: 5}}
    if quick:
        goals = {2: {64 * KB: 7, MB: 8, 25 * MB: 8}, 4: {25 * MB: 5}}
    for world_size, by_size in goals.items():
        results = common.run_ranks(world_size, time_against_gloo, list(by_size), *effort)
        for (size, goal), *ranks in zip(by_size.items(), *results):
            times = common.timings(ranks, gloo_repeats(size))
            report.add_times(
                f"python W={world_size} {size_name(size)}",
                times["ours"],
                times["gloo"],
                "torch Gloo",
                goal=goal,
                larger=True,
            )


if __name__ == "__main__":
    main()
