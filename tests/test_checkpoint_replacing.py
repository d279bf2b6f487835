"""Law: on a file system that cannot exchange two names, a reader finds a checkpoint under one name or the other while
it is replaced, wherever the writer stops. The next save leaves one folder.
"""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import shardwright as sw
import torch
import torch.distributed.checkpoint as dcp
from shardwright.checkpoint import StorageReader
from shardwright.checkpoint.folder import retention
from shardwright_tools.cli import ckpt, main
from test_checkpoint_takes_the_place_of_checkpoints_alone import model_of


@pytest.fixture
def between(tmp_path: Path) -> Path:
    """Make a directory whose writer stopped between the two renames that replace the checkpoint of step 2."""
    with sw.Checkpointer(tmp_path / "c", model_of(1.0)) as checkpoints:
        checkpoints.save(0)
    with sw.Checkpointer(tmp_path / "c", model_of(2.0)) as checkpoints:
        checkpoints.save(1)
    (tmp_path / "c" / "step-000002").rename(tmp_path / "c" / "step-000002.replaced")
    return tmp_path / "c"


def folders(directory: Path) -> list[str]:
    return sorted(each.name for each in directory.iterdir() if each.is_dir())


def test_between_the_steps_readers_of_every_kind_find_what_was_there(
    between: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_of(0.0)
    with sw.Checkpointer(between, model) as checkpoints:
        assert checkpoints.restore() == 2
    assert model.bias[0].item() == 2.0
    model = model_of(0.0)
    sw.load(between / "step-000002", model)
    assert model.bias[0].item() == 2.0
    state = {"model": {name: torch.zeros_like(value) for name, value in model.state_dict().items()}}
    dcp.load(state, storage_reader=StorageReader(between / "step-000002"), no_dist=True)
    assert float(state["model"]["bias"][0]) == 2.0 and StorageReader.validate_checkpoint_id(between / "step-000002")
    one = str(between / "step-000002")
    for command in (
        ["ls", str(between)],
        ["verify", str(between)],
        ["verify", one],
        ["inspect", one],
        ["inspect", one + "/"],
    ):
        assert main(["ckpt", *command]) == 0
    assert "step-000002.replaced" in capsys.readouterr().out


@pytest.mark.parametrize("step", [1, 2])
def test_the_next_save_leaves_one_folder_a_step(between: Path, step: int) -> None:
    model = model_of(3.0)
    with sw.Checkpointer(between, model) as checkpoints:
        checkpoints.save(step)
    names = ["step-000001", "step-000002", "step-000003"]
    assert folders(between) == (names[:2] if step == 1 else ["step-000001", "step-000002.replaced", "step-000003"])
    if step == 2:  # and once its own step is saved again
        with sw.Checkpointer(between, model) as checkpoints:
            checkpoints.save(1)
        assert folders(between) == names


def test_what_was_replaced_goes_once_its_successor_is_there(between: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.rename(between / "step-000001", between / "step-000002")  # the writer stopped after the second step
    assert [os.path.basename(each.path) for each in retention.list_checkpoints(str(between))] == ["step-000002"]
    assert main(["ckpt", "ls", str(between), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert "step-000002.replaced" in json.dumps(listed["left_over"])
    with sw.Checkpointer(between, model_of(3.0)) as checkpoints:
        checkpoints.save(2)
    assert folders(between) == ["step-000002", "step-000003"]


def test_retention_and_prune_take_it_as_any_other(between: Path) -> None:
    with sw.Checkpointer(between, model_of(3.0), keep_last=1) as checkpoints:
        checkpoints.save(2)
    assert folders(between) == ["step-000003"]
    (between / "step-000003").rename(between / "step-000003.replaced")
    with sw.Checkpointer(between, model_of(4.0)) as checkpoints:
        checkpoints.save(4)
    assert main(["ckpt", "prune", str(between), "--keep-last", "1", "--yes"]) == 0
    assert folders(between) == ["step-000005"]


def test_who_lists_while_a_writer_replaces_finds_every_step(tmp_path: Path) -> None:
    """Let the writer take its three steps after the given numbers of lookups by the reader."""
    for steps in itertools.combinations_with_replacement(range(6), 3):
        directory = tmp_path / "-".join(map(str, steps))
        name, replaced, new = (directory / each for each in ("step-000002", "step-000002.replaced", "new"))
        for folder in (name, new):
            folder.mkdir(parents=True)
            (folder / "MANIFEST.json").touch()
        renames = [(name, replaced), (new, name), (replaced, directory / "gone")]
        looks = itertools.count()

        def looked(function: Any) -> Any:
            def look(path: Any) -> Any:
                found, number = function(path), next(looks)  # noqa: B023
                for step, (old, to) in zip(steps, renames):  # noqa: B023
                    if step == number:
                        os.rename(old, to)
                return found

            return look

        with (
            mock.patch.object(os, "listdir", looked(os.listdir)),
            mock.patch.object(os.path, "lexists", looked(os.path.lexists)),
            mock.patch.object(os.path, "exists", looked(os.path.exists)),
        ):
            found = [each.step for each in retention.list_checkpoints(str(directory))]
        assert found == [2], steps


def test_a_single_save_takes_the_place_of_checkpoints_alone(tmp_path: Path) -> None:
    (tmp_path / "a.replaced").mkdir()
    (tmp_path / "a.replaced" / "notes.txt").write_text("of somebody")
    with pytest.raises(sw.CheckpointError, match=r"a\.replaced' exists already"):
        sw.save(tmp_path / "a", model_of(1.0))
    assert (tmp_path / "a.replaced" / "notes.txt").read_text() == "of somebody"


def test_what_was_replaced_goes_before_its_successor_does(between: Path) -> None:
    """Otherwise a writer that stops between the two removals would make the replaced folder a checkpoint again."""
    os.rename(between / "step-000001", between / "step-000002")
    with sw.Checkpointer(between, model_of(3.0), keep_last=1) as checkpoints:
        with mock.patch.object(checkpoints._writer, "begin") as begin:
            checkpoints.save(2)
        assert [os.path.basename(path) for path in begin.call_args.args[0].retired] == [
            "step-000002.replaced",
            "step-000002",
        ]


def test_prune_needs_no_fsync_of_a_directory_where_nothing_was_replaced(between: Path) -> None:
    (between / "step-000002.replaced").rename(between / "step-000002")
    engines = mock.Mock(wraps=ckpt.CheckpointFolder)
    engines.sync.side_effect = OSError(22, "Invalid argument")
    with mock.patch.object(ckpt, "CheckpointFolder", engines):
        assert main(["ckpt", "prune", str(between), "--keep-last", "1", "--yes"]) == 0
    assert folders(between) == ["step-000002"]
