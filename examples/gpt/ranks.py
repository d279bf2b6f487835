"""The script's ranks; a single rank has no process group."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist


def rank_and_world_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def sum_over_ranks(values: list[float]) -> list[float]:
    """Add lists of equal length element by element; every rank gets the sums."""
    total = torch.tensor(values, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.tolist()


def leave() -> None:
    """Wait for the other ranks and close the process group."""
    if dist.is_initialized():
        dist.barrier()
        # Gloo's worker thread takes the GIL to release the last tensors, and the group's
        # destructor joins that thread with the GIL held: let it finish first, or both wait.
        time.sleep(0.1)
        dist.destroy_process_group()
