"""Law of partition="tensor" on a GPU: an optimizer that reads whole tensors trains at zero >= 1 with the bits of the
CPU's zero=0, for any schedule. No step waits for the GPU, one rank keeps each tensor's state, and states and
checkpoints load at any stage.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
from typing import Any

import pytest
import test_whole_tensors_are_stepped_on_by_their_owners as whole
import torch
from harness import LONG, change, gather, in_turn, same_everywhere
from internals import offload as device_offload
from models import Heads, Mlp
from peer import PEER, batch
from simulated_gpus import POLICIES, SimulatedGpus, run, stats, sw
from test_stages_on_simulated_gpus import OnGpu, some
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
QUICK_FORM_IS_THE_LARGEST_WORLD = True
STAGES = (1, 2, 3)
TRAININGS = ("plain", "accumulated_and_clipped", "onto_the_average", "scaled")


@contextlib.contextmanager
def inside(gpus: SimulatedGpus) -> Any:
    """Run the CPU's tests with modules on simulated GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole, "sw", OnGpu(gpus))
        yield


def on_cpu(gpus: SimulatedGpus, *arguments: Any, **options: Any) -> Any:
    with gpus.torch_on_cpu():
        return whole.run(*arguments, deterministic=False, **options)


@pytest.mark.parametrize(
    ("training", "optimizer", "policy"), some(itertools.product(TRAININGS, whole.OPTIMIZERS, POLICIES), 17)
)
def test_every_training_has_the_bits_of_the_cpu(
    teams: Any, world_size: int, paths: dict[str, str], training: str, optimizer: str, policy: str
) -> None:
    run(teams, world_size, paths, train, training, optimizer, policy=policy)


def train(gpus: SimulatedGpus, rank: int, world_size: int, training: str, optimizer: str) -> None:
    body, make = getattr(whole, training), whole.OPTIMIZERS[optimizer]
    expected = on_cpu(gpus, rank, 0, body, make)
    for zero in in_turn(STAGES, TRAININGS.index(training), of=3):
        forms = [{"bucket_cap_mb": 0.001}, {"units": nn.Linear} if zero == 3 else {}]
        for options in forms if LONG else forms[zero // 3 :][:1]:
            found = whole.run(rank, zero, body, make, **options)
            whole.assert_same(found, expected, (zero, options))
            assert same_everywhere([*found[1]])


@pytest.mark.parametrize(
    ("build", "training"), some([(whole.Odd, "onto_the_average"), (Heads, "some_heads"), (whole.Odd, "plain")], 2)
)
def test_every_kind_of_parameter(teams: Any, world_size: int, paths: dict[str, str], build: Any, training: str) -> None:
    run(teams, world_size, paths, every_kind, build, training, policy="late")


def every_kind(gpus: SimulatedGpus, rank: int, world_size: int, build: Any, training: str) -> None:
    body, make = getattr(whole, training), whole.OPTIMIZERS["TrustRatio"]
    expected = on_cpu(gpus, rank, 0, body, make, build)
    for zero in in_turn(STAGES, int(training != "plain"), of=3):
        given = {"units": 1.0} if zero == 3 and build is Heads else {}  # ranks run the same units
        whole.assert_same(whole.run(rank, zero, body, make, build, bucket_cap_mb=0.001, **given), expected, zero)


@pytest.mark.parametrize(("zero", "policy"), some(itertools.product(STAGES, POLICIES), 5))
def test_no_step_waits_for_the_gpu_or_allocates(
    teams: Any, world_size: int, paths: dict[str, str], zero: int, policy: str
) -> None:
    run(teams, world_size, paths, quiet_steps, zero, policy=policy)


def quiet_steps(gpus: SimulatedGpus, rank: int, world_size: int, zero: int) -> None:
    torch.manual_seed(0)
    module = Mlp()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    model, optimizer = OnGpu(gpus).wrap(module, optimizer, zero=zero, partition="tensor", bucket_cap_mb=0.001)
    gc.collect()
    before = stats(model)
    for step in range(4):
        model(batch(rank, 6, 7, step=step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    after = stats(model)
    assert all(after[key] == before[key] for key in ("host_waits", "allocations")), (before, after)
    owned = [index for index in range(6) if optimizer.run(index, rank) != (0, 0)]
    assert sorted(sum(gather(owned), [])) == list(range(6))
    assert len(optimizer._inner.state) == len(owned)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_on_matrices_beside_adamw_on_the_rest(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, muon)


def muon(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    def steps(wrap: Any, zero: int) -> Any:
        torch.manual_seed(0)
        module = Mlp()
        matrices = [p for p in module.parameters() if p.dim() == 2]
        model, first = wrap(module, torch.optim.Muon(matrices, lr=1e-2), zero=zero, partition="tensor")
        rest = torch.optim.AdamW([p for p in module.parameters() if p.dim() != 2], lr=1e-2)
        rest = sw.shard_optimizer(model, rest) if zero else rest
        losses = []
        for loss in (whole.loss_of(model, rank, step) for step in range(4)):
            loss.backward()
            first.step()
            rest.step()
            model.zero_grad()
            losses.append(loss.item())
        state = copy.deepcopy(sw.full_optimizer_state_dict(model, first))
        with sw.full_parameters(model):
            parameters = [p.detach().clone() for p in module.parameters()]
        gather(None)
        return losses, parameters, state

    with gpus.torch_on_cpu():
        expected = steps(sw.wrap, 0)
    for zero in in_turn(STAGES, 0):
        whole.assert_same(steps(OnGpu(gpus).wrap, zero), expected, zero)


@pytest.mark.parametrize("optimizer", ["TrustRatio", "AdamW"])
def test_states_and_checkpoints_go_between_stages(
    teams: Any, world_size: int, paths: dict[str, str], optimizer: str
) -> None:
    run(teams, world_size, paths, travelling, optimizer, policy="on demand")


def travelling(gpus: SimulatedGpus, rank: int, world_size: int, optimizer: str) -> None:
    make, expected = whole.OPTIMIZERS[optimizer], None
    pairs = [(0, 2), (2, 1), (1, 3), (3, 0)]
    for first, second in in_turn([*pairs, (3, 2)] if LONG else pairs, int(optimizer == "AdamW")):
        folder = gather(str(gpus.folder / f"saved-{first}-{second}"))[0]
        found = []
        for zero, begin in ((first, 0), (second, 2)):
            torch.manual_seed(begin)
            module = Mlp()
            given = {"zero": zero, "partition": "tensor", "bucket_cap_mb": 0.001}
            model, made = OnGpu(gpus).wrap(module, make(module.parameters()), **given)
            if begin:
                sw.load(folder, model, made)
            for step in range(begin, 4):
                if step == 2 and not begin:
                    sw.save(folder, model, made)
                whole.loss_of(model, rank, step).backward()
                made.step()
                made.zero_grad()
            state = copy.deepcopy(sw.full_optimizer_state_dict(model, made))
            with sw.full_parameters(model):
                found.append(([], [p.detach().clone() for p in module.parameters()], state))
            gather(None)
        expected = expected or found[0]
        for each in found:
            whole.assert_same(each, expected, (first, second))


def test_owners_keep_their_state_on_the_host(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, offloaded)


def offloaded(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    change(device_offload, SLOT_BYTES=1 << 10)

    def make(parameters: Any) -> Any:
        return sw.optim.AdamW(parameters, lr=1e-2)

    expected = on_cpu(gpus, rank, 0, whole.plain, make, whole.Odd)
    for zero in in_turn(STAGES, 2, of=3):
        found = whole.run(rank, zero, whole.plain, make, whole.Odd, offload="cpu")
        whole.assert_same(found, expected, zero)


def test_meshes_of_two_dimensions(teams: Any, paths: dict[str, str]) -> None:
    run(teams, 4, paths, on_a_mesh)


def on_a_mesh(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    make = whole.OPTIMIZERS["TrustRatio"]
    expected = on_cpu(gpus, rank, 0, whole.plain, make)
    for zero in in_turn(STAGES, 1):
        found = whole.run(rank, zero, whole.plain, make, device_mesh=mesh, bucket_cap_mb=0.001)
        whole.assert_same(found, expected, zero)
