"""Three dimensions of parallelism: a GPT over tensor (2) x pipeline (2) x data (2) ranks, at zero=1, 2 and 3.

Run it with `torchrun --nproc-per-node 8 examples/09_three_d.py`. Rank 0 first trains the whole model by itself. Each line
has the loss of the 8 ranks beside that. Half-way each run saves one checkpoint of all stages, and goes on from it.
"""

import tempfile

import shardwright as sw
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

VOCABULARY, WIDTH, HEAD, LAYERS, LENGTH = 64, 32, 8, 4, 16
BATCH, MICRO_BATCHES, STEPS, MAX_NORM = 8, 4, 6, 1.0


class Block(nn.Module):
    """Causal attention and a perceptron. The number of heads follows from the columns that this rank has."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (each(y).unflatten(-1, (-1, HEAD)).transpose(1, 2) for each in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """The whole model, or the layers of one stage: what a stage does not have is None, and all names stay."""

    def __init__(self, layers=range(LAYERS)):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleDict({str(number): Block() for number in range(LAYERS)})
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        for number in set(range(LAYERS)) - set(layers):
            del self.layers[str(number)]
        if 0 not in layers:
            self.embedding = self.places = None
        if LAYERS - 1 not in layers:
            self.norm = self.head = None

    def forward(self, x):
        if self.embedding is not None:
            x = self.embedding(x) + self.places.weight
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(self.norm(x))


def batch(step, replica):
    """Return bytes of a walk and their successors."""
    generator = torch.Generator().manual_seed(10 * step + replica)
    walk = torch.randint(4, (BATCH, LENGTH + 1), generator=generator).cumsum(1) % VOCABULARY
    return walk[:, :-1], walk[:, 1:]


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def on_one_rank(replicas):
    model, losses = GPT(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        total = sum(loss_of(model(x), y) for x, y in (batch(step, each) for each in range(replicas))) / replicas
        total.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return model.state_dict(), losses


def build(mesh, zero):
    """Return this rank's stage, its optimizer and a schedule."""
    place, count = mesh.get_local_rank("pp"), mesh["pp"].size()
    share = LAYERS // count
    module = GPT(range(place * share, (place + 1) * share))
    plan = {f"layers.*.{name}": ColwiseParallel() for name in ("q", "k", "v", "up")}
    plan |= {f"layers.*.{name}": RowwiseParallel() for name in ("out", "down")}
    parallelize_module(module, mesh["tp"], plan)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    options = {"share_parameters": False} if zero == 3 else {}
    module, optimizer = sw.wrap(module, optimizer, zero=zero, device_mesh=mesh["dp"], **options)
    stage = sw.PipelineStage(module, place, count, torch.device("cpu"), group=mesh["pp"].get_group())
    return stage, optimizer, Schedule1F1B(stage, n_microbatches=MICRO_BATCHES, loss_fn=loss_of)


def train(mesh, stage, optimizer, schedule, steps):
    """Return the mean losses, which the ranks of the last stage know, on all ranks."""
    means = []
    for step in steps:
        x, y = batch(step, mesh.get_local_rank("dp"))
        losses = []
        if stage.is_first:
            schedule.step(x)
        else:
            schedule.step(target=y, losses=losses)
        sw.clip_grad_norm_(stage.submod, MAX_NORM, pp_mesh=mesh["pp"])
        optimizer.step()
        optimizer.zero_grad()
        mean = torch.stack(losses).mean() if losses else torch.zeros(())
        dist.all_reduce(mean)
        means.append(mean.item() / (mesh["dp"].size() * mesh["tp"].size()))
    return means


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    rank = dist.get_rank()
    expected, alone = on_one_rank(mesh["dp"].size())
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        for zero in (1, 2, 3):
            stage, optimizer, schedule = build(mesh, zero)
            losses = train(mesh, stage, optimizer, schedule, range(STEPS // 2))
            sw.save(f"{folder[0]}/{zero}", stage, optimizer, step=STEPS // 2)
            stage, optimizer, schedule = build(mesh, zero)
            sw.load(f"{folder[0]}/{zero}", stage, optimizer)
            losses += train(mesh, stage, optimizer, schedule, range(STEPS // 2, STEPS))
            sw.save(f"{folder[0]}/{zero}-end", stage, optimizer, step=STEPS)
            whole = GPT()
            sw.load(f"{folder[0]}/{zero}-end", whole)  # the same folder, in one module
            apart = torch.cat([(value - expected[n]).flatten() for n, value in whole.state_dict().items()]).abs().mean()
            for step, (loss, one) in enumerate(zip(losses, alone) if rank == 0 else ()):
                print(f"zero{zero} step {step}: loss {loss:.4f}, on one rank {one:.4f}")
            if rank == 0:
                print(f"zero{zero}: parameters are on average within 1e-6: {bool(apart < 1e-6)}", flush=True)
        dist.barrier()
    dist.destroy_process_group()


main()
