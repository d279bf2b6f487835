"""A program of accelerate's, without a word of shardwright: `shardwright run` names the stage. See README.md.

ACCELERATE_USE_CPU=1 torchrun --nproc-per-node 2 -m shardwright run zero2 examples/08_accelerate.py
ACCELERATE_USE_CPU=1 torchrun --nproc-per-node 2 examples/08_accelerate.py        # torch's DistributedDataParallel
"""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed


def main():
    torch.set_num_threads(1)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    x = torch.randn(1024, 64)
    rows = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    loader = torch.utils.data.DataLoader(rows, batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(3):
        total = 0.0
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = (model(x) - y).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 10.0)
                optimizer.step()
                optimizer.zero_grad()
            total += accelerator.reduce(loss.detach(), "mean").item() / len(loader)
        accelerator.print(f"epoch {epoch}: loss {total:.4f}")
    accelerator.print(f"wrapped by {type(model).__module__}.{type(model).__qualname__}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
