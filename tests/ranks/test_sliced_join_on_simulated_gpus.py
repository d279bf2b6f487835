"""Law of uneven inputs on GPUs where state is sliced: a rank that ran out contributes nothing and goes on updating its slices, with the bits of
the CPU's zero=0, whatever the schedule; nothing races or leaks."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import test_sliced_ranks_may_run_out_of_inputs as uneven
from harness import at_least_two, same_everywhere
from models import Heads
from peer import PEER
from simulated_gpus import POLICIES, SimulatedGpus, run
from test_stages_on_simulated_gpus import OnGpu, some

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
QUICK_FORM_IS_THE_LARGEST_WORLD = True
STAGES = (1, 2, 3)
TRAININGS = [training.__name__ for training in uneven.TRAININGS]


@contextlib.contextmanager
def inside(gpus: SimulatedGpus) -> Any:
    """The laws of the CPU wrap modules on simulated GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uneven, "sw", OnGpu(gpus))
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
    for initial in (True, False):
        expected = on_cpu(gpus, rank, world_size, 0, body, initial=initial, bucket_cap_mb=0.001)
        for zero in STAGES:
            found = uneven.run(rank, world_size, zero, body, initial=initial, bucket_cap_mb=0.001)
            uneven.assert_same(found, expected, exact=training != "clipped_by_torch")
            assert same_everywhere([*found[1]])


@at_least_two
def test_parameters_that_those_who_train_leave_unused(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, unused, policy="late")


def unused(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    expected = on_cpu(gpus, rank, world_size, 0, uneven.some_heads, build=Heads)
    for zero in STAGES:
        given = {"build": Heads, "bucket_cap_mb": 0.0005}
        uneven.assert_same(uneven.run(rank, world_size, zero, uneven.some_heads, **given), expected)


#: bodies of the CPU's laws, of several ranks
LAWS: list[tuple[str, dict[str, Any]]] = [
    ("a_scaler_of_torch_scales_and_skips_as_at_stage_0", {}),
    ("a_rank_without_any_input_and_training_afterwards", {}),
    ("closures_and_several_optimizers", {}),
    ("a_join_that_is_not_enabled_announces_nothing", {}),
]
