"""Law: on a mesh (replicate, shard) whose rows are nodes, NCCL reduces in the row and then in the column. A rank sends
n / S of n bytes to other nodes at every stage, and every stage has the same losses and parameters, bit for bit. The
fold of `deterministic=True` sends more. Memory is registered on all ranks of an operation or on none.
"""

from __future__ import annotations

import contextlib
from typing import Any

import internals
import pytest
import torch
from models import Mlp
from oracle.fold import bits_equal
from peer import PEER, batch
from simulated_gpus import SimulatedGpus, run, sw
from torch.distributed.device_mesh import DeviceMesh

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")

ROWS = [[0, 1], [2, 3]]
#: use bytes and tags of a step, through a ring
BESIDE = 128


def trained(
    gpus: SimulatedGpus, rank: int, steps: int = 2, joins: bool = False, **options: Any
) -> tuple[list[torch.Tensor], float, float]:
    """Return losses and parameters, the bytes that a step sends to the other node, and the bytes of all buckets."""
    torch.manual_seed(0)
    mesh = DeviceMesh("cpu", torch.tensor(ROWS), mesh_dim_names=("replicate", "shard"))
    module = gpus.adopt_module(Mlp())
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    model, optimizer = sw.wrap(module, optimizer, bucket_cap_mb=0.001, device_mesh=mesh, **options)
    losses, sent = [], 0.0
    with model.join() if joins else contextlib.nullcontext():
        for step in range(steps):
            gpus.synchronize()
            before = gpus.sent_across()
            loss = model(batch(rank, 6, 7, step=step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            gpus.synchronize()
            sent = gpus.sent_across() - before
            losses.append(loss.detach())
    reducer = internals.reducer(model)
    size = sum(4 * reducer.bucket_shape(bucket)[1] for bucket in range(reducer.bucket_count))
    return [*losses, *(value.clone() for value in sw.full_state_dict(model).values())], sent, size


def test_every_stage_reduces_alike(teams: Any, paths: dict[str, str]) -> None:
    run(teams, 4, paths, by_rows)


def by_rows(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    gpus.set_node(rank // len(ROWS[0]))
    expected: list[torch.Tensor] = []
    for options in ({"zero": 0}, {"zero": 1}, {"zero": 2}, {"zero": 3}):
        found, sent, size = trained(gpus, rank, **options)
        assert sent <= size / 2 + BESIDE, (options, sent, size)
        expected = expected or found
        assert all(bits_equal(a, b) for a, b in zip(found, expected, strict=True)), options
    _, sent, size = trained(gpus, rank, zero=2, deterministic=True)
    assert sent >= 3 * size / 4, (sent, size)


def test_ranks_that_run_out(teams: Any, paths: dict[str, str]) -> None:
    """These ranks contribute nothing; zero=2 uses the fold."""
    run(teams, 4, paths, running_out)


def running_out(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    whole, sliced = (trained(gpus, rank, 1 + (rank != 3), True, zero=zero)[0] for zero in (0, 2))
    for mine, theirs in zip(sliced, whole, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_sums_that_stay_in_rows_cross_no_node(teams: Any, paths: dict[str, str]) -> None:
    run(teams, 4, paths, staying_in_rows)


def staying_in_rows(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    gpus.set_node(rank // len(ROWS[0]))
    mesh = DeviceMesh("cpu", torch.tensor(ROWS), mesh_dim_names=("replicate", "shard"))

    def made(**options: Any) -> Any:
        torch.manual_seed(0)
        module = gpus.adopt_module(Mlp())
        for each in module:
            if isinstance(each, torch.nn.Linear):
                sw.fully_shard(each, mesh=mesh, **options)
        return sw.fully_shard(module, mesh=mesh, **options)

    def trained(model: Any, steps: int = 2) -> tuple[list[torch.Tensor], list[float]]:
        optimizer, sent = torch.optim.AdamW(model.parameters(), lr=0.1), []
        for step in range(steps):
            for number in range(3):
                model.set_requires_all_reduce(number == 2)
                loss = model(batch(rank, 6, 7, step=3 * step + number)).square().mean()
                gpus.synchronize()
                before = gpus.sent_across()
                loss.backward()
                gpus.synchronize()
                sent.append(gpus.sent_across() - before)
                if number < 2 and not deterministic:
                    assert all(p.grad is None for p in model.parameters())
            if step < steps - 1:
                optimizer.step()
                optimizer.zero_grad()
        return [p.grad.to_local().clone() for p in model.parameters()], sent

    for deterministic in (False, True):
        model, once = made(deterministic=deterministic), made(deterministic=deterministic)
        found, sent = trained(model)
        stats = sw.stats(model)["models"][0]
        if deterministic:  # the fold averages each time, and the means add up
            assert stats["row_rounds"] == 0
        else:
            size = stats["bytes"] / 6  # of each of the six rounds
            assert max(sent[0], sent[1], sent[3], sent[4]) <= BESIDE and sent[5] <= size / 2 + BESIDE, sent
            assert sent[5] >= size / 4 and stats["row_rounds"] == 4 and stats["row_bytes"] == 4 * size, (sent, stats)
        optimizer = torch.optim.AdamW(once.parameters(), lr=0.1)
        for step in range(2):
            for number in range(3):
                once.set_requires_gradient_sync(number == 2)
                once(batch(rank, 6, 7, step=3 * step + number)).square().mean().backward()
            if step == 0:
                optimizer.step()
                optimizer.zero_grad()
        for mine, other in zip(found, once.parameters(), strict=True):
            torch.testing.assert_close(mine, other.grad.to_local(), rtol=1e-4, atol=1e-5)
