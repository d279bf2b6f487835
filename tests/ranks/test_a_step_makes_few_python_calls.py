"""Law: a step makes few calls in Python, and as few on a GPU as on the host: a backward seven, whatever the number of parameters.

The bounds are what was counted; one that is passed is a call that somebody has added to every step.
"""

from __future__ import annotations

from typing import Any

import pytest
from harness import gather, on_every_rank
from peer import PEER
from python_calls import STAGES, Counts, profile_step
from simulated_gpus import SimulatedGpus, run

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")

#: Python calls, at most: of a forward, a backward, a step
HOST = {"zero=0": (20, 7, 14), "zero=2": (20, 7, 183), "zero=3": (208, 101, 237)}
GPU = {"zero=0": (26, 7, 14), "zero=2": (26, 7, 182), "zero=3": (332, 197, 275)}


def check(found: dict[str, Counts], most: tuple[int, ...]) -> None:
    for (phase, counts), bound in zip(found.items(), most, strict=True):
        assert sum(counts.calls.values()) <= bound, f"{phase}: {counts}\n{counts.calls}\n{counts.engine}"
    gather(0)  # a rank that fails tells the others by not coming


@pytest.mark.parametrize("stage", STAGES)
@on_every_rank(exactly=2)
def test_on_the_host(rank: int, world_size: int, stage: str) -> None:
    check(profile_step(lambda module: module, **STAGES[stage]), HOST[stage])


@pytest.mark.parametrize("stage", STAGES)
def test_on_a_gpu(teams: Any, paths: dict[str, str], stage: str) -> None:
    run(teams, 2, paths, on_gpu, stage)


def on_gpu(gpus: SimulatedGpus, rank: int, world_size: int, stage: str) -> None:
    options = {key: value for key, value in STAGES[stage].items() if key != "share_parameters"}
    check(profile_step(gpus.adopt_module, **options), GPU[stage])
