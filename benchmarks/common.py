"""Common parts of the benchmarks: ranks, timed samples, dropped samples, and rows.

A *sample* is the work of one arm on all ranks at once, between two barriers; its wall time is that of the slowest rank.
An *arm* is one way to do the work. Arms take turns in the same ranks, so that a disturbance meets all of them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import queue
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
CORES = len(os.sched_getaffinity(0))
#: largest share of a sample's wall time that other processes may take
DELAY_ALLOWED = 0.05
LEAST_ROUNDS = 5
#: if fewer samples than this are undisturbed, all samples count
LEAST_KEPT = 3
TIMEOUT_S = 300.0

# Ranks ---------------------------------------------------------------------------------------------------------------


def _stay_on_this_host(rank: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def run_ranks(
    world_size: int,
    work: Callable[..., Any],
    *args: Any,
    watch: Callable[[Sequence[int]], None] | None = None,
    warm: bool = True,
    enter: Callable[[int], None] = _stay_on_this_host,
) -> list[Any]:
    """Run `work(rank, world_size, *args)` in new processes joined by Gloo on 127.0.0.1; return the results in rank
    order.

    `watch(pids)` is called repeatedly while the ranks run. `warm`: fork from a process that has imported torch, whose
    pages the ranks then share; else each rank imports it. `enter(rank)` runs in a rank before it joins, and returns the
    interface to use.
    """
    context: Any = multiprocessing.get_context("forkserver" if warm else "spawn")
    if warm:
        context.set_forkserver_preload(["torch", "torch.distributed", "shardwright"])
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        store = os.path.join(folder, "store")
        ranks = [
            context.Process(target=_run_rank, args=(rank, world_size, store, results, enter, work, args))
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        try:
            return _collect(ranks, results, watch)
        finally:
            for process in ranks:
                process.join(10)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(ranks: Sequence[Any], results: Any, watch: Callable[[Sequence[int]], None] | None) -> list[Any]:
    found: dict[int, Any] = {}
    deadline = time.monotonic() + TIMEOUT_S
    while len(found) < len(ranks):
        if watch:
            watch([process.pid for process in ranks])
        try:
            rank, result = results.get(timeout=0.01 if watch else 0.5)
            found[rank] = result
        except queue.Empty:
            dead = [r for r, process in enumerate(ranks) if process.exitcode not in (None, 0) and r not in found]
            if dead or time.monotonic() > deadline:
                for process in ranks:
                    process.kill()
                raise SystemExit(f"rank {dead} died" if dead else f"no result after {TIMEOUT_S:.0f} s") from None
    return [found[rank] for rank in range(len(ranks))]


def _run_rank(
    rank: int,
    world_size: int,
    store: str,
    results: Any,
    enter: Callable[[int], None],
    work: Callable[..., Any],
    args: Sequence[Any],
) -> None:
    torch.set_num_threads(1)
    enter(rank)
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    results.put((rank, work(rank, world_size, *args)))
    dist.barrier()
    time.sleep(
        0.1
    )  # Gloo's worker releases its last tensors; otherwise the group's destructor waits for it with the GIL held
    dist.destroy_process_group()


# Samples -------------------------------------------------------------------------------------------------------------


@dataclass
class RankSample:
    """One rank's measurements of a sample. Ticks are those of the whole machine."""

    wall_s: float
    cpu_s: float
    run_delay_s: float
    steal_ticks: int
    busy_ticks: int
    waited_s: float = 0.0  # seconds per call asleep in the engine's waits for other ranks


def _machine_ticks() -> tuple[int, int]:
    """Return (stolen, busy) ticks of all cores since boot."""
    with open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, file.readline().split()[1:9])
    return steal, user + nice + system + irq + softirq


def _run_delay_s() -> float:
    """Return the time that this process's live threads were runnable but did not run."""
    total = 0
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/schedstat", encoding="ascii") as file:
                total += int(file.read().split()[1])
        except OSError:  # the thread has ended
            pass
    return total * 1e-9


def take_sample(
    work: Callable[[], Any], barrier: Callable[[], None], repeat: int, waited_s: Callable[[], float] | None = None
) -> RankSample:
    """Time `repeat` calls that all ranks begin together. Wall time and waits are per call, the rest is for all calls.

    `waited_s` returns the seconds that this rank has slept in waits for others since its start.
    """
    delay, (steal, busy), cpu = _run_delay_s(), _machine_ticks(), time.process_time()
    barrier()
    waited = waited_s() if waited_s else 0.0
    begin = time.perf_counter()
    for _ in range(repeat):
        work()
    wall = time.perf_counter() - begin
    waited = waited_s() - waited if waited_s else 0.0
    barrier()
    cpu = time.process_time() - cpu
    steal_after, busy_after = _machine_ticks()
    delay = max(0.0, _run_delay_s() - delay)
    return RankSample(wall / repeat, cpu, delay, steal_after - steal, busy_after - busy, waited / repeat)


def interleave(
    arms: dict[str, Callable[[], Any]],
    barrier: Callable[[], None],
    *,
    rounds: int,
    budget_s: float,
    warmup: int = 2,
    repeat: dict[str, int] | int = 1,
    waited_s: Callable[[], float] | None = None,
) -> dict[str, list[RankSample]]:
    """Take `rounds` samples of each arm, in turns; each round begins with another arm.

    `waited_s` as in take_sample. Once rank 0 has spent `budget_s`, stop after at least LEAST_ROUNDS rounds.
    """
    begin = time.monotonic()
    names = list(arms)
    times = {name: repeat if isinstance(repeat, int) else repeat[name] for name in names}
    for name in names:
        for _ in range(warmup):
            arms[name]()
    samples: dict[str, list[RankSample]] = {name: [] for name in names}
    for turn in range(rounds):
        for position in range(len(names)):
            name = names[(turn + position) % len(names)]
            samples[name].append(take_sample(arms[name], barrier, times[name], waited_s))
        spent = torch.tensor(time.monotonic() - begin)
        dist.broadcast(spent, 0)
        if turn + 1 >= LEAST_ROUNDS and spent.item() > budget_s:
            break
    return samples


def effort(quick: bool) -> tuple[int, float]:
    """Return (rounds, seconds after which fewer rounds suffice)."""
    return (LEAST_ROUNDS, 1.0) if quick else (15, 12.0)


@dataclass
class Timing:
    """Samples of one arm; each value is the slowest rank's. Attributes are in seconds.

    A wait for a rank that still computes is no communication cost. `skew` is the slowest rank's time above the mean; it
    shows only if ranks do not wait inside of the sample. If they do, `waited` is the wait of the rank that waits least,
    which is for communication only, and `waited_for_rank` is what the other ranks wait beyond it. `cpu` is a rank's
    processor time, without waits.
    """

    kept: list[float]
    every: list[float]
    disturbed: int
    skew: float = 0.0
    waited: float = 0.0
    waited_for_rank: float = 0.0
    cpu: float = 0.0

    @property
    def discarded(self) -> int:
        return len(self.every) - len(self.kept)

    @property
    def median(self) -> float:
        return statistics.median(self.kept)

    @property
    def undropped_median(self) -> float:
        return statistics.median(self.every)

    @property
    def spread(self) -> float:
        """Return half the interquartile range over the median."""
        if len(self.kept) < 3:
            return 0.0
        low, _, high = statistics.quantiles(self.kept, n=4)
        return (high - low) / 2 / self.median


def is_disturbed(ranks: Sequence[RankSample], repeat: int) -> bool:
    """Return True for stolen time, or for delay by other processes. Such delay shows only while the ranks fit the
    cores.
    """
    if any(rank.steal_ticks > 0 for rank in ranks):
        return True
    if len(ranks) > CORES:
        return False
    wall = max(rank.wall_s for rank in ranks) * repeat
    outside = max(rank.busy_ticks for rank in ranks) * TICK_S - sum(rank.cpu_s for rank in ranks)
    delay = min(outside - 2 * TICK_S, max(rank.run_delay_s for rank in ranks))
    return delay > DELAY_ALLOWED * wall


def timings(results: Sequence[dict[str, list[RankSample]]], repeat: dict[str, int] | int = 1) -> dict[str, Timing]:
    """Merge the ranks' samples and drop disturbed ones. If too few remain, keep all and count the disturbed in
    `disturbed`.
    """
    joined = {}
    for name in results[0]:
        times = repeat if isinstance(repeat, int) else repeat[name]
        samples = list(zip(*(result[name] for result in results)))
        every = [max(rank.wall_s for rank in ranks) for ranks in samples]
        kept = [wall for wall, ranks in zip(every, samples) if not is_disturbed(ranks, times)]
        joined[name] = Timing(
            kept if len(kept) >= LEAST_KEPT else every,
            every,
            len(every) - len(kept),
            skew=statistics.median(
                slowest - _mean(rank.wall_s for rank in ranks) for slowest, ranks in zip(every, samples)
            ),
            waited=statistics.median(min(rank.waited_s for rank in ranks) for ranks in samples),
            waited_for_rank=statistics.median(
                max(rank.waited_s for rank in ranks) - min(rank.waited_s for rank in ranks) for ranks in samples
            ),
            cpu=statistics.median(_mean(rank.cpu_s for rank in ranks) / times for ranks in samples),
        )
    return joined


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


# Rows ----------------------------------------------------------------------------------------------------------------


@dataclass
class Report:
    """A report that prints rows as they arrive and saves them for --json."""

    bench: str
    json_path: Path | None
    only: Sequence[str] = ()
    numbers: Mapping[str, int] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        partial = self.only and self.json_path and self.json_path.exists()
        self._before = self.json_path.read_text(encoding="utf-8") if partial and self.json_path else ""

    def wants(self, part: str) -> bool:
        """Return True if this part of the benchmark is selected."""
        return not self.only or part in self.only

    def add(
        self,
        case: str,
        unit: str,
        ours: float,
        peer: float,
        peer_name: str,
        *,
        goal: float | None,
        larger: bool = False,
        samples: int = 0,
        discarded: int = 0,
        **extra: Any,
    ) -> None:
        """Add a row.

        With `larger` the ratio is a speedup, peer / ours, and `goal` its least value. Otherwise the ratio is ours / peer
        and `goal` its largest value. A row with goal=None cannot fail.
        """
        ratio = peer / ours if larger else ours / peer
        ok = None if goal is None else ratio >= goal if larger else ratio <= goal
        bound = None if goal is None else f"{'>=' if larger else '<='} {goal}"
        row = {
            "bench": self.bench,
            "case": case,
            "unit": unit,
            "ours": _round(ours),
            "peer": _round(peer),
            "peer_name": peer_name,
            "speedup" if larger else "ratio": _round(ratio),
            "goal": bound,
            "ok": ok,
            "samples": samples,
            "discarded": discarded,
            **{key: _round(value) for key, value in extra.items()},
        }
        self.rows.append(row)
        self._save()
        notes = " ".join(f"{key}={row[key]}" for key in extra)
        verdict = {True: "ok  ", False: "MISS", None: "    "}[ok]
        print(
            f"{verdict} {case:<44} {_round(ours):>9} {unit:<3} against {_round(peer):>9}  "
            f"{ratio:6.3f} {bound or '':<8} n={samples} dropped={discarded}  {peer_name}  {notes}",
            flush=True,
        )

    def add_times(
        self, case: str, ours: Timing, peer: Timing, peer_name: str, *, unit: str = "ms", **extra: Any
    ) -> None:
        scale = {"ms": 1e3, "us": 1e6}[unit]
        self.add(
            case,
            unit,
            ours.median * scale,
            peer.median * scale,
            peer_name,
            samples=len(ours.kept) + len(peer.kept),
            discarded=ours.discarded + peer.discarded,
            disturbed=ours.disturbed + peer.disturbed,
            ours_spread=ours.spread,
            peer_spread=peer.spread,
            ours_undropped=ours.undropped_median * scale,
            peer_undropped=peer.undropped_median * scale,
            ours_best=min(ours.every) * scale,
            peer_best=min(peer.every) * scale,
            ours_cpu=ours.cpu * scale,
            peer_cpu=peer.cpu * scale,
            peer_skew=peer.skew * scale,
            ours_waited=ours.waited * scale,
            ours_waited_for_rank=ours.waited_for_rank * scale,
            **extra,
        )

    def add_no_result(self, case: str, reason: str) -> None:
        """Add a row without a figure, with the reason."""
        self.rows.append({"bench": self.bench, "case": case, "ok": False, "no_result": reason})
        self._save()
        print(f"none {case:<44} {reason}", flush=True)

    def _save(self) -> None:
        """Write a header with the machine, then one object per row. Rows of an interrupted run are kept."""
        if self.json_path:
            head = {"bench": self.bench, "machine": machine(), "command": command()}
            self.json_path.parent.mkdir(parents=True, exist_ok=True)
            text = "".join(json.dumps(row) + "\n" for row in [head, *self.rows])
            self.json_path.write_text(self._before + text, encoding="utf-8")


def _round(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def machine() -> str:
    model = platform.processor() or platform.machine()
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), model)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return (
        f"{model}, {CORES} cores, {memory:.0f} GiB, Linux {platform.release()}, Python {platform.python_version()}, "
        f"torch {torch.__version__}"
    )


def command() -> str:
    return shlex.join(["python", *sys.argv])


def begin(
    bench: str,
    description: str | None,
    parts: Sequence[str] = (),
    numbers: Mapping[str, tuple[int, str]] | None = None,
) -> tuple[Report, bool]:
    """Parse the command line; return (report, quick). --only selects from `parts` and appends the rows to the file.

    `numbers`: option -> (default, help), found in report.numbers.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and samples: ends within 60 s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write one JSON object a row")
    if parts:
        parser.add_argument(
            "--only", nargs="+", choices=parts, default=[], help="run these parts and append them to the file"
        )
    for name, (default, text) in (numbers or {}).items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default: {default})")
    options = parser.parse_args()
    print(f"{machine()}\n{command()}", flush=True)
    given = {name: getattr(options, name) for name in numbers or {}}
    return Report(bench, options.json, options.only if parts else (), given), options.quick
