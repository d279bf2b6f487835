"""Law of write_guard: permitted writes (steps, full_parameters, loading) have the bits of a run without a guard. Any
other write to a shared parameter is an error with its name on all ranks.
"""

import contextlib

import internals
import pytest
import torch
from harness import gather, on_every_rank
from models import Mlp
from oracle.fold import bits_equal
from peer import PEER, batch, engine, sw
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
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


@pytest.mark.parametrize("kind", OPTIMIZERS)
@on_every_rank()
def test_who_writes_by_right_is_not_disturbed(rank, world_size, kind):
    found = []
    for each in (None, "samples"):
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
    assert "write guard: samples" in str(sw.describe())


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


@on_every_rank()
def test_what_means_nothing_is_refused(rank, world_size):
    for options, sentence in [
        ({"zero": 3, "write_guard": "all"}, "write_guard must be 'auto', 'samples' or None, got 'all'"),
        ({"zero": 3, "write_guard": "read-only"}, "must be 'auto', 'samples' or None, got 'read-only'"),
        ({"zero": 2, "write_guard": "samples"}, "write_guard= requires zero=3, got zero=2"),
        ({"zero": 3, "share_parameters": False, "write_guard": "samples"}, "watches parameters that a host shares"),
    ]:
        with pytest.raises(ValueError, match=sentence):
            sw.wrap(Mlp(), **options)


@pytest.mark.parametrize("writers", ["all", "one"])
@on_every_rank(at_least=2)
def test_a_write_is_found_when_the_module_is_wrapped_again(rank, world_size, writers):
    """Each rank's `p.mul_(0.5)` has scaled the host's one copy: the next wrapper would begin with 0.5 ** writers."""
    model, _ = wrap("auto")
    bare = sw.unwrap(model)
    gather(None)
    if writers == "all" or rank == world_size - 1:
        with torch.no_grad():
            for parameter in bare.parameters():
                parameter.mul_(0.5)
    with pytest.raises(sw.Error, match="parameter 'inner.0.weight' was written to"):
        sw.wrap(bare, torch.optim.SGD(bare.parameters(), lr=0.1))


@on_every_rank(at_least=2)
def test_a_write_of_the_engine_that_failed_is_not_the_programs(rank, world_size):
    """A step that ended in an exception has written, perhaps on some ranks alone; the module can be wrapped again."""
    model, _ = wrap("samples")
    gather(None)
    with contextlib.suppress(ValueError), internals.replica(model).access.writing():
        if rank == 0:
            next(sw.unwrap(model).parameters()).data.fill_(1.0)
        gather(None)
        raise ValueError("in a step")
    again, optimizer = sw.wrap(sw.unwrap(model), torch.optim.SGD(sw.unwrap(model).parameters(), lr=0.1), zero=3)
    train(again, optimizer, rank)
