"""A small mixture of experts, dispatched by all_to_all, its data, and the same training in one process."""

import copy

import torch
import torch.distributed as dist
from peer import sw
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

WIDTH, EXPERTS, ROWS, STEPS, MAX_NORM = 8, 4, 12, 5, 0.5


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(context, rows, sent, received, group):
        context.splits = sent, received, group
        found = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(found, rows.contiguous(), received, sent, group=group)
        return found

    @staticmethod
    def backward(context, gradient):
        sent, received, group = context.splits
        found = gradient.new_empty(sum(sent), gradient.shape[1])
        dist.all_to_all_single(found, gradient.contiguous(), sent, received, group=group)
        return found, None, None, None


class Experts(nn.Module):
    """The experts of one rank of `ep`; of all, where the parameters are whole."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 4)

    def forward(self, rows, counts):
        up, down = (p.to_local() if hasattr(p, "to_local") else p for p in (self.up, self.down))
        parts = zip(rows.split(counts), up, down)
        return torch.cat([torch.relu(part @ a) @ b for part, a, b in parts])


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts()
        self.group = None

    def forward(self, x):
        probabilities = self.router(x).softmax(-1)
        weight, chosen = probabilities.max(-1)
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=EXPERTS)
        balance = EXPERTS * (probabilities.mean(0) * counts / len(x)).sum()
        rows, found = x[order], torch.empty_like(x)
        found[order] = self.dispatched(rows, counts.tolist()) if self.group else self.experts(rows, counts.tolist())
        return found * weight[:, None], balance

    def dispatched(self, rows, counts):
        ranks = dist.get_world_size(self.group)
        local = EXPERTS // ranks
        table = torch.empty(ranks, local, dtype=torch.long)  # rows that each rank sends to each expert here
        dist.all_to_all_single(table, torch.tensor(counts).view(ranks, local), group=self.group)
        sent, received = [sum(counts[i : i + local]) for i in range(0, EXPERTS, local)], table.sum(1).tolist()
        there = Exchange.apply(rows, sent, received, self.group)
        owners = torch.arange(local).repeat(ranks).repeat_interleave(table.flatten())
        order = owners.argsort(stable=True)
        done = torch.empty_like(there)
        done[order] = self.experts(there[order], table.sum(0).tolist())
        return Exchange.apply(done, received, sent, self.group)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([MoE(), MoE()])
        self.outlet = nn.Linear(WIDTH, 1)

    def forward(self, x):
        x, balance = self.inlet(x), 0
        for layer in self.layers:
            added, each = layer(x)
            x, balance = x + added, balance + each
        return self.outlet(x), balance


def build():
    torch.manual_seed(0)
    return Model()


def mesh_of(ep):
    world_size = dist.get_world_size()
    return init_device_mesh("cpu", (world_size // ep, ep), mesh_dim_names=("dp_mod_ep", "ep"))


def distributed(mesh):
    """The model with its experts over the dimension 'ep' of a mesh."""
    from torch.distributed.tensor import Shard, distribute_tensor

    model = build()
    for layer in model.layers:
        layer.group = mesh["ep"].get_group()
        for name, parameter in list(layer.experts.named_parameters()):
            sharded = nn.Parameter(distribute_tensor(parameter.detach(), mesh["ep"], [Shard(0)]))
            layer.experts.register_parameter(name, sharded)
    return model


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def backward(model, step, rank, share=1.0):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x, y = torch.randn(ROWS, WIDTH, generator=generator), torch.randn(ROWS, 1, generator=generator)
    found, balance = model(x)
    # torch 2.11's backward refuses a loss of two dtypes
    loss = share * (nn.functional.mse_loss(found.to(y.dtype), y) + 0.01 * balance)
    loss.backward()
    return loss.item()


def oracle(world_size, max_norm=MAX_NORM, steps=STEPS, times=1):
    model, norms = build(), []
    optimizer = optimizer_of(model)
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(times):
            for rank in range(world_size):
                backward(model, times * step + number, rank, 1 / world_size)
        if max_norm is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
    return copy.deepcopy(model.state_dict()), norms, optimizer.state_dict()


def wrapped(mesh, stage, **options):
    """(module, optimizer) at a stage: 0 to 3, "private", or "by hand" with fully_shard."""
    model = distributed(mesh)
    if stage == "by hand":
        for layer in model.layers:
            sw.fully_shard(layer.experts, mesh=mesh["dp_mod_ep"])
            layer.experts.set_gradient_divide_factor(dist.get_world_size())  # before there is an engine
            sw.fully_shard(layer)
        sw.fully_shard(model, **options)
        return model, sw.shard_optimizer(model, optimizer_of(model))
    options = {"groups": {"layers.*.experts": mesh["dp_mod_ep"]}, **options}
    if stage == "private":
        options["share_parameters"] = False
    return sw.wrap(model, optimizer_of(model), zero=3 if stage == "private" else stage, **options)


def train(model, optimizer, rank, steps=STEPS, first=0, max_norm=MAX_NORM):
    norms = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        backward(model, step, rank)
        if max_norm is not None:
            norms.append(sw.clip_grad_norm_(model, max_norm).item())
        optimizer.step()
    return norms
