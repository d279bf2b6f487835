"""The cost of the account of steps: its own calls, timed alone, times their number, over a step of the 11 M GPT; and steps of an engine
with the account beside steps of one without it.

The second engine is linked from the same objects, with account_off.c in the place of account.c. The ranks of both engines live at
the same time, and take turns of a few steps, so that a disturbance meets both.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common

ROOT = Path(__file__).resolve().parents[1]
CALLS, REPEATS = 100_000, 7
ARM = "zero=2"
#: shares of a step: the account's calls, and the watcher, which looks after each tenth step; and both arms side by side
SHARE_GOAL, LOOK_GOAL, SIDE_GOAL = 0.002, 0.002, 1.01
STEPS_A_TURN = 3


def library(folder: Path) -> Any:
    """Return account_calls.c, built with the engine's own account."""
    made = folder / "account_calls.so"
    sources = [ROOT / "csrc/comm/account.c", *(ROOT / "csrc/base").glob("*.c"), *(ROOT / "csrc/platform").glob("*.c")]
    command = ["gcc", "-O3", "-shared", "-fPIC", "-pthread", "-D_GNU_SOURCE", "-I", ROOT / "csrc", "-o", made]
    subprocess.run([*command, Path(__file__).with_name("account_calls.c"), *sources, "-ldl"], check=True)
    found = ctypes.CDLL(str(made))
    for name in ("time_steps", "time_collectives", "time_sleeps"):
        getattr(found, name).restype = ctypes.c_double
    return found


def call_ns(calls: int = CALLS) -> dict[str, float]:
    """Return nanoseconds of processor time: a step's own events, a collective, a sleep. The least of some repeats."""
    with tempfile.TemporaryDirectory() as folder:
        found = library(Path(folder))
        if found.open_account(os.fsencode(f"{folder}/rank-0")):
            raise SystemExit("the account cannot be opened")
        names = ("steps", "collectives", "sleeps")
        return {name: min(getattr(found, f"time_{name}")(calls) for _ in range(REPEATS)) for name in names}


def count_events(rank: int, world_size: int, case: str, steps: int) -> dict[str, float]:
    """Return means of a step: its nanoseconds (median), collectives, sleeps, and what the watcher costs it."""
    import torch.distributed as dist
    from arms import Trainer
    from shardwright.comm import account
    from shardwright.comm.process_group import host_group
    from shardwright.observe import watch
    from shardwright.observe.rings import AccountFile

    trainer = Trainer(case, ARM, rank)
    comm = host_group(dist.group.WORLD, 1800.0).comm
    for _ in range(2):
        trainer.step()
    path = account.own_file()
    assert path is not None
    file = AccountFile(path)
    before, waits = file.head(), comm.stats()["waits"]
    for _ in range(steps):
        trainer.step()
    after, slept = file.head(), comm.stats()["waits"] - waits
    begun_s = time.thread_time()
    for _ in range(20):
        watch.begin().look(10)
    look_ns = (time.thread_time() - begun_s) / 20 * 1e9 / 10
    return {
        "step_ns": statistics.median(row.total_ns for row in file.rows(steps)),
        "collectives": (after.op_count - before.op_count) / steps,
        "sleeps": slept / steps,
        "look_ns": look_ns,
    }


def spent_ns(counts: dict[str, float], cost: dict[str, float]) -> float:
    """Return what the account costs a step."""
    return cost["steps"] + counts["collectives"] * cost["collectives"] + counts["sleeps"] * cost["sleeps"]


def alone(report: common.Report, *, quick: bool) -> None:
    cost = call_ns()
    counts = max(common.run_ranks(2, count_events, "gpt", 5 if quick else 20), key=lambda each: spent_ns(each, cost))
    step_us, extra = counts["step_ns"] * 1e-3, {f"{name}_ns": each for name, each in cost.items()}
    each = {name: counts[name] for name in ("collectives", "sleeps")}
    case = f"gpt step W=2 {ARM}"
    report.add(
        f"{case} calls x count",
        "us",
        spent_ns(counts, cost) * 1e-3,
        step_us,
        "the step",
        goal=SHARE_GOAL,
        **each,
        **extra,
    )
    report.add(f"{case} watcher", "us", counts["look_ns"] * 1e-3, step_us, "the step", goal=LOOK_GOAL)


# Side by side --------------------------------------------------------------------------------------------------------


def without_account(folder: Path) -> Path:
    """Return a folder with the package, whose engine has no account."""
    (built,) = (ROOT / "build").glob("temp.*")
    sources = [each.relative_to(ROOT) for each in (ROOT / "csrc").rglob("*.c") if each.name != "account.c"]
    objects = [built / each.with_suffix(".o") for each in sources]
    off, package = folder / "account_off.o", folder / "without" / "shardwright"
    package.mkdir(parents=True)
    source = Path(__file__).with_name("account_off.c")
    subprocess.run(["gcc", "-O3", "-fPIC", "-D_GNU_SOURCE", "-I", ROOT / "csrc", "-c", "-o", off, source], check=True)
    engine = package / "_engine.abi3.so"
    subprocess.run(["gcc", "-shared", "-pthread", "-o", engine, *objects, off, "-ldl", "-lm"], check=True)
    for each in (ROOT / "python/shardwright").iterdir():
        if each.name not in (engine.name, "__pycache__"):
            (package / each.name).symlink_to(each)
    return package.parent


def run_rank(rank: int, store: str) -> None:
    """Train a few steps for each line of the input, and tell their seconds: wall time and processor time."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    from arms import Trainer

    trainer = Trainer("gpt", ARM, rank)
    for line in sys.stdin:
        begun_s, cpu_s = time.perf_counter(), time.process_time()
        for _ in range(int(line)):
            trainer.step()
        print(json.dumps([time.perf_counter() - begun_s, time.process_time() - cpu_s]), flush=True)
    os._exit(0)


class Arm:
    """Two ranks of one engine, which train when they are told to."""

    def __init__(self, name: str, package: Path, folder: Path) -> None:
        paths = [str(package), str(Path(__file__).parent), str(ROOT / "examples")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "SHARDWRIGHT_RUN_FOLDER": str(folder / "run")}
        command, store = [sys.executable, __file__, "--rank"], str(folder / f"{name}.store")
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._ranks = [subprocess.Popen([*command, str(rank), store], env=environment, **pipes) for rank in range(2)]
        self.samples: list[tuple[float, float]] = []

    def turn(self, steps: int) -> tuple[float, float]:
        """Return seconds of a step: of the slowest rank, and of processor time over both."""
        for rank in self._ranks:
            rank.stdin.write(f"{steps}\n")
            rank.stdin.flush()
        found = [json.loads(rank.stdout.readline()) for rank in self._ranks]
        return max(wall for wall, _ in found) / steps, sum(cpu for _, cpu in found) / steps

    def close(self) -> None:
        for rank in self._ranks:
            rank.kill()
            rank.wait()


def side_by_side(report: common.Report, *, quick: bool) -> None:
    rounds = common.LEAST_ROUNDS if quick else 60
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        arms = [Arm("with", ROOT / "python", folder), Arm("without", without_account(folder), folder)]
        try:
            for arm in arms:
                arm.turn(2)
            for number in range(rounds):
                for arm in arms if number % 2 else arms[::-1]:
                    arm.samples.append(arm.turn(STEPS_A_TURN))
        finally:
            for arm in arms:
                arm.close()
    for at, (name, goal) in enumerate((("wall time", None), ("processor time", SIDE_GOAL))):
        ours, peer = ([each[at] * 1e3 for each in arm.samples] for arm in arms)
        report.add(
            f"gpt step W=2 {ARM} {name}",
            "ms",
            *(statistics.median(ours), statistics.median(peer), "an engine without the account"),
            goal=goal,
            samples=2 * rounds,
            ours_spread=spread(ours),
            peer_spread=spread(peer),
            pairs=statistics.median(a / b for a, b in zip(ours, peer)),
        )


def spread(values: Sequence[float]) -> float:
    """Return half the interquartile range over the median."""
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / 2 / middle


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        return run_rank(int(sys.argv[2]), sys.argv[3])
    report, quick = common.begin("account", __doc__, ["alone", "side"])
    if report.wants("alone"):
        alone(report, quick=quick)
    if report.wants("side"):
        side_by_side(report, quick=quick)


if __name__ == "__main__":
    main()
