"""Law: a training step makes a bounded number of driver and NCCL calls: launches, copies, events, waits, and all
together. The model has 303 parameters in 34 units, on two ranks over the simulated driver. A count above its bound
means that a change added a call to every step.

    python -m pytest -rP tests/ranks/test_a_step_enqueues_a_counted_number_of_operations.py

prints the counts, and the host's milliseconds, which on a simulated driver are comparable only with one another.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import internals
import pytest
import torch
from peer import PEER
from simulated_gpus import SimulatedGpus, run, stats, sw
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")

#: 256 bytes a parameter: units of zero=3 are released and gathered, since those of at most 128 bytes never are
PARAMETERS, UNITS, WIDTH = 303, 34, 64
COUNTED = ("launches", "copies", "records", "stream_waits", "host_waits", "allocations")
#: of a step, at most: those of COUNTED (of the communicator that averages), and all calls of the rank, and calls or groups of NCCL's after which its host
#: asks until they are done. A copy and its event, in which ranks
#: compare their steps, are left out where the one before is still on its way
BOUNDS: dict[int, tuple[int, ...]] = {
    0: (6, 1, 5, 3, 0, 0, 31, 1),
    1: (6, 1, 8, 5, 0, 0, 39, 2),
    2: (6, 1, 9, 6, 0, 0, 41, 2),
    3: (35, 1, 105, 103, 0, 0, 935, 101),
}
#: the same where the step clips: two NORMs and CLIP, which at zero >= 1 also carries before the ranks' sums are added up; at zero=1 PACKs
CLIPPED: dict[int, tuple[int, ...]] = {
    0: (9, 2, 7, 5, 0, 0, 41, 1),
    1: (14, 2, 11, 7, 0, 0, 57, 3),
    2: (9, 2, 12, 8, 0, 0, 54, 3),
    3: (38, 2, 108, 105, 0, 0, 948, 102),
}
#: of fully_shard with torch's own optimizer: those of zero=3 without its steps, one launch for each gather, and one gather
#: more, of the unit that runs last in a forward
BY_ROWS: tuple[int, ...] = (35, 1, 105, 103, 0, 0, 1006, 102)


class Block(nn.Module):
    """A block of nine parameters."""

    def __init__(self, extra: int = 0, width: int = WIDTH) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.full((width,), 0.1 * (k + 1)) for k in range(9 + extra))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(torch.stack([x * weight for weight in self.weights]).sum(0))


class Model(nn.Module):
    def __init__(self, width: int = WIDTH, blocks: int = UNITS - 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(0, width) for _ in range(blocks))
        self.ends = nn.ModuleList([Block(-1, width), Block(-2, width)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.ends[0](x)
        for block in self.blocks:
            x = block(x)
        return self.ends[1](x).square().sum()


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("zero", sorted(BOUNDS))
def test_a_steps_operations(teams: Any, paths: dict[str, str], zero: int, clips: bool) -> None:
    run(teams, 2, paths, counted, zero, clips, policy="on demand")


def test_a_unit_has_one_mean_however_small_buckets_are(teams: Any, paths: dict[str, str]) -> None:
    run(teams, 2, paths, counted, 3, False, 0.001, policy="on demand")


def counted(gpus: SimulatedGpus, rank: int, world_size: int, zero: int, clips: bool, bucket_cap_mb: float = 25) -> None:
    model = Model()
    assert len(list(model.parameters())) == PARAMETERS and len(model.blocks) + len(model.ends) == UNITS
    options: dict[str, Any] = {"bucket_cap_mb": bucket_cap_mb, **({"units": [Block]} if zero == 3 else {})}
    if clips:
        options["clip_grad_norm"] = 0.01
    found, taken = count(gpus, rank, model, WIDTH, zero=zero, **options)
    if rank == 0:
        names = (*COUNTED, "calls", "settlements")
        print(
            f"zero={zero}, clips={clips}:",
            ", ".join(f"{n} {name}" for n, name in zip(found, names)),
            f"{1e3 * taken:.0f} ms",
        )
    bounds = (CLIPPED if clips else BOUNDS)[zero]
    assert all(n <= bound for n, bound in zip(found, bounds, strict=True)), f"zero={zero}, {found}"


def test_a_steps_operations_by_rows(teams: Any, paths: dict[str, str]) -> None:
    run(teams, 2, paths, counted_by_rows, policy="on demand")


def counted_by_rows(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    module = gpus.adopt_module(Model())
    for block in (*module.blocks, *module.ends):
        sw.fully_shard(block)
    sw.fully_shard(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    found, taken = count_steps(gpus, rank, module, optimizer, WIDTH, of_units=True)
    if rank == 0:
        names = (*COUNTED, "calls", "settlements")
        print("by rows:", ", ".join(f"{n} {name}" for n, name in zip(found, names)), f"{1e3 * taken:.0f} ms")
    assert all(n <= bound for n, bound in zip(found, BY_ROWS, strict=True)), str(found)
    gathers = sw.stats(module)["models"][0]["gathers"] - 3  # of the outermost unit, which is empty, one in each step
    assert internals.replica(module).backend.row.comm.stats()["launches"] == gathers


def count(gpus: SimulatedGpus, rank: int, model: Model, width: int, **options: Any) -> tuple[tuple[int, ...], float]:
    """Return the counts of a step, and its seconds."""
    module = gpus.adopt_module(model)
    wrapped, optimizer = sw.wrap(module, sw.optim.AdamW(module.parameters(), lr=0.01), **options)
    return count_steps(gpus, rank, wrapped, optimizer, width, of_units=options["zero"] == 3)


def count_steps(
    gpus: SimulatedGpus, rank: int, wrapped: Any, optimizer: Any, width: int, *, of_units: bool
) -> tuple[tuple[int, ...], float]:
    def step() -> None:
        wrapped(torch.ones(width) * (rank + 1)).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):  # state is made, and the order of units is learnt
        step()
    gc.collect()  # an earlier module's reducer, in a cycle, would wait for its end inside the step
    gpus.synchronize()
    settlements = gpus.settlements()
    before, calls, begin = stats(wrapped), gpus.calls(), time.perf_counter()
    step()
    taken, calls, after = time.perf_counter() - begin, gpus.calls() - calls, stats(wrapped)
    found = (*(after[name] - before[name] for name in COUNTED), calls, gpus.settlements() - settlements)
    gpus.synchronize()
    gathers = sw.stats(wrapped)["models"][0].get("gathers", 0) // 3
    # of zero=3 twice a unit, but for the last one of the forward, and what the first forward gathered
    assert gathers >= 2 * (UNITS - 2) if of_units else gathers == 0, gathers
    return found, taken
