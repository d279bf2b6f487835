"""Law: a communication hook owns the buckets of a module on a GPU as on the CPU, and a rank without inputs takes part
without contributing. The CPU's tests run body for body on simulated GPUs, for any schedule. Nothing races or leaks, and
a step that used every parameter never waits for the GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import at_least_two, gather, same_everywhere
from models import Mlp
from peer import PEER, batch
from simulated_gpus import POLICIES, SimulatedGpus, keep_promise, run, stats, sw
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
QUICK_FORM_IS_THE_LARGEST_WORLD = True


_HOOKS = "test_communication_hooks_of_torch_run_unchanged"
_JOIN = "test_joined_ranks_take_part_without_contributing"
PROMISES: list[tuple[str, str, dict[str, Any]]] = [
    *[
        (_HOOKS, "torchs_hooks_give_the_mean_to_their_precision", {"name": name, "cap": cap})
        for name, cap in (("allreduce", 0.001), ("fp16_compress", 25), ("fp16_compress_wrapper", 0.001))
    ],
    (_HOOKS, "powersgd_gives_every_rank_one_gradient_that_trains", {}),
    (_HOOKS, "a_hook_sees_every_gradient_once_in_order_and_its_result_is_the_gradient", {"cap": 0.001}),
    (_HOOKS, "a_hook_may_write_into_the_buffer_or_replace_it", {}),
    (_HOOKS, "a_hook_that_communicates_by_itself", {}),
    (_HOOKS, "no_hook_runs_under_no_sync", {}),
    (_HOOKS, "what_no_rank_used_is_left_alone_by_a_hook", {}),
    (_HOOKS, "an_exception_in_a_hook_comes_out_of_the_backward", {}),
    (_HOOKS, "a_second_hook_and_a_wrong_one_are_refused", {}),
    *[
        (
            _JOIN,
            "each_gradient_is_the_mean_that_was_asked_for",
            {"cap": cap, "initial": initial, "through_join": through},
        )
        for cap, initial, through in ((0.001, True, False), (25, False, True), (0.001, False, False))
    ],
    (_JOIN, "training_goes_on_after_the_join", {}),
    (_JOIN, "a_rank_without_any_input_takes_part", {}),
    (_JOIN, "accumulation_inside_a_join", {}),
    (_JOIN, "buffers_come_from_a_rank_that_still_trains", {}),
    (_JOIN, "a_disabled_join_changes_nothing", {}),
    (_JOIN, "two_wrapped_modules_join_together", {}),
    (_JOIN, "a_rank_that_ran_out_takes_part_in_a_communication_hook", {}),
]


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise[1])
def test_the_promises_of_the_cpu_hold(teams: Any, world_size: int, paths: dict[str, str], promise: Any) -> None:
    policy = POLICIES[(len(promise[1]) + len(promise[2])) % len(POLICIES)]
    run(teams, world_size, paths, keep_promise, *promise, policy=policy)


@pytest.mark.parametrize("zero", [0, 1])
def test_a_step_through_a_hook_waits_for_no_gpu_and_allocates_nothing(
    teams: Any, world_size: int, paths: dict[str, str], zero: int
) -> None:
    run(teams, world_size, paths, quiet_hook, zero, policy="late")


def quiet_hook(gpus: SimulatedGpus, rank: int, world_size: int, zero: int) -> None:
    torch.manual_seed(0)
    module = gpus.adopt_module(Mlp())
    optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1)
    wrapped, optimizer = sw.wrap(module, optimizer, zero=zero, bucket_cap_mb=0.001)
    for step in range(5):
        if step == 1:  # on top of means that the engine made
            wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
            before = stats(wrapped)
        wrapped(batch(rank, 6, 7, step=step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    after = stats(wrapped)
    assert after["host_waits"] == before["host_waits"] and after["allocations"] == before["allocations"], (
        before,
        after,
    )
    assert same_everywhere([*module.parameters()])


@at_least_two
@pytest.mark.parametrize("initial", [True, False])
def test_nccls_own_mean_of_those_that_train_is_near(
    teams: Any, world_size: int, paths: dict[str, str], initial: bool
) -> None:
    run(teams, world_size, paths, near_mean, initial, policy="random")


def near_mean(gpus: SimulatedGpus, rank: int, world_size: int, initial: bool) -> None:
    torch.manual_seed(0)
    wrapped = sw.wrap(gpus.adopt_module(Mlp()), bucket_cap_mb=0.001)
    found = []
    with wrapped.join(divide_by_initial_world_size=initial):
        for step in range(1 + rank):
            wrapped.zero_grad()
            wrapped(torch.ones(2, 7)).sum().backward()
            found.append([p.grad.tolist() for p in wrapped.module.parameters()])
    everyone = gather(found)
    first = everyone[-1][0]  # each rank's own gradient is the same: only what is divided by shows
    for number, step in enumerate(everyone[-1]):
        share = (world_size - number) / world_size if initial else 1
        for got, mean in zip(step, first):
            torch.testing.assert_close(torch.tensor(got), torch.tensor(mean) * share, rtol=1e-5, atol=1e-7)


@at_least_two
def test_a_different_number_of_backwards_after_a_join_is_named(
    teams: Any, world_size: int, paths: dict[str, str]
) -> None:
    run(teams, world_size, paths, uneven_after_join, policy="on demand")


def uneven_after_join(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    gpus.watch()
    wrapped = sw.wrap(gpus.adopt_module(Mlp()))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    with wrapped.join():
        for step in range(1 + rank):
            wrapped(batch(rank, 6, 7, step=step)).sum().backward()
            optimizer.step()
    with pytest.raises(sw.Error, match="ranks ran different numbers of backwards or optimizer steps of Mlp"):
        for _ in range(50):
            for _ in range(2 if rank == 0 else 1):
                wrapped(batch(rank, 6, 7)).sum().backward()
            optimizer.step()
    gather(None)


@pytest.mark.parametrize(("nth", "registering"), [(1, True), (1, False), (5, False)])
def test_a_call_of_the_driver_that_fails_beside_a_hook_is_named(
    teams: Any, world_size: int, paths: dict[str, str], nth: int, registering: bool
) -> None:
    run(teams, 1, paths, failing_call, nth, registering)


def failing_call(gpus: SimulatedGpus, rank: int, world_size: int, nth: int, registering: bool) -> None:
    wrapped = sw.wrap(gpus.adopt_module(Mlp()), bucket_cap_mb=0.001)
    if not registering:
        wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
    gpus.fail_call(nth, 999)
    with pytest.raises(sw.Error, match=r"CUDA_ERROR_UNKNOWN|\(999\)"):
        if registering:
            wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
        for step in range(9):
            wrapped(batch(rank, 6, 7, step=step)).square().mean().backward()
    gpus.fail_call(0, 0)
