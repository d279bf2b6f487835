"""Law: the checkpoint holds a compressor's error. A restored training has the losses of an uninterrupted one at the
same world size; at another one the sum of all ranks' errors stays the same."""

import functools

import pytest
import torch
from checkpoint_subjects import Small, build, train_steps
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
    return train_steps(rank, model, optimizer, begin, end, functools.partial(checkpoints.save, every=STOP))


@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.parametrize("name", COMPRESSORS)
@on_every_rank()
def test_a_restored_compressor_continues(rank, world_size, name, zero):
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
def test_another_compressor_begins_without_error(rank, world_size):
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
def test_one_rank_takes_over_the_error_of_all(rank, world_size):
    """At W = 1 the rank's error is the mean over the saved ranks."""
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


class Branches(torch.nn.Module):
    """A model that uses its second layer on request."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.deep = torch.nn.Linear(24, 24), torch.nn.Linear(24, 24), False

    def forward(self, x):
        x = self.first(x)
        return (self.second(x) if self.deep else x).square().mean()


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.parametrize("name", COMPRESSORS)
@on_every_rank()
def test_a_parameter_that_no_rank_used_begins_without_error(rank, world_size, name, zero, steps):
    folder = shared_folder(rank)

    def make():
        model = build(Branches, 0)
        return sw.wrap(*model, compress=COMPRESSORS[name], zero=zero, find_unused_parameters=True)

    def go_on(model, optimizer, count):
        for step in range(count):
            optimizer.zero_grad()
            model(batch(rank, 5, 24, step=step)).backward()
            optimizer.step()

    model, optimizer = make()
    go_on(model, optimizer, steps)
    with sw.Checkpointer(folder, model, optimizer) as checkpoints:
        checkpoints.save(0)
    model.module.deep = True
    go_on(model, optimizer, 3)
    again, other = make()
    with sw.Checkpointer(folder, again, other) as checkpoints:
        assert checkpoints.restore() == 1
    again.module.deep = True
    go_on(again, other, 3)
    for ours, theirs in zip(again.parameters(), model.parameters()):
        assert torch.equal(ours, theirs)
    gather(None)


@on_every_rank()
def test_a_restore_without_a_compressors_state_clears_the_error(rank, world_size):
    folder = shared_folder(rank)
    model, optimizer = sw.wrap(*build(Small))
    with sw.Checkpointer(folder, model, optimizer) as checkpoints:
        checkpoints.save(0)
    model, optimizer, checkpoints = training(folder, 1, COMPRESSORS["int4"], 0)
    with checkpoints:
        for step in range(2):
            model(batch(rank, 5, 24, step=step)).backward()
        assert model.compression_state.state_dict()["parameters"]
        assert checkpoints.restore() == 1
        assert not model.compression_state.state_dict()["parameters"]
    gather(None)
