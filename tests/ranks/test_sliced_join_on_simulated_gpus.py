"""Law of uneven inputs on GPUs with sliced state: a rank without inputs contributes nothing and continues to update its
slices, with the bits of the CPU's zero=0, for any schedule. Nothing races or leaks.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import test_sliced_ranks_may_run_out_of_inputs as uneven
import torch
from harness import at_least_two, change, in_turn, same_everywhere
from internals import live_replicas
from internals import offload as device_offload
from models import Heads, Mlp
from peer import PEER
from simulated_gpus import POLICIES, SimulatedGpus, run, sw
from test_stages_on_simulated_gpus import LONG, OnGpu, some

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
QUICK_FORM_IS_THE_LARGEST_WORLD = True
STAGES = (1, 2, 3)
TRAININGS = [training.__name__ for training in uneven.TRAININGS]


class ReadWhole(Mlp):
    """The CPU's tests read parameters between steps, when a host has them whole. On a GPU at zero=3 the read is a
    collective.
    """

    def parameters(self, recurse: bool = True) -> Any:
        replica = next((each for each in live_replicas() if each.wraps(self)), None)
        if replica is None or replica.zero < 3 or replica.in_sliced_join:
            return super().parameters(recurse)
        with replica.access.whole():
            return iter([p.detach().clone() for p in super().parameters(recurse)])


@contextlib.contextmanager
def inside(gpus: SimulatedGpus) -> Any:
    """Run the CPU's tests with modules on simulated GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uneven, "sw", OnGpu(gpus))
        patch.setattr(uneven, "Mlp", ReadWhole)
        if not LONG:
            patch.setattr(uneven, "turns", lambda rank: range(2 + rank))
        yield


def on_cpu(gpus: SimulatedGpus, *arguments: Any, **options: Any) -> Any:
    with gpus.torch_on_cpu():
        return uneven.run(*arguments, deterministic=False, **options)


@at_least_two
@pytest.mark.parametrize(("training", "policy"), some(itertools.product(TRAININGS, POLICIES), 5))
def test_every_training_has_the_bits_of_the_cpu(
    teams: Any, world_size: int, paths: dict[str, str], training: str, policy: str
) -> None:
    run(teams, world_size, paths, train, training, policy=policy)


def train(gpus: SimulatedGpus, rank: int, world_size: int, training: str) -> None:
    body = getattr(uneven, training)
    for initial in (True, False) if LONG else (len(training) % 2 == 0,):
        expected = on_cpu(gpus, rank, world_size, 0, body, initial=initial, bucket_cap_mb=0.001)
        for zero in in_turn(STAGES, TRAININGS.index(training), of=3):
            found = uneven.run(rank, world_size, zero, body, initial=initial, bucket_cap_mb=0.001)
            uneven.assert_same(found, expected, exact=training != "clipped_by_torch")
            assert same_everywhere([*found[1]])


@at_least_two
def test_parameters_that_those_who_train_leave_unused(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, unused, policy="late")


def unused(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    expected = on_cpu(gpus, rank, world_size, 0, uneven.some_heads, build=Heads)
    for zero in in_turn(STAGES, 1):
        given = {"build": Heads, "bucket_cap_mb": 0.0005}
        uneven.assert_same(uneven.run(rank, world_size, zero, uneven.some_heads, **given), expected)


#: bodies of the CPU's laws: (its test without "test_", arguments)
LAWS: list[tuple[str, dict[str, Any]]] = [
    ("a_scaler_of_torch_scales_and_skips_as_at_stage_0", {}),
    ("a_rank_without_any_input_and_training_afterwards", {}),
    ("closures_and_several_optimizers", {}),
    ("a_join_that_is_not_enabled_announces_nothing", {}),
    ("what_is_read_of_gradients_inside_a_join_is_that_of_stage_0", {}),
    ("several_modules_in_one_join_have_the_bits_of_the_naive_loop", {}),
    ("a_forward_without_gradients_inside_a_join_has_no_round", {"zero": 2}),
    *[
        (
            "several_modules_in_one_join_have_the_bits_of_stage_0_one_after_the_other",
            {"stages": stages, "private": False},
        )
        for stages in uneven.STAGES
    ],
]


@at_least_two
@pytest.mark.parametrize("law", LAWS if LONG else LAWS[:7], ids=lambda law: law[0])
def test_the_laws_of_the_cpu_hold(teams: Any, world_size: int, paths: dict[str, str], law: Any) -> None:
    run(teams, world_size, paths, keep_law, *law, policy=POLICIES[len(law[0]) % len(POLICIES)])


def keep_law(gpus: SimulatedGpus, rank: int, world_size: int, name: str, given: dict[str, Any]) -> None:
    getattr(uneven, f"test_{name}").body(rank, world_size, **given)


@at_least_two
@pytest.mark.parametrize(
    ("compress", "training"),
    some(itertools.product(("Fp16", "Int8"), ("accumulated_onto_the_average", "clipped_by_ours")), 2)
    + [("Int8", "accumulated_onto_the_average")],
)
def test_compressed_gradients_have_the_bits_of_the_cpu(
    teams: Any, world_size: int, paths: dict[str, str], compress: str, training: str
) -> None:
    run(teams, world_size, paths, compressed, compress, training, policy="late")


def compressed(gpus: SimulatedGpus, rank: int, world_size: int, compress: str, training: str) -> None:
    body = getattr(uneven, training)
    for initial in in_turn((True, False), int(compress == "Int8")):
        for zero in (2, 3) if LONG else (2,) if initial else (3,):
            given = {"initial": initial, "compress": getattr(sw, compress)(), "bucket_cap_mb": 0.001}
            expected = on_cpu(gpus, rank, world_size, zero, body, **given)
            uneven.assert_same(uneven.run(rank, world_size, zero, body, **given), expected)


@at_least_two
def test_nccls_own_mean_is_near_and_alike_on_all_ranks(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, nccls_mean)


def nccls_mean(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    body = uneven.accumulated_onto_the_average
    for initial in in_turn((True, False), 1):
        expected = on_cpu(gpus, rank, world_size, 0, body, initial=initial)
        found = uneven.run(rank, world_size, 2, body, initial=initial, deterministic=False)
        for mine, theirs in zip(found[1], expected[1], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        assert same_everywhere([*found[1]])


def test_meshes_of_two_dimensions(teams: Any, paths: dict[str, str]) -> None:
    run(teams, 4, paths, on_a_mesh)


def on_a_mesh(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    body = uneven.accumulated_onto_the_average
    expected = on_cpu(gpus, rank, world_size, 0, body)
    for zero in in_turn(STAGES, 2, of=3):
        uneven.assert_same(uneven.run(rank, world_size, zero, body, device_mesh=mesh, bucket_cap_mb=0.001), expected)


@at_least_two
def test_whole_tensors_and_state_on_the_host(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, other_owners)


def other_owners(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    change(device_offload, SLOT_BYTES=1 << 10)

    def make(parameters: Any) -> Any:
        return sw.optim.AdamW(parameters, lr=1e-2)

    expected = on_cpu(gpus, rank, world_size, 0, uneven.clipped_by_ours, optimizer=make)
    for zero in in_turn(STAGES, 0):
        for options in in_turn(({"partition": "tensor"}, {"offload": "cpu"}), int(zero == 3)):
            found = uneven.run(rank, world_size, zero, uneven.clipped_by_ours, optimizer=make, **options)
            uneven.assert_same(found, expected)
