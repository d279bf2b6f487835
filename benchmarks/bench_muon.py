"""A training step with sw.optim.Muon, whose matrices ranks divide, against DDP with torch.optim.Muon, whose every rank steps on all.

torch.optim.Muon takes matrices alone; torch.optim.AdamW(fused=True) steps on the peer's other parameters. Each arm trains
its own copy of a GPT, in the same ranks, step by step in turns; losses are compared first.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import common
import shardwright as sw
import torch
import torch.distributed as dist
from models import CASES, GPT_CONTEXT, VOCABULARY
from shardwright.comm.process_group import host_group
from torch.nn.parallel import DistributedDataParallel

OURS = {"zero=1": {"zero": 1}, "zero=2": {"zero": 2}, "zero=3 private": {"zero": 3, "share_parameters": False}}
PEER = "torch DDP + torch.optim.Muon"
ALONE = "torch.optim.Muon in one process, a fourth"
STEP_GOAL, OPTIMIZER_GOAL = 0.55, 0.4
ALONE_GOAL = 1.25
TOKENS = 256
#: measured at 50 M: 1.3e-4 in the third loss, as bfloat16's products amplify how a mean was rounded
TOLERANCE = 5e-4


class Arm:
    """One copy of the model, and its training step, of which the optimizer's part is timed by itself."""

    def __init__(self, case: str, arm: str, rank: int) -> None:
        self._case = CASES[case]
        module = self._case.model()
        groups = sw.optim.muon_groups(module)
        if arm in (PEER, ALONE):
            matrices, others = (group["params"] for group in groups)
            self._model: Any = module
            if arm == PEER:
                self._model = DistributedDataParallel(module, gradient_as_bucket_view=True)
            self._optimizers: list[Any] = [
                torch.optim.Muon(matrices, lr=0.02),
                torch.optim.AdamW(others, lr=1e-3, weight_decay=0.1, fused=True),
            ]
        else:
            made = sw.optim.Muon(groups, lr=0.02, adamw_lr=1e-3)
            self._model, stepper = sw.wrap(module, made, **OURS[arm])
            self._optimizers = [stepper]
        generator = torch.Generator().manual_seed(100 + rank)
        tokens = torch.randint(VOCABULARY, (TOKENS // GPT_CONTEXT, GPT_CONTEXT + 1), generator=generator)
        self._batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self.optimizer_s: list[float] = []
        self.optimizer_cpu_s: list[float] = []

    def step(self) -> torch.Tensor:
        loss = self._case.loss(self._model, self._batch)
        loss.backward()
        dist.barrier()
        begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
        for optimizer in self._optimizers:
            optimizer.step()
        self.optimizer_s.append(time.perf_counter() - begun_s)
        self.optimizer_cpu_s.append(time.process_time() - begun_cpu_s)
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def time_steps(rank: int, world_size: int, case: str, ours: list[str], rounds: int, budget_s: float) -> Any:
    group = host_group(dist.group.WORLD, 1800.0)
    arms = {name: Arm(case, name, rank) for name in (*ours, PEER)}
    losses = {name: torch.stack([arm.step() for _ in range(3)]) for name, arm in arms.items()}
    for name in ours:
        message = f"losses of {name} and {PEER}: "
        torch.testing.assert_close(losses[name], losses[PEER], rtol=TOLERANCE, atol=0, msg=message.__add__)
    work: dict[str, Callable[[], Any]] = {name: arm.step for name, arm in arms.items()}
    times = common.interleave(
        work, group.comm.barrier, rounds=rounds, budget_s=budget_s, warmup=1,
        waited_s=lambda: group.comm.stats()["wait_ns"] * 1e-9,
    )  # fmt: skip
    seconds = {name: (median(arm.optimizer_s[3:]), median(arm.optimizer_cpu_s[3:])) for name, arm in arms.items()}
    return times, seconds


def alone(rank: int, world_size: int, case: str, count: int) -> float:
    """Return the processor time of the optimizer's part in one process."""
    arm = Arm(case, ALONE, rank)
    for _ in range(count):
        arm.step()
    return median(arm.optimizer_cpu_s)


def main() -> None:
    report, quick = common.begin("muon", __doc__, ["gpt", "gpt-50m"])
    case = "gpt" if quick else "gpt-50m"
    rounds, budget_s = (common.LEAST_ROUNDS, 1.0) if quick else (9, 90.0)
    ours = ["zero=2"] if quick else list(OURS)  # where torch's bfloat16 products are slow, each arm takes minutes
    results = common.run_ranks(4, time_steps, case, ours, rounds, budget_s)
    times = common.timings([each[0] for each in results])
    name = f"{case} step W=4"
    for arm in ours:
        report.add_times(f"{name} {arm}", times[arm], times[PEER], PEER, goal=STEP_GOAL)
    cpu_s = {
        arm: median(max(each.cpu_s for each in rows) for rows in zip(*(r[0][arm] for r in results))) for arm in times
    }
    one_s = common.run_ranks(1, alone, case, 3)[0]
    slowest = {arm: [max(each[1][arm][k] for each in results) * 1e3 for k in range(2)] for arm in (*ours, PEER)}
    for arm in ours:
        part, samples = f"{name} the optimizer's part {arm}", len(results)
        report.add(part, "ms", slowest[arm][0], slowest[PEER][0], PEER, goal=OPTIMIZER_GOAL, samples=samples)
        mine = slowest[arm][1]
        report.add(f"{part}, processor time", "ms", mine, slowest[PEER][1], PEER, goal=OPTIMIZER_GOAL, samples=samples)
        report.add(f"{part}, processor time", "ms", mine, one_s * 250, ALONE, goal=ALONE_GOAL, samples=samples)
        report.add(
            f"{name} {arm}, processor time",
            "ms",
            cpu_s[arm] * 1e3,
            cpu_s[PEER] * 1e3,
            PEER,
            goal=STEP_GOAL,
            samples=samples,
        )


if __name__ == "__main__":
    main()
