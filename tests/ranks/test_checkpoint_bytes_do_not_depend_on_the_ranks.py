"""Law: bytes and manifest entries of model and optimizer files depend only on names, shapes, dtypes, values and
max_file_bytes, not on world size, bucket caps, wrapper or snapshot form. A load returns what was saved.
"""

import json
import os
import tempfile
from unittest import mock

import pytest
import torch
from checkpoint_subjects import assert_same_state, build, digest_of, files_of, state_of, train
from harness import gather, on_every_rank
from peer import PEER, data_parallel, sw

pytestmark = pytest.mark.skipif(PEER == "torch", reason="shardwright's checkpoints")


def shared_folder(rank):
    """Return one temporary folder for all ranks, removed with their team."""
    return gather(tempfile.mkdtemp(prefix="ckpt-", dir=os.environ["SW_TEST_FOLDER"]) if rank == 0 else None)[0]


def manifest_entries(folder):
    files = json.load(open(os.path.join(folder, "MANIFEST.json")))["files"]
    return {f["path"]: (f["bytes"], f["crc32c"]) for f in files if f["path"].startswith(("model", "optimizer"))}


def wrapped_by_torch(model):
    # Without its broadcasts, which refuse int16 over gloo; torch 2.4 has no init_sync.
    with mock.patch("torch.nn.parallel.distributed._sync_module_states"):
        return torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)


def trained():
    model, optimizer = build()
    train(model, optimizer, 3)
    return model, optimizer


@pytest.mark.parametrize("max_file_bytes", [5_000_000_000, 1_500_000])
@on_every_rank()
def test_every_world_size_writes_what_one_rank_alone_writes(rank, world_size, max_file_bytes):
    folder = shared_folder(rank)
    model, optimizer = trained()
    sw.save(folder + "/together", model, optimizer, max_file_bytes=max_file_bytes)
    if rank == 0:
        solo = torch.distributed.new_group([0], backend="gloo") if world_size > 1 else None
        sw.save(folder + "/alone", model, optimizer, max_file_bytes=max_file_bytes, process_group=solo)
        assert digest_of(folder + "/together") == digest_of(folder + "/alone")
        assert manifest_entries(folder + "/together") == manifest_entries(folder + "/alone")
        assert ("model.safetensors.index.json" in digest_of(folder + "/together")) == (max_file_bytes < 2_000_000)
        of_ranks = [f for f in files_of(folder + "/together") if f.startswith("ranks/")]
        assert sorted(of_ranks) == ["ranks/all.jsonl", "ranks/all.safetensors"]
    elif world_size > 1:
        torch.distributed.new_group([0], backend="gloo")


@on_every_rank()
def test_wrappers_bucket_caps_and_snapshot_forms_change_no_byte(rank, world_size):
    folder = shared_folder(rank)
    digests = []
    for name, wrap, options in (
        ("plain", lambda m: m, {}),
        ("torch", wrapped_by_torch, {}),
        ("small", lambda m: data_parallel(m, bucket_cap_mb=0.001), {}),
        ("large", lambda m: data_parallel(m, bucket_cap_mb=100), {}),
        ("lazy", lambda m: m, {"snapshot": "lazy"}),
        ("buffered", lambda m: m, {"direct_io": False, "threads": 1}),
    ):
        torch.manual_seed(0)
        model, optimizer = trained()
        with sw.Checkpointer(f"{folder}/{name}", wrap(model), optimizer, **options) as checkpoints:
            assert checkpoints.save(4)
        digests.append(digest_of(f"{folder}/{name}/step-000005"))
    assert digests[0] and all(digest == digests[0] for digest in digests)


@on_every_rank()
def test_what_was_saved_is_what_is_loaded(rank, world_size):
    folder = shared_folder(rank)
    model, optimizer = trained()
    before = state_of(model, optimizer)
    pointers = {name: p.data_ptr() for name, p in model.named_parameters()}
    sw.save(folder + "/a", model, optimizer, step=7, extra={"note": ("x", 1 << 70, float("nan")), "t": torch.arange(3)})
    other, other_optimizer = build(seed=1)
    extra = sw.load(folder + "/a", other, other_optimizer)
    assert_same_state(state_of(other, other_optimizer), before)
    assert extra["note"][:2] == ("x", 1 << 70) and extra["note"][2] != extra["note"][2]
    assert torch.equal(extra["t"], torch.arange(3))
    train(model, optimizer, 2)
    train(other, other_optimizer, 2)
    assert_same_state(state_of(other, other_optimizer), state_of(model, optimizer))
    sw.load(folder + "/a", model, optimizer)
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == pointers
    assert_same_state(state_of(model, optimizer), before)


@on_every_rank(at_least=3)
def test_another_world_size_reads_the_same(rank, world_size):
    folder = shared_folder(rank)
    model, optimizer = trained()
    before = state_of(model, optimizer)
    sw.save(folder + "/all", model, optimizer)
    groups = [torch.distributed.new_group([r], backend="gloo") for r in range(world_size)]
    other, other_optimizer = build(seed=rank + 1)
    sw.load(folder + "/all", other, other_optimizer, process_group=groups[rank])
    assert_same_state(state_of(other, other_optimizer), before)
    sw.save(f"{folder}/{rank}", other, other_optimizer, process_group=groups[rank])
    assert digest_of(f"{folder}/{rank}") == digest_of(f"{folder}/all")
    third, third_optimizer = build(seed=9)
    gather(rank)
    sw.load(f"{folder}/1", third, third_optimizer)
    assert_same_state(state_of(third, third_optimizer), before)


@on_every_rank()
def test_buffers_that_differ_are_each_ranks_own_and_the_model_has_rank_0s(rank, world_size):
    folder = shared_folder(rank)
    model, _ = trained()
    model.norm.running_mean.fill_(10 + rank)
    sw.save(folder + "/a", model)
    other, _ = build(seed=1)
    sw.load(folder + "/a", other)
    assert other.norm.running_mean.eq(10 + rank).all()
    alone, _ = build(seed=1)
    if world_size > 1:
        groups = [torch.distributed.new_group([r], backend="gloo") for r in range(world_size)]
        sw.load(folder + "/a", alone, process_group=groups[rank])
        assert alone.norm.running_mean.eq(10).all()
