"""Law: a checkpoint at an fsspec address is a copy of the local one. It exists once its manifest does, which is
uploaded last. An interrupted upload continues, and a job resumes from the address alone.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import shardwright as sw
import torch
from shardwright.checkpoint.remote import mirror as mirrors
from shardwright.checkpoint.remote.store import Store
from shardwright.options.checks import offload_folder
from torch import nn

fsspec = pytest.importorskip("fsspec")
pytestmark = pytest.mark.timeout(300)


def trained(value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(30, 20)
    nn.init.constant_(model.weight, value), nn.init.constant_(model.bias, value)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    for parameter in model.parameters():
        optimizer.state[parameter] = {"momentum_buffer": torch.full_like(parameter, value)}
    return model, optimizer


@pytest.fixture(params=["memory", "file"])
def address(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(mirrors, "_PAUSES_S", (0.01, 0.01))
    fsspec.filesystem("memory").store.clear()
    return f"memory://{tmp_path.name}/run" if request.param == "memory" else f"file://{tmp_path}/remote"


def names(address: str) -> list[str]:
    fs, base = fsspec.core.url_to_fs(address)
    return sorted(os.path.relpath(path, base) for path in fs.find(base))


def test_save_and_load(address: str, tmp_path: Path) -> None:
    sw.save(address, *trained(1.0), extra={"epoch": 3})
    assert "MANIFEST.json" in names(address) and "UPLOADING" not in names(address)
    with pytest.raises(sw.CheckpointError, match="exists already"):
        sw.save(address, *trained(2.0))
    sw.save(address, *trained(2.0), overwrite=True)
    model, optimizer = trained(0.0)
    sw.load(address, model, optimizer)
    assert model.weight[0, 0] == 2 and optimizer.state[model.weight]["momentum_buffer"][0, 0] == 2
    fs, base = fsspec.core.url_to_fs(address)
    fs.rm_file(f"{base}/MANIFEST.json")
    with pytest.raises(sw.CheckpointError, match="has no checkpoint"):
        sw.load(address, model, optimizer)
    assert os.listdir(tmp_path / "cache" / "shardwright") == []
    with pytest.raises(sw.CheckpointError, match="cannot be opened"):
        sw.save("nosuch://a/b", model)


def test_a_training_resumes_from_the_address_alone(address: str, tmp_path: Path) -> None:
    with sw.Checkpointer(address, *trained(0.0), keep_last=2) as checkpoints:
        assert checkpoints.restore() == 0
        for step in range(4):
            checkpoints._training.model.weight.data.fill_(step)
            checkpoints.save(step)
            checkpoints.wait()
        assert [kept.step for kept in Store(address).checkpoints()] == [3, 4]
    shutil.rmtree(tmp_path / "cache")
    model, optimizer = trained(9.0)
    with sw.Checkpointer(address, model, optimizer, keep_last=2) as checkpoints:
        assert checkpoints.steps() == [3, 4] and checkpoints.restore() == 4 and model.weight[0, 0] == 3
        checkpoints.save(4)
    assert [kept.step for kept in Store(address).checkpoints()] == [4, 5]
    fs, base = fsspec.core.url_to_fs(address)
    data = fs.cat_file(f"{base}/step-000005/model.safetensors")
    fs.pipe_file(f"{base}/step-000005/model.safetensors", data[:-1] + b"\xff")
    shutil.rmtree(tmp_path / "cache")
    with sw.Checkpointer(address, *trained(9.0)) as checkpoints:
        assert checkpoints.restore() == 4  # the damaged one is passed over
    assert not any(".partial" in name or "UPLOADING" in name for name in names(address))


def test_an_upload_that_was_cut_off_goes_on(address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fs, base = fsspec.core.url_to_fs(address)
    put, sent, limit = type(fs).put_file, [], [2]

    def put_file(self: Any, local: str, remote: str, *rest: Any, **more: Any) -> None:
        if len(sent) >= limit[0]:
            raise OSError("the network is gone")
        sent.append(os.path.basename(remote))
        put(self, local, remote, *rest, **more)

    monkeypatch.setattr(type(fs), "put_file", put_file)
    checkpoints = sw.Checkpointer(address, *trained(1.0))
    checkpoints.save(0)
    with pytest.raises(sw.CheckpointError, match="the network is gone"):
        checkpoints.close()
    assert Store(address).checkpoints() == [] and "step-000001/UPLOADING" in names(address)
    first, limit[0] = list(sent), 99
    with sw.Checkpointer(address, *trained(9.0)) as checkpoints:  # uploads what it finds
        checkpoints.wait()
        assert [kept.step for kept in Store(address).checkpoints()] == [1]
        assert sorted(sent) == sorted({*sent}) and sent[:2] == first  # no file twice
        assert checkpoints.restore() == 1


def failing_downloads(monkeypatch: pytest.MonkeyPatch, *broken_names: str) -> list[str]:
    """Make downloads of these names fail. Return the list of names; a test removes entries from it."""
    download, broken = Store.download, [*broken_names]

    def fetch(self: Store, name: str, local: str) -> None:
        if name in broken:
            raise OSError("the network is gone")
        download(self, name, local)

    monkeypatch.setattr(Store, "download", fetch)
    return broken


def test_a_download_that_fails_is_an_error_and_an_older_checkpoint_no_answer(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with sw.Checkpointer(address, *trained(1.0)) as checkpoints:
        for step in range(2):
            checkpoints.save(step)
    shutil.rmtree(tmp_path / "cache")
    broken = failing_downloads(monkeypatch, "step-000002")
    with sw.Checkpointer(address, *trained(9.0)) as checkpoints:
        for step in (None, 2):
            with pytest.raises(sw.CheckpointError, match="download from .* failed: the network is gone"):
                checkpoints.restore(step=step)
        fs, base = fsspec.core.url_to_fs(address)
        kept = fs.cat_file(f"{base}/step-000002/model.safetensors")
        fs.rm_file(f"{base}/step-000002/model.safetensors")
        broken.clear()
        assert checkpoints.restore() == 1 and "passes over a checkpoint: download from" in caplog.text
        fs.pipe_file(f"{base}/step-000002/model.safetensors", kept)
        assert checkpoints.restore() == 2


def test_a_rollback_is_kept_beside_checkpoints_that_only_the_address_has(address: str, tmp_path: Path) -> None:
    with sw.Checkpointer(address, *trained(1.0)) as checkpoints:
        for step in range(5):
            checkpoints.save(step)
    folders = next((tmp_path / "cache" / "shardwright").iterdir())
    for gone in ("step-000001", "step-000004"):
        shutil.rmtree(folders / gone)
    with sw.Checkpointer(address, *trained(2.0)) as checkpoints:
        assert checkpoints.steps() == [1, 2, 3, 4, 5] and checkpoints.restore(step=2) == 2
        assert checkpoints.restore() == 2  # 3 and 5 are abandoned, and 4, which only the address has
        checkpoints.save(2)
        checkpoints.wait()
        assert checkpoints.restore() == 3 and checkpoints.steps() == [1, 2, 3, 4, 5]


def test_an_address_whose_folder_cannot_be_written_is_refused(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sw.Checkpointer(address, *trained(1.0)) as checkpoints:
        checkpoints.save(0)

    def lock(_: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("shardwright.checkpoint.folder.directory.DirectoryLock", lock)
    with sw.Checkpointer(address, *trained(9.0)) as checkpoints:
        for call in (checkpoints.restore, checkpoints.steps):
            with pytest.raises(sw.CheckpointError, match="cannot be written to.*name another local_directory"):
                call()


def test_a_failure_ends_with_the_upload_that_succeeds(
    address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(mirrors, "_PAUSES_S", ())
    upload, tries = Store.upload, []

    def refuse_first(self: Store, local: str, name: str) -> None:
        tries.append(name)
        if len(tries) == 1:
            raise OSError("the network is gone")
        upload(self, local, name)

    monkeypatch.setattr(Store, "upload", refuse_first)
    with sw.Checkpointer(address, *trained(1.0)) as checkpoints:
        checkpoints.save(0)
        checkpoints._writer.wait()
        mirror = checkpoints._place.mirror
        with mirror._changed:
            assert mirror._changed.wait_for(lambda: mirror._failure, 10)
            mirror._asked += 1  # as a wait() of another round, which has not taken the failure
            mirror._changed.notify_all()
            assert mirror._changed.wait_for(lambda: mirror._answered >= mirror._asked, 10)
        assert [kept.step for kept in Store(address).checkpoints()] == [1]
        checkpoints.wait()  # nothing is lacking any more


@pytest.mark.parametrize("home", [None, "/proc", "a file"])
def test_a_user_without_a_home_is_told_what_to_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str | None
) -> None:
    """No folder named "~" appears. A chosen folder, or XDG_CACHE_HOME, is enough."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME") if home is None else monkeypatch.setenv("HOME", home)
    monkeypatch.setattr(os, "getuid", lambda: 65533)  # which passwd does not have
    if home == "a file":
        (tmp_path / "hosts").write_text("")
        monkeypatch.setenv("HOME", str(tmp_path / "hosts"))
    address = f"file://{tmp_path}/remote"
    said = "HOME and passwd name no home" if home is None else "this user cannot write to '.*/.cache/shardwright'"
    for call in (sw.save, sw.load, sw.Checkpointer):
        with pytest.raises(
            (ValueError, sw.CheckpointError), match=f"{said}: pass local_directory=, or set XDG_CACHE_HOME"
        ):
            call(address, *trained(1.0))
    if home is None:
        with pytest.raises(ValueError, match="offload needs a home, .*: pass an absolute path, got '~/x'"):
            offload_folder("nvme:~/x")
    assert os.listdir() == (["hosts"] if home == "a file" else [])
    sw.save(address, *trained(1.0), local_directory=tmp_path / "near")
    sw.load(address, *trained(2.0), local_directory=tmp_path / "near")
    assert sw.checkpoint.step_of(address) == 0
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    sw.load(address, *trained(2.0))


def test_a_removal_that_was_cut_off_is_ended(address: str, tmp_path: Path) -> None:
    sw.save(f"{address}/step-000001", *trained(1.0))
    fs, base = fsspec.core.url_to_fs(address)
    fs.rm_file(f"{base}/step-000001/MANIFEST.json")
    Store(address).remove("step-000001")
    assert names(address) == []
