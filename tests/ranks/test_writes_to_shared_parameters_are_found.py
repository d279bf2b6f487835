"""Law of write_guard: permitted writes (steps, full_parameters, loading) have the bits of a run without a guard. Any
other write to a shared parameter is an error with its name on all ranks, or a SIGSEGV at the write.
"""

import signal
import subprocess
import sys

import pytest
import torch
from harness import gather, on_every_rank
from models import Mlp
from oracle.fold import bits_equal
from peer import PEER, batch, engine, sw
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
guards = pytest.mark.parametrize("guard", ["samples", "read-only"])
OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "ours, of bfloat16": lambda p: sw.optim.AdamW(p, lr=1e-2),
    "whole tensors": lambda p: getattr(torch.optim, "Adafactor", torch.optim.AdamW)(p, lr=1e-2),
}


class Writer(nn.Module):
    """A module that writes to its parameter in its forward on request."""

    def __init__(self):
        super().__init__()
        self.inner, self.writes = Mlp(), False

    def forward(self, x):
        if self.writes:
            self.inner[2].weight.data.mul_(2)
        return self.inner(x)


def wrap(guard, build=Writer, kind="AdamW"):
    torch.manual_seed(0)
    module = build().to(torch.bfloat16 if "bfloat16" in kind else torch.float32)
    partition = "tensor" if kind == "whole tensors" else "auto"
    return sw.wrap(module, OPTIMIZERS[kind](module.parameters()), zero=3, partition=partition, write_guard=guard)


def train(model, optimizer, rank, steps=3):
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        model(batch(rank, 6, 7, step=step).to(dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@guards
@pytest.mark.parametrize("kind", OPTIMIZERS)
@on_every_rank()
def test_who_writes_by_right_is_not_disturbed(rank, world_size, guard, kind):
    found = []
    for each in (None, guard):
        model, optimizer = wrap(each, kind=kind)
        train(model, optimizer, rank)
        with sw.full_parameters(model, writable=True):
            for parameter in model.parameters():
                parameter.data.mul_(0.5)
        sw.load_full_state_dict(model, {name: value * 2 for name, value in sw.full_state_dict(model).items()})
        train(model, optimizer, rank)
        found.append([value.clone() for value in sw.full_state_dict(model).values()])
        gather(None)
    assert all(bits_equal(a, b) for a, b in zip(*found, strict=True))
    assert "write guard: " + guard in str(sw.describe())


@pytest.mark.parametrize("when", ["before a forward", "after a forward", "before a step"])
@on_every_rank(spoils=True)
def test_a_write_by_one_rank_is_named_on_all(rank, world_size, when):
    model, optimizer = wrap("samples")
    train(model, optimizer, rank)
    writes = rank == world_size - 1
    with pytest.raises(engine.Error, match=r"parameter 'inner\.2\.weight' was written to outside of the step"):  # noqa: PT012
        if when == "before a forward" and writes:
            model.module.inner[2].weight.data.mul_(2)
        model.module.writes = when == "after a forward" and writes
        model(batch(rank, 6, 7)).square().mean().backward()
        if when == "before a step" and writes:
            model.module.inner[2].weight.data.mul_(2)
        optimizer.step()
        train(model, optimizer, rank)


def permissions(address):
    with open("/proc/self/maps") as file:
        for line in file:
            low, high = (int(each, 16) for each in line.split()[0].split("-"))
            if low <= address < high:
                return line.split()[1][:3]
    return None


@on_every_rank()
def test_pages_are_writable_while_this_rank_may_write(rank, world_size):
    seen = []

    class Looks(torch.optim.SGD):
        def step(self, closure=None):
            seen.append(permissions(address))
            return super().step(closure)

    torch.manual_seed(0)
    module = Mlp()
    made = Looks(module.parameters(), lr=0.1)
    model, optimizer = sw.wrap(module, made, zero=3, partition="flat", write_guard="read-only")
    address = module[2].weight.data_ptr()
    assert permissions(address) == "r--"
    train(model, optimizer, rank, steps=2)
    assert seen == ["rw-", "rw-"]
    assert permissions(address) == "r--"
    gather(None)
    sw.unwrap(model)
    del model, optimizer, made
    module[2].weight.data.add_(1)  # its own again
    gather(None)


SCRIPT = """
import torch, shardwright as sw
module = torch.nn.Linear(64, 64)
model, optimizer = sw.wrap(module, torch.optim.SGD(module.parameters(), lr=0.1), zero=3, write_guard="read-only")
model(torch.ones(2, 64)).sum().backward()
optimizer.step()
print("stepped", flush=True)
module.weight.data.add_(1)
"""


def test_a_write_to_read_only_pages_ends_the_process_at_its_line():
    ended = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", SCRIPT], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == -signal.SIGSEGV
    assert ended.stdout == "stepped\n"
    assert 'File "<string>", line 8 in <module>' in ended.stderr


@on_every_rank()
def test_what_means_nothing_is_refused(rank, world_size):
    for options, sentence in [
        ({"zero": 3, "write_guard": "all"}, "write_guard must be 'auto', 'samples', 'read-only' or None, got 'all'"),
        ({"zero": 2, "write_guard": "samples"}, "write_guard= requires zero=3, got zero=2"),
        ({"zero": 3, "share_parameters": False, "write_guard": "samples"}, "watches parameters that a host shares"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            sw.wrap(Mlp(), **options)
