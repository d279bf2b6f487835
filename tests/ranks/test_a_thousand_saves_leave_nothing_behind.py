"""Law: after any number of saves a process has as many file descriptors and threads as after the first few, and no more
memory. The directory holds what retention keeps and nothing else. The long form makes 1,000 saves.
"""

import os

import pytest
import torch
from checkpoint_subjects import Small, build, train
from harness import LONG, gather, on_every_rank
from peer import PEER, sw
from test_checkpoint_bytes_do_not_depend_on_the_ranks import shared_folder

pytestmark = pytest.mark.skipif(PEER == "torch", reason="shardwright's checkpoints")
SAVES, WARM = (1000, 50) if LONG else (60, 20)


def held():
    """Return (file descriptors, threads, resident bytes)."""
    pages = int(open("/proc/self/statm").read().split()[1])
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(("stage", "snapshot"), [(0, "copy"), (2, "lazy")])
@on_every_rank(deadline_s=600 if LONG else 60)
def test_nothing_grows_with_the_number_of_saves(rank, world_size, stage, snapshot):
    folder = shared_folder(rank)
    model, optimizer = sw.wrap(*build(Small), zero=stage)
    train(model, optimizer, 1, width=24)
    with sw.Checkpointer(folder, model, optimizer, snapshot=snapshot, keep_last=2) as checkpoints:
        for step in range(SAVES):
            checkpoints.save(step)
            if step % 10 == 0:
                train(model, optimizer, 1, width=24)
            if step == WARM:
                checkpoints.wait()
                fds, threads, resident = held()
        checkpoints.wait()
        after = held()
        assert after[0] == fds and after[1] == threads, (fds, threads, after)
        assert after[2] <= resident + (4 << 20), (resident, after)
        staged = checkpoints.progress["staging_bytes"]
        assert staged <= 16 << 20
    gather(None)
    if rank == 0:
        assert sorted(os.listdir(folder)) == [".lock", f"step-{SAVES - 1:06d}", f"step-{SAVES:06d}"]
    restored, restored_optimizer = sw.wrap(*build(Small, seed=4), zero=stage)
    sw.load(f"{folder}/step-{SAVES:06d}", restored, restored_optimizer)
    assert all(torch.equal(a, b) for a, b in zip(restored.state_dict().values(), model.state_dict().values()))
