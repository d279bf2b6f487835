"""Measurement of peak memory of all ranks of an arm as proportional set size (PSS), which counts a shared page once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import common
import torch.distributed as dist
from arms import Trainer

STEPS = 3
#: keeps trained models alive: dropping a wrapper would give each rank its own parameters again
_kept: list[Trainer] = []


def pss_bytes(pid: int | str) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return 0


def train_and_weigh(rank: int, world_size: int, case: str, arm: str) -> int:
    """Return the PSS before the model exists. The parent process watches the peak."""
    dist.barrier()
    start = pss_bytes("self")
    dist.barrier()
    trainer = Trainer(case, arm, rank)
    _kept.append(trainer)
    for _ in range(STEPS):
        trainer.step()
    time.sleep(0.1)
    return start


def peak_pss(case: str, arm: str, world_size: int) -> tuple[int, int]:
    """Return (start, peak), each the sum over all ranks."""
    peak = 0

    def watch(pids: Sequence[int]) -> None:
        nonlocal peak
        peak = max(peak, sum(map(pss_bytes, pids)))

    return sum(common.run_ranks(world_size, train_and_weigh, case, arm, watch=watch, warm=False)), peak


def peaks(case: str, arms: Sequence[str], world_size: int, rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return medians in MiB by arm: peaks above the start, and absolute peaks. Arms take turns."""
    found: dict[str, list[tuple[int, int]]] = {arm: [] for arm in arms}
    for _ in range(rounds):
        for arm in arms:
            found[arm].append(peak_pss(case, arm, world_size))

    def medians(of: Callable[[int, int], int]) -> dict[str, float]:
        return {arm: statistics.median(of(*each) for each in found[arm]) / 2**20 for arm in arms}

    return medians(lambda start, peak: peak - start), medians(lambda start, peak: peak)
