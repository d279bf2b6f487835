"""A training that goes on when a rank is killed: a spare takes its place, and the weights are those of a run without a loss.

    torchrun --nproc-per-node 3 --no-python shardwright rank --spares 1 -- python examples/18_never_restart.py FOLDER --kill 7
    torchrun --nproc-per-node 3 --no-python shardwright rank -- python examples/18_never_restart.py FOLDER

Rank 1 kills itself at the step of --kill. With --spares a process waits that has built the model. Without it the others wait for the
killed rank, which starts again. With --fewer they go on as two ranks, and it joins between two steps.
"""

import argparse
import os
import signal
import time
import zlib

import shardwright as sw
import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--zero", type=int, default=2)
parser.add_argument("--kill", type=int, default=-1, help="the step in which rank 1 kills itself")
parser.add_argument("--fewer", action="store_true", help="go on with fewer ranks until the killed one is back")
parser.add_argument("--pause", type=float, default=0.0, help="seconds that each step takes more")
arguments = parser.parse_args()

dies = os.environ["RANK"] == "1"  # a spare has RANK=0, and sw.steps numbers the ranks anew
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Dropout(0.1), torch.nn.GELU(), torch.nn.Linear(64, 1))
model, optimizer = sw.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2), zero=arguments.zero, timeout_s=30.0)
torch.manual_seed(1 + dist.get_rank())  # each rank drops out other units
checkpoints = sw.Checkpointer(arguments.folder, model, optimizer, memory_every=1)

for step in sw.steps(checkpoints, arguments.steps, spares=0 if arguments.fewer else 1):
    with step:
        rank = dist.get_rank()  # anew in each step
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(1000 * step + rank))
        loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True).sin())
        loss.backward()
        if step == arguments.kill and dies:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
        checkpoints.save(step, every=100)
        if rank == 0:
            print(f"step {step:d}: {dist.get_world_size()} ranks, loss {loss.item():.4f}", flush=True)
        time.sleep(arguments.pause)

weights = b"".join(each.numpy().tobytes() for each in sw.full_state_dict(model).values())
if dist.get_rank() == 0:
    print(f"{dist.get_world_size()} ranks, weights {zlib.crc32(weights):08x}", flush=True)
checkpoints.close()
