"""Law: a communication hook sees the same buckets at every stage, with this rank's whole contributions, and its result
becomes the average. Training has the bits of zero=0 with that hook, and of the naive oracle if the hook is the fold in
rank order.
"""

import pytest
import torch
import torch.distributed as dist
from harness import LONG, gather, on_every_rank
from internals import process_group
from models import Fragile, Heads, Mlp
from oracle.data_parallel import NaiveDataParallel
from oracle.fold import bits_equal
from peer import PEER, batch, sw
from test_every_stage_has_the_same_bits import PRIVATE, stage
from test_hosts_fold_in_two_steps import hosts_of, on_hosts
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")

STAGES = (1, 2, 3, PRIVATE)


class Picture(nn.Module):
    """A model with a weight that is not contiguous, one that is not aligned, and one without elements."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 9, 3).to(memory_format=torch.channels_last)
        self.flat = nn.Linear(9, 5)
        self.nothing = nn.Parameter(torch.empty(0))

    def forward(self, x):
        x = x.view(-1, 1, 1, 7).expand(-1, 3, 4, 7)
        return self.flat(self.convolution(x).mean((2, 3)).tanh())


def powersgd():
    state = power.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0)
    return state, power.powerSGD_hook


HOOKS = {
    "allreduce": lambda: (None, default_hooks.allreduce_hook),
    "fp16": lambda: (None, default_hooks.fp16_compress_hook),
    "fp16 wrapper": lambda: (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "powersgd": powersgd,
}


def folded(state, bucket):
    """A hook that gathers buckets and folds them in rank order."""
    rows = [torch.empty_like(bucket.buffer()) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, bucket.buffer())
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    future = torch.futures.Future()
    future.set_result(total * torch.tensor(1 / len(rows), dtype=total.dtype))
    return future


def made(zero, state, hook, build=Mlp, **options):
    torch.manual_seed(0)
    module = build()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    wrapped, optimizer = sw.wrap(module, optimizer, **stage(zero, {"bucket_cap_mb": 0.001, **options}))
    wrapped.register_comm_hook(state, hook)
    return wrapped, optimizer


def train(wrapped, optimizer, rank, steps, first=0, **options):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        wrapped(batch(rank, 8, 7, step=step), **options).square().mean().backward()
        optimizer.step()


def values(wrapped):
    with sw.full_parameters(wrapped):
        return [p.detach().clone() for p in wrapped.module.parameters()]


def equal(left, right):
    return all(bits_equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("name", HOOKS)
@on_every_rank()
def test_torch_s_hooks_train_as_at_zero_0(rank, world_size, name):
    build = Mlp if name == "powersgd" else Picture  # torch's PowerSGD takes contiguous gradients alone
    for cap in (0.001, 25):
        expected = None
        for zero, transport in ((0, "pool"), *((zero, "pool") for zero in STAGES), (2, "staged")):
            torch.manual_seed(rank)
            wrapped, optimizer = made(zero, *HOOKS[name](), build, bucket_cap_mb=cap, transport=transport)
            train(wrapped, optimizer, rank, 5 if LONG else 4)
            found = values(wrapped)
            gather(None)
            expected = expected or found
            assert equal(found, expected), (zero, transport, cap)


@on_every_rank()
def test_views_of_a_bucket_have_the_strides_of_parameters_that_are_released(rank, world_size):
    found = []
    for zero in (0, PRIVATE):
        strides = []

        def hook(state, bucket, strides=strides):
            strides += [(g.shape, g.stride()) for g in bucket.gradients()]
            return folded(state, bucket)

        train(*made(zero, None, hook, Picture), rank, 2)
        found.append(strides)
    assert found[0] == found[1] and (27, 1, 9, 3) in [stride for _, stride in found[0]]
    compress = sw.PowerSGD(rank=1, warmup_steps=1, min_compression_rate=0)
    states = []
    for zero in (0, PRIVATE):
        torch.manual_seed(0)
        module = Picture()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        wrapped, optimizer = sw.wrap(module, optimizer, **stage(zero, {"compress": compress}))
        train(wrapped, optimizer, rank, 3)
        states.append(values(wrapped))
    assert equal(*states)


@on_every_rank()
def test_a_hook_that_lets_replicas_drift_is_refused_where_state_is_sliced(rank, world_size):
    group = dist.new_group([rank], use_local_synchronization=True)
    state = post_localSGD_hook.PostLocalSGDState(None, group, 100)
    for zero in STAGES:
        with pytest.raises(NotImplementedError, match=f"PostLocalSGDState .* zero={str(zero)[0]}"):
            made(zero, state, post_localSGD_hook.post_localSGD_hook)
    made(0, state, post_localSGD_hook.post_localSGD_hook)
    gather(None)


@pytest.mark.parametrize("zero", STAGES)
@on_every_rank()
def test_a_hook_that_folds_has_the_oracle_s_bits(rank, world_size, zero):
    wrapped, optimizer = made(zero, None, folded)
    torch.manual_seed(0)
    naive = NaiveDataParallel(Mlp())
    for step in range(4):
        naive.module.zero_grad()
        naive.module.load_state_dict(sw.full_state_dict(wrapped))
        optimizer.zero_grad()
        for model in (wrapped, naive):
            model(batch(rank, 8, 7, step=step)).square().mean().backward()
        naive.synchronise()
        found = sw.full_gradients(wrapped)
        assert all(bits_equal(found[n], p.grad) for n, p in naive.module.named_parameters()), step
        optimizer.step()


@pytest.mark.parametrize("zero", [2, PRIVATE])
@on_every_rank()
def test_accumulation_unused_parameters_and_clipping(rank, world_size, zero):
    found = []
    for each in (0, zero):
        wrapped, optimizer = made(each, None, folded, Heads, clip_grad_norm=0.1)
        for step in range(3):
            optimizer.zero_grad()
            with wrapped.no_sync():
                wrapped(batch(rank, 6, 7, step=step), "left").square().backward()
            heads = "left" if rank else "left right" if step else "left"
            wrapped(batch(rank, 6, 7, step=step + 9), heads).square().backward()
            assert ({n for n, g in sw.full_gradients(wrapped).items() if g is None} == set()) == (step > 0)
            optimizer.step()
        found.append(values(wrapped))
        gather(None)
    assert equal(*found)


@pytest.mark.parametrize("zero", [2, PRIVATE])
@on_every_rank()
def test_a_accumulated_average_is_added_to_the_result(rank, world_size, zero):
    wrapped, _ = made(zero, None, folded)
    totals = {}
    for step in range(3):
        wrapped(batch(rank, 8, 7, step=step)).square().mean().backward()
        torch.manual_seed(0)
        naive = NaiveDataParallel(Mlp())
        naive(batch(rank, 8, 7, step=step)).square().mean().backward()
        naive.synchronise()
        for name, p in naive.module.named_parameters():
            totals[name] = totals[name] + p.grad if step else p.grad.clone()
    found = sw.full_gradients(wrapped)
    assert all(bits_equal(found[name], totals[name]) for name in totals)


@pytest.mark.parametrize("zero", [2, 3, PRIVATE])
@on_every_rank()
def test_an_exception_in_a_hook_comes_out_and_the_next_step_is_clean(rank, world_size, zero):
    fail, seen = [False], []

    def hook(state, bucket):
        seen.append(bucket.index())
        if fail[0] and bucket.index() == 1:
            raise ArithmeticError("as the test asked")
        return folded(state, bucket)

    wrapped, optimizer = made(zero, None, hook, bucket_cap_mb=0.0002)
    expected, their_optimizer = made(0, None, folded, bucket_cap_mb=0.0002)
    for step in range(3):
        fail[0] = step == 1
        optimizer.zero_grad()
        if fail[0]:
            with pytest.raises(ArithmeticError, match="as the test asked"):
                wrapped(batch(rank, 8, 7, step=step)).square().mean().backward()
            continue
        seen.clear()
        train(wrapped, optimizer, rank, 1, first=step)
        assert seen == list(range(len(seen))) and len(seen) > 2
        train(expected, their_optimizer, rank, 1, first=step)
    assert equal(values(wrapped), values(expected))


@on_every_rank(at_least=2)
def test_an_exception_in_one_rank_s_backward_is_named_on_the_others(rank, world_size):
    for zero in (2, PRIVATE):
        wrapped, optimizer = made(zero, None, folded, Fragile)
        train(wrapped, optimizer, rank, 1)
        optimizer.zero_grad()
        with pytest.raises(ArithmeticError if rank == 1 else sw.Error, match=None if rank == 1 else "rank 1 .* left a"):
            wrapped(batch(rank, 8, 7), **({"fail": True} if rank == 1 else {})).sum().backward()
        optimizer.zero_grad()
        train(wrapped, optimizer, rank, 1)
        gather(None)


@on_every_rank(at_least=3)
def test_over_hosts(rank, world_size):
    with on_hosts(hosts_of("2+1", world_size)) as group:
        found = []
        for zero in (0, *STAGES):
            wrapped, optimizer = made(zero, None, folded, process_group=group)
            train(wrapped, optimizer, rank, 3)
            found.append(values(wrapped))
            gather(None)
        assert all(equal(found[0], other) for other in found[1:])


@on_every_rank(at_least=2)
def test_ranks_may_run_out_of_inputs(rank, world_size):
    found = []
    for zero in (0, 1, 2, 3):
        wrapped, optimizer = made(zero, None, folded)
        with wrapped.join():
            train(wrapped, optimizer, rank, 2 + rank)
        found.append(values(wrapped))
        gather(None)
    assert all(equal(found[0], other) for other in found[1:])


def on_a_mesh(rank, world_size):
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("cpu", torch.tensor([[0, 1], [2, 3]]), mesh_dim_names=("replicate", "shard"))
    assert process_group._forced_hosts is None
    found = []
    for zero in (0, *STAGES):
        wrapped, optimizer = made(zero, None, folded, device_mesh=mesh)
        train(wrapped, optimizer, rank, 3)
        found.append(values(wrapped))
        gather(None)
    return all(equal(found[0], other) for other in found[1:])


def test_on_a_mesh(fresh_ranks):
    with fresh_ranks(4) as team:
        assert all(team.run(on_a_mesh))
