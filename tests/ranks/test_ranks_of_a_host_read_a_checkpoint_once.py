"""Law: ranks of a host that need the same bytes read each byte from the disk once, whatever memory they can spare.
Every rank gets all bytes, and a rank that cannot read its part stops all ranks with one error.
"""

import os
import re

import pytest
import torch
from checkpoint_subjects import assert_same_state, state_of
from harness import gather, on_every_rank
from peer import PEER, sw
from test_checkpoint_bytes_do_not_depend_on_the_ranks import shared_folder
from test_checkpoint_damage_is_seen_by_all import agreed, flip

pytestmark = pytest.mark.skipif(PEER == "torch", reason="shardwright's checkpoints")
MIB = 1 << 20


def build(width=1024):
    """A model of several blocks of 1 MiB, with AdamW."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, width), torch.nn.ReLU(), torch.nn.Linear(width, 16 * 97))
    return sw.wrap(model, torch.optim.AdamW(model.parameters()))


def data(rank):
    return torch.randn(2, 16, generator=torch.Generator().manual_seed(rank))


def step(model, optimizer, rank):
    optimizer.zero_grad()
    model(data(rank)).square().sum().backward()
    optimizer.step()


class Reads:
    """A context that counts the bytes of every load of the folder, past the page cache and through it, and the turns in which
    values are read."""

    def __init__(self):
        from internals import filling

        self._filler, self.direct, self.cached = filling.Filler, 0, 0
        self.turns = set()

    def __enter__(self):
        self._load = load = self._filler._load

        def counted(filler, pieces, *, direct, turn=(0, 1)):
            count = sum(piece.nbytes for piece in pieces)
            self.direct, self.cached = self.direct + direct * count, self.cached + (not direct) * count
            self.turns |= {turn} if any(piece.address for piece in pieces) else set()
            load(filler, pieces, direct=direct, turn=turn)

        self._filler._load = counted
        return self

    def __exit__(self, *error):
        self._filler._load = self._load


@on_every_rank(at_least=2, deadline_s=90)
def test_each_byte_is_read_by_one_rank_and_reaches_all(rank, world_size):
    folder = shared_folder(rank)
    model, optimizer = build()
    with sw.Checkpointer(folder, model, optimizer) as checkpoints:
        step(model, optimizer, rank)
        checkpoints.save(0)
        checkpoints.wait()
        saved = state_of(model, optimizer)
        total = 3 * 4 * sum(p.numel() for p in model.parameters())
        for form in ("spare memory", "no state yet", "sw.load"):
            step(model, optimizer, rank)
            if form == "no state yet":
                optimizer.state.clear()
            with Reads() as reads:
                if form == "sw.load":
                    sw.load(f"{folder}/step-000001", model, optimizer)
                else:
                    assert checkpoints.restore() == 1
            assert_same_state(state_of(model, optimizer), saved)
            parts = gather(reads.direct)
            assert abs(sum(parts) - total) < MIB, form  # the steps' tensors are read apart
            assert max(parts) - min(parts) < MIB
            assert reads.cached < total / world_size + 4 * MIB  # what cannot be kept is checked first
        step(model, optimizer, rank)


@on_every_rank(at_least=3, deadline_s=90)
def test_a_part_that_is_damaged_leaves_every_ranks_values(rank, world_size):
    folder = shared_folder(rank)
    model, optimizer = build()
    with sw.Checkpointer(folder, model, optimizer) as checkpoints:
        for number in range(2):
            step(model, optimizer, rank)
            checkpoints.save(number)
            checkpoints.wait()
        live = state_of(model, optimizer)
        (name,) = (each for each in os.listdir(f"{folder}/step-000002") if re.match("optimizer.*safetensors", each))
        path = f"{folder}/step-000002/{name}"
        if rank == 0:
            flip(path, 5 * MIB)
        gather(None)
        assert "block 5 (bytes 5242880 to 6291456)" in agreed(
            lambda: sw.load(path.rpartition("/")[0], model, optimizer)
        )
        assert_same_state(state_of(model, optimizer), live)
        assert checkpoints.restore() == 1


@on_every_rank(at_least=3, deadline_s=90)
def test_a_rank_that_cannot_read_its_part_after_the_verdict_stops_all(rank, world_size):
    from internals import filling

    folder = shared_folder(rank)
    model, optimizer = build()
    step(model, optimizer, rank)
    sw.save(f"{folder}/a", model, optimizer)
    read_rest = filling.Filler.read_rest

    def fail(self):
        if rank == 1:
            raise sw.CheckpointError("this rank's disk cannot read block 3")
        read_rest(self)

    filling.Filler.read_rest = fail
    try:
        sentence = agreed(lambda: sw.load(f"{folder}/a", model, optimizer))
        assert "rank 1: " in sentence and "loaded in part" in sentence and "cannot read block 3" in sentence
    finally:
        filling.Filler.read_rest = read_rest
    sw.load(f"{folder}/a", model, optimizer)
    step(model, optimizer, rank)


@on_every_rank(at_least=3, deadline_s=90)
def test_ranks_with_other_memory_read_by_themselves(rank, world_size):
    """Rank 1 holds a weight of another layout, into which bytes cannot be read in place. Each rank begins elsewhere."""
    folder = shared_folder(rank)
    torch.manual_seed(1)
    model = torch.nn.Linear(600, 700, bias=False)
    with torch.no_grad():
        model.weight.normal_()
    sw.save(f"{folder}/a", model)
    wanted = model.weight.detach().clone()
    if rank == 1:
        model.weight.data = torch.zeros(600, 700).t()
    with torch.no_grad():
        model.weight.zero_()
    with Reads() as reads:
        sw.load(f"{folder}/a", model)
    assert torch.equal(model.weight, wanted)
    assert gather(reads.direct) == [0] * world_size
    assert reads.turns == {(rank, world_size)}
