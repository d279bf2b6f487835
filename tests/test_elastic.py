"""Law of sw.elastic: at any world size, and across changes of it, each sample is trained once an epoch, in the same
global batches.
"""

import contextlib
import tracemalloc

import pytest
import torch
from shardwright import elastic


def micro_batches(size, global_batch, micro_batch, world_size, state=None, **options):
    """Return each rank's sampler."""
    ranks = [
        elastic.Sampler(size, elastic.cut(global_batch, micro_batch, rank, world_size), **options)
        for rank in range(world_size)
    ]
    for sampler in ranks if state is not None else ():
        sampler.load_state_dict(state)
    return ranks


def train(ranks, steps):
    """Return the samples of each step, and advance the samplers."""
    done = []
    while len(done) < steps:
        rows = zip(*(iter(sampler) for sampler in ranks))  # as many micro-batches on all ranks
        step, count = [], ranks[0].batches.accumulation
        for number, row in enumerate(rows, 1):
            step.append([sample for micro in row for sample in micro])
            if number % count == 0:
                done.append(sorted(sample for micro in step for sample in micro))
                step = []
                for sampler in ranks:
                    sampler.step()
                if len(done) == steps:
                    break
    return done


@pytest.mark.parametrize("micro_batch", [None, 2, 3])
def test_steps_are_the_same_at_any_world_size_and_each_sample_comes_once_an_epoch(micro_batch):
    size, global_batch = 50, 12
    expected = train(micro_batches(size, global_batch, None, 1, seed=5), 25)  # six epochs
    counts = [sum(step.count(sample) for step in expected) for sample in range(size)]
    assert set(counts) == {6}
    for plan in ([(25, 3)], [(25, 5)], [(4, 2), (3, 4), (10, 1), (8, 3)]):
        state, found = None, []
        for steps, world_size in plan:
            ranks = micro_batches(size, global_batch, micro_batch, world_size, state, seed=5)
            found += train(ranks, steps)
            assert all(sampler.state_dict() == ranks[0].state_dict() for sampler in ranks)
            state = ranks[0].state_dict()
        assert found == expected, plan
    assert [len(step) for step in expected] == [global_batch] * 25


def test_an_order_takes_8_bytes_a_sample():
    sampler = elastic.Sampler(100_000, elastic.cut(8, None, 0, 1))
    tracemalloc.start()
    try:
        assert len(next(iter(sampler))) == 8
        assert tracemalloc.get_traced_memory()[1] < 100_000  # the tensor is not Python's
    finally:
        tracemalloc.stop()
    assert sampler._order[1].nbytes == 800_000


def test_what_a_loader_read_ahead_is_not_counted():
    (sampler,) = micro_batches(10, 4, 2, 1)
    assert len(sampler) == 6 and len(list(sampler)) == 6 and sampler.position == 0
    sampler.step()
    assert len(sampler) == len(list(sampler)) == 4 and sampler.state_dict()["position"] == 4
    assert [sampler.accumulates() for _ in range(4)] == [True, False, True, False]
    for _ in range(2):
        sampler.step()
    assert sampler.epoch == 1 and len(sampler) == 4  # ten samples, of which two are trained
    assert list(micro_batches(3, 2, 2, 1, shuffle=False)[0]) == [[0, 1], [2, 0]]


def test_scaled_losses_have_the_gradient_of_the_global_mean():
    torch.manual_seed(0)
    x, w = torch.randn(12, 5, dtype=torch.float64), torch.randn(5, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad((x @ w).square().mean(), w)
    for world_size in (1, 2, 5):
        found = torch.zeros(5, dtype=torch.float64)
        for rank in range(world_size):
            batches = elastic.cut(12, 2, rank, world_size)
            for low, high in batches.own():
                loss = (x[low:high] @ w).square().mean() * batches.scale(high - low)
                found += torch.autograd.grad(loss, w)[0] / world_size
        torch.testing.assert_close(found, expected)


def test_learning_rates_follow_samples_and_not_steps():
    parameter = torch.nn.Parameter(torch.zeros(1))
    rates = {}
    for global_batch in (10, 20):
        (sampler,) = micro_batches(1000, global_batch, None, 1)
        optimizer = torch.optim.SGD([parameter], lr=0.5)
        scheduler = elastic.by_samples(optimizer, sampler, lambda samples: min(1.0, samples / 200))
        while sampler.position < 100:
            optimizer.step()
            sampler.step()
            scheduler.step()
        rates[global_batch] = optimizer.param_groups[0]["lr"]
        state = scheduler.state_dict()
        scheduler.load_state_dict(state)
    assert rates == {10: 0.25, 20: 0.25}


def test_wrong_values_are_one_sentence():
    for arguments, text in (
        ((0, None, 0, 1), "global_batch must be a number of samples, at least 1, got 0"),
        ((8, 1.5, 0, 1), "micro_batch must be a number of samples, at least 1, got 1.5"),
        (
            (3, None, 0, 4),
            "global_batch=3 of 4 ranks with micro_batch=None leaves a rank without samples: take a multiple of 4$",
        ),
        ((7, 1, 0, 2), "take a multiple of 2, or a larger micro_batch"),
    ):
        with pytest.raises(ValueError, match=text):
            elastic.cut(*arguments)
    ours, theirs = micro_batches(10, 2, None, 1)[0], micro_batches(11, 2, None, 1)[0]
    with pytest.raises(ValueError, match="the sampler was saved with size=11 and has size=10"):
        ours.load_state_dict(theirs.state_dict())
    with pytest.raises(ValueError, match="size must be a number of samples"), contextlib.nullcontext():
        elastic.Sampler(0, elastic.cut(2, None, 0, 1))
