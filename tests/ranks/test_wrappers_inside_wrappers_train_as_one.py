"""Law: a module with wrappers inside (three levels deep, trained before, used twice, or loaded from a checkpoint)
trains at every stage like torch's one wrapper around it.
"""

import copy
import os
import tempfile

import pytest
import torch
from harness import gather, on_every_rank
from peer import PEER, batch, sw
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Stock

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
QUICK_FORM_IS_THE_LARGEST_WORLD = True


class Twice(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.last = inner, nn.Linear(7, 2)

    def forward(self, x):
        return self.last(self.inner(torch.tanh(self.inner(x))))


def layers(*sizes):
    torch.manual_seed(0)
    return [nn.Linear(*size) for size in sizes]


def deep(wrap):
    first, middle, last = layers((7, 8), (8, 6), (6, 2))
    return nn.Sequential(wrap(nn.Sequential(wrap(first), nn.Tanh(), middle)), last)


def train(model, optimizer, rank, steps=3):
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(batch(rank, 4, 7, step=step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def adam(module):
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def assert_same(stock, ours):
    with sw.full_parameters(ours):
        for left, right in zip(stock.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("zero", range(4))
@on_every_rank()
def test_at_every_depth(rank, world_size, zero):
    stock, ours = deep(lambda each: each), deep(lambda each: sw.wrap(each, zero=zero))
    plain, optimizer = adam(stock), adam(ours)
    stock, (ours, optimizer) = Stock(stock), sw.wrap(ours, optimizer, zero=zero)
    train(stock, plain, rank)
    train(ours, optimizer, rank)
    assert_same(stock, ours)
    gather(None)


@pytest.mark.parametrize("zero", range(4))
@on_every_rank()
def test_one_that_was_trained_and_one_that_is_used_twice(rank, world_size, zero):
    inner = layers((7, 7))[0]
    alone = copy.deepcopy(inner)
    wrapped, optimizer = sw.wrap(inner, adam(inner), zero=zero)
    assert train(Stock(alone), adam(alone), rank) == pytest.approx(train(wrapped, optimizer, rank), rel=1e-5)
    modules = []
    for each in (alone, wrapped):
        torch.manual_seed(1)
        modules.append(Twice(each))
    plain, optimizer = (adam(each) for each in modules)
    stock, (ours, optimizer) = Stock(modules[0]), sw.wrap(modules[1], optimizer, zero=zero)
    train(stock, plain, rank)
    train(ours, optimizer, rank)
    assert_same(stock, ours)
    gather(None)


@pytest.mark.parametrize("zero", range(4))
@on_every_rank()
def test_a_checkpoint_goes_on_in_another_one(rank, world_size, zero):
    folder = gather(tempfile.mkdtemp() if rank == 0 else None)[0]
    made = []
    for _ in range(2):
        module = deep(lambda each: sw.wrap(each, zero=zero))
        made.append(sw.wrap(module, adam(module), zero=zero))
    train(*made[0], rank)
    sw.save(os.path.join(folder, "a"), *made[0], step=3)
    sw.load(os.path.join(folder, "a"), *made[1])
    assert train(*made[0], rank) == train(*made[1], rank)
    gather(None)
