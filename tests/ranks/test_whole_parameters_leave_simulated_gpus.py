"""Law: what streams from hosts streams from GPUs, and is stored with the same bytes. Nothing races or leaks.

The CPU's tests run body for body, with modules on simulated GPUs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import test_a_model_folder_is_the_same_at_every_stage as folders
import test_whole_parameters_are_streamed as streams
from harness import at_least_two
from peer import PEER
from simulated_gpus import POLICIES, SimulatedGpus, run
from test_stages_on_simulated_gpus import OnGpu

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
QUICK_FORM_IS_THE_LARGEST_WORLD = True


@contextlib.contextmanager
def inside(gpus: SimulatedGpus) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (streams, folders):
            patch.setattr(module, "sw", OnGpu(gpus))
        patch.setattr(streams.trained, "__defaults__", (OnGpu(gpus).wrap,))
        yield


#: modules of the CPU's laws, their tests without "test_", and stages
LAWS = [
    *[("streamed", "values_are_the_whole_states", stage) for stage in ("0", "2", "3, private")],
    ("streamed", "a_rank_that_stops_alone_is_named_on_the_others", "3, private"),
    ("streamed", "adapters_are_added_to_their_weights", "3, private"),
    ("streamed", "sharding_tells_where_the_elements_lie", "3, private"),
    ("stored", "merged_adapters_are_stored", "3, private"),
    ("stored", "a_model_is_stored_under_the_names_that_it_is_loaded_from", "3, private"),
    ("stored", "a_model_is_stored_under_the_names_that_it_is_loaded_from", "1"),
]


@at_least_two
@pytest.mark.parametrize("law", range(len(LAWS)), ids=lambda at: "-".join(LAWS[at]))
def test_a_law_of_hosts_holds(teams: Any, world_size: int, paths: dict[str, str], law: int) -> None:
    run(teams, world_size, paths, keep, *LAWS[law], policy=POLICIES[law % len(POLICIES)])


def keep(gpus: SimulatedGpus, rank: int, world_size: int, module: str, name: str, stage: str) -> None:
    found: Any = {"streamed": streams, "stored": folders}[module]
    getattr(found, f"test_{name}").body(rank, world_size, stage=stage)
