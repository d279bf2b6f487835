"""Law: an error of background work (a communication hook, its future) is raised on its rank. The
other ranks raise at their next call, once the failed rank makes its own or leaves. No rank trains on.
"""

from __future__ import annotations

import pytest
import torch
from harness import Stopwatch, gather, on_every_rank
from peer import PEER, batch, engine, sw
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
ON_PURPOSE = "on purpose"


def failed(tensor):
    future = torch.futures.Future()
    future.set_exception(ValueError(ON_PURPOSE))
    return future


def raises(tensor):
    raise ValueError(ON_PURPOSE)


@pytest.mark.parametrize("how", [raises, failed], ids=["raises", "future"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@on_every_rank(at_least=2, spoils=True, deadline_s=30)
def test_a_hook_that_fails_on_one_rank_is_an_error_on_all(rank, world_size, zero, how):
    odd = world_size - 1
    module = nn.Sequential(nn.Linear(7, 40), nn.Tanh(), nn.Linear(40, 5))
    model, optimizer = sw.wrap(module, torch.optim.SGD(module.parameters(), lr=0.1), zero=zero, timeout_s=20)
    fails = [False]

    def hook(state, bucket):
        if fails[0] and rank == odd:
            return how(bucket.buffer())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, hook)

    def step(number):
        model(batch(rank, 6, 7, step=number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    fails[0] = True
    begin, errors = Stopwatch(), []
    for number in (1, 2):
        try:
            step(number)
        except (ValueError, engine.Error) as error:
            errors.append(error)
    assert begin.seconds() < 10
    assert len(errors) >= (2 if rank == odd else 1), errors  # its own, and what its peers raise
    assert (type(errors[0]) is ValueError and ON_PURPOSE in str(errors[0])) == (rank == odd)
    assert isinstance(errors[-1], engine.Error)
    gather(None)
