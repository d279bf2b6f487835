"""Law: after a backward that failed on some rank, no rank steps on its gradients until a later round or zero_grad. No
rank waits for one that steps instead of running its next forward.
"""

import gc

import internals
import pytest
import torch
import torch.nn as nn
from harness import Stopwatch, gather, on_every_rank, same_everywhere
from models import Fragile, Raises
from peer import PEER, batch, compare_step, engine, pair, sw, zero_grad
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
NOT_AVERAGED = "a gradient of a round that failed .*, which is not averaged"


def wrap(**options):
    torch.manual_seed(0)
    model = Fragile()
    return sw.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), **{"bucket_cap_mb": 0.001, **options})


def backward(model, rank, step, fail=False):
    model(batch(rank, 6, 7, step=step), fail=fail).square().sum().backward()


def fails_on_one(model, rank, step):
    """Rank 1's backward raises, after the upper layer's gradients exist."""
    failed = "as the test asked" if rank == 1 else "rank 1 .* left a backward unfinished"
    with pytest.raises(ArithmeticError if rank == 1 else engine.Error, match=failed):
        backward(model, rank, step, fail=rank == 1)


def assert_trains(model, optimizer, rank, step):
    optimizer.zero_grad()
    backward(model, rank, step)
    optimizer.step()
    assert same_everywhere([p.detach().sum().item() for p in model.parameters()])


@pytest.mark.parametrize("kind", ["staged", "hook"])
@on_every_rank(at_least=2)
def test_a_step_ends_the_round_that_a_failed_backward_left_open(rank, world_size, kind):
    model, optimizer = wrap(timeout_s=5, **({"transport": "staged"} if kind == "staged" else {}))
    if kind == "hook":
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    assert_trains(model, optimizer, rank, 0)
    optimizer.zero_grad()
    start = Stopwatch()
    fails_on_one(model, rank, 1)
    if rank == 1:
        with pytest.raises(engine.Error, match=NOT_AVERAGED):
            optimizer.step()
    gather(None)  # peers come here once rank 1 has ended the round
    assert start.seconds() < 4
    assert_trains(model, optimizer, rank, 2)


@on_every_rank(at_least=2)
def test_no_rank_steps_on_a_round_that_one_abandoned(rank, world_size):
    model, optimizer = wrap(zero=0)
    assert_trains(model, optimizer, rank, 0)
    optimizer.zero_grad()
    fails_on_one(model, rank, 1)
    for _ in range(2):  # a second try is refused as well
        with pytest.raises(engine.Error, match=NOT_AVERAGED):
            optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    assert_trains(model, optimizer, rank, 2)


class FailsLate(nn.Module):
    """Its backward fails after the output's gradient, before that of any parameter."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(7, 5)

    def forward(self, x, fail=False):
        return Raises.apply(self.linear(x), fail)


@on_every_rank(at_least=2)
def test_a_backward_that_failed_before_its_first_gradient_leaves_nothing_announced(rank, world_size):
    wrapped, naive = pair(FailsLate)
    with pytest.raises(ArithmeticError, match="as the test asked"):
        wrapped(batch(rank, 6, 7), fail=True).sum().backward()
    zero_grad(wrapped, naive)
    # past the wrapper's outputs: the first gradient announces the round
    compare_step(wrapped, naive, lambda model: model.module(batch(rank, 6, 7, step=1)).square().sum().backward())


@on_every_rank(at_least=2)
def test_a_parameter_is_unfrozen_after_an_open_round_has_ended(rank, world_size):
    torch.manual_seed(0)
    model = Fragile()
    model.lower.bias.requires_grad_(False)
    model, optimizer = sw.wrap(
        model, torch.optim.SGD(model.parameters(), lr=0.1), bucket_cap_mb=0.001, transport="staged", timeout_s=5
    )
    backward(model, rank, 0)
    optimizer.step()
    optimizer.zero_grad()
    fails_on_one(model, rank, 1)
    model.module.lower.bias.requires_grad_(True)
    assert_trains(model, optimizer, rank, 2)
    assert model.module.lower.bias.grad is not None


class FailsBelow(Fragile):
    """Its backward fails after a gradient behind the upper layer's, which hands the upper layer's bucket over."""

    def __init__(self):
        super().__init__()
        upper = self.upper
        del self.upper
        self.between, self.upper = nn.Linear(upper.in_features, upper.in_features), upper

    def forward(self, x, fail=False):
        return self.upper(self.between(Raises.apply(self.lower(x), fail)))


@pytest.mark.parametrize("kind", [Fragile, FailsBelow])
@on_every_rank(exactly=2)
def test_a_hook_that_fails_as_a_round_is_abandoned_keeps_no_error_alive(rank, world_size, kind):
    torch.manual_seed(0)
    model = sw.DistributedDataParallel(kind(), bucket_cap_mb=0.0005, timeout_s=5)

    fails = []

    def average(bucket, is_last):
        if rank == 0 and fails:
            raise ZeroDivisionError("the hook's own")

    internals.reducer(model).set_bucket_callback(average)
    if rank == 0:  # its upper layer waits for the end of the backward
        for p in model.module.upper.parameters():
            p.register_post_accumulate_grad_hook(lambda _: None)
    backward(model, rank, 0)
    fails.append(True)
    # buckets wait for the end of the backward, in which rank 0 may hear of rank 1's failure first
    words = "as the test asked" if rank == 1 else "the hook's own|left a backward unfinished"
    with pytest.raises((ArithmeticError, engine.Error), match=words):
        backward(model, rank, 1, fail=rank == 1)
    if rank == 1:
        model(batch(rank, 6, 7))  # the next forward abandons
    del model
    gc.collect()
    assert not [each for each in gc.get_objects() if isinstance(each, engine.Error)]
    gather(None)
