"""Law: what a compressor owes is in the checkpoint: a restored training has the very losses of one that was not stopped at
the same world size, and at another the sum of what all ranks owe stays what it was."""

import pytest
import torch
from checkpoint_subjects import Small, build
from harness import gather, on_every_rank
from peer import PEER, batch, sw
from test_checkpoint_bytes_do_not_depend_on_the_ranks import shared_folder

pytestmark = pytest.mark.skipif(PEER == "torch", reason="shardwright's checkpoints")
STEPS, STOP = 7, 4
COMPRESSORS = {"powersgd": sw.PowerSGD(rank=2, min_compression_rate=0), "int4": sw.Int4(error_feedback=True)}


def training(folder, seed, compress, zero):
    model, optimizer = sw.wrap(*build(Small, seed), compress=compress, zero=zero)
    return model, optimizer, sw.Checkpointer(folder, model, optimizer)


def run(rank, model, optimizer, checkpoints, begin, end):
    losses = []
    for step in range(begin, end):
        torch.manual_seed(1000 * step + rank)
        loss = model(batch(rank, 5, 24, step=step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        checkpoints.save(step, every=STOP)
    return losses


@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.parametrize("name", COMPRESSORS)
@on_every_rank()
def test_a_restored_compressor_goes_on(rank, world_size, name, zero):
    folder = shared_folder(rank)
    model, optimizer, checkpoints = training(folder, 0, COMPRESSORS[name], zero)
    with checkpoints:
        whole = run(rank, model, optimizer, checkpoints, 0, STEPS)
    model, optimizer, checkpoints = training(folder, 1, COMPRESSORS[name], zero)
    with checkpoints:
        begin = checkpoints.restore()
        assert begin == STOP
        assert run(rank, model, optimizer, checkpoints, begin, STEPS) == whole[begin:]
    gather(None)


@on_every_rank(at_least=2)
def test_another_compressor_begins_with_nothing_owed(rank, world_size):
    folder = shared_folder(rank)
    model, optimizer, checkpoints = training(folder, 0, COMPRESSORS["powersgd"], 0)
    with checkpoints:
        run(rank, model, optimizer, checkpoints, 0, STOP)
    model, optimizer, checkpoints = training(folder, 1, COMPRESSORS["int4"], 0)
    with checkpoints:
        assert checkpoints.restore() == STOP
        assert model.compression_state.iter == 0
        run(rank, model, optimizer, checkpoints, STOP, STOP + 2)
    gather(None)


@on_every_rank(at_least=2)
def test_one_rank_alone_takes_over_what_all_owed(rank, world_size):
    """At W = 1: the mean over one rank is what that rank owes."""
    folder = shared_folder(rank)
    compress = sw.Int4(error_feedback=True)
    model, optimizer, checkpoints = training(folder, 0, compress, 0)
    with checkpoints:
        run(rank, model, optimizer, checkpoints, 0, STOP)
    owed = gather({name: entry["error"] for name, entry in model.compression_state.state_dict()["parameters"].items()})
    groups = [torch.distributed.new_group([each]) for each in range(world_size)]
    if rank == 0:
        alone, other = sw.wrap(*build(Small, 1), compress=compress, process_group=groups[0])
        with sw.Checkpointer(folder, alone, other) as checkpoints:
            assert checkpoints.restore() == STOP
        for name, entry in alone.compression_state.state_dict()["parameters"].items():
            mean = torch.stack([each[name].double() for each in owed]).mean(0).float()
            assert torch.equal(entry["error"], mean), name
    gather(None)
