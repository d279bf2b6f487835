"""Context parallelism: a GPT whose sequences lie in pieces on two ranks, beside two data-parallel rows, at any stage.

    torchrun --nproc-per-node 4 examples/13_long_context.py          # or a stage behind it: 0, 1, 2, 3

Each rank has half of the tokens of its row's sequences, and computes everything but attention for them alone. Attention sees
the whole sequence in one of two ways. "keys": each rank gathers the keys and values of all pieces, for all heads. "heads": the
ranks exchange pieces for heads, so that each has the whole sequence for half of the heads, and back (Ulysses). Gradients are
averaged over all 4 ranks. Rank 0 first trains the whole model with whole sequences by itself. See README.md.
"""

import sys

import shardwright as sw
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

VOCABULARY, WIDTH, HEADS, LAYERS, LENGTH = 64, 32, 4, 2, 64
BATCH, STEPS, MAX_NORM = 4, 6, 1.0


class Gather(torch.autograd.Function):
    """All ranks' pieces of the sequence; a gradient is the sum of what the ranks have for this piece."""

    @staticmethod
    def forward(context, x, group):
        context.group = group
        found = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(found, x.contiguous(), group=group)
        return torch.cat(found, 1)

    @staticmethod
    def backward(context, gradient):
        whole = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, group=context.group)
        return whole.chunk(context.group.size(), 1)[context.group.rank()], None


class Exchange(torch.autograd.Function):
    """Sends the i-th part along dimension `split` to rank i, and joins what comes along `join`."""

    @staticmethod
    def forward(context, x, split, join, group):
        context.given = split, join, group
        parts = torch.stack(x.chunk(group.size(), split))
        found = torch.empty_like(parts)
        dist.all_to_all_single(found, parts, group=group)
        return torch.cat(found.unbind(), join)

    @staticmethod
    def backward(context, gradient):
        split, join, group = context.given
        return Exchange.apply(gradient, join, split, group), None, None, None


class Block(nn.Module):
    """Causal attention and a perceptron, for a piece of a sequence where there is a group."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.inlet, self.outlet = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.way, self.group = None, None

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (HEADS, -1)) for each in self.inlet(self.norm1(x)).chunk(3, -1))
        first = 0
        if self.way == "keys":
            first = self.group.rank() * x.shape[1]
            k, v = Gather.apply(k, self.group), Gather.apply(v, self.group)
        elif self.way == "heads":
            q, k, v = (Exchange.apply(each, 2, 1, self.group) for each in (q, k, v))
        mask = torch.arange(first, first + q.shape[1])[:, None] >= torch.arange(k.shape[1])
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
        if self.way == "heads":
            mixed = Exchange.apply(mixed, 1, 2, self.group)
        x = x + self.outlet(mixed.flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, first=0):
        places = self.places(torch.arange(first, first + tokens.shape[1]))
        return self.head(self.norm(self.layers(self.embedding(tokens) + places)))


def batch(step, row):
    """Return the tokens of a row's walks, and their successors."""
    generator = torch.Generator().manual_seed(10 * step + row)
    walk = torch.randint(4, (BATCH, LENGTH + 1), generator=generator).cumsum(1) % VOCABULARY
    return walk[:, :-1], walk[:, 1:]


def loss_of(model, tokens, targets, first=0):
    return F.cross_entropy(model(tokens, first).flatten(0, 1), targets.flatten())


def on_one_rank(rows):
    model, losses = GPT(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        total = sum(loss_of(model, *batch(step, row)) for row in range(rows)) / rows
        total.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses


def on_all_ranks(mesh, way, zero):
    row, piece, pieces = mesh.get_local_rank("dp"), mesh.get_local_rank("cp"), mesh["cp"].size()
    model, losses = GPT(), []
    for block in model.layers:
        block.way, block.group = way, mesh["cp"].get_group()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"share_parameters": False} if zero == 3 else {}
    model, optimizer = sw.wrap(model, optimizer, zero=zero, device_mesh=mesh["dp", "cp"]._flatten("dp_cp"), **options)
    for step in range(STEPS):
        tokens, targets = (each.chunk(pieces, 1)[piece] for each in batch(step, row))
        loss = loss_of(model, tokens, targets, piece * LENGTH // pieces)
        loss.backward()
        sw.clip_grad_norm_(model, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total := loss.detach())
        losses.append(total.item() / mesh.size())
    return losses


def main(zero):
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    alone = on_one_rank(mesh["dp"].size())
    for way in ("keys", "heads"):
        losses = on_all_ranks(mesh, way, zero)
        if dist.get_rank() == 0:
            for step, (loss, one) in enumerate(zip(losses, alone)):
                print(f"{way} step {step}: loss {loss:.4f}, on one rank {one:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
