"""Law: at zero=3 on GPUs a rank that leaves a parameter of a unit unused sends this unit's mean once the unit's backward is
over. So no rank's GPU waits for it until the end of the backward, and no gather waits behind it. The bits are those of
stage 0.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import LONG, at_least_two, gather
from internals import reducer
from oracle.fold import bits_equal
from peer import PEER, batch
from simulated_gpus import POLICIES, SimulatedGpus, run, sw
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
WIDTH, BLOCKS, STEPS = 8, 3, 4


class Optional(nn.Module):
    """A block with a second branch, which some ranks do not take."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.takes = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.tanh(self.always(x))
        return found + torch.tanh(self.sometimes(x)) if self.takes else found


class Net(nn.Module):
    """Blocks, then one of two heads. `beside`: a layer that is registered behind them and runs before, or the layer's weight."""

    def __init__(self, beside: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Optional() for _ in range(BLOCKS))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.last = nn.Linear(WIDTH, WIDTH, bias=False) if beside else None
        self.beside, self.head = beside, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.last is not None:
            x = self.last(x) if self.beside == "layer" else nn.functional.linear(x, self.last.weight)
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.heads[self.head](x)  # type: ignore[no-any-return]


def skips(step: int, rank: int, block: int) -> bool:
    """Return True if a rank does not take the second branch: of all blocks, of the last, or of another one on each rank."""
    return step > 0 and ((rank == 0, rank == 0 and block == BLOCKS - 1, block == rank)[step % 3])


def train(
    gpus: SimulatedGpus, rank: int, beside: str, accumulates: bool = False, **options: Any
) -> tuple[Any, list[torch.Tensor]]:
    torch.manual_seed(0)
    module = gpus.adopt_module(Net(beside))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    wrapped, optimizer = sw.wrap(module, optimizer, deterministic=True, timeout_s=20, **options)
    for step in range(STEPS):
        module.head = (step + rank) % 2
        for number, block in enumerate(module.blocks):
            block.takes = not skips(step, rank, number)
        wrapped(batch(rank, 6, WIDTH, step=step)).square().mean().backward()
        if accumulates and step % 2 == 0:
            continue
        optimizer.step()
        optimizer.zero_grad()
    with sw.full_parameters(wrapped):
        return wrapped, [p.detach().clone() for p in module.parameters()]


CASES = [(0, ""), (1, ""), (0, "layer"), (0, "its weight")]


@at_least_two
@pytest.mark.parametrize("policy", POLICIES if LONG else ("on demand", "late"))
def test_a_rank_that_leaves_parameters_unused(teams: Any, world_size: int, paths: dict[str, str], policy: str) -> None:
    run(teams, world_size, paths, unused, policy=policy)


def unused(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    for prefetch, beside in CASES:
        for accumulates in (False, True):
            expected = train(gpus, rank, beside, accumulates, zero=0)[1]
            wrapped, found = train(gpus, rank, beside, accumulates, zero=3, prefetch=prefetch, units=Optional)
            assert all(map(bits_equal, expected, found)), (prefetch, beside, accumulates)
            # the heads', and those of units, but of the first one if this rank leaves a part of it unused
            early = sum(BLOCKS + 1 - skips(step, rank, 0) for step in range(STEPS))
            counts = reducer(wrapped).stats()
            assert counts["buckets_early"] == (0 if beside else early), (counts["buckets_early"], early, beside)
            del wrapped
    gather(None)


class Attention(nn.Module):
    """A block, an attention of the outermost unit, a block. Only `out_proj` of the attention is trained, as in fine-tuning."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Optional() for _ in range(2))
        self.attention = nn.MultiheadAttention(WIDTH, 2, bias=False)
        self.attention.in_proj_weight.requires_grad_(False)
        self.attends = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        x = self.attention(x, x, x)[0] if self.attends else x
        return self.blocks[1](x)  # type: ignore[no-any-return]


def attend(gpus: SimulatedGpus, rank: int, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    module = gpus.adopt_module(Attention())
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    wrapped, optimizer = sw.wrap(module, optimizer, deterministic=True, timeout_s=20, **options)
    for step in range(STEPS):
        module.attends = step > 0  # so the first round learns nothing of it
        wrapped(batch(rank, 6, WIDTH, step=step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with sw.full_parameters(wrapped):
        return [p.detach().clone() for p in module.parameters()]


@at_least_two
def test_an_attention_uses_out_proj_without_calling_it(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, attention)


def attention(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    expected, found = attend(gpus, rank, zero=0), attend(gpus, rank, zero=3, units=Optional)
    assert all(map(bits_equal, expected, found))
    gather(None)
