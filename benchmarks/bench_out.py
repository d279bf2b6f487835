"""Benchmark of weights on their way out: iter_full_parameters against plain copies, save_pretrained against the disk.

The module is private at zero=3: a rank has its slices alone. *Copies*: each rank copies as many bytes, in chunks of the
same size, from memory that all ranks map to two buffers that take turns. *Disk*: each rank writes its part of as many
bytes past the page cache, into an allocated file, and syncs it. Arms take turns; first each result is checked, element
by element. Peak memory is that of all ranks together as proportional set size (PSS), above the start.

SW_BENCH_DIR names the directory (default: the system's temporary directory), SW_BENCH_GB the model's size (default: 4).
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import bench_checkpoint
import common
import shardwright as sw
import torch
import torch.distributed as dist
from pss import pss_bytes
from torch import nn

GOAL_STREAM, GOAL_DISK = 0.8, 1.2
WIDTH = 4096
CHUNK_BYTES = 256 << 20
LAYER_BYTES = WIDTH * WIDTH * 4
#: keeps modules alive: dropping a wrapper would give each rank whole parameters
_kept: list[Any] = []


def model_of(layers: int) -> Any:
    with torch.device("meta"):
        module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])

    def init(each: nn.Module) -> None:
        if isinstance(each, nn.Linear):  # cheap, and no two values next to each other are equal
            torch.arange(each.weight.numel(), out=each.weight.detach().view(-1)).mul_(1e-3)

    return sw.wrap(module, zero=3, share_parameters=False, init=init, units=(nn.Linear,))


def check(tensor: torch.Tensor) -> None:
    wanted = torch.arange(WIDTH * WIDTH, dtype=torch.float32).mul_(1e-3)
    if not torch.equal(tensor.reshape(-1), wanted):
        raise SystemExit("the values are not the module's")


def stream(rank: int, world_size: int, layers: int, shared: str, rounds: int, budget_s: float) -> Any:
    model = model_of(layers)
    source = torch.from_file(shared, shared=True, size=layers * LAYER_BYTES // 4)
    if rank == 0:
        source.fill_(1)
    dist.barrier()
    for _, each in sw.iter_full_parameters(model):
        check(each)
    step = CHUNK_BYTES // 4

    def ours(receiver: Any) -> None:
        for _ in sw.iter_full_parameters(model, bytes=CHUNK_BYTES, ranks=receiver):
            pass

    def copies(receiver: Any) -> None:
        if receiver in ("all", rank):
            buffers = [torch.empty(step), torch.empty(step)]
            for number, at in enumerate(range(0, source.numel(), step)):
                part = source[at : at + step]
                buffers[number % 2][: part.numel()].copy_(part)
        dist.barrier()

    arms: dict[str, Callable[[], Any]] = {}
    for receiver in ("all", 0):
        arms[f"ours {receiver}"] = lambda to=receiver: ours(to)
        arms[f"copies {receiver}"] = lambda to=receiver: copies(to)
    return common.interleave(arms, dist.barrier, rounds=rounds, budget_s=budget_s, warmup=1)


def save(rank: int, world_size: int, layers: int, folder: str, rounds: int, budget_s: float) -> Any:
    model = model_of(layers)
    sw.save_pretrained(model, os.path.join(folder, "model"))
    dist.barrier()
    if rank == 0:
        for path in sorted(Path(folder, "model").glob("*.safetensors")):
            from shardwright.formats.model_files import read_safetensors

            for each in read_safetensors(str(path)).values():
                check(each.read())
    dist.barrier()
    size = layers * LAYER_BYTES // world_size

    def disk() -> None:
        bench_checkpoint.raw_write(os.path.join(folder, f"raw-{rank}"), size)
        dist.barrier()
        if rank == 0:
            for each in range(world_size):
                os.unlink(os.path.join(folder, f"raw-{each}"))

    arms = {"ours": lambda: sw.save_pretrained(model, os.path.join(folder, "model")), "disk": disk}
    return common.interleave(arms, dist.barrier, rounds=rounds, budget_s=budget_s, warmup=1)


def weigh(rank: int, world_size: int, layers: int, folder: str, what: str) -> int:
    """Return the PSS with the model. The parent process watches the peak."""
    model = model_of(layers)
    _kept.append(model)
    dist.barrier()
    start = pss_bytes("self")
    Path(folder, f"begun-{rank}").touch()
    dist.barrier()
    if what == "save":
        sw.save_pretrained(model, os.path.join(folder, "model"))
    else:
        for _ in sw.iter_full_parameters(model, bytes=CHUNK_BYTES, ranks="all" if what == "all" else 0):
            pass
    dist.barrier()
    time.sleep(0.1)
    return start


def peak_above(layers: int, world_size: int, folder: str, what: str) -> float:
    """Return the peak of all ranks together above the start, in MiB."""
    peak = 0

    def watch(pids: Sequence[int]) -> None:
        nonlocal peak
        if all(Path(folder, f"begun-{rank}").exists() for rank in range(world_size)):
            peak = max(peak, sum(map(pss_bytes, pids)))

    start = sum(common.run_ranks(world_size, weigh, layers, folder, what, watch=watch))
    for each in Path(folder).glob("begun-*"):
        each.unlink()
    return (peak - start) / 2**20


def main() -> None:
    report, quick = common.begin("out", __doc__, ["stream", "save", "memory"])
    rounds, budget_s = (common.LEAST_ROUNDS, 1.0) if quick else (7, 60.0)
    size = 0.25 if quick else float(os.environ.get("SW_BENCH_GB", "4"))
    layers = max(int(size * 1e9) // LAYER_BYTES, 2)
    nbytes = layers * LAYER_BYTES
    folder = tempfile.mkdtemp(prefix="bench-out-", dir=os.environ.get("SW_BENCH_DIR"))
    try:
        for world_size in (2, 4) if report.wants("stream") else ():
            few = max(layers // 2, 2)  # the source has a second copy of the bytes
            with tempfile.NamedTemporaryFile(dir="/dev/shm") as shared:
                shared.truncate(few * LAYER_BYTES)
                results = common.run_ranks(world_size, stream, few, shared.name, rounds, budget_s)
            times = common.timings(results)
            for receiver, count in (("all", world_size), ("0", 1)):
                ours, copies = (times[f"{arm} {receiver}"] for arm in ("ours", "copies"))
                case = f"iter_full_parameters, {few * LAYER_BYTES / 1e9:.1f} GB, ranks={receiver}, W={world_size}"
                extra: dict[str, Any] = {"samples": len(ours.kept), "discarded": ours.discarded, "spread": ours.spread}
                extra["gb_per_s"] = count * few * LAYER_BYTES / ours.median / 1e9
                report.add(case, "s", ours.median, copies.median, "copies", goal=GOAL_STREAM, larger=True, **extra)
        for world_size in (4,) if report.wants("save") else ():
            results = common.run_ranks(world_size, save, layers, folder, rounds, budget_s)
            times = common.timings(results)
            case = f"save_pretrained, {nbytes / 1e9:.1f} GB, W={world_size}"
            extra = {"samples": len(times["ours"].kept), "discarded": times["ours"].discarded}
            extra["gb_per_s"] = nbytes / times["ours"].median / 1e9
            report.add(case, "s", times["ours"].median, times["disk"].median, "disk", goal=GOAL_DISK, **extra)
        for what in ("all", "0", "save") if report.wants("memory") else ():
            found = peak_above(layers, 4, folder, what)
            name = "save_pretrained" if what == "save" else f"iter_full_parameters, ranks={what}"
            most = 4 * 16 if what == "save" else 2 * CHUNK_BYTES / 2**20 * (4 if what == "all" else 1)
            report.add(
                f"peak PSS above the model, {name}, {nbytes / 1e9:.1f} GB, W=4", "MiB", found, most, "promise", goal=1.1
            )
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
