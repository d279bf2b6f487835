"""Law: a spare takes a lost rank's place also when ranks and spares are on several hosts, with the bits of a replay in one process with
the ranks and hosts that each step had: on the lost rank's host those of a run that lost none.
"""

import os
import tempfile
from pathlib import Path

import pytest
import torch.distributed as dist
from internals import leave, spares
from peer import PEER, sw
from shardwright_tools.cli.rank import _join
from test_a_lost_rank_is_survived_in_place import STAGES, die, digest, outcomes_of
from test_a_spare_takes_a_lost_ranks_place import announced, await_
from test_random_faults_are_survived_in_place import Replay, built, loss_of, one_thread  # noqa: F401, a fixture

pytestmark = [pytest.mark.skipif(PEER == "torch", reason="ours"), pytest.mark.usefixtures("one_thread")]
STOP, LOST_AT = 7, 3
#: a lost rank is told of by its host, so nobody waits so long; nobody tells of a lost host
RANK_S, HOST_S = 1000.0, 5.0


def take_part(rank, world_size, folder, ranks):
    """Make a group of `ranks`, in their order. Each other process is what `shardwright rank` starts: a spare, rank 0 of 1."""
    host = os.uname().nodename
    os.makedirs(f"{folder}/start-{host}", exist_ok=True)
    open(f"{folder}/up-{rank}", "w").close()
    await_(lambda: all(os.path.exists(f"{folder}/up-{each}") for each in range(world_size)))  # none is still connecting
    leave()
    os.environ |= {spares.START: f"{folder}/start-{host}", spares.SLOT: f"{folder}/slot-{rank}"}
    number = ranks.index(rank) if rank in ranks else None
    store = dist.HashStore() if number is None else dist.FileStore(f"{folder}/store", len(ranks))
    size = 1 if number is None else len(ranks)
    dist.init_process_group("gloo", store=store, rank=number or 0, world_size=size)
    os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(size)}
    if number is None:
        os.environ[spares.SPARE] = os.environ[spares.SLOT]


def spared(rank, world_size, folder, stage, ranks, dead, comes=0, wait_s=RANK_S):
    """Train in place; the processes of `dead` die in a step. Spares come in step `comes`. Return the digests and the steps that began."""
    take_part(rank, world_size, folder, ranks)
    if rank not in ranks:
        await_(lambda: os.path.exists(f"{folder}/comes"))
        _join(folder, Path(os.environ[spares.START]))  # no rank of its host may have told it where the ranks meet
    model, optimizer = sw.wrap(*built(), timeout_s=20, silent_s=1.0, bucket_cap_mb=0.005, **STAGES[stage])
    checkpoints = sw.Checkpointer(folder, model, optimizer, memory_every=1, memory_replicas=1)
    seen = []
    try:
        for step in sw.steps(checkpoints, STOP, wait_s=wait_s):
            with step:
                seen.append((int(step), dist.get_rank(), dist.get_world_size()))
                if step == comes:
                    open(f"{folder}/comes", "w").close()
                    await_(lambda: announced(folder) == world_size - len(ranks))
                loss = loss_of(model, step, dist.get_rank())
                if step == LOST_AT and rank in dead:
                    next(iter(model.parameters())).register_hook(lambda _: die())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                checkpoints.save(step, every=STOP)
                await_(lambda: not checkpoints._memory.is_busy)  # else the next step is not kept
    except SystemExit as end:
        return f"left with {end.code}", seen
    found = digest(model, optimizer), seen
    checkpoints.close()
    return found


def replayed(*spans):
    """Return the digests of a training with the ranks of these (steps, their hosts)."""
    replay, step = Replay(), 0
    for count, hosts in spans:
        for _ in range(count):
            replay.step(step, hosts)
            step += 1
    return replay.digest()


def run(hosts, shape, dead, **arguments):
    """Return the sizes that steps had on the first rank that is left; all that finished have the same digests, which are returned first."""
    with tempfile.TemporaryDirectory() as folder, hosts(*shape) as on:
        on.team.start(spared, folder=folder, dead=dead, **arguments)
        outcomes = outcomes_of(on.team, dead=dead)
    left = [seen for found, seen in outcomes if found == "left with 0"]
    assert left == [[]] * (sum(shape) - len(arguments["ranks"]) - len(dead)), "spares that had no place"
    ended = [(found, seen) for found, seen in outcomes if found != "left with 0"]
    assert all(found == ended[0][0] for found, _ in ended)
    return ended[0][0], [(step, size) for step, _, size in ended[0][1]]


#: steps of a run that repeats the broken one
REPEATED = [(step, 4) for step in (0, 1, 2, 3, 3, 4, 5, 6)]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_spare_of_the_same_host_leaves_the_bits_of_a_run_that_lost_none(hosts, stage):
    """Processes 0, 1 and 2 are on a host, and 3, 4 and 5 on another; 2 and 5 are spares."""
    dead = [(0,), (1,), (3,), (1, 4)][stage]
    found, seen = run(hosts, (3, 3), dead, stage=stage, ranks=[0, 1, 3, 4])
    assert found == replayed((STOP, [0, 0, 1, 1])) and seen == REPEATED


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_spare_of_another_host_takes_the_place(hosts, stage):
    """Then ranks of a host are not numbered in a row: also rank 0 may be on another host than rank 1."""
    shape, ranks, dead, after = (
        ((3, 2), [0, 1, 3, 4], 3, [0, 0, 0, 1]) if stage % 2 else ((2, 3), [0, 1, 2, 3], 0, [1, 0, 1, 1])
    )
    found, seen = run(hosts, shape, (dead,), stage=stage, ranks=ranks)
    assert found == replayed((LOST_AT, [0, 0, 1, 1]), (STOP - LOST_AT, after)) and seen == REPEATED


@pytest.mark.parametrize("stage", [0, 3])
def test_spares_take_the_places_of_a_lost_host(hosts, stage):
    """No process is left on it that could tell of its end; its steps in memory are on the next host."""
    found, seen = run(hosts, (2, 2, 2), (2, 3), stage=stage, ranks=[0, 1, 2, 3], wait_s=HOST_S)
    assert found == replayed((STOP, [0, 0, 1, 1])) and seen == REPEATED


@pytest.mark.parametrize("stage", [0, 2])
def test_a_spare_of_another_host_joins_between_two_steps(hosts, stage):
    found, seen = run(hosts, (2, 1, 1), (2,), stage=stage, ranks=[0, 1, 2], comes=4, wait_s=HOST_S)
    sizes = [(0, 3), (1, 3), (2, 3), (3, 3), (3, 2), (4, 2), (5, 2), (6, 3)]
    assert found == replayed((3, [0, 0, 1]), (3, [0, 0]), (1, [0, 0, 1])) and seen == sizes
