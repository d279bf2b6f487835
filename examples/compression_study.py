"""The validation loss that compression costs: a small byte-level GPT, every compressor, SGD and Adam, several seeds.

    torchrun --nproc-per-node 2 examples/compression_study.py
    torchrun --nproc-per-node 2 examples/compression_study.py --seeds 1 --steps 40

All arms of a seed have the same weights and batches. The learning rate is tuned on uncompressed runs of seed 0 alone.
Differences are paired by seed, with a 95 % interval (Student's t). README.md beside this file has the expected output.
`--peers` runs PowerSGD alone, with torch's own hook at the same settings beside it. `--topk` runs it beside sparsified
gradients that send as many bytes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import time
from pathlib import Path

import shardwright as sw
import torch
from gpt import data, ranks
from gpt.loss import summed_loss, validate
from gpt.model import GPT
from gpt.threads import Threads
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

STUDENT_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
RATES = {"SGD": (0.1, 0.3, 1.0, 3.0), "Adam": (1e-3, 3e-3, 1e-2, 3e-2)}


@dataclasses.dataclass(frozen=True)
class TorchPowerSGD:
    """torch's DistributedDataParallel with its powerSGD_hook, which leaves at least two rounds plain."""

    rank: int
    warmup_steps: int = 2

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        wrapped = torch.nn.parallel.DistributedDataParallel(
            model, bucket_cap_mb=1000
        )  # one bucket, since several fail on Gloo
        state = power.PowerSGDState(None, self.rank, start_powerSGD_iter=self.warmup_steps)
        wrapped.register_comm_hook(state, power.powerSGD_hook)
        return wrapped


@dataclasses.dataclass(frozen=True)
class TopK:
    """torch's DistributedDataParallel with sparsified gradients: each rank sends the elements of a tensor (of all
    gradients together if `whole`) that are largest in magnitude, with error feedback. Vectors travel whole.
    """

    density: float
    whole: bool = False

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        wrapped = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1000)
        errors: dict[int, torch.Tensor] = {}

        def hook(_, bucket):  # torch compares annotations with types, and here they are texts
            flat = bucket.buffer()
            flat += errors.setdefault(bucket.index(), torch.zeros_like(flat))
            sent = torch.zeros_like(flat)
            sizes = [flat.numel()] if self.whole else [gradient.numel() for gradient in bucket.gradients()]
            dense = [False] if self.whole else [gradient.ndim < 2 for gradient in bucket.gradients()]
            for source, out, is_dense in zip(flat.split(sizes), sent.split(sizes), dense):
                kept = source.numel() if is_dense else max(1, int(source.numel() * self.density))
                at = source.abs().topk(kept, sorted=False).indices
                out[at] = source[at]
            errors[bucket.index()] = flat - sent
            torch.distributed.all_reduce(sent)
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(sent / torch.distributed.get_world_size())
            return future

        wrapped.register_comm_hook(None, hook)
        return wrapped


def arms(steps: int, options: argparse.Namespace) -> dict[str, object]:
    if options.topk:
        return {
            "none": None,
            "PowerSGD r=8": sw.PowerSGD(rank=8),
            "PowerSGD r=4": sw.PowerSGD(rank=4),
            "TopK 8 %, bytes of r=8": TopK(0.08),
            "TopK 4 %, bytes of r=4": TopK(0.04),
            "TopK 4 % of all": TopK(0.04, whole=True),
            "TopK 1 %": TopK(0.01),
        }
    if options.peers:
        return {
            "none": None,
            "PowerSGD r=8": sw.PowerSGD(rank=8, warmup_steps=2),
            "torch's hook r=8": TorchPowerSGD(8),
            "PowerSGD r=4, 10 % warm-up": sw.PowerSGD(rank=4, warmup_steps=steps // 10),
            "torch's hook r=4, 10 % warm-up": TorchPowerSGD(4, steps // 10),
        }
    return {
        "none": None,
        "bf16": sw.Bf16(),
        "fp16": sw.Fp16(),
        "int8": sw.Int8(),
        "int4 with feedback": sw.Int4(),
        "PowerSGD r=8": sw.PowerSGD(rank=8),
        "PowerSGD r=4, 10 % warm-up": sw.PowerSGD(rank=4, warmup_steps=steps // 10),
    }


def train(
    options: argparse.Namespace, corpus: tuple, optimizer: str, rate: float, compress: object, seed: int
) -> float:
    """Return the validation loss after the run, in nats/byte."""
    rank, world_size = ranks.rank_and_world_size()
    share = dict(context=options.context, rank=rank, world_size=world_size)
    torch.manual_seed(seed)
    model = GPT(context=options.context, layers=2, width=options.width, heads=4)
    if optimizer == "SGD":
        inner = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    else:
        inner = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.1)
    if isinstance(compress, (TorchPowerSGD, TopK)):
        model = compress.wrap(model)
    else:
        model, inner = sw.wrap(model, inner, compress=compress)
    batches = data.TrainingBatches(corpus[0], batch_size=options.batch_size, seed=seed, **share)
    tokens = options.batch_size * options.context / world_size
    for step in range(options.steps):
        done = step / options.steps
        for group in inner.param_groups:  # rise for a tenth of the run, then fall as half a cosine
            group["lr"] = rate * (done / 0.1 if done < 0.1 else 0.5 + 0.5 * math.cos(math.pi * (done - 0.1) / 0.9))
        (summed_loss(model, *batches.next()) / tokens).backward()
        sw.clip_grad_norm_(model, 1.0)
        inner.step()
        inner.zero_grad()
    return validate(model.module, *data.validation_windows(corpus[1], count=128, **share))


def best_rate(options: argparse.Namespace, corpus: tuple, optimizer: str) -> float:
    found = {rate: train(options, corpus, optimizer, rate, None, 0) for rate in RATES[optimizer]}
    return min(found, key=lambda rate: found[rate] if math.isfinite(found[rate]) else math.inf)


def paired(losses: list[float], plain: list[float]) -> tuple[float, float]:
    """Return the mean difference and half of its 95 % interval, in percent of the uncompressed loss."""
    differences = [100 * (ours / theirs - 1) for ours, theirs in zip(losses, plain)]
    count = len(differences)
    spread = statistics.stdev(differences) if count > 1 else math.nan
    return statistics.mean(differences), STUDENT_95.get(count, 1.96) * spread / math.sqrt(count)


def draw(path: Path, rows: list[dict]) -> str:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "plot: skipped, matplotlib is not installed"
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="validation loss against no compression, %")
    rows = [row for row in rows if row["arm"] != "none"][::-1]
    half = [0 if math.isnan(row["interval"]) else row["interval"] for row in rows]
    axes.errorbar([row["difference"] for row in rows], range(len(rows)), xerr=half, fmt="o", capsize=3)
    axes.set_yticks(range(len(rows)), [f"{row['optimizer']}: {row['arm']}" for row in rows])
    axes.axvline(0, color="gray", linewidth=0.8)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    return f"plot: {path}"


def study(options: argparse.Namespace, corpus: tuple, optimizer: str, deadline: float) -> list[dict]:
    """Return a row for each arm. A seed that would begin after `deadline` is left out on every rank."""
    rate = best_rate(options, corpus, optimizer)
    compared = arms(options.steps, options)
    losses: dict[str, list[float]] = {name: [] for name in compared}
    for seed in range(1, options.seeds + 1):
        if ranks.sum_over_ranks([float(time.monotonic() > deadline)])[0]:
            break
        for name, compress in compared.items():
            losses[name].append(train(options, corpus, optimizer, rate, compress, seed))
    rows = []
    for name, found in losses.items():
        difference, interval = paired(found, losses["none"]) if found else (math.nan, math.nan)
        row = dict(optimizer=optimizer, rate=rate, arm=name, difference=difference, interval=interval, losses=found)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="runs of each arm")
    parser.add_argument("--steps", type=int, default=300, help="steps of a run")
    parser.add_argument("--batch-size", type=int, default=16, help="rows of all ranks together")
    parser.add_argument("--context", type=int, default=64, help="bytes a row")
    parser.add_argument("--width", type=int, default=64, help="width of the residual stream")
    parser.add_argument("--peers", action="store_true", help="PowerSGD against torch's hook")
    parser.add_argument("--topk", action="store_true", help="PowerSGD against sparsified gradients of as many bytes")
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="no seed begins after this time; half of it is for SGD"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/compression_study"), help="folder of the results")
    options = parser.parse_args()
    Threads()
    sw.wrap(torch.nn.Linear(1, 1))  # joins the ranks
    rank, world_size = ranks.rank_and_world_size()
    corpus, started = data.load_corpus(), time.monotonic()
    rows = []
    for share, optimizer in enumerate(RATES, start=1):
        rows += study(options, corpus, optimizer, started + options.minutes * 60 * share / len(RATES))
    if rank == 0:
        options.out.mkdir(parents=True, exist_ok=True)
        head = {key: value for key, value in vars(options).items() if key != "out"} | dict(ranks=world_size)
        lines = [json.dumps(head | dict(seconds=round(time.monotonic() - started)))] + [json.dumps(row) for row in rows]
        (options.out / "compression_study.jsonl").write_text("\n".join(lines) + "\n")
        for row in rows:
            mean = statistics.mean(row["losses"]) if row["losses"] else math.nan
            print(
                f"{row['optimizer']:5} {row['arm']:28} {mean:.4f} nats/byte {row['difference']:+.2f} %"
                f" ± {row['interval']:.2f} ({len(row['losses'])} seeds, lr {row['rate']:g})"
            )
        print(draw(options.out / "compression_study.png", rows))
    ranks.leave()


if __name__ == "__main__":
    main()
