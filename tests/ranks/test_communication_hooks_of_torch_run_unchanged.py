"""Law: a hook registered with register_comm_hook owns the buckets, by torch's GradBucket protocol: the result of its
future becomes `.grad`. torch's own hooks run unchanged.
"""

import pytest
import torch
import torch.distributed as dist
from harness import gather, on_every_rank, same_everywhere
from models import Fragile, Heads, Mlp
from oracle.fold import bits_equal
from peer import PEER, batch, engine, pair, zero_grad
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

both_caps = pytest.mark.parametrize("cap", [0.001, 25])


def backward(model, rank, step):
    model(batch(rank, 6, 7, step=step)).square().mean().backward()


def relative_difference(wrapped, naive):
    ours = torch.cat([parameter.grad.flatten() for parameter in wrapped.module.parameters()])
    theirs = torch.cat([parameter.grad.flatten() for parameter in naive.module.parameters()])
    return float((ours - theirs).norm() / theirs.norm())


HOOKS = {
    "allreduce": (default_hooks.allreduce_hook, 1e-6),  # gloo's order, in float32
    "fp16_compress": (default_hooks.fp16_compress_hook, 2**-10),  # two roundings to 11 bits and sums in them
    "fp16_compress_wrapper": (default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook), 2**-10),
}


@both_caps
@pytest.mark.parametrize("name", HOOKS)
@on_every_rank()
def test_torchs_hooks_give_the_mean_to_their_precision(rank, world_size, name, cap):
    hook, bound = HOOKS[name]
    wrapped, naive = pair(Mlp, bucket_cap_mb=cap)
    wrapped.register_comm_hook(None, hook)
    for step in range(3):
        backward(wrapped, rank, step)
        backward(naive, rank, step)
        naive.synchronise()
        assert relative_difference(wrapped, naive) <= bound
        assert same_everywhere([parameter.grad for parameter in wrapped.module.parameters()])
        zero_grad(wrapped, naive)


@on_every_rank()
def test_powersgd_gives_every_rank_one_gradient_that_trains(rank, world_size):
    wrapped, naive = pair(lambda: torch.nn.Sequential(torch.nn.Linear(7, 64), torch.nn.Tanh(), torch.nn.Linear(64, 16)))
    state = power.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    wrapped.register_comm_hook(state, power.powerSGD_hook)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.5)
    losses = []
    for step in range(24):
        x = batch(rank, 32, 7, step=step % 3)
        loss = wrapped(x).square().mean()
        losses.append(float(loss))
        loss.backward()
        if step < 2:  # plain averages until start_powerSGD_iter
            naive.module.load_state_dict(wrapped.module.state_dict())
            naive.module.zero_grad()
            naive(x).square().mean().backward()
            naive.synchronise()
            assert relative_difference(wrapped, naive) <= 1e-6
        assert same_everywhere([parameter.grad for parameter in wrapped.module.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    assert sum(losses[-3:]) < 0.7 * sum(losses[:3]), losses


@both_caps
@on_every_rank()
def test_a_hook_sees_every_gradient_once_in_order_and_its_result_is_the_gradient(rank, world_size, cap):
    wrapped, naive = pair(Mlp, bucket_cap_mb=cap)
    known = {id(parameter): name for name, parameter in wrapped.module.named_parameters()}
    seen = []

    def hook(state, bucket):
        assert state == "state"
        buffer, gradients, parameters = bucket.buffer(), bucket.gradients(), bucket.parameters()
        assert buffer.dim() == 1 and len(gradients) == len(parameters)
        for gradient, parameter in zip(gradients, parameters, strict=True):
            name = known[id(parameter)]
            assert gradient.shape == parameter.shape
            assert bits_equal(gradient, dict(naive.module.named_parameters())[name].grad), name
            start = buffer.data_ptr()
            assert start <= gradient.data_ptr() < start + buffer.numel() * buffer.element_size()
            seen.append(name)
        indices.append((bucket.index(), bucket.is_last()))
        future = torch.futures.Future()
        future.set_result(torch.full_like(buffer, bucket.index() + 1.0))
        return future

    wrapped.register_comm_hook("state", hook)
    for step in range(2):
        seen.clear()
        indices = []
        backward(naive, rank, step)  # the local gradient: what the bucket must hold
        backward(wrapped, rank, step)
        assert sorted(seen) == sorted(known.values())
        assert indices == [(index, index == len(indices) - 1) for index in range(len(indices))]
        assert len(indices) == 1 if cap == 25 else len(indices) > 1
        values = {float(parameter.grad.flatten()[0]) for parameter in wrapped.module.parameters()}
        assert values == {index + 1.0 for index in range(len(indices))}
        assert all(parameter.grad.eq(parameter.grad.flatten()[0]).all() for parameter in wrapped.module.parameters())
        zero_grad(wrapped, naive)


@on_every_rank()
def test_a_hook_may_write_into_the_buffer_or_replace_it(rank, world_size):
    for replace in (False, True):
        wrapped, naive = pair(Mlp)

        def hook(state, bucket, replace=replace):
            if replace:
                bucket.set_buffer(bucket.buffer() * 3)
            else:
                bucket.buffer().mul_(3)
            return done(bucket.buffer())

        wrapped.register_comm_hook(None, hook)
        backward(wrapped, rank, 0)
        backward(naive, rank, 0)
        for ours, theirs in zip(wrapped.module.parameters(), naive.module.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad * 3)


def done(value):
    future = torch.futures.Future()
    future.set_result(value)
    return future


@on_every_rank()
def test_a_hook_that_communicates_by_itself(rank, world_size):
    wrapped, naive = pair(Mlp, bucket_cap_mb=0.001)

    def hook(group, bucket):
        work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
        return work.get_future().then(lambda future: future.value()[0] / world_size)

    wrapped.register_comm_hook(dist.group.WORLD, hook)
    for step in range(2):
        backward(wrapped, rank, step)
        backward(naive, rank, step)
        naive.synchronise()
        assert relative_difference(wrapped, naive) <= 1e-6
        zero_grad(wrapped, naive)


@on_every_rank()
def test_no_hook_runs_under_no_sync(rank, world_size):
    wrapped, naive = pair(Mlp)
    calls = []

    def hook(state, bucket):
        calls.append(bucket.index())
        return default_hooks.allreduce_hook(state, bucket)

    wrapped.register_comm_hook(None, hook)
    with wrapped.no_sync():
        for model in (wrapped, naive):
            backward(model, rank, 0)
    assert calls == []
    backward(wrapped, rank, 1)
    backward(naive, rank, 1)
    naive.synchronise()
    assert calls == [0] and relative_difference(wrapped, naive) <= 1e-6


@on_every_rank()
def test_what_no_rank_used_is_left_alone_by_a_hook(rank, world_size):
    wrapped, naive = pair(Heads, find_unused_parameters=engine is None)
    wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
    for step in range(2):
        for model in (wrapped, naive):
            model(batch(rank, 6, 7, step=step), "left" if rank else "left right" if step else "left").backward()
        naive.synchronise()
        for (name, ours), theirs in zip(wrapped.module.named_parameters(), naive.module.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None), name
            assert ours.grad is None or torch.allclose(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6), name


@pytest.mark.skipif(PEER == "torch", reason="torch's reducer is left unusable")
@on_every_rank()
def test_an_exception_in_a_hook_comes_out_of_the_backward(rank, world_size):
    wrapped, naive = pair(Mlp, bucket_cap_mb=0.0002)
    fail, seen = [True], []

    def hook(state, bucket):
        seen.append(bucket.index())
        if fail[0] and bucket.index() == 1:
            raise ArithmeticError("as the test asked")
        return default_hooks.allreduce_hook(state, bucket)

    wrapped.register_comm_hook(None, hook)
    with pytest.raises(ArithmeticError, match="as the test asked"):
        backward(wrapped, rank, 0)
    fail[0] = False
    seen.clear()
    zero_grad(wrapped, naive)
    backward(wrapped, rank, 1)
    assert len(seen) > 2 and seen == list(range(len(seen))), seen  # a hook's state goes by the index
    backward(naive, rank, 1)
    naive.synchronise()
    assert relative_difference(wrapped, naive) <= 1e-6


@pytest.mark.skipif(PEER == "torch", reason="torch hangs")
@both_caps
@on_every_rank(at_least=2)
def test_an_exception_in_the_backward_of_one_rank_is_named_on_the_others(rank, world_size, cap):
    wrapped, naive = pair(Fragile, bucket_cap_mb=cap)
    wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
    backward(wrapped, rank, 0)
    zero_grad(wrapped, naive)
    if rank == 1:
        with pytest.raises(ArithmeticError, match="as the test asked"):
            wrapped(batch(rank, 6, 7), fail=True).sum().backward()
    else:
        with pytest.raises(engine.Error, match="rank 1 .* left a backward unfinished"):
            backward(wrapped, rank, 0)
    zero_grad(wrapped, naive)
    backward(wrapped, rank, 1)
    backward(naive, rank, 1)
    naive.synchronise()
    assert relative_difference(wrapped, naive) <= 1e-6


@on_every_rank()
def test_a_second_hook_and_a_wrong_one_are_refused(rank, world_size):
    wrapped, _ = pair(Mlp)
    with pytest.raises((TypeError, ValueError)):
        wrapped.register_comm_hook(None, 3)
    wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(RuntimeError):
        wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
    gather(None)
