"""Keep each step in memory that outlives killed ranks: rank 1 kills itself once, and the job goes on from the step before.

TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nproc-per-node 2 --max-restarts 1 examples/11_steps_in_memory.py FOLDER
"""

import os
import signal
import sys

import shardwright as sw
import torch

STEPS, KILLED_AT = 12, 7
folder = sys.argv[1]

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
model, optimizer = sw.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2), zero=1)
rank = torch.distributed.get_rank()
with sw.Checkpointer(folder, model, optimizer, memory_every=1) as checkpoints:
    first = checkpoints.restore()
    on_disk = checkpoints.steps()
    if rank == 0:
        print(f"begins at step {first}; steps on disk: {on_disk}", flush=True)
    for step in range(first, STEPS):
        torch.manual_seed(1000 * step + rank)
        x = torch.randn(32, 64)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == KILLED_AT and first == 0 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        checkpoints.save(step, every=STEPS)  # each step into memory, the last one to disk
if rank == 0:
    print(f"loss {loss.item():.6f}", flush=True)
torch.distributed.destroy_process_group()
