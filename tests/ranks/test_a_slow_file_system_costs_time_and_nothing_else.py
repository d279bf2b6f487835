"""Law: if fsync or removal is slow, or a client caches missing names for minutes, saves still become durable, every
rank learns of it before anything is removed, and a restore gives the last save.

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
from shardwright_tools.cli import main
from test_checkpoint_survives_kill_at_any_moment import fill, training, values_of
from test_hosts_fold_in_two_steps import hosts_of, on_hosts

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
SAVES = 3
REMOVING_MS = 300
#: (hosts, settings of slow_files.c), in turns of one start of the programs
MISSING = {"SLOW_MISSING_S": "300"}
TURNS = {"missing": ("2+1", MISSING), "removing": (None, {"SLOW_UNLINK_MS": str(REMOVING_MS)})}
if LONG:
    TURNS |= {"missing on one host": (None, MISSING), "syncing": (None, {"SLOW_FSYNC_MS": "150"})}


@pytest.fixture
def library(tmp_path_factory) -> str:
    source, made = Path(__file__).with_name("slow_files.c"), tmp_path_factory.mktemp("slow") / "slow_files.so"
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", made, source, "-ldl"], check=True)
    return str(made)


def save_and_restore(rank, world_size, within):
    for number, (shape, settings) in enumerate(TURNS.values()):
        os.environ.update(settings)  # the library reads them at each call
        run_turn(rank, world_size, f"{within}/{number}", shape)
        for name in settings:
            del os.environ[name]


def run_turn(rank, world_size, directory, shape):
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
    if rank == 0 and "SLOW_UNLINK_MS" in os.environ:
        os.environ["SYNCED"] = f"{directory}.synced"
        assert main(["ckpt", "export", f"{directory}/step-{SAVES:06d}", f"{directory}.exported"]) == 0
        del os.environ["SYNCED"]
    print("waited", *waits)


@pytest.mark.timeout(300)
def test_saves_become_durable_and_all_ranks_hear_so(tmp_path, library):
    """Cache missing names, and delay removal and fsync."""
    store, folder = tmp_path / "store", tmp_path / "c"
    for each in (store, folder):
        each.mkdir()
    prefix = ["env", f"LD_PRELOAD={library}", f"SLOW_FOLDER={folder}"]
    late, limit_s = ["torch._dynamo"], 110 * len(TURNS) // 2
    said, statuses = run_programs(
        3, save_and_restore, str(store), prefix=prefix, imported=late, limit_s=limit_s, within=str(folder)
    )
    assert statuses == [0] * 3, said
    lines = [[line.split()[1:] for line in text.splitlines() if line.startswith("waited ")] for text in said]
    waits = {turn: [[float(each) for each in of_rank[n]] for of_rank in lines] for n, turn in enumerate(TURNS)}
    for number in range(len(TURNS)):
        assert sorted(set(os.listdir(folder / str(number))) - {".board"}) == [".lock", f"step-{SAVES:06d}"]
    for turn in (turn for turn in TURNS if turn.startswith("missing")):
        assert max(map(max, waits[turn])) < 50, waits  # a rank that polled a name would pass the deadline of 60 s
    for last in (waits["removing"][1][-1], waits["removing"][2][-1]):
        assert last < waits["removing"][0][-1] - 2 * REMOVING_MS / 1000, (
            waits
        )  # rank 0 removes the save before, after its verdict
    if LONG:
        assert min(map(min, waits["syncing"])) > 0.15, waits  # no rank hears of a checkpoint that is not durable
    check_export(folder, str([*TURNS].index("removing")))


def check_export(folder, name):
    """An export syncs each file that it wrote, their folder, and the folder that holds its name."""
    synced = [Path(line) for line in (folder / f"{name}.synced").read_text().splitlines()]
    made = [path for path in synced if path.parent.name.startswith(f"{name}.exported.")]
    assert {path.name for path in made} == set(os.listdir(folder / f"{name}.exported"))
    assert synced[-2:] == [made[0].parent, folder.resolve()]
