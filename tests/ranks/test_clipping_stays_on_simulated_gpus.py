"""Law: clipping on a GPU causes no host wait and takes one launch per table of tensors. Whenever the program reads
`.grad` it gets the bits of the CPU's clipped gradient: after the call, in a hook before the step, and after a step
whose kernels applied the factor.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from harness import in_turn
from oracle.fold import bits_equal
from peer import PEER
from simulated_gpus import SimulatedGpus, run, stats, sw
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")

COUNT, WIDTH = 70, 6  # parameters: more than a PACK takes
MAX_NORM = 0.05
ADAMW = {"lr": 0.01, "weight_decay": 0.1}


class Model(nn.Module):
    """A model in which `.odd` has strides that its gradient cannot have, `.low` is rounded, and `.idle` gets no
    gradient.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        self.weights = nn.ParameterList(torch.randn(WIDTH, dtype=dtype, generator=draw) for _ in range(COUNT))
        self.turned = nn.Parameter(torch.randn(WIDTH, 3, dtype=dtype, generator=draw).t())
        self.low = nn.Parameter(torch.randn(WIDTH, generator=draw).to(torch.bfloat16))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = sum(torch.tanh(x * weight) for weight in self.weights)
        return ((x * self.low.to(x.dtype)) @ self.turned.t()).square().mean()


def inputs(rank: int, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype)


class Trained:
    """Return the `.grad` that a program reads at each step, and the final parameters."""

    def __init__(
        self, gpus: SimulatedGpus | None, rank: int, zero: int, optimizer: Any, hook: bool, by_wrap: bool
    ) -> None:
        module = Model() if gpus is None else gpus.adopt_module(Model())
        options = {"clip_grad_norm": MAX_NORM} if by_wrap else {}
        model, stepper = sw.wrap(module, optimizer(module.parameters()), zero=zero, deterministic=True, **options)
        self.read: list[torch.Tensor] = []
        self.waits, self.launches = 0, 0
        if hook:
            stepper.register_step_pre_hook(lambda *_: self.look(model))
        for step in range(2):
            model(inputs(rank, step)).backward()
            before = {} if gpus is None else stats(model)
            if not by_wrap:
                self.read.append(sw.clip_grad_norm_(model, MAX_NORM).cpu())
            stepper.step()
            after = {} if gpus is None else stats(model)
            if gpus is not None and not hook:
                self.waits += after["host_waits"] - before["host_waits"]
                self.launches = after["launches"] - before["launches"]
            self.look(model)
            stepper.zero_grad()
        self.parameters = list(sw.full_state_dict(model).values())

    def look(self, model: Any) -> None:
        self.read += [each.clone() for each in sw.full_gradients(model).values() if each is not None]


def sgd(parameters: Any) -> Any:
    return sw.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters: Any) -> Any:
    return sw.optim.AdamW(parameters, **ADAMW)


def torchs(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, **ADAMW)


@pytest.mark.parametrize("zero", range(4))
def test_what_is_read_has_the_bits_of_the_cpu(teams: Any, paths: dict[str, str], zero: int) -> None:
    run(teams, 3, paths, compared, zero, policy="random")


def compared(gpus: SimulatedGpus, rank: int, world_size: int, zero: int) -> None:
    cases = [(sgd, False, True), (adamw, True, True), (adamw, False, False), (torchs, False, True)]
    for optimizer, hook, by_wrap in in_turn(cases, zero, of=4):
        with gpus.torch_on_cpu():
            expected = Trained(None, rank, zero, optimizer, hook, by_wrap)
        found = Trained(gpus, rank, zero, optimizer, hook, by_wrap)
        what = f"zero={zero}, {optimizer.__name__}, hook={hook}, by wrap={by_wrap}"
        assert found.waits == 0, (what, gpus.devices.waits)
        for mine, theirs in zip(found.read + found.parameters, expected.read + expected.parameters, strict=True):
            assert bits_equal(mine, theirs), what


def test_the_step_multiplies_by_itself(teams: Any, paths: dict[str, str]) -> None:
    """Clipping adds only NORM and CLIP to a step of sw.optim, and PACKs if a whole `.grad` exceeds the slice."""
    run(teams, 2, paths, counted, policy="on demand", transport="nccl")  # slots launch folds of their own


def counted(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    for zero in in_turn(range(4), 1):
        plain = launches_of(gpus, rank, zero, {})
        clipped = launches_of(gpus, rank, zero, {"clip_grad_norm": MAX_NORM})
        assert clipped - plain <= (3, 7, 4, 4)[zero], (
            zero,
            plain,
            clipped,
        )  # of two dtypes; ranks add up what was carried


def launches_of(gpus: SimulatedGpus, rank: int, zero: int, options: dict[str, Any]) -> int:
    module = gpus.adopt_module(Model())
    model, optimizer = sw.wrap(module, adamw(module.parameters()), zero=zero, **options)
    counts = []
    for step in range(2):
        before = stats(model)["launches"]
        model(inputs(rank, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(stats(model)["launches"] - before)
    return counts[-1]


def test_what_the_gpu_cannot_scale_is_scaled_through_the_host(teams: Any, paths: dict[str, str]) -> None:
    run(teams, 2, paths, through_the_host)


def through_the_host(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    """Clip float64 gradients, with error_if_nonfinite, a gradient that two parameters share, and one without dense
    strides.
    """
    for case in ("float64", "finite", "shared", "strided"):
        read = []
        for on_gpu in (False, True):
            module = Model(torch.float64 if case == "float64" else torch.float32)
            if on_gpu:
                gpus.adopt_module(module)
            with contextlib.nullcontext() if on_gpu else gpus.torch_on_cpu():
                model = sw.DistributedDataParallel(module, deterministic=True)
                model(inputs(rank, 0, module.turned.dtype)).backward()
                first, second = module.weights[0], module.weights[1]
                if case == "shared":
                    first.grad = second.grad
                if case == "strided":
                    wide = first.grad.new_zeros(2 * WIDTH)
                    wide[::2] = first.grad
                    first.grad = wide[::2]
                norm = sw.clip_grad_norm_(model, MAX_NORM, error_if_nonfinite=case == "finite")
                read.append([norm.cpu(), *(p.grad.clone() for p in module.parameters() if p.grad is not None)])
                if case == "finite":
                    first.grad.fill_(float("inf"))
                    with pytest.raises(RuntimeError, match="the norm of the gradients is inf"):
                        sw.clip_grad_norm_(model, MAX_NORM, error_if_nonfinite=True)
        for mine, theirs in zip(*read, strict=True):
            assert bits_equal(mine, theirs), case


def test_ranks_that_clip_to_different_norms_are_told(teams: Any, paths: dict[str, str]) -> None:
    run(teams, 3, paths, told)


def told(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    for zero in (1, 2, 3):
        module = gpus.adopt_module(Model())
        model, optimizer = sw.wrap(module, adamw(module.parameters()), zero=zero)
        model(inputs(rank, 0)).backward()
        with pytest.raises(
            sw.Error, match="max_norm must be equal on all ranks; of Model it is 1.0 on rank 0 and 2.0 on rank 2"
        ):
            sw.clip_grad_norm_(model, 2.0 if rank == 2 else 1.0)
        sw.clip_grad_norm_(model, 1.0)
        optimizer.step()
