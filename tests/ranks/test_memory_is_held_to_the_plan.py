"""Law: describe() predicts a rank's memory before the first step: mapped memory to a page per mapping, optimizer state
to the byte, and the total above import and activations to 10 %.
"""

import contextlib
import ctypes
import gc
import sys

import internals
import pytest
import torch
from harness import LONG, gather, on_every_rank
from peer import PEER, batch, sw
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
PAGE = 4096
STAGES = {
    "0": {"zero": 0},
    "1": {"zero": 1},
    "2": {"zero": 2},
    "3": {"zero": 3},
    "3, private": {"zero": 3, "share_parameters": False},
}


class Gpt(nn.Module):
    """Blocks of attention and MLP with a tied head. `width` 512 and 16 layers are 50.7 M parameters."""

    def __init__(self, width, layers, context=32):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)


def loss_of(model, rank, step):
    tokens = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(100 * step + rank))
    return F.cross_entropy(model(tokens).flatten(0, 1)[:-1], tokens.flatten()[1:])


def mapping_bytes(address):
    """Return the size of the mapping that contains an address."""
    with open("/proc/self/maps") as file:
        for line in file:
            low, high = (int(word, 16) for word in line.split()[0].split("-"))
            if low <= address < high:
                return high - low
    raise AssertionError("not mapped")


def pss_bytes():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))


def pss_together():
    """Return the PSS while every rank is at this place: what two of them map counts half, however late one of them runs."""
    gather(None)
    found = pss_bytes()
    gather(None)
    return found


def settled():
    """Return the PSS after free memory was returned to the kernel."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return pss_together()


def planned():
    return sw.describe()["models"][-1]


@pytest.mark.parametrize("stage", STAGES)
@on_every_rank(at_least=2)  # one rank alone has private pages, which the system joins with their neighbours
def test_mapped_memory_is_the_plan_to_a_page(rank, world_size, stage):
    from internals import gradient_view

    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(301, 301) for _ in range(5)))
    model, _ = sw.wrap(module, sw.optim.AdamW(module.parameters()), bucket_cap_mb=0.5, **STAGES[stage])
    plan, replica = planned(), internals.replica(model)
    memory = gradient_view(replica.layout_of(0), replica.reducer, 0)
    held = mapping_bytes(memory.data_ptr()) // world_size  # an arena is one mapping with every rank's part
    if STAGES[stage]["zero"] >= 2:  # and private pages for this rank's slices of the means
        widths = [replica.reducer.bucket_shape(i) for i in range(replica.reducer.bucket_count)]
        held += sum(numel * 4 // world_size for _, numel, _, _ in widths)
    assert abs(held - plan["gradient_bytes"]) < PAGE, (held, plan)
    if stage in ("1", "2", "3"):
        name = "shared_parameter_bytes" if stage == "3" else "parameter_bytes"
        assert abs(mapping_bytes(module[0].weight.data_ptr()) // world_size - plan[name]) < PAGE, plan
    gather(None)


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD without": lambda p: torch.optim.SGD(p, lr=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True),
    "ours": lambda p: sw.optim.AdamW(p),
    "ours, no master": lambda p: sw.optim.AdamW(p, master=False),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_every_rank()
def test_optimizer_state_is_the_plan_to_the_byte(rank, world_size, name):
    for options in STAGES.values():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(7, 33), nn.Linear(33, 19).to(torch.bfloat16), nn.Linear(19, 5))
        module[0].bias.requires_grad_(False)
        model, optimizer = sw.wrap(
            module, OPTIMIZERS[name]([p for p in module.parameters() if p.requires_grad]), **options
        )
        plan = planned()
        module[1].register_forward_pre_hook(lambda _, inputs: inputs[0].bfloat16())
        module[2].register_forward_pre_hook(lambda _, inputs: inputs[0].float())
        model(batch(rank, 6, 7)).square().mean().backward()
        optimizer.step()
        tensors = [
            v for s in optimizer.state.values() for k, v in s.items() if isinstance(v, torch.Tensor) and k != "step"
        ]
        assert plan["optimizer_state_bytes"] == sum(v.numel() * v.element_size() for v in tensors), (options, plan)
        gather(None)


@on_every_rank()
def test_what_cannot_be_known_is_not_said(rank, world_size):
    if hasattr(torch.optim, "Adafactor"):
        module = nn.Linear(33, 19)
        model, _ = sw.wrap(module, torch.optim.Adafactor(module.parameters()), zero=1, partition="tensor")
        assert planned()["optimizer_state_bytes"] is None and planned()["planned_bytes"] is None
        assert "unknown" in str(sw.describe())
        gather(None)


def peaks(model, optimizer, rank, steps):
    """Return the largest PSS of three moments: after the loss, with all gradients, after the step."""
    seen = []
    for step in range(steps):
        loss = loss_of(model, rank, step)
        at_loss = pss_together()
        loss.backward()
        del loss
        at_gradients = pss_together()
        if optimizer is not None:
            optimizer.step()
        seen.append((at_loss, at_gradients, pss_together()))
        model.zero_grad()
    return [max(column) for column in zip(*seen)]


def weighed(rank, world_size, options, width, layers):
    with contextlib.suppress(ValueError, OSError):
        ctypes.CDLL(None).mallopt(-3, 64 << 10)  # M_MMAP_THRESHOLD: what is freed is given back
    torch.manual_seed(0)
    for warm in (None, options):  # what torch and the engine take once: pages of code, threads, a communicator
        module = Gpt(64, 1)
        model, optimizer = module, torch.optim.AdamW(module.parameters(), fused=True)
        if warm is not None:
            model, optimizer = sw.wrap(module, optimizer, **options)
        peaks(model, optimizer, rank, 2)
        gather(None)
    del model, optimizer
    start = settled()
    module = Gpt(width, layers)
    size = sum(p.numel() * 4 for p in module.parameters())
    at_loss, at_gradients, _ = peaks(module, None, rank, 2)
    activations = max(at_loss - start - size, at_gradients - start - 2 * size, 0)
    del module
    gather(None)
    start = settled()
    torch.manual_seed(0)
    module = Gpt(width, layers)
    model, optimizer = sw.wrap(module, torch.optim.AdamW(module.parameters(), fused=True), **options)
    plan = planned()["planned_bytes"]
    taken = max(peaks(model, optimizer, rank, 3)) - start
    return taken, plan, activations


@pytest.mark.parametrize("stage", ["0", "1", "2", "3", "3, private"] if LONG else ["2"])
def test_all_of_it_is_the_plan_and_the_activations_to_10_percent(fresh_ranks, world_size, stage):
    size = (512, 16) if LONG else (256, 6)
    with fresh_ranks(world_size) as team:
        found = team.run(weighed, options=STAGES[stage], width=size[0], layers=size[1])
    taken, plan, activations = (sum(column) for column in zip(*found))
    print(
        f"{stage} W={world_size}: {taken >> 20} MiB of {plan >> 20} planned and {activations >> 20} of activations",
        file=sys.stderr,
    )
    assert taken <= 1.1 * (plan + activations), found
    assert taken >= 0.8 * plan, found
