"""DeepSpeed's loop and JSON without DeepSpeed: the import is the one change. See README.md and docs/deepspeed.md.

torchrun --nproc-per-node 2 examples/07_deepspeed_json.py [--deepspeed_config FILE] [--stage N]
"""

import argparse
import json
import os
import tempfile

import torch
from shardwright import deepspeed

CONFIG = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 16,
    "gradient_clipping": 10.0,
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.01}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.004, "warmup_num_steps": 10}},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "contiguous_gradients": True},
}


def main():
    torch.set_num_threads(1)
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    parser.add_argument("--stage", type=int, default=2)
    args = parser.parse_args()
    config = CONFIG
    if args.deepspeed_config:
        with open(args.deepspeed_config) as file:
            config = json.load(file)
    config = json.loads(json.dumps(config).replace('"auto"', "0.004"))
    config["zero_optimization"]["stage"] = args.stage
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    x = torch.randn(1024, 64)
    rows = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    engine, optimizer, loader, scheduler = deepspeed.initialize(model=model, training_data=rows, config=config)
    rank = torch.distributed.get_rank()
    for epoch in range(5):
        total = torch.zeros(())
        for x, y in loader:
            loss = (engine(x) - y).square().mean()
            engine.backward(loss)
            engine.step()
            total += loss.detach() / len(loader)
        torch.distributed.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {total / engine.world_size:.4f}, norm {engine.get_global_grad_norm():.4f}")
    folder = [tempfile.mkdtemp()]
    torch.distributed.broadcast_object_list(folder)
    engine.save_checkpoint(folder[0], client_state={"epoch": 5})
    path, client = engine.load_checkpoint(folder[0])
    if rank == 0:
        print(f"step {engine.global_steps}, {os.path.basename(path)}, {client}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
