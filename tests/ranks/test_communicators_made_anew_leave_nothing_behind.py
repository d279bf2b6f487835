"""Law of communicators over hosts: one that has ended, well or with an error, leaves no socket, no thread and no memory of the
wire in its process when another takes its place."""

import gc
import os
import time

import pytest
import torch
import torch.distributed as dist
from harness import gather
from models import Mlp
from peer import PEER, batch, data_parallel, engine

pytestmark = pytest.mark.skipif(PEER == "torch", reason="torch's groups are torch's")

TIMES = 20


def held():
    """Descriptors and threads of this process, once those that are ending have ended."""
    found = None
    for _ in range(100):
        before, found = found, (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))
        if found == before:
            break
        time.sleep(0.01)
    return found


def step(model, rank):
    model.zero_grad()
    model(batch(rank, 6, 7)).square().mean().backward()


def is_made_anew(rank, world_size, end):
    """What this process holds after each of the communicators: the first two, which torch warms up with, and the last."""
    counts = []
    for made in range(TIMES):
        torch.manual_seed(0)
        group = dist.new_group() if end == "well" else None
        model = data_parallel(Mlp(), process_group=group, timeout_s=10)
        step(model, rank)
        host_group = model._engine().group
        assert host_group.host_count == 2
        if end == "well":
            host_group.close()
            dist.destroy_process_group(group)
        elif rank == made % world_size:
            host_group.comm.abort("it was told to stop")
        else:
            with pytest.raises(engine.CommError):
                step(model, rank)
        del model, host_group, group
        gc.collect()
        gather(None)
        counts.append(held())
    return counts


@pytest.mark.parametrize("end", ["well", "with an error"])
def test_twenty_communicators_leave_nothing_behind(hosts, end):
    with hosts(2, 1) as lab:
        for counts in lab.team.run(is_made_anew, end=end, deadline_s=60):
            assert counts[-1] <= max(counts[1:3]), counts
