"""Make this folder's checkpoints with DeepSpeed 0.19.8 on two gloo ranks, or load an exported one with it.

python make.py save OUTPUT          zero1, zero2, zero3, universal, and expected.pt: the values of the live engine
python make.py load UNIVERSAL STAGE FOUND   write what an engine has after it loaded a universal checkpoint
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
import torch
from torch import nn

TRAINED = ("first.weight", "first.bias", "last.weight", "last.bias")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.frozen = nn.Parameter(torch.arange(5.0), requires_grad=False)
        self.last = nn.Linear(3, 2)
        self.register_buffer("count", torch.arange(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x) * self.frozen[0].add(1)).float().square().sum()


def engine_of(stage: int, low: bool, universal: bool = False, seed: int = 0):
    import deepspeed

    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # compiled otherwise
    torch.manual_seed(seed)
    model = Net()
    groups = [{"params": [*model.first.parameters()]}, {"params": [*model.last.parameters()], "lr": 0.5}]
    optimizer = torch.optim.AdamW(groups, lr=0.25)
    config = {
        "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}, "bf16": {"enabled": low},
        "zero_allow_untested_optimizer": True, "checkpoint": {"load_universal": universal},
    }  # fmt: skip
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def values_of(engine) -> dict[str, dict[str, torch.Tensor]]:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if hasattr(engine.optimizer, "_hp_optimizer_states_linked"):  # DeepSpeed links the first group's state alone
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    found = {}
    for name, parameter in engine.module.named_parameters():
        if name in TRAINED:
            found[name] = {"fp32": safe_get_full_fp32_param(parameter).clone()}
            found[name] |= {k: safe_get_full_optimizer_state(parameter, k).clone() for k in ("exp_avg", "exp_avg_sq")}
    return found


def train(engine, rank: int, steps: int = 2) -> None:
    for step in range(steps):
        torch.manual_seed(100 * step + rank)
        engine.backward(engine(torch.randn(2, 4).to(next(engine.module.parameters()).dtype)))
        engine.step()


def save(rank: int, output: str) -> None:
    expected = {}
    for name, stage, low in (("zero1", 1, False), ("zero2", 2, True), ("zero3", 3, True)):
        engine = engine_of(stage, low)
        train(engine, rank)
        engine.save_checkpoint(os.path.join(output, name), tag="tag", client_state={"epoch": 3})
        expected[name] = values_of(engine)
    if rank == 0:
        torch.save(expected, os.path.join(output, "expected.pt"))


def load(rank: int, path: str, stage: str, found: str) -> None:
    engine = engine_of(int(stage), True, universal=True, seed=1)
    engine.load_checkpoint(path)
    values = values_of(engine)
    train(engine, rank, 1)  # goes on
    if rank == 0:
        torch.save({"values": values, "steps": engine.global_steps}, found)


def main(arguments: list[str]) -> None:
    if "RANK" in os.environ:
        {"save": save, "load": load}[arguments[0]](int(os.environ["RANK"]), *arguments[1:])
        return
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ.get("MASTER_PORT", "29713"), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen([sys.executable, __file__, *arguments], env={**os.environ, **places, "RANK": str(r), "LOCAL_RANK": str(r)})
        for r in range(2)
    ]  # fmt: skip
    codes = [rank.wait(timeout=900) for rank in ranks]
    if any(codes):
        sys.exit(f"ranks ended with {codes}")
    if arguments[0] == "save":
        converter = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
        folders = [os.path.join(arguments[1], name, "tag") for name in ("zero2", "universal")]
        options = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
        subprocess.run([*converter, *options, "--input_folder", folders[0], "--output_folder", folders[1]], check=True)
        for name in ("zero1", "zero2", "zero3"):
            for script in ("zero_to_fp32.py", "zero_to_torch.py"):
                os.unlink(os.path.join(arguments[1], name, script))


if __name__ == "__main__":
    main(sys.argv[1:])
