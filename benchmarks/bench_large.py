"""Benchmark of training a model larger than its ranks' memory: private zero=3 with parameters in a file.

step: a step with parameters in a file (and with state in files too) against the longer of the same step in memory and of
the disk's time for the step's bytes, all in one run. *Cold*: the pages of the parameters' file are dropped before each
step. The disk reads and writes past the page cache, at once. llama: one step of a Llama in bfloat16 with sw.optim.AdamW,
float32 masters, parameters and state in files, 128 tokens a rank: its time by parts, and the peak PSS of all ranks
together. Where torch has no fast product of 16-bit matrices (a processor without AVX-512), that arm brings one.

SW_BENCH_DIR names a folder on the measured disk (default: the working directory).
"""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import common
import shardwright as sw
import torch
import torch.distributed as dist
from bench_checkpoint import chunk_memory, raw_read, raw_write
from bench_load import Watch
from pss import pss_bytes
from shardwright.comm.process_group import host_group
from torch import nn

WORLD_SIZE, LAYERS, BATCH, TOKENS = 2, 24, 64, 128
GOAL_STEP, GOAL_LLAMA_S, GOAL_LLAMA_MIB = 1.2, 600.0, 10 * 1024
STATES = 2  # of the parameters' size
PRODUCT_NUMEL = 8 << 20  # elements of a 16-bit matrix that are widened at once
#: keeps models alive while the parent watches
_kept: list[Any] = []


class Trained:
    """A model whose units are its layers, and its optimizer."""

    def __init__(self, width: int, offload: Any) -> None:
        torch.manual_seed(0)
        with torch.device("meta"):
            module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
        optimizer = sw.optim.AdamW(module.parameters(), lr=1e-3)
        options: dict[str, Any] = {"zero": 3, "share_parameters": False, "units": (nn.Linear,)}
        self.model, self.optimizer = sw.wrap(module, optimizer, init=True, offload=offload, **options)
        self._x = torch.randn(BATCH, width)

    def step(self) -> None:
        self.model(self._x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def dropped(folder: str) -> None:
    """Write the nameless files of a folder out, and drop their pages."""
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        if os.path.islink(path) and os.readlink(path).startswith(os.path.abspath(folder)):
            os.fsync(int(name))
            os.posix_fadvise(int(name), 0, 0, os.POSIX_FADV_DONTNEED)


def disk(path: str, reads: int, writes: int) -> Callable[[], None]:
    """Return a function that reads and writes as many bytes of two files at once."""
    chunk = len(chunk_memory(huge=True))
    reads, writes = (-(-each // chunk) * chunk for each in (reads, writes))
    raw_write(f"{path}-read", reads or chunk)

    def move() -> None:
        jobs = [(raw_read, f"{path}-read", reads), (raw_write, f"{path}-write", writes)]
        threads = [threading.Thread(target=call, args=(name, size)) for call, name, size in jobs if size]
        for each in threads:
            each.start()
        for each in threads:
            each.join()

    return move


def time_steps(rank: int, world_size: int, width: int, folder: str, rounds: int, budget_s: float) -> Any:
    comm = host_group(dist.group.WORLD, 1800.0).comm
    home = f"nvme:{folder}"
    arms = {"memory": None, "parameters": {"parameters": home}, "both": {"parameters": home, "optimizer": home}}
    trained = {name: Trained(width, offload) for name, offload in arms.items()}
    for _ in range(2):
        for each in trained.values():
            each.step()
    whole = [sw.iter_full_parameters(each.model) for each in trained.values()]
    for (name, one), *others in zip(*whole, strict=True):
        if not all(torch.equal(one, other) for _, other in others):
            raise AssertionError(f"{name}: steps through files have other bits")

    def meet() -> None:
        comm.barrier()
        dropped(folder)
        comm.barrier()

    share = LAYERS * width * width * 4 // world_size
    state = STATES * share
    warm = {name: each.step for name, each in trained.items()}
    warm["disk of parameters"] = disk(f"{folder}/a{rank}", 0, share)
    warm["disk of both"] = disk(f"{folder}/b{rank}", state, share + state)
    found = common.interleave(warm, comm.barrier, rounds=rounds, budget_s=budget_s, warmup=1)
    parts = {"parameters": trained["parameters"].step, "disk of parameters": disk(f"{folder}/c{rank}", share, share)}
    dropping = common.interleave(parts, meet, rounds=rounds, budget_s=budget_s, warmup=0)
    return {**found, **{f"cold {name}": each for name, each in dropping.items()}}


def measure_step(report: common.Report, parent: str, mib: int, rounds: int, budget_s: float) -> None:
    width = int((mib * 2**18 / LAYERS) ** 0.5) // 16 * 16
    with tempfile.TemporaryDirectory(dir=parent, prefix="bench-large-") as folder:
        times = common.timings(common.run_ranks(WORLD_SIZE, time_steps, width, folder, rounds, budget_s))
    for name, text in (
        ("parameters", "parameters in a file"),
        ("cold parameters", "parameters in a file, page cache dropped"),
        ("both", "parameters and state in files"),
    ):
        alone = times[f"{'cold ' * name.startswith('cold')}disk of {name.removeprefix('cold ')}"]
        peer, what = max(
            ((times["memory"], "the step in memory"), (alone, "the disk alone")), key=lambda pair: pair[0].median
        )
        case = f"step of {LAYERS * width * width >> 18} MiB, {WORLD_SIZE} ranks, {text}"
        report.add_times(
            case, times[name], peer, what, goal=GOAL_STEP,
            memory_ms=times["memory"].median * 1e3, disk_ms=alone.median * 1e3,
        )  # fmt: skip


def llama(million: int) -> nn.Module:
    """Return a Llama of about so many million parameters in bfloat16, on the meta device."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    width, layers = (3072, 28) if million > 1000 else (1024, 24)
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": width // 128}
    embedding = 32_000 * width
    inner = (million * 10**6 - embedding - layers * 4 * width * width) // (layers * 3 * width) // 64 * 64
    config = LlamaConfig(**sizes, intermediate_size=max(inner, width), vocab_size=32_000, tie_word_embeddings=True)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def widened_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product of two matrices; of 16-bit ones with sums in float32, rounded once, piece by piece."""
    (m, k), n = a.shape, b.shape[1]
    found = torch.empty(m, n, dtype=a.dtype)
    if a.dtype is not torch.bfloat16:
        return torch.mm(a, b, out=found)
    if k >= max(m, n):
        sums, step = torch.zeros(m, n), max(PRODUCT_NUMEL // (m + n), 1)
        for at in range(0, k, step):
            sums.addmm_(a[:, at : at + step].float(), b[at : at + step].float())
        return found.copy_(sums)
    if n < m:
        return widened_product(b.t(), a.t()).t()
    wide, step = a.float(), max(PRODUCT_NUMEL // max(m, k), 1)
    for at in range(0, n, step):
        piece = b[:, at : at + step].float()
        found[:, at : at + step] = torch.mm(wide, piece, out=torch.empty(m, piece.shape[1]))
    return found


def product_rates(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    """Return torch's rates of a product, in GFLOP/s: of float32, and of bfloat16 where both are row-major."""

    def rate(x: torch.Tensor, y: torch.Tensor) -> float:
        begin = time.perf_counter()
        torch.mm(x, y)
        return 2e-9 * x.shape[0] * x.shape[1] * y.shape[1] / (time.perf_counter() - begin)

    return rate(a, b), rate(a.bfloat16(), b.bfloat16())


def bring_products() -> Any:
    """Give torch products of 16-bit matrices in this process where its own are slow; return what keeps them there."""
    wide, narrow = product_rates(torch.ones(TOKENS, 1024), torch.ones(1024, 1024))
    if narrow > wide / 4:
        return None
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings(action="ignore"):
        library.impl("mm", widened_product, "CPU")
    return library


def train_llama(rank: int, world_size: int, million: int, folder: str) -> tuple[int, int, dict[str, float]]:
    """Return (parameters, PSS before, seconds of each part)."""
    _kept.append(bring_products())
    module = llama(million)
    count = sum(each.numel() for each in module.parameters())
    tokens = torch.randint(32_000, (1, TOKENS), generator=torch.Generator().manual_seed(rank))
    dist.barrier()
    start, marks = pss_bytes("self"), {"": time.perf_counter()}

    def mark(part: str) -> None:
        dist.barrier()
        marks[part] = time.perf_counter()

    home = f"nvme:{folder}"
    optimizer = sw.optim.AdamW(module.parameters(), lr=1e-4)
    offload = {"parameters": home, "optimizer": home}
    model, optimizer = sw.wrap(module, optimizer, init=True, zero=3, share_parameters=False, offload=offload)
    sw.checkpoint_units(model)  # a forward more, for gigabytes of activations that bring sums above the goal
    _kept.append(model)
    gc.collect()
    mark("built")
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    mark("forward")
    loss.backward()
    mark("backward")
    optimizer.step()
    optimizer.zero_grad()
    mark("step")
    assert torch.isfinite(loss)
    ends = [*marks.items()]
    return count, start, {name: end - begin for (_, begin), (name, end) in zip(ends, ends[1:])}


def measure_llama(report: common.Report, parent: str, million: int) -> None:
    watch = Watch()
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(1 << 20))  # of the ranks: what torch frees leaves the process
    with tempfile.TemporaryDirectory(dir=parent, prefix="bench-large-") as folder:
        results = common.run_ranks(WORLD_SIZE, train_llama, million, folder, watch=watch)
    count = results[0][0]
    parts = {f"{name}_s": max(each[2][name] for each in results) for name in results[0][2]}
    stepped = sum(parts.values()) - parts["built_s"]
    case = f"Llama of {count / 1e9:.2f} B in bfloat16, {WORLD_SIZE} ranks, {TOKENS} tokens each, all in files"
    report.add(f"{case}: first step", "s", stepped, GOAL_LLAMA_S, "promise", goal=1.0, samples=1, **parts)
    report.add(f"{case}: all ranks' peak PSS", "MiB", watch.all / 2**20, GOAL_LLAMA_MIB, "promise", goal=1.0, samples=1)


def main() -> None:
    numbers = {"mib": (384, "size of the model of steps"), "million": (500, "parameters of the Llama, in millions")}
    report, quick = common.begin("large", __doc__, ["step", "llama"], numbers)
    parent = os.environ.get("SW_BENCH_DIR", ".")
    common.TIMEOUT_S = 3600.0
    if report.wants("step"):
        measure_step(report, parent, 48 if quick else report.numbers["mib"], *common.effort(quick))
    if report.wants("llama") and not quick:
        measure_llama(report, parent, report.numbers["million"])


if __name__ == "__main__":
    main()
