"""Check of the laws of PowerSGD hooks, torch's and ours: two ranks over Gloo, one matrix of 40 x 30. Prints a table.

Nothing is timed. Each row is a law of docs/design/compress.md, and both hooks get the same gradients.
"""

from __future__ import annotations

import io
from collections.abc import Collection
from typing import Any

import common
import torch
import torch.distributed as dist
from shardwright import hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

ROWS, COLS = 40, 30


class Bucket:
    """A matrix in the form in which torch's reducer passes it to a hook."""

    def __init__(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        self.parameter, self.flat = parameter, gradient.clone().flatten()

    def buffer(self) -> torch.Tensor:
        return self.flat

    def gradients(self) -> list[torch.Tensor]:
        return [self.flat.view(ROWS, COLS)]

    def parameters(self) -> list[torch.Tensor]:
        return [self.parameter]

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def set_buffer(self, buffer: torch.Tensor) -> None:
        self.flat = buffer


class Arm:
    """A hook with its state."""

    def __init__(self, ours: bool, rank: int, rate: float = 0.0) -> None:
        module: Any = hooks if ours else power
        self.ours, self.hook = ours, module.powerSGD_hook
        self.state = module.PowerSGDState(None, rank, start_powerSGD_iter=2, min_compression_rate=rate)
        self.state.iter = 2
        self.parameter = torch.nn.Parameter(torch.zeros(ROWS, COLS))

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        return self.hook(self.state, Bucket(self.parameter, gradient)).wait().clone().view(ROWS, COLS)

    def error(self) -> float:
        if self.ours:
            return max((float(each.norm()) for each in self.state.errors().values()), default=0.0)
        return max((float(each.norm()) for each in self.state.error_dict.values()), default=0.0)


def gradient_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(1000 * step + rank))


def try_all(rank: int, world_size: int, but: Collection[str] = ()) -> dict[str, list[str]]:
    """Return what each law found for ours and for torch's hook; skip the laws in `but`."""
    rows: dict[str, list[str]] = {}
    for ours in (True, False):
        for name, law in LAWS.items():
            if name in but:
                continue
            try:
                found = law(ours, rank, world_size)
            except Exception as error:  # an exception of a hook is its result
                found = f"raises {type(error).__name__}"
            rows.setdefault(name, []).append(found)
            dist.barrier()
    return rows


def full_rank(ours: bool, rank: int, world_size: int) -> str:
    arm, worst = Arm(ours, 30), 0.0
    for step in range(3):
        mean = sum(gradient_of(r, step) for r in range(world_size)) / world_size
        worst = max(worst, float((arm(gradient_of(rank, step)) - mean).norm() / mean.norm()))
    return f"{worst:.1e}"


def rank_one(ours: bool, rank: int, world_size: int) -> str:
    arm, matrix = Arm(ours, 2), torch.outer(torch.arange(40.0) - 7, torch.arange(30.0) * 0.1 - 1)
    ratios = [float(arm(matrix).norm() / matrix.norm()) for _ in range(4)]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def zero(ours: bool, rank: int, world_size: int) -> str:
    arm = Arm(ours, 2)
    arm(torch.zeros(ROWS, COLS))
    after = [bool(arm(gradient_of(rank, step)).isfinite().all()) for step in range(3)]
    return "clean" if all(after) else "not finite for ever" if not after[-1] else "recovers"


def infinite(ours: bool, rank: int, world_size: int) -> str:
    arm = Arm(ours, 2)
    arm(gradient_of(rank, 0))
    poisoned = gradient_of(rank, 1)
    poisoned[3, 4] = float("inf") if rank == 0 else 0.0
    arm(poisoned)
    after = [bool(arm(gradient_of(rank, step)).isfinite().all()) for step in range(2, 5)]
    return "clean" if all(after) else "not finite for ever"


def growth(ours: bool, rank: int, world_size: int) -> str:
    arm, seen = Arm(ours, 2), []
    for step in range(2000):
        arm(gradient_of(rank, step))
        if step in (99, 1999):
            seen.append(arm.error())
    return f"{seen[1] / seen[0]:.2f}"


def resume(ours: bool, rank: int, world_size: int) -> str:
    arm = Arm(ours, 2)
    for step in range(3):
        arm(gradient_of(rank, step))
    again, file = Arm(ours, 2), io.BytesIO()
    if ours:
        torch.save(arm.state.state_dict(), file)
        file.seek(0)
        again.state.load_state_dict(torch.load(file, weights_only=True))
    else:
        torch.save(arm.state, file)
        file.seek(0)
        again.state = torch.load(file, weights_only=False)
    return "same bits" if torch.equal(arm(gradient_of(rank, 3)), again(gradient_of(rank, 3))) else "other bits"


GROWTH = "error after 2,000 steps / after 100"
LAWS = {
    "full rank: off from the all-reduce": full_rank,
    "rank-one gradient at r=2: result / gradient": rank_one,
    "after a zero gradient": zero,
    "after an infinity on one rank": infinite,
    GROWTH: growth,
    "saved and loaded in one process": resume,
}


def main() -> None:
    rows = common.run_ranks(2, try_all)[0]
    print(f"| law | ours | torch {torch.__version__} |\n|---|---|---|")
    for name, (ours, theirs) in rows.items():
        print(f"| {name} | {ours} | {theirs} |")


if __name__ == "__main__":
    main()
