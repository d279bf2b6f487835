"""Law: what tests/gpu asks of real GPUs holds on simulated ones, the same bodies, whatever the schedule: so they are known to run before there is a
GPU, and a failure there is the hardware's, or the driver's, or what no simulation has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from gpu_promises import PROMISES, Place
from peer import PEER
from shardwright.optim import device_offload
from simulated_gpus import POLICIES, SimulatedGpus, run

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
QUICK_FORM_IS_THE_LARGEST_WORLD = True


@contextlib.contextmanager
def inside(gpus: SimulatedGpus) -> Iterator[None]:
    """Several batches in a step of a small model; and launches look at all memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_offload, "SLOT_BYTES", 1 << 12)
        yield


@pytest.mark.parametrize("name", PROMISES)
def test_a_promise_of_real_gpus(teams: Any, world_size: int, paths: dict[str, str], name: str) -> None:
    run(
        teams,
        world_size,
        paths,
        promise,
        name,
        policy=POLICIES[list(PROMISES).index(name) % len(POLICIES)],
        transport="nccl",
    )


def promise(gpus: SimulatedGpus, rank: int, world_size: int, name: str) -> None:
    PROMISES[name](Place("simulated", rank, gpus), rank, world_size)
