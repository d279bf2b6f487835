"""Law: two separate hosts have zero=0's losses at every stage, which are those of two simulated hosts. Every survivor
names a rank that is killed while updated slices travel.
"""

import os
import pathlib
import signal
import time

import pytest
import shardwright as sw
import torch
import torch.distributed as dist
from harness import LONG
from internals import process_group, wire
from test_a_dead_host_is_named import ends_in_order
from test_every_stage_has_the_same_bits import PRIVATE, stage

STEPS = 4
TIMEOUT_S = 8.0
#: what a dead process shows
AT_ONCE_S = 1.5


def losses_at_every_stage(rank, world_size, forced=None):
    process_group._forced_hosts = forced
    found = {}
    for zero in (0, 1, 2, 3, PRIVATE):
        torch.manual_seed(3)
        module = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 64))
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        options = stage(zero, {"bucket_cap_mb": 0.1, "timeout_s": 20})
        model, optimizer = sw.wrap(module, optimizer, clip_grad_norm=0.5, **options)
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
        found[zero] = losses
        dist.barrier()
    return found


def test_two_hosts_of_two_ranks_at_every_stage(hosts, fresh_ranks):
    with fresh_ranks(4) as team:
        told = team.run(losses_at_every_stage, forced=[0, 0, 1, 1])
    with hosts(2, 2) as lab:
        apart = lab.team.run(losses_at_every_stage)
    assert apart == told and apart[0][0][-1] < apart[0][0][0]
    assert all(found[zero] == found[0] for found in apart for zero in found)


SLICE = 5  # sw_message of csrc/comm/bridge.h, above the 28 bits of a number


def end():
    pathlib.Path(os.environ["SW_TEST_FOLDER"], "killed").write_text(str(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


class Ends(torch.optim.SGD):
    """An optimizer that kills its rank after it has updated its slices for the second time, if it is the victim."""

    steps = 0
    is_victim = False

    def step(self, closure=None):
        loss = super().step(closure)
        self.steps += 1
        if self.steps == 2 and self.is_victim:
            end()
        return loss


def end_at_slice(count):
    """Kill a carrier as it sends its `count`-th block of updated slices."""
    send, sent = wire.Wire.send, []

    def send_or_end(self, rank, tag, address, nbytes):
        if tag >> 28 == SLICE:
            sent.append(tag)
            if len(sent) == count:
                end()
        return send(self, rank, tag, address, nbytes)

    wire.Wire.send = send_or_end


def trains_until_an_error(rank, world_size, zero, victim):
    """Return (kind, rank, host, text, time) of the error."""
    torch.manual_seed(0)
    module = torch.nn.Linear(1024, 1024)  # of which a rank owns 6 blocks
    optimizer = Ends(module.parameters(), lr=0.1)
    optimizer.is_victim = rank == victim == 1
    model, optimizer = sw.wrap(module, optimizer, partition="flat", timeout_s=TIMEOUT_S, **stage(zero, {}))
    if rank == victim and rank != 1:
        end_at_slice(6 * (2 if rank == 0 else 1) + 3)
    try:
        for _ in range(10):
            model(torch.ones(2, 1024)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    except sw.CommError as error:
        return type(error).__name__, error.rank, error.host, str(error), time.monotonic()
    return None


@pytest.mark.parametrize(
    ("zero", "victim"), [(2, 2), (3, 0), *([(1, 0), (1, 2), (2, 1), (3, 2), (PRIVATE, 0)] if LONG else [(PRIVATE, 1)])]
)
def test_a_rank_killed_while_slices_travel_is_named_on_every_host(hosts, zero, victim):
    with hosts(2, 1) as lab:
        lab.team.start(trains_until_an_error, zero=zero, victim=victim)
        outcomes = lab.team.wait(TIMEOUT_S + 20, ignore=[victim], patient=True)
        when = float(pathlib.Path(lab.team._folder.name, "killed").read_text())
        survivors = [rank for rank in range(3) if rank != victim]
        for rank in survivors:
            assert outcomes[rank].ok and outcomes[rank].value, outcomes
            kind, culprit, host, text, raised = outcomes[rank].value
            assert (kind, culprit, host) == ("CommError", victim, f"host{lab.host_of(victim)}"), outcomes
            assert f"rank {victim}" in text and raised - when < AT_ONCE_S, (text, raised - when)
            assert "updated parameters of Linear" in text, text
        ends_in_order(lab, survivors)
