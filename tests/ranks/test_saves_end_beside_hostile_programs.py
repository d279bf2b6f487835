"""Law: a save ends on all ranks, durable or with one sentence, while another program stops a rank, removes the directory or the
folder that is being written, or sets files' times far back or ahead. Training continues, and the next save to a directory that
exists succeeds.
"""

import os
import shutil
import signal
import time

import pytest
from checkpoint_subjects import Small, assert_same_state, build, state_of, train
from harness import Stopwatch, gather, on_every_rank
from peer import PEER, sw
from test_checkpoint_bytes_do_not_depend_on_the_ranks import shared_folder
from test_checkpoint_damage_is_seen_by_all import agreed

pytestmark = pytest.mark.skipif(PEER == "torch", reason="shardwright's checkpoints")
STOPPED_S = 1.5


def stop_for_a_while():
    """Stop this process from a child, which lets it continue after STOPPED_S. Return the child's number."""
    child = os.fork()
    if child == 0:
        os.kill(os.getppid(), signal.SIGSTOP)
        time.sleep(STOPPED_S)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    return child


@on_every_rank(at_least=3, deadline_s=60)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_stopped_in_a_save_delays_it(rank, world_size, victim):
    model, optimizer = build(Small)
    with sw.Checkpointer(shared_folder(rank), model, optimizer) as checkpoints:
        train(model, optimizer, 1, 24)
        saved = state_of(model, optimizer)
        checkpoints.save(0)
        begin = Stopwatch()
        child = stop_for_a_while() if rank == victim else 0
        checkpoints.wait()
        if child:
            os.waitpid(child, 0)
        assert rank == victim or begin.seconds() < 30
        train(model, optimizer, 1, 24)
        assert checkpoints.restore() == 1
        assert_same_state(state_of(model, optimizer), saved)


@on_every_rank(at_least=3, deadline_s=60)
def test_a_directory_that_is_removed_is_named_and_costs_no_step(rank, world_size):
    folder = shared_folder(rank)
    path = f"{folder}/runs"
    model, optimizer = build(Small)
    checkpoints = sw.Checkpointer(path, model, optimizer)
    try:
        checkpoints.save(0)
        checkpoints.wait()
        gather(None)
        if rank == 0:
            shutil.rmtree(path)
        gather(None)

        def save():
            checkpoints.save(1)
            checkpoints.wait()

        assert path in agreed(save)
        train(model, optimizer, 1, 24)
        if rank == 0:
            os.mkdir(path)
        gather(None)
        checkpoints.save(2)
        checkpoints.wait()
        assert checkpoints.restore() == 3
    finally:
        checkpoints.close()


@on_every_rank(at_least=3, deadline_s=60)
@pytest.mark.parametrize("shift_s", [-(10**9), 10**9])
def test_times_of_files_do_not_decide_about_a_save_that_lives(rank, world_size, shift_s):
    """As after a clock was set: a save under way, and what it wrote, look very old, or of the future."""
    folder = shared_folder(rank)
    model, optimizer = build(Small)
    with sw.Checkpointer(folder, model, optimizer, keep_last=2) as checkpoints:
        for step in range(4):
            checkpoints.save(step)
            if rank == 0:
                for place, folders, files in os.walk(folder):
                    for name in (*folders, *files):
                        try:
                            now = os.stat(f"{place}/{name}", follow_symlinks=False).st_mtime
                            os.utime(f"{place}/{name}", (now + shift_s, now + shift_s), follow_symlinks=False)
                        except FileNotFoundError:  # renamed meanwhile
                            continue
            checkpoints.wait()
        assert checkpoints.latest == 4 and checkpoints.restore() == 4
        gather(None)
        assert sorted(name for name in os.listdir(folder) if name.startswith("step")) == ["step-000003", "step-000004"]
