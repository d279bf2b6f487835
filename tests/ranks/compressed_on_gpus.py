"""Common parts of the tests of compressors on simulated GPUs: a training, its results, and scenes for it."""

from __future__ import annotations

import gc
import math
from typing import Any

import torch
from harness import LONG, same_everywhere
from models import Mlp
from oracle.fold import bits_equal
from peer import batch
from simulated_gpus import SimulatedGpus, stats, sw


class Trained:
    """The results of some steps: parameters, errors, bytes sent, host waits."""

    def __init__(self, gpus: SimulatedGpus, rank: int, compress: Any, scene: Any, **options: Any) -> None:
        torch.manual_seed(0)
        given = {"bucket_cap_mb": 0.001, **options}
        module = gpus.adopt_module(given.pop("build", Mlp)())
        optimizer: Any = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        model, optimizer = sw.wrap(module, optimizer, compress=compress, **given)
        gc.collect()
        waits = stats(model).get("host_waits", 0)
        scene(model, optimizer, rank)
        self.waits = stats(model).get("host_waits", 0) - waits
        found = sw.stats()["models"][-1]
        self.bytes = found.get("step_wire_bytes"), found.get("wire_bytes")
        state = model.compression_state
        self.owed = {"parameters": {}} if state is None else state.state_dict()
        self.parameters = [value.clone() for value in sw.full_state_dict(model).values()]
        assert same_everywhere([*self.parameters])

    def assert_equals(self, other: Trained, what: str, *, same_bytes: bool = True, same_state: bool = True) -> None:
        assert all(bits_equal(a, b) for a, b in zip(self.parameters, other.parameters, strict=True)), what
        mine, theirs = self.owed["parameters"], other.owed["parameters"]
        assert mine.keys() == theirs.keys(), what
        assert not same_state or all(
            bits_equal(mine[name][key], theirs[name][key]) for name in mine for key in mine[name]
        ), what
        assert not same_bytes or self.bytes == other.bytes, (what, self.bytes, other.bytes)


def compare_stages(
    gpus: SimulatedGpus,
    rank: int,
    compress: Any,
    scene: Any,
    options: dict[str, Any],
    stages: tuple[int, ...],
    *,
    same_bytes: bool = True,
    by_bucket: bool = False,
) -> None:
    """Compare each stage on GPUs with the CPU; at zero=1 also stage 0's wire bytes, at zero=3 stage 2's bits.

    `by_bucket`: bits depend on the parameters of a bucket, which at zero=3 is a unit.
    """
    with gpus.torch_on_cpu():
        expected = {
            zero: Trained(gpus, rank, compress, scene, zero=zero, **options) for zero in {2 * (z // 2) for z in stages}
        }
    for zero in stages:
        if zero == 3 and by_bucket:
            continue
        found = Trained(gpus, rank, compress, scene, zero=zero, **options)
        whole = zero < 2
        other = expected[0 if whole else 2]
        found.assert_equals(other, f"zero={zero}", same_bytes=same_bytes and whole)
        if zero == 2:  # a verdict takes four bytes
            assert found.bytes[1] <= other.bytes[1] * 1.1, (found.bytes, other.bytes)
        assert found.waits == 0 or scene in (some_heads, running_out), found.waits


def some_stages(number: int, by_bucket: bool = False) -> tuple[int, ...]:
    """Return the stages of scene `number`: all in the long form, else one that compare_stages() does not skip."""
    stages = (0, 2, 1) if by_bucket else (3, 1, 0, 2)
    return (0, 1, 2, 3) if LONG else (stages[number % len(stages)],)


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
    assert any(not bool(gradient.isfinite().all()) for gradient in sw.full_gradients(model).values())
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


def running_out_of_the_mean(model: Any, optimizer: Any, rank: int) -> None:
    """Average over the ranks that still train, then over all ranks again."""
    dtype = next(model.parameters()).dtype
    with model.join(divide_by_initial_world_size=False):
        for step in range(2 + rank):
            optimizer.zero_grad()
            model(batch(rank, 6, 7, step=step).to(dtype)).float().square().mean().backward()
            optimizer.step()
    optimizer.state.clear()  # a joined rank now has its peers' model, but its own momentum
    steps(model, optimizer, rank, 20)


def running_out(model: Any, optimizer: Any, rank: int) -> None:
    with model.join():
        for step in range(1 + rank):
            model(batch(rank, 6, 7, step=step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def resumed_from(state: dict[str, Any]) -> Any:
    """Return a scene that starts from a saved error."""

    def scene(model: Any, optimizer: Any, rank: int) -> None:
        model.compression_state.load_state_dict(state)
        steps(model, optimizer, rank)

    return scene
