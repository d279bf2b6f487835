"""Law: every rank rejects a checkpoint with any damage to any file, and all return to the same older one. A failed save
or read is a named error on every rank, and training continues.
"""

import json
import os
import re
import resource
import shutil

import internals
import pytest
import torch
from checkpoint_subjects import EveryKind, Small, assert_same_state, build, files_of, state_of, train
from harness import LONG, gather, on_every_rank
from peer import PEER, sw
from test_checkpoint_bytes_do_not_depend_on_the_ranks import shared_folder

pytestmark = pytest.mark.skipif(PEER == "torch", reason="shardwright's checkpoints")
QUICK_FORM_IS_THE_LARGEST_WORLD = True


def flip(path, place):
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 0x10]))


def zero_page(path):
    data = open(path, "rb").read()
    page = next(p for p in range(0, len(data), 512) if any(data[p : p + 512]))
    with open(path, "r+b") as file:
        file.seek(page)
        file.write(b"\0" * len(data[page : page + 512]))


def replace_by_link(path):
    os.rename(path, path + ".elsewhere")
    os.symlink(os.path.basename(path) + ".elsewhere", path)


DAMAGE = {
    "first bit": lambda path: flip(path, 0),
    "a bit in the middle": lambda path: flip(path, os.path.getsize(path) // 2),
    "last bit": lambda path: flip(path, os.path.getsize(path) - 1),
    "a zeroed page": zero_page,
    "one byte short": lambda path: os.truncate(path, os.path.getsize(path) - 1),
    "half": lambda path: os.truncate(path, os.path.getsize(path) // 2),
    "empty": lambda path: os.truncate(path, 0),
    "one byte long": lambda path: os.truncate(path, os.path.getsize(path) + 1),
    "gone": os.unlink,
    "a link": replace_by_link,
}


def agreed(action):
    """Return the sentence of the CheckpointError that every rank gets."""
    with pytest.raises(sw.CheckpointError) as caught:
        action()
    sentences = gather(str(caught.value))
    assert sentences == [sentences[0]] * len(sentences)
    return sentences[0]


@on_every_rank(at_least=1 if LONG else 3, deadline_s=90)
def test_any_damage_to_any_file_sends_all_ranks_to_the_older_checkpoint(rank, world_size):
    folder = shared_folder(rank)
    model, optimizer = build()
    with sw.Checkpointer(folder, model, optimizer, user_state={"x": torch.arange(4)}) as checkpoints:
        train(model, optimizer, 1)
        checkpoints.save(0)
        older = state_of(model, optimizer)
        train(model, optimizer, 1)
        checkpoints.save(1)
        checkpoints.wait()
        newest, whole = f"{folder}/step-000002", f"{folder}/whole"
        if rank == 0:
            shutil.copytree(newest, whole)
        names = files_of(newest)
        assert len(names) == 6 + 2
        gather(None)
        for number, name in enumerate(names):
            for damage in list(DAMAGE.values())[0 if LONG else number % 2 :: 1 if LONG else 2]:
                if rank == 0:
                    damage(f"{newest}/{name}")
                gather(None)
                assert checkpoints.restore() == 1
                if rank == 0:
                    shutil.rmtree(newest)
                    shutil.copytree(whole, newest)
                gather(None)
        assert_same_state(state_of(model, optimizer), older)
        assert checkpoints.restore() == 2
        if rank == 0:
            for step in (1, 2):
                flip(f"{folder}/step-{step:06d}/model.safetensors", 5000)
        train(model, optimizer, 1)
        live = state_of(model, optimizer)
        gather(None)
        sentence = agreed(checkpoints.restore)
        assert_same_state(state_of(model, optimizer), live)  # what was read ahead was taken back
        assert "none of the 2 checkpoints" in sentence and "model.safetensors' was changed" in sentence
        assert "block 0 (bytes 0 to 1048576)" in sentence


@on_every_rank(at_least=3)
def test_one_ranks_bad_block_rejects_the_folder_for_all(rank, world_size):
    from internals import agreeing

    folder = shared_folder(rank)
    model, optimizer = build(Small)
    with sw.Checkpointer(folder, model, optimizer) as checkpoints:
        checkpoints.save(0)
        checkpoints.save(1)
        checkpoints.wait()
        before = agreeing.Restore.read

        def fail_on_newest(self, *arguments, **options):
            if rank == 1 and self.folder.step == 2:
                raise sw.CheckpointError("this rank's disk cannot read block 3")
            before(self, *arguments, **options)

        agreeing.Restore.read = fail_on_newest
        try:
            assert checkpoints.restore() == 1
            assert "rank 1: this rank's disk cannot read block 3" in agreed(
                lambda: sw.load(f"{folder}/step-000002", model, optimizer)
            )
        finally:
            agreeing.Restore.read = before


@on_every_rank()
def test_a_full_disk_stops_the_save_and_not_the_training(rank, world_size):
    folder = shared_folder(rank)
    model, optimizer = build()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for victim in range(min(world_size, 2)):
        path = f"{folder}/{victim}"
        with sw.Checkpointer(path, model, optimizer) as checkpoints:
            train(model, optimizer, 1)
            checkpoints.save(0)
            checkpoints.wait()
            if rank == victim:
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096 if victim else 1 << 20, limits[1]))
            try:
                checkpoints.save(1)
                train(model, optimizer, 1)
                sentence = agreed(checkpoints.wait)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            assert "File too large" in sentence and ".safetensors'" in sentence, sentence
            assert world_size == 1 or victim == 0 or "rank 1: " in sentence
            gather(None)
            assert [name for name in os.listdir(path) if name.startswith("step")] == ["step-000001"]
            checkpoints.save(1)
            checkpoints.wait()
            assert checkpoints.restore() == 2


@on_every_rank()
def test_the_error_of_a_save_comes_at_the_next_save_and_the_one_after_works(rank, world_size):
    folder = shared_folder(rank)
    model, optimizer = build(Small)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with sw.Checkpointer(folder, model, optimizer) as checkpoints:
        if rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
        checkpoints.save(0)
        while checkpoints.progress["busy"]:
            pass
        gather(None)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert "File too large" in agreed(lambda: checkpoints.save(1))
        checkpoints.save(2)
        checkpoints.wait()
        assert checkpoints.restore() == 3


@on_every_rank(at_least=3)
def test_a_rank_that_cannot_begin_fails_the_save_for_all(rank, world_size):
    folder = shared_folder(rank)
    model, optimizer = build(Small)
    user = {"x": 1}
    for culprit in (0, 2):
        with sw.Checkpointer(f"{folder}/{culprit}", model, optimizer, dataloader=user) as checkpoints:
            if rank == culprit:
                user["x"] = object()
                with pytest.raises(sw.CheckpointError, match="dataloader.x is a object"):
                    checkpoints.save(0)
            else:
                with pytest.raises(sw.CheckpointError, match=f"rank {culprit}: dataloader.x is a object"):
                    checkpoints.save(0)
            user["x"] = 1
            checkpoints.save(1)
            checkpoints.wait()
            assert checkpoints.restore() == 2


@on_every_rank(at_least=3)
def test_a_rank_whose_model_cannot_be_saved_leaves_nobody_waiting(rank, world_size):
    folder = shared_folder(rank)
    model, optimizer = build(EveryKind)
    for culprit in (0, 1):
        with sw.Checkpointer(f"{folder}/{culprit}", model, optimizer) as checkpoints:
            if rank == culprit:
                model.register_buffer("sparse", torch.eye(3).to_sparse())
                with pytest.raises(sw.CheckpointError, match="'sparse' is sparse"):
                    checkpoints.save(0)
                del model.sparse
            else:
                with pytest.raises(sw.CheckpointError, match=f"rank {culprit}: tensor 'sparse' is sparse"):
                    checkpoints.save(0)
            checkpoints.save(1)
            checkpoints.wait()
            assert checkpoints.restore() == 2


@on_every_rank(at_least=3)
def test_ranks_that_disagree_about_step_or_shape_get_one_sentence(rank, world_size):
    folder = shared_folder(rank)
    model, optimizer = build(Small)
    with sw.Checkpointer(f"{folder}/a", model, optimizer, timeout_s=20) as checkpoints:
        told = agreed(lambda: checkpoints.save(3 if rank == 1 else 2))
        assert "rank 0 saves step 3 while rank 1 saves step 4" in told
    if rank == 2:
        model.more = torch.nn.Parameter(torch.ones(3))
    with sw.Checkpointer(f"{folder}/b", model, optimizer, timeout_s=20) as checkpoints:
        sentence = agreed(lambda: checkpoints.save(0))
        assert "rank 2 would write other files" in sentence and "names, shapes, dtypes" in sentence


@on_every_rank()
def test_what_does_not_fit_is_named_before_anything_changes(rank, world_size):
    folder = shared_folder(rank)
    model, optimizer = build(Small)
    sw.save(f"{folder}/a", model, optimizer)
    sw.save(f"{folder}/bare", model)

    def loads(change, *, with_optimizer=False, path="a"):
        other, other_optimizer = build(Small, seed=5)
        change(other)
        before = state_of(other, other_optimizer)
        sentence = agreed(lambda: sw.load(f"{folder}/{path}", other, other_optimizer if with_optimizer else None))
        assert_same_state(state_of(other, other_optimizer), before)
        return sentence

    def smaller(other):
        other.layers[3] = torch.nn.Linear(96, 25)

    assert re.search(r"layers.3.weight: the checkpoint has F32 \[24, 96\], the model F32 \[25, 96\]", loads(smaller))
    assert "it lacks 'more'" in loads(lambda m: m.register_parameter("more", torch.nn.Parameter(torch.ones(1))))
    assert "it has 'layers.3.weight', 'layers.3.bias', which the model" in loads(lambda m: m.layers.__delitem__(3))
    assert "BF16" in loads(lambda m: m.to(torch.bfloat16))
    assert "was saved without an optimizer" in loads(lambda m: None, with_optimizer=True, path="bare")
    assert "No such file" in loads(lambda m: None, path="nothing")


@on_every_rank()
def test_refusals_at_the_door(rank, world_size):
    folder = shared_folder(rank)
    model, optimizer = build(Small)
    sw.save(f"{folder}/a", model)
    assert "exists already" in agreed(lambda: sw.save(f"{folder}/a", model))
    with sw.Checkpointer(f"{folder}/b", model, optimizer):
        assert (
            "one directory" in (s := agreed(lambda: sw.Checkpointer(f"{folder}/b", model)))
            or "another Checkpointer" in s
        )
    with sw.Checkpointer(f"{folder}/b", model, optimizer) as checkpoints:
        checkpoints.save(0)
    with pytest.raises(sw.CheckpointError, match="was closed"):
        checkpoints.save(1)
    if rank == 0:
        open(f"{folder}/file", "w").close()
    gather(None)
    assert "cannot be written to" in agreed(lambda: sw.Checkpointer(f"{folder}/file/x", model))
    manifest = f"{folder}/a/MANIFEST.json"
    if rank == 0:
        text = open(manifest).read().replace('"version":1', '"version":2')
        body, _ = text.rsplit(',"self_crc32c"', 1)
        open(manifest, "w").write(f'{body},"self_crc32c":"{checksum(body.encode()):08x}"}}\n')
    gather(None)
    assert "version 2, this program reads up to 1: use a newer shardwright" in agreed(
        lambda: sw.load(f"{folder}/a", model)
    )
    for wrong in ({"snapshot": "x"}, {"keep_last": 0}, {"on_busy": "no"}, {"threads": 17}, {"timeout_s": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            sw.Checkpointer(folder, model, optimizer, **wrong)
    sparse = torch.nn.Embedding(3, 4)
    sparse.register_buffer("s", torch.eye(3).to_sparse())
    assert "'s' is sparse" in agreed(lambda: sw.save(f"{folder}/c", sparse)).replace("rank 0: ", "")
    assert not os.path.exists(f"{folder}/c")


def checksum(data):
    memory = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return internals._engine.crc32c(memory.data_ptr(), len(data))


@on_every_rank()
def test_another_process_that_writes_to_the_directory_is_named(rank, world_size):
    from internals import DirectoryLock

    folder = shared_folder(rank)
    model, _ = build(Small)
    with sw.Checkpointer(folder, model):
        if rank == 0:
            reading, writing = os.pipe()
            child = os.fork()
            if child == 0:
                try:
                    DirectoryLock(folder)
                    os.write(writing, b"taken")
                except sw.CheckpointError as error:
                    os.write(writing, str(error).encode())
                os._exit(0)
            os.waitpid(child, 0)
            said = os.read(reading, 1000).decode()
            assert f"process {os.getpid()} on host" in said and "one directory has one writer" in said
    gather(None)
    sw.Checkpointer(folder, model).close()


@on_every_rank()
def test_the_manifest_states_the_checksums_of_docs_format(rank, world_size):
    folder = shared_folder(rank)
    model, optimizer = build(EveryKind)
    sw.save(f"{folder}/a", model, optimizer)
    assert checksum(b"123456789") == 0xE3069283  # the check value of CRC-32C
    text = open(f"{folder}/a/MANIFEST.json").read()
    manifest = json.loads(text)
    body, _ = text.rsplit(',"self_crc32c"', 1)
    assert int(manifest["self_crc32c"], 16) == checksum(body.encode())
    for entry in manifest["files"]:
        data = open(f"{folder}/a/{entry['path']}", "rb").read()
        blocks = [data[at : at + (1 << 20)] for at in range(0, len(data), 1 << 20)]
        assert entry["bytes"] == len(data)
        assert entry["crc32c"] == "".join(f"{checksum(block):08x}" for block in blocks)
    assert [e["path"] for e in manifest["files"]] == sorted(set(files_of(f"{folder}/a")) - {"MANIFEST.json"})
    header = json.loads(
        open(f"{folder}/a/model.safetensors", "rb").read()[8:].split(b"\0")[0].decode("latin1").split("}}")[0] + "}}"
    )
    assert header["__metadata__"]["tied.weight"] == "first.weight" and "tied.weight" not in header
