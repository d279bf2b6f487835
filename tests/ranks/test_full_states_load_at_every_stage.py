"""Law: sw.load_full_state_dict gives every rank the values of rank 0's state_dict of the bare module, at every stage.
Training continues with the bits of a module that had them from the start. A state that does not fit is one sentence on
all ranks.
"""

import pytest
import torch
from harness import gather, on_every_rank, same_everywhere
from oracle.fold import bits_equal
from peer import PEER, batch, engine, sw
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
STAGES = {
    "0": {"zero": 0},
    "1": {"zero": 1},
    "2": {"zero": 2},
    "3": {"zero": 3},
    "3 private": {"zero": 3, "share_parameters": False, "units": nn.Linear},
}


class Net(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(7, 33), nn.Linear(33, 33), nn.Linear(33, 5))
        self.ignored = nn.Parameter(torch.randn(3))
        self.register_buffer("scale", torch.rand(5))
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("own", torch.tensor(seed), persistent=False)

    def forward(self, x):
        return self.layers(x) * self.scale


def wrap(seed, stage):
    module = Net(seed)
    optimizer = torch.optim.AdamW(module.layers.parameters(), lr=1e-2)
    return sw.wrap(module, optimizer, ignored_params=["ignored"], **stage)


def train(model, optimizer, rank):
    for step in range(2):
        model(batch(rank, 6, 7, step=step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return sw.full_state_dict(model)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("who", ["all", "first"])
@on_every_rank()
def test_what_was_loaded_is_trained_on(rank, world_size, stage, who):
    state = Net(1).state_dict()
    expected = train(*wrap(1, STAGES["0"]), rank)
    model, optimizer = wrap(2, STAGES[stage])
    found = sw.load_full_state_dict(model, state if who == "all" or rank == 0 else None)
    assert found.missing_keys == [] and found.unexpected_keys == []
    assert all(bits_equal(value, state[name]) for name, value in sw.full_state_dict(model).items())
    assert sw.unwrap(model).own.item() == 2
    ours = train(model, optimizer, rank)
    assert ours.keys() == expected.keys()
    assert all(bits_equal(value, expected[name]) for name, value in ours.items())
    assert same_everywhere([*ours.values()])


@pytest.mark.parametrize("stage", STAGES)
@on_every_rank()
def test_what_does_not_fit_is_one_sentence_on_all_ranks(rank, world_size, stage):
    model, optimizer = wrap(2, STAGES[stage])
    state = Net(1).state_dict()
    state["more"] = state.pop("layers.1.bias")
    mine = state if rank == 0 else {}
    with pytest.raises(engine.Error, match=r"the state lacks 'layers\.1\.bias'; the module lacks 'more'"):
        sw.load_full_state_dict(model, mine)
    found = sw.load_full_state_dict(model, mine, strict=False)
    assert found == (["layers.1.bias"], ["more"])
    state = {**Net(1).state_dict(), "layers.1.weight": torch.ones(2, 2)}
    with pytest.raises(engine.Error, match=r"layers\.1\.weight.*2, 2"):
        sw.load_full_state_dict(model, state if rank == 0 else None)
    with pytest.raises(engine.Error, match="mapping.*on rank 0, got NoneType"):
        sw.load_full_state_dict(model, None)
    train(model, optimizer, rank)
    gather(None)


def test_a_bare_module_is_refused():
    with pytest.raises(engine.Error, match="wrapped"):
        sw.load_full_state_dict(nn.Linear(2, 2), {})
