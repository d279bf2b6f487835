"""Law: moments in bfloat16, and bfloat16 weights without masters, are rounded at random with the same bits at every stage
and world size. They are saved in their dtype and load into another one.
"""

import os
import pathlib

import pytest
import torch
from harness import on_every_rank
from oracle.fold import bits_equal
from peer import PEER, batch, sw
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
STAGES = [
    {"zero": 1, "bucket_cap_mb": 0.001},
    {"zero": 2},
    {"zero": 3, "units": nn.Linear},
    {"zero": 3, "share_parameters": False, "units": nn.Linear},
]


class Mixed(nn.Module):
    """float32 and bfloat16 weights, one transposed, one larger than a buffer of 64 KiB."""

    def __init__(self):
        super().__init__()
        self.first, self.low = nn.Linear(7, 150), nn.Linear(150, 130).to(torch.bfloat16)
        self.turned = nn.Parameter(torch.randn(9, 130).t())

    def forward(self, x):
        x = torch.tanh(self.first(x))
        return self.low(x.to(torch.bfloat16)).float() @ self.turned


def train(rank, zero, *, dtype=torch.bfloat16, master=True, steps=4, first=0, load=None, save=None, **options):
    torch.manual_seed(0)
    module = Mixed()
    turned, *others = module.turned, *module.first.parameters(), *module.low.parameters()
    groups = [{"params": [turned], "lr": 1e-3}, {"params": others}]
    optimizer = sw.optim.AdamW(groups, lr=1e-2, master=master, state_dtype=dtype, seed=5)
    model, optimizer = sw.wrap(module, optimizer, zero=zero, **options)
    folder = pathlib.Path(os.environ["SW_TEST_FOLDER"])
    if load is not None:
        sw.load(folder / load, model, optimizer)
    for step in range(first, first + steps):
        model(batch(rank, 6, 7, step=step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if save is not None:
        sw.save(folder / save, model, optimizer)
    state = sw.full_optimizer_state_dict(model, optimizer)["state"]
    with sw.full_parameters(model):
        return [p.detach().clone() for p in module.parameters()], state


def assert_equal(found, expected):
    assert all(map(bits_equal, found[0], expected[0]))
    for number, state in expected[1].items():
        assert found[1][number].keys() == state.keys()
        for key, value in state.items():
            assert bits_equal(found[1][number][key], value), (number, key)


@pytest.mark.parametrize("master", [True, False], ids=["masters", "no masters"])
@on_every_rank()
def test_bits_are_those_of_zero_0(rank, world_size, master):
    expected = train(rank, 0, master=master)
    assert all(state["exp_avg_sq"].dtype is torch.bfloat16 for state in expected[1].values())
    for options in STAGES:
        assert_equal(train(rank, master=master, **options), expected)
    in_file = f"nvme:{os.environ['SW_TEST_FOLDER']}"
    assert_equal(train(rank, 2, master=master, offload=in_file), expected)


@on_every_rank()
def test_a_checkpoint_has_its_dtype_and_loads_into_another(rank, world_size):
    saved = train(rank, 2, save="of-bfloat16")
    assert_equal(train(rank, 3, steps=0, load="of-bfloat16"), saved)
    wide = train(rank, 1, steps=0, load="of-bfloat16", dtype=torch.float32)
    for number, state in saved[1].items():
        assert all(bits_equal(wide[1][number][key], state[key].float()) for key in ("exp_avg", "exp_avg_sq"))
    train(rank, 1, dtype=None, save="to-bfloat16")
    narrow = train(rank, 0, steps=0, load="to-bfloat16")
    assert all(state["exp_avg_sq"].dtype is torch.bfloat16 for state in narrow[1].values())


@on_every_rank()
def test_dtensors_of_fully_shard_keep_their_moments_in_bfloat16(rank, world_size):
    def trained(dtype):
        torch.manual_seed(0)
        module = Mixed()
        module.turned = nn.Parameter(module.turned.detach().contiguous())
        sw.fully_shard(module)
        optimizer = sw.optim.AdamW(module.parameters(), lr=1e-3, state_dtype=dtype)
        losses = []
        for step in range(4):
            loss = module(batch(rank, 6, 7, step=step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, optimizer

    (found, optimizer), (expected, _) = trained(torch.bfloat16), trained(torch.float32)
    assert found == pytest.approx(expected, rel=0.02)
    assert all(state["exp_avg_sq"].dtype is torch.bfloat16 for state in optimizer.state.values())
