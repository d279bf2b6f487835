"""Law: the promises that tests/gpu checks on real GPUs hold on simulated ones, with the same bodies, for any schedule.
So the bodies are known to run, and a failure on a GPU comes from hardware, driver or something that is not simulated.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from gpu_promises import PROMISES, Place
from internals import offload as device_offload
from peer import PEER
from simulated_gpus import POLICIES, SimulatedGpus, run

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
QUICK_FORM_IS_THE_LARGEST_WORLD = True


@contextlib.contextmanager
def inside(gpus: SimulatedGpus) -> Iterator[None]:
    """Force several batches in a step of a small model, and make launches look at all memory."""
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
