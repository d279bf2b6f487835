"""Law: gradients that travel between GPUs as blocks of integers have the bits of the CPU, and so does the error. A pass
is one launch for all parameters of a bucket. The GPU decides if a round was finite, so a step that used every parameter
does not wait.
"""

from __future__ import annotations

import gc
import os
from typing import Any

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
from harness import LONG
from internals import VARIABLE
from models import Heads, Layers, Mlp
from peer import PEER, batch
from simulated_gpus import POLICIES, SimulatedGpus, run, stats, sw

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
QUICK_FORM_IS_THE_LARGEST_WORLD = True

COMPRESSORS = {
    "int8": lambda: sw.Int8(),
    "int8 with feedback": lambda: sw.Int8(block=32, error_feedback=True),
    "int4": lambda: sw.Int4(block=32),
    "int4 without": lambda: sw.Int4(error_feedback=False),
}


SCENES: list[tuple[str, Any, dict[str, Any]]] = [
    ("int8", steps, {}),
    ("int8 with feedback", steps, {"bucket_cap_mb": 25}),
    ("int4", steps, {}),
    ("int4 without", steps, {"build": lambda: Mlp().to(torch.bfloat16)}),
    ("int8 with feedback", not_finite_once, {}),
    ("int4", not_finite_once, {"bucket_cap_mb": 25}),
    ("int4", some_heads, {"build": Heads, "stages": (0, 1, 2)}),
    ("int8 with feedback", accumulating, {}),
    ("int8", running_out, {"stages": (0,)}),
]


@pytest.mark.parametrize("number", range(len(SCENES)), ids=lambda n: f"{SCENES[n][0]}, {SCENES[n][1].__name__}")
def test_blocks_have_the_bits_of_the_cpu(teams: Any, world_size: int, paths: dict[str, str], number: int) -> None:
    run(teams, world_size, paths, compare, number, policy=POLICIES[number % len(POLICIES)])


def compare(gpus: SimulatedGpus, rank: int, world_size: int, number: int) -> None:
    name, scene, given = SCENES[number]
    options = dict(given)
    by_bucket = COMPRESSORS[name]().error_feedback
    stages = options.pop("stages", some_stages(number, by_bucket))
    compare_stages(gpus, rank, COMPRESSORS[name](), scene, options, stages, by_bucket=by_bucket)


def test_the_error_is_saved_and_moves_to_the_cpu_and_back(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, travelling_errors, policy="late")


def travelling_errors(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    with gpus.torch_on_cpu():
        begun = Trained(gpus, rank, sw.Int4(block=32), steps).owed
        expected = Trained(gpus, rank, sw.Int4(block=32), resumed_from(begun))
    found = Trained(gpus, rank, sw.Int4(block=32), resumed_from(begun))
    found.assert_equals(expected, "from the CPU")
    with gpus.torch_on_cpu():
        Trained(gpus, rank, sw.Int4(block=32), resumed_from(found.owed))


def test_unsupported_options_are_named(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, refusals)


def refusals(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    wrapped = sw.wrap(gpus.adopt_module(Mlp()))
    with pytest.raises(NotImplementedError, match="on GPUs is the reducer's own"):
        wrapped.compress_gradients(sw.Fp16())
    for state, hook in (
        (None, sw.hooks.fp16_compress_hook),
        (None, sw.hooks.int8_compress_hook),
        (sw.hooks.PowerSGDState(None), sw.hooks.powerSGD_hook),
    ):
        wrapped = sw.wrap(gpus.adopt_module(Mlp()))
        wrapped.register_comm_hook(state, hook)
        with pytest.raises(NotImplementedError, match="support buckets on the CPU only"):
            wrapped(batch(rank, 6, 7)).square().mean().backward()


def on_three(test: Any) -> Any:
    test.exactly = 3
    return test


@on_three
def test_a_pass_is_one_launch(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, launches)


def launches(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    """A bucket of 30 parameters takes as many launches as one of three. A launch covers 100 parts, or 64 copies."""
    for compress in COMPRESSORS.values() if LONG else (COMPRESSORS["int8"], COMPRESSORS["int4"]):
        owes, slots = compress().error_feedback, os.environ[VARIABLE] != "nccl"  # with slots a sum is a launch
        counts = (3, 30, 120) if LONG or owes else (3, 30)
        if LONG or not owes:
            few, some, *many = (launched(gpus, rank, count, compress(), 0) for count in counts)
            assert few == some == 1 + slots + 3 + 2 * owes  # use bytes; encode, fold, decode; a verdict and the error
            assert all(each == some + 2 for each in many)  # encode and decode
        if not LONG and not owes:
            continue
        few, some, *many = (launched(gpus, rank, count, compress(), 2) for count in counts)
        # a copy into the place; the sum of verdicts; errors apart
        assert few == some == 1 + slots + 4 + 4 * owes
        assert all(each == some + 2 + owes for each in many)  # the copy, encode, errors; a third of all is decoded


def launched(gpus: SimulatedGpus, rank: int, count: int, compress: Any, zero: int) -> int:
    """Return the launches of one step, which neither waits nor allocates."""
    module = gpus.adopt_module(Layers(count))
    model, _ = sw.wrap(module, torch.optim.SGD(module.parameters(), lr=0.1), compress=compress, zero=zero)
    gc.collect()  # the end of an earlier one waits and would count here
    for step in range(3):
        before = stats(model)
        model(batch(rank, 5, 8, step=step)).square().sum().backward()
        model.zero_grad(set_to_none=False)
    after = stats(model)
    assert after["host_waits"] == before["host_waits"] and after["allocations"] == before["allocations"]
    return after["launches"] - before["launches"]


@pytest.mark.parametrize("nth", [4, 21, 33])
def test_a_call_of_the_driver_that_fails_is_named(teams: Any, world_size: int, paths: dict[str, str], nth: int) -> None:
    run(teams, 1, paths, failing_call, nth)


def failing_call(gpus: SimulatedGpus, rank: int, world_size: int, nth: int) -> None:
    module = gpus.adopt_module(Mlp())
    model, optimizer = sw.wrap(module, torch.optim.SGD(module.parameters(), lr=0.1), compress=sw.Int4())
    gpus.fail_call(nth, 999)
    with pytest.raises(sw.Error, match=r"CUDA_ERROR_UNKNOWN|\(999\)"):
        steps(model, optimizer, rank)
    gpus.fail_call(0, 0)
