"""A program of DeepSpeed's, with its own package or ours: `deepspeed_loop.py deepspeed|shardwright`, under torchrun.

Prints one JSON object: the losses, norms and learning rates of each stage, on rank 0.
"""

import json
import os
import sys

import torch

if sys.argv[1] == "deepspeed":
    import deepspeed
else:
    from shardwright import deepspeed

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.05,
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 3, "total_num_steps": 9},
    },
    "zero_allow_untested_optimizer": True,
    "steps_per_print": 100000,
}


def main():
    deepspeed.init_distributed(dist_backend="gloo")
    rank, found = int(os.environ["RANK"]), {}
    for stage in (1, 2, 3):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 3))
        config = {**CONFIG, "zero_optimization": {"stage": stage}}
        engine, optimizer, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        generator, rows = torch.Generator().manual_seed(rank), []
        for _ in range(12):
            x = torch.randn(4, 16, generator=generator)
            loss = (engine(x) - x[:, :3]).square().mean()
            engine.backward(loss)
            engine.step()
            rows.append(
                (loss.item(), float(engine.get_global_grad_norm() or 0), float(optimizer.param_groups[0]["lr"]))
            )
        with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=None):
            rows.append((sum(float(p.detach().double().sum()) for p in model.parameters()), 0.0, 0.0))
        found[stage] = rows
    if rank == 0:
        print("FOUND", json.dumps(found), flush=True)
    torch.distributed.barrier()


main()
