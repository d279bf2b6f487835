"""A whole training step (forward, backward, AdamW(fused=True)) under sw.wrap's defaults, against torch's DDP at its best.

Each arm trains a copy of the model of its own, in the same ranks, step by step in turns. `none` is the same step with no
communication at all. Also: the cost of a parameter beyond that of a backward without hooks, and peak memory (PSS).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import common
import torch
import torch.distributed as dist
from models import CASES, SMALL_COUNT
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import shardwright as sw
from shardwright.process_group import host_group

VIEW_STATIC = {"gradient_as_bucket_view": True, "static_graph": True}
TORCH_SETTINGS: dict[str, dict[str, Any]] = {
    "torch DDP default": {},
    "torch DDP view": {"gradient_as_bucket_view": True},
    **{f"torch DDP view static cap {cap}": {**VIEW_STATIC, "bucket_cap_mb": cap} for cap in (1, 5, 25, 100)},
}
QUICK_SETTINGS = ["torch DDP view static cap 5", "torch DDP view static cap 25"]
PSS_STEPS = 3


def wrapped(arm: str, module: nn.Module) -> nn.Module:
    if arm == "none":
        return module
    return sw.wrap(module) if arm == "ours" else TorchDDP(module, **TORCH_SETTINGS[arm])


class Trainer:
    """One arm: a copy of the case's model and its step."""

    def __init__(self, case: str, arm: str, rank: int) -> None:
        self._case = CASES[case]
        self.module = self._case.model()
        self.outer = wrapped(arm, self.module)
        self._batch = self._case.batch(rank)
        self._optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-4, fused=True)

    def backward(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._case.loss(self.outer, self._batch).backward()

    def step(self) -> None:
        self.backward()
        self._optimizer.step()


def verify(trainers: dict[str, Trainer], arms: Sequence[str]) -> None:
    """After one backward on equal weights, ours and every torch arm hold equal gradients."""
    for trainer in trainers.values():
        trainer.backward()
    ours = dict(trainers["ours"].module.named_parameters())
    for arm in arms:
        for name, parameter in trainers[arm].module.named_parameters():
            torch.testing.assert_close(ours[name].grad, parameter.grad, rtol=1e-4, atol=1e-6, msg=lambda m: f"{arm}, {name}: {m}")  # noqa: B023


def time_steps(rank: int, world_size: int, case: str, settings: list[str], rounds: int, budget_s: float, optimizer: bool, repeat: int) -> Any:
    group = host_group(dist.group.WORLD, 1800.0)
    trainers = {arm: Trainer(case, arm, rank) for arm in ("ours", "none", *settings)}
    verify(trainers, settings)
    work: dict[str, Callable[[], None]] = {arm: t.step if optimizer else t.backward for arm, t in trainers.items()}
    return common.interleave(work, group.comm.barrier, rounds=rounds, budget_s=budget_s, warmup=1, repeat=repeat)


def effort(quick: bool) -> tuple[int, float]:
    """Rounds, and the seconds after which fewer will do."""
    return (common.LEAST_ROUNDS, 1.0) if quick else (15, 12.0)


def torch_settings(quick: bool) -> list[str]:
    return QUICK_SETTINGS if quick else list(TORCH_SETTINGS)


def best_of_torch(times: dict[str, common.Timing]) -> str:
    return min((name for name in times if name.startswith("torch")), key=lambda name: times[name].median)


def whole_steps(report: common.Report, case: str, world_size: int, goal: float, solo_goal: float | None, *, quick: bool) -> None:
    settings = torch_settings(quick)[-1:] if quick and world_size > 2 else torch_settings(quick)
    times = common.timings(common.run_ranks(world_size, time_steps, case, settings, *effort(quick), True, 1))
    name = best_of_torch(times)
    others = {"none_ms": times["none"].median * 1e3, **{f"{other}_ms": times[other].median * 1e3 for other in settings}}
    report.add_times(f"{case} step W={world_size}", times["ours"], times[name], name, goal=goal, **others)
    if solo_goal:
        report.add_times(f"{case} step W={world_size} against none", times["ours"], times["none"], "no communication", goal=solo_goal)


def parameter_costs(report: common.Report, world_size: int, goal: float, *, quick: bool) -> None:
    repeat = 20 if quick else 50
    settings = torch_settings(quick)
    samples = common.run_ranks(world_size, time_steps, "small", settings, *effort(quick), False, repeat)
    times = common.timings(samples, repeat)
    base, ours = times["none"], times["ours"]
    name = best_of_torch(times)
    case = f"cost per parameter W={world_size}"
    cost, peer_cost = ((timing.median - base.median) / SMALL_COUNT * 1e6 for timing in (ours, times[name]))
    if min(cost, peer_cost) <= 0:
        report.add_no_result(case, f"less than nothing beyond no hook: {cost:.3g} us, torch {peer_cost:.3g} us; the machine is too loud")
        return
    report.add(case, "us", cost, peer_cost, name, goal=goal,
               samples=len(ours.kept) + len(times[name].kept), discarded=ours.discarded + times[name].discarded,
               disturbed=base.disturbed + ours.disturbed + times[name].disturbed,
               ours_spread=ours.spread, peer_spread=times[name].spread, no_hook_us=base.median / SMALL_COUNT * 1e6,
               ours_undropped=(ours.undropped_median - base.undropped_median) / SMALL_COUNT * 1e6,
               peer_undropped=(times[name].undropped_median - base.undropped_median) / SMALL_COUNT * 1e6)


# Memory --------------------------------------------------------------------------------------------------------------


def pss_bytes(pid: int | str) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return 0


def train_and_weigh(rank: int, world_size: int, case: str, arm: str) -> int:
    """PSS at the start, before the model; the parent watches what follows."""
    dist.barrier()
    start = pss_bytes("self")
    dist.barrier()
    trainer = Trainer(case, arm, rank)
    for _ in range(PSS_STEPS):
        trainer.step()
    time.sleep(0.1)
    return start


def peak_pss(case: str, arm: str, world_size: int) -> tuple[int, int]:
    """(start, peak) of all ranks together."""
    peak = 0

    def watch(pids: Sequence[int]) -> None:
        nonlocal peak
        peak = max(peak, sum(map(pss_bytes, pids)))

    return sum(common.run_ranks(world_size, train_and_weigh, case, arm, watch=watch, warm=False)), peak


def memory(report: common.Report, goal: float, *, quick: bool) -> None:
    arms = ("ours", "torch DDP view")
    found: dict[str, list[tuple[int, int]]] = {arm: [] for arm in arms}
    rounds = 1 if quick else common.LEAST_ROUNDS
    for _ in range(rounds):
        for arm in arms:
            found[arm].append(peak_pss("mlp", arm, 2))
    above = {arm: statistics.median(peak - start for start, peak in found[arm]) / 2**20 for arm in arms}
    whole = {arm: statistics.median(peak for _, peak in found[arm]) / 2**20 for arm in arms}
    report.add("mlp peak PSS W=2 above the start", "MiB", above["ours"], above[arms[1]], arms[1], goal=goal, samples=2 * rounds)
    report.add("mlp peak PSS W=2", "MiB", whole["ours"], whole[arms[1]], arms[1], goal=goal, samples=2 * rounds)


def main() -> None:
    report, quick = common.begin("ddp", __doc__)
    whole_steps(report, "mlp", 2, 0.65, None, quick=quick)
    whole_steps(report, "gpt", 2, 0.85, 1.05, quick=quick)
    whole_steps(report, "gpt", 4, 0.88, None, quick=quick)
    parameter_costs(report, 1, 0.4, quick=quick)
    if not quick:
        parameter_costs(report, 2, 0.4, quick=quick)
    memory(report, 0.9, quick=quick)


if __name__ == "__main__":
    main()
