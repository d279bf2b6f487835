"""Law: a communicator over hosts that has ended, in order or with an error, leaves no socket, thread or wire memory in
its process when the next one replaces it. One that ended in the middle of a message may leave a thread (hosts.md), but
no gradients.
"""

import ctypes
import gc
import os
import pathlib
import re
import signal
import time

import internals
import pytest
import torch
import torch.distributed as dist
from harness import RanksFailed, Stopwatch, gather
from internals import process_group, wire
from models import Mlp
from peer import PEER, batch, data_parallel, engine

pytestmark = pytest.mark.skipif(PEER == "torch", reason="torch's groups are torch's")

TIMES = 20


def held():
    """Return the file descriptors and threads of this process, after those that are ending have ended."""
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
    """Return this process's resources after each communicator: the first two, with which torch warms up, and the last."""
    counts = []
    for made in range(TIMES):
        torch.manual_seed(0)
        group = dist.new_group() if end == "well" else None
        model = data_parallel(Mlp(), process_group=group, timeout_s=10)
        step(model, rank)
        host_group = internals.replica(model).group
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


def test_bytes_for_the_wire_leave_no_type_behind():
    """ctypes would make and keep a type for each length, which takes longer than sending."""
    memory = torch.arange(256, dtype=torch.uint8)
    before = len(ctypes.Array.__subclasses__())
    views = [wire._bytes_at(memory.data_ptr(), nbytes) for nbytes in range(1, 200)]
    assert all(torch.equal(view, memory[: view.numel()]) for view in views)
    assert len(ctypes.Array.__subclasses__()) == before


def gradient_bytes():
    """Return the bytes of shared memory that this process has mapped and touched."""
    with open("/proc/self/smaps", encoding="ascii") as file:
        return sum(1024 * int(kib) for kib in re.findall(r"/memfd:.*\n(?:[^-\n]*\n)*?Rss: +(\d+) kB", file.read()))


def loses_a_host_in_the_middle(rank, world_size, folder):
    """Average 36 MB of gradients at 200 Mbit/s. Return the bytes mapped by them and after closing, and the seconds of
    closing.
    """
    torch.manual_seed(0)
    model = data_parallel(torch.nn.Linear(3000, 3000), timeout_s=20)
    group = internals.replica(model).group
    while True:
        model.zero_grad()
        live = gradient_bytes()
        try:
            model(batch(rank, 2, 3000)).square().mean().backward()
        except engine.CommError:
            break
        pathlib.Path(folder, f"training-{rank}").touch()
    begin = Stopwatch()
    group.close()
    seconds = begin.seconds()
    process_group._groups.clear()
    del model, group
    gc.collect()
    return live, gradient_bytes(), seconds


def test_one_that_ended_in_the_middle_of_a_message_leaves_no_gradients(hosts, tmp_path):
    with hosts(1, 1, rate="200mbit") as lab:
        lab.team.start(loses_a_host_in_the_middle, folder=str(tmp_path))
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        time.sleep(0.45)
        lab.team.signal(1, signal.SIGKILL)
        outcomes = lab.team.wait(15, ignore=[1], patient=True)
    if not outcomes[0].ok:
        raise RanksFailed(outcomes)
    live, left, seconds = outcomes[0].value
    assert live > 4 * 3000 * 3000 and left < 1 << 20, (live, left)
    assert seconds < 4, seconds
