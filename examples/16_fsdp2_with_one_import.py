"""A program of FSDP2 in torchtitan's form, with one import changed. `--torch` runs it with torch's fully_shard instead.

    torchrun --nproc-per-node 2 examples/16_fsdp2_with_one_import.py FOLDER
    torchrun --nproc-per-node 3 examples/16_fsdp2_with_one_import.py FOLDER --torch    # goes on from the folder of ours

The model is made on the meta device, each block and then the whole are sharded, `to_empty()` gives each rank its rows, and
a fused optimizer of torch's steps on them. Each run trains 4 steps and saves with torch.distributed.checkpoint.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpt.data import TrainingBatches, load_corpus
from gpt.model import GPT
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F

if "--torch" in sys.argv:
    from torch.distributed.fsdp import fully_shard
else:
    from shardwright import fully_shard

CONTEXT, STEPS = 32, 4


def init_weights(module):
    for name, parameter in module.named_parameters():
        if "norm" in name or parameter.dim() == 1:
            nn.init.constant_(parameter, float("norm" in name and name.endswith("weight")))
            continue
        generator = torch.Generator().manual_seed(sum(name.encode()))
        whole = torch.randn(parameter.shape, generator=generator) * 0.02
        rows = torch.chunk(whole, dist.get_world_size())
        if dist.get_rank() < len(rows):
            parameter.detach().to_local().copy_(rows[dist.get_rank()])


def main(folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))

    with torch.device("meta"):
        model = GPT(context=CONTEXT, layers=4, width=96, heads=4)
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device="cpu")
    init_weights(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    first = 0
    if os.path.exists(f"{folder}/.metadata"):
        states = [*get_state_dict(model, optimizer), {"step": 0}]
        dcp.load({"model": states[0], "optimizer": states[1], "train": states[2]}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1])
        first = states[2]["step"]
    batches = TrainingBatches(load_corpus()[0], batch_size=4, context=CONTEXT, rank=0, world_size=1, seed=0)
    for step in range(first + STEPS):
        tokens, targets = batches.next()  # of the steps before `first`, too
        if step < first:
            continue
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}, norm {norm.item():.4f}", flush=True)
    saved = get_state_dict(model, optimizer)
    train = {"step": first + STEPS}
    dcp.save({"model": saved[0], "optimizer": saved[1], "train": train}, checkpoint_id=folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
