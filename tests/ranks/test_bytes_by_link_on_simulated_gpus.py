"""Law: a row of the account has the bytes of the buffers that a rank gave to NCCL in the step, the same in each step alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import at_least_two, gather
from internals import _engine, row_of
from models import Mlp
from peer import PEER, batch
from simulated_gpus import SimulatedGpus, run, sw

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")


@at_least_two
def test_bytes_that_went_to_nccl(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, counted)


def counted(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    module = gpus.adopt_module(Mlp())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    wrapped, optimizer = sw.wrap(module, optimizer, timeout_s=20, zero=0)
    found = []
    for step in range(4):
        wrapped(batch(rank, 6, 7, step=step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        row = _engine.account_row()
        assert row is not None
        found.append(row_of(row).link_bytes)
    gradients = sum(p.numel() * p.element_size() for p in module.parameters())
    _, tcp, nccl = found[-1]
    assert tcp == 0 and gradients <= nccl <= 3 * gradients + 4096, (found, gradients)
    assert found[1][2] == found[2][2] == nccl and gather(nccl) == [nccl] * world_size
