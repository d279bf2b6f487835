"""Checks of bits and versions, which run before speeds are measured."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import shardwright as sw
import torch
import torch.distributed as dist
from shardwright import _engine, _engine_check
from shardwright.backend.transport import NCCL_SHARES, VARIABLE
from shardwright.layout.memory import bytes_of
from torch import nn

from ..doctor import gpu as doctor_gpu
from .report import Row, row

STEPS = 3
_SHAPES = ((40, 24), (17, 30), (33, 16), (9,))
#: cases of each kernel; the last number is for sanitizers, under which a launch takes some hundred times longer
_CASES, _CASES_QUICK, _CASES_SANITIZED = 400, 4, 6


def warm(place: Any, rank: int, world_size: int) -> Iterator[Row]:
    """Start torch and this GPU's kernels once, so that no other run pays for cold files or for a compiler."""
    place.synchronize()
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    yield row("torch", value=age, unit="s", note="from the start of the process to an idle GPU")
    begun = time.perf_counter()
    about = place.open().describe()
    yield row("kernels' image", value=time.perf_counter() - begun, unit="s", note=str(about["kernels"]))


def machine(place: Any, rank: int, world_size: int) -> Iterator[Row]:
    """Report versions, the card, NCCL, the kernels' image and the findings of `shardwright doctor`."""
    versions = f"shardwright {sw.__version__}, torch {torch.__version__}, CUDA {torch.version.cuda}"
    yield row("versions", note=f"{versions}, Python {platform.python_version()}")
    driver = _engine.cuda_devices(getattr(place, "libcuda", None))
    for each in driver["devices"][:1]:
        major, minor = each["capability"]
        text = f"{each['name']}, sm_{major}{minor}, {each['multiprocessors']} multiprocessors"
        yield row("GPU", value=len(driver["devices"]), unit="GPUs", note=f"{text}, driver {driver['version']}")
    about = place.open().describe()
    missing = about["nccl_missing"]
    version = ".".join(map(str, about["nccl"])) if not missing else missing
    yield row("NCCL", "failed" if missing else "ok", note=version)
    yield row("kernels", note=str(about["kernels"]))
    found = doctor_gpu.findings()
    harmful = [each for each in found if each.verdict in ("bad", "slow")]
    note = "; ".join(f"{each.name} {each.value}: {each.fix}" for each in harmful)
    yield row("doctor", "slow" if harmful else "ok", len(harmful), "findings", note=note)


def kernels(place: Any, rank: int, world_size: int, *, is_quick: bool) -> Iterator[Row]:
    """Compare each kernel with its reference, on cases spread evenly through its table, with three grids each."""
    comm = place.open()
    for name, count in _engine_check.device_kernel_cases().items():
        step = max(1, count // (_CASES_QUICK if is_quick else _CASES)) | 1  # odd, so that every size occurs
        yield _compared(name, _engine_check.device_kernel_check(comm, name, 1, step))


def sanitized(place: Any, rank: int, world_size: int, *, tool: str, is_quick: bool) -> Iterator[Row]:
    """Run a few cases of every kernel, each on memory with only the bytes that it may touch, under a sanitizer."""
    comm, launches = place.open(), 0
    for name, count in _engine_check.device_kernel_cases().items():
        step = max(1, count if is_quick else count // _CASES_SANITIZED) | 1
        found = _engine_check.device_kernel_check(comm, name, 1, step, True)
        launches += found["launches"]
        if found["differences"]:
            yield _compared(tool, found)
            return
    yield row(tool, value=launches, unit="launches")


def _compared(case: str, found: dict[str, Any]) -> Row:
    wrong, launches = found["differences"], found["launches"]
    note = "; ".join(found["sentences"][:2])
    return row(case, "wrong" if wrong or not launches else "ok", launches, "launches", note=note)


class Product(nn.Module):
    """A module with one weight, whose gradient is its input."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(len(shape))
        self.weight = nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu"))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return (self.weight * given).sum()


class Given(nn.Module):
    """A module with its inputs as gradients, so that no device library computes them; `used` parts are in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Product(*shape) for shape in _SHAPES)

    def forward(self, given: list[torch.Tensor], used: int = len(_SHAPES)) -> torch.Tensor:
        return torch.stack([part(each) for part, each in list(zip(self.parts, given))[:used]]).sum()


def gradients(rank: int, step: int, device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    made = (torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") for shape in _SHAPES)
    return [each.to(device) for each in made]


def wrapped(module: nn.Module, **options: Any) -> tuple[Any, Any]:
    return sw.wrap(module, sw.optim.AdamW(module.parameters(), lr=0.01), deterministic=True, **options)


def train(model: Any, optimizer: Any, rank: int, device: torch.device, steps: range) -> None:
    for step in steps:
        model(gradients(rank, step, device)).backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model: Any, optimizer: Any) -> list[torch.Tensor]:
    """Return whole parameters and optimizer state, on the CPU."""
    return list(tensors_of([sw.full_state_dict(model), sw.full_optimizer_state_dict(model, optimizer)]))


def _trained(module: nn.Module, rank: int, device: torch.device, **options: Any) -> list[torch.Tensor]:
    """Return whole() after some clipped steps."""
    model, optimizer = wrapped(module, bucket_cap_mb=0.002, clip_grad_norm=1.0, **options)
    train(model, optimizer, rank, device, range(STEPS))
    return whole(model, optimizer)


def tensors_of(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state.detach().cpu().clone()
    elif isinstance(state, dict):
        for key in sorted(state, key=str):
            yield from tensors_of(state[key])
    elif isinstance(state, (list, tuple)):
        for each in state:
            yield from tensors_of(each)


def stages(place: Any, rank: int, world_size: int, *, label: str = "") -> Iterator[Row]:
    """Compare each stage's bits with CPU training by the same ranks. Sums the ranks' counts of differing tensors."""
    cpu = torch.device("cpu")
    with place.aside():
        expected = _trained(Given(), rank, cpu)
    for zero in (0, 1, 2, 3):
        found = _trained(place.put(Given()), rank, place.device, zero=zero)
        with place.aside():
            pairs = zip(found, expected, strict=True)
            differ = sum(a.shape != b.shape or bytes_of(a) != bytes_of(b) for a, b in pairs)
            wrong = torch.tensor([differ], dtype=torch.int64, device="cpu")
            dist.all_reduce(wrong)
            count = int(wrong)
        note = f"{len(expected)} tensors after {STEPS} steps, clipped"
        yield row(f"{label}zero={zero}", "wrong" if count else "ok", count, "tensors differ", note=note)


def shared(place: Any, rank: int, world_size: int, *, label: str) -> Iterator[Row]:
    """Run the stages on ranks that share a card. An NCCL that is too old for that is no failure of ours."""
    nccl = tuple(place.open().describe()["nccl"])
    if os.environ.get(VARIABLE) != "nccl" or not place.shares_card or nccl >= NCCL_SHARES:
        yield from stages(place, rank, world_size, label=label)
        return
    note = f"NCCL {'.'.join(map(str, nccl))} takes one rank per GPU; 2.30 and newer take several"
    for zero in (0, 1, 2, 3):
        yield row(f"{label}zero={zero}", "skipped", note=note)
