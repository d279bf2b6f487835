"""Law: two separate hosts train as two simulated ones, with the same losses bit for bit. Packets on a slow link are
shorter and give the same gradients. Finished buckets are sent during the backward.
"""

import hashlib
import os
import time

import pytest
import shardwright as sw
import torch
import torch.distributed as dist
from internals import process_group
from oracle.fold import bits_equal

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


UNEVEN = {
    (2, 1): {"host 0": "host0, ranks 0, 1", "host 1": "host1, ranks 2"},
    (3, 2): {"host 0": "host0, ranks 0, 1, 2", "host 1": "host1, ranks 3, 4"},
}


@pytest.mark.parametrize("shape", UNEVEN, ids=["2+1", "3+2"])
def test_uneven_hosts_find_their_map_and_train(hosts, shape):
    with hosts(*shape) as lab:
        values = lab.team.run(losses_of_a_training)
    for losses, described, _ in values:
        assert described == [UNEVEN[shape]] and losses == values[0][0] and losses[-1] < losses[0]


def bytes_sent_by_the_last_gradient(rank, world_size):
    """Return the bytes that this host has sent when the backward has reached its last gradient and idles there, and the
    others' total.
    """
    torch.manual_seed(3)
    model = sw.wrap(torch.nn.Sequential(torch.nn.Linear(8, 400), torch.nn.Linear(400, 400)), bucket_cap_mb=0.1)
    sent = []

    def idles(_):
        deadline = time.monotonic() + 2
        while bytes_sent() - before < 4 * 400 * 400 and time.monotonic() < deadline:
            time.sleep(0.01)
        sent.append(bytes_sent() - before)

    model.module[0].weight.register_hook(idles)
    for _ in range(2):
        dist.barrier()
        before = bytes_sent()
        model(torch.ones(2, 8)).sum().backward()
    return sent[-1], 4 * 400 * 400


def test_gradients_cross_while_the_backward_goes_on(hosts):
    with hosts(2, 1) as lab:
        for sent, least in lab.team.run(bytes_sent_by_the_last_gradient):
            assert sent >= least, (sent, least)


WIDE = 1500


def gradients_over_a_link(rank, world_size):
    """Return digests of each step's gradients, and the bytes that this host sent in each step."""
    torch.manual_seed(3)
    model = sw.wrap(torch.nn.Linear(WIDE, WIDE), timeout_s=20)
    dist.barrier()  # the parameters of rank 0 have arrived, and not only left
    digests, sent = [], []
    for step in range(4):
        before = bytes_sent()
        x = torch.randn(4, WIDE, generator=torch.Generator().manual_seed(step * world_size + rank))
        model.zero_grad()
        (model(x) ** 2).mean().backward()
        digests.append(hashlib.sha256(model.module.weight.grad.numpy().tobytes()).hexdigest())
        dist.barrier()
        sent.append(bytes_sent() - before)
    return digests, sent


def bytes_sent():
    with open("/proc/self/net/dev", encoding="ascii") as file:
        return next((int(line.split()[9]) for line in file if line.strip().startswith("eth0:")), 0)


def gradients_told(rank, world_size):
    process_group._forced_hosts = [0, 0, 1]
    return gradients_over_a_link(rank, world_size)


def test_a_slow_link_carries_fewer_bytes_and_the_same_gradients(hosts, fresh_ranks):
    """Packets begin at the second step, after the first was slow. Loopback is never slow."""
    with fresh_ranks(3) as team:
        told = team.run(gradients_told)
    with hosts(2, 1, rate="500mbit") as lab:
        apart = lab.team.run(gradients_over_a_link)
    assert all(digests == told[0][0] for digests, _ in [*told, *apart])
    gradient_bytes = 4 * WIDE * (WIDE + 1)
    for rank in (0, 2):
        sent = apart[rank][1]
        assert 0.99 < sent[0] / gradient_bytes < 1.03 and all(0.85 < s / gradient_bytes < 0.92 for s in sent[1:]), sent
