"""Law: a module that is built on the meta device and materialized trains like one built with rank 0's values. Ties stay
ties. A tensor that cannot be given values is named before anything changes.
"""

import copy

import pytest
import torch
from harness import gather, on_every_rank
from oracle.fold import bits_equal
from peer import PEER, batch, sw
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(7, 12), nn.LayerNorm(12), nn.BatchNorm1d(12))
        self.cell = nn.GRU(12, 12, batch_first=True)
        self.attention = nn.MultiheadAttention(12, 3, batch_first=True)
        self.out, self.tied = nn.Linear(12, 12), nn.Linear(12, 12, bias=False)
        self.tied.weight = self.out.weight

    def forward(self, x):
        x = self.cell(self.inner(x).unsqueeze(1))[0]
        return self.tied(self.out(self.attention(x, x, x)[0]))


@on_every_rank()
def test_it_trains_as_one_that_was_built_with_memory(rank, world_size):
    for stage in ({"zero": 0}, {"zero": 1}, {"zero": 2}, {"zero": 3}, {"zero": 3, "share_parameters": False}):
        torch.manual_seed(10 + rank)
        with torch.device("meta"):
            module = Parts()
        module.out.weight.requires_grad_(False)
        module.out.weight.hint = "kept"
        assert sw.materialize(module) is module
        assert module.tied.weight is module.out.weight and module.out.weight.hint == "kept"
        assert not module.out.weight.requires_grad and type(module.out.weight) is nn.Parameter
        twin = copy.deepcopy(gather(module)[0])
        losses = []
        for each, options in ((module, stage), (twin, {"zero": 0})):
            model, optimizer = sw.wrap(each, torch.optim.AdamW(each.parameters(), lr=1e-2), **options)
            losses.append([])
            for step in range(3):
                loss = model(batch(rank, 6, 7, step=step)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses[-1].append(loss.item())
        assert losses[0] == losses[1] and losses[0][0] == losses[0][0], stage
        gather(None)


@on_every_rank()
def test_what_has_no_values_is_named_and_nothing_changes(rank, world_size):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 3)
            self.scale = nn.Parameter(torch.ones(3))

    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(3, 3), Own())
    with pytest.raises(sw.Error, match=r"'1', a Own, .*reset_parameters.*1 such.*init="):
        sw.materialize(module)
    assert all(p.is_meta for p in module.parameters())
    with pytest.raises(sw.Error, match=r"sw\.materialize"):
        sw.wrap(module)
    seen = []

    def init(each):
        seen.append(type(each).__name__)
        for parameter in each.parameters(recurse=False):
            nn.init.constant_(parameter, 2.0)

    ready = nn.Linear(2, 2)
    before = ready.weight.detach().clone()
    module.append(ready)
    sw.materialize(module, init=init)
    assert seen == ["Linear", "Own", "Linear"]
    assert all(bool((p == 2).all()) for p in module[:2].parameters()) and bits_equal(ready.weight.detach(), before)
    gather(None)
