"""Law: no rank waits for another one's host where a driver or NCCL waits in the worst case. Calls that allocate, free or load
wait for all work of the GPU; torch loads each kernel at its first use; a GPU has room for one collective, and starts
them in the order of its host's calls. Laws of other files hold then too, and a planted difference of order does not.

`SIM_STRICT=all pytest tests/ranks/test_x_on_simulated_gpus.py` runs a whole file so.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import test_checkpoints_on_simulated_gpus as checkpoints
import test_hooks_and_join_on_simulated_gpus as hooks
import test_modules_on_simulated_gpus as modules
import test_offload_on_simulated_gpus as offload
import test_stages_on_simulated_gpus as stages
import test_units_on_simulated_gpus as units
import test_unused_parameters_hold_up_no_rank_on_simulated_gpus as unused
import torch
from harness import at_least_two, gather
from internals import process_group
from peer import PEER
from simulated_gpus import POLICIES, SimulatedGpus, run, sw
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
QUICK_FORM_IS_THE_LARGEST_WORLD = True

SCENES: list[tuple[Any, tuple[Any, ...]]] = [
    (units.quiet_steps, ("blocks", None)),
    (units.evaluated, ()),
    (unused.unused, ()),
    (stages.travelling_state, ()),
    (offload.scaled, (2,)),
    (checkpoints.into_memory, (True,)),
    (hooks.quiet_hook, (2,)),
    (modules.gpt_scene, ()),
]


@pytest.mark.parametrize("number", range(len(SCENES)), ids=lambda number: SCENES[number][0].__name__)
def test_laws_hold(teams: Any, world_size: int, paths: dict[str, str], number: int) -> None:
    scene, arguments = SCENES[number]
    run(teams, world_size, paths, scene, *arguments, policy=POLICIES[number % len(POLICIES)], strict="all")


@at_least_two
@pytest.mark.parametrize("strict", ["lazy", ""])
def test_a_first_operation_waits_for_all_work(teams: Any, world_size: int, paths: dict[str, str], strict: str) -> None:
    run(teams, world_size, paths, first_of_its_kind, bool(strict), transport="nccl", strict=strict)


def first_of_its_kind(gpus: SimulatedGpus, rank: int, world_size: int, is_lazy: bool) -> None:
    """Rank 0 calls an operation of torch while a gather, on another stream, waits for the other ranks."""
    model = sw.wrap(gpus.adopt_module(nn.Linear(8, 8)), zero=0)
    (link,) = (link for group in process_group.live_groups() for link in group.links.values())
    received, other = gpus.adopt(torch.zeros(world_size)), gpus.adopt(torch.ones(4))
    late, torchs = gpus.folder / "late", gpus.stream
    gather(None)
    with gpus.other_stream() as aside:
        if rank:
            time.sleep(0.3)
            late.touch()
        link.comm.follow(aside, torchs)
        link.comm.all_gather([(received.data_ptr(), world_size, "float32")], aside)
    if rank == 0:
        other.erfinv_()
        assert late.exists() == is_lazy
        other.erfinv_()  # is loaded
    gather(None)
    link.comm.follow(torchs, aside)
    gpus.synchronize()
    del model
