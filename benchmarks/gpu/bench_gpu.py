"""Modules on GPUs: a training step against torch's DDP over NCCL, copies into buckets and the exact norm against the card's own
copy bandwidth, PowerSGD against torch's hook. One rank a GPU, all GPUs of this machine; times are CUDA events'.

    .venv/bin/python benchmarks/gpu/bench_gpu.py [--quick] [--json FILE]

Without a GPU it prints one row that says why it was skipped, and succeeds. It has not been run on a GPU yet: there is no result.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

sys.path.append(str(Path(__file__).resolve().parents[1]))
import models  # noqa: E402
from shardwright import _engine  # noqa: E402

import shardwright as sw  # noqa: E402

Row = dict[str, Any]
CASES = {name: models.CASES[name] for name in ("mlp", "gpt")}
COPIES, COPY_NUMEL = 400, 64 << 10
NORM_NUMEL = 64 << 20
MATRICES = [(256 * (1 + k % 4), 256 * (1 + k % 3)) for k in range(240)]


def reason_to_skip() -> str:
    """Why nothing can be measured here; empty if something can."""
    try:
        _engine.cuda_devices()
    except (NotImplementedError, sw.Error) as error:
        return str(error)
    return "" if torch.cuda.is_available() else "this torch has no CUDA"


def row(
    case: str, ours: list[float], peer: list[float], peer_name: str, unit: str = "ms", goal: float | None = None
) -> Row:
    """Smaller is better."""
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


def take_turns(arms: dict[str, Callable[[], None]], rounds: int, repeat: int) -> dict[str, list[float]]:
    """Milliseconds an arm, interleaved; ranks begin each sample together, and the slowest one's time counts."""
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for work in arms.values():
        for _ in range(3):
            work()
    for _ in range(rounds):
        for name, work in arms.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            dist.barrier()
            begin.record()
            for _ in range(repeat):
                work()
            end.record()
            torch.cuda.synchronize()
            slowest = torch.tensor(begin.elapsed_time(end) / repeat, dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            taken[name].append(float(slowest))
    return taken


def step_rows(rank: int, nccl: Any, rounds: int) -> list[Row]:
    """Forward, backward and a fused AdamW step. The losses of three steps agree before anything is timed."""
    rows = []
    for name, case in CASES.items():
        batch = tuple(part.cuda() for part in case.batch(rank))
        torch_ddp = torch.nn.parallel.DistributedDataParallel
        wrapped = {
            "ours": sw.DistributedDataParallel(case.model().cuda()),
            "ours, deterministic": sw.DistributedDataParallel(case.model().cuda(), deterministic=True),
            "torch DDP": torch_ddp(case.model().cuda(), [rank], process_group=nccl, gradient_as_bucket_view=True),
        }
        steps, losses = {}, {}
        for arm, module in wrapped.items():
            steps[arm] = _step(case, module, batch)
            losses[arm] = [float(steps[arm]()) for _ in range(3)]
            assert all(abs(a - b) <= 1e-3 * abs(b) for a, b in zip(losses[arm], losses["ours"])), losses
        before = wrapped["ours"]._engine().reducer.stats()["host_waits"]
        taken = take_turns(steps, rounds, 10)  # type: ignore[arg-type]
        waits = wrapped["ours"]._engine().reducer.stats()["host_waits"] - before
        rows.append(row(f"step {name}", taken["ours"], taken["torch DDP"], "torch DDP"))
        rows.append(row(f"step {name}, deterministic", taken["ours, deterministic"], taken["torch DDP"], "torch DDP"))
        rows.append({**row(f"host waits in the steps of {name}", [waits], [1], "none", "count", 0.0), "ratio": waits})
    return rows


def _step(case: models.Case, module: torch.nn.Module, batch: tuple[torch.Tensor, ...]) -> Callable[[], torch.Tensor]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)

    def step() -> torch.Tensor:
        loss = case.loss(module, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def kernel_rows(rounds: int) -> list[Row]:
    """Against a device-to-device copy that moves the same bytes."""
    wrapped = sw.DistributedDataParallel(torch.nn.Linear(1, 1).cuda())
    link = wrapped._engine().link
    sources = [torch.randn(COPY_NUMEL, device="cuda") for _ in range(COPIES)]
    targets = [torch.empty_like(source) for source in sources]
    pairs = [(t.data_ptr(), s.data_ptr(), s.numel() * 4) for s, t in zip(sources, targets)]
    one, other = torch.randn(COPIES * COPY_NUMEL, device="cuda"), torch.empty(COPIES * COPY_NUMEL, device="cuda")
    large, half = torch.randn(NORM_NUMEL, device="cuda"), torch.empty(NORM_NUMEL // 2, device="cuda")
    link.comm.pack(pairs, link.current_stream())
    assert all(torch.equal(s, t) for s, t in zip(sources, targets))
    assert abs(link.norm([large]) - float(large.double().norm())) <= 1e-9 * NORM_NUMEL
    taken = take_turns(
        {
            "pack": lambda: link.comm.pack(pairs, link.current_stream()),
            "foreach": lambda: torch._foreach_copy_(targets, sources),
            "copy": lambda: other.copy_(one),
            "norm": lambda: link.norm([large]) and None,
            "torch norm": lambda: float(torch.linalg.vector_norm(large)) and None,
            "half copy": lambda: half.copy_(large[: NORM_NUMEL // 2]),  # moves as many bytes as a norm reads
        },
        rounds,
        10,
    )
    return [
        row(f"pack {COPIES} x {COPY_NUMEL * 4 >> 10} KiB", taken["pack"], taken["copy"], "one copy", goal=1 / 0.85),
        row(f"pack {COPIES} x {COPY_NUMEL * 4 >> 10} KiB", taken["pack"], taken["foreach"], "torch._foreach_copy_"),
        row("exact norm of 256 MiB, host waits", taken["norm"], taken["half copy"], "copy of as many bytes"),
        row("exact norm of 256 MiB, host waits", taken["norm"], taken["torch norm"], "vector_norm and .item()"),
    ]


class Given(torch.nn.Module):
    """Whose gradients are what it is called with: a backward of elementwise products, and what averages behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.zeros(rows, cols) for rows, cols in MATRICES)

    def forward(self, given: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([(weight * each).sum() for weight, each in zip(self.weights, given)]).sum()


def powersgd_arms(rank: int, where: torch.device, group: Any) -> dict[str, Callable[[], None]]:
    """Backwards through low rank, ours and torch's, and a plain one. Gradients of rank one come through whole before anything is timed."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs

    generator = torch.Generator().manual_seed(rank)
    given = [torch.randn(m, 1, generator=generator) @ torch.ones(1, n) for m, n in MATRICES]
    means = []
    for each in given:
        total = each.clone()
        dist.all_reduce(total)
        means.append(total / dist.get_world_size())
    placed = [each.to(where) for each in given]
    ids = [where.index] if where.type == "cuda" else None
    modules: dict[str, Any] = {
        "ours": sw.DistributedDataParallel(Given().to(where), compress=sw.PowerSGD(4), bucket_cap_mb=1000),
        "torch": torch.nn.parallel.DistributedDataParallel(
            Given().to(where), ids, process_group=group, bucket_cap_mb=1000
        ),
        "plain": torch.nn.parallel.DistributedDataParallel(
            Given().to(where), ids, process_group=group, bucket_cap_mb=1000
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


def powersgd_rows(rank: int, nccl: Any, rounds: int) -> list[Row]:
    """Whole backwards, so the ratio is what a step sees of it; less the plain one it is about the hooks alone."""
    taken = take_turns(powersgd_arms(rank, torch.device("cuda", rank), nccl), rounds, 5)
    plain = statistics.median(taken["plain"])
    what = f"PowerSGD r = 4, {len(MATRICES)} matrices"
    return [
        row(f"backward, {what}", taken["ours"], taken["torch"], "torch powerSGD_hook"),
        row(
            f"{what}: beyond a plain backward",
            [each - plain for each in taken["ours"]],
            [each - plain for each in taken["torch"]],
            "torch powerSGD_hook",
            goal=1 / 3,
        ),
    ]


def run_rank(rank: int, world_size: int, folder: str, quick: bool, path: str | None) -> None:
    torch.cuda.set_device(rank)
    store = dist.FileStore(os.path.join(folder, "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=300))
    rounds = 5 if quick else 15
    nccl = dist.new_group(backend="nccl")
    rows = step_rows(rank, nccl, rounds) + kernel_rows(rounds) + powersgd_rows(rank, nccl, rounds)
    if rank == 0:
        device = torch.cuda.get_device_name()
        first = {"machine": f"{world_size} x {device}", "torch": torch.__version__, "command": " ".join(sys.argv)}
        write([first, *rows], path)
    dist.destroy_process_group()


def write(rows: list[Row], path: str | None) -> None:
    text = "\n".join(json.dumps(each) for each in rows)
    print(text)
    if path:
        Path(path).write_text(text + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--json", metavar="FILE", help="write the rows there too")
    options = parser.parse_args()
    reason = reason_to_skip()
    if reason:
        write([{"bench": "gpu", "skipped": reason}], options.json)
        return
    import tempfile

    count = torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run_rank, (count, folder, options.quick, options.json), nprocs=count)


if __name__ == "__main__":
    main()
