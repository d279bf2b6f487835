"""Law: Checkpointer.save(step, every_s=T) saves at the same step on all ranks, whatever their clocks say, once T seconds
have passed on rank 0, with few messages in between.
"""

import os
import tempfile

import pytest
import torch
from harness import gather, on_every_rank
from peer import PEER, sw
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")


def made():
    path = gather(tempfile.mkdtemp(dir=os.environ["SW_TEST_FOLDER"]))[0]
    torch.manual_seed(0)
    module = nn.Linear(4, 3)
    model, optimizer = sw.wrap(module, torch.optim.SGD(module.parameters(), lr=0.1), zero=1)
    return sw.Checkpointer(path, model, optimizer, keep_last=100)


@on_every_rank()
def test_all_ranks_save_at_the_step_that_rank_0_chooses(rank, world_size):
    from internals import calls

    clock = [1000.0 * rank]  # each rank has another clock, and another speed of it
    speed = 1.0 if rank == 0 else 0.1 * rank

    class Time:
        monotonic = staticmethod(lambda: clock[0])

    real, calls.time = calls.time, Time
    asked = []
    try:
        with made() as checkpoints:
            exchange = checkpoints._interval._peers.exchange
            checkpoints._interval._peers = type("P", (), {"exchange": lambda _, *a: asked.append(a) or exchange(*a)})()
            saved = []
            for step in range(400):
                clock[0] += speed * (1.0 if step < 200 else 2.0)  # steps become slower
                if checkpoints.save(step, every_s=60.0):
                    saved.append(step)
    finally:
        calls.time = real
    of_all = gather(saved)
    assert all(each == saved for each in of_all), of_all
    assert saved[0] in (59, 60) and all(58 <= b - a <= 62 for a, b in zip(saved, saved[1:]) if b < 200), saved
    assert all(28 <= b - a <= 33 for a, b in zip(saved, saved[1:]) if a >= 210), saved
    assert len(asked) <= 12 * len(saved), (len(asked), len(saved))


@on_every_rank()
def test_a_wrong_interval_is_the_same_error_on_all_ranks(rank, world_size):
    for words, text in (
        ({"every_s": -1.0}, "every_s must be a positive number of seconds, got -1.0"),
        ({"every_s": "30"}, "every_s must be a positive number of seconds, got '30'"),
        ({"every_s": 5.0, "every": 2}, "every= or every_s=, not both"),
    ):
        with made() as checkpoints, pytest.raises((ValueError, sw.Error), match=text):
            checkpoints.save(0, **(words if rank == world_size - 1 else {"every_s": 30.0}))
    with made() as checkpoints:
        if world_size > 1:
            with pytest.raises(sw.Error, match="every_s"):
                checkpoints.save(0, every_s=30.0 + rank)
        else:
            assert not checkpoints.save(0, every_s=30.0)
    gather(None)
