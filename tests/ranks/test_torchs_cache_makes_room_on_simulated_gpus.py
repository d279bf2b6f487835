"""Law: if torch's allocator caches a GPU's memory, the engine's own allocations make it free what it does not use, and
training has the bits of the CPU. If memory still does not suffice, the error names the size on the failing rank, and
wrapping again works once there is room.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_promises import Place, assert_bits, steps, whole, wrapped
from harness import gather
from peer import PEER
from simulated_gpus import SimulatedGpus, run

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
QUICK_FORM_IS_THE_LARGEST_WORLD = True
CACHE_BYTES = 1 << 20
OPTIONS: tuple[dict[str, Any], ...] = ({"zero": 0}, {"zero": 2}, {"zero": 3})


def test_a_full_cache_gives_memory_back(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, full_cache, policy="on demand")


def full_cache(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    place = Place("simulated", rank, gpus)
    with place.aside():
        twin = wrapped(None, {})
        steps(*twin, rank, torch.device("cpu"))
        expected = whole(*twin)
    for options in OPTIONS:
        gpus.rooms = 0
        gpus.limit_memory(gpus.memory_in_use() + CACHE_BYTES, cached_bytes=CACHE_BYTES)
        ours = wrapped(place, options)
        assert gpus.rooms >= 1, options
        steps(*ours, rank, place.device)
        assert_bits(whole(*ours), expected, options)
        del ours
    gpus.limit_memory(0)


def test_a_full_card_is_named(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, full_card, policy="eager")


def full_card(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    place = Place("simulated", rank, gpus)
    first = wrapped(place, {})  # has the GPU opened
    steps(*first, rank, place.device, 1)
    gpus.limit_memory(gpus.memory_in_use() + 1)
    with pytest.raises(MemoryError, match=r"cuMemAlloc_v2 failed for \d+ bytes on GPU 0: CUDA_ERROR_OUT_OF_MEMORY"):
        wrapped(place, {})
    assert gpus.rooms >= 1
    gpus.limit_memory(0)
    gather(None)
    steps(*wrapped(place, {}), rank, place.device, 1)
