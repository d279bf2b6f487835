"""`shardwright plan --simulate` against steps that were measured: here, and by others.

`measured`: the GPT at zero=0, 2 and 3 on hosts x ranks of 1x2, 1x4, 2x1 and 2x2, network namespaces with 1 Gbit/s between them, in
five rounds that run every shape once. Rates come from the same rounds, but from other work: a step without communication on two
ranks, an all_reduce, a copy, a broadcast of torch's. `published`: published.json, tables of papers; one point of each kind of GPU
and program sets `mfu` and is marked, the others are predicted with it. No bound on their errors: every row is printed.
"""

from __future__ import annotations

import functools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist
from arms import ADAMW, Trainer
from bench_allreduce import MB, Pool
from bench_hosts import RATE, enter_host, network
from models import CASES, GPT_BATCH, GPT_CONTEXT
from shardwright.comm.process_group import host_group
from shardwright_tools.planner.calibration import rates_of
from shardwright_tools.planner.choose import Work
from shardwright_tools.planner.costs import Run
from shardwright_tools.planner.machine import GPUS, Machine, link_of
from shardwright_tools.planner.shape import Shape, from_config, of_module
from shardwright_tools.planner.simulate import Simulated, simulate

SHAPES = {"1x2": (1, 2), "1x4": (1, 4), "2x1": (2, 1), "2x2": (2, 2)}
STAGES = {0: "ours", 2: "zero=2", 3: "zero=3"}
ROUNDS, STEPS, GOAL = 5, 5, 1.15
SIZE = 25 * MB
#: a step, and a broadcast, whose root returns before the others have all of it
SLOWEST: dict[str, Any] = {"zero=": max, "betwe": min}
COMPUTING = ("forward_s", "backward_s", "optimizer_s")
PARTS = ("measured", "published")


def median_s(work: Any, barrier: Any, count: int = STEPS) -> float:
    """Return the median seconds of `count` calls that all ranks begin together, after one to warm up."""
    times = []
    for _ in range(count + 1):
        barrier()
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def measure(rank: int, world_size: int, shape: str) -> dict[str, float]:
    """Return seconds of a step by stage, and the rates that this shape shows."""
    trainers = {zero: Trainer("gpt", arm, rank) for zero, arm in STAGES.items()}
    for trainer in trainers.values():
        trainer.step()
        trainer.step()
    times: dict[int, list[float]] = {zero: [] for zero in STAGES}
    for turn in range(STEPS):
        for zero in sorted(STAGES, key=lambda zero: (zero + turn) % 3):
            dist.barrier()
            begin = time.perf_counter()
            trainers[zero].step()
            times[zero].append(time.perf_counter() - begin)
    found = {f"zero={zero}": statistics.median(each) for zero, each in times.items()}
    if shape == "1x2":
        found |= measure_computing(rank) | measure_host(world_size)
    if shape == "1x4":
        found["alone_s"] = sum(measure_computing(rank).values())
    return found | (measure_network() if shape == "2x1" else {})


def measure_computing(rank: int) -> dict[str, float]:
    """Return the seconds of a step without communication by phase: this rank's shares of the slowest rank's median."""
    case = CASES["gpt"]
    module, batch = case.model(), case.batch(rank)
    optimizer = torch.optim.AdamW(module.parameters(), **ADAMW)
    phases: dict[str, list[float]] = {name: [] for name in COMPUTING}
    slowest = []
    for _ in range(2 * STEPS):
        optimizer.zero_grad(set_to_none=True)
        dist.barrier()
        marks = [time.perf_counter()]
        loss = case.loss(module, batch)
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        optimizer.step()
        marks.append(time.perf_counter())
        for phase, begin, end in zip(phases.values(), marks, marks[1:]):
            phase.append(end - begin)
        whole = torch.tensor(marks[-1] - marks[0], dtype=torch.float64)
        dist.all_reduce(whole, op=dist.ReduceOp.MAX)
        slowest.append(whole.item())
    medians = {name: statistics.median(each[2:]) for name, each in phases.items()}
    return {name: each * statistics.median(slowest[2:]) / sum(medians.values()) for name, each in medians.items()}


def measure_host(world_size: int) -> dict[str, float]:
    comm = host_group(dist.group.WORLD, 60.0).comm
    pool, small = Pool(comm, SIZE), Pool(comm, 4096)
    source, target = torch.ones(SIZE // 4), torch.zeros(SIZE // 4)
    seconds = median_s(pool.all_reduce, comm.barrier)
    return {
        "inside_GBps": 2 * (world_size - 1) / world_size * SIZE / seconds / 1e9,
        "inside_us": median_s(small.all_reduce, comm.barrier, 50) / 2 * 1e6,
        "memory_GBps": SIZE / median_s(lambda: target.copy_(source), comm.barrier) / 1e9,
    }


def measure_network() -> dict[str, float]:
    tensor, word = torch.zeros(SIZE // 4), torch.ones(1)
    rate = SIZE / median_s(lambda: dist.broadcast(tensor, 0), dist.barrier, 3) / 1e9
    begin, processor = time.perf_counter(), time.process_time()
    dist.all_reduce(tensor)
    cores = (time.process_time() - processor) / (time.perf_counter() - begin)
    return {
        "between_GBps": rate,
        "hop_us": median_s(lambda: dist.all_reduce(word), dist.barrier, 20) / 2 * 1e6,
        "carrier_cores": cores,
    }


def run_shape(shape: str) -> dict[str, float]:
    """Return the slowest rank's seconds, and the mean over ranks of its rates."""
    hosts, ranks = SHAPES[shape]
    if hosts == 1:
        results = common.run_ranks(ranks, measure, shape)
    else:
        with network.Network(hosts, RATE) as made:
            enter = functools.partial(enter_host, [made.namespaces(rank // ranks) for rank in range(hosts * ranks)])
            results = common.run_ranks(hosts * ranks, measure, shape, enter=enter)
    return {name: SLOWEST.get(name[:5], statistics.fmean)([each[name] for each in results]) for name in results[0]}


def calibration_of(found: dict[str, dict[str, float]], hosts: int) -> dict[str, Any]:
    host, wire = found["1x2"], found["2x1"]
    computing = sum(host[name] for name in COMPUTING)
    return {
        "inside": {"latency_us": host["inside_us"], "bandwidth_GBps": host["inside_GBps"]},
        "between": {
            "latency_us": wire["hop_us"], "bandwidth_GBps": wire["between_GBps"], "cores": wire["carrier_cores"]
        },
        "memory_GBps": host["memory_GBps"],
        "cores": common.CORES / hosts,  # the hosts are namespaces of one machine
        "turns": found["1x4"]["alone_s"] / (4 / common.CORES * computing),
        "compute": {name: host[name] for name in COMPUTING},
    }  # fmt: skip


def predict(found: dict[str, dict[str, float]], shape: str, zero: int, model: Shape) -> Simulated:
    hosts, ranks = SHAPES[shape]
    machine = Machine(hosts, ranks, 1 << 40, 1.0, 1.0, False)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(calibration_of(found, hosts), file)
        file.flush()
        rates = rates_of(machine, file.name)
    work = Work(micro_batch=GPT_BATCH, sequence=GPT_CONTEXT, precision="fp32")
    return simulate(model, machine, work, Run(zero), rates)


def measured(report: common.Report, *, quick: bool) -> None:
    rounds: list[dict[str, dict[str, float]]] = []
    for _ in range(1 if quick else ROUNDS):
        rounds.append({shape: run_shape(shape) for shape in SHAPES})
        print(json.dumps(rounds[-1]), flush=True)
    found = {
        shape: {name: statistics.median(each[shape][name] for each in rounds) for name in rounds[0][shape]}
        for shape in SHAPES
    }
    report.rows.append({"bench": report.bench, "case": "rates", **calibration_of(found, 1)})
    model = of_module(CASES["gpt"].model(), "gpt")
    for shape in SHAPES:
        for zero in STAGES:
            made = predict(found, shape, zero, model)
            truth = found[shape][f"zero={zero}"]
            spread = [each[shape][f"zero={zero}"] * 1e3 for each in rounds]
            report.add(
                f"gpt {shape} zero={zero}", "ms", made.step_s * 1e3, truth * 1e3, "measured", goal=None, samples=len(rounds),
                within=max(made.step_s, truth) / min(made.step_s, truth) <= GOAL, least=min(spread), most=max(spread),
                **{f"{name}_ms": seconds * 1e3 for name, seconds in made.seconds.items()},
            )  # fmt: skip


# Published points ------------------------------------------------------------------------------------------------------


def predict_published(row: dict[str, Any], models: dict[str, Any], mfu: float) -> float:
    """Return the simulated value in the row's unit: TFLOP/s of the model per GPU, tokens/s per GPU, or seconds."""
    peak = GPUS[row["gpu"]][0]
    hosts, ranks = -(-row["gpus"] // row["per_host"]), min(row["gpus"], row["per_host"])
    machine = Machine(
        hosts, ranks, 1 << 40, *(link_of(row[name], name) for name in ("link", "network")), True, row["gpu"], peak
    )
    names = ("micro_batch", "sequence", "accumulate", "tp", "pp", "cp", "precision")
    same = {name: row[name] for name in names if name in row}
    run = Run(row["zero"], row.get("checkpointed", False), chunks=row.get("chunks", 1), averages_late=row.get("late"))
    model = from_config(models[row["model"]], row["model"])
    made = simulate(model, machine, Work(mfu=mfu, **same), run, rates_of(machine))
    again = 4 / 3 if row.get("counts_recomputation") else 1.0
    return {
        "tflops": made.tflops * again, "tokens/s": made.tokens_per_s / row["gpus"], "s": made.step_s
    }[row["unit"]]  # fmt: skip


def published(report: common.Report) -> None:
    read = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))
    efficiency: dict[str, float] = {}
    for row in read["points"]:
        kind, larger = row["kernels"], row["unit"] != "s"
        if row.get("sets_mfu"):
            low, high = 0.02, 1.0
            for _ in range(16):
                middle = (low + high) / 2
                is_fast = (predict_published(row, read["models"], middle) > row["value"]) == larger
                low, high = (low, middle) if is_fast else (middle, high)
            efficiency[kind] = round((low + high) / 2, 4)
        ours = predict_published(row, read["models"], efficiency[kind])
        report.add(
            row["name"], row["unit"], ours, row["value"], row["source"], goal=None,
            error=ours / row["value"] - 1, mfu_of_computing=efficiency[kind], sets_mfu=bool(row.get("sets_mfu")),
        )  # fmt: skip


def main() -> None:
    report, quick = common.begin("simulate", __doc__, PARTS)
    if report.wants("published"):
        published(report)
    if report.wants("measured"):
        try:
            measured(report, quick=quick)
        except network.Refused as error:
            report.add_no_result("measured", str(error))


if __name__ == "__main__":
    main()
