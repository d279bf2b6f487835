"""Law: an error of a full memory in a forward, a backward or a step keeps its type and says what this rank holds, the
peak beside it, and the next rung. Other errors stay as they are.
"""

import resource

import pytest
import torch
from harness import gather, in_turn, on_every_rank
from peer import PEER, batch, sw
from test_units_are_whole_only_while_they_run import Blocks
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
STAGES = [{"zero": 0}, {"zero": 1}, {"zero": 2}, {"zero": 3}, {"zero": 3, "share_parameters": False}]
HOST = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
ERRORS = {
    RuntimeError: HOST,
    torch.cuda.OutOfMemoryError: "CUDA out of memory. Tried to allocate 9 GiB",
    MemoryError: "",
}


class Fails(torch.autograd.Function):
    """Identity whose forward or backward raises."""

    error = where = None

    @staticmethod
    def forward(ctx, x):
        if Fails.where == "forward":
            raise Fails.error
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if Fails.where == "backward":
            raise Fails.error
        return gradient


class Fragile(Blocks):
    def run(self, x):
        return Fails.apply(super().run(x))


class Stepping(torch.optim.AdamW):
    def step(self, closure=None):
        if Fails.where == "step":
            Fails.where = None  # the plan steps a copy
            raise Fails.error
        return super().step(closure)


def caught(model, optimizer, rank, where, error):
    Fails.where, Fails.error = where, error
    try:
        model(batch(rank, 6, 7)).sum().backward()
        optimizer.step()
    except Exception as found:
        return found
    finally:
        Fails.where = Fails.error = None  # its traceback holds the model


def text_of(error):
    return "\n".join(getattr(error, "__notes__", [str(error)]))


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
@on_every_rank(spoils=True)
def test_the_plan_and_the_next_rung_stand_beside_the_error(rank, world_size, where):
    for stage in in_turn(STAGES, ["forward", "backward", "step"].index(where)):
        torch.manual_seed(0)
        module = Fragile()
        model, optimizer = sw.wrap(module, Stepping(module.parameters(), lr=1e-2), partition="flat", **stage)
        found = caught(model, optimizer, rank, where, ValueError("another one"))
        assert type(found) is ValueError and not hasattr(found, "__notes__")
        optimizer.zero_grad()
        module = Fragile()
        model, optimizer = sw.wrap(module, Stepping(module.parameters(), lr=1e-2), partition="flat", **stage)
        for kind in [RuntimeError] if where == "step" else ERRORS:
            found = caught(model, optimizer, rank, where, kind(ERRORS[kind]))
            text = text_of(found)
            assert type(found) is kind, found
            assert f"Fragile at zero={stage['zero']} on rank {rank} of {world_size}: parameters " in text, text
            assert "optimizer state" in text and "the peak of this process is" in text
            assert "Next: sw.checkpoint_units(model); then a smaller micro-batch" in text
            assert len(getattr(found, "__notes__", [""])) == 1
            optimizer.zero_grad()
    gather(None)


@on_every_rank(exactly=1)
def test_the_next_rung_is_one_that_is_not_in_use(rank, world_size, tmp_path):
    module = Fragile()
    model, optimizer = sw.wrap(module, Stepping(module.parameters(), lr=1e-2), partition="flat", zero=2)
    sw.checkpoint_units(model)
    assert "Next: checkpoint_units(offload='nvme:<folder>')" in text_of(
        caught(model, optimizer, rank, "forward", MemoryError())
    )
    module = Fragile()
    model, optimizer = sw.wrap(module, Stepping(module.parameters(), lr=1e-2), partition="flat", zero=2)
    sw.checkpoint_units(model, offload=f"nvme:{tmp_path}")
    text = text_of(caught(model, optimizer, rank, "forward", MemoryError()))
    assert "Next: a smaller micro-batch; then zero=3" in text


def in_little_memory(rank, world_size):
    module = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(4)))
    model, optimizer = sw.wrap(module, torch.optim.AdamW(module.parameters()), zero=1)
    model(torch.randn(8, 256)).sum().backward()
    optimizer.step()
    inputs = torch.randn(64 << 10, 256)  # 64 MiB, as each layer's output
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), resource.RLIM_INFINITY))
    with pytest.raises(RuntimeError, match="can't allocate memory") as error:
        model(inputs)
    assert "parameters 1.0 MiB" in text_of(error.value), text_of(error.value)


def test_the_systems_own_limit_is_explained(fresh_ranks, world_size):
    with fresh_ranks(world_size) as team:
        team.run(in_little_memory)
