"""Law: when a rank or a whole host of several is lost, the ranks of all others go on in the same processes with the bits of a run that
was started again with as many ranks on the same hosts.
"""

import functools
import os
import signal
import tempfile
from unittest import mock

import pytest
import torch.distributed as dist
from harness import RanksFailed
from hosts import lab
from internals import Board, HostGroup
from peer import PEER, sw
from shardwright_tools.cli import main
from test_a_lost_rank_is_survived_in_place import again, die, digest, outcomes_of, prepare, train_step
from test_a_spare_takes_a_lost_ranks_place import await_

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
STOP, LOST_AT = 6, 3
#: another rank of its host tells of a lost rank, so nobody waits so long; nobody tells of a lost host
RANK_S, HOST_S = 1000.0, 5.0


def survive(rank, world_size, folder, stage, dead, wait_s, fault=die, **options):
    """Train in place; ranks die in a step. Return the steps that began with the number of ranks, and what is left."""
    model, optimizer, vocabulary = prepare(stage, **options)
    checkpoints = sw.Checkpointer(folder, model, optimizer, memory_every=1, memory_replicas=1)
    seen = []
    for step in sw.steps(checkpoints, STOP, wait_s=wait_s):
        with step:
            seen.append((int(step), dist.get_world_size()))
            local = [int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
            with mock.patch("test_a_lost_rank_is_survived_in_place.die", fault):
                place = "backward" if step == LOST_AT and rank in dead and world_size == dist.get_world_size() else None
                train_step(model, optimizer, vocabulary, step, place)
            checkpoints.save(step, every=STOP)
            await_(lambda: not checkpoints._memory.is_busy)  # else the next step is not kept
    found = seen, digest(model, optimizer), local
    checkpoints.close()
    return found


@pytest.fixture(scope="module")
def restarted(teams):
    """Return the digests of a run whose second start has these hosts; one of each kind is made."""

    @functools.cache
    def run(*second):
        with tempfile.TemporaryDirectory() as folder:
            for begin, stop, shape in ((0, LOST_AT, (2, 2)), (LOST_AT, STOP, second)):
                with lab(teams, *shape) as on:
                    found = on.team.run(again, folder=folder, begin=begin, stop=stop)
        return found[0]

    return run


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("dead", "wait_s", "second"),
    [
        ((2,), RANK_S, (2, 1)),
        ((0,), RANK_S, (1, 2)),
        ((1, 2), RANK_S, (1, 1)),
        ((2, 3), HOST_S, (2,)),
        ((0, 1), HOST_S, (2,)),
    ],
    ids=["a rank", "rank 0", "one of each", "a host", "the first host"],
)
def test_the_ranks_of_all_hosts_go_on_with_the_bits_of_a_restart(hosts, restarted, stage, dead, wait_s, second):
    expected, count = restarted(*second), sum(second)
    numbers = [(local, size) for size in second for local in range(size)]
    with tempfile.TemporaryDirectory() as folder, hosts(2, 2) as on:
        on.team.start(survive, folder=folder, stage=stage, dead=dead, wait_s=wait_s)
        found = outcomes_of(on.team, dead=dead)
        for seen, ended_as, _ in found:
            steps = [(0, 4), (1, 4), (2, 4), (3, 4), (3, count), (4, count), (5, count)]
            assert seen == steps and ended_as == expected
        assert [local for *_, local in found] == [[rank, count, *each] for rank, each in enumerate(numbers)]
        assert f"step-{STOP:06d}" in os.listdir(folder)


def survive_twice(rank, world_size, folder, word):
    """As survive(), with the first rank of a host that dies once all have met: before a word, or as its host is connected."""
    kind, name = (Board, "say") if word == "came" else (HostGroup, "make_wire")
    as_usual = getattr(kind, name)

    def dies(self, key, *arguments):
        if rank == 2 and key.startswith(word) and (word == "came" or dist.get_world_size() == 3):
            die()
        return as_usual(self, key, *arguments)

    with mock.patch.object(kind, name, dies):
        return survive(rank, world_size, folder, 2, (1,), RANK_S if word == "came" else HOST_S)


@pytest.mark.parametrize("word", ["came", "memory"])
def test_a_rank_that_dies_while_hosts_recover_is_told_to_the_others(hosts, word):
    with tempfile.TemporaryDirectory() as folder, hosts(2, 2) as on:
        on.team.start(survive_twice, folder=folder, word=word)
        for seen, *_ in outcomes_of(on.team, dead=(1, 2)):
            assert [size for _, size in seen] == [4, 4, 4, 4, 2, 2, 2] and seen[-3:] == [(3, 2), (4, 2), (5, 2)]


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def in_words(rank, world_size, folder, dead):
    try:
        return survive(rank, world_size, folder, 2, dead, HOST_S, stop, silent_s=0.5)[0]
    except sw.Error as error:
        return str(error)


def test_a_host_that_was_silent_comes_back_to_one_sentence(hosts):
    """No rank of another host can end it: it finds itself left out, and has changed nothing."""
    with tempfile.TemporaryDirectory() as folder, hosts(2, 2) as on:
        on.team.start(in_words, folder=folder, dead=(2, 3))
        outcomes = on.team.wait(60, ignore=(2, 3), patient=True)
        if not all(each.ok for each in outcomes[:2]):
            raise RanksFailed(outcomes)
        assert [each.value[-3:] for each in outcomes[:2]] == [[(3, 2), (4, 2), (5, 2)]] * 2
        assert main(["ckpt", "verify", f"{folder}/step-{STOP:06d}"]) == 0
        for rank in (2, 3):
            on.team.signal(rank, signal.SIGCONT)
        for rank, each in enumerate(on.team.wait(60, ignore=(0, 1), patient=True)[2:], 2):
            assert (
                each.ok and f"rank {rank} of 4 on host host1 came 5 s too late to go on: ranks 0, 1 go on" in each.value
            ), each
        assert main(["ckpt", "verify", f"{folder}/step-{STOP:06d}"]) == 0
