"""Law: dcp.save and dcp.async_save through our StorageWriter write checkpoints of our format, which sw.load, the
command line and dcp.load read. dcp.load also reads what we write. Plain and FSDP2 state keep their bits.
"""

import contextlib
import io
import json
import logging
import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_subjects import EveryKind, Small, assert_same_state, build, state_of, train
from harness import gather, on_every_rank
from peer import PEER, sw
from test_checkpoint_bytes_do_not_depend_on_the_ranks import shared_folder
from test_checkpoint_bytes_do_not_depend_on_the_stage import fully_sharded, needs_fsdp2_on_cpus
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

pytestmark = pytest.mark.skipif(PEER == "torch", reason="shardwright's checkpoints")


def state_dict(model, optimizer, **more):
    return {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer), **more}


def trained(sharded=False, seed=0, steps=2):
    model, optimizer = fully_sharded(seed) if sharded else build(Small, seed)
    torch.manual_seed(5)
    train(model, optimizer, steps, width=24)
    return model, optimizer


def whole(model, optimizer):
    """Return whole tensors by name, the same on every rank."""
    options = StateDictOptions(full_state_dict=True)
    found = {f"model.{n}": t for n, t in get_model_state_dict(model, options=options).items()}
    for name, entry in get_optimizer_state_dict(model, optimizer, options=options)["state"].items():
        found |= {f"optim.{name}.{key}": torch.as_tensor(value) for key, value in entry.items()}
    return gather({name: tensor.clone() for name, tensor in found.items()})[0]


both_kinds_of_state = pytest.mark.parametrize(
    "sharded", [False, pytest.param(True, marks=needs_fsdp2_on_cpus)], ids=["plain", "fsdp2"]
)


@both_kinds_of_state
@pytest.mark.parametrize("asynchronous", [False, True], ids=["save", "async_save"])
@on_every_rank(deadline_s=90)
def test_what_dcp_saves_is_our_checkpoint(rank, world_size, sharded, asynchronous):
    folder = shared_folder(rank) + "/a"
    model, optimizer = trained(sharded)
    expected = whole(model, optimizer)
    state = state_dict(model, optimizer, epoch=3, note={"lr": 0.5, "tags": ["x", None], "mean": torch.arange(3.0)})
    writer = sw.checkpoint.StorageWriter(folder, step=7)
    if asynchronous:
        future = dcp.async_save(state, storage_writer=writer)
        with torch.no_grad():
            for parameter in model.parameters():
                (parameter.to_local() if sharded else parameter).fill_(0)  # staged already
        getattr(future, "upload_completion", future).result()
    else:
        dcp.save(state, storage_writer=writer)
    gather(None)
    assert sorted(os.listdir(os.path.dirname(folder))) == ["a"]

    other, other_optimizer = build(Small, seed=8)
    extra = sw.load(folder, other, other_optimizer)
    assert extra["epoch"] == 3 and extra["note.tags"] == ["x", None]
    assert torch.equal(extra["note.mean"], torch.arange(3.0))
    found = whole(other, other_optimizer)
    assert found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in found)
    if rank == 0:
        from shardwright_tools.cli import main

        with contextlib.redirect_stdout(io.StringIO()):
            assert main(["ckpt", "verify", folder]) == 0

    again, again_optimizer = trained(sharded, seed=9, steps=1)
    state = state_dict(again, again_optimizer, epoch=0, note={"lr": 0.0, "tags": [], "mean": torch.zeros(3)})
    dcp.load(state, storage_reader=sw.checkpoint.StorageReader(folder))
    set_model_state_dict(again, state["model"])
    set_optimizer_state_dict(again, again_optimizer, state["optim"])
    assert state["epoch"] == 3 and state["note"]["lr"] == 0.5 and torch.equal(state["note"]["mean"], torch.arange(3.0))
    found = whole(again, again_optimizer)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@both_kinds_of_state
@on_every_rank()
def test_dcp_reads_what_we_wrote(rank, world_size, sharded):
    folder = shared_folder(rank) + "/a"
    model, optimizer = trained()
    sw.save(folder, *sw.wrap(model, optimizer), extra={"epoch": 4})
    expected = whole(model, optimizer)
    other, other_optimizer = trained(sharded, seed=9, steps=1)
    state = state_dict(other, other_optimizer, epoch=0)
    dcp.load(state, storage_reader=sw.checkpoint.StorageReader(folder))
    set_model_state_dict(other, state["model"])
    set_optimizer_state_dict(other, other_optimizer, state["optim"])
    found = whole(other, other_optimizer)
    assert state["epoch"] == 4 and all(torch.equal(found[name], expected[name]) for name in expected)


@on_every_rank()
def test_every_kind_of_tensor_goes_through_dcp(rank, world_size):
    folder = shared_folder(rank) + "/a"
    model, _ = build(EveryKind)
    dcp.save(
        model.state_dict(), storage_writer=sw.checkpoint.StorageWriter(folder, model=None, max_file_bytes=1_500_000)
    )
    other, _ = build(EveryKind, seed=4)
    sw.load(folder, other)
    assert_same_state(state_of(other, None), state_of(model, None))
    third, _ = build(EveryKind, seed=5)
    state = third.state_dict()
    dcp.load(state, storage_reader=sw.checkpoint.StorageReader(folder, model=None))
    third.load_state_dict(state)
    assert_same_state(state_of(third, None), state_of(model, None))


@on_every_rank()
def test_damage_and_what_cannot_be_stored_are_named_on_every_rank(rank, world_size):
    folder = shared_folder(rank) + "/a"
    model, optimizer = trained()
    writer = sw.checkpoint.StorageWriter(folder)
    dcp.save(state_dict(model, optimizer), storage_writer=writer)
    with pytest.raises(dcp.api.CheckpointException, match="odd is a object"):
        dcp.save(state_dict(model, optimizer, odd=object()), storage_writer=writer)
    gather(None)
    sw.load(folder, *build(Small))  # the one before is still there
    dcp.save(state_dict(model, optimizer), storage_writer=writer)  # and is replaced
    if rank == 0:
        assert sorted(os.listdir(os.path.dirname(folder))) == ["a"]
        assert json.load(open(f"{folder}/MANIFEST.json"))["world_size"] == world_size
        with open(f"{folder}/model.safetensors", "r+b") as file:
            file.seek(6000)
            file.write(b"\xff\x01\x02")
    gather(None)
    other, other_optimizer = trained(seed=9, steps=1)
    before = state_of(other, other_optimizer)
    reason = "model.safetensors' was changed or did not survive: block 0"
    logger, notes = logging.getLogger("shardwright"), Notes()
    logger.addHandler(notes)
    try:
        said = "metadata is None" if torch.__version__.startswith("2.11.") else reason
        with pytest.raises(dcp.api.CheckpointException, match=said):
            dcp.load(state_dict(other, other_optimizer), storage_reader=sw.checkpoint.StorageReader(folder))
    finally:
        logger.removeHandler(notes)
    assert any(reason in text for text in notes.texts)
    assert_same_state(state_of(other, other_optimizer), before)


@on_every_rank()
def test_a_tensor_of_another_dtype_is_cast_as_torch_does(rank, world_size):
    folder = shared_folder(rank) + "/a"
    model, _ = trained()
    sw.save(folder, model)
    bare = {name: value.detach().clone() for name, value in getattr(model, "module", model).state_dict().items()}
    for dtype in (torch.bfloat16, torch.float64, torch.complex64):
        found = {"model": {name: torch.zeros_like(value, dtype=dtype) for name, value in bare.items()}}
        dcp.load(found, storage_reader=sw.checkpoint.StorageReader(folder))
        for name, value in found["model"].items():
            assert torch.equal(value, bare[name].to(dtype)), name


class Notes(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


@on_every_rank()
def test_arguments_of_torchs_storage_classes_are_taken_or_refused_with_a_sentence(rank, world_size):
    folder = shared_folder(rank) + "/a"
    writer_of, reader_of = sw.checkpoint.StorageWriter, sw.checkpoint.StorageReader
    if rank == 0:
        os.mkdir(folder)  # torch takes an empty folder, also where it must not overwrite
    gather(None)
    state = {"w": torch.arange(600_000.0), "v": torch.ones(3, 4), "nested": [{"b": 2}, torch.zeros(2)]}
    writer = writer_of(folder, True, True, 3, 10_000_000, False, False, None)
    dcp.save(state, storage_writer=writer)
    with pytest.raises(dcp.api.CheckpointException, match="Checkpoint already exists and self.overwrite=False"):
        dcp.save(state, storage_writer=writer_of(folder, overwrite=False))

    reader = reader_of(folder, None)
    meta = reader.read_metadata().storage_meta
    assert str(meta.checkpoint_id) == folder == writer.path and meta.load_id == reader.load_id
    assert meta.save_id == gather(writer.save_id)[0]
    dcp.save(state, storage_writer=writer_of(folder, overwrite=True))
    assert reader.read_metadata().storage_meta.save_id != meta.save_id
    gather(None)

    logger, notes = logging.getLogger("shardwright"), Notes()
    level = logger.level
    logger.addHandler(notes)
    logger.setLevel(logging.INFO)
    try:
        writer_of(folder, single_file_per_rank=False, sync_files=False, serialization_format="safetensors")
        reader_of(folder, object())
    finally:
        logger.removeHandler(notes)
        logger.setLevel(level)
    assert [text.partition("=")[0].rpartition(" ")[2] for text in notes.texts] == [
        "single_file_per_rank",
        "sync_files",
        "_extension_registry",
    ]
    assert all("has no effect: " in text for text in notes.texts)
    with pytest.raises(ValueError, match=r"_extensions must be empty, got \['object'\]"):
        writer_of(folder, _extensions=[object()])
    for count in (0, True, "2"):
        with pytest.raises(ValueError, match=r"thread_count must be an integer in \[1, 256\], got"):
            writer_of(folder, thread_count=count)
    if hasattr(dcp, "AsyncCheckpointerType"):  # as new as the argument
        with pytest.raises(dcp.api.CheckpointException, match="use_collectives=False would make a checkpoint a rank"):
            dcp.save(state, storage_writer=writer_of(folder), use_collectives=False)
    gather(None)


@on_every_rank()
def test_staged_memory_is_used_again_and_streams_and_nesting_come_back(rank, world_size):
    folder, file = shared_folder(rank) + "/a", f"{shared_folder(rank)}/{rank}.pt"
    writer = sw.checkpoint.StorageWriter(folder, cache_staged_state_dict=True)
    live = torch.zeros(5)
    for value in (1.0, 2.0):
        live.fill_(value)
        state = {"model": {"a.b": live}, "log": io.BytesIO(b"lines"), "deep": [{"n": 3}, [4, live]]}
        future = dcp.async_save(state, storage_writer=writer)
        live.fill_(0)
        getattr(future, "upload_completion", future).result()
        gather(None)
        found = {"model": {"a.b": torch.zeros(5)}, "log": io.BytesIO(), "deep": [{"n": 0}, [0, torch.zeros(5)]]}
        dcp.load(found, storage_reader=sw.checkpoint.StorageReader(folder))
        assert torch.equal(found["model"]["a.b"], torch.full((5,), value))
        assert found["log"].getvalue() == b"lines" and found["deep"][0] == {"n": 3}
        gather(None)
    sw.checkpoint.dcp_to_torch_save(folder, file)
    whole = torch.load(file, weights_only=False)
    assert list(whole["model"]) == ["a.b"] and whole["deep"][0] == {"n": 3} and whole["log"].getvalue() == b"lines"
    again = {"model": {"a.b": whole["model"]["a.b"]}, "step": 7, "list": [1, torch.ones(2)]}
    torch.save(again, file)
    sw.checkpoint.torch_save_to_dcp(file, f"{folder}{rank}")
    sw.checkpoint.dcp_to_torch_save(f"{folder}{rank}", file + "2")
    found = torch.load(file + "2", weights_only=True)
    assert torch.equal(found["model"]["a.b"], torch.full((5,), 2.0)) and found["step"] == 7 and found["list"][0] == 1
    gather(None)
