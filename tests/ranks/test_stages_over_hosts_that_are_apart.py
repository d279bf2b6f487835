"""Two hosts that are really apart, at every stage: the losses of zero=0 there, which are those of one machine told to be two; and a
rank that is killed while updated slices travel is named on every survivor."""

import os
import pathlib
import signal
import time

import pytest
import shardwright as sw
import torch
import torch.distributed as dist
from harness import LONG, RanksFailed
from shardwright import process_group
from test_a_dead_host_is_named import ends_in_order
from test_every_stage_has_the_same_bits import PRIVATE, stage

STEPS = 4
TIMEOUT_S = 8.0
#: what a dead process shows as soon as the link of 10 Mbit/s has passed what was under way
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


def trains_until_an_error(rank, world_size, zero):
    """(kind, rank, host, text, when) of the error of a step whose slices take half a second."""
    torch.manual_seed(0)
    module = torch.nn.Linear(400, 400)
    model, optimizer = sw.wrap(
        module, torch.optim.SGD(module.parameters(), lr=0.1), timeout_s=TIMEOUT_S, **stage(zero, {})
    )
    try:
        for step in range(100):
            model(torch.ones(2, 400)).sum().backward()
            if step == 1:
                model._engine().group.comm.barrier()
                pathlib.Path(os.environ["SW_TEST_FOLDER"], f"steps-{rank}").touch()
            optimizer.step()
    except sw.CommError as error:
        return type(error).__name__, error.rank, error.host, str(error), time.monotonic()
    return None


@pytest.mark.parametrize(
    ("zero", "victim"), [(2, 2), (3, 0), *([(1, 0), (1, 2), (2, 1), (3, 2), (PRIVATE, 0)] if LONG else [(PRIVATE, 1)])]
)
def test_a_rank_killed_while_slices_travel_is_named_on_every_host(hosts, zero, victim):
    with hosts(2, 1, rate="10mbit") as lab:
        lab.team.start(trains_until_an_error, zero=zero)
        folder, deadline = pathlib.Path(lab.team._folder.name), time.monotonic() + 30
        while len(list(folder.glob("steps-*"))) < 3:
            if time.monotonic() > deadline:
                raise RanksFailed(lab.team.wait(1))
            time.sleep(0.01)
        time.sleep(0.15)
        when = time.monotonic()
        lab.team.signal(victim, signal.SIGKILL)
        outcomes = lab.team.wait(TIMEOUT_S + 15, ignore=[victim], patient=True)
        survivors = [rank for rank in range(3) if rank != victim]
        for rank in survivors:
            assert outcomes[rank].ok and outcomes[rank].value, outcomes
            kind, culprit, host, text, raised = outcomes[rank].value
            assert (kind, culprit, host) == ("CommError", victim, f"host{lab.host_of(victim)}"), outcomes
            assert f"rank {victim}" in text and raised - when < AT_ONCE_S, (text, raised - when)
            assert victim == 1 or "updated parameters of Linear" in text, text  # a carrier's end is its host's
        ends_in_order(lab, survivors)
