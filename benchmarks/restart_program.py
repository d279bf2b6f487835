"""Training program that bench_restart.py kills: restart_program.py ours|memory|torch FOLDER STEPS. Saves after each
step; `memory` only to memory.
"""

import os
import sys
import time

BEGIN_S = time.time()

import torch  # noqa: E402

arm, folder, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)])  # 8 MiB
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)  # imports as much as torch's own optimizers do

import shardwright as sw  # noqa: E402
from shardwright_tools.chaos import observer_of  # noqa: E402


def born_s() -> float:
    """Return the time at which the kernel created this process."""
    with open("/proc/self/stat", encoding="ascii") as file:
        ticks = int(file.read().rsplit(")", 1)[1].split()[19])
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")


def train(step: int, model: torch.nn.Module, save: object) -> None:
    x = torch.randn(16, 512)
    while step < steps:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        save(step)  # type: ignore[operator]
        step += 1


started_s = time.time() - born_s()
if arm != "torch":
    model, optimizer = sw.wrap(model, optimizer)
    in_memory = arm == "memory"
    checkpoints = sw.Checkpointer(folder, model, optimizer, keep_last=2, memory_every=1 if in_memory else None)
    agent = observer_of(model)
    assert agent is not None
    agent.report("ready", process_s=started_s)
    train(checkpoints.restore(), model, lambda step: checkpoints.save(step, every=steps + 1 if in_memory else 1))
    checkpoints.close()
else:
    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
    agent = observer_of(model)
    assert agent is not None
    agent.report("ready", process_s=started_s)
    path, rank, first = os.path.join(folder, "state.pt"), torch.distributed.get_rank(), 0
    if os.path.exists(path):
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    torch.distributed.barrier()
    agent.restored(first)

    def save(step: int) -> None:
        agent.passed(step)
        if rank == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, path + "~")
            os.replace(path + "~", path)

    train(first, model, save)
    torch.distributed.destroy_process_group()
