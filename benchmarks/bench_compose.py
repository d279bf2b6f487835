"""A whole training step (forward, backward, AdamW(fused=True)) of a tensor-parallel model, tp 2 x dp 2, under sw.wrap at zero=1 and 3,
against FSDP2 over the same DTensors.

Four ranks, one mesh. Each arm trains its own copy of the model, in turns. `FSDP2 + TP` is torch's composition: parallelize_module,
then fully_shard of each block and of the whole over the data-parallel dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import common
import shardwright as sw
import torch
import torch.distributed as dist
from shardwright.comm.process_group import host_group
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

OURS: dict[str, dict[str, Any]] = {
    "zero=1": {"zero": 1},
    "zero=3": {"zero": 3},
    "zero=3 private": {"zero": 3, "share_parameters": False},
}
PEER = "FSDP2 + TP"
GOAL = 0.8
WIDTH, BLOCKS, ROWS = 512, 8, 256
VERIFIED_STEPS = 3


class Block(nn.Module):
    """A norm and two linear layers, with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return y


class Trainer:
    """One arm's copy of the model."""

    def __init__(self, arm: str, mesh: Any) -> None:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        for block in model:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        self.model, self.optimizer = self._wrap(arm, model, mesh)
        generator = torch.Generator().manual_seed(mesh.get_local_rank("dp"))
        self.batch = torch.randn(ROWS, WIDTH, generator=generator)

    @staticmethod
    def _wrap(arm: str, model: nn.Module, mesh: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
        if arm != PEER:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
            return sw.wrap(model, optimizer, device_mesh=mesh["dp"], **OURS[arm])
        from torch.distributed.fsdp import fully_shard

        for block in model.children():
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(self) -> Tensor:
        """Train one step and return the loss."""
        self.optimizer.zero_grad()
        loss: Tensor = self.model(self.batch).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def time_steps(rank: int, world_size: int, arms: Sequence[str], rounds: int, budget_s: float) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    trainers = {arm: Trainer(arm, mesh) for arm in arms}
    losses = {arm: torch.stack([trainer.step() for _ in range(VERIFIED_STEPS)]) for arm, trainer in trainers.items()}
    for arm, found in losses.items():
        torch.testing.assert_close(found, losses[PEER], rtol=1e-5, atol=0, msg=f"losses of {arm} and {PEER}: ".__add__)
    work: dict[str, Callable[[], Any]] = {arm: trainer.step for arm, trainer in trainers.items()}
    barrier = host_group(dist.group.WORLD, 1800.0).comm.barrier
    return common.interleave(work, barrier, rounds=rounds, budget_s=budget_s, warmup=1)


def main() -> None:
    report, quick = common.begin("compose", __doc__, ["tp"])
    rounds, budget_s = (common.LEAST_ROUNDS, 1.0) if quick else (15, 45.0)
    times = common.timings(common.run_ranks(4, time_steps, [*OURS, PEER], rounds, budget_s))
    for arm in OURS:
        report.add_times(f"tp 2 x dp 2 step {arm}", times[arm], times[PEER], PEER, goal=GOAL)


if __name__ == "__main__":
    main()
