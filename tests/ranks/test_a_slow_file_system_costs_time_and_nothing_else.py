"""Law: where fsync or removing is slow, or where a client remembers missing names for minutes, saves become durable, every rank hears
so before anything is removed, and what is restored is what was saved last.

Programs run with slow_files.c preloaded.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path

import pytest
import torch
from harness import LONG, run_programs
from peer import PEER, sw
from shardwright.cli import main
from test_checkpoint_survives_kill_at_any_moment import fill, training, values_of
from test_hosts_fold_in_two_steps import hosts_of, on_hosts

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
SAVES = 3
REMOVING_MS = 300


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> str:
    source, made = Path(__file__).with_name("slow_files.c"), tmp_path_factory.mktemp("slow") / "slow_files.so"
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", made, source, "-ldl"], check=True)
    return str(made)


def save_and_restore(rank, world_size, directory, shape):
    hosts = on_hosts(hosts_of(shape, world_size)) if shape else contextlib.nullcontext()
    probe = f"{directory}.probe{rank}"
    if os.environ.get("SLOW_MISSING_S") and not os.path.exists(probe):
        subprocess.run(["env", "-u", "LD_PRELOAD", "touch", probe], check=True)
        assert not os.path.exists(probe) and os.path.basename(probe) in os.listdir(os.path.dirname(probe))
    with hosts as group:
        model, optimizer = training()
        waits = []
        with sw.Checkpointer(
            directory, model, optimizer, keep_last=1, process_group=group or torch.distributed.group.WORLD, timeout_s=60
        ) as checkpoints:
            for step in range(SAVES):
                fill(model, optimizer, step + 1)
                checkpoints.save(step)
                begin = time.monotonic()
                checkpoints.wait()
                waits.append(time.monotonic() - begin)
            fill(model, optimizer, 99)
            assert checkpoints.restore() == SAVES
            assert values_of(model, optimizer) == {float(SAVES)}
    if rank == 0 and "SYNCED" in os.environ:
        assert main(["ckpt", "export", f"{directory}/step-{SAVES:06d}", f"{directory}.exported"]) == 0
    print("waited", *waits)


def run(world_size, tmp_path, library, shape=None, **settings):
    store, directory = tmp_path / "store", tmp_path / "c"
    store.mkdir()
    given = [f"{name}={value}" for name, value in settings.items()]
    prefix = ["env", f"LD_PRELOAD={library}", f"SLOW_FOLDER={directory}", *given]
    said, statuses = run_programs(
        world_size, save_and_restore, str(store), prefix=prefix, limit_s=110, directory=str(directory), shape=shape
    )
    assert statuses == [0] * world_size, said
    assert sorted(set(os.listdir(directory)) - {".board"}) == [".lock", f"step-{SAVES:06d}"]
    return [[float(each) for each in text.rpartition("waited")[2].split()] for text in said]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("shape", [None, "2+1"] if LONG else ["2+1"])
def test_names_that_a_client_remembers_as_missing(tmp_path, library, shape):
    waits = run(3, tmp_path, library, shape, SLOW_MISSING_S=300)
    assert max(map(max, waits)) < 50, waits  # whoever polled a name would wait beyond the deadline of 60 s


@pytest.mark.skipif(not LONG, reason="long form only (SW_TEST_LONG=1)")
@pytest.mark.timeout(120)
def test_an_fsync_of_150_ms(tmp_path, library):
    waits = run(3, tmp_path, library, SLOW_FSYNC_MS=150)
    assert min(map(min, waits)) > 0.15, waits  # nobody hears of a checkpoint that is not durable


@pytest.mark.timeout(120)
def test_the_verdict_does_not_wait_for_what_is_removed(tmp_path, library):
    """Then an export syncs each file that it wrote, their folder, and the folder that holds its name."""
    waits = run(3, tmp_path, library, SLOW_UNLINK_MS=REMOVING_MS, SYNCED=tmp_path / "synced")
    synced = [Path(line) for line in (tmp_path / "synced").read_text().splitlines()]
    made = [path for path in synced if path.parent.name.startswith("c.exported.")]
    assert {path.name for path in made} == set(os.listdir(tmp_path / "c.exported"))
    assert synced[-2:] == [made[0].parent, tmp_path.resolve()]
    for last in (waits[1][-1], waits[2][-1]):
        assert last < waits[0][-1] - 2 * REMOVING_MS / 1000, waits  # rank 0 removes the folder of the save before
