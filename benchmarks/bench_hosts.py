"""Benchmark of a whole training step, and of a broadcast, over hosts with 1 Gbit/s between them, against torch's
fastest DDP.

Hosts are network namespaces of this machine. `tc` limits their links, and their interfaces count bytes. Steps run on
two hosts of one and of two ranks, broadcasts on two to four hosts. Another row compares the bytes that a host sends in
a step with 2 (H - 1) / H gradients, the least for an all-reduce over H hosts. Needs permission to create namespaces.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist
from arms import QUICK_SETTINGS, TORCH_SETTINGS, Trainer, best_of
from bench_ddp import verify
from shardwright.comm.process_group import host_group

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "ranks"))
import network  # noqa: E402

RATE = "1gbit"
HOSTS = 2
STEP_GOALS = {1: 0.9, 2: 0.8}
BYTES_GOAL = 1.02
#: the parts that --only accepts: a model and the ranks per host
PARTS = {
    f"{case}-{HOSTS}x{ranks_a_host}": (case, ranks_a_host) for ranks_a_host in STEP_GOALS for case in ("mlp", "gpt")
}
#: ranks on each host, by broadcast case
BROADCASTS = {
    "broadcast-2x1": (1, 1),
    "broadcast-3x1": (1, 1, 1),
    "broadcast-4x1": (1, 1, 1, 1),
    "broadcast-2x2": (2, 2),
}
BROADCAST_MB = (1, 25, 100)
BROADCAST_GOAL = 1.0
#: number of torch's settings that take part in the timed turns, after one trial of each
CONTENDERS = 2
COUNTED_STEPS = 2


def enter_host(namespaces: Sequence[Sequence[str]], rank: int) -> None:
    network.enter(namespaces[rank])
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"


def bytes_sent() -> int:
    """Return the bytes that this host has sent. A frame of 64 KiB, which the interface splits later, has one header."""
    with open("/proc/self/net/dev", encoding="ascii") as file:
        return next(int(line.split()[9]) for line in file if line.strip().startswith("eth0:"))


def count_bytes(trainer: Trainer) -> int:
    """Return the bytes that this host sends in one step."""
    dist.barrier()
    before = bytes_sent()
    dist.barrier()
    for _ in range(COUNTED_STEPS):
        trainer.step()
    dist.barrier()
    return (bytes_sent() - before) // COUNTED_STEPS


def choose(trainers: dict[str, Trainer], settings: Sequence[str]) -> list[str]:
    """Return the fastest of torch's settings by one sample after a warm-up. All ranks get the same answer."""
    times = []
    for arm in settings:
        trainers[arm].step()
        times.append(common.take_sample(trainers[arm].step, dist.barrier, 1).wall_s)
    slowest = torch.tensor(times)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return [settings[index] for index in slowest.argsort()[:CONTENDERS]]


def time_steps(
    rank: int, world_size: int, case: str, settings: Sequence[str], rounds: int, budget_s: float
) -> tuple[dict[str, list[common.RankSample]], dict[str, int], int]:
    """Return samples by arm, bytes that this rank's host sent in a step by arm, and bytes of all gradients."""
    trainers = {arm: Trainer(case, arm, rank) for arm in ("ours", "none", *settings)}
    verify(trainers, settings)
    arms = ["ours", "none", *choose(trainers, settings)]
    sent = {arm: count_bytes(trainers[arm]) for arm in arms if arm != "none"}
    work: dict[str, Callable[[], Any]] = {arm: trainers[arm].step for arm in arms}
    samples = common.interleave(work, dist.barrier, rounds=rounds, budget_s=budget_s, warmup=1)
    return samples, sent, sum(p.numel() * p.element_size() for p in trainers["ours"].module.parameters())


def whole_steps(report: common.Report, case: str, ranks_a_host: int, *, quick: bool) -> None:
    settings = QUICK_SETTINGS if quick else list(TORCH_SETTINGS)
    rounds, budget_s = (common.LEAST_ROUNDS, 1.0) if quick else (7, 25.0)
    world_size = HOSTS * ranks_a_host
    with network.Network(HOSTS, RATE) as hosts:
        namespaces = [hosts.namespaces(rank // ranks_a_host) for rank in range(world_size)]
        enter = functools.partial(enter_host, namespaces)
        results = common.run_ranks(world_size, time_steps, case, settings, rounds, budget_s, enter=enter)
    times = common.timings([samples for samples, _, _ in results])
    best = best_of(times, "torch")
    shape = f"{HOSTS}x{ranks_a_host}"
    every = {f"{arm}_ms": times[arm].median * 1e3 for arm in times if arm != "ours"}
    report.add_times(
        f"{case} step {shape}", times["ours"], times[best], best, goal=STEP_GOALS[ranks_a_host], rate=RATE, **every
    )
    sent = {arm: max(counts[arm] for _, counts, _ in results) / 1e6 for arm in results[0][1]}
    least = 2 * (HOSTS - 1) / HOSTS * results[0][2] / 1e6
    peer = {f"{best}_MB": sent[best]}
    name = "2 (H - 1) / H gradients"
    case = f"{case} bytes a host sends {shape}"
    report.add(case, "MB", sent["ours"], least, name, goal=BYTES_GOAL, samples=COUNTED_STEPS, **peer)


def time_broadcasts(
    rank: int, world_size: int, sizes: Sequence[int], rounds: int, budget_s: float
) -> list[dict[str, list[common.RankSample]]]:
    """Return samples by arm of a broadcast from rank 0, for each size in MB."""
    group = host_group(dist.group.WORLD, 60)
    found = []
    for size in sizes:
        tensor = torch.full((size * 1_000_000 // 4,), float(rank))
        arms: dict[str, Callable[[], Any]] = {
            "ours": functools.partial(group.broadcast, [tensor], 0, "a benchmark"),
            "torch": functools.partial(dist.broadcast, tensor, 0),
        }
        for work in arms.values():
            tensor.fill_(rank)
            work()
            assert bool((tensor == 0).all()), "a broadcast brings other bytes"
        found.append(common.interleave(arms, dist.barrier, rounds=rounds, budget_s=budget_s, warmup=1))
    return found


def broadcasts(report: common.Report, shape: str, ranks_a_host: Sequence[int], *, quick: bool) -> None:
    rounds, budget_s = (common.LEAST_ROUNDS, 1.0) if quick else (7, 25.0)
    sizes = BROADCAST_MB[:2] if quick else BROADCAST_MB
    host_of = [host for host, count in enumerate(ranks_a_host) for _ in range(count)]
    with network.Network(len(ranks_a_host), RATE) as hosts:
        enter = functools.partial(enter_host, [hosts.namespaces(host) for host in host_of])
        results = common.run_ranks(len(host_of), time_broadcasts, sizes, rounds, budget_s, enter=enter)
    for index, size in enumerate(sizes):
        times = common.timings([rank[index] for rank in results])
        report.add_times(f"{shape} {size} MB", times["ours"], times["torch"], "torch", goal=BROADCAST_GOAL, rate=RATE)


def main() -> None:
    report, quick = common.begin("hosts", __doc__, (*PARTS, *BROADCASTS))
    for part, ranks_a_host in BROADCASTS.items():
        if not report.wants(part) or (quick and part != "broadcast-3x1"):
            continue
        try:
            broadcasts(report, part, ranks_a_host, quick=quick)
        except network.Refused as error:
            report.add_no_result(part, str(error))
    for part, (case, ranks_a_host) in PARTS.items():
        if not report.wants(part) or (quick and case != "gpt"):
            continue
        try:
            whole_steps(report, case, ranks_a_host, quick=quick)
        except network.Refused as error:
            report.add_no_result(f"{case} step {HOSTS}x{ranks_a_host}", str(error))


if __name__ == "__main__":
    main()
