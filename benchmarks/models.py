"""Models of the benchmarks, with inputs and losses. benchmarks/README.md lists batch and sequence sizes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.append(str(Path(__file__).resolve().parent.parent / "examples"))
from gpt.model import GPT, VOCABULARY  # noqa: E402

MLP_WIDTH, MLP_LAYERS, MLP_CLASSES, MLP_BATCH = 2048, 6, 512, 16
GPT_CONTEXT, GPT_LAYERS, GPT_WIDTH, GPT_HEADS, GPT_BATCH = 64, 6, 384, 6, 2
SMALL_COUNT, SMALL_NUMEL = 400, 16


@dataclass
class Case:
    """A model to train. `model()` is the same on all ranks, `batch(rank)` differs, and `loss(module, batch)` is a
    scalar.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, ...]]
    loss: Callable[[nn.Module, tuple[Tensor, ...]], Tensor]


class SmallParameters(nn.Module):
    """A model of many small parameters and almost no arithmetic, which exposes the cost per parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(SMALL_NUMEL)) for _ in range(SMALL_COUNT))

    def forward(self, x: Tensor) -> Tensor:
        return (torch.cat(list(self.parts)) * x).sum()


def _mlp() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(MLP_LAYERS):
        layers += [nn.Linear(MLP_WIDTH, MLP_WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(MLP_WIDTH, MLP_CLASSES))


def _seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return make()

    return model


def _mlp_batch(rank: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(MLP_BATCH, MLP_WIDTH, generator=generator), torch.randint(
        MLP_CLASSES, (MLP_BATCH,), generator=generator
    )


def _gpt_batch(rank: int) -> tuple[Tensor, ...]:
    tokens = torch.randint(
        VOCABULARY, (GPT_BATCH, GPT_CONTEXT + 1), generator=torch.Generator().manual_seed(100 + rank)
    )
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _small_batch(rank: int) -> tuple[Tensor, ...]:
    return (torch.randn(SMALL_COUNT * SMALL_NUMEL, generator=torch.Generator().manual_seed(100 + rank)),)


def _cross_entropy(module: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(module(inputs).flatten(0, -2), targets.flatten())


CASES = {
    "mlp": Case(_seeded(_mlp), _mlp_batch, _cross_entropy),
    "gpt": Case(
        _seeded(lambda: GPT(context=GPT_CONTEXT, layers=GPT_LAYERS, width=GPT_WIDTH, heads=GPT_HEADS)),
        _gpt_batch,
        _cross_entropy,
    ),
    "gpt-50m": Case(
        _seeded(lambda: GPT(context=GPT_CONTEXT, layers=7, width=768, heads=12)),
        _gpt_batch,
        _cross_entropy,
    ),
    "small": Case(_seeded(SmallParameters), _small_batch, lambda module, batch: module(*batch)),
}
