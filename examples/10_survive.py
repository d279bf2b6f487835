"""A training that survives: killed ranks, a time limit, another number of ranks. It prints a digest of the final weights.

    torchrun --nproc-per-node 2 --max-restarts 3 examples/10_survive.py /tmp/survive
    torchrun --nproc-per-node 2 --max-restarts 3 examples/10_survive.py /tmp/survive --memory 1 --every 10
    shardwright chaos --plan examples/10_faults.json -- \
        torchrun --nproc-per-node 2 --max-restarts 9 examples/10_survive.py '/tmp/survive-{run}'

A second run with another --nproc-per-node goes on from the last checkpoint, with the same global batches. With --memory 1 each step
goes into memory that outlives the ranks, and each 10th to disk. 10_two_hosts.sh makes two hosts of this machine for it.
"""

import argparse
import contextlib
import signal

import shardwright as sw
import torch
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--zero", type=int, default=0)
parser.add_argument("--every", type=int, default=1, help="steps between two saves to disk")
parser.add_argument("--memory", type=int, help="steps between two copies to memory")
parser.add_argument("--replicas", type=int, help="hosts that keep a copy of each host's memory")
parser.add_argument("--silent", type=float, help="seconds after which a stopped rank or a cut link is an error")
arguments = parser.parse_args()

torch.manual_seed(0)
x = torch.randn(500, 32)
data = TensorDataset(x, x.sum(1, keepdim=True).sin())
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
# A rank that is stopped, or does not answer, is an error after 10 s; replicas are compared each 4 steps.
model, optimizer = sw.wrap(
    model,
    torch.optim.AdamW(model.parameters(), lr=1e-2),
    zero=arguments.zero,
    timeout_s=10.0,
    check_every=4,
    silent_s=arguments.silent,
)
batches = sw.elastic.batches(48, micro_batch=16)  # 48 samples in each step, at any number of ranks
sampler = sw.elastic.Sampler(len(data), batches, seed=1)
scheduler = sw.elastic.by_samples(optimizer, sampler, lambda samples: 0.5 ** (samples / 1000))
signals = (signal.SIGTERM, signal.SIGUSR1)
tier = {"memory_every": arguments.memory, "memory_replicas": arguments.replicas}
with sw.Checkpointer(
    arguments.folder, model, optimizer, scheduler=[scheduler, sampler], keep_last=2, save_on=signals, **tier
) as checkpoints:
    step = checkpoints.restore()
    while step < arguments.steps:
        for inputs, targets in DataLoader(data, batch_sampler=sampler):
            with model.no_sync() if sampler.accumulates() else contextlib.nullcontext():
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                (loss * batches.scale(len(inputs))).backward()
            if sampler.is_last:
                optimizer.step()
                optimizer.zero_grad()
                sampler.step()
                scheduler.step()
                checkpoints.save(step, every=arguments.every)
                step += 1
                if step == arguments.steps:
                    break
    with sw.full_parameters(model):
        digest = sum(parameter.double().sum().item() for parameter in model.parameters())
print(f"rank {torch.distributed.get_rank()}: step {step}, loss {loss.item():.6f}, weights {digest:.12f}", flush=True)
