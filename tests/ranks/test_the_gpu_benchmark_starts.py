"""Law: every row of benchmarks/gpu can be produced on simulated GPUs with little data: its measurement is verified and
its row is complete. Its times mean nothing there, but a step must not wait for the host."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peer import PEER
from simulated_gpus import SimulatedGpus, run
from test_checkpoint_bytes_do_not_depend_on_the_ranks import shared_folder

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
QUICK_FORM_IS_THE_LARGEST_WORLD = True
GOALS = {
    "AdamW": 2,
    "cast": 2,
    "8-bit blocks": 2,
    "pack": 1,
    "save() returns": 1,
    "2 steps beside a save": 1,
    "PowerSGD": 1,
    "host waits": 6,
    "all of it": 1,
}


class SimulatedPlace:
    """A stand-in for the GPU of a rank."""

    device = torch.device("cpu")

    def __init__(self, gpus: SimulatedGpus) -> None:
        self._gpus = gpus
        self.put, self.memory, self.synchronize = gpus.adopt_module, gpus.adopt, gpus.synchronize

    def milliseconds(self, work: Callable[[], Any], repeat: int) -> float:
        begin = time.perf_counter()
        for _ in range(repeat):
            work()
        self.synchronize()
        return 1e3 * (time.perf_counter() - begin) / repeat


@contextlib.contextmanager
def benchmark() -> Iterator[Any]:
    """Return the benchmark's modules, one of which shares its name with a module of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        for folder in ("benchmarks", "benchmarks/gpu"):
            patch.syspath_prepend(str(ROOT / folder))
        patch.delitem(sys.modules, "models", raising=False)
        try:
            import bench_gpu

            yield bench_gpu
        finally:
            for name in ("bench_gpu", "kernels", "staging", "turns", "models"):
                sys.modules.pop(name, None)


def test_every_row_is_produced(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, every_row, policy="on demand")


def every_row(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    with benchmark() as bench:
        sizes, folder = bench.Sizes.dry(), Path(shared_folder(rank))
        rows = list(bench.all_rows(SimulatedPlace(gpus), rank, dist.group.WORLD, sizes, folder))
        for row in rows:
            assert row.keys() == bench.row("", [1.0], [1.0], "").keys() and row["samples"] > 0
        counted = {start: sum(start in row["case"] and row["goal"] is not None for row in rows) for start in GOALS}
        assert counted == GOALS
        assert all(row["ok"] for row in rows if row["case"].startswith("host waits"))
