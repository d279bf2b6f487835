"""Law: weights= and load_pretrained at an fsspec address have the bits of the same folder on a disk. A rank requests the
bytes of its slices, and little more. What cannot be read is one sentence on all ranks.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from harness import gather, on_every_rank, same_everywhere
from peer import PEER, sw
from test_a_module_is_built_in_slices import Model, assert_is, on_meta

fsspec = pytest.importorskip("fsspec")
pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
PRIVATE = {"zero": 3, "share_parameters": False}


def model_of(width=40):
    torch.manual_seed(3)
    return Model(width)


def folder_with(rank, name, **options):
    """Save a model to a folder of all ranks, and return its path and its state."""
    folder = Path(os.environ["SW_TEST_FOLDER"], name)
    model = sw.wrap(model_of(), zero=0)
    sw.save_pretrained(model, folder, **options)
    return folder, sw.full_state_dict(model)


def count_bytes(monkeypatch):
    """Count the bytes that this process requests."""
    from fsspec.implementations.local import LocalFileSystem

    counts, plain = [], LocalFileSystem.cat_file

    def cat_file(self, path, start=None, end=None, **kwargs):
        found = plain(self, path, start=start, end=end, **kwargs)
        counts.append(len(found))
        return found

    monkeypatch.setattr(LocalFileSystem, "cat_file", cat_file)
    return counts


@on_every_rank()
def test_addresses_have_the_bits_of_folders(rank, world_size):
    for number, (most, options) in enumerate(
        [("5GB", PRIVATE), ("20KB", PRIVATE), ("5GB", {"zero": 3}), ("20KB", {"zero": 1})]
    ):
        folder, state = folder_with(rank, f"model-{number}", max_shard_size=most)
        for place in (f"file://{folder}", f"file://{folder}/model.safetensors"):
            if most != "5GB" and place.endswith(".safetensors"):
                continue
            with pytest.MonkeyPatch.context() as patch:
                counts = count_bytes(patch)
                model = sw.wrap(on_meta(), weights=place, **options)
            assert_is(model, state)
            whole = sum(each.nbytes for name, each in state.items() if name != "tied.weight")
            share = whole / (world_size if options is PRIVATE or options == {"zero": 3} else 1)
            assert sum(counts) <= share * 1.2 + 32 * 1024, (sum(counts), share)
        with pytest.MonkeyPatch.context():
            wrapped = sw.wrap(model_of(), **options)
            assert sw.load_pretrained(wrapped, f"file://{folder}", dtype="bfloat16") == ([], [])
        rounded = {n: v.bfloat16().float() if v.is_floating_point() else v for n, v in state.items()}
        assert_is(wrapped, rounded)


@on_every_rank()
def test_an_address_in_memory_and_a_folder_of_ours(rank, world_size):
    _, state = folder_with(rank, "plain")
    folder = Path(os.environ["SW_TEST_FOLDER"], "ours")
    sw.save(folder, sw.wrap(model_of(), zero=0))
    fs = fsspec.filesystem("memory")
    for path in filter(Path.is_file, folder.iterdir()):
        fs.pipe_file(f"/m/{path.name}", path.read_bytes())
    assert_is(sw.wrap(on_meta(), weights="memory://m", **PRIVATE), state)


@on_every_rank()
def test_what_cannot_be_read_is_one_sentence(rank, world_size):
    folder, state = folder_with(rank, "whole", max_shard_size="20KB")
    root = folder.parent / "bad models"  # its own: other tests have folders of these names
    if rank == 0:
        shutil.rmtree(root, ignore_errors=True)
        for name in ("torn", "short", "lost", "other"):
            shutil.copytree(folder, root / name)
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        first, last = (sorted({*index["weight_map"].values()})[at] for at in (0, -1))
        (root / "torn" / first).write_bytes((folder / first).read_bytes()[:100])
        (root / "short" / last).write_bytes((folder / last).read_bytes()[:-4])
        (root / "lost" / last).unlink()
        (root / "other" / "model.safetensors.index.json").write_text("{}")
        (root / "empty").mkdir()
        torch.save(state, root / "file.pt")
    gather(None)
    for name, sentence in (
        ("torn", "torn"),
        ("short", "short"),
        ("lost", "names the file .*, which is not in its folder"),
        ("other", "is not an index of model files"),
        ("empty", "exists and holds no safetensors: a model in another form must be copied"),
        ("gone", "does not exist and holds no safetensors"),
        ("file.pt", "file.pt"),
    ):
        module = on_meta()
        with pytest.raises((sw.Error, sw.CheckpointError), match=sentence) as caught:
            sw.wrap(module, weights=f"file://{root / name}", **PRIVATE)
        assert same_everywhere(str(caught.value)) or world_size == 1
        assert all(p.is_meta for p in module.parameters())
    with pytest.raises((sw.Error, ValueError), match="nosuch"):
        sw.wrap(on_meta(), weights="nosuch://a/b", **PRIVATE)
    if world_size > 1:
        there = folder if rank != world_size - 1 else root / "gone"
        with pytest.raises((sw.Error, sw.CheckpointError), match="gone.* does not exist") as caught:
            sw.wrap(on_meta(), weights=f"file://{there}", **PRIVATE)


@on_every_rank()
def test_a_read_that_fails_in_the_middle_is_one_sentence(rank, world_size):
    folder, _ = folder_with(rank, "middle")
    from fsspec.implementations.local import LocalFileSystem

    plain, reads = LocalFileSystem.cat_file, []

    def cat_file(self, path, start=None, end=None, **kwargs):
        reads.append(path)
        if rank == world_size - 1 and len(reads) == 5:
            raise TimeoutError("the wire broke")
        return plain(self, path, start=start, end=end, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalFileSystem, "cat_file", cat_file)
        module = on_meta()
        with pytest.raises((sw.Error, sw.CheckpointError), match="cannot be read: TimeoutError: the wire broke"):
            sw.wrap(module, weights=f"file://{folder}", **PRIVATE)
    assert all(p.is_meta for p in module.parameters())
    sw.wrap(module, weights=f"file://{folder}", **PRIVATE)
