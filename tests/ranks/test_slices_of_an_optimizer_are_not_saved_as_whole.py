"""Law: state_dict() of a sliced optimizer can be copied and loaded in its process at its rank, but never pickled: the
error names the calls that save whole state. After consolidate_state_dict(to) rank `to` has torch's ordinary format
until the next step. A single rank always has it.
"""

import copy
import io
import os
import pickle
import tempfile

import pytest
import torch
from harness import gather, on_every_rank
from models import Mlp
from oracle.fold import bits_equal
from peer import PEER, batch, engine, sw
from torch.distributed import checkpoint as dcp

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
STAGES = {
    "1": {"zero": 1},
    "2": {"zero": 2},
    "3 shared": {"zero": 3},
    "3 private": {"zero": 3, "share_parameters": False},
    "1 whole tensors": {"zero": 1, "partition": "tensor"},
    "3 whole tensors": {"zero": 3, "partition": "tensor", "share_parameters": False},
}
every_stage = pytest.mark.parametrize("stage", STAGES)
SENTENCE = r"slices of rank \d of \d.*sw\.full_optimizer_state_dict.*consolidate_state_dict\(to=0\).*sw\.Checkpointer"


def wrap(stage):
    torch.manual_seed(0)
    module = Mlp()
    return sw.wrap(module, torch.optim.AdamW(module.parameters(), lr=1e-2), **STAGES[stage])


def steps(model, optimizer, rank, first, count):
    for step in range(first, first + count):
        model(batch(rank, 6, 7, step=step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def same(a, b):
    assert a["param_groups"] == b["param_groups"]
    assert a["state"].keys() == b["state"].keys() and len(a["state"]) == 6
    for number, state in a["state"].items():
        assert state.keys() == b["state"][number].keys()
        for key, value in state.items():
            assert value.shape == b["state"][number][key].shape
            assert bits_equal(value, b["state"][number][key])


@every_stage
@on_every_rank(at_least=2)
def test_no_pickler_takes_slices(rank, world_size, stage):
    model, optimizer = wrap(stage)
    steps(model, optimizer, rank, 0, 2)
    state = optimizer.state_dict()
    nested = {"epoch": 3, "optimizers": [dict(state)], **state}
    for value in (state, nested, state.copy(), copy.copy(state), copy.deepcopy(state)):
        for save in (pickle.dumps, lambda each: torch.save(each, io.BytesIO())):
            with pytest.raises(engine.Error, match=SENTENCE):
                save(value)
    assert f"rank {rank} of {world_size}" in repr(state)
    gather(None)


@every_stage
@on_every_rank()
def test_a_copy_is_loaded_at_its_rank(rank, world_size, stage):
    model, optimizer = wrap(stage)
    steps(model, optimizer, rank, 0, 2)
    weights, state = sw.full_state_dict(model), copy.deepcopy(optimizer.state_dict())
    steps(model, optimizer, rank, 2, 2)
    expected = sw.full_state_dict(model)
    sw.load_full_state_dict(model, weights)
    optimizer.load_state_dict(state)
    steps(model, optimizer, rank, 2, 2)
    assert all(bits_equal(value, expected[name]) for name, value in sw.full_state_dict(model).items())
    gather(None)


@every_stage
@on_every_rank()
def test_one_rank_has_the_whole_until_the_next_step(rank, world_size, stage):
    to = world_size - 1
    model, optimizer = wrap(stage)
    steps(model, optimizer, rank, 0, 2)
    full = sw.full_optimizer_state_dict(model, optimizer)
    optimizer.consolidate_state_dict(to=to)
    if rank == to:
        state = optimizer.state_dict()
        file = io.BytesIO()
        torch.save(state, file)
        same(torch.load(io.BytesIO(file.getvalue()), weights_only=True), full)
        torch.optim.AdamW(Mlp().parameters()).load_state_dict(state)  # a stock optimizer takes it
    else:
        assert "param_groups" not in optimizer.state_dict()
    optimizer.param_groups[0]["lr"] = 0.5
    assert rank != to or optimizer.state_dict()["param_groups"][0]["lr"] == 0.5
    optimizer.param_groups[0]["lr"] = 1e-2
    steps(model, optimizer, rank, 2, 1)
    assert ("param_groups" in optimizer.state_dict()) == (world_size == 1)
    optimizer.consolidate_state_dict()
    assert ("param_groups" in optimizer.state_dict()) == (rank == 0)
    optimizer.load_state_dict(full)
    assert ("param_groups" in optimizer.state_dict()) == (world_size == 1)
    for value in (-1, world_size, True, "0"):
        with pytest.raises(ValueError, match=rf"to must be a rank in \[0, {world_size}\)"):
            optimizer.consolidate_state_dict(to=value)
    gather(None)


@every_stage
@on_every_rank(exactly=1)
def test_one_rank_is_whole_and_plain(rank, world_size, stage):
    model, optimizer = wrap(stage)
    steps(model, optimizer, rank, 0, 2)
    state = pickle.loads(pickle.dumps(optimizer.state_dict()))
    same(state, sw.full_optimizer_state_dict(model, optimizer))
    weights = sw.full_state_dict(model)
    steps(model, optimizer, rank, 2, 2)
    expected = sw.full_state_dict(model)
    sw.load_full_state_dict(model, weights)
    optimizer.load_state_dict(state)
    steps(model, optimizer, rank, 2, 2)
    assert all(bits_equal(value, expected[name]) for name, value in sw.full_state_dict(model).items())


@on_every_rank(at_least=2)
def test_torchs_checkpoints_refuse_slices_on_all_ranks(rank, world_size):
    model, optimizer = wrap("1")
    steps(model, optimizer, rank, 0, 1)
    folder = gather(tempfile.mkdtemp(dir=os.environ["SW_TEST_FOLDER"]))[0]
    with pytest.raises(dcp.api.CheckpointException, match=f"(?s){SENTENCE}"):  # torch tells all ranks of one's error
        dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=folder)
    gather(None)


@on_every_rank()
def test_hooks_on_state_dict_see_either_form(rank, world_size):
    model, optimizer = wrap("1")
    steps(model, optimizer, rank, 0, 1)
    called = []
    optimizer.register_state_dict_pre_hook(lambda each: called.append("before"))
    optimizer.register_state_dict_post_hook(lambda each, state: {**state, "more": 1})
    assert optimizer.state_dict()["more"] == 1
    optimizer.consolidate_state_dict()
    assert optimizer.state_dict()["more"] == 1 and called == ["before"] * 2
    gather(None)
