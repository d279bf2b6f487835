"""Benchmark of checkpoint_units: time of a step and peak memory of a GPT of 24 layers.

One rank trains at zero=2. Arms: all activations ("none"), recomputed units, two units together, and units whose inputs lie
in a file. First all arms train two steps and must reach the same bits. A step's peak is the PSS above that before its
forward, watched by another process; gradients and state exist already. SW_BENCH_DIR names a folder on the measured disk
(default: the working directory).
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import common
import shardwright as sw
import torch
import torch.distributed as dist
from models import GPT, VOCABULARY
from pss import pss_bytes
from shardwright.comm.process_group import host_group
from torch.nn import functional as F

LAYERS, WIDTH, HEADS, CONTEXT, BATCH = 24, 128, 4, 256, 16
PARTS = ("memory", "time")
ARMS = ("none", "each", "two", "file")
#: (memory, time) against "none", at most
GOALS = {"each": (0.4, 1.35), "two": (None, None), "file": (0.25, 1.6)}
ROUNDS, QUICK_ROUNDS = 7, 5
_libc = ctypes.CDLL(None)


class Arm:
    """A trained GPT."""

    def __init__(self, name: str, folder: str, batch: int) -> None:
        torch.manual_seed(0)
        module = GPT(context=CONTEXT, layers=LAYERS, width=WIDTH, heads=HEADS)
        options = {"each": {}, "two": {"every": 2}, "file": {"offload": f"nvme:{folder}"}}
        if name in options:
            sw.checkpoint_units(module, **options[name])
        self.model, self.optimizer = sw.wrap(module, torch.optim.AdamW(module.parameters(), lr=1e-3), zero=2)
        self.tokens = torch.randint(VOCABULARY, (batch, CONTEXT + 1), generator=torch.Generator().manual_seed(1))

    def step(self) -> float:
        logits = self.model(self.tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


class Watch:
    """A process that samples another one's PSS."""

    def __init__(self, pid: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=_sample, args=(pid, there), daemon=True)
        self._process.start()
        self._here.recv()

    def peak(self, run: Callable[[], Any]) -> int:
        """Return the PSS above that of now, at most, while `run` runs."""
        _libc.malloc_trim(0)  # free memory that another arm left is no room for this one
        before = pss_bytes("self")
        self._here.send("begin")
        run()
        self._here.send("end")
        return int(self._here.recv()) - before

    def close(self) -> None:
        self._process.kill()
        self._process.join()


def _sample(pid: int, pipe: Any) -> None:
    pipe.send("ready")
    while pipe.recv() == "begin":
        peak = 0
        while not pipe.poll():
            peak = max(peak, pss_bytes(pid))
            time.sleep(0.002)
        pipe.recv()
        pipe.send(peak)


def measure(
    rank: int, world_size: int, folder: str, rounds: int, batch: int, parts: Sequence[str]
) -> tuple[Any, dict[str, list[int]]]:
    group = host_group(dist.group.WORLD, 1800.0)
    arms = {name: Arm(name, folder, batch) for name in ARMS}
    reached = {name: ([arm.step() for _ in range(2)], [*arm.model.parameters()]) for name, arm in arms.items()}
    for losses, parameters in reached.values():
        if losses != reached["none"][0] or not all(map(torch.equal, parameters, reached["none"][1])):
            raise AssertionError("recomputed units have other bits")
    peaks: dict[str, list[int]] = {name: [] for name in ARMS}
    watch = Watch(os.getpid())
    for _ in range(2 if "memory" in parts else 0):
        for name, arm in arms.items():
            gc.collect()
            peaks[name].append(watch.peak(arm.step))
    watch.close()
    if "time" not in parts:
        return {}, peaks
    work = {name: arm.step for name, arm in arms.items()}
    return common.interleave(work, group.comm.barrier, rounds=rounds, budget_s=600.0, warmup=1), peaks


def main() -> None:
    report, quick = common.begin("activations", __doc__, PARTS)
    parts = [part for part in PARTS if report.wants(part)]
    batch = BATCH // 4 if quick else BATCH
    common.TIMEOUT_S = 3600.0  # 45 steps of a GPT, on machines that are shared
    parent = os.environ.get("SW_BENCH_DIR", ".")
    with tempfile.TemporaryDirectory(dir=parent, prefix="bench-activations-") as folder:
        ((samples, peaks),) = common.run_ranks(1, measure, folder, QUICK_ROUNDS if quick else ROUNDS, batch, parts)
    times = common.timings([samples]) if "time" in parts else {}
    for name in ARMS[1:]:
        most_memory, most_time = GOALS[name]
        case = f"GPT {LAYERS}x{WIDTH}, {batch}x{CONTEXT}, {name}"
        if "memory" in parts:
            ours, peer = (statistics.median(peaks[each]) / 2**20 for each in (name, "none"))
            report.add(f"{case}: peak", "MiB", ours, peer, "none", goal=most_memory, samples=4)
        if "time" in parts:
            ours, peer = (times[each].cpu * 1e3 for each in (name, "none"))
            report.add_times(f"{case}: step", times[name], times["none"], "none", goal=most_time)
            report.add(f"{case}: processor time of a step", "ms", ours, peer, "none", goal=most_time)


if __name__ == "__main__":
    main()
