"""Law: SyncBatchNorm over ranks is BatchNorm over their joined batches: outputs, gradients and running statistics to
rounding, and statistics that are equal on all ranks, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import shardwright as sw
import torch
from harness import gather, on_every_rank, same_everywhere
from peer import PEER, batch

pytestmark = pytest.mark.skipif(PEER == "torch", reason="torch refuses CPU tensors")

#: rows of each rank's batch, uneven; one rank has none
ROWS = (5, 2, 0, 3, 7)


def build(momentum: float | None = 0.1, affine: bool = True) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(2, 3, 1), torch.nn.BatchNorm2d(3, momentum=momentum, affine=affine), torch.nn.Tanh()
    ).double()


def together(module: torch.nn.Module, rank: int, world_size: int, step: int) -> torch.Tensor:
    """Run the same forward over all ranks' batches at once and return this rank's part of the output."""
    parts = [batch(r, ROWS[r % 5], 2, 3, 3, step=step, dtype=torch.float64) for r in range(world_size)]
    return module(torch.cat(parts)).split([len(part) for part in parts])[rank]


@pytest.mark.parametrize("options", [{}, {"momentum": None}, {"affine": False}], ids=str)
@on_every_rank()
def test_it_is_batch_norm_over_the_joined_batches(rank: int, world_size: int, options: dict[str, Any]) -> None:
    single = build(**options)
    synced = sw.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(single))
    assert isinstance(synced[1], sw.SyncBatchNorm) and isinstance(synced[1], torch.nn.SyncBatchNorm)
    for step in range(3):
        x = batch(rank, ROWS[rank % 5], 2, 3, 3, step=step, dtype=torch.float64)
        ours, whole = synced(x), together(single, rank, world_size, step)
        torch.testing.assert_close(ours, whole)
        for ours_buffer, whole_buffer in zip(synced.buffers(), single.buffers()):
            torch.testing.assert_close(ours_buffer, whole_buffer)
    assert same_everywhere([*synced.buffers()])


@on_every_rank()
def test_gradients_are_those_of_the_joined_batches(rank: int, world_size: int) -> None:
    single = build()
    synced = sw.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(single))
    x = batch(rank, ROWS[rank % 5], 2, 3, 3, dtype=torch.float64).requires_grad_()
    ((1 + rank) * synced(x)).square().sum().backward()
    parts = [batch(r, ROWS[r % 5], 2, 3, 3, dtype=torch.float64).requires_grad_() for r in range(world_size)]
    outputs = single(torch.cat(parts)).split([len(part) for part in parts])
    sum(((1 + r) * output).square().sum() for r, output in enumerate(outputs)).backward()
    torch.testing.assert_close(x.grad, parts[rank].grad)
    for ours, whole in zip(synced.parameters(), single.parameters()):
        total = sum(gather(ours.grad))
        torch.testing.assert_close(total, whole.grad)


@on_every_rank()
def test_evaluation_and_copies_are_torchs(rank: int, world_size: int) -> None:
    single = build()
    synced = sw.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(single)).eval()
    x = batch(rank, 4, 2, 3, 3, dtype=torch.float64)
    if rank == 0:  # one rank alone must not wait
        assert torch.equal(synced(x), single.eval()(x))
    assert synced.state_dict().keys() == single.state_dict().keys()
    with pytest.raises(ValueError, match="3 channels"):
        synced[1](x)


@on_every_rank()
def test_it_trains_wrapped(rank: int, world_size: int) -> None:
    synced = sw.SyncBatchNorm.convert_sync_batchnorm(build().float())
    model, optimizer = sw.wrap(synced, torch.optim.SGD(synced.parameters(), lr=0.1))
    for step in range(3):
        model(batch(rank, 3, 2, 3, 3, step=step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert same_everywhere([*(*synced.parameters(), *synced.buffers())])
