"""Law: at zero=1 and 2 on GPUs a step returns before its parameters are gathered. A unit's forward waits for that
unit's gather, any other read of a parameter for that parameter's, and the host never. Without such a wait the
simulation reports a race (docs/design/gpu.md).
"""

from __future__ import annotations

import copy
import io
import logging
from typing import Any

import internals
import pytest
import torch
from harness import LONG, in_turn
from internals import ModuleHook, step_gathers
from oracle.fold import bits_equal
from peer import PEER, batch
from simulated_gpus import SimulatedGpus, run, stats, sw
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
WIDTH = 8


class Net(nn.Module):
    """Three blocks between two layers, which belong to the outermost unit."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.Linear(7, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.end = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.begin(x)
        for block in self.blocks:
            x = block(x)
        return self.end(x).square().mean()


def make(gpus: SimulatedGpus, zero: int, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    module = gpus.adopt_module(Net())
    return sw.wrap(module, sw.optim.AdamW(module.parameters(), lr=0.1), zero=zero, bucket_cap_mb=0.0001, **options)


def step(wrapped: Any, optimizer: Any, rank: int, number: int) -> None:
    wrapped(batch(rank, 6, 7, step=number)).backward()
    optimizer.step()
    optimizer.zero_grad()


def pending(wrapped: Any) -> set[int]:
    """Return the groups for which no stream has waited yet."""
    groups = internals.replica(wrapped).parameters()._gathers._groups
    return set() if groups is None else set(groups.coming())


#: what reads whole parameters behind a step, and gives them
READS: dict[str, Any] = {
    "an operation": lambda w: [p * 1 for p in w.parameters()],
    "data": lambda w: [p.data.clone() for p in w.parameters()],
    "a state dict": lambda w: [each.clone() for each in w.state_dict().values()],
    "a copy": lambda w: [p.detach().clone() for p in copy.deepcopy(sw.unwrap(w)).parameters()],
    "a pickle": lambda w: [p.detach() for p in pickled(sw.unwrap(w)).parameters()],
    "full_parameters": lambda w: in_full_parameters(w),
    "the whole list": lambda w: list(torch._foreach_mul([p.detach() for p in w.parameters()], 1)),
    "an evaluation": lambda w: [w(batch(0, 6, 7)) if not torch.is_grad_enabled() else None],
}


def pickled(module: Any) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def in_full_parameters(wrapped: Any) -> list[torch.Tensor]:
    with sw.full_parameters(wrapped):
        return [p.detach().clone() for p in wrapped.parameters()]


@pytest.mark.parametrize(("zero", "policy"), [(1, "late"), (2, "random")])
def test_a_forward_waits_unit_by_unit_and_a_read_for_itself(
    teams: Any, paths: dict[str, str], zero: int, policy: str
) -> None:
    run(teams, 3, paths, waits, zero, policy=policy)


def waits(gpus: SimulatedGpus, rank: int, world_size: int, zero: int) -> None:
    whole, other = make(gpus, 0)
    wrapped, optimizer = make(gpus, zero)
    seen: list[int] = []
    handles = [
        block.register_forward_hook(lambda *_: seen.append(len(pending(wrapped))))
        for block in sw.unwrap(wrapped).blocks
    ]
    before = stats(wrapped)["host_waits"]
    for number in range(3):
        step(whole, other, rank, number)
        seen.clear()
        step(wrapped, optimizer, rank, number)
        assert number == 0 or seen == [2, 1, 0], seen
        assert len(pending(wrapped)) == 4
    assert all(isinstance(p, nn.Parameter) and type(p) is not nn.Parameter for p in wrapped.parameters())
    assert all(
        p.grad is None and p.requires_grad and p.shape == q.shape
        for p, q in zip(wrapped.parameters(), whole.parameters())
    )
    assert stats(wrapped)["host_waits"] == before and len(pending(wrapped)) == 4, "metadata waits for nothing"
    for handle in handles:
        handle.remove()
    last = [*sw.unwrap(wrapped).blocks][2][0].weight
    assert bits_equal(last * 1, [*sw.unwrap(whole).blocks][2][0].weight * 1) and len(pending(wrapped)) == 3
    for number, (name, read) in enumerate(in_turn([*READS.items()], zero), 3):
        step(whole, other, rank, number)
        step(wrapped, optimizer, rank, number)
        assert pending(wrapped)
        with torch.no_grad():
            for mine, theirs in zip(read(wrapped), read(whole), strict=True):
                assert bits_equal(mine, theirs), name
        assert not pending(wrapped) and all(type(p) is nn.Parameter for p in wrapped.parameters()), name
    step(wrapped, optimizer, rank, 0)
    with sw.full_parameters(wrapped, writable=True):
        for p in wrapped.parameters():
            p.detach().mul_(2)
    assert not pending(wrapped)


def test_what_compiles_borrows_or_asks_for_no_overlap_has_none(teams: Any, paths: dict[str, str]) -> None:
    run(teams, 2, paths, eager, policy="random")


def eager(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    whole, other = make(gpus, 0)
    asked, optimizer = make(gpus, 2, prefetch=0)
    step(whole, other, rank, 0)
    step(asked, optimizer, rank, 0)
    assert not pending(asked) and not sw.unwrap(asked)._forward_pre_hooks
    later, optimizer = make(gpus, 2)
    step(later, optimizer, rank, 0)
    assert pending(later)
    sw.unwrap(later).blocks[1].compile(backend="eager")
    step(whole, other, rank, 1)
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger("shardwright"), "warning", lambda text, *given: lines.append(text % given))
        for number in (1, 2):
            step(later, optimizer, rank, number)
            if number == 1:
                step_bits = [p.detach().clone() for p in later.parameters()]
    assert [("no longer overlap" in line, "a unit is compiled" in line) for line in lines] == [(True, True)] * (
        rank == 0
    )
    assert not pending(later) and not sw.unwrap(later)._forward_pre_hooks
    assert all(bits_equal(p, q.detach()) for p, q in zip(step_bits, whole.parameters()))
    step(whole, other, rank, 2)
    reached = [p.detach().clone() for p in whole.parameters()]
    units, optimizer = make(gpus, 2)
    sw.compile_units(units, backend="eager")
    for number in range(3):
        step(units, optimizer, rank, number)
        assert pending(units)  # their hooks run outside of the graphs
    assert all(bits_equal(p.detach(), q.detach()) for p, q in zip(units.parameters(), reached))
    del later, asked, units  # with nothing under way
    lost, optimizer = make(gpus, 1)
    step(lost, optimizer, rank, 0)
    kept = [*lost.parameters()]
    del lost, optimizer
    assert all(type(p) is nn.Parameter for p in kept)
    assert len([p * 1 for p in kept]) == 10


@pytest.mark.parametrize("without", ["hooks and guard", "a settled step"])
def test_a_wait_that_is_missing_is_a_race(teams: Any, paths: dict[str, str], without: str) -> None:
    with pytest.raises(AssertionError, match="race"):  # which ends the ranks
        run(teams, 3 if LONG else 2, paths, careless, without, policy="late")


def careless(gpus: SimulatedGpus, rank: int, world_size: int, without: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        wrapped, optimizer = make(gpus, 1)
        if without == "hooks and guard":
            patch.setattr(step_gathers, "change_classes", lambda *_: None)
            patch.setattr(ModuleHook, "__call__", lambda *_: None)
        else:  # it steps twice on one gradient
            patch.setattr(internals.replica(wrapped)._storage, "settle", lambda: None)
            wrapped(batch(rank, 6, 7)).backward()
            optimizer.step()
            optimizer.step()
        step(wrapped, optimizer, rank, 0)
        step(wrapped, optimizer, rank, 1)
