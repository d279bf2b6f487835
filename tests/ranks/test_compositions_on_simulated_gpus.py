"""Law: tensor parallelism, stages of a pipeline and experts in groups of their own, beside data parallelism on GPUs, have the bits of the
CPU at every stage; nothing races or leaks."""

from __future__ import annotations

import contextlib
from typing import Any

import expert_subjects as experts
import internals
import model_parallel_subjects as tensors
import pytest
import test_experts_train_over_a_group_of_their_own as groups
import test_pipeline_stages_average_once_a_step as stages
import torch
import torch.distributed.pipelining  # seconds: here once, and not on every rank
import torch.distributed.tensor.parallel
from harness import in_turn
from internals import offload as device_offload
from oracle.fold import bits_equal
from peer import PEER
from simulated_gpus import SimulatedGpus, meet, run, sw

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")


KINDS = (
    "of_stages",
    "of_experts",
    "of_idle_experts",
    "of_lean_experts",
    "of_offloaded_tensors",
    "of_saved_tensors",
    "of_tensors",
    "of_home_tensors",
)


class OnGpu:
    """The package, whose wrap() puts the module on the simulated GPU first."""

    #: True: an engine was on a GPU
    places: set[bool] = set()

    def __init__(self, gpus: SimulatedGpus) -> None:
        self._gpus = gpus

    def __getattr__(self, name: str) -> Any:
        return getattr(sw, name)

    def wrap(self, module: Any, *arguments: Any, **options: Any) -> Any:
        made = sw.wrap(self._gpus.adopt_module(module), *arguments, **{"deterministic": True, **options})
        self.places.update(each.link is not None for each in internals.replicas(made[0]))
        return made


@contextlib.contextmanager
def inside(gpus: SimulatedGpus) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        for each in (experts, tensors, stages, groups):
            patch.setattr(each, "sw", OnGpu(gpus))
        patch.setattr(device_offload, "SLOT_BYTES", 1 << 10)
        yield


def of_tensors(zero: Any, rank: int) -> Any:
    mesh = tensors.mesh_of(2, 2)
    model, optimizer = tensors.wrapped(mesh, zero)
    place = mesh.get_local_rank("dp")
    norms = tensors.train(model, optimizer, place, 2, 0.7)
    optimizer.zero_grad()
    tensors.with_loss_parallel(model, tensors.tokens(2, place))
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)  # by the program, right before the norm
    norms.append(sw.clip_grad_norm_(model, 0.3).item())
    optimizer.step()
    return sw.full_state_dict(model), norms


def of_offloaded_tensors(zero: Any, rank: int, offload: Any = "cpu") -> Any:
    """With AdamW's state on the host, at the stages that have it."""
    mesh = tensors.mesh_of(2, 2)
    model = tensors.parallelized(mesh)
    options = {"share_parameters": False} if zero == "private" else {}
    optimizer = sw.optim.AdamW(model.parameters(), lr=1e-2)
    zero = 3 if zero == "private" else zero or 1
    model, optimizer = tensors.sw.wrap(model, optimizer, zero=zero, device_mesh=mesh["dp"], offload=offload, **options)
    norms = tensors.train(model, optimizer, mesh.get_local_rank("dp"), 2, 0.7)
    tensors.train(model, optimizer, mesh.get_local_rank("dp"), 1, first=2)  # no norm, for which the host waits
    return sw.full_state_dict(model), norms


def of_home_tensors(zero: Any, rank: int) -> Any:
    """With slices of parameters and means on the host, too, which is possible at zero=3 alone."""
    return of_offloaded_tensors("private" if zero == "private" else 3, rank, {"parameters": "cpu", "optimizer": "cpu"})


def of_saved_tensors(zero: Any, rank: int) -> Any:
    """Trained on while a checkpoint is written, and then restored."""
    mesh = tensors.mesh_of(2, 2)
    place = mesh.get_local_rank("dp")
    model, optimizer = tensors.wrapped(mesh, zero)
    with sw.Checkpointer(meet(rank), model, optimizer) as checkpoints:
        tensors.train(model, optimizer, place, 1)
        checkpoints.save(0)
        tensors.train(model, optimizer, place, 1, first=1)
        checkpoints.restore()
    norms = tensors.train(model, optimizer, place, 1, 0.7, first=1)
    return sw.full_state_dict(model), norms


def of_experts(zero: Any, rank: int) -> Any:
    model, optimizer = experts.wrapped(experts.mesh_of(2), zero)
    norms = experts.train(model, optimizer, rank, 3)
    return sw.full_state_dict(model), norms


def of_idle_experts(zero: Any, rank: int) -> Any:
    """Ranks of one column leave their experts out; of the other none has a gradient first, then one of two, then both."""
    mesh = experts.mesh_of(2)
    torch.manual_seed(0)
    model = groups.Skipping(mesh, torch.float32)
    options = {"share_parameters": False} if zero == "private" else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    zero, options["groups"] = 3 if zero == "private" else zero, {"experts": mesh["dp_mod_ep"]}
    model, optimizer = groups.sw.wrap(model, optimizer, zero=zero, **options)
    uses = model.module.uses_experts
    for step in range(3):
        optimizer.zero_grad()
        model.module.uses_experts = uses and mesh.get_local_rank("dp_mod_ep") < step
        model(torch.full((2, 4), 1.0 + rank)).sum().backward()
        optimizer.step()
    return sw.full_state_dict(model), []


def of_lean_experts(zero: Any, rank: int) -> Any:
    """In bfloat16, with compressed gradients and a loss scale."""
    mesh = experts.mesh_of(2)
    model, optimizer = experts.wrapped(mesh, zero, precision="bf16", compress=sw.Int8())
    scaler, kept = torch.amp.GradScaler("cpu", init_scale=8.0), []
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(torch.ones(()))
        experts.backward(model, step, rank, float("inf") if step == 1 and rank == 2 else scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        kept.append(scaler.get_scale())
    assert kept == [8.0, 4.0, 4.0, 4.0]
    return sw.full_state_dict(model), kept


def of_stages(zero: Any, rank: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pp", "dp", "tp"))
    return stages.train(mesh, stages.ONE, zero)[:2]


@pytest.mark.parametrize("kind", KINDS)
def test_every_stage_has_the_bits_of_the_cpu(teams: Any, paths: dict[str, str], kind: str) -> None:
    run(teams, 4, paths, train, kind, policy="late" if kind == "of_idle_experts" else "random")


def train(gpus: SimulatedGpus, rank: int, world_size: int, kind: str) -> None:
    body = globals()[kind]
    with gpus.torch_on_cpu():
        expected, norms = body(0, rank)
    for zero in in_turn((0, 1, 2, 3, "private"), KINDS.index(kind) + 2, of=5):
        OnGpu.places.clear()
        found, theirs = body(zero, rank)
        assert OnGpu.places == {True}
        assert theirs == pytest.approx(norms, rel=1e-6), zero
        for name, value in expected.items():
            assert bits_equal(found[name], value), (zero, name)
