"""Laws of accumulation and use (docs/promises.md).

A contribution is `.grad` when the round closes: what stands plus what was accumulated, or zero if it is None. A
parameter that no rank touched since the last synchronisation keeps its `.grad` bit for bit.
"""

import internals
import pytest
import torch
from harness import on_every_rank
from models import Heads, Mlp
from oracle.fold import bits_equal
from peer import assert_same_gradients, batch, compare_step, engine, pair, zero_grad

both_caps = pytest.mark.parametrize("cap", [0.001, 25])


def loss(model, rank, step, heads=None):
    x = batch(rank, 6, 7, step=step)
    return model(x, heads) if heads is not None else model(x).square().mean()


@both_caps
@on_every_rank()
def test_inside_no_sync_gradients_are_summed_locally_and_folded_once(rank, world_size, cap):
    wrapped, naive = pair(Mlp, bucket_cap_mb=cap)
    for turn in range(2):
        with wrapped.no_sync():
            for step in range(3):
                loss(wrapped, rank, 10 * turn + step).backward()
                loss(naive, rank, 10 * turn + step).backward()
                assert_same_gradients(wrapped, naive)  # each rank's own local sum
        compare_step(wrapped, naive, lambda model, turn=turn: loss(model, rank, 10 * turn + 9).backward())
        zero_grad(wrapped, naive, set_to_none=turn == 0)


@both_caps
@on_every_rank()
def test_without_no_sync_each_backward_folds_onto_the_running_average(rank, world_size, cap):
    wrapped, naive = pair(Mlp, bucket_cap_mb=cap)
    for step in range(4):
        compare_step(wrapped, naive, lambda model, step=step: loss(model, rank, step).backward())


@both_caps
@on_every_rank()
def test_no_sync_after_an_average_adds_to_it_on_every_rank(rank, world_size, cap):
    wrapped, naive = pair(Mlp, bucket_cap_mb=cap)
    compare_step(wrapped, naive, lambda model: loss(model, rank, 0).backward())
    with wrapped.no_sync():
        loss(wrapped, rank, 1).backward()
        loss(naive, rank, 1).backward()
    assert_same_gradients(wrapped, naive)
    compare_step(wrapped, naive, lambda model: loss(model, rank, 2).backward())


@on_every_rank()
def test_require_backward_grad_sync_is_read_when_the_backward_runs(rank, world_size):
    """Accumulate as accelerate's trigger_sync_in_backward and Lightning's manual optimization do."""
    wrapped, naive = pair(Mlp)
    with wrapped.no_sync():
        pending = loss(wrapped, rank, 0)
    wrapped.require_backward_grad_sync = False
    pending.backward()
    loss(naive, rank, 0).backward()
    assert_same_gradients(wrapped, naive)
    wrapped.require_backward_grad_sync = True
    compare_step(wrapped, naive, lambda model: loss(model, rank, 1).backward())


@on_every_rank()
def test_no_sync_is_left_even_by_an_exception(rank, world_size):
    wrapped, naive = pair(Mlp)
    with pytest.raises(KeyError), wrapped.no_sync():
        raise KeyError
    assert wrapped.require_backward_grad_sync
    compare_step(wrapped, naive, lambda model: loss(model, rank, 0).backward())


@both_caps
@on_every_rank()
def test_use_on_one_rank_under_no_sync_counts_in_the_next_synchronised_backward(rank, world_size, cap):
    wrapped, naive = pair(Heads, bucket_cap_mb=cap)
    with wrapped.no_sync():
        heads = "left right" if rank == 0 else "left"
        loss(wrapped, rank, 0, heads).backward()
        loss(naive, rank, 0, heads).backward()
    assert_same_gradients(wrapped, naive)
    compare_step(wrapped, naive, lambda model: loss(model, rank, 1, "left").backward())
    assert wrapped.module.right.weight.grad is not None


@both_caps
@on_every_rank()
def test_unused_on_one_rank_is_a_contribution_of_zero(rank, world_size, cap):
    wrapped, naive = pair(Heads, bucket_cap_mb=cap, find_unused_parameters=engine is None)
    for step in range(3):
        heads = "left right" if rank == step % world_size else "left"
        compare_step(wrapped, naive, lambda model, step=step, heads=heads: loss(model, rank, step, heads).backward())
        zero_grad(wrapped, naive)


@on_every_rank()
def test_unused_on_one_rank_contributes_what_stands_in_its_gradient(rank, world_size):
    wrapped, naive = pair(Heads, find_unused_parameters=engine is None)
    for step in range(3):  # never cleared: each round folds the accumulated average, and a gradient where there is one
        heads = "left right" if rank == step % world_size else "left"
        compare_step(wrapped, naive, lambda model, step=step, heads=heads: loss(model, rank, step, heads).backward())


@both_caps
@on_every_rank()
def test_unused_on_all_ranks_keeps_the_gradient_bit_for_bit(rank, world_size, cap):
    wrapped, naive = pair(Heads, bucket_cap_mb=cap, find_unused_parameters=engine is None)
    compare_step(wrapped, naive, lambda model: loss(model, rank, 0, "left").backward())
    assert wrapped.module.right.weight.grad is None and wrapped.module.right.bias.grad is None

    own = {}  # every rank sets its own, with a NaN of its own bits: an average would show
    for name, parameter in wrapped.module.right.named_parameters():
        own[name] = batch(rank, *parameter.shape, step=5)
        own[name].view(torch.int32).flatten()[0] = 0x7FC00001 + rank
        parameter.grad = own[name].clone()
    kept = wrapped.module.right.weight.grad
    for step in (1, 2):
        loss(wrapped, rank, step, "left").backward()
        for name, parameter in wrapped.module.right.named_parameters():
            assert bits_equal(parameter.grad.view(torch.int32), own[name].view(torch.int32)), name
    assert wrapped.module.right.weight.grad is kept

    zero_grad(wrapped, naive)
    compare_step(wrapped, naive, lambda model: loss(model, rank, 3, "left right").backward())


@on_every_rank()
def test_an_average_that_nobody_touches_again_stands(rank, world_size):
    wrapped, naive = pair(Heads, bucket_cap_mb=0.001, find_unused_parameters=engine is None)
    for step, heads in enumerate(["left right", "left", "left", "right", "left right"]):
        compare_step(wrapped, naive, lambda model, step=step, heads=heads: loss(model, rank, step, heads).backward())


@on_every_rank()
def test_gradients_that_the_user_replaced_or_scaled_are_what_counts(rank, world_size):
    wrapped, naive = pair(Mlp)
    compare_step(wrapped, naive, lambda model: loss(model, rank, 0).backward())
    for module in (wrapped.module, naive.module):
        for number, parameter in enumerate(module.parameters()):
            if number % 3 == 0:
                parameter.grad = parameter.grad.clone() * (rank + 1)
            elif number % 3 == 1:
                parameter.grad.mul_(0.25)
            else:
                parameter.grad = None
    compare_step(wrapped, naive, lambda model: loss(model, rank, 1).backward())


@on_every_rank()
def test_clipping_and_zeroing_between_steps_act_on_the_average(rank, world_size):
    wrapped, naive = pair(Mlp, bucket_cap_mb=0.001)
    for step in range(3):
        compare_step(wrapped, naive, lambda model, step=step: loss(model, rank, step).backward())
        for module in (wrapped.module, naive.module):
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.01)
        assert_same_gradients(wrapped, naive)
        zero_grad(wrapped, naive, set_to_none=step % 2 == 0)


@on_every_rank(at_least=2)
def test_a_loss_that_touches_no_parameter_on_one_rank_is_closed_at_the_optimizers_step(rank, world_size):
    wrapped, naive = pair(Mlp, find_unused_parameters=engine is None)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (wrapped.module, naive.module)]
    for step in range(4):
        lazy = rank == step % world_size
        for model, optimizer in zip((wrapped, naive), optimizers, strict=True):
            output = model(batch(rank, 6, 7, step=step))
            if lazy:
                torch.ones(3, requires_grad=True).sum().backward()
                del output
            else:
                output.square().mean().backward()
            if model is naive:
                naive.synchronise()
            optimizer.step()
        assert_same_gradients(wrapped, naive)
        for ours, theirs in zip(wrapped.module.parameters(), naive.module.parameters(), strict=True):
            assert bits_equal(ours.detach(), theirs.detach())
        zero_grad(wrapped, naive)


@pytest.mark.skipif(engine is None, reason="the engine's counts")
@on_every_rank()
def test_no_collective_is_added_for_what_is_unused_or_accumulated(rank, world_size):
    import shardwright as sw

    def collectives():
        counts = [stats for stats in sw.stats()["communicators"].values()]
        return sum(c[name] for c in counts for name in ("all_reduce", "broadcast", "all_gather", "barrier"))

    wrapped, naive = pair(Heads, bucket_cap_mb=0.0001)
    buckets = internals.reducer(wrapped).bucket_count
    assert buckets > 1
    used = ["left right", "left", "right" if rank else "left right", "left right"]
    for step, heads in enumerate(used):
        before = collectives()
        compare_step(wrapped, naive, lambda model, step=step, heads=heads: loss(model, rank, step, heads).backward())
        assert collectives() - before == buckets, step
    before = collectives()
    with wrapped.no_sync():
        loss(wrapped, rank, 9, "left right").backward()
    with torch.no_grad():
        loss(wrapped, rank, 9, "left right")
    assert collectives() == before
