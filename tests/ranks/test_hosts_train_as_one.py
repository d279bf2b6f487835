"""Two hosts that are really apart train as two that this machine is told to be: the same losses, bit for bit."""

import os

import shardwright as sw
import torch
import torch.distributed as dist
from oracle.fold import bits_equal
from shardwright import process_group

STEPS = 6


def losses_of_a_training(rank, world_size, forced=None, compress=None):
    process_group._forced_hosts = forced
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 64))
    model, optimizer = sw.wrap(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), bucket_cap_mb=0.1, timeout_s=20, compress=compress
    )
    losses = []
    for step in range(STEPS):
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step * world_size + rank))
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item())
    described = sw.describe()["communicators"]
    return losses, [described[name]["hosts"] for name in described], os.uname().nodename


def test_two_hosts_of_two_ranks_have_the_losses_of_one_told_to_be_two(hosts, fresh_ranks):
    with fresh_ranks(4) as team:
        told = team.run(losses_of_a_training, forced=[0, 0, 1, 1])
    with hosts(2, 2) as lab:
        apart = lab.team.run(losses_of_a_training)
    assert bits_equal(torch.tensor([losses for losses, _, _ in told]), torch.tensor([losses for losses, _, _ in apart]))
    assert all(seen == [{"host 0": "host0, ranks 0, 1", "host 1": "host1, ranks 2, 3"}] for _, seen, _ in apart), apart


def test_compressors_work_between_hosts_that_are_apart(hosts, fresh_ranks):
    compress = sw.PowerSGD(rank=4, warmup_steps=1)
    with fresh_ranks(3) as team:
        told = team.run(losses_of_a_training, forced=[0, 0, 1], compress=compress)
    with hosts(2, 1) as lab:
        apart = lab.team.run(losses_of_a_training, compress=compress)
    assert bits_equal(torch.tensor([losses for losses, _, _ in told]), torch.tensor([losses for losses, _, _ in apart]))


def test_uneven_hosts_find_their_map_and_train(hosts):
    with hosts(2, 1) as lab:
        values = lab.team.run(losses_of_a_training)
    assert values[0][1] == [{"host 0": "host0, ranks 0, 1", "host 1": "host1, ranks 2"}]
    assert values[0][0] == values[2][0] and values[0][0][-1] < values[0][0][0]
