"""The shortest complete program: wrap a model and its optimizer, train, compare the ranks.

Run it with `torchrun --nproc-per-node 3 examples/01_wrap_model.py`.
"""

import shardwright as sw
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
model, optimizer = sw.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
rank = torch.distributed.get_rank()
torch.manual_seed(rank)  # each rank has its own data
for step in range(3):
    x = torch.randn(32, 64)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"rank {rank}: first weight {model.module[0].weight[0, 0].item():+.6f}", flush=True)
torch.distributed.destroy_process_group()
