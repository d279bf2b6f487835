"""Law: a save replaces, and retention removes, only a folder that holds nothing but a checkpoint of a known version.
Any other folder is named and left unchanged. Only dead saves are cleared away, and the last sound checkpoint stays.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import shardwright as sw
import torch
import torch.distributed.checkpoint as dcp
from shardwright._engine import CheckpointFolder, CheckpointPlan
from shardwright.checkpoint import StorageReader, StorageWriter
from shardwright.checkpoint.folder import partial
from shardwright.checkpoint.folder.retention import DAMAGED, SOUND, UNKNOWN, Kept, to_retire
from shardwright_tools.cli import main
from test_checkpoint_command_line import rewritten
from torch import nn


def model_of(value: float) -> nn.Module:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def value_at(path: Path) -> float:
    model = model_of(-1.0)
    sw.load(path, model)
    return model.bias[0].item()


def through_dcp(path: str | Path, value: float = 2.0, **options: object) -> None:
    state = {"model": model_of(value).state_dict()}
    try:
        dcp.save(state, storage_writer=StorageWriter(path, **options), no_dist=True)
    except dcp.api.CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None


def directly(path: Path, value: float = 2.0) -> None:
    sw.save(path, model_of(value), overwrite=True)


def by_checkpointer(path: Path, value: float = 2.0) -> None:
    with sw.Checkpointer(path.parent, model_of(value)) as checkpoints:
        checkpoints.save(int(path.name.removeprefix("step-")) - 1)


WRITERS: dict[str, Callable[..., None]] = {"dcp": through_dcp, "save": directly, "checkpointer": by_checkpointer}
every_writer = pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)


def tree_of(path: Path) -> dict[str, bytes | str]:
    """List everything below, except the files that writers leave beside the folders."""
    found: dict[str, bytes | str] = {}
    for each in sorted(path.rglob("*")):
        if each.name not in (".lock", ".board"):
            name = str(each.relative_to(path))
            found[name] = os.readlink(each) if each.is_symlink() else each.read_bytes() if each.is_file() else "folder"
    return found


def folder_with_a_file(path: Path) -> None:
    path.mkdir()
    (path / "precious.txt").write_text("of somebody")


def checkpoint_with_a_file(path: Path) -> None:
    sw.save(path, model_of(1.0))
    (path / "ranks" / "precious.txt").write_text("of somebody")


def damaged_with_a_file(path: Path) -> None:
    checkpoint_with_a_file(path)
    (path / "MANIFEST.json").write_bytes(b"")


def others_manifest(path: Path) -> None:
    path.mkdir()
    (path / "MANIFEST.json").write_text('{"name": "another program"}')
    (path / "model.safetensors").write_text("of somebody")


def newer(path: Path) -> None:
    sw.save(path, model_of(1.0))
    rewritten(path / "MANIFEST.json", b'"version":1', b'"version":2')


def link_to_a_checkpoint(path: Path) -> None:
    sw.save(path.parent / "elsewhere", model_of(1.0))
    path.symlink_to("elsewhere")


def behind_the_replaced_name(path: Path) -> None:
    folder_with_a_file(path.with_name(path.name + ".replaced"))


#: what is in the way -> (maker, what is said of it)
THINGS = {
    "a file": (lambda p: p.write_text("of somebody"), "is not a folder"),
    "a link": (link_to_a_checkpoint, "is not a folder"),
    "a folder": (folder_with_a_file, "has no MANIFEST.json"),
    "a folder of folders": (lambda p: (p / "empty").mkdir(parents=True), "has no MANIFEST.json"),
    "more than a checkpoint": (checkpoint_with_a_file, "holds 'ranks/precious.txt', which no checkpoint lists"),
    "more than a damaged one": (damaged_with_a_file, "holds 'ranks/precious.txt', which no checkpoint lists"),
    "somebody's manifest": (others_manifest, "belongs to no checkpoint"),
    "a newer version": (newer, "use a newer shardwright"),
    "a folder of the other name": (behind_the_replaced_name, "has no MANIFEST.json"),
}


@every_writer
@pytest.mark.parametrize("thing", THINGS)
def test_what_is_no_checkpoint_alone_is_not_replaced(tmp_path: Path, write: Callable[..., None], thing: str) -> None:
    make, said = THINGS[thing]
    make(tmp_path / "step-000001")
    before = tree_of(tmp_path)
    with pytest.raises(sw.CheckpointError, match=said):
        write(tmp_path / "step-000001")
    assert tree_of(tmp_path) == before


def test_the_current_folder_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("of somebody")
    with pytest.raises(sw.CheckpointError, match="has no MANIFEST.json"):
        through_dcp(".")
    assert tree_of(tmp_path) == {"train.py": b"of somebody"}


def zeroed(path: Path) -> None:
    sw.save(path, model_of(1.0))
    manifest = path / "MANIFEST.json"
    manifest.write_bytes(bytes(manifest.stat().st_size))


def incomplete(path: Path) -> None:
    sw.save(path, model_of(1.0))
    (path / "model.safetensors").unlink()


@every_writer
@pytest.mark.parametrize("make", [lambda p: sw.save(p, model_of(1.0)), Path.mkdir, zeroed, incomplete])
def test_a_checkpoint_sound_or_damaged_and_an_empty_folder_are(
    tmp_path: Path, write: Callable[..., None], make: Callable[[Path], None]
) -> None:
    make(tmp_path / "step-000001")
    write(tmp_path / "step-000001")
    assert value_at(tmp_path / "step-000001") == 2.0
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["step-000001"]


def test_who_does_not_ask_for_it_replaces_nothing(tmp_path: Path) -> None:
    sw.save(tmp_path / "a", model_of(1.0))
    with pytest.raises(sw.CheckpointError, match="exists already"):
        sw.save(tmp_path / "a", model_of(2.0))
    with pytest.raises(sw.CheckpointError, match="already exists"):
        through_dcp(tmp_path / "a", overwrite=False)
    assert value_at(tmp_path / "a") == 1.0 and os.listdir(tmp_path) == ["a"]


# a newer version ----------------------------------------------------------------------------------------------------------


def test_a_newer_version_is_neither_passed_over_nor_replaced_nor_retired(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "c"
    with sw.Checkpointer(directory, model_of(1.0)) as checkpoints:
        checkpoints.save(0)
        checkpoints.save(4)
    newest = directory / "step-000005"
    rewritten(newest / "MANIFEST.json", b'"version":1', b'"version":2')
    before = tree_of(newest)
    with sw.Checkpointer(directory, model_of(2.0), keep_last=1) as checkpoints:
        with pytest.raises(sw.CheckpointError, match="use a newer shardwright"):
            checkpoints.restore()
        with pytest.raises(sw.CheckpointError, match="use a newer shardwright"):
            checkpoints.save(4)
            checkpoints.wait()
        for step in (1, 5, 6):
            checkpoints.save(step)
        checkpoints.wait()
        assert checkpoints.steps() == [5, 7]
    assert main(["ckpt", "prune", str(directory), "--keep-last", "1", "--yes"]) == 0
    assert f"kept {newest}: " in capsys.readouterr().out
    assert tree_of(newest) == before and value_at(directory / "step-000007") == 2.0


# retention ------------------------------------------------------------------------------------------------------------------


def spoil_manifest(folder: Path) -> None:
    data = bytearray((folder / "MANIFEST.json").read_bytes())
    data[50] ^= 1
    (folder / "MANIFEST.json").write_bytes(data)


def spoil_block(folder: Path) -> None:
    with open(folder / "model.safetensors", "r+b") as file:
        file.seek(4096)
        file.write(b"\xff\xff\xff")


def saved(directory: Path, steps: int) -> None:
    with sw.Checkpointer(directory, model_of(1.0)) as checkpoints:
        for step in range(steps):
            checkpoints.save(step)


@pytest.mark.parametrize("verify", [False, True])
def test_prune_keeps_as_many_sound_ones_as_it_was_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], verify: bool
) -> None:
    directory = tmp_path / "c"
    saved(directory, 4)
    (spoil_block if verify else spoil_manifest)(directory / "step-000004")
    (spoil_block if verify else spoil_manifest)(directory / "step-000001")
    words = ["ckpt", "prune", str(directory), "--keep-last", "1", "--yes", *(["--verify"] if verify else [])]
    assert main(words) == 0
    assert "step-000004: damaged" in capsys.readouterr().out
    with sw.Checkpointer(directory, model_of(0.0)) as checkpoints:
        assert checkpoints.steps() == [3, 4] and checkpoints.restore() == 3


@pytest.mark.parametrize("spoil", [spoil_manifest, spoil_block, lambda f: (f / "model.safetensors").unlink()])
def test_what_restore_passed_over_counts_for_no_rule(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    directory = tmp_path / "c"
    saved(directory, 3)
    spoil(directory / "step-000003")
    with sw.Checkpointer(directory, model_of(0.0), keep_last=2) as checkpoints:
        assert checkpoints.restore() == 2
        (directory / "step-000003").rename(directory / "step-000009")  # a save of step 3 would replace it
        checkpoints.save(2)
        checkpoints.wait()
        assert checkpoints.steps() == [2, 3, 9]
        for step in (9, 10):
            checkpoints.save(step)
        checkpoints.wait()
        assert checkpoints.steps() == [10, 11]


def test_rules_count_what_is_sound_and_take_of_the_rest_what_they_would_take_anyway() -> None:
    def goes(states: str, **rules: int | None) -> list[int]:
        names = {"s": SOUND, "d": DAMAGED, "u": UNKNOWN}
        kept = [Kept(i + 1, f"{i + 1}", float(len(states) - i), names[c]) for i, c in enumerate(states)]
        every = {"keep_last": None, "keep_every": None, "keep_best": None}
        return [k.step for k in to_retire(kept, **{**every, **rules})]

    assert goes("ssss") == [] and goes("ssss", keep_last=1) == [1, 2, 3]
    assert goes("sssd", keep_last=1) == [1, 2] and goes("sssd", keep_last=3) == []
    assert goes("dsss", keep_last=3) == [1] and goes("dsds", keep_last=3) == [] and goes("dsds", keep_last=2) == [1]
    assert goes("dddd", keep_last=1) == [] and goes("uuud", keep_last=1) == [] and goes("usus", keep_last=1) == [2]
    assert goes("sdsds", keep_every=2) == [1, 3] and goes("sdsss", keep_last=1, keep_every=4) == [1, 2, 3]
    assert goes("sssdss", keep_best=1) == [1, 2, 3, 4, 5] and goes("ssssd", keep_best=1) == [1, 2, 3]


def test_retention_leaves_folders_with_more_than_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "c"
    saved(directory, 2)
    (directory / "step-000001" / "notes.txt").write_text("of somebody")
    with sw.Checkpointer(directory, model_of(2.0), keep_last=1) as checkpoints:
        checkpoints.save(2)
    assert sorted(p.name for p in directory.glob("step-*")) == ["step-000001", "step-000003"]
    assert main(["ckpt", "prune", str(directory), "--keep-last", "1", "--yes"]) == 0
    assert "notes.txt" in capsys.readouterr().out
    assert (directory / "step-000001" / "notes.txt").read_text() == "of somebody"


def test_a_step_that_is_asked_for_is_restored_and_no_other(tmp_path: Path) -> None:
    with sw.Checkpointer(tmp_path / "c", model := model_of(0.0)) as checkpoints:
        assert checkpoints.steps() == [] and checkpoints.latest is None
        for step in range(3):
            with torch.no_grad():
                model.bias.fill_(step + 1)
            checkpoints.save(step)
        checkpoints.wait()
        assert checkpoints.steps() == [1, 2, 3] and checkpoints.latest == 3
        assert checkpoints.restore(step=2) == 2 and model.bias[0].item() == 2.0
        with pytest.raises(sw.CheckpointError, match="no checkpoint of step 7; the newest are of: 1, 2, 3"):
            checkpoints.restore(step=7)
        spoil_block(tmp_path / "c" / "step-000003")
        with pytest.raises(sw.CheckpointError, match="the checkpoint of step 3 cannot be read"):
            checkpoints.restore(step=3)
        assert checkpoints.restore() == 2


# what dead saves leave ------------------------------------------------------------------------------------------------------

NONCES = {"ours": "0123456789abcdef01234567n1", "dcp": "d0123456789abcdef01234567"}


def left_by_a_dead_save(path: Path, nonce: str) -> Path:
    left = path.with_name(f"{path.name}.{nonce}.partial")
    left.mkdir()
    (left / "LOCK").touch()
    (left / "model.safetensors").write_text("half")
    return left


@pytest.mark.parametrize("write", [directly, through_dcp], ids=["save", "dcp"])
def test_the_next_save_to_a_path_clears_what_dead_ones_have_left_of_it_alone(
    tmp_path: Path, write: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    for nonce in NONCES.values():
        left_by_a_dead_save(tmp_path / "a", nonce)
    shutil.copytree(tmp_path / f"a.{NONCES['dcp']}.partial", tmp_path / f"a.{NONCES['dcp']}.trash")
    other = left_by_a_dead_save(tmp_path / "b", NONCES["ours"])
    download = tmp_path / "a.v2.partial"
    download.mkdir()
    (download / "LOCK").touch()
    alive, fresh = (tmp_path / f"a.{'e' * 24}n{n}.partial" for n in (1, 2))
    plan = CheckpointPlan([], [])
    plan.create(str(alive))  # one whose save lives
    fresh.mkdir()  # one whose save is about to make LOCK
    write(tmp_path / "a")
    stays = sorted(each.name for each in (alive, download, fresh, other))
    assert sorted(os.listdir(tmp_path)) == ["a", *stays]
    os.utime(fresh, (time.time() - 7200,) * 2)
    assert main(["ckpt", "ls", str(tmp_path)]) == 0
    listed = capsys.readouterr().out
    assert other.name in listed and fresh.name in listed and alive.name not in listed and "v2" not in listed
    assert main(["ckpt", "prune", str(tmp_path), "--keep-last", "1", "--yes"]) == 0
    assert sorted(os.listdir(tmp_path)) == [".lock", "a", alive.name, download.name]
    plan.abandon()
    assert not alive.exists()


def test_a_save_under_way_holds_its_lock_and_leaves_no_trace_of_it(tmp_path: Path) -> None:
    model = nn.Linear(1024, 1024)
    with sw.Checkpointer(tmp_path, model, bandwidth_bytes_per_s=16 << 20) as checkpoints:
        checkpoints.save(0)
        deadline = time.monotonic() + 10
        while not (found := list(tmp_path.glob("*.partial/LOCK"))) and time.monotonic() < deadline:
            time.sleep(0.001)
        assert partial.is_alive(str(found[0].parent)) is True
        checkpoints.wait()
    assert sorted(os.listdir(tmp_path)) == [".lock", "step-000001"]
    assert "LOCK" not in os.listdir(tmp_path / "step-000001")
    assert StorageReader.validate_checkpoint_id(tmp_path / "step-000001")


def test_a_checkpointer_leaves_alone_what_dcp_is_about_to_commit(tmp_path: Path) -> None:
    committing = tmp_path / f"step-000007.{NONCES['dcp']}.partial"  # LOCK went a moment ago, the name comes in a moment
    dead = left_by_a_dead_save(tmp_path / "step-000008", NONCES["ours"])
    committing.mkdir()
    by_checkpointer(tmp_path / "step-000001")
    assert committing.exists() and not dead.exists()
    os.utime(committing, (time.time() - 7200,) * 2)
    by_checkpointer(tmp_path / "step-000002")
    assert not committing.exists()


def test_a_directory_that_cannot_be_written_to_has_its_number(tmp_path: Path) -> None:
    import errno

    (tmp_path / "file").write_text("")
    for attempt in (
        lambda: sw.Checkpointer(tmp_path / "file" / "c", model_of(1.0)),
        lambda: sw.save(tmp_path / "file" / "a" / "b", model_of(1.0)),
    ):
        with pytest.raises(sw.CheckpointError) as refused:
            attempt()
        assert refused.value.errno == errno.ENOTDIR
    shutil.rmtree(tmp_path)
    with pytest.raises(sw.CheckpointError) as refused:
        with sw.Checkpointer(tmp_path / "c", model_of(1.0)) as checkpoints:
            shutil.rmtree(tmp_path / "c")
            checkpoints.restore()
    assert refused.value.errno == errno.ENOENT


def test_the_engine_removes_all_that_it_can_and_names_the_first_failure(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("stays")
    inner = tmp_path / "folder" / "b" / "c"
    inner.mkdir(parents=True)
    (inner / "file").touch()
    (inner / "link").symlink_to(tmp_path / "target")
    for name in ("folder", "folder", "missing"):
        CheckpointFolder.remove(str(tmp_path / name))
    assert os.listdir(tmp_path) == ["target"]
    deep = tmp_path / "deep" / "1" / "2" / "3" / "4"
    deep.mkdir(parents=True)
    (tmp_path / "deep" / "beside").touch()
    with pytest.raises(sw.CheckpointError, match="removing '.*deep' failed") as refused:
        CheckpointFolder.remove(str(tmp_path / "deep"))
    assert refused.value.errno and os.listdir(tmp_path / "deep") == ["1"] and deep.exists()


def test_a_plan_without_its_headers_writes_none(tmp_path: Path) -> None:
    tensors = [(name, "U8", [4], 2) for name in ("a", "b")]
    plan = CheckpointPlan([("model", True, 1, "{}", tensors)], [])
    plan.trim(0, 2)
    plan.create(str(tmp_path / "a.partial"))
    options = {"replaces": "", "nonce": "1", "step": 0, "world_size": 1, "tallies": [], "creator": plan}
    with pytest.raises(sw.CheckpointError, match="the header of 'model-00002-of-00002.safetensors' was trimmed"):
        plan.commit(folder=str(tmp_path / "a"), **options)
    with pytest.raises(ValueError, match="commit or abandon this plan's folder first"):
        plan.create(str(tmp_path / "b.partial"))
    for _ in range(2):
        plan.abandon()
    assert os.listdir(tmp_path) == []
    with pytest.raises(ValueError, match=r"commit: `creator` holds no folder of create\(\)"):
        plan.commit(folder=str(tmp_path / "a"), **options)
