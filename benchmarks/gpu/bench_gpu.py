"""All measurements on GPUs, one rank a GPU, on all GPUs of this machine; times are those of CUDA events.

    .venv/bin/python benchmarks/gpu/bench_gpu.py [--quick] [--json FILE] [--folder FOLDER]

Training steps against torch's DDP over NCCL, with their host waits; kernels against the card's own copy bandwidth
(kernels.py); staging of checkpoints (staging.py); PowerSGD against torch's hook. The run should end within 8 minutes on
one H200; the last row has its time.

Without a GPU the program prints one row with the reason and succeeds. It has not been run on a GPU yet, so there is no
result. A test produces every row on simulated GPUs, where figures mean nothing
(tests/ranks/test_the_gpu_benchmark_starts.py).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import shardwright as sw
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from kernels import kernel_rows
from shardwright import _engine
from shardwright_tools.gpu_check.place import Gpu
from staging import staging_rows
from turns import Arms, Row, Sizes, count_row, models, row, take_turns

LIMIT_S = 8 * 60


def reason_to_skip() -> str:
    """Return the reason why nothing can be measured here, or ""."""
    try:
        _engine.cuda_devices()
    except (NotImplementedError, sw.Error) as error:
        return str(error)
    return "" if torch.cuda.is_available() else "this torch has no CUDA"


def step_rows(where: Gpu, rank: int, nccl: Any, sizes: Sizes) -> list[Row]:
    """Time a step of forward, backward and fused AdamW, after a check that the losses of three steps agree."""
    rows = []
    for name, case in sizes.cases.items():
        batch = tuple(where.memory(part) for part in case.batch(rank))
        torch_ddp = torch.nn.parallel.DistributedDataParallel
        ids = [where.device.index] if where.device.type == "cuda" else None
        wrapped = {
            "ours": sw.DistributedDataParallel(where.put(case.model())),
            "ours, deterministic": sw.DistributedDataParallel(where.put(case.model()), deterministic=True),
            "torch DDP": torch_ddp(where.put(case.model()), ids, process_group=nccl, gradient_as_bucket_view=True),
        }
        made = {
            arm: (module, torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True))
            for arm, module in wrapped.items()
        }
        for zero in (0, 1, 2, 3):
            module = where.put(case.model())
            made[f"ours, zero={zero}, sw.optim"] = sw.wrap(
                module, sw.optim.AdamW(module.parameters(), lr=1e-4), zero=zero
            )
        steps: Arms = {arm: _step(case, *each, batch) for arm, each in made.items()}
        losses = {arm: [float(run()) for _ in range(3)] for arm, run in steps.items()}
        for arm, found in losses.items():
            assert all(abs(a - b) <= 1e-3 * abs(b) for a, b in zip(found, losses["torch DDP"])), (arm, losses)
        before = {arm: _host_waits(each[0]) for arm, each in made.items() if arm != "torch DDP"}
        taken = take_turns(where, steps, sizes.rounds, sizes.repeat)
        for arm, waits in before.items():
            case_name = f"step {name}{arm.removeprefix('ours')}"
            rows.append(row(case_name, taken[arm], taken["torch DDP"], "torch DDP"))
            rows.append(count_row(f"host waits, {case_name}", _host_waits(made[arm][0]) - waits))
    return rows


def _host_waits(module: Any) -> int:
    """Return the number of times that the host waited for the GPU."""
    waits: int = module._engine.replica.reducer.stats()["host_waits"]
    return waits


def _step(
    case: models.Case, module: Any, optimizer: Any, batch: tuple[torch.Tensor, ...]
) -> Callable[[], torch.Tensor]:
    def step() -> torch.Tensor:
        loss = case.loss(module, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


class Given(torch.nn.Module):
    """A module whose gradients are its inputs. A backward is an elementwise product and the averaging that follows."""

    def __init__(self, matrices: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.zeros(rows, cols) for rows, cols in matrices)

    def forward(self, given: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([(weight * each).sum() for weight, each in zip(self.weights, given)]).sum()


def powersgd_arms(where: Gpu, rank: int, group: Any, matrices: Sequence[tuple[int, int]]) -> Arms:
    """Return low-rank backwards, ours and torch's, and a plain one. Check that rank-one gradients are exact."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs

    generator = torch.Generator().manual_seed(rank)
    given = [torch.randn(m, 1, generator=generator) @ torch.ones(1, n) for m, n in matrices]
    means = []
    for each in given:
        total = each.clone()
        dist.all_reduce(total)
        means.append(total / dist.get_world_size())
    placed = [where.memory(each) for each in given]
    ids = [where.device.index] if where.device.type == "cuda" else None
    modules: dict[str, Any] = {
        "ours": sw.DistributedDataParallel(where.put(Given(matrices)), compress=sw.PowerSGD(4), bucket_cap_mb=1000),
        "torch": torch.nn.parallel.DistributedDataParallel(
            where.put(Given(matrices)), ids, process_group=group, bucket_cap_mb=1000
        ),
        "plain": torch.nn.parallel.DistributedDataParallel(
            where.put(Given(matrices)), ids, process_group=group, bucket_cap_mb=1000
        ),
    }
    state = theirs.PowerSGDState(group, 4, start_powerSGD_iter=2)
    modules["torch"].register_comm_hook(state, theirs.powerSGD_hook)

    def backward(module: Any) -> Callable[[], None]:
        def run() -> None:
            module.zero_grad()
            module(placed).backward()

        return run

    arms = {name: backward(module) for name, module in modules.items()}
    for name, run in arms.items():
        for _ in range(4):
            run()
        for weight, mean in zip(modules[name].module.weights, means):
            off = float((weight.grad.cpu() - mean).abs().max())
            assert off <= 1e-3 * float(mean.abs().max()), (name, off)
    return arms


def powersgd_rows(where: Gpu, rank: int, nccl: Any, sizes: Sizes) -> list[Row]:
    """Time whole backwards, and from them each hook's own time: the part beyond the plain backward."""
    arms = powersgd_arms(where, rank, nccl, sizes.matrices)
    taken = take_turns(where, arms, sizes.rounds, max(1, sizes.repeat // 2))
    plain = statistics.median(taken["plain"])
    case = f"PowerSGD r = 4, {len(sizes.matrices)} matrices"
    return [
        row(f"backward, {case}", taken["ours"], taken["torch"], "torch powerSGD_hook"),
        row(
            f"{case}: beyond a plain backward",
            [each - plain for each in taken["ours"]],
            [each - plain for each in taken["torch"]],
            "torch powerSGD_hook",
            goal=1 / 3,
        ),
    ]


def all_rows(where: Gpu, rank: int, nccl: Any, sizes: Sizes, folder: Path) -> Iterator[Row]:
    """Yield rows section by section, so that a failure keeps the rows before it."""
    begin = time.monotonic()
    yield from kernel_rows(where, sizes)
    yield from step_rows(where, rank, nccl, sizes)
    yield from powersgd_rows(where, rank, nccl, sizes)
    yield from staging_rows(where, sizes, folder)
    yield row("all of it", [time.monotonic() - begin], [LIMIT_S], "8 minutes", "s", goal=1.0)


def run_rank(rank: int, world_size: int, folder: str, quick: bool, path: str | None) -> None:
    torch.cuda.set_device(rank)
    store = dist.FileStore(os.path.join(folder, "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=300))
    nccl = dist.new_group(backend="nccl")
    if rank == 0:
        machine = f"{world_size} x {torch.cuda.get_device_name()}"
        first = {"machine": machine, "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}
        write({**first, "command": " ".join(sys.argv)}, path)
    for each in all_rows(Gpu(rank), rank, nccl, Sizes.quick() if quick else Sizes(), Path(folder)):
        if rank == 0:
            write(each, path)
    dist.destroy_process_group()


def write(each: Row, path: str | None) -> None:
    text = json.dumps(each)
    print(text, flush=True)
    if path:
        with Path(path).open("a") as file:
            file.write(text + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--json", metavar="FILE", help="also write the rows there")
    parser.add_argument(
        "--folder", help="where checkpoints are written: 2 GiB (default: the system's temporary folder)"
    )
    options = parser.parse_args()
    if options.json:
        Path(options.json).unlink(missing_ok=True)
    reason = reason_to_skip()
    if reason:
        write({"bench": "gpu", "skipped": reason}, options.json)
        return
    import tempfile

    count = torch.cuda.device_count()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        multiprocessing.spawn(run_rank, (count, folder, options.quick, options.json), nprocs=count)


if __name__ == "__main__":
    main()
