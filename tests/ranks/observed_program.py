"""A program whose rank 1 is slow: `observed_program.py FOLDER STEPS`."""

import sys
import time

import shardwright as sw
import torch

folder, steps = sys.argv[1], int(sys.argv[2])
torch.manual_seed(1)
model = torch.nn.Linear(64, 1)
model, optimizer = sw.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-3), zero=1)
rank = torch.distributed.get_rank()
with (
    sw.Checkpointer(f"{folder}/saved", model, optimizer, keep_last=2) as saves,
    sw.metrics(model, tokens=100, to=[f"jsonl:{folder}/metrics.jsonl"], every=5) as scalars,
):
    for step in range(steps):
        loss = model(torch.ones(8, 64)).square().mean()
        time.sleep(0.05 if rank == 1 else 0.002)  # by more than a busy machine delays the other
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scalars.add(loss=loss.item())
        if step % 20 == 19:
            saves.save(step)
torch.distributed.destroy_process_group()
