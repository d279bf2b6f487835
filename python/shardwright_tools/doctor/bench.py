"""`shardwright doctor --bench`: time all_reduce by size, between processes of this host and between its GPUs.

Each rank is a process that runs this file; ranks meet through a FileStore in a temporary folder. A few repetitions on a
possibly busy machine are a sanity check, not a benchmark.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..interrupts import delayed

if TYPE_CHECKING:
    import torch

#: bytes of float32 on each rank
SIZES = tuple(1 << shift for shift in range(14, 27, 2))
_SECONDS_A_SIZE = 0.15
_LIMIT_S = 120.0


@dataclasses.dataclass(frozen=True)
class Row:
    """The result for one size: median seconds of the slowest rank; bandwidth is a rank's bytes over that time."""

    where: str
    ranks: int
    nbytes: int
    seconds: float

    def __str__(self) -> str:
        size = f"{self.nbytes >> 10} KiB" if self.nbytes < 1 << 20 else f"{self.nbytes >> 20} MiB"
        rate = self.as_json()["gigabytes_a_second"]
        return f"all_reduce, {self.ranks} {self.where}, {size:>7}: {self.seconds * 1e6:10.1f} us {rate:8.2f} GB/s"

    def as_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "gigabytes_a_second": self.nbytes / self.seconds / 1e9}


def sweep(sizes: tuple[int, ...] = SIZES) -> list[Row]:
    """Run the ranks and return a row for each size. Raise RuntimeError with the message of a failed rank."""
    rows = _run("processes", max(2, min(4, len(os.sched_getaffinity(0)))), sizes)
    gpus = _gpu_count()
    return rows + (_run("GPUs", gpus, sizes) if gpus > 1 else [])


def _gpu_count() -> int:
    import torch
    from shardwright import _engine

    try:
        seen = len(_engine.cuda_devices()["devices"])
    except (NotImplementedError, _engine.Error):
        return 0
    return min(seen, torch.cuda.device_count()) if torch.cuda.is_available() else 0


def _run(where: str, ranks: int, sizes: tuple[int, ...]) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="shardwright-doctor-") as folder:
        asked = json.dumps({"where": where, "ranks": ranks, "sizes": sizes, "store": str(Path(folder, "store"))})
        environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", __name__, asked]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        programs: list[subprocess.Popen[str]] = []
        try:
            for rank in range(ranks):
                with delayed():
                    programs.append(subprocess.Popen([*command, str(rank)], env=environment, **pipes))
            outputs = [program.communicate(timeout=_LIMIT_S) for program in programs]
        finally:
            for program in programs:
                program.kill()
                program.wait()
    for rank, (program, (_, complaint)) in enumerate(zip(programs, outputs)):
        if program.returncode:
            last = complaint.strip().splitlines()[-1:] or [f"exit status {program.returncode}"]
            raise RuntimeError(f"rank {rank} of {ranks} {where}: {last[0]}")
    return [Row(where, ranks, nbytes, seconds) for nbytes, seconds in json.loads(outputs[0][0])]


def _measure(asked: dict[str, Any], rank: int) -> list[tuple[int, float]]:
    import torch
    import torch.distributed as dist
    from shardwright.comm.process_group import host_group

    ranks = asked["ranks"]
    store = dist.FileStore(asked["store"], ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=_LIMIT_S))
    if asked["where"] == "GPUs":
        torch.cuda.set_device(rank)
    group = host_group(dist.group.WORLD, _LIMIT_S)
    found = []
    for nbytes in asked["sizes"]:
        work = _on_host(group, nbytes) if asked["where"] == "processes" else _on_gpu(group, nbytes, rank)
        found.append((nbytes, _time(group, work)))
    return found


def _on_host(group: Any, nbytes: int) -> Callable[[], None]:
    from torch.utils.dlpack import from_dlpack

    arena = group.comm.arena(nbytes, "doctor")
    memory = from_dlpack(arena.tensor(0, "float32", [nbytes // 4]))
    memory.fill_(1.0)

    def work() -> None:
        group.comm.all_reduce(memory.data_ptr(), memory.numel(), "float32", "mean", "doctor", arena)

    return work


def _on_gpu(group: Any, nbytes: int, rank: int) -> Callable[[], None]:
    import torch
    from shardwright.backend.device_link import device_link

    like = torch.zeros(nbytes // 4, dtype=torch.float32, device=torch.device("cuda", rank))
    run_round = make_round(device_link(group, like, _LIMIT_S), torch.nn.Parameter(like))

    def work() -> None:
        run_round()
        torch.cuda.synchronize()

    return work


def make_round(link: Any, parameter: torch.nn.Parameter) -> Callable[[], None]:
    """Return a function that enqueues a round over one bucket, which already holds the gradient of `parameter`."""
    from shardwright.gradients.device_reducer import DeviceReducer
    from shardwright.layout.shard_mesh import Slicing
    from shardwright.layout.views import copy_gradient, gradient_view

    reducer = DeviceReducer(
        link,
        [("doctor", parameter.numel(), "float32", True)],
        parameter,
        bucket_cap_bytes=parameter.nbytes,
        reduce="mean",
        deterministic=False,
        label="doctor",
        sliced=False,
        slicing=Slicing.one_a_rank(link.rank, link.world_size),
    )
    views = [gradient_view(parameter, reducer, 0)]
    reducer.attach(
        [parameter], views, copy=copy_gradient, open=lambda: True, renew=lambda _: None, task_id=lambda: 0, layouts=None
    )
    parameter.grad = views[0]
    take_gradient = reducer.hook(0)

    def run_round() -> None:
        take_gradient(parameter)
        reducer.close()

    return run_round


def _time(group: Any, work: Callable[[], None]) -> float:
    """Return the largest of the ranks' median times, in seconds."""
    timeit.timeit(work, number=3)
    once = timeit.timeit(work, number=1)
    wanted = group.comm.all_gather_bytes(repr(max(5, min(200, int(_SECONDS_A_SIZE / max(once, 1e-9))))).encode())
    samples = timeit.repeat(work, group.comm.barrier, number=1, repeat=min(map(int, wanted)))
    medians = group.comm.all_gather_bytes(repr(statistics.median(samples)).encode(), "doctor")
    return max(float(each) for each in medians)


if __name__ == "__main__":
    print(json.dumps(_measure(json.loads(sys.argv[1]), int(sys.argv[2]))))
