"""Law: zero=1, 2 and 3 on a GPU have the bits of zero=0 there and on the CPU, for any schedule, training, optimizer and
bucket cap. Nothing races or leaks, and no step that used every parameter waits for the GPU.

The CPU's tests of the stages run body for body, with modules on simulated GPUs.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import itertools
import os
from typing import Any
from unittest import mock

import internals
import pytest
import test_every_stage_has_the_same_bits as stages
import torch
from harness import at_least_two, gather, in_turn, same_everywhere
from internals import cuda as sw_device
from models import Heads, Mlp
from oracle.fold import bits_equal, fold
from peer import PEER, batch
from simulated_gpus import POLICIES, SimulatedGpus, run, stats, sw

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
QUICK_FORM_IS_THE_LARGEST_WORLD = True
SLICED = (1, 2)
STAGES = (1, 2, 3)
LONG = os.environ.get("SW_TEST_LONG") == "1"
TRAININGS = [training.__name__ for training in stages.TRAININGS]


def some(cases: Any, quick: int) -> list[Any]:
    """Return all cases in the long form; else every quick-th."""
    found = list(cases)
    return found if LONG else found[::quick]


@contextlib.contextmanager
def inside(gpus: SimulatedGpus) -> Any:
    """Run the CPU's tests of the stages with modules on simulated GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "sw", OnGpu(gpus))
        yield


class OnGpu:
    """A stand-in for the package, whose wrap() first moves the module to the simulated GPU."""

    def __init__(self, gpus: SimulatedGpus) -> None:
        self._gpus = gpus

    def __getattr__(self, name: str) -> Any:
        return getattr(sw, name)

    def wrap(self, module: Any, *arguments: Any, **options: Any) -> Any:
        return sw.wrap(self._gpus.adopt_module(module), *arguments, **{"deterministic": True, **options})


@pytest.mark.parametrize(
    ("training", "policy"),
    list(itertools.product(TRAININGS, POLICIES))
    if LONG
    else [(training, POLICIES[at % len(POLICIES)]) for at, training in enumerate(TRAININGS)],
)
def test_every_training_has_the_bits_of_the_cpu(
    teams: Any, world_size: int, paths: dict[str, str], training: str, policy: str
) -> None:
    run(teams, world_size, paths, train_at_every_stage, training, policy=policy)


def train_at_every_stage(gpus: SimulatedGpus, rank: int, world_size: int, training: str) -> None:
    body = getattr(stages, training)
    with gpus.torch_on_cpu():
        expected = stages.run(0, body, rank, bucket_cap_mb=0.001, deterministic=False)
    for zero in in_turn((0, *STAGES), TRAININGS.index(training), of=4):
        for cap in (0.001, 25) if zero == 2 or (zero and LONG) else (0.001,):
            stages.run(zero, body, rank, bucket_cap_mb=cap).assert_equals(expected, f"zero={zero}, cap={cap}")
    assert same_everywhere([*expected.parameters])


#: bodies of the CPU's laws: (its module, its test without "test_", arguments, other than the stage)
_BITS, _SLICED, _STALE = (
    "test_every_stage_has_the_same_bits",
    "test_what_is_sliced_is_sliced",
    "test_stages_do_not_go_stale",
)
LAWS: list[tuple[str, str, int | None]] = [
    *[
        (_SLICED, name, zero)
        for zero in SLICED
        for name in (
            "a_rank_holds_a_share_of_the_state",
            "hyperparameters_that_differ_are_named_on_every_rank",
            "slices_come_back_at_the_same_rank",
            "parameters_are_written_inside_full_parameters",
            "a_parameter_unfrozen_later_is_stepped_on",
            "closures_groups_and_step_hooks",
            "gradscaler_unchanged_skips_alike_on_every_rank",
        )
    ],
    (_SLICED, "a_sliced_gradient_answers_norms_and_refuses_the_rest", 2),
    (_SLICED, "one_collective_gives_all_norms_of_a_round", 2),
    (_SLICED, "a_gradient_that_is_not_averaged_yet_is_not_stepped_on", 2),
    *[
        (_STALE, name, zero)
        for zero in SLICED
        for name in (
            "loading_everything_inside_full_parameters",
            "asking_for_state_between_unfreezing_and_the_forward",
            "a_backward_over_a_step_is_seen_by_autograd",
            "clipping_at_each_step_clips_what_a_closure_makes",
            "clipping_after_a_loss_that_touches_nothing_on_one_rank",
            "a_step_without_an_averaged_gradient_is_refused_and_the_next_is_clean",
            "the_original_optimizer_cannot_go_its_own_way",
        )
    ],
    (_STALE, "zeroing_on_one_rank_alone", 1),
    (_STALE, "what_is_frozen_costs_no_gradient_memory", 2),
    (_STALE, "one_large_parameter_does_not_make_slices_larger_than_the_whole", 2),
]


OF_SEVERAL = {
    "hyperparameters_that_differ_are_named_on_every_rank",
    "one_large_parameter_does_not_make_slices_larger_than_the_whole",
}


@pytest.mark.parametrize("law", some(LAWS, 5), ids=lambda law: f"{law[1]}-{law[2]}")
def test_the_laws_of_the_cpu_hold(teams: Any, world_size: int, paths: dict[str, str], law: Any) -> None:
    if law[1] in OF_SEVERAL and world_size == 1:
        pytest.skip("of several ranks")
    run(teams, world_size, paths, keep_law, *law, policy=POLICIES[len(law[1]) % len(POLICIES)])


def keep_law(gpus: SimulatedGpus, rank: int, world_size: int, module: str, name: str, zero: int) -> None:
    found = importlib.import_module(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(found, "sw", OnGpu(gpus))
        getattr(found, f"test_{name}").body(rank, world_size, zero=zero)


@pytest.mark.parametrize("optimizer", some(stages.OPTIMIZERS, 6))
def test_every_elementwise_optimizer_of_torch(
    teams: Any, world_size: int, paths: dict[str, str], optimizer: str
) -> None:
    run(teams, world_size, paths, step_with, optimizer, policy=POLICIES[len(optimizer) % len(POLICIES)])


def step_with(gpus: SimulatedGpus, rank: int, world_size: int, optimizer: str) -> None:
    whole = stages.run(0, stages.plain_steps, rank, optimizer=optimizer, bucket_cap_mb=0.001)
    for zero in in_turn(STAGES, list(stages.OPTIMIZERS).index(optimizer) // 6, of=3):
        sliced = stages.run(zero, stages.plain_steps, rank, optimizer=optimizer, bucket_cap_mb=0.001)
        sliced.assert_equals(whole, f"zero={zero}")


@pytest.mark.parametrize(
    "training", some(["accumulating_onto_the_average", "plain_steps", "accumulating_inside_no_sync"], 3)
)
def test_every_kind_of_parameter(teams: Any, world_size: int, paths: dict[str, str], training: str) -> None:
    run(teams, world_size, paths, odd_parameters, training, policy="late")


def odd_parameters(gpus: SimulatedGpus, rank: int, world_size: int, training: str) -> None:
    body = getattr(stages, training)
    whole = stages.run(0, body, rank, build=stages.Odd, bucket_cap_mb=0.001)
    for zero in in_turn(STAGES, 0):
        stages.run(zero, body, rank, build=stages.Odd, bucket_cap_mb=0.001).assert_equals(whole, f"zero={zero}")


@pytest.mark.parametrize("policy", some(POLICIES, 3))
def test_parameters_that_some_or_all_ranks_leave_unused(
    teams: Any, world_size: int, paths: dict[str, str], policy: str
) -> None:
    caps = (0.0005, 25) if LONG else (0.0005,) if policy == "late" else (25,)
    run(teams, world_size, paths, unused_heads, caps, policy=policy)


def unused_heads(gpus: SimulatedGpus, rank: int, world_size: int, caps: tuple[float, ...]) -> None:
    for cap in caps:
        whole = stages.run(0, stages.some_heads, rank, build=Heads, bucket_cap_mb=cap)
        given = ((1, {}), (2, {}), (3, {"units": 1.0}))  # ranks run the same units
        for zero, options in in_turn(given, int(cap == 25)):
            sliced = stages.run(zero, stages.some_heads, rank, build=Heads, bucket_cap_mb=cap, **options)
            sliced.assert_equals(whole, f"zero={zero}")


def test_gradients_that_torch_copies_follow_the_mean_that_leaves_their_place(
    teams: Any, world_size: int, paths: dict[str, str]
) -> None:
    run(teams, world_size, paths, copied_by_torch, policy="late")


def copied_by_torch(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    """The engine reads no gradient of other strides than its parameter's."""

    def means(zero: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module = gpus.adopt_module(Mlp())
        optimizer = torch.optim.SGD(module.parameters())
        wrapped, _ = sw.wrap(module, optimizer, zero=zero, bucket_cap_mb=0.0001, deterministic=True)
        for p in module.parameters():
            p.grad = gpus.adopt((rank + 1) * torch.randn((*p.shape, 2)))[..., 0]
        sw.average_gradients(wrapped)
        return [*sw.full_gradients(wrapped).values()]

    assert all(map(bits_equal, means(0), means(2)))


@pytest.mark.parametrize(("policy", "zero"), some(itertools.product(POLICIES, SLICED), 3))
def test_no_step_waits_for_the_gpu_or_allocates(
    teams: Any, world_size: int, paths: dict[str, str], policy: str, zero: int
) -> None:
    run(teams, world_size, paths, quiet_steps, zero, policy=policy)


def quiet_steps(gpus: SimulatedGpus, rank: int, world_size: int, zero: int) -> None:
    torch.manual_seed(0)
    module = gpus.adopt_module(Mlp())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    wrapped, optimizer = sw.wrap(module, optimizer, zero=zero, deterministic=True, bucket_cap_mb=0.001)
    allocations = stats(wrapped)["allocations"]
    for step in range(6):
        wrapped(batch(rank, 6, 7, step=step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    counts = stats(wrapped)
    assert counts["host_waits"] == 0 and counts["allocations"] == allocations, counts
    assert counts["buckets_early"] > 0, counts
    assert same_everywhere([*module.parameters()])


@pytest.mark.parametrize("zero", some(reversed(SLICED), 2))
def test_clipping_has_the_bits_of_stage_0_and_waits_for_nothing(
    teams: Any, world_size: int, paths: dict[str, str], zero: int
) -> None:
    run(teams, world_size, paths, clipped_steps, zero, policy="late")


def clipped_steps(gpus: SimulatedGpus, rank: int, world_size: int, zero: int) -> None:
    whole = stages.run(0, stages.clipped_by_ours, rank, bucket_cap_mb=0.001)
    stages.run(zero, stages.clipped_by_ours, rank, bucket_cap_mb=0.001).assert_equals(whole, f"zero={zero}")
    near = stages.run(zero, stages.clipped_by_torch, rank)
    for mine, theirs in zip(near.parameters, whole.parameters, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-6, atol=1e-6)
    gc.collect()  # ending a reducer waits: the earlier ones do it now
    for made in (torch.optim.SGD, sw.optim.SGD):
        module = gpus.adopt_module(Mlp())
        wrapped, optimizer = sw.wrap(
            module, made(module.parameters(), lr=0.1), zero=zero, clip_grad_norm=0.02, deterministic=True
        )
        before = stats(wrapped)["host_waits"]
        for step in range(3):
            wrapped(batch(rank, 6, 7, step=step)).square().mean().backward()
            sw.clip_grad_norm_(wrapped, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        assert stats(wrapped)["host_waits"] == before, gpus.devices.waits


def test_torchs_clipping_and_its_scaler_wait_as_often_for_many_gradients_as_for_one(
    teams: Any, world_size: int, paths: dict[str, str]
) -> None:
    run(teams, world_size, paths, clipped_and_scaled)


def clipped_and_scaled(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    module = gpus.adopt_module(Mlp())
    wrapped, optimizer = sw.wrap(module, torch.optim.SGD(module.parameters(), lr=0.1), zero=2, deterministic=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        scaler.scale(wrapped(batch(rank, 6, 7, step=step)).square().mean()).backward()
        gpus.adopt(scaler._scale)
        before = stats(wrapped)["host_waits"]
        scaler.unscale_(optimizer)
        unscaled = stats(wrapped)["host_waits"]
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.02)
        clipped = stats(wrapped)["host_waits"]
        factor = gpus.adopt(torch.tensor(0.5))
        for parameter in module.parameters():
            parameter.grad.mul_(factor)
        assert unscaled - before == 2, gpus.devices.waits  # the scale, and whether something overflowed
        assert clipped - unscaled == 1, (
            gpus.devices.waits
        )  # the norms; of the factor the simulation does not know where it is
        assert stats(wrapped)["host_waits"] - clipped == 1, gpus.devices.waits
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def test_a_fused_step_reads_the_scaler_with_one_wait(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, scaled_in_the_step)


def scaled_in_the_step(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    """torch's own fused step keeps its count on the GPU. Ours is on the host, which must know of a skipped step."""
    module, other = gpus.adopt_module(Mlp()), Mlp()
    other.load_state_dict(module.state_dict())
    wrapped, optimizer = sw.wrap(module, sw.optim.AdamW(module.parameters(), lr=0.1), zero=0, deterministic=True)
    plain = sw.optim.AdamW(other.parameters(), lr=0.1)
    for step in range(3):
        wrapped(batch(rank, 6, 7, step=step)).square().mean().backward()
        optimizer.found_inf = gpus.adopt(torch.full((1,), float(step == 1)))
        optimizer.grad_scale = gpus.adopt(torch.tensor(4.0))
        gradients = [p.grad.clone() for p in module.parameters()]
        before = stats(wrapped)["host_waits"]
        optimizer.step()
        assert stats(wrapped)["host_waits"] - before == 1, gpus.devices.waits
        with gpus.torch_on_cpu():
            for mine, gradient in zip(other.parameters(), gradients, strict=True):
                mine.grad = gradient / 4.0
            if step != 1:
                plain.step()
            assert all(map(bits_equal, other.parameters(), module.parameters())), step
        optimizer.zero_grad()


@pytest.mark.parametrize("training", ["checkpointed", "scheduled"])
def test_recomputed_backwards_and_full_gradients(
    teams: Any, world_size: int, paths: dict[str, str], training: str
) -> None:
    run(teams, world_size, paths, recomputed, training, policy="on demand")


def recomputed(gpus: SimulatedGpus, rank: int, world_size: int, training: str) -> None:
    body = getattr(stages, training)
    whole = stages.run(0, body, rank, bucket_cap_mb=0.001)
    found = []
    for zero in in_turn((0, *STAGES), int(training == "checkpointed")):
        stages.run(zero, body, rank, bucket_cap_mb=0.001).assert_equals(whole, f"zero={zero}")
        module = Mlp()
        module.load_state_dict({name: p * 1 for name, p in zip(dict(module.named_parameters()), whole.parameters)})
        wrapped = sw.wrap(gpus.adopt_module(module), zero=zero, deterministic=True)
        stages.loss(wrapped, rank, 0).backward()
        found.append({name: value.clone() for name, value in sw.full_gradients(wrapped).items()})
    for other in found[1:]:
        assert all(bits_equal(other[name], found[0][name]) for name in other)


@pytest.mark.parametrize("zero", some(reversed(SLICED), 2))
def test_nccls_own_mean_and_sums_are_alike_on_all_ranks_and_near(
    teams: Any, world_size: int, paths: dict[str, str], zero: int
) -> None:
    run(teams, world_size, paths, nccls_mean, zero)


def nccls_mean(gpus: SimulatedGpus, rank: int, world_size: int, zero: int) -> None:
    for reduce in ("mean", "sum"):
        for body in in_turn((stages.plain_steps, stages.never_cleared), int(reduce == "sum")):
            given = {"optimizer": "SGD", "bucket_cap_mb": 0.001, "reduce": reduce}
            whole = stages.run(0, body, rank, **given)
            near = stages.run(zero, body, rank, deterministic=False, **given)
            for mine, theirs in zip(near.parameters, whole.parameters, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
            assert same_everywhere([*near.parameters])


def test_low_precision_parameters_have_masters(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, low_precision, policy="late")


def low_precision(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    def steps(model: Any, optimizer: Any, rank: int) -> list[float]:
        gc.collect()
        waits = stats(model)["host_waits"]
        for step in range(4):
            model(batch(rank, 6, 7, step=step).bfloat16()).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert stats(model)["host_waits"] == waits
        return []

    whole = stages.run(0, steps, rank, build=lambda: Mlp().to(torch.bfloat16))
    for zero in in_turn(STAGES, 0):
        sliced = stages.run(zero, steps, rank, build=lambda: Mlp().to(torch.bfloat16))
        sliced.assert_equals(whole, f"zero={zero}")


def test_low_precision_gradients_are_added_in_float32(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, added_in_float32)


def added_in_float32(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    policy = sw.Precision(torch.bfloat16, reduce_dtype=torch.float32, master=False)
    for zero in (0, *STAGES):
        torch.manual_seed(0)
        plain = Mlp().to(torch.bfloat16)
        model = sw.wrap(gpus.adopt_module(copy.deepcopy(plain)), zero=zero, precision=policy)
        x = batch(rank, 6, 7).bfloat16()
        model(x).float().square().mean().backward()
        found = sw.full_gradients(model)
        with gpus.torch_on_cpu():
            plain(x).float().square().mean().backward()
            for name, p in plain.named_parameters():
                assert bits_equal(found[name], fold(gather(p.grad), "mean")), (zero, name)


def test_state_goes_from_any_stage_to_any_other_and_to_the_cpu(
    teams: Any, world_size: int, paths: dict[str, str]
) -> None:
    run(teams, world_size, paths, travelling_state)


def travelling_state(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    whole = stages.run(0, stages.plain_steps, rank)
    for first, second in in_turn([(0, 2), (1, 3), (3, 1), (2, 0)], 0):
        torch.manual_seed(0)
        module = gpus.adopt_module(Mlp())
        made = stages.OPTIMIZERS["AdamW"](module.parameters())
        model, optimizer = sw.wrap(module, made, zero=first, bucket_cap_mb=0.001, deterministic=True)
        losses = stages.plain_steps(model, optimizer, rank, 2)
        folder = gather(str(gpus.folder / f"saved-{first}-{second}"))[0]
        sw.save(folder, model, optimizer)
        module = gpus.adopt_module(Mlp())
        made = stages.OPTIMIZERS["AdamW"](module.parameters())
        model, optimizer = sw.wrap(module, made, zero=second, deterministic=True)
        sw.load(folder, model, optimizer)
        for step in (2, 3):
            value = stages.loss(model, rank, step)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(value.item())
        state = sw.full_optimizer_state_dict(model, optimizer)
        stages.Outcome(losses, model, state).assert_equals(whole, f"{first} to {second}")


@at_least_two
def test_gradients_that_one_rank_cleared_alone_are_named_a_step_later(
    teams: Any, world_size: int, paths: dict[str, str]
) -> None:
    run(teams, world_size, paths, cleared_alone, policy="on demand")


def cleared_alone(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    gpus.watch()
    torch.manual_seed(0)
    module = gpus.adopt_module(Mlp())
    wrapped, optimizer = sw.wrap(module, torch.optim.SGD(module.parameters(), lr=0.1), zero=2)
    with pytest.raises(sw.Error, match="ranks cleared different gradients of Mlp"):
        for _ in range(50):
            wrapped(batch(rank, 6, 7)).sum().backward()
            optimizer.step()
            if rank == 0:
                optimizer.zero_grad()
    gather(None)


def test_a_place_that_is_made_anew_leaves_the_old_one_in_order(
    teams: Any, world_size: int, paths: dict[str, str]
) -> None:
    run(teams, world_size, paths, remade_place)


def remade_place(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    """The backward ran on a user's stream, so the stream that allocates the place is not ordered behind the
    means.
    """
    torch.manual_seed(0)
    module = gpus.adopt_module(Mlp())
    largest = max(range(4), key=lambda index: [*module.parameters()][index].numel())
    frozen = [*module.parameters()][largest].requires_grad_(False)
    zeros, made = internals.cuda.runtime.zeros, []

    def allocate(numel: int, dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
        made.append(zeros(numel, dtype, like))
        return made[-1]

    with mock.patch.object(internals.cuda.runtime, "zeros", allocate):
        wrapped, _ = sw.wrap(module, torch.optim.SGD(module.parameters(), lr=0.1), zero=2, bucket_cap_mb=0.0001)
    place = [each for each in made if each.dtype is torch.uint8][-1]  # behind the slices of the means
    reducer, home = internals.reducer(wrapped), gpus.stream
    loss = wrapped(batch(rank, 6, 7)).square().mean()
    with gpus.other_stream() as side:
        internals.link(wrapped).comm.follow(side, home)
        loss.backward()
    frozen.requires_grad_()
    made.clear()
    with mock.patch.object(internals.cuda.runtime, "zeros", allocate):
        reducer.mark_unfrozen(largest)
    assert len(made) == 2 and made[1].nbytes > place.nbytes, "a slice and a place"
    place.zero_()  # torch's allocator gives it to whoever asks on that stream


def test_storages_are_a_parameters_own(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, own_storages)


def own_storages(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    module = gpus.adopt_module(Mlp())
    marks = [id(p) for p in module.parameters()]
    sw.wrap(module, zero=1)
    for parameter in module.parameters():
        assert parameter.untyped_storage().nbytes() == parameter.numel() * parameter.element_size()
        assert parameter.storage_offset() == 0
    assert marks == [id(p) for p in module.parameters()]


def test_what_is_not_there_is_named(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, refusals)


def refusals(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    module = gpus.adopt_module(Mlp())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(
        NotImplementedError, match="share_parameters=True, gather='int8' and write_guard= are the host's"
    ):
        sw.wrap(module, optimizer, zero=3, share_parameters=True)


FUSED = ("ours AdamW", "ours Adam", "ours SGD")


@pytest.mark.parametrize(("policy", "low"), some(itertools.product(POLICIES, (False, True)), 3))
def test_fused_optimizers_have_the_bits_of_the_cpu_in_few_launches(
    teams: Any, world_size: int, paths: dict[str, str], policy: str, low: bool
) -> None:
    names = FUSED if LONG else (FUSED[len(policy) % 3],)
    run(teams, world_size, paths, fused_steps, low, names, policy=policy)


def fused_steps(gpus: SimulatedGpus, rank: int, world_size: int, low: bool, names: tuple[str, ...] = FUSED) -> None:
    dtype = torch.bfloat16 if low else torch.float32
    launches: list[int] = []

    def steps(model: Any, optimizer: Any, rank: int) -> list[float]:
        gc.collect()
        waits = stats(model).get("host_waits", 0)
        for step in range(4):
            model(batch(rank, 6, 7, step=step).to(dtype)).float().square().mean().backward()
            before = [comm.stats()["launches"] for comm in sw_device.runtime.kernels.values()]
            optimizer.step()
            after = [comm.stats()["launches"] for comm in sw_device.runtime.kernels.values()]
            launches.append(sum(after) - sum(before))
            optimizer.zero_grad()
        assert stats(model).get("host_waits", 0) == waits
        return []

    for name in names:
        given = {"build": lambda: Mlp().to(dtype), "optimizer": name, "bucket_cap_mb": 0.001}
        with gpus.torch_on_cpu():
            expected = stages.run(0, steps, rank, deterministic=False, **given)
        for zero in in_turn((0, *STAGES), FUSED.index(name), of=3):
            launches.clear()
            stages.run(zero, steps, rank, **given).assert_equals(expected, f"{name}, zero={zero}")
            assert launches[-1] == 1, launches  # six parameters, one step count


@pytest.mark.parametrize(("policy", "half"), some(itertools.product(POLICIES, ("Fp16", "Bf16")), 5))
def test_halves_travel_with_the_bits_of_the_cpu(
    teams: Any, world_size: int, paths: dict[str, str], policy: str, half: str
) -> None:
    run(teams, world_size, paths, halves, half, policy=policy)


def halves(gpus: SimulatedGpus, rank: int, world_size: int, half: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):

        def steps(model: Any, optimizer: Any, rank: int, dtype: torch.dtype = dtype) -> list[float]:
            gc.collect()
            waits, bytes_before = stats(model).get("host_waits", 0), sw.stats()["models"][-1]["wire_bytes"]
            for step in range(3):
                model(batch(rank, 6, 7, step=step).to(dtype)).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            assert stats(model).get("host_waits", 0) == waits
            found = sw.stats()["models"][-1]
            return [found["step_wire_bytes"], found["wire_bytes"] - bytes_before]

        given = {
            "build": lambda dtype=dtype: Mlp().to(dtype),
            "bucket_cap_mb": 0.001,
            "compress": getattr(sw, half)(),
        }
        with gpus.torch_on_cpu():
            expected = stages.run(0, steps, rank, deterministic=False, **given)
        for zero in in_turn((0, *STAGES), 2 * (dtype is torch.bfloat16) + (half == "Bf16"), of=4):
            sent = stages.run(zero, steps, rank, **given)
            assert sent.losses[1] == 3 * sent.losses[0] > 0 or world_size == 1
            sent.losses = expected.losses
            sent.assert_equals(expected, f"{half}, {dtype}, zero={zero}")
    if half == "Bf16":
        return
    for body, build in ((stages.never_cleared, Mlp), (stages.some_heads, Heads)):  # on top of means that stand
        given = {"build": build, "bucket_cap_mb": 0.001, "compress": sw.Fp16(), "optimizer": "SGD"}
        with gpus.torch_on_cpu():
            expected = stages.run(2, body, rank, deterministic=False, **given)
        stages.run(2, body, rank, **given).assert_equals(expected, f"{body.__name__}, sliced")
    with pytest.raises(NotImplementedError, match="must be float32, float16 or bfloat16, not torch.float64"):
        sw.wrap(gpus.adopt_module(Mlp().double()), compress=sw.Bf16())
