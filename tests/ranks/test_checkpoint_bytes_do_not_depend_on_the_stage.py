"""Law: model and optimizer files have the same bytes at every stage that this engine has, any stage reads what any other
wrote, and goes on with the same bits."""

import pytest
import torch
from checkpoint_subjects import Small, build, digest_of, train
from harness import on_every_rank
from peer import PEER, sw
from test_checkpoint_bytes_do_not_depend_on_the_ranks import shared_folder
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="shardwright's checkpoints")


STAGES = {
    **{stage: {"zero": stage} for stage in range(4)},
    "3, private": {"zero": 3, "share_parameters": False, "units": nn.Linear},
}


def wrapped(stage, seed=0):
    model, optimizer = build(Small, seed)
    return sw.wrap(model, optimizer, **STAGES[stage])


@pytest.mark.parametrize("snapshot", ["copy", "lazy"])
@on_every_rank()
def test_every_stage_writes_the_same_bytes_and_reads_every_others(rank, world_size, snapshot):
    folder = shared_folder(rank)
    digests, after = {}, {}
    for stage in STAGES:
        pair = wrapped(stage)
        torch.manual_seed(5)
        train(*pair, 3, width=24)
        with sw.Checkpointer(f"{folder}/{stage}", *pair, snapshot=snapshot) as checkpoints:
            checkpoints.save(2)
        digests[stage] = digest_of(f"{folder}/{stage}/step-000003")
    assert all(digest == digests[0] for digest in digests.values())
    for writer in digests:
        for reader in digests:
            pair = wrapped(reader, seed=9)
            sw.load(f"{folder}/{writer}/step-000003", *pair)
            sw.save(f"{folder}/{writer}-{reader}", *pair)
            assert digest_of(f"{folder}/{writer}-{reader}") == digests[0]
            torch.manual_seed(7)
            train(*pair, 2, width=24)
            sw.save(f"{folder}/{writer}-{reader}-on", *pair)
            after[writer, reader] = digest_of(f"{folder}/{writer}-{reader}-on")
    assert all(digest == after[0, 0] for digest in after.values())
