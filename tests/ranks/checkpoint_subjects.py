"""Subjects of the checkpoint tests: models with every kind of tensor, and bitwise comparison of states."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from typing import Any

import torch
from oracle.fold import bits_equal
from peer import batch
from torch import nn


class EveryKind(nn.Module):
    """A model of several dtypes and layouts, with tied and empty tensors and every sort of buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(37, 53)
        self.tied = nn.Linear(37, 53, bias=False)
        self.tied.weight = self.first.weight
        self.sixteen = nn.Parameter(torch.randn(11, 7).to(torch.float16))
        self.brain = nn.Parameter(torch.randn(3, 5, 7).to(torch.bfloat16))
        self.wide = nn.Parameter(torch.randn(13, dtype=torch.float64))
        self.turned = nn.Parameter(torch.randn(19, 23).t())
        self.wave = nn.Parameter(torch.randn(5, 6, dtype=torch.complex64))
        self.turned_wave = nn.Parameter(torch.randn(4, 9, dtype=torch.complex128).t())
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.norm = nn.BatchNorm1d(53)
        self.frozen = nn.Parameter(torch.randn(300, 1000), requires_grad=False)
        self.big = nn.Parameter(torch.randn(700, 900))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("bytes", torch.arange(5, dtype=torch.uint8))
        self.register_buffer("counts", torch.arange(-3, 4, dtype=torch.int16))
        self.register_buffer("scratch", torch.randn(9), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(x)) + self.tied(x)
        total = hidden.square().mean() + self.sixteen.float().square().sum() + self.brain.float().square().sum()
        total = total + self.wide.square().sum().float() + self.turned.square().sum() + self.scalar**2
        total = total + self.wave.abs().square().sum() + self.turned_wave.abs().square().sum().float()
        return total + self.conv(x.reshape(-1)[: 3 * 25].reshape(1, 3, 5, 5)).square().mean() + self.big.square().mean()


class Small(nn.Module):
    """A model with dropout, whose loss therefore depends on the generators."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(24, 96), nn.GELU(), nn.Dropout(0.3), nn.Linear(96, 24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layers(x) - x).square().mean()


def build(kind: type[nn.Module] = EveryKind, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = kind()
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, width: int = 37) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        model(torch.randn(6, width, generator=generator)).backward()
        optimizer.step()
        optimizer.zero_grad()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    """Return every tensor of model and optimizer by name."""
    found = {f"model.{name}": value.detach().clone() for name, value in model.state_dict().items()}
    if optimizer is not None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for number, parameter in enumerate(parameters):
            for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                found[f"state.{number}.{key}"] = torch.as_tensor(value).detach().clone()
    return found


def assert_same_state(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert list(ours) == list(theirs)
    for name, value in ours.items():
        assert value.dtype == theirs[name].dtype and value.shape == theirs[name].shape, name
        left, right = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in (value, theirs[name]))
        assert bits_equal(left.contiguous(), right.contiguous()), name


def digest_of(folder: str, prefixes: tuple[str, ...] = ("model", "optimizer")) -> dict[str, str]:
    """Return file -> SHA-256 of its bytes."""
    return {
        name: hashlib.sha256(open(os.path.join(folder, name), "rb").read()).hexdigest()
        for name in sorted(os.listdir(folder))
        if name.startswith(prefixes)
    }


def files_of(folder: str) -> list[str]:
    return sorted(
        os.path.relpath(os.path.join(place, name), folder) for place, _, names in os.walk(folder) for name in names
    )


def train_steps(
    rank: int, model: Any, optimizer: Any, begin: int, end: int, after: Callable[[int], object] = lambda step: None
) -> list[float]:
    """Train steps [begin, end), whose inputs and random numbers depend on rank and step only. Return the losses.

    after(step) is called after each.
    """
    losses = []
    for step in range(begin, end):
        torch.manual_seed(1000 * step + rank)
        loss = model(batch(rank, 5, 24, step=step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        after(step)
    return losses
