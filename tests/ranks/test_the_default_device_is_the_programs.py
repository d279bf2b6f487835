"""Law: a program may choose the device on which torch makes tensors (torch.set_default_device("cuda")): what the package makes for itself is
where it is used, whatever that choice. Here the choice is "meta", whose tensors have no memory, so that one which came to lie there fails.
"""

from __future__ import annotations

import contextlib
import copy
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import gather, on_every_rank
from models import Mlp
from oracle.fold import bits_equal
from peer import PEER, batch

import shardwright as sw

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
#: what is wrapped, and how
CASES: dict[str, dict[str, Any]] = {
    "zero=0": {"clip_grad_norm": 0.1},
    "zero=1": {"zero": 1, "clip_grad_norm": 0.1},
    "zero=2": {"zero": 2},
    "zero=3": {"zero": 3},
    "zero=3, private": {"zero": 3, "share_parameters": False},
    "whole tensors": {"zero": 2, "partition": "tensor"},
    "bf16": {"zero": 2, "precision": "bf16"},
    "Bf16": {"compress": sw.Bf16()},
    "Int8": {"compress": sw.Int8(error_feedback=True)},
    "Int4 at zero=2": {"compress": sw.Int4(), "zero": 2},
    "PowerSGD in turns": {"compress": sw.PowerSGD(2, alternate=True), "zero": 1},
}


@contextlib.contextmanager
def default_device(name: str | None) -> Iterator[None]:
    """Inside, torch makes tensors there of which nobody says where. (So it does with what its own optimizers keep: ours are used here.)"""
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


def train(rank: int, name: str | None, folder: str | None, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    module = Mlp()
    given = [batch(rank, 6, 7, step=step) for step in range(4)]
    with default_device(name):
        model, optimizer = sw.wrap(module, sw.optim.AdamW(module.parameters(), lr=0.01), **options)
        for step, x in enumerate(given):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if folder is not None and step == 2:
                with sw.Checkpointer(folder, model, optimizer) as saves:
                    saves.save(step)
                    saves.wait()
        if folder is not None:
            with sw.Checkpointer(folder, model, optimizer) as saves:
                assert saves.restore() == 3
            model(given[3]).square().mean().backward()
            optimizer.step()
        state = sw.full_state_dict(model), sw.full_optimizer_state_dict(model, optimizer)
    return [each.clone() for part in state for each in tensors(part)]


def tensors(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    for each in state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ():
        yield from tensors(each)


@pytest.mark.parametrize("case", CASES)
@on_every_rank()
def test_a_training_has_the_same_bits(rank: int, world_size: int, case: str) -> None:
    made = tempfile.mkdtemp(dir=os.environ["SW_TEST_FOLDER"]) if rank == 0 else ""
    folder = gather(made)[0]
    expected = train(rank, None, f"{folder}/cpu", **copy.deepcopy(CASES[case]))
    found = train(rank, "meta", f"{folder}/meta", **copy.deepcopy(CASES[case]))
    assert len(found) == len(expected) and all(map(bits_equal, found, expected))
