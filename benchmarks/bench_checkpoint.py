"""Benchmark of checkpoints: time until save() returns, training time lost, time until a save is durable, cold load.

Each rank has Adam's state (p, m, v) of one size. Each training step overwrites all of it and computes for the rest of
the step. Peers are torch.distributed.checkpoint (async_save and load), and raw O_DIRECT writes and reads of as many
bytes on the same disk in the same run. "Durable" includes fsync in every arm. Caches are dropped before a load. The
first save allocates its memory and has a row of its own.

SW_BENCH_DIR names the directory (default: the system's temporary directory). SW_BENCH_CASES="1:0.35,2:0.12" selects
world sizes and step lengths in seconds for the full form.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import common
import shardwright as sw
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

MIB = 1 << 20
CHUNK = 8 * MIB
ARMS = ("copy", "lazy", "dcp", "dcp staged", "dcp process")


class Subject:
    """Parameters with Adam's two moments, `size_bytes` in all, and a step that overwrites all of them."""

    def __init__(self, size_bytes: int, step_s: float) -> None:
        numel = size_bytes // 12 // 8
        torch.manual_seed(0)  # the same on all ranks
        self.model = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(numel)) for _ in range(8)])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.step_s = step_s
        self.before_step: Callable[[], Any] | None = None
        for parameter in self.model:
            parameter.grad = torch.full_like(parameter, 1e-3)
        self.step()
        self.size_bytes = 3 * 4 * sum(p.numel() for p in self.model)

    def step(self) -> float:
        """Run one training step and return its seconds.

        The arithmetic is a fixed amount of work, so any loss shows.
        """
        begin = time.perf_counter()
        matrix = torch.ones(192, 192)
        for _ in range(self.work if hasattr(self, "work") else 0):
            matrix = (matrix @ matrix).clamp_(-1, 1)
        if self.before_step is not None:
            self.before_step()
        self.optimizer.step()
        return time.perf_counter() - begin

    def calibrate(self) -> float:
        """Calibrate the amount of work to `step_s`. Return the median time of undisturbed steps."""
        self.work = 0
        bare = statistics.median(self.step() for _ in range(3))
        self.work = 200
        each = max(1e-7, (statistics.median(self.step() for _ in range(3)) - bare) / 200)
        self.work = max(1, int((self.step_s - bare) / each))
        return statistics.median(self.step() for _ in range(5))

    def state(self) -> dict[str, Any]:
        state = self.optimizer.state
        return {
            "model": {str(i): p.detach() for i, p in enumerate(self.model)},
            "state": {
                f"{k}.{i}": state[p][k] for i, p in enumerate(self.model) for k in ("exp_avg", "exp_avg_sq", "step")
            },
        }

    def align(self) -> None:
        """Broadcast the state: ranks took different numbers of steps."""
        for group in self.state().values() if dist.get_world_size() > 1 else ():
            for tensor in group.values():
                dist.broadcast(tensor, 0)

    def digest(self) -> list[float]:
        return [float(t.double().sum()) for group in self.state().values() for t in group.values()]


def one_save(
    subject: Subject, quiet_s: float, begin: Callable[[], Any], is_durable: Callable[[Any], bool]
) -> dict[str, float]:
    """Train while a save runs. Return the seconds until save() returned, until the save was durable, and lost to
    training.
    """
    subject.align()
    dist.barrier()
    start = time.perf_counter()
    handle = begin()
    returned = time.perf_counter() - start
    ended: list[float] = []

    def watch() -> None:  # not in the loop below, which would see the end up to a step late
        while not is_durable(handle):
            time.sleep(0.002)
        ended.append(time.perf_counter() - start)

    watcher = threading.Thread(target=watch)
    watcher.start()
    steps, stepping = 0, 0.0
    while not ended:
        stepping += subject.step()
        steps += 1
    watcher.join()
    return {"returns": returned, "durable": ended[0], "lost": returned + stepping - steps * quiet_s}


def chunk_memory(*, huge: bool) -> memoryview:
    """Return CHUNK bytes in huge or small pages. The page size decides the number of requests that the device gets."""
    slack = 2 * MIB
    memory = mmap.mmap(-1, CHUNK + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
    begin = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % slack
    return memoryview(memory)[begin : begin + CHUNK]


def raw_write(path: str, size_bytes: int) -> float:
    """Return the seconds for O_DIRECT writes of `size` bytes to an allocated file, with the sync at the end."""
    memory = chunk_memory(huge=True)
    memory[:] = os.urandom(4096) * (CHUNK // 4096)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
    begin = time.perf_counter()
    os.posix_fallocate(fd, 0, size_bytes)
    for offset in range(0, size_bytes, CHUNK):
        os.pwrite(fd, memory, offset)
    os.fsync(fd)
    os.close(fd)
    return time.perf_counter() - begin


def raw_read(path: str, size_bytes: int, *, huge: bool = True) -> float:
    memory = chunk_memory(huge=huge)
    memory[:] = bytes(CHUNK)  # allocation must not count as writing
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    begin = time.perf_counter()
    for offset in range(0, size_bytes, CHUNK):
        os.preadv(fd, [memory], offset)
    os.close(fd)
    return time.perf_counter() - begin


def drop_caches(folder: str) -> None:
    for place, _, names in os.walk(folder):
        for name in names:
            fd = os.open(os.path.join(place, name), os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


class Bench:
    """The arms of one rank, which share a directory."""

    def __init__(self, rank: int, world_size: int, directory: str, size_bytes: int, step_s: float) -> None:
        self.rank, self.world_size, self.directory = rank, world_size, directory
        self.subject = Subject(size_bytes, step_s)
        dist.barrier()
        self.quiet_s = self.subject.calibrate()
        self.ours = {
            name: sw.Checkpointer(f"{directory}/{name}", self.subject.model, self.subject.optimizer, snapshot=name)
            for name in ("copy", "lazy")
        }
        self.count = 0
        self.stager: Any = None

    def save(self, arm: str) -> dict[str, float]:
        self.count += 1
        if arm.startswith("dcp"):
            return self.save_dcp(arm)
        checkpoints = self.ours[arm]
        found = one_save(
            self.subject, self.quiet_s, lambda: checkpoints.save(self.count), lambda _: not checkpoints.progress["busy"]
        )
        checkpoints.wait()
        self.keep_newest(arm)
        found["staging"] = float(checkpoints.progress["staging_bytes"])
        return found

    def save_dcp(self, arm: str) -> dict[str, float]:
        """Save with DCP's default, by its process, or with a stager thread whose copy must end before the next step."""
        path = f"{self.directory}/dcp/{self.count}"
        extra: dict[str, Any] = {}
        if arm == "dcp staged":
            from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

            extra["async_stager"] = self.stager = self.stager or DefaultStager(
                StagingOptions(False, False, True, False)
            )

        if arm == "dcp process":
            extra["async_checkpointer_type"] = AsyncCheckpointerType.PROCESS

        def begin() -> Any:
            response = dcp.async_save(self.subject.state(), checkpoint_id=path, **extra)
            if isinstance(response, Future):
                return response
            self.subject.before_step = response.staging_completion.result
            return response.upload_completion

        found = one_save(self.subject, self.quiet_s, begin, lambda f: bool(f.done()))
        self.subject.before_step = None
        self.keep_newest("dcp")
        return found

    def keep_newest(self, folder: str) -> None:
        """Remove old saves, outside of timed code."""
        dist.barrier()
        if self.rank == 0:
            *old, _ = sorted(
                (each for each in Path(self.directory, folder).iterdir() if each.is_dir()),
                key=lambda p: p.stat().st_mtime,
            )
            for each in old:
                shutil.rmtree(each)
        dist.barrier()

    def verify(self) -> None:
        """Check that each arm loads what it saved."""
        for arm in ("copy", "lazy"):
            self.subject.align()
            before = self.subject.digest()
            with sw.Checkpointer(
                f"{self.directory}/verify-{arm}", self.subject.model, self.subject.optimizer, snapshot=arm
            ) as checkpoints:
                checkpoints.save(0)
                self.subject.step()
                checkpoints.wait()
                assert checkpoints.restore() == 1 and self.subject.digest() == before, arm
            dist.barrier()
            if self.rank == 0:
                shutil.rmtree(f"{self.directory}/verify-{arm}")

    def load(self, arm: str) -> float:
        folder = f"{self.directory}/{'dcp' if arm == 'dcp' else 'copy'}"
        drop_caches(folder)
        if arm == "new":  # as after a restart: no optimizer state, and no staging memory of an earlier save
            self.subject.optimizer.state.clear()
        dist.barrier()
        begin = time.perf_counter()
        (newest,) = (name for name in os.listdir(folder) if not name.startswith("."))
        if arm == "dcp":
            dcp.load(self.subject.state(), checkpoint_id=f"{folder}/{newest}")
        elif arm == "new":
            sw.load(f"{folder}/{newest}", self.subject.model, self.subject.optimizer)
        else:
            self.ours["copy"].restore()
        return time.perf_counter() - begin

    def raw(self) -> tuple[float, float, float]:
        """Return seconds of (write, read, read into small pages) of the whole state by rank 0 while other ranks are
        idle.
        """
        path = f"{self.directory}/raw"
        times = (0.0, 0.0, 0.0)
        dist.barrier()
        if self.rank == 0:
            size = self.subject.size_bytes // CHUNK * CHUNK
            times = (raw_write(path, size), raw_read(path, size), raw_read(path, size, huge=False))
            os.unlink(path)
        dist.barrier()
        return times

    def close(self) -> None:
        for checkpoints in self.ours.values():
            checkpoints.close()


def work(rank: int, world_size: int, directory: str, size_bytes: int, step_s: float, rounds: int) -> dict[str, Any]:
    bench = Bench(rank, world_size, directory, size_bytes, step_s)
    bench.verify()
    arms = ARMS if world_size == 1 else ARMS[:3]  # with several ranks only DCP's default: its saves take minutes
    first = {arm: bench.save(arm) for arm in arms}
    samples: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
    loads: dict[str, list[float]] = {"copy": [], "new": [], "dcp": []}
    raw: list[tuple[float, float, float]] = []
    for turn in range(rounds):
        for position in range(len(arms)):
            arm = arms[(turn + position) % len(arms)]
            gc.collect()
            samples[arm].append(bench.save(arm))
        for arm in loads:
            loads[arm].append(bench.load(arm))
        raw.append(bench.raw())
    cpu = {}
    for arm in ("copy", "lazy"):  # lazy: no step overwrites the state, so the background thread copies everything
        bench.subject.align()
        begin, own = time.process_time(), time.thread_time()
        bench.ours[arm].save(10_000_000)
        bench.ours[arm].wait()
        cpu[arm] = time.process_time() - begin - (time.thread_time() - own)
    bench.close()
    return {
        "first": first,
        "samples": samples,
        "loads": loads,
        "raw": raw,
        "quiet": bench.quiet_s,
        "bytes": bench.subject.size_bytes,
        "cpu": cpu,
    }


def slowest(results: list[dict[str, Any]], arm: str, figure: str) -> float:
    """Return the median over rounds of the slowest rank's time."""
    return statistics.median(
        max(r["samples"][arm][i][figure] for r in results) for i in range(len(results[0]["samples"][arm]))
    )


def report_case(report: common.Report, case: str, results: list[dict[str, Any]]) -> None:
    size = results[0]["bytes"]
    gib = size / 2**30
    samples = len(results[0]["raw"])
    writes, reads, small = (statistics.median(times[i] for times in results[0]["raw"]) for i in range(3))

    def add(name: str, unit: str, ours: float, peer: float, peer_name: str, goal: float, **extra: Any) -> None:
        report.add(f"{case} {name}", unit, ours, peer, peer_name, goal=goal, samples=samples, **extra)

    arms = list(results[0]["samples"])
    firsts = {arm: max(r["first"][arm]["returns"] for r in results) * 1e3 for arm in arms}
    add(
        "copy returns",
        "s",
        slowest(results, "copy", "returns"),
        gib,
        "one second a GiB",
        0.25,
        first_ms=firsts["copy"],
        dcp_ms=slowest(results, "dcp", "returns") * 1e3,
    )
    add("lazy returns", "ms", slowest(results, "lazy", "returns") * 1e3, 10.0, "10 ms", 1.0, first_ms=firsts["lazy"])
    for arm in ("copy", "lazy"):
        for peer, how, goal in (
            ("dcp", "", 0.15),
            ("dcp staged", ", staged by a thread", 0.25),
            ("dcp process", " by a process", 0.25),
        ):
            if peer not in arms:
                continue
            name = "dcp.async_save" + how
            add(f"{arm} training time lost", "s", slowest(results, arm, "lost"), slowest(results, peer, "lost"), name, goal,
                quiet_step_ms=results[0]["quiet"] * 1e3)  # fmt: skip
        add(f"{arm} durable", "s", slowest(results, arm, "durable"), writes, "raw O_DIRECT write", 1 / 0.9,
            dcp_s=slowest(results, "dcp", "durable"), MBps=size / slowest(results, arm, "durable") / 1e6)  # fmt: skip
    add(
        "lazy memory above the state, all ranks",
        "GiB",
        sum(r["samples"]["lazy"][-1]["staging"] for r in results) / 2**30,
        gib,
        "a whole copy",
        0.7 if results[0]["quiet"] > 0.2 else 1.0,
    )
    loads = {
        arm: statistics.median(max(r["loads"][arm][i] for r in results) for i in range(samples))
        for arm in ("copy", "new", "dcp")
    }
    for arm, name in (("copy", "verified cold load"), ("new", "verified cold load, optimizer state not there yet")):
        add(name, "s", loads[arm], reads, "raw O_DIRECT read", 1 / 0.85, dcp_s=loads["dcp"], small_pages_s=small)
        report.add(f"{case} {name}", "s", loads[arm], loads["dcp"], "dcp.load", goal=2.5, larger=True, samples=samples)
    for arm in ("copy", "lazy"):
        add(f"{arm} background CPU, all ranks", "s", sum(r["cpu"][arm] for r in results), gib, "one second a GiB", 0.3)


def main() -> None:
    report, quick = common.begin("checkpoint", __doc__)
    chosen = os.environ.get("SW_BENCH_CASES", "1:0.35,1:0.12,2:0.35,2:0.12")
    pairs = [pair.split(":") for pair in chosen.split(",")]
    full = [(int(world), 1 << 30, float(step_s)) for world, step_s in pairs]
    cases = [(1, 48 * MIB, 0.03), (2, 48 * MIB, 0.03)] if quick else full
    for world_size, size_bytes, step_s in cases:
        with tempfile.TemporaryDirectory(prefix="bench-", dir=os.environ.get("SW_BENCH_DIR")) as directory:
            results = common.run_ranks(world_size, work, directory, size_bytes, step_s, common.LEAST_ROUNDS)
        report_case(report, f"W={world_size} {size_bytes // MIB} MiB {step_s:g} s a step", results)


if __name__ == "__main__":
    main()
