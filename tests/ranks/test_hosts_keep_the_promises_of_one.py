"""Laws of one host that hold across separate hosts: an exception in a backward, a dropped model, forked workers and a
lack of memory on one rank reach every rank, and training continues. All other ranks name a rank that is killed at any
moment, and nothing stays behind.
"""

import contextlib
import copy
import gc
import os
import random
import resource
import signal
import time

import internals
import pytest
import torch
from harness import LONG, RanksFailed, Stopwatch, gather
from models import Mlp
from oracle.fold import bits_equal
from oracle.hosts import fold_over_hosts
from peer import PEER, batch, data_parallel, engine, in_a_child, sw
from test_a_dead_rank_is_named import (
    Squares,
    limited,
    nothing_stays_behind,  # noqa: F401, a fixture
    trains_until_an_error,
)
from test_every_shape_of_backward import Fragile

pytestmark = pytest.mark.skipif(PEER == "torch", reason="the engine itself")

#: of three ranks
HOST_OF = [0, 0, 1]


def backward(model, x):
    model(x).square().mean().backward()


def assert_averages(wrapped, x):
    """Check that one step has the bits of the fold over hosts."""
    alone = copy.deepcopy(wrapped.module)
    for module in (alone, wrapped.module):
        module.zero_grad()
    backward(alone, x)
    backward(wrapped, x)
    everyone = gather([p.grad for p in alone.parameters()])
    for place, p in enumerate(wrapped.module.parameters()):
        assert bits_equal(p.grad, fold_over_hosts([theirs[place] for theirs in everyone], HOST_OF, "mean"))


def fails_and_goes_on(rank, world_size, odd):
    torch.manual_seed(0)
    wrapped = data_parallel(Fragile(), bucket_cap_mb=0.001, timeout_s=20)
    assert_averages(wrapped, batch(rank, 6, 7))
    start = Stopwatch()
    named = "as the test asked" if rank == odd else f"rank {odd} .* left a backward unfinished"
    with pytest.raises(ArithmeticError if rank == odd else engine.Error, match=named):
        wrapped(batch(rank, 6, 7), fail=rank == odd).sum().backward()
    assert start.seconds() < 2
    assert_averages(wrapped, batch(rank, 6, 7, step=1))
    with pytest.raises(ArithmeticError if rank == odd else engine.Error):
        wrapped(batch(rank, 6, 7), fail=rank == odd).sum().backward()
    del wrapped
    gc.collect()
    assert_averages(data_parallel(Mlp(), timeout_s=20), batch(rank, 6, 7, step=2))


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_an_exception_in_a_backward_is_news_to_every_host_and_training_goes_on(hosts, odd):
    with hosts(2, 1) as lab:
        lab.team.run(fails_and_goes_on, odd=odd)


def forks_in_the_middle(rank, world_size):
    torch.manual_seed(0)
    wrapped = data_parallel(Mlp(), bucket_cap_mb=0.001, timeout_s=20)
    assert_averages(wrapped, batch(rank, 6, 7))
    for x in torch.utils.data.DataLoader(Squares(), batch_size=6, num_workers=2):
        assert_averages(wrapped, x + rank)
    comm = internals.comm(wrapped)
    for action in (comm.barrier, lambda: comm.all_gather_bytes(b"x"), lambda: backward(wrapped, batch(rank, 6, 7))):
        text = in_a_child(action)
        assert text.startswith("Error") and "fork" in text, text
    in_a_child(comm.close)  # may refuse; may not take leave in its parent's name
    assert_averages(wrapped, batch(rank, 6, 7, step=1))


def test_processes_forked_in_the_middle_disturb_nobody(hosts):
    with hosts(2, 1) as lab:
        lab.team.run(forks_in_the_middle)


def has_no_room(rank, world_size):
    """The last rank, alone on its host, has no room for a pool, and then not even for control pages."""
    texts = []
    for room in (1 << 20, 4096):
        model = torch.nn.Linear(600, 601)
        with limited(resource.RLIMIT_FSIZE, room) if rank == 2 else contextlib.nullcontext():
            try:
                wrapped = sw.wrap(model, timeout_s=10.0)
                texts.append(f"{internals.reducer(wrapped).transport}: {internals.reducer(wrapped).transport_reason}")
                assert_averages(wrapped, batch(rank, 2, 600))
            except (engine.Error, MemoryError, OSError) as error:
                texts.append(str(error))
        wrapped = None
        gc.collect()
    return texts


def test_what_one_host_has_no_room_for_is_one_sentence_on_every_rank(hosts):
    with hosts(2, 1) as lab:
        texts = lab.team.run(has_no_room)
    assert texts == [texts[0]] * 3, texts
    assert all("RLIMIT_FSIZE" in text and "rank 2" in text for text in texts[0]), texts[0]


@pytest.mark.timeout(600 if LONG else 60)
def test_one_rank_killed_at_a_random_moment_is_named_by_all_others(hosts, tmp_path):
    generator = random.Random(11)
    for turn in range(20 if LONG else 2):
        folder = tmp_path / str(turn)
        folder.mkdir()
        with hosts(2, 1) as lab:
            lab.team.start(trains_until_an_error, folder=str(folder))
            while len(list(folder.iterdir())) < 3:
                time.sleep(0.01)
            time.sleep(generator.uniform(0, 0.3))
            dead = generator.randrange(3)
            killed = time.monotonic()
            lab.team.signal(dead, signal.SIGKILL)
            outcomes = lab.team.wait(20, ignore=[dead], patient=True)
            for outcome in outcomes:
                if outcome.rank != dead:
                    if not outcome.ok:
                        raise RanksFailed(outcomes)
                    assert outcome.value[0] == dead and outcome.value[1] - killed < 1.5, outcome.value
        assert not [pid for pid in lab.team.pids if os.path.exists(f"/proc/{pid}")]
