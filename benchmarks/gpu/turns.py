"""Common parts of the GPU benchmarks: result rows, placement of a rank's memory, timing of work."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from shardwright_tools.gpu_check.place import Gpu

sys.path.append(str(Path(__file__).resolve().parents[1]))
import models  # noqa: E402

Row = dict[str, Any]
Arms = dict[str, Callable[[], Any]]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements.

    The defaults are for a GPU; dry() is for a simulated one, on which times mean nothing.
    """

    rounds: int = 15
    repeat: int = 10
    copies: int = 400
    copy_numel: int = 64 << 10
    norm_numel: int = 64 << 20
    kernel_numel: int = 64 << 20
    adam_parameters: int = 16
    staged_numel: int = 256 << 20
    overlapped_steps: int = 30
    matrices: tuple[tuple[int, int], ...] = tuple((256 * (1 + k % 4), 256 * (1 + k % 3)) for k in range(240))
    cases: dict[str, models.Case] = field(default_factory=lambda: {name: models.CASES[name] for name in ("mlp", "gpt")})

    @staticmethod
    def quick() -> Sizes:
        return Sizes(rounds=5)

    @staticmethod
    def dry() -> Sizes:
        """Return small sizes, with which each row is produced once."""

        def batch(rank: int) -> tuple[torch.Tensor, ...]:
            return (torch.randn(4, 6, generator=torch.Generator().manual_seed(rank)),)

        def build() -> torch.nn.Module:
            torch.manual_seed(0)
            return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 2))

        tiny = models.Case(build, batch, lambda module, given: module(*given).square().mean())
        few = dict(copies=3, copy_numel=40, norm_numel=1000, kernel_numel=1024, adam_parameters=2, staged_numel=5000)
        return Sizes(1, 1, **few, overlapped_steps=2, matrices=((24, 16), (16, 32), (9, 40)), cases={"tiny": tiny})


def row(
    case: str, ours: list[float], peer: list[float], peer_name: str, unit: str = "ms", goal: float | None = None
) -> Row:
    """Return a row whose figure is better if smaller."""
    left, right = statistics.median(ours), statistics.median(peer)
    ratio = left / right
    return {
        "bench": "gpu",
        "case": case,
        "unit": unit,
        "ours": left,
        "peer": right,
        "peer_name": peer_name,
        "ratio": ratio,
        "goal": goal,
        "ok": None if goal is None else ratio <= goal,
        "samples": len(ours),
        "discarded": 0,
    }


def count_row(case: str, count: int) -> Row:
    """Return a row that counts an event which must not happen."""
    return {**row(case, [count], [1], "none", "count", 0.0), "ratio": count, "ok": count == 0}


def take_turns(where: Gpu, arms: Arms, rounds: int, repeat: int) -> dict[str, list[float]]:
    """Return the milliseconds of each arm, interleaved. Ranks begin each sample together, and the slowest rank counts."""
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for work in arms.values():
        for _ in range(3):
            work()
    for _ in range(rounds):
        for name, work in arms.items():
            where.synchronize()
            dist.barrier()
            slowest = torch.tensor(where.milliseconds(work, repeat), dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            taken[name].append(float(slowest))
    return taken
