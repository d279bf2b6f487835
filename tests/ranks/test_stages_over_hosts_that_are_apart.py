"""Two hosts that are really apart, at every stage: the losses of zero=0 there, which are those of one machine told to be two; and a
rank that is killed while updated slices travel is named on every survivor."""

import os
import pathlib
import signal
import threading
import time

import pytest
import shardwright as sw
import torch
import torch.distributed as dist
from harness import LONG
from shardwright import process_group
from test_a_dead_host_is_named import ends_in_order
from test_every_stage_has_the_same_bits import PRIVATE, stage

STEPS = 4
TIMEOUT_S = 8.0
KILLED_AFTER_S = 0.15
#: what a dead process shows as soon as the link has passed what was under way
AT_ONCE_S = 3.0


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


class EndsWhileSlicesTravel(torch.optim.SGD):
    """An optimizer of a rank that is killed a moment after its second step, whose slices take much longer."""

    steps = 0

    def step(self, closure=None):
        loss = super().step(closure)
        self.steps += 1
        if self.steps == 2:
            threading.Timer(KILLED_AFTER_S, self.end).start()
        return loss

    def end(self):
        pathlib.Path(os.environ["SW_TEST_FOLDER"], "killed").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)


def trains_until_an_error(rank, world_size, zero, victim):
    """(kind, rank, host, text, when) of the error."""
    torch.manual_seed(0)
    module = torch.nn.Linear(800, 800)
    optimizer = (EndsWhileSlicesTravel if rank == victim else torch.optim.SGD)(module.parameters(), lr=0.1)
    model, optimizer = sw.wrap(module, optimizer, partition="flat", timeout_s=TIMEOUT_S, **stage(zero, {}))
    try:
        for _ in range(10):
            model(torch.ones(2, 800)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    except sw.CommError as error:
        return type(error).__name__, error.rank, error.host, str(error), time.monotonic()
    return None


@pytest.mark.parametrize(
    ("zero", "victim"), [(2, 2), (3, 0), *([(1, 0), (1, 2), (2, 1), (3, 2), (PRIVATE, 0)] if LONG else [(PRIVATE, 1)])]
)
def test_a_rank_killed_while_slices_travel_is_named_on_every_host(hosts, zero, victim):
    """2.6 MB at 20 Mbit/s: a host's slices take 0.3 or 0.7 s."""
    with hosts(2, 1, rate="20mbit") as lab:
        lab.team.start(trains_until_an_error, zero=zero, victim=victim)
        outcomes = lab.team.wait(TIMEOUT_S + 20, ignore=[victim], patient=True)
        when = float(pathlib.Path(lab.team._folder.name, "killed").read_text())
        survivors = [rank for rank in range(3) if rank != victim]
        for rank in survivors:
            assert outcomes[rank].ok and outcomes[rank].value, outcomes
            kind, culprit, host, text, raised = outcomes[rank].value
            assert (kind, culprit, host) == ("CommError", victim, f"host{lab.host_of(victim)}"), outcomes
            assert f"rank {victim}" in text and raised - when < AT_ONCE_S, (text, raised - when)
            assert victim == 1 or "updated parameters of Linear" in text, text  # a carrier's end is its host's
        ends_in_order(lab, survivors)
