"""Small modules for rank tests. Sizes are odd, so that slices and tails never coincide."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Mlp(nn.Sequential):
    """Layers 7 → 33 → 19 → 5: 1,014 parameters, and several buckets under a cap of 1 kB."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 19), nn.Tanh(), nn.Linear(19, 5))


class Layers(nn.Sequential):
    """Matrices of one shape."""

    def __init__(self, count: int) -> None:
        super().__init__(*(nn.Linear(8, 8, bias=False) for _ in range(count)))


class Heads(nn.Module):
    """A body and two heads. A forward uses the requested heads."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(7, 11)
        self.left = nn.Linear(11, 3)
        self.right = nn.Linear(11, 3)

    def forward(self, x: torch.Tensor, heads: str) -> torch.Tensor:
        hidden = torch.tanh(self.body(x))
        total = hidden.sum() * 0.5
        if "left" in heads:
            total = total + self.left(hidden).square().sum()
        if "right" in heads:
            total = total + self.right(hidden).square().sum()
        return total


class Raises(torch.autograd.Function):
    """Identity whose backward raises on request."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fail: bool) -> torch.Tensor:
        ctx.fail = fail
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.fail:
            raise ArithmeticError("as the test asked")
        return gradient, None


class Fragile(nn.Module):
    """Two layers with a Raises between them, so the upper layer's gradients exist when the backward fails."""

    def __init__(self) -> None:
        super().__init__()
        self.lower = nn.Linear(7, 33)
        self.upper = nn.Linear(33, 5)

    def forward(self, x: torch.Tensor, fail: bool = False) -> torch.Tensor:
        return self.upper(Raises.apply(torch.tanh(self.lower(x)), fail))
