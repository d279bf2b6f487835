"""Law: through slots in memory of the host or of the GPUs, ranks have the bits that they have through NCCL and on the
CPU, for any schedule. The quick form runs some scenes of the other files, the long form all. All ranks report the same
transport. An impossible choice, a missing rank and a failing driver are one sentence on all of them.
"""

from __future__ import annotations

import gc
import os
import pathlib
import subprocess
import sys
from typing import Any

import internals
import pytest
import test_a_capture_is_refused_on_simulated_gpus as captures
import test_blocks_on_simulated_gpus as blocks
import test_checkpoints_on_simulated_gpus as checkpoints
import test_hooks_and_join_on_simulated_gpus as hooks
import test_modules_on_simulated_gpus as modules
import test_offload_on_simulated_gpus as offload
import test_powersgd_on_simulated_gpus as powersgd
import test_sliced_join_on_simulated_gpus as sliced_join
import test_stages_on_simulated_gpus as stages
import test_units_on_simulated_gpus as units
import torch
from harness import at_least_two, gather
from internals import VARIABLE, choose_transport, host_group, slot_part_bytes
from internals import transport as device_transport
from models import Mlp
from peer import PEER, batch
from simulated_gpus import POLICIES, SimulatedGpus, run, sw

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
QUICK_FORM_IS_THE_LARGEST_WORLD = True
LONG = os.environ.get("SW_TEST_LONG") == "1"
WAYS = ("shm", "ipc")
HERE = pathlib.Path(__file__).parent

SCENES: list[tuple[Any, ...]] = [
    (modules.mlp,),
    (modules.wait_scene,),
    (modules.nccls_mean,),
    (modules.buffer_scene,),
    (stages.train_at_every_stage, "plain_steps"),
    (stages.quiet_steps, 1),
    (stages.quiet_steps, 2),
    (stages.halves, "Bf16"),
    (units.quiet_steps, "blocks", None),
    (blocks.compare, 0),
    (powersgd.compare, 2),
    (offload.every_stage, "AdamW", "cpu"),
    (checkpoints.every_stage, "sw.AdamW", "copy"),
    (sliced_join.train, "plain"),
    (hooks.quiet_hook, 0),
    (captures.refused, 3),
    (captures.refused, 0),
]
#: of NCCL alone
NCCLS = {
    "test_communicators_are_borrowed_on_simulated_gpus.py",
    "test_the_transport_only_adds_on_simulated_gpus.py",  # slots fold
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "number", range(len(SCENES)), ids=lambda n: f"{SCENES[n][0].__module__[5:-18]}-{SCENES[n][0].__name__}"
)
def test_the_scenes_of_the_others_hold(
    teams: Any, world_size: int, paths: dict[str, str], number: int, way: str
) -> None:
    if not LONG and (number + WAYS.index(way)) % 2:
        pytest.skip("the other way, in the quick form")
    scene, *given = SCENES[number]
    run(teams, world_size, paths, scene, *given, policy=POLICIES[number % len(POLICIES)], transport=way)


@pytest.mark.skipif(not LONG, reason="long form only (SW_TEST_LONG=1)")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "file",
    sorted(f for f in HERE.glob("test_*_on_simulated_gpus.py") if f.name not in {pathlib.Path(__file__).name, *NCCLS}),
    ids=lambda f: f.stem,
)
def test_whole_files(file: pathlib.Path, way: str) -> None:
    """The quick form runs each scene with one policy, in turns."""
    settings = {**os.environ, VARIABLE: way, "SW_TEST_WORLDS": "3", "SW_TEST_LONG": "0"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(file)]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-4000:]


# which way ----------------------------------------------------------------------------------------------------------


def offers(**changed: Any) -> list[dict[str, Any]]:
    """Run on three ranks with a GPU each. `changed` maps rank to arguments: r0=dict(...)."""
    plain = {"wanted": "auto", "nccl": [2, 21, 0], "nccl_missing": "", "nccl_shares": False}
    return [
        {**plain, "address": f"0000:0{r}:00", **changed.get(f"r{r}", {}), **changed.get("all", {})} for r in range(3)
    ]


SHARED = {"address": "0000:00:00"}
CHOICES = [
    (offers(), (0, 0, 0), "nccl", ""),
    (offers(), (0, 0, 1), "nccl", ""),
    (offers(r2=SHARED), (0, 0, 0), "auto", "ranks 0 and 2 share the GPU at 0000:00:00, which NCCL 2.21.0 refuses"),
    (offers(r2=SHARED), (0, 0, 1), "nccl", ""),
    (offers(r2=SHARED, all={"nccl": [2, 30, 1], "nccl_shares": True}), (0, 0, 0), "nccl", ""),
    (offers(r2=SHARED, all={"nccl": [2, 29, 9], "nccl_shares": True}), (0, 0, 0), "auto", "share the GPU"),
    (offers(r1={"nccl_missing": "no libnccl"}), (0, 0, 0), "auto", "rank 1 cannot use its GPU with others: no libnccl"),
    (offers(all={"wanted": "shm"}), (0, 0, 0), "shm", VARIABLE),
    (offers(all={"wanted": "ipc"}), (0, 0, 0), "ipc", VARIABLE),
    (offers(all={"wanted": "nccl"}), (0, 0, 1), "nccl", ""),
]
REFUSALS = [
    (offers(all={"wanted": "shm"}), (0, 0, 1), NotImplementedError, "is for GPUs of one host, and the ranks run on 2"),
    (offers(r1=SHARED), (0, 0, 1), NotImplementedError, "ranks 0 and 1 share the GPU"),
    (offers(r1=SHARED, all={"wanted": "nccl"}), (0, 0, 0), NotImplementedError, "ranks 0 and 1 share the GPU"),
    (offers(r2={"nccl_missing": "no libnccl"}), (0, 1, 1), NotImplementedError, "rank 2 cannot use its GPU"),
    (offers(r1={"wanted": "shm"}), (0, 0, 0), ValueError, "equal on all ranks: rank 0 has 'auto', rank 1 'shm'"),
]


@pytest.mark.parametrize(("given", "host_of", "chosen", "why"), CHOICES)
def test_the_way_is_nccl_unless_it_cannot_be(given: Any, host_of: Any, chosen: str, why: str) -> None:
    found, reason = choose_transport(given, host_of)
    assert found == chosen and why in reason and bool(why) == bool(reason)


@pytest.mark.parametrize(("given", "host_of", "kind", "says"), REFUSALS)
def test_what_cannot_be_is_named(given: Any, host_of: Any, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        choose_transport(given, host_of)


@pytest.mark.parametrize("wanted", ["auto", "nccl"])
def test_borrowing_is_nccls(wanted: str) -> None:
    """Sharing of a GPU is not checked: a communicator of torch shows that these ranks can."""
    assert choose_transport(offers(r2=SHARED, all={"wanted": wanted}), (0, 0, 0), True) == ("nccl", "")
    for way in WAYS:
        with pytest.raises(NotImplementedError, match=f"needs NCCL, but {VARIABLE}={way} asks for slots"):
            choose_transport(offers(all={"wanted": way}), (0, 0, 0), True)
    with pytest.raises(NotImplementedError, match="needs NCCL, but rank 2 cannot use its GPU .*: no libnccl"):
        choose_transport(offers(r2={"nccl_missing": "no libnccl"}, all={"wanted": wanted}), (0, 0, 0), True)


@at_least_two
def test_ranks_that_share_a_gpu_find_a_way(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, sharing, transport="auto")


def sharing(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SIM_BUS", "7")
        wrapped = sw.wrap(gpus.adopt_module(Mlp()))
        reducer = internals.reducer(wrapped)
        assert reducer.transport == "ipc"
        said = "slots in the GPUs' memory (ranks 0 and 1 share the GPU at 0000:07:00, which NCCL 2.21.0 refuses"
        assert said in reducer.transport_reason
        assert said in str(sw.describe())
        wrapped(batch(rank, 6, 7)).sum().backward()


@at_least_two
def test_without_nccl_ranks_of_one_host_find_a_way(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, without_nccl, transport="auto")


def without_nccl(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if rank == world_size - 1:
            patch.setenv("SIM_NCCL_VERSION", "21305")
        if rank == 0:
            patch.setenv("SIM_NO_IPC", "1")  # so that of all ranks the slots are in the host's memory
        wrapped, naive = modules.on_gpu(gpus, Mlp, bucket_cap_mb=0.001)
        assert internals.reducer(wrapped).transport == "shm"
        assert "is NCCL 2.13.5: 2.14 or newer" in internals.reducer(wrapped).transport_reason
        modules.train(rank, wrapped, naive)


@at_least_two
def test_what_a_rank_cannot_do_is_named_on_all(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, refused, transport="ipc")


def refused(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    last = world_size - 1
    with pytest.MonkeyPatch.context() as patch:
        if rank == last:
            patch.setenv("SIM_NO_IPC", "1")
        with pytest.raises(
            NotImplementedError, match=f"rank {last} of {world_size} cannot place them in its GPU's memory"
        ) as caught:
            sw.wrap(gpus.adopt_module(Mlp()))
    assert len(set(gather(str(caught.value)))) == 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "shm" if rank == last else "ipc")
        with pytest.raises(ValueError, match=f"rank 0 has 'ipc', rank {last} 'shm'"):
            sw.wrap(gpus.adopt_module(Mlp()))
        patch.setenv(VARIABLE, "ib")
        with pytest.raises(ValueError, match="must be one of auto, nccl, shm, ipc, got 'ib'"):
            sw.wrap(gpus.adopt_module(Mlp()))


@at_least_two
def test_slots_over_several_hosts_are_an_error_on_all(teams: Any, world_size: int, paths: dict[str, str]) -> None:
    run(teams, world_size, paths, over_hosts, transport="shm")


def over_hosts(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    group = host_group(torch.distributed.group.WORLD, 60.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "host_of", [0] * (world_size - 1) + [world_size - 1])
        with pytest.raises(NotImplementedError, match="is for GPUs of one host, and the ranks run on 2") as caught:
            sw.wrap(gpus.adopt_module(Mlp()))
    assert len(set(gather(str(caught.value)))) == 1


@pytest.mark.parametrize("way", WAYS)
def test_a_second_connection_is_refused_and_leaves_the_first(
    teams: Any, world_size: int, paths: dict[str, str], way: str
) -> None:
    run(teams, world_size, paths, connected_twice, way, transport=way)


def connected_twice(gpus: SimulatedGpus, rank: int, world_size: int, way: str) -> None:
    wrapped, naive = modules.on_gpu(gpus, Mlp, bucket_cap_mb=0.001)
    link = internals.link(wrapped)
    size = device_transport.SLOT_BYTES
    arena = link.host.arena(slot_part_bytes(size), "other slots")
    with pytest.raises(sw.Error, match=f"connected already, as rank {rank} of {world_size}"):
        link.comm.connect_slots(arena, range(world_size), size, way, rank, 5.0)
    del arena
    gc.collect()
    modules.train(rank, wrapped, naive)


# what fails ---------------------------------------------------------------------------------------------------------


@at_least_two
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("host_waits", [True, False], ids=["in the engine", "in torch"])
def test_a_rank_that_does_not_come_is_told_at_the_deadline(
    teams: Any, world_size: int, paths: dict[str, str], host_waits: bool, way: str
) -> None:
    if not LONG and host_waits != (way == "ipc"):
        pytest.skip("the other way, in the quick form")
    run(teams, world_size, paths, modules.absent_rank, host_waits, transport=way)


@at_least_two
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("nth", [8, 24, 31] if not LONG else range(1, 60, 3))
def test_a_call_of_one_ranks_driver_that_fails_is_named_on_all(
    teams: Any, world_size: int, paths: dict[str, str], nth: int, way: str
) -> None:
    """Rank 1 fails during creation, or in a step."""
    run(teams, world_size, paths, failing_call, nth, transport=way)


def failing_call(gpus: SimulatedGpus, rank: int, world_size: int, nth: int) -> None:
    gpus.watch()
    if rank == 1:
        gpus.fail_call(nth, 999)
    with pytest.raises(
        (sw.Error, NotImplementedError, MemoryError), match=r"CUDA_ERROR_UNKNOWN|\(999\)|has met an error"
    ) as caught:
        torch.manual_seed(0)
        wrapped = sw.wrap(gpus.adopt_module(Mlp()), timeout_s=20.0, bucket_cap_mb=0.001)
        for step in range(20):
            wrapped(batch(rank, 6, 7, step=step)).sum().backward()
    gpus.fail_call(0, 0)
    said = [text for text in gather(str(caught.value)) if "999" in text]
    assert len(said) >= 1
