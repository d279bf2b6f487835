"""Memory tier: the cost of keeping every step in memory, for a training that computes beside it.

Arms take turns over one model and optimizer: a step alone; a step and `save()` with memory_every=1; a step and torch's
`dcp.save` of the same state to /dev/shm; where the package dlrover can be imported, a step and its flash checkpoint to memory,
which rank 0 writes. The demo is the GPT of examples/train_gpt.py with its defaults. "save() alone" is the
time inside the call, of the slowest rank, over the step's; it includes the wait for the slower rank, which a step alone has
elsewhere. "processor time" leaves waits out, and what other programs take. "hosts" runs the ranks on simulated hosts of one machine, each with
a copy on the next: sender and receiver share the cores that train, so it is an upper bound. The first rows' state is verified: a
restore gives the bits that were saved.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import common
import shardwright as sw
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import GPT, VOCABULARY
from shardwright.comm import process_group
from torch.nn import functional as F

try:  # Python's path has it, and what it imports: psutil, deprecated, wrapt, requests, grpcio
    from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType
except ImportError:
    DdpCheckpointer = StorageType = None

GOAL = 1.03
REPEAT = 5  # steps a sample
#: layers, width, heads, rows of a rank, context
MODELS = {"demo GPT": (4, 128, 4, 4, 128), "GPT 10.8 M": (6, 384, 6, 4, 128)}
SHM = "/dev/shm"


class Subject:
    """A model that trains on random bytes, and the arms over it."""

    def __init__(self, rank: int, model: str, zero: int, directory: str, replicas: int) -> None:
        layers, width, heads, rows, context = MODELS[model]
        torch.manual_seed(0)
        gpt = GPT(context=context, layers=layers, width=width, heads=heads)
        self.model, self.optimizer = sw.wrap(gpt, torch.optim.AdamW(gpt.parameters(), lr=1e-4), zero=zero)
        generator = torch.Generator().manual_seed(rank)
        tokens = torch.randint(VOCABULARY, (rows, context + 1), generator=generator)
        self.inputs, self.targets = tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()
        self.step()
        self.checkpoints = sw.Checkpointer(
            directory, self.model, self.optimizer, memory_every=1, memory_replicas=replicas
        )
        self.count = 0
        self.inside: list[float] = []
        self.inside_cpu: list[float] = []  # of all threads
        self.shm = os.path.join(SHM, os.path.basename(directory))

    def step(self) -> None:
        loss = F.cross_entropy(self.model(self.inputs).flatten(0, -2), self.targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def kept(self) -> None:
        self.step()
        self.count += 1
        begin, cpu = time.perf_counter(), time.process_time()
        self.checkpoints.save(self.count, every=1 << 40)
        self.inside.append(time.perf_counter() - begin)
        self.inside_cpu.append(time.process_time() - cpu)

    def dcp(self) -> None:
        self.step()
        parameters = dict(self.model.module.named_parameters())
        state = {
            "model": {name: each.detach() for name, each in parameters.items()},
            "optim": {
                f"{key}.{name}": value
                for name, each in parameters.items()
                for key, value in self.optimizer.state.get(each, {}).items()
            },
        }
        dcp.save(state, checkpoint_id=self.shm)

    def flash(self) -> None:
        self.step()
        state = {"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        self.dlrover.save_checkpoint(
            self.count, state, os.path.join(self.shm, "flash.pt"), storage_type=StorageType.MEMORY
        )

    def verify(self) -> None:
        self.checkpoints.save(self.count, every=1 << 40)
        self.checkpoints._memory.wait()  # type: ignore[union-attr]
        with sw.full_parameters(self.model):
            before = [each.detach().clone() for each in self.model.parameters()]
        self.step()
        assert self.checkpoints.restore() == self.count + 1
        with sw.full_parameters(self.model):
            assert all(torch.equal(a, b) for a, b in zip(before, self.model.parameters()))


def work(
    rank: int, world_size: int, model: str, zero: int, hosts: list[int] | None, rounds: int, budget_s: float
) -> Any:
    process_group._forced_hosts = hosts
    directory = tempfile.mkdtemp(prefix="bench-memory-") if rank == 0 else ""
    told = [directory]
    dist.broadcast_object_list(told)
    subject = Subject(rank, model, zero, told[0], 0 if hosts is None else 1)
    if subject.checkpoints._memory.off:  # type: ignore[union-attr]
        raise SystemExit(f"no memory tier: {subject.checkpoints._memory.off}")  # type: ignore[union-attr]
    subject.verify()
    arms: dict[str, Callable[[], None]] = {"none": subject.step, "kept": subject.kept}
    if zero == 0 and hosts is None:
        arms["dcp"] = subject.dcp
        if DdpCheckpointer is not None:
            os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world_size), "WORLD_SIZE": str(world_size)}
            subject.dlrover = DdpCheckpointer(subject.shm)
            arms["flash"] = subject.flash
    subject.inside.clear()
    subject.inside_cpu.clear()
    samples = common.interleave(arms, dist.barrier, rounds=rounds, budget_s=budget_s, repeat=REPEAT)
    progress = subject.checkpoints.progress
    subject.checkpoints.close()
    dist.barrier()
    if "flash" in arms:
        subject.dlrover._engine.close()
    if rank == 0:
        shutil.rmtree(told[0])
        shutil.rmtree(subject.shm, ignore_errors=True)
    return samples, subject.inside, progress, subject.inside_cpu


def main() -> None:
    report, quick = common.begin("memory_tier", __doc__)
    rounds, budget_s = common.effort(quick)
    cases: list[tuple[str, int, int, list[int] | None]] = [("demo GPT", 2, 0, None), ("demo GPT", 2, 2, None)]
    if not quick:
        cases += [("GPT 10.8 M", 2, 0, None), ("GPT 10.8 M", 2, 3, None), ("demo GPT", 2, 0, [0, 1])]
    for model, world_size, zero, hosts in cases:
        results = common.run_ranks(world_size, work, model, zero, hosts, 3 * rounds, 2 * budget_s)
        times = common.timings([samples for samples, *_ in results], REPEAT)
        case = f"{model} W={world_size} zero={zero}" + ("" if hosts is None else " hosts")
        inside = statistics.median(map(max, zip(*(inside for _, inside, *_ in results))))
        progress = results[0][2]
        none = times["none"].median
        report.add_times(f"{case} step with save()", times["kept"], times["none"], "a step alone", goal=GOAL)
        report.add(
            f"{case} save() alone", "ms", 1e3 * (none + inside), 1e3 * none, "a step alone", goal=GOAL,
            samples=len(results[0][1]), inside_ms=1e3 * inside, share_mib=progress["memory_bytes"] / 2**20,
            skipped=progress["memory_skipped"],
        )  # fmt: skip
        step_cpu = statistics.median(s.cpu_s / REPEAT for samples, *_ in results for s in samples["none"])
        save_cpu = statistics.median(cpu for *_, inside_cpu in results for cpu in inside_cpu)
        report.add(
            f"{case} processor time of a rank", "ms", 1e3 * (step_cpu + save_cpu), 1e3 * step_cpu, "a step alone", goal=GOAL,
            samples=len(results[0][3]), save_ms=1e3 * save_cpu,
        )  # fmt: skip
        if "dcp" in times:
            report.add_times(f"{case} step with save()", times["kept"], times["dcp"], "dcp.save to /dev/shm", goal=None)
        if "flash" in times:
            report.add_times(f"{case} step with save()", times["kept"], times["flash"], "DLRover, flash", goal=None)


if __name__ == "__main__":
    main()
