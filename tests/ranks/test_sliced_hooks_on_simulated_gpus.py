"""Law: at zero=2 and 3 on a GPU a communication hook sees buckets of this rank's whole contributions, and its result
becomes the average: with the bits of the naive fold, and at zero=2, which has zero=0's buckets, with those of the CPU's
zero=0 with that hook. No step through a hook waits for the GPU, and a failure in a hook ends only the round.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import test_communication_hooks_at_every_stage as hooks
import torch
from harness import at_least_two, gather, in_turn, same_everywhere
from peer import PEER
from simulated_gpus import POLICIES, SimulatedGpus, run, stats, sw
from test_stages_on_simulated_gpus import OnGpu, some
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
QUICK_FORM_IS_THE_LARGEST_WORLD = True
SLICED = (2, 3)


@contextlib.contextmanager
def inside(gpus: SimulatedGpus) -> Any:
    """Run the CPU's tests with modules on simulated GPUs, where zero=3 is private."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hooks, "sw", OnGpu(gpus))
        patch.setattr(hooks, "STAGES", (1, 2, 3))
        patch.setattr(hooks, "PRIVATE", 3)
        yield


@pytest.mark.parametrize(("name", "policy"), some(itertools.product(hooks.HOOKS, POLICIES), 3))
def test_torchs_hooks_have_the_bits_of_the_cpu(
    teams: Any, world_size: int, paths: dict[str, str], name: str, policy: str
) -> None:
    run(teams, world_size, paths, torchs_hooks, name, policy=policy)


def torchs_hooks(gpus: SimulatedGpus, rank: int, world_size: int, name: str) -> None:
    build = hooks.Mlp if name == "powersgd" else hooks.Picture
    for cap in in_turn((0.001, 25), list(hooks.HOOKS).index(name)):
        given = {"build": build, "bucket_cap_mb": cap}
        torch.manual_seed(rank)
        with gpus.torch_on_cpu():
            wrapped, optimizer = hooks.made(0, *hooks.HOOKS[name](), deterministic=False, **given)
            hooks.train(wrapped, optimizer, rank, 4)
            expected = hooks.values(wrapped)
        for zero in SLICED:
            torch.manual_seed(rank)
            wrapped, optimizer = hooks.made(zero, *hooks.HOOKS[name](), **given)
            hooks.train(wrapped, optimizer, rank, 4)
            found = hooks.values(wrapped)
            assert same_everywhere(found)
            if zero == 2:
                assert hooks.equal(found, expected), cap
            elif name != "powersgd":  # a bucket is of one unit: what a hook's collective adds in another order is near
                for mine, theirs in zip(found, expected, strict=True):
                    torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)
            gather(None)


#: bodies of the CPU's laws: (its test without "test_", stage)
LAWS: list[tuple[str, int | None]] = [
    ("a_hook_that_lets_replicas_drift_is_refused_where_state_is_sliced", None),
    *[
        (name, zero)
        for zero in SLICED
        for name in (
            "a_hook_that_folds_has_the_oracle_s_bits",
            "accumulation_unused_parameters_and_clipping",
            "a_accumulated_average_is_added_to_the_result",
            "an_exception_in_a_hook_comes_out_and_the_next_step_is_clean",
        )
    ],
]
OF_SEVERAL = [("ranks_may_run_out_of_inputs", None)]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: f"{law[0]}-{law[1]}")
def test_the_laws_of_the_cpu_hold(teams: Any, world_size: int, paths: dict[str, str], law: Any) -> None:
    run(teams, world_size, paths, keep_law, *law, policy=POLICIES[len(law[0]) % len(POLICIES)])


@at_least_two
@pytest.mark.parametrize("law", OF_SEVERAL, ids=lambda law: law[0])
def test_the_laws_of_several_ranks_hold(teams: Any, world_size: int, paths: dict[str, str], law: Any) -> None:
    run(teams, world_size, paths, keep_law, *law, policy="random")


def keep_law(gpus: SimulatedGpus, rank: int, world_size: int, name: str, zero: int | None) -> None:
    given = {} if zero is None else {"zero": zero}
    with pytest.MonkeyPatch.context() as patch:
        if zero == 3 and "unused" in name:  # ranks run the same units
            patch.setattr(hooks, "stage", lambda at, options: {**options, "zero": at, **({"units": 1.0} if at else {})})
        getattr(hooks, f"test_{name}").body(rank, world_size, **given)


@pytest.mark.parametrize("zero", SLICED)
def test_a_step_through_a_hook_waits_for_no_gpu_and_allocates_nothing(
    teams: Any, world_size: int, paths: dict[str, str], zero: int
) -> None:
    run(teams, world_size, paths, quiet_hook, zero, policy="late")


def quiet_hook(gpus: SimulatedGpus, rank: int, world_size: int, zero: int) -> None:
    wrapped, optimizer = hooks.made(zero, None, default_hooks.allreduce_hook)
    before = stats(wrapped)
    hooks.train(wrapped, optimizer, rank, 4)
    after = stats(wrapped)
    assert all(after[key] == before[key] for key in ("host_waits", "allocations")), (before, after)


@pytest.mark.parametrize("nth", [1, 6])
def test_a_call_of_the_driver_that_fails_beside_a_hook_is_named(
    teams: Any, world_size: int, paths: dict[str, str], nth: int
) -> None:
    run(teams, 1, paths, failing_call, nth)


def failing_call(gpus: SimulatedGpus, rank: int, world_size: int, nth: int) -> None:
    wrapped, optimizer = hooks.made(2, None, default_hooks.allreduce_hook)
    hooks.train(wrapped, optimizer, rank, 1)
    gpus.fail_call(nth, 999)
    with pytest.raises(sw.Error, match=r"CUDA_ERROR_UNKNOWN|\(999\)"):
        hooks.train(wrapped, optimizer, rank, 9)
    gpus.fail_call(0, 0)


def test_meshes_of_two_dimensions(teams: Any, paths: dict[str, str]) -> None:
    run(teams, 4, paths, on_a_mesh)


def on_a_mesh(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    assert hooks.on_a_mesh(rank, world_size)
