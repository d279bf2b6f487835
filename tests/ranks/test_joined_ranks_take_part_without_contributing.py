"""Law of uneven inputs: a rank without inputs contributes nothing. The mean is over all ranks
(divide_by_initial_world_size) or over those that still train. At the end all ranks hold the same model.
"""

import copy

import pytest
import torch
from harness import gather, on_every_rank, same_everywhere
from models import Mlp
from oracle.data_parallel import NaiveDataParallel
from oracle.fold import bits_equal
from peer import PEER, batch, data_parallel, pair
from torch import nn
from torch.distributed.algorithms.join import Join


def inputs(rank, seed=0):
    """Return the batches of a rank: 2 + rank of them."""
    return [batch(rank, 6, 7, step=step + seed) for step in range(2 + rank)]


def close(left, right):
    return torch.allclose(left, right, rtol=0.02, atol=1e-4) if PEER == "torch" else bits_equal(left, right)


def naive_training(rank, world_size, naive, initial):
    """Return the gradients of each step on this rank while it has inputs, in a loop in which every rank takes every
    step.
    """
    optimizer = torch.optim.SGD(naive.module.parameters(), lr=0.1)
    mine, gradients = inputs(rank), []
    for step in range(2 + world_size - 1):
        optimizer.zero_grad()
        active = step < len(mine)
        if active:
            naive(mine[step]).square().mean().backward()
        naive.synchronise(active=active, over_active=not initial)
        if active:
            gradients.append([parameter.grad.clone() for parameter in naive.module.parameters()])
        optimizer.step()
    return gradients


@pytest.mark.parametrize("through_join", [False, True], ids=["ddp.join", "Join"])
@pytest.mark.parametrize("initial", [True, False], ids=["over all ranks", "over active ranks"])
@pytest.mark.parametrize("cap", [0.001, 25])
@on_every_rank()
def test_each_gradient_is_the_mean_that_was_asked_for(rank, world_size, cap, initial, through_join):
    wrapped, naive = pair(Mlp, bucket_cap_mb=cap)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    gradients = []
    if through_join:
        context = Join([wrapped], divide_by_initial_world_size=initial)
    else:
        context = wrapped.join(divide_by_initial_world_size=initial)
    with context:
        for x in inputs(rank):
            optimizer.zero_grad()
            wrapped(x).square().mean().backward()
            gradients.append([parameter.grad.clone() for parameter in wrapped.module.parameters()])
            optimizer.step()
    expected = naive_training(rank, world_size, naive, initial)
    assert len(gradients) == len(expected)
    for step, (ours, theirs) in enumerate(zip(gradients, expected, strict=True)):
        for our, their in zip(ours, theirs, strict=True):
            assert close(our, their), step
    for ours, theirs in zip(wrapped.module.parameters(), naive.module.parameters(), strict=True):
        assert close(ours.detach(), theirs.detach())
    assert same_everywhere([*wrapped.module.parameters()])


@on_every_rank()
def test_training_goes_on_after_the_join(rank, world_size):
    wrapped, _ = pair(Mlp)
    for turn in range(2):
        with wrapped.join():
            for x in inputs(rank, seed=20 * turn):
                wrapped(x).square().mean().backward()
                wrapped.zero_grad()
        naive = NaiveDataParallel(copy.deepcopy(wrapped.module))
        for model in (wrapped, naive):
            model(batch(rank, 6, 7, step=90)).square().mean().backward()
        naive.synchronise()
        for ours, theirs in zip(wrapped.module.parameters(), naive.module.parameters(), strict=True):
            assert close(ours.grad, theirs.grad)
        wrapped.zero_grad()


@on_every_rank()
def test_a_rank_without_any_input_takes_part(rank, world_size):
    wrapped, naive = pair(Mlp)
    steps = 0 if rank == 0 and world_size > 1 else 2
    with wrapped.join():
        for step in range(steps):
            wrapped(batch(rank, 6, 7, step=step)).square().mean().backward()
            wrapped.zero_grad()
    assert same_everywhere([*wrapped.module.parameters()])


@on_every_rank()
def test_accumulation_inside_a_join(rank, world_size):
    wrapped, _ = pair(Mlp)
    with wrapped.join():
        for turn in range(1 + rank):
            with wrapped.no_sync():
                wrapped(batch(rank, 6, 7, step=turn)).square().mean().backward()
            wrapped(batch(rank, 6, 7, step=turn + 30)).square().mean().backward()
            assert all(parameter.grad.isfinite().all() for parameter in wrapped.parameters())
            wrapped.zero_grad()
    gather(None)


@on_every_rank()
def test_buffers_come_from_a_rank_that_still_trains(rank, world_size):
    torch.manual_seed(0)
    wrapped = data_parallel(nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5)))
    with wrapped.join():
        for x in inputs(rank):
            wrapped(x).square().mean().backward()
    assert same_everywhere([*wrapped.state_dict().values()])


@on_every_rank(at_least=2, spoils=True)
def test_early_termination_is_an_error_on_every_rank(rank, world_size):
    wrapped, _ = pair(Mlp)
    with pytest.raises(RuntimeError):  # noqa: PT012, whichever step meets it
        with wrapped.join(throw_on_early_termination=True):
            for x in inputs(rank):
                wrapped(x).square().mean().backward()
    gather(None)


@on_every_rank()
def test_a_disabled_join_changes_nothing(rank, world_size):
    wrapped, naive = pair(Mlp)
    with wrapped.join(enable=False):
        for model in (wrapped, naive):
            model(batch(rank, 6, 7)).square().mean().backward()
    naive.synchronise()
    for ours, theirs in zip(wrapped.module.parameters(), naive.module.parameters(), strict=True):
        assert close(ours.grad, theirs.grad)


@on_every_rank()
def test_two_wrapped_modules_join_together(rank, world_size):
    one, _ = pair(Mlp)
    two, _ = pair(lambda: nn.Linear(7, 3))
    with Join([one, two]):  # in the order of the list, as a joined rank shadows them
        for x in inputs(rank):
            one(x).square().mean().backward()
            two(x).square().mean().backward()
    for model in (one, two):
        assert same_everywhere([*model.parameters()])


@on_every_rank()
def test_a_rank_that_ran_out_takes_part_in_a_communication_hook(rank, world_size):
    """The buckets of a joined rank are zeros, so the hook's sums are those of the ranks that still train."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    wrapped, naive = pair(Mlp, bucket_cap_mb=0.001)
    wrapped.register_comm_hook(None, allreduce_hook)
    gradients = []
    with wrapped.join():
        for x in inputs(rank):
            wrapped.zero_grad()
            wrapped(x).square().mean().backward()
            gradients.append([parameter.grad.clone() for parameter in wrapped.module.parameters()])
    for step in range(2 + world_size - 1):
        naive.module.zero_grad()
        if step < len(gradients):
            naive(inputs(rank)[step]).square().mean().backward()
        naive.synchronise(active=step < len(gradients))
        if step < len(gradients):
            for mine, parameter in zip(gradients[step], naive.module.parameters(), strict=True):
                assert torch.allclose(mine, parameter.grad, rtol=1e-4, atol=1e-6), step
