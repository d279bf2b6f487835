"""Benchmark of restarts: time from SIGKILL of a rank to the first step after torchrun has restarted the ranks, and
steps lost.

Each job is killed several times, each time at another rank, at a moment inside a step that the seed draws. A sample
begins with the kill and ends when the last rank is about to step. *Process start* is the slowest rank's time from the
creation of its process until it has imported torch and made an optimizer. Python and torch spend it at each restart,
whatever the engine.

Steps go to disk, or only to memory. A step on disk is durable only after the next one has begun, so a kill may cost
two. The peer is DistributedDataParallel with torch.save of the same state after each step, under `--rdzv-backend c10d`
with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which it does not restart. Our jobs use torchrun's defaults.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import common
from shardwright_tools.chaos import Fault, Plan
from shardwright_tools.cli.chaos import Run, report_of

PROGRAM = str(Path(__file__).with_name("restart_program.py"))
STEPS_APART = 20
WORLD_SIZES = (2, 4)
#: seconds beyond process start
GOAL_S = 2.0
TIMEOUT_S = 600.0


def run(arm: str, world_size: int, kills: int) -> list[dict[str, Any]]:
    """Return one row per kill: total_s, process_s, steps_lost."""
    faults = [
        Fault("kill", turn % world_size, (turn + 1) * STEPS_APART, at=((turn * 7) % 10) / 10) for turn in range(kills)
    ]
    # torchrun makes the first start itself: --rdzv-backend c10d at a free port of this host
    rendezvous = ["--standalone"] if arm == "torch" else ["--master-port", str(_free_port())]
    with tempfile.TemporaryDirectory(prefix="sw-restart-") as folder:
        words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world_size)]
        words += [*rendezvous, "--max-restarts", str(kills), PROGRAM, arm, folder, str((kills + 1) * STEPS_APART)]
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1" if arm == "torch" else "0"
        plan = Plan(tuple(faults))
        result = Run(plan, words, arm).watch(TIMEOUT_S)
    report = report_of(plan, result, None)
    if report["code"] != 0:
        raise SystemExit(f"{arm}: the job ended with {report['code']}")
    rows = []
    for number, row in enumerate(report["faults"]):
        at_s = next(e["time"] for e in result.events if e["event"] == "fault" and e["number"] == number)
        after = [e for e in result.events if e["time"] > at_s]
        starts = [e for e in after if e["event"] == "start"][:world_size]
        pids = {e["pid"] for e in starts}
        first = {e["pid"]: e["time"] for e in reversed(after) if e["event"] == "stepping" and e["pid"] in pids}
        process_s = max(e["process_s"] for e in after if e["event"] == "ready" and e["pid"] in pids)
        rows.append({"total_s": max(first.values()) - at_s, "process_s": process_s, "lost": row["steps_lost"]})
    return rows


def _free_port() -> int:
    import socket

    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


def main() -> None:
    report, quick = common.begin("restart", __doc__, [f"W={world_size}" for world_size in WORLD_SIZES])
    for world_size in (2,) if quick else [each for each in WORLD_SIZES if report.wants(f"W={each}")]:
        kills = 2 if quick else 5
        rows = {arm: run(arm, world_size, kills) for arm in ("ours", "memory", "torch")}
        beyond = {arm: [each["total_s"] - each["process_s"] for each in rows[arm]] for arm in rows}
        total = {arm: statistics.median(each["total_s"] for each in rows[arm]) for arm in rows}
        process_s = statistics.median(each["process_s"] for each in rows["ours"])
        median = {arm: statistics.median(beyond[arm]) for arm in rows}
        extra = {"ours_best": min(beyond["ours"]), "ours_worst": max(beyond["ours"]), "process_s": process_s}
        case = f"W={world_size}"
        report.add(
            f"kill to first step beyond process start, {case}",
            "s",
            median["ours"],
            GOAL_S,
            "goal",
            goal=1.0,
            samples=kills,
            **extra,
        )
        report.add(
            f"kill to first step, {case}",
            "s",
            total["ours"],
            total["torch"],
            "DDP, torch.save",
            goal=None,
            samples=kills,
        )
        report.add(
            f"kill to first step, steps in memory, {case}",
            "s",
            total["memory"],
            total["torch"],
            "DDP, torch.save",
            goal=None,
            samples=kills,
        )
        report.add(
            f"kill to first step beyond process start, steps in memory, {case}",
            "s",
            median["memory"],
            GOAL_S,
            "goal",
            goal=1.0,
            samples=kills,
            ours_best=min(beyond["memory"]),
            ours_worst=max(beyond["memory"]),
        )
        lost = {arm: max(each["lost"] for each in rows[arm]) for arm in rows}
        report.add(
            f"most steps lost, steps in memory, {case}",
            "",
            lost["memory"],
            1,
            "goal: the running one",
            goal=1.0,
            samples=kills,
            torch_lost=lost["torch"],
        )
        report.add(
            f"most steps lost, steps on disk, {case}",
            "",
            lost["ours"],
            1,
            "goal: the running one",
            goal=1.0,
            samples=kills,
            torch_lost=lost["torch"],
        )


if __name__ == "__main__":
    main()
