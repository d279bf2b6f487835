"""Law: a module on a GPU trains as the naive loop over the same GPUs does. With deterministic=True `.grad` has the bits of the
fold in rank order of what the ranks' own backwards gave, and no step in which every parameter was used waits on the host.

One rank a GPU, on one GPU and on all that there are; and several ranks on one GPU, through slots in memory of the host or of the
GPU. What else a GPU promises is in tests/ranks/gpu_promises.py. Skipped, with the reason, elsewhere; there the same bodies run on the CPU, and those
promises on simulated GPUs too, so that what is skipped is known to be sound.
"""

from __future__ import annotations

import copy
import gc
import os
from pathlib import Path
from typing import Any

import pytest
import shardwright as sw
import torch
import torch.distributed as dist
from gpu_promises import OF_GPUS_OF_THEIR_OWN, PROMISES, WITHOUT_SET_DEVICE, Place
from harness import gather, run_programs
from models import Heads, Mlp
from oracle.fold import bits_equal, fold
from peer import batch
from shardwright import _engine
from shardwright.backend.transport import VARIABLE

#: the first test on a machine has the kernels compiled, and all make contexts and communicators
LIMIT_S = 300
pytestmark = pytest.mark.timeout(2 * LIMIT_S)


def gpu_count() -> int:
    """GPUs that torch and the engine both see; skips where there is none."""
    try:
        count = len(_engine.cuda_devices()["devices"])
    except NotImplementedError as error:
        pytest.skip(str(error))
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    return min(count, torch.cuda.device_count())


def run(body: Any, folder: Path, world_size: int, device: str, **arguments: Any) -> None:
    outputs, statuses = run_programs(world_size, body, str(folder), limit_s=LIMIT_S, device=device, **arguments)
    assert statuses == [0] * world_size, "\n".join(outputs)


@pytest.fixture(params=["one", "all"])
def gpus(request: Any) -> int:
    """How many GPUs to use."""
    count = gpu_count()
    if request.param == "all" and count == 1:
        pytest.skip("one GPU alone")
    return 1 if request.param == "one" else count


def test_an_mlp_on_gpus(gpus: int, tmp_path: Path) -> None:
    run(train, tmp_path, gpus, "cuda")


def test_unused_parameters_on_gpus(gpus: int, tmp_path: Path) -> None:
    run(leave_out, tmp_path, gpus, "cuda")


def test_clipping_on_gpus(gpus: int, tmp_path: Path) -> None:
    run(clip, tmp_path, gpus, "cuda")


def test_compressed_gradients_on_gpus(gpus: int, tmp_path: Path) -> None:
    run(compress, tmp_path, gpus, "cuda")


@pytest.mark.parametrize("name", PROMISES)
def test_a_promise_on_gpus(gpus: int, tmp_path: Path, name: str) -> None:
    run(keep, tmp_path, gpus, "cuda", names=[name])


@pytest.mark.parametrize("way", ["shm", "ipc"])
@pytest.mark.parametrize("name", [name for name in PROMISES if name not in OF_GPUS_OF_THEIR_OWN])
def test_a_promise_of_ranks_that_share_a_gpu(tmp_path: Path, monkeypatch: Any, name: str, way: str) -> None:
    gpu_count()
    monkeypatch.setenv(VARIABLE, way)
    run(keep, tmp_path, 2, "shared", names=[name])


@pytest.mark.parametrize(("way", "ranks"), [("auto", 2), ("shm", 2), ("shm", 3), ("ipc", 2), ("ipc", 3)])
def test_several_ranks_on_one_gpu(tmp_path: Path, monkeypatch: Any, way: str, ranks: int) -> None:
    gpu_count()
    monkeypatch.setenv(VARIABLE, way)
    run(shared_gpu, tmp_path, ranks, "shared", way=way)


def test_the_same_on_the_cpu(tmp_path: Path) -> None:
    """In one start of the programs: importing torch takes longer."""
    run(everything, tmp_path, 2, "cpu", names=list(PROMISES))


# what each rank does ------------------------------------------------------------------------------------------------


def place(rank: int, device: str) -> torch.device:
    if device == "shared":
        torch.cuda.set_device(0)
        return torch.device("cuda", 0)
    if device == "cuda":
        torch.cuda.set_device(rank)
        return torch.device("cuda", rank)
    return torch.device("cpu")


def pair(build: Any, where: torch.device, **options: Any) -> tuple[Any, torch.nn.Module]:
    torch.manual_seed(0)
    module = build().to(where)
    other = copy.deepcopy(module)
    ids = {"device_ids": [where.index]} if where.type == "cuda" else {}
    return sw.DistributedDataParallel(module, deterministic=True, **ids, **options), other


def compare(wrapped: Any, other: torch.nn.Module, backward: Any) -> None:
    """One backward of both; the other's gradients become the fold over the ranks."""
    backward(wrapped)
    backward(other)
    everyone = gather({name: p.grad if p.grad is None else p.grad.cpu() for name, p in other.named_parameters()})
    for (name, ours), theirs in zip(wrapped.module.named_parameters(), other.parameters()):
        if any(each[name] is not None for each in everyone):
            zeros = torch.zeros_like(theirs).cpu()
            theirs.grad = fold([zeros if each[name] is None else each[name] for each in everyone], "mean").to(
                theirs.device
            )
        assert (ours.grad is None) == (theirs.grad is None), name
        assert ours.grad is None or bits_equal(ours.grad.cpu(), theirs.grad.cpu()), name


def step(optimizers: Any, wrapped: Any, other: torch.nn.Module) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    for ours, theirs in zip(wrapped.module.parameters(), other.parameters()):
        assert bits_equal(ours.detach().cpu(), theirs.detach().cpu())


def host_waits(wrapped: Any) -> int:
    waits: int = wrapped._engine.replica.reducer.stats().get("host_waits", 0)
    return waits


def train(rank: int, world_size: int, device: str) -> None:
    where = place(rank, device)
    wrapped, other = pair(Mlp, where, bucket_cap_mb=0.001)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (wrapped.module, other)]
    for number in range(4):
        x = batch(rank, 6, 7, step=number).to(where)
        compare(wrapped, other, lambda model, x=x: model(x).square().mean().backward())
        step(optimizers, wrapped, other)
    assert host_waits(wrapped) == 0


def leave_out(rank: int, world_size: int, device: str) -> None:
    where = place(rank, device)
    wrapped, other = pair(Heads, where)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (wrapped.module, other)]
    for number, heads in enumerate(["left right", "left" if rank == 0 else "left right", "left", "left right"]):
        x = batch(rank, 6, 7, step=number).to(where)
        compare(wrapped, other, lambda model, x=x, heads=heads: model(x, heads).backward())
        step(optimizers, wrapped, other)
    assert host_waits(wrapped) <= 2


def clip(rank: int, world_size: int, device: str) -> None:
    where = place(rank, device)
    wrapped, other = pair(Mlp, where)
    for number in range(2):
        x = batch(rank, 6, 7, step=number).to(where)
        compare(wrapped, other, lambda model, x=x: model(x).square().mean().backward())
        norm = sw.clip_grad_norm_(wrapped, 0.05)
        on_cpu = [p.grad.cpu() for p in other.parameters()]
        assert float(norm) == float(torch.tensor(_engine.norm_value([_engine.norm_sum(on_cpu)]), dtype=torch.float32))
        wrapped.zero_grad()
        other.zero_grad()


class Given(torch.nn.Module):
    """Whose gradients are what it is called with, on whatever device: nothing of them is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.zeros(shape) for shape in ((40, 24), (17, 300), (64, 64), (9,)))

    def forward(self, given: list[torch.Tensor]) -> torch.Tensor:
        return sum(((weight * each).sum() for weight, each in zip(self.weights, given)), given[0].new_zeros(()))


def compress(rank: int, world_size: int, device: str) -> None:
    """The bits that the same ranks' CPUs have, through the same compressor."""
    where = place(rank, device)
    compressors = [
        sw.Bf16(),
        sw.Int8(error_feedback=True),
        sw.Int4(),
        sw.PowerSGD(4),
    ]
    for zero in (0, 2):
        for compressor in compressors:
            modules = [Given().to(where), Given()]
            wrapped = [sw.wrap(module, compress=compressor, zero=zero) for module in modules]
            waits = host_waits(wrapped[0])
            for number in range(4):
                for model in wrapped:
                    to = next(model.parameters()).device
                    given = [batch(rank, *w.shape, step=number).to(to) for w in modules[1].weights]
                    model.zero_grad()
                    model(given).backward()
                found = [sw.full_gradients(model) for model in wrapped]
                for name, gradient in found[1].items():
                    assert bits_equal(found[0][name].cpu(), gradient), (zero, compressor, number, name)
            assert host_waits(wrapped[0]) == waits


def shared_gpu(rank: int, world_size: int, device: str, way: str) -> None:
    wrapped, _ = pair(Mlp, place(rank, device))
    used = wrapped._engine.replica.reducer.transport
    allowed = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    assert used == way or (way == "auto" and (used in ("shm", "ipc") or (allowed and used == "nccl"))), used
    everything(rank, world_size, device)


def keep(rank: int, world_size: int, device: str, names: list[str]) -> None:
    for name in names:
        if name not in WITHOUT_SET_DEVICE:
            place(rank, device)
        PROMISES[name](Place(device, rank), rank, world_size)
    gather(None)
    gc.collect()
    dist.destroy_process_group()  # gloo's threads, which may hold a hook's function, end before Python does


def everything(rank: int, world_size: int, device: str, names: list[str]) -> None:
    for body in (train, leave_out, clip, compress):
        body(rank, world_size, device)
    keep(rank, world_size, device, names)
