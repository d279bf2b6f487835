"""Law: on a file system that lacks an operation (Lustre without locks, CIFS without fsync of folders, a FUSE without
hard links) saves, retention and restores work, and one warning says what is then not promised. An fsync that fails is
an error.

Programs run with poor_files.c preloaded.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import logging
import os
import subprocess
from pathlib import Path

import pytest
from harness import run_programs
from peer import PEER, sw
from test_checkpoint_survives_kill_at_any_moment import fill, training, values_of

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
#: settings of poor_files.c -> words of the one warning on rank 0; "": none
TURNS = {
    "no locks": ({"POOR_LOCK": errno.ENOSYS}, "has no locks (Function not implemented)"),
    "NFS without lockd": ({"POOR_LOCK": errno.ENOLCK}, "has no locks (No locks available)"),
    "CIFS": ({"POOR_SYNC_FOLDER": errno.EINVAL}, "cannot fsync a folder (Invalid argument)"),
    "both": ({"POOR_SYNC_FOLDER": errno.ENOSYS, "POOR_LOCK": errno.EOPNOTSUPP}, ", and cannot fsync a folder"),
    "flock alone": ({"POOR_OPEN_FILE_LOCK": errno.EINVAL}, ""),
    "little": (
        {
            "POOR_ALLOCATE": errno.EINVAL, "POOR_LINK": errno.EPERM, "POOR_DIRECT": errno.EINVAL,
            "POOR_NAMELESS": errno.EOPNOTSUPP, "POOR_EXCHANGE": errno.EPERM,
        },
        "",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> str:
    source, made = Path(__file__).with_name("poor_files.c"), tmp_path_factory.mktemp("poor") / "poor_files.so"
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", made, source, "-ldl"], check=True)
    return str(made)


@contextlib.contextmanager
def lacking(settings):
    os.environ.update({name: str(code) for name, code in settings.items()})  # the library reads them at each call
    try:
        yield
    finally:
        for name in settings:
            del os.environ[name]


def save_and_restore(rank, world_size, within, uploads):
    from internals import partial

    said = []
    logging.getLogger("shardwright").addHandler(handler := logging.Handler(logging.WARNING))
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("shardwright.watch").setLevel(logging.CRITICAL)  # it may speak on a busy machine
    for name, (settings, words) in TURNS.items():
        partial._known.clear()
        said.clear()
        with lacking(settings):
            use(f"{within}/{name}", rank)
        assert len(said) == (rank == 0 and words != ""), said
        assert not said or (words in said[0] and "is not noticed" in said[0]) or "power cut" in said[0], said
    with lacking({"POOR_SYNC_FILE": errno.EIO}), pytest.raises(sw.CheckpointError, match="Input/output error"):
        sw.save(f"{within}/failing", *training())
    if uploads:
        upload(rank, within)


def use(directory, rank):
    model, optimizer = training()
    with sw.Checkpointer(directory, model, optimizer, keep_last=2) as checkpoints:
        for step in range(4):
            fill(model, optimizer, step + 1)
            checkpoints.save(step)
            checkpoints.wait()
        fill(model, optimizer, 99)
        assert checkpoints.restore() == 4 and values_of(model, optimizer) == {4.0}
        checkpoints.save(3)  # replaces
        checkpoints.wait()
        if rank == 0 and "POOR_OPEN_FILE_LOCK" in os.environ:  # the other kind of lock excludes as well
            from internals import DirectoryLock

            with pytest.raises(sw.CheckpointError, match="close it first"):
                DirectoryLock(directory)
    names = [each for each in os.listdir(directory) if each.startswith("step-")]  # rank 0 removes after its verdict
    assert rank or sorted(names) == ["step-000003", "step-000004"], names
    path = f"{directory}/plain"
    sw.save(path, model, optimizer)
    sw.save(path, model, optimizer, overwrite=True)
    sw.load(path, model, optimizer)


@pytest.mark.timeout(180)
def test_saves_work_and_rank_0_warns_once(tmp_path, library):
    """Also: a store gets files that cannot be linked, where fsspec is installed."""
    store, folder = tmp_path / "store", tmp_path / "c"
    for each in (store, folder):
        each.mkdir()
    said, statuses = run_programs(
        3, save_and_restore, str(store), prefix=["env", f"LD_PRELOAD={library}", f"POOR_FOLDER={folder}"], limit_s=110, within=str(folder),
        imported=["torch._dynamo"], uploads=importlib.util.find_spec("fsspec") is not None,
    )  # fmt: skip
    assert statuses == [0] * 3, said


def upload(rank, within):
    """A store gets the files without hard links, and a universal export is written."""
    from shardwright_tools.cli import main

    with lacking({"POOR_LINK": errno.EPERM}):
        model, optimizer = training()
        with sw.Checkpointer(f"file://{within}/far", model, optimizer, local_directory=f"{within}/near") as checkpoints:
            checkpoints.save(0)
            checkpoints.wait()
        near, far = f"{within}/near/step-000001", f"{within}/far/step-000001"
        if rank != 0:
            return
        assert sorted(os.listdir(far)) == sorted(os.listdir(near)) and os.path.exists(f"{near}/MANIFEST.json")
        assert main(["ckpt", "export", near, f"{within}/universal", "--to", "deepspeed-universal"]) == 0
