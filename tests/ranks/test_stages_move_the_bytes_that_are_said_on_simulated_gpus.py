"""Law: with n bytes of gradients and n of parameters, NCCL moves 2 n at zero=0, 3 n at zero=1, 2 n at zero=2, and at
zero=3 n and what units gather (docs/design/gpu.md). The losses are equal, bit for bit.
"""

from __future__ import annotations

from typing import Any

import internals
import pytest
import torch
from peer import PEER, batch
from simulated_gpus import SimulatedGpus, run, sw
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
WIDTH, BLOCKS, STEPS = 48, 3, 3


def test_bytes_of_a_step(teams: Any, paths: dict[str, str]) -> None:
    run(teams, 3, paths, counted, policy="on demand")


def counted(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    losses = {zero: train(gpus, rank, world_size, zero) for zero in range(4)}
    assert all(found == losses[0] for found in losses.values()), losses


def train(gpus: SimulatedGpus, rank: int, world_size: int, zero: int) -> list[float]:
    torch.manual_seed(0)
    module = gpus.adopt_module(
        nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)))
    )
    wrapped, optimizer = sw.wrap(module, sw.optim.AdamW(module.parameters(), lr=0.01), zero=zero, bucket_cap_mb=0.005)
    losses = []
    for step in range(STEPS):
        before, gathered = gpus.sent_bytes(), whole_bytes(wrapped)
        loss = wrapped(batch(rank, 6, WIDTH, step=step)).square().mean()
        losses.append(loss.detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sent, gathered = gpus.sent_bytes() - before, whole_bytes(wrapped) - gathered
    reducer = internals.reducer(wrapped)
    shapes = [reducer.bucket_shape(bucket) for bucket in range(reducer.bucket_count)]
    n = sum(numel * 4 for _, numel, _, _ in shapes)
    expected = {0: 2 * n, 1: 3 * n, 2: 2 * n, 3: n + gathered}[zero] * (world_size - 1) / world_size
    assert 0 <= sent - expected < 0.01 * expected, (zero, sent, expected)  # the rest: which parameters were used
    assert zero < 3 or n < gathered < 2 * n, (gathered, n)
    return [loss.item() for loss in losses]


def whole_bytes(wrapped: Any) -> int:
    """Return the bytes of whole units gathered so far."""
    return int(sw.stats(wrapped)["models"][0].get("gathered_bytes", 0))
