"""Law: frozen parameters of integers, of a class with attributes too, are sliced and released at private zero=3 like
others, with the bits of stage 0. A read or a write of a released one is an error.
"""

import internals
import pytest
import torch
from harness import gather, on_every_rank
from oracle.fold import bits_equal
from peer import PEER, batch, engine, sw
from test_units_are_whole_only_while_they_run import steps
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
STAGES = [{"zero": 1}, {"zero": 2}, {"zero": 3}, {"zero": 3, "share_parameters": False}]


class Codes(nn.Parameter):
    """Bytes of a quantised matrix, with its scale, as libraries of 4-bit weights have them."""

    def __new__(cls, codes, scale=None):
        made = torch.Tensor._make_subclass(cls, codes, False)
        made.scale = scale
        return made


class Adapted(nn.Module):
    """A frozen matrix of two 4-bit codes a byte, and an adapter."""

    def __init__(self, width=32):
        super().__init__()
        codes = torch.randint(256, (width * width // 2, 1), dtype=torch.uint8)
        self.weight = Codes(codes, torch.rand(width))
        self.counts = nn.Parameter(torch.randint(9, (width, 5)), requires_grad=False)
        self.mask = nn.Parameter(torch.rand(width, width) > 0.5, requires_grad=False)
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, x):
        codes = self.weight.data
        matrix = torch.cat([codes & 15, codes >> 4], 1).reshape(len(self.weight.scale), -1).float() / 8 - 1
        x = x + torch.tanh(x @ (matrix * self.weight.scale * self.mask)) + self.up(self.down(x))
        return x + self.counts.sum(1) / 100


class Quantised(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(7, 32), *(Adapted() for _ in range(3)), nn.Linear(32, 5))


def trained(rank, recomputed=False, **stage):
    torch.manual_seed(0)
    module = Quantised()
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer = sw.wrap(module, optimizer, **stage)
    if recomputed:
        sw.checkpoint_units(model)
    return model, (steps(model, optimizer, rank, 3), sw.full_state_dict(model))


@on_every_rank()
def test_every_stage_has_the_same_bits_and_a_rank_its_part_of_the_bytes(rank, world_size):
    _, expected = trained(rank, zero=0)
    for stage in (*STAGES, {"recomputed": True, **STAGES[-1]}):
        model, found = trained(rank, **stage)
        assert found[0] == expected[0]
        assert all(bits_equal(value, expected[1][name]) for name, value in found[1].items())
    weights = [p for p in model.parameters() if p.dtype in (torch.uint8, torch.int64)]
    released = [p for p in weights if p.untyped_storage().nbytes() < 4096]
    assert len(released) == len(weights) == 6
    slices = internals.replica(model)._storage._slices
    table = internals.replica(model).table.parameters
    own = sum(slices[at].nbytes for at, p in enumerate(table) if p.dtype is torch.uint8)
    assert own <= 3 * 512 / world_size + 3 * 128
    gather(None)


@on_every_rank(spoils=True)
def test_a_released_one_is_neither_read_nor_written(rank, world_size):
    model, _ = trained(rank, **STAGES[-1])
    weight = model.module[2].weight
    assert isinstance(weight, Codes) and weight.scale.shape == (32,)
    for use in (lambda: weight.sum(), lambda: weight.fill_(3), lambda: weight.data.zero_(), lambda: weight & 15):
        with pytest.raises(engine.Error, match=r"parameter '2\.weight' is released"):
            use()
    with sw.full_parameters(model):
        old = weight.data
    assert int(old[0]) == 255
    old[0] = 3
    with pytest.raises(engine.Error, match=r"parameter '2\.weight' was written to, through an older view"):
        model(batch(rank, 6, 7)).sum().backward()
    gather(None)
