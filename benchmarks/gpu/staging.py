"""Benchmark of checkpoints of GPU state: time until save() returns, which includes the copy to the host, and steps
during a save.

The first save, which allocates staging memory, is left out. The peer of the first row is a link at the goal of 45 GB/s;
the peer of the second is torch's own copy into pinned memory.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import shardwright as sw
import torch
import torch.distributed as dist
from shardwright_tools.gpu_check.place import Gpu
from turns import Row, Sizes, row

_GOAL_BYTES_PER_S = 45e9
_LARGEST_SLOWDOWN = 1.01


def staging_rows(where: Gpu, sizes: Sizes, folder: Path) -> list[Row]:
    """Time saves into `folder`, which all ranks share."""
    case = next(iter(sizes.cases.values()))
    module = where.put(torch.nn.ParameterDict({"state": torch.randn(sizes.staged_numel)}))
    trained = where.put(case.model())
    module.add_module("trained", trained)
    model = sw.DistributedDataParallel(trained)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = tuple(where.memory(part) for part in case.batch(dist.get_rank()))

    def step() -> None:
        case.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    plain: list[float] = []
    beside: list[float] = []
    saved: list[float] = []
    copied: list[float] = []
    rounds = max(1, sizes.rounds // 3)
    with sw.Checkpointer(folder / "saves", module, keep_last=1) as saves:
        for number in range(1 + rounds):
            for _ in range(2):
                step()
            plain.append(_steps_ms(where, step, sizes.overlapped_steps))
            came = saves.progress["device_bytes"]
            where.synchronize()
            begin = time.perf_counter()
            saves.save(number)
            saved.append(1e3 * (time.perf_counter() - begin))
            came = saves.progress["device_bytes"] - came
            beside.append(_steps_ms(where, step, sizes.overlapped_steps))
            saves.wait()
        newest = folder / "saves" / f"step-{rounds + 1:06d}"
    _verify(newest, module)
    pinned = torch.empty(sizes.staged_numel, pin_memory=where.device.type == "cuda")
    for _ in range(1 + rounds):
        where.synchronize()
        begin = time.perf_counter()
        pinned.copy_(module["state"], non_blocking=True)
        where.synchronize()
        copied.append(1e3 * (time.perf_counter() - begin) * came / (4 * sizes.staged_numel))
    case = f"of {came >> 20} MiB"
    at_goal = [1e3 * max(came, 1) / _GOAL_BYTES_PER_S]
    return [
        row(f"save() returns, {case}", saved[1:], at_goal, "45 GB/s", goal=1.0),
        row(f"save() returns, {case}", saved[1:], copied[1:], "torch's copy into pinned memory"),
        row(
            f"{sizes.overlapped_steps} steps beside a save {case}",
            beside[1:],
            plain[1:],
            "the same steps alone",
            goal=_LARGEST_SLOWDOWN,
        ),
    ]


def _steps_ms(where: Gpu, step: Any, count: int) -> float:
    where.synchronize()
    dist.barrier()
    return where.milliseconds(step, count)


def _verify(newest: Path, module: torch.nn.Module) -> None:
    """Check the last save. `state` is never stepped on, so it must be equal."""
    found = torch.nn.ParameterDict({"state": torch.zeros_like(module["state"], device="cpu")})
    found.add_module("trained", module.trained)
    sw.load(newest, found)
    assert torch.equal(found["state"], module["state"].cpu())
