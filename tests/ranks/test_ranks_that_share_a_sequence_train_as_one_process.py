"""Law: ranks that each have a piece of a sequence (context parallelism) train at every stage as one process does with the whole, where
the mean runs over dp x cp: one flattened dimension, or both as rows and columns."""

import pytest
import torch
import torch.distributed as dist
from harness import LONG, on_every_rank, same_everywhere
from oracle.fold import bits_equal
from peer import PEER, sw
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
WIDTH, HEADS, LENGTH, ROWS, STEPS = 8, 4, 12, 2, 5
STAGES = (0, 1, 2, 3, "private")


class Swap(torch.autograd.Function):
    """Each rank sends its i-th part of dimension `split` to rank i, and joins what it gets along `join`."""

    @staticmethod
    def forward(context, x, split, join, group):
        context.arguments = split, join, group
        parts = [each.contiguous() for each in x.chunk(dist.get_world_size(group), split)]
        found = [torch.empty_like(each) for each in parts]
        dist.all_to_all(found, parts, group=group)
        return torch.cat(found, join)

    @staticmethod
    def backward(context, gradient):
        split, join, group = context.arguments
        return Swap.apply(gradient, join, split, group), None, None, None


class Gather(torch.autograd.Function):
    """The pieces of all ranks; a gradient is the sum over ranks of this rank's piece."""

    @staticmethod
    def forward(context, x, group):
        context.group = group
        found = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(found, x.contiguous(), group=group)
        return torch.cat(found, 1)

    @staticmethod
    def backward(context, gradient):
        whole = gradient.contiguous().clone()
        dist.all_reduce(whole, group=context.group)
        return whole.chunk(dist.get_world_size(context.group), 1)[dist.get_rank(context.group)], None


class Attention(nn.Module):
    def __init__(self, by_heads):
        super().__init__()
        self.by_heads, self.group = by_heads, None
        # without a bias: that of keys has no gradient but rounding, which AdamW would make large
        self.inlet, self.outlet = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, first):
        q, k, v = (each.unflatten(-1, (HEADS, -1)) for each in self.inlet(x).chunk(3, -1))
        group = self.group
        if group is not None and self.by_heads:  # all of the sequence, for some of the heads
            q, k, v = (Swap.apply(each, 2, 1, group) for each in (q, k, v))
        elif group is not None:
            k, v = Gather.apply(k, group), Gather.apply(v, group)
        begin = 0 if self.by_heads else first
        mask = torch.arange(begin, begin + q.shape[1])[:, None] >= torch.arange(k.shape[1])
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 2
        found = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~mask, float("-inf")).softmax(-1), v)
        if group is not None and self.by_heads:
            found = Swap.apply(found, 1, 2, group)
        return x + self.outlet(found.flatten(2))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Attention(False), Attention(True)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, first=0):
        for layer in self.layers:
            x = layer(x, first)
        return self.head(x)


def build():
    torch.manual_seed(0)
    return Model()


def batch(step, place):
    generator = torch.Generator().manual_seed(100 * step + place)
    return torch.randn(2, ROWS, LENGTH, WIDTH, generator=generator)


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def oracle(data_ranks):
    model, norms, losses = build(), [], []
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(0.0)
        for place in range(data_ranks):
            x, y = batch(step, place)
            loss = nn.functional.mse_loss(model(x), y) / data_ranks
            loss.backward()
            losses[-1] += loss.item()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
        optimizer.step()
    return model.state_dict(), norms, losses


@on_every_rank(exactly=4)
def test_at_every_stage(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    group, place, piece = mesh["cp"].get_group(), mesh.get_local_rank("dp"), mesh.get_local_rank("cp")
    expected, expected_norms, expected_losses = oracle(2)
    first = None
    flat = mesh["dp", "cp"]._flatten("dp_cp")
    cases = [(stage, flat) for stage in STAGES]
    cases += [(stage, mesh["dp", "cp"]) for stage in (STAGES if LONG else (2,))]
    for stage, over in cases:
        model = build()
        for layer in model.layers:
            layer.group = group
        options = {"zero": 3, "share_parameters": False} if stage == "private" else {"zero": stage}
        model, optimizer = sw.wrap(model, optimizer_of(model), device_mesh=over, **options)
        norms, losses = [], []
        for step in range(STEPS):
            optimizer.zero_grad()
            x, y = (each.chunk(2, 1)[piece] for each in batch(step, place))
            loss = nn.functional.mse_loss(model(x, piece * LENGTH // 2), y)
            loss.backward()
            norms.append(sw.clip_grad_norm_(model, 0.05).item())
            optimizer.step()
            dist.all_reduce(loss := loss.detach())
            losses.append(loss.item() / world_size)
        found = sw.full_state_dict(model)
        assert losses == pytest.approx(expected_losses, abs=1e-6) and norms == pytest.approx(expected_norms, rel=1e-5)
        assert same_everywhere([norms, *found.values()])
        first = first or found
        for name, value in expected.items():
            assert bits_equal(found[name], first[name]), (stage, name)
            assert torch.allclose(found[name], value, rtol=0, atol=1e-6), (stage, name)
