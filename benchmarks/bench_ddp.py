"""Benchmark of a whole training step (forward, backward, AdamW(fused=True)) with sw.wrap's defaults against torch's
fastest DDP.

Each arm trains its own copy of the model in the same ranks; arms take turns step by step. `none` is the same step
without communication. Other rows: the cost per parameter beyond a backward without hooks, and peak memory (PSS).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import common
import pss
import torch
import torch.distributed as dist
from arms import Trainer, best_of, torch_settings
from models import SMALL_COUNT
from shardwright.comm.process_group import host_group


def verify(trainers: dict[str, Trainer], arms: Sequence[str]) -> None:
    """Check that ours and all torch arms have equal gradients after one backward from equal weights."""
    for trainer in trainers.values():
        trainer.backward()
    ours = dict(trainers["ours"].module.named_parameters())
    for arm in arms:
        for name, parameter in trainers[arm].module.named_parameters():
            torch.testing.assert_close(
                ours[name].grad, parameter.grad, rtol=1e-4, atol=1e-6, msg=lambda m: f"{arm}, {name}: {m}"
            )  # noqa: B023


def time_steps(
    rank: int,
    world_size: int,
    case: str,
    settings: list[str],
    rounds: int,
    budget_s: float,
    optimizer: bool,
    repeat: int,
) -> Any:
    group = host_group(dist.group.WORLD, 1800.0)
    trainers = {arm: Trainer(case, arm, rank) for arm in ("ours", "none", *settings)}
    verify(trainers, settings)
    work: dict[str, Callable[[], Any]] = {arm: t.step if optimizer else t.backward for arm, t in trainers.items()}
    return common.interleave(
        work,
        group.comm.barrier,
        rounds=rounds,
        budget_s=budget_s,
        warmup=1,
        repeat=repeat,
        waited_s=lambda: group.comm.stats()["wait_ns"] * 1e-9,
    )


def whole_steps(
    report: common.Report, case: str, world_size: int, goal: float, solo_goal: float | None, *, quick: bool
) -> None:
    settings = torch_settings(quick)[-1:] if quick and world_size > 2 else torch_settings(quick)
    times = common.timings(common.run_ranks(world_size, time_steps, case, settings, *common.effort(quick), True, 1))
    name = best_of(times, "torch")
    others = {"none_ms": times["none"].median * 1e3, **{f"{other}_ms": times[other].median * 1e3 for other in settings}}
    report.add_times(f"{case} step W={world_size}", times["ours"], times[name], name, goal=goal, **others)
    if solo_goal:
        report.add_times(
            f"{case} step W={world_size} against none", times["ours"], times["none"], "no communication", goal=solo_goal
        )


def parameter_costs(report: common.Report, world_size: int, goal: float, *, quick: bool) -> None:
    repeat = 20 if quick else 50
    settings = torch_settings(quick)
    samples = common.run_ranks(world_size, time_steps, "small", settings, *common.effort(quick), False, repeat)
    times = common.timings(samples, repeat)
    base, ours = times["none"], times["ours"]
    name = best_of(times, "torch")
    case = f"cost per parameter W={world_size}"
    cost, peer_cost = ((timing.median - base.median) / SMALL_COUNT * 1e6 for timing in (ours, times[name]))
    if min(cost, peer_cost) <= 0:
        report.add_no_result(
            case, f"less than nothing beyond no hook: {cost:.3g} us, torch {peer_cost:.3g} us; the machine is too loud"
        )
        return
    report.add(
        case,
        "us",
        cost,
        peer_cost,
        name,
        goal=goal,
        samples=len(ours.kept) + len(times[name].kept),
        discarded=ours.discarded + times[name].discarded,
        disturbed=base.disturbed + ours.disturbed + times[name].disturbed,
        ours_spread=ours.spread,
        peer_spread=times[name].spread,
        no_hook_us=base.median / SMALL_COUNT * 1e6,
        ours_undropped=(ours.undropped_median - base.undropped_median) / SMALL_COUNT * 1e6,
        peer_undropped=(times[name].undropped_median - base.undropped_median) / SMALL_COUNT * 1e6,
    )


def memory(report: common.Report, goal: float, *, quick: bool) -> None:
    peer = "torch DDP view"
    rounds = 1 if quick else common.LEAST_ROUNDS
    above, whole = pss.peaks("mlp", ("ours", peer), 2, rounds)
    report.add(
        "mlp peak PSS W=2 above the start", "MiB", above["ours"], above[peer], peer, goal=goal, samples=2 * rounds
    )
    report.add("mlp peak PSS W=2", "MiB", whole["ours"], whole[peer], peer, goal=goal, samples=2 * rounds)


def main() -> None:
    report, quick = common.begin("ddp", __doc__, ["mlp", "gpt", "gpt4", "parameter", "memory"])
    if report.wants("mlp"):
        whole_steps(report, "mlp", 2, 0.6, None, quick=quick)
    if report.wants("gpt"):
        whole_steps(report, "gpt", 2, 0.8, 1.03, quick=quick)
    if report.wants("gpt4"):
        whole_steps(report, "gpt", 4, 0.88, None, quick=quick)
    if report.wants("parameter"):
        parameter_costs(report, 1, 0.5, quick=quick)
        if not quick:
            parameter_costs(report, 2, 0.4, quick=quick)
    if report.wants("memory"):
        memory(report, 0.9, quick=quick)


if __name__ == "__main__":
    main()
