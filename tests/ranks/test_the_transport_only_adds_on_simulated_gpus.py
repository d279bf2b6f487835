"""Law: NCCL computes sums, never its own mean, of contributions that the copy into the bucket has divided. If division
is exact (a world size that is a power of two, no float16 subnormal) the means of two ranks have the bits of the fold in
rank order. The sum of a slice lands in the slice itself. A single rank reduces nothing.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import LONG, in_turn
from oracle.fold import bits_equal
from peer import PEER
from simulated_gpus import SimulatedGpus, run, stats, sw
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")

COUNT, WIDTH = 70, 8  # parameters: more than a PACK takes


class Model(nn.Module):
    def __init__(self, lower: torch.dtype = torch.float16) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(5)
        self.weights = nn.ParameterList(torch.randn(WIDTH, generator=draw) for _ in range(COUNT))
        self.low = nn.Parameter(torch.randn(WIDTH, generator=draw).to(torch.bfloat16))
        self.lower = nn.Parameter(torch.randn(WIDTH, generator=draw).to(lower))
        self.spare = nn.Parameter(torch.randn(WIDTH, generator=draw))

    def forward(self, x: torch.Tensor, spares: bool) -> torch.Tensor:
        x = sum(torch.tanh(x * weight) for weight in self.weights) * self.low.float() * self.lower.float()
        return (x * self.spare if spares else x).square().mean()


def trained(
    gpus: SimulatedGpus, rank: int, lower: torch.dtype = torch.float16, **options: Any
) -> tuple[list[torch.Tensor], int]:
    """Return all gradients and parameters of steps whose gradients are copied, lie in place, or are missing on one
    rank; and the launches of the last step.
    """
    module = gpus.adopt_module(Model(lower))
    model, optimizer = sw.wrap(module, sw.optim.AdamW(module.parameters(), lr=0.01), **options)
    read, launches = [], 0
    for step in range(4 if LONG else 3):
        x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
        before = stats(model)["launches"]
        model(x, spares=step != 2 or rank == 0).backward()
        optimizer.step()
        launches = stats(model)["launches"] - before
        read += [each.clone() for each in sw.full_gradients(model).values() if each is not None]
        optimizer.zero_grad(set_to_none=step != 1)
    return read + list(sw.full_state_dict(model).values()), launches


@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_of_divided_contributions(teams: Any, paths: dict[str, str], ranks: int, zero: int) -> None:
    run(teams, ranks, paths, divided, zero)


def divided(gpus: SimulatedGpus, rank: int, world_size: int, zero: int) -> None:
    averages = gpus.averages()
    lower = torch.bfloat16 if world_size == 2 else torch.float16
    folded, _ = trained(gpus, rank, lower, zero=zero, deterministic=True)
    added, _ = trained(gpus, rank, lower, zero=zero, deterministic=False)
    assert gpus.averages() == averages
    for mine, theirs in zip(added, folded, strict=True):
        if world_size == 2:
            assert bits_equal(mine, theirs)
        else:
            torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)


def test_gradients_that_accumulate(teams: Any, paths: dict[str, str]) -> None:
    """The sum replaces the whole bucket in place; at zero=2 it must not overwrite the mean that stands in the slice."""
    run(teams, 2, paths, accumulated)


def accumulated(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    for zero in (0, 2):
        read = []
        for deterministic in (True, False):
            module = gpus.adopt_module(Model())
            model = sw.wrap(module, zero=zero, deterministic=deterministic)
            for step in range(3 if LONG else 2):
                x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))
                model(x, spares=True).backward()
            read.append([each.clone() for each in sw.full_gradients(model).values() if each is not None])
        for mine, theirs in zip(*read, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=1e-3)


def test_no_kernel_reduces(teams: Any, paths: dict[str, str]) -> None:
    """A step launches PACKs, the use bytes and the optimizer, with slices as without; a single rank has no use bytes."""
    run(teams, 2, paths, without_folds, 1, policy="on demand")
    run(teams, 1, paths, without_folds, 0, policy="on demand")


def without_folds(gpus: SimulatedGpus, rank: int, world_size: int, use: int) -> None:
    for zero in in_turn((0, 1, 2), use):
        _, launches = trained(gpus, rank, zero=zero, deterministic=world_size == 1)
        assert launches <= 4 + use, (zero, launches)
