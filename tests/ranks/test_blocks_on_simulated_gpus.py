"""Law: gradients that travel between GPUs as blocks of integers have the bits that they have between CPUs, and so has what is owed;
whether a round was finite is decided on the GPU, so that no step in which every parameter was used waits for it."""

from __future__ import annotations

import gc
import math
from typing import Any

import pytest
import torch
from harness import same_everywhere
from models import Heads, Mlp
from oracle.fold import bits_equal
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


class Trained:
    """What some steps leave: parameters, what is owed, bytes sent, GPU waits."""

    def __init__(self, gpus: SimulatedGpus, rank: int, name: str, scene: Any, **options: Any) -> None:
        torch.manual_seed(0)
        given = {"bucket_cap_mb": 0.001, **options}
        module = gpus.adopt_module(given.pop("build", Mlp)())
        optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        model, optimizer = sw.wrap(module, optimizer, compress=COMPRESSORS[name](), **given)
        gc.collect()
        waits = stats(model).get("host_waits", 0)
        scene(model, optimizer, rank)
        self.waits = stats(model).get("host_waits", 0) - waits
        found = sw.stats()["models"][-1]
        self.bytes = found["step_wire_bytes"], found["wire_bytes"]
        self.owed = model.compression_state.state_dict()
        self.parameters = [p.detach().clone() for p in module.parameters()]
        assert same_everywhere([*self.parameters])

    def assert_equals(self, other: Trained, what: str) -> None:
        assert all(bits_equal(a, b) for a, b in zip(self.parameters, other.parameters, strict=True)), what
        mine, theirs = self.owed["parameters"], other.owed["parameters"]
        assert mine.keys() == theirs.keys(), what
        assert all(bits_equal(mine[name][key], theirs[name][key]) for name in mine for key in mine[name]), what
        assert self.bytes == other.bytes, (what, self.bytes, other.bytes)


def steps(model: Any, optimizer: Any, rank: int, first: int = 0) -> None:
    dtype = next(model.parameters()).dtype
    for step in range(first, first + 4):
        model(batch(rank, 6, 7, step=step).to(dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)


def not_finite_once(model: Any, optimizer: Any, rank: int) -> None:
    steps(model, optimizer, rank)
    x = batch(rank, 6, 7, step=9)
    if rank == 0:
        x[0, 0] = math.inf
    model(x).square().mean().backward()
    assert any(not bool(p.grad.isfinite().all()) for p in model.parameters())
    optimizer.zero_grad()
    steps(model, optimizer, rank, 10)


def some_heads(model: Any, optimizer: Any, rank: int) -> None:
    for step, heads in enumerate(["left right", "left", "left" if rank == 0 else "left right", "left right"]):
        model(batch(rank, 6, 7, step=step), heads).backward()
        optimizer.step()
        optimizer.zero_grad()


def accumulating(model: Any, optimizer: Any, rank: int) -> None:
    for step in range(3):
        with model.no_sync():
            model(batch(rank, 6, 7, step=10 * step)).square().mean().backward()
        for part in (1, 2):
            model(batch(rank, 6, 7, step=10 * step + part)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def running_out(model: Any, optimizer: Any, rank: int) -> None:
    with model.join():
        for step in range(1 + rank):
            model(batch(rank, 6, 7, step=step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


SCENES: list[tuple[str, Any, dict[str, Any]]] = [
    ("int8", steps, {}),
    ("int8 with feedback", steps, {"bucket_cap_mb": 25}),
    ("int4", steps, {}),
    ("int4 without", steps, {"build": lambda: Mlp().to(torch.bfloat16)}),
    ("int8 with feedback", not_finite_once, {}),
    ("int4", not_finite_once, {"bucket_cap_mb": 25}),
    ("int4", some_heads, {"build": Heads}),
    ("int8 with feedback", accumulating, {}),
    ("int8", running_out, {"stages": (0,)}),
]


@pytest.mark.parametrize("number", range(len(SCENES)), ids=lambda n: f"{SCENES[n][0]}, {SCENES[n][1].__name__}")
def test_blocks_have_the_bits_of_the_cpu(teams: Any, world_size: int, paths: dict[str, str], number: int) -> None:
    run(teams, world_size, paths, compare, number, policy=POLICIES[number % len(POLICIES)])


def compare(gpus: SimulatedGpus, rank: int, world_size: int, number: int) -> None:
    name, scene, given = SCENES[number]
    options = dict(given)
    stages = options.pop("stages", (0, 1))
    with gpus.torch_on_cpu():
        expected = Trained(gpus, rank, name, scene, **options)
    for zero in stages:
        found = Trained(gpus, rank, name, scene, zero=zero, **options)
        found.assert_equals(expected, f"zero={zero}")
        assert found.waits == 0 or scene in (some_heads, running_out), found.waits


def test_what_is_owed_is_saved_and_goes_to_the_cpu_and_back(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, travelling_errors, policy="late")


def travelling_errors(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    def resumed(state: dict[str, Any]) -> Any:
        def scene(model: Any, optimizer: Any, rank: int) -> None:
            model.compression_state.load_state_dict(state)
            steps(model, optimizer, rank)

        return scene

    with gpus.torch_on_cpu():
        begun = Trained(gpus, rank, "int4", steps).owed
        expected = Trained(gpus, rank, "int4", resumed(begun))
    found = Trained(gpus, rank, "int4", resumed(begun))
    found.assert_equals(expected, "from the CPU")
    with gpus.torch_on_cpu():
        Trained(gpus, rank, "int4", resumed(found.owed))


def test_what_does_not_work_there_is_named(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, refusals)


def refusals(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    with pytest.raises(NotImplementedError, match=r"compress=PowerSGD.* at zero=0 is not there yet on GPUs"):
        sw.wrap(gpus.adopt_module(Mlp()), compress=sw.PowerSGD())
    with pytest.raises(NotImplementedError, match=r"compress=Int8.* at zero=2 is not there yet on GPUs"):
        sw.wrap(gpus.adopt_module(Mlp()), zero=2, compress=sw.Int8())
    wrapped = sw.wrap(gpus.adopt_module(Mlp()))
    for compress, why in ((sw.Fp16(), "on GPUs is the reducer's own"), (sw.PowerSGD(), "is not there yet on GPUs")):
        with pytest.raises(NotImplementedError, match=why):
            wrapped.compress_gradients(compress)
    for state, hook in (
        (None, sw.hooks.fp16_compress_hook),
        (None, sw.hooks.int8_compress_hook),
        (sw.hooks.PowerSGDState(None), sw.hooks.powerSGD_hook),
    ):
        wrapped = sw.wrap(gpus.adopt_module(Mlp()))
        wrapped.register_comm_hook(state, hook)
        with pytest.raises(NotImplementedError, match="work on the CPU, and this bucket is on a GPU"):
            wrapped(batch(rank, 6, 7)).square().mean().backward()


@pytest.mark.parametrize("nth", [4, 25, 41])
def test_a_call_of_the_driver_that_fails_is_named(teams: Any, world_size: int, paths: dict[str, str], nth: int) -> None:
    run(teams, 1, paths, failing_call, nth)


def failing_call(gpus: SimulatedGpus, rank: int, world_size: int, nth: int) -> None:
    module = gpus.adopt_module(Mlp())
    model, optimizer = sw.wrap(module, torch.optim.SGD(module.parameters(), lr=0.1), compress=sw.Int4())
    gpus.fail_call(nth, 999)
    with pytest.raises(sw.Error, match=r"CUDA_ERROR_UNKNOWN|\(999\)"):
        steps(model, optimizer, rank)
    gpus.fail_call(0, 0)
