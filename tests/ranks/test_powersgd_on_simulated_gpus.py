"""Law: PowerSGD between GPUs has the bits of the CPU, in parameters and in the state between rounds. A pass is one
launch over all matrices of a bucket. The GPU decides if a round was finite, so a step in which every parameter was used
does not wait."""

from __future__ import annotations

import gc
import math
import os
from typing import Any
from unittest import mock

import pytest
import torch
from compressed_on_gpus import (
    Trained,
    accumulating,
    compare_stages,
    not_finite_once,
    resumed_from,
    running_out,
    some_heads,
    some_stages,
    steps,
)
from harness import LONG, gather, in_turn
from internals import VARIABLE, DevicePowerSGDState
from models import Heads, Layers, Mlp
from oracle.fold import bits_equal
from peer import PEER, batch
from simulated_gpus import POLICIES, SimulatedGpus, run, stats, sw
from test_checkpoint_bytes_do_not_depend_on_the_ranks import shared_folder

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
QUICK_FORM_IS_THE_LARGEST_WORLD = True

COMPRESSORS = {
    "plain": dict(rank=2, warmup_steps=2),
    "no feedback": dict(rank=1, error_feedback=False),
    "full rank": dict(rank=9, min_compression_rate=0),
    "half factors": dict(rank=2, wire_dtype=torch.bfloat16),
    "float16 factors": dict(rank=2, wire_dtype=torch.float16),
    "half memory": dict(rank=2, error_dtype=torch.bfloat16),
}


def powersgd(name: str) -> Any:
    return sw.PowerSGD(**{"min_compression_rate": 1, **COMPRESSORS[name]})


class Wide(torch.nn.Module):
    """A bucket of 51 matrices, more than one launch takes. One of them is dense but transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.randn(5 + i % 3, 6 + i % 5) for i in range(50))
        self.turned = torch.nn.Parameter(torch.randn(7, 5).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = [(x[:, : w.shape[1]] @ w[:, : x.shape[1]].t()[: x.shape[1]]).mean() for w in self.weights]
        return (x @ self.turned.t()).tanh() + torch.stack(outputs).tanh().sum()


def overflowing_once(model: Any, optimizer: Any, rank: int) -> None:
    """Train with finite gradients whose P is finite but whose Q is not, so the state restarts."""
    steps(model, optimizer, rank)
    optimizer.zero_grad()
    weight, *others = model.parameters()
    with sw.full_parameters(model):
        loss = weight.sum() * (1e38 if rank == 0 else 0) + sum(p.sum() for p in others) * 0
    loss.backward()
    name = next(name for name, _ in model.module.named_parameters())
    assert bool(sw.full_gradients(model)[name].isnan().all())
    entry = model.compression_state.state_dict()["parameters"][name]
    assert not entry["memory"].any() and not entry["right"].any() and entry["left"].any()
    optimizer.zero_grad()
    steps(model, optimizer, rank, 10)


SCENES: list[tuple[str, Any, dict[str, Any]]] = [
    ("plain", steps, {}),
    ("plain", steps, {"bucket_cap_mb": 25, "build": Wide, "stages": (0,)}),
    ("no feedback", steps, {}),
    ("full rank", steps, {"build": lambda: Mlp().to(torch.bfloat16)}),
    ("float16 factors", steps, {}),
    ("half memory", steps, {"bucket_cap_mb": 25}),
    ("half factors", not_finite_once, {"bucket_cap_mb": 25}),
    ("full rank", overflowing_once, {"bucket_cap_mb": 25}),
    ("plain", some_heads, {"build": Heads, "stages": in_turn((0, 1, 2), 2, of=3)}),
    ("half memory", accumulating, {}),
    ("plain", running_out, {"stages": (0,)}),
]
if LONG:
    SCENES += [
        ("half factors", steps, {"bucket_cap_mb": 25}),
        ("half memory", steps, {}),
        ("plain", not_finite_once, {}),
    ]
#: units have "float16 factors" (below), and so has state that travels "half memory"
QUICK = [0, 1, 2, 3, 6, 7, 8, 9, 10]


@pytest.mark.parametrize(
    "number",
    range(len(SCENES)) if LONG else QUICK,
    ids=lambda n: f"{SCENES[n][0]}, {SCENES[n][1].__name__}",
)
def test_powersgd_has_the_bits_of_the_cpu(teams: Any, world_size: int, paths: dict[str, str], number: int) -> None:
    run(teams, world_size, paths, compare, number, policy=POLICIES[number % len(POLICIES)])


def compare(gpus: SimulatedGpus, rank: int, world_size: int, number: int) -> None:
    name, scene, given = SCENES[number]
    options = dict(given)
    refused = scene in (
        not_finite_once,
        overflowing_once,
    )  # a GPU's host does not know that the round was refused
    by_bucket = "factors" in name or refused
    stages = options.pop("stages", some_stages(number, by_bucket))
    compare_stages(gpus, rank, powersgd(name), scene, options, stages, same_bytes=not refused, by_bucket=by_bucket)


class Blocks(torch.nn.Sequential):
    """Blocks of two matrices and a bias, 2,400 bytes. The cut is after the first 1,120 bytes, or there is none."""

    def __init__(self) -> None:
        super().__init__(*(Block() for _ in range(4 if LONG else 2)))


class Block(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(7, 40), torch.nn.Tanh(), torch.nn.Linear(40, 7, bias=False))


UNITS: list[tuple[str, Any, int]] = [
    ("float16 factors", steps, 2400),
    ("half factors", steps, 1120),
    ("float16 factors", not_finite_once, 1120),
    ("full rank", overflowing_once, 2400),
]
if LONG:
    UNITS += [
        ("plain", not_finite_once, 2400),
        ("half factors", steps, 2400),
        ("plain", not_finite_once, 2400),
        ("half factors", not_finite_once, 2400),
        ("half factors", overflowing_once, 1120),
        ("half memory", not_finite_once, 2400),
    ]


@pytest.mark.parametrize(
    "number", range(len(UNITS)), ids=lambda n: f"{UNITS[n][0]}, {UNITS[n][1].__name__}, {UNITS[n][2]}"
)
def test_units_that_are_the_cpu_s_buckets_have_its_bits(
    teams: Any, world_size: int, paths: dict[str, str], number: int
) -> None:
    run(teams, world_size, paths, in_units, number, policy=POLICIES[number % len(POLICIES)])


def in_units(gpus: SimulatedGpus, rank: int, world_size: int, number: int) -> None:
    """At zero=3 a bucket is a unit, and the bucket decides the owner of a rounding error and the scope of a verdict."""
    name, scene, cap_bytes = UNITS[number]
    options = {"build": Blocks, "bucket_cap_mb": cap_bytes / 2**20}
    rounds: list[int] = []
    average = DevicePowerSGDState._average_matrices

    def counted(state: Any, matrices: Any, small: Any) -> None:
        if matrices:
            rounds.append(len(matrices))
        average(state, matrices, small)

    with gpus.torch_on_cpu():
        expected = Trained(gpus, rank, powersgd(name), scene, zero=2, **options)
    with mock.patch.object(DevicePowerSGDState, "_average_matrices", counted):
        cut = torch.nn.Linear if cap_bytes == 1120 else Block
        found = Trained(gpus, rank, powersgd(name), scene, zero=3, units=cut, **options)
    of_unit = 1 if cap_bytes == 1120 else 3 if name == "full rank" else 2  # at full rank the bias counts as a matrix
    units = len(Blocks()) * (2 if cap_bytes == 1120 else 1)
    assert set(rounds) == {of_unit} and len(rounds) % units == 0 and len(rounds) >= 4 * units, rounds
    found.assert_equals(expected, name, same_bytes=False)
    assert found.waits == 0


def test_a_pass_is_one_launch(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, launches)


def launches(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    """A bucket of up to 46 matrices takes as many launches as one, except for the copies of 64 gradients."""
    found = []
    for count in (1, 30):
        model = sw.wrap(gpus.adopt_module(Layers(count)), compress=sw.PowerSGD(1, min_compression_rate=1))
        gc.collect()  # the end of an earlier one waits and would count here
        for step in range(4):
            before = stats(model)
            model(batch(rank, 5, 8, step=step)).square().sum().backward()
            model.zero_grad(set_to_none=False)
        after = stats(model)
        assert after["host_waits"] == before["host_waits"] and after["allocations"] == before["allocations"]
        found.append(after["launches"] - before["launches"])
    most = 10 + (os.environ[VARIABLE] != "nccl" and world_size > 1)  # the sum of use bytes is a launch, too
    assert found[0] == found[1] <= most, found


def test_the_first_rounds_are_plain(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, warm_up)


def warm_up(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    """The first rounds have the plain mean's bits."""
    found = []
    for options in ({"compress": sw.PowerSGD(2, warmup_steps=3, min_compression_rate=1)}, {"deterministic": True}):
        torch.manual_seed(0)
        module = gpus.adopt_module(Mlp())
        model, optimizer = sw.wrap(module, torch.optim.SGD(module.parameters(), lr=0.1), **options)
        for step in range(4):
            optimizer.zero_grad()
            model(batch(rank, 6, 7, step=step)).square().mean().backward()
            optimizer.step()
            found.append([p.detach().clone() for p in module.parameters()])
    equal = [all(bits_equal(a, b) for a, b in zip(*pair)) for pair in zip(found[:4], found[4:])]
    assert equal == [True, True, True, False], equal


def test_the_state_moves_to_the_cpu_and_back(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, travelling_state, policy="late")


def travelling_state(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    for name in ("plain", "half memory") if LONG else ("half memory",):
        with gpus.torch_on_cpu():
            begun = Trained(gpus, rank, powersgd(name), steps).owed
            expected = Trained(gpus, rank, powersgd(name), resumed_from(begun))
        found = Trained(gpus, rank, powersgd(name), resumed_from(begun))
        found.assert_equals(expected, "from the CPU")
        with gpus.torch_on_cpu():
            again = Trained(gpus, rank, powersgd(name), resumed_from(found.owed))
        Trained(gpus, rank, powersgd(name), resumed_from(found.owed)).assert_equals(again, "and back")


def test_a_checkpoint_holds_the_state(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, checkpointed, policy="on demand")


def checkpointed(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    folder = shared_folder(rank)

    def training(seed: int) -> tuple[Any, Any, Any]:
        torch.manual_seed(seed)
        module = gpus.adopt_module(Mlp())
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        model, optimizer = sw.wrap(module, optimizer, compress=powersgd("plain"), zero=1)
        return model, optimizer, sw.Checkpointer(folder, model, optimizer)

    def go_on(model: Any, optimizer: Any, checkpoints: Any, begin: int) -> None:
        for step in range(begin, 7):
            model(batch(rank, 6, 7, step=step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpoints.save(step, every=4)

    model, optimizer, checkpoints = training(0)
    with checkpoints:
        go_on(model, optimizer, checkpoints, 0)
    again, optimizer, checkpoints = training(1)
    with checkpoints:
        assert checkpoints.restore() == 4
        go_on(again, optimizer, checkpoints, 4)
    assert all(bits_equal(a, b) for a, b in zip(model.module.parameters(), again.module.parameters()))
    gather(None)


def test_the_error_is_fed_back(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, telescoping)


def telescoping(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    """The sum of results plus the ranks' mean error is the sum of the mean gradients; computed naively on the CPU."""
    for options in ({}, {"wire_dtype": torch.bfloat16}):
        torch.manual_seed(0)
        module = gpus.adopt_module(torch.nn.Linear(13, 17, bias=False))
        model = sw.wrap(module, compress=sw.PowerSGD(2, min_compression_rate=0, **options))
        came = asked = torch.zeros(17, 13, dtype=torch.float64)
        for step in range(6 if LONG else 4):
            given = batch(rank, 17, 13, step=step)
            (module_output := model(torch.eye(13)).t()).backward(given)
            assert module_output.shape == given.shape
            came = came + module.weight.grad.double()
            asked = asked + torch.stack([each.double() for each in gather(given)]).mean(0)
            model.zero_grad()
        owed = model.compression_state.errors()["weight"]
        mean = torch.stack([each.double() for each in gather(owed)]).mean(0)
        assert float((came + mean - asked).abs().max()) < 1e-5, options
        assert math.isfinite(float(came.abs().max()))


@pytest.mark.parametrize("nth", range(1, 50) if LONG else [3, 12, 21, 30])
def test_a_call_of_the_driver_that_fails_is_named(teams: Any, world_size: int, paths: dict[str, str], nth: int) -> None:
    run(teams, 1, paths, failing_call, nth)


def failing_call(gpus: SimulatedGpus, rank: int, world_size: int, nth: int) -> None:
    module = gpus.adopt_module(Mlp())
    model, optimizer = sw.wrap(module, torch.optim.SGD(module.parameters(), lr=0.1), compress=powersgd("half factors"))
    gpus.fail_call(nth, 999)
    with pytest.raises(sw.Error, match=r"CUDA_ERROR_UNKNOWN|\(999\)"):
        steps(model, optimizer, rank)
    gpus.fail_call(0, 0)
