"""Law: of concurrent saves to one path, by disjoint groups of a job or by two jobs, one is there afterwards, whole. The
others raise on all of their ranks, for any `overwrite`, and a checkpoint that changed since they began stays.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from unittest import mock

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import at_least_two, gather, on_every_rank
from internals import dcp as torchs
from internals import files
from peer import PEER, sw
from shardwright.checkpoint import StorageWriter
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
REFUSED = "was written by another save after this one began, and is left as it is"


def stage(value: float) -> nn.Module:
    module = nn.Linear(300, 40)
    nn.init.constant_(module.weight, value)
    nn.init.constant_(module.bias, value)
    return module


def weight_of(path: str) -> float:
    module = stage(-1.0)
    sw.load(path, module, process_group=None)
    return float(module.weight.detach()[0, 0])


@contextlib.contextmanager
def after_the_check(call):
    """Run `call` after a save has found its path free, and before it writes."""

    def why_not_there(folder, overwrite):
        found = real(folder, overwrite)
        with mock.patch.object(files, "why_not_there", real), mock.patch.object(torchs, "why_not_there", real):
            call()
        return found

    real = files.why_not_there
    with (
        mock.patch.object(files, "why_not_there", why_not_there),
        mock.patch.object(torchs, "why_not_there", why_not_there),
    ):
        yield


@pytest.mark.parametrize("overwrite", [False, True])
@at_least_two
@on_every_rank()
def test_of_disjoint_groups_one_is_saved_and_the_others_raise_on_all_ranks(rank, world_size, overwrite):
    groups = [list(range(1)), list(range(1, world_size))]
    made = [dist.new_group(ranks, backend="gloo") for ranks in groups]
    leaders = dist.new_group([ranks[0] for ranks in groups], backend="gloo")
    mine = 0 if rank == 0 else 1
    with tempfile.TemporaryDirectory() as folder:
        path = f"{gather(folder)[0]}/a"
        if overwrite:
            sw.save(path, stage(9.0), process_group=dist.group.WORLD)
        module, failure = stage(float(mine)), ""
        with after_the_check(lambda: dist.barrier(leaders)):
            try:
                sw.save(path, module, process_group=made[mine], overwrite=overwrite)
            except sw.CheckpointError as error:
                failure = str(error)
        failures = gather(failure)
        by_group = [{failures[each] for each in ranks} for ranks in groups]
        assert all(len(each) == 1 for each in by_group)
        assert sorted(bool(each.copy().pop()) for each in by_group) == [False, True], failures
        assert "was written by another save after this one began" in "".join(failures)
        winner = 0 if by_group[0] == {""} else 1
        if rank == 0:
            assert sorted(os.listdir(os.path.dirname(path))) == ["a"]  # nothing of the others is left
        reader = stage(-1.0)
        sw.load(path, reader)
        assert float(reader.weight.detach()[0, 0]) == winner
        gather(None)


@pytest.mark.parametrize("there", ["nothing", "checkpoint", "damaged"])
@pytest.mark.parametrize("by", ["save", "StorageWriter"])
def test_of_two_jobs_the_first_to_commit_stays(tmp_path, by, there):
    path = str(tmp_path / "a")
    if there != "nothing":
        sw.save(path, stage(9.0))
    if there == "damaged":
        (tmp_path / "a" / "MANIFEST.json").write_text("{")
    overwrite = there != "nothing"
    other = stage(1.0)

    def save():
        if by == "save":
            sw.save(path, stage(2.0), overwrite=overwrite)
        else:
            state = {"model": stage(2.0).state_dict()}
            dcp.save(state, storage_writer=StorageWriter(path, overwrite=overwrite), no_dist=True)

    with after_the_check(lambda: sw.save(path, other, overwrite=overwrite)):
        with pytest.raises((Exception, CheckpointException), match=REFUSED):
            save()
    assert weight_of(path) == 1.0 and os.listdir(tmp_path) == ["a"]
    overwrite = True
    with after_the_check(lambda: shutil.rmtree(path)):
        save()  # nothing is lost where the old one was removed by hand
    assert weight_of(path) == 2.0 and os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("there", ["nothing", "checkpoint"])
def test_a_checkpointer_leaves_alone_what_another_save_commits_meanwhile(tmp_path, there):
    """sw.save() and torch.distributed.checkpoint ignore the lock on the directory."""
    path = str(tmp_path / "step-000001")
    if there == "checkpoint":
        sw.save(path, stage(9.0))
    with sw.Checkpointer(tmp_path, stage(2.0)) as checkpoints:
        start = checkpoints._writer._start
        with mock.patch.object(checkpoints._writer, "_start") as before:
            before.side_effect = lambda *args: (sw.save(path, stage(1.0), overwrite=True), start(*args))
            checkpoints.save(0)
        with pytest.raises(sw.CheckpointError, match=REFUSED):
            checkpoints.wait()
        assert weight_of(path) == 1.0
        checkpoints.save(0)
        checkpoints.wait()
    assert weight_of(path) == 2.0 and sorted(os.listdir(tmp_path)) == [".lock", "step-000001"]
