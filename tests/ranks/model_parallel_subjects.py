"""A small language model for tensor parallelism, its plan, its data, and the same training in one process."""

import copy

import torch
from peer import sw
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

VOCABULARY, WIDTH, LENGTH, ROWS, STEPS = 16, 8, 6, 4, 5


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """A model with an embedding that shares its weight with the head, a block with whole activations, and a block with
    a sharded sequence.
    """

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.blocks[0](self.embedding(tokens) + self.shift)
        x = x + self.blocks[1](x)
        return self.head(self.norm(x))


def build():
    torch.manual_seed(0)
    return Model()


def parallelized(mesh, model=None):
    """Return a model, or the one of build(), over the mesh dimension 'tp': column, row, sequence and loss parallelism. `shift` and the first
    block's norm stay plain.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    model = build() if model is None else model
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "blocks.0.up": ColwiseParallel(),
        "blocks.0.down": RowwiseParallel(output_layouts=Shard(1)),
        "blocks.1.norm": SequenceParallel(),
        "blocks.1.up": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.1.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh["tp"], plan)
    model.head.weight = model.embedding.weight
    return model


def mesh_of(data, model):
    return init_device_mesh("cpu", (data, model), mesh_dim_names=("dp", "tp"))


def tokens(step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)


def loss_of(model, data):
    logits = model(data[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), data[:, 1:].flatten())


def with_loss_parallel(model, data):
    from torch.distributed.tensor.parallel import loss_parallel

    with loss_parallel():
        loss = loss_of(model, data)
        loss.backward()
    return loss


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def oracle(data_ranks, max_norm=None, steps=STEPS):
    """Train the whole model in this process on all ranks' batches. Return parameters, norms and the optimizer's state."""
    model, norms = build(), []
    optimizer = optimizer_of(model)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(data_ranks):
            (loss_of(model, tokens(step, rank)) / data_ranks).backward()
        if max_norm is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
    return copy.deepcopy(model.state_dict()), norms, optimizer.state_dict()


def train(model, optimizer, rank, steps=STEPS, max_norm=None, first=0):
    """Train with loss parallelism on this data-parallel rank's batches. Return the norms."""
    norms = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        with_loss_parallel(model, tokens(step, rank))
        if max_norm is not None:
            norms.append(sw.clip_grad_norm_(model, max_norm).item())
        optimizer.step()
    return norms


def wrapped(mesh, stage, **options):
    """Return (module, optimizer) at a stage: 0 to 3, "private", or "by hand" with fully_shard."""
    model = parallelized(mesh)
    if stage == "by hand":
        for block in model.blocks:
            sw.fully_shard(block, mesh=mesh["dp"])
        sw.fully_shard(model, mesh=mesh["dp"], **options)
        return model, sw.shard_optimizer(model, optimizer_of(model))
    zero = 3 if stage == "private" else stage
    private = {"share_parameters": False} if stage == "private" else {}
    return sw.wrap(model, optimizer_of(model), zero=zero, device_mesh=mesh["dp"], **private, **options)
