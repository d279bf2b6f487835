"""Law: at zero=3 on GPUs `prefetch=` units, or those that the program names, are gathered ahead of the running one,
each once. The bits are those of no prefetch at every depth (docs/design/gpu.md).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from internals import engine_of
from oracle.fold import bits_equal
from peer import PEER, batch
from simulated_gpus import SimulatedGpus, run, stats, sw
from torch import nn

pytestmark = pytest.mark.skipif(PEER == "torch", reason="ours")
WIDTH, BLOCKS = 8, 5


def net(gpus: SimulatedGpus) -> Any:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS))
    return gpus.adopt_module(nn.Sequential(*blocks))


def schedule_of(wrapped: Any) -> Any:
    return engine_of(wrapped).replica.parameters().schedule


def train(gpus: SimulatedGpus, module: Any, rank: int, **options: Any) -> tuple[Any, list[list[int]], list[Any]]:
    """Return the wrapper, the blocks that are whole or being gathered in each block's forward of the last step, and the
    parameters.
    """
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    if hasattr(module, "unshard"):
        optimizer = sw.shard_optimizer(module, optimizer)
        wrapped = module
    else:
        wrapped, optimizer = sw.wrap(module, optimizer, zero=3, **options)
        waits = stats(wrapped)["host_waits"]  # the end of an earlier wrapper's reducer waits once
    found: list[list[int]] = []

    def look(*_: Any) -> None:
        schedule = schedule_of(wrapped)
        found.append([u.number - 1 for u in schedule.units[1:] if schedule.state(u) != "sharded"])

    handles = [block.register_forward_hook(look) for block in module]
    for step in range(3):
        found.clear()
        module_or_wrapper = module if hasattr(module, "unshard") else wrapped
        module_or_wrapper(batch(rank, 6, WIDTH, step=step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if wrapped is not module:
        assert stats(wrapped)["host_waits"] == waits
    for handle in handles:
        handle.remove()
    with sw.full_parameters(module if hasattr(module, "unshard") else wrapped):
        parameters = [p.detach().clone() for p in module.parameters()]
    return wrapped, found, parameters


def test_units_ahead(teams: Any, paths: dict[str, str]) -> None:
    run(teams, 3, paths, ahead, policy="random")


def ahead(gpus: SimulatedGpus, rank: int, world_size: int) -> None:
    results = {}
    for depth in (0, 1, 3):
        wrapped, found, results[depth] = train(gpus, net(gpus), rank, prefetch=depth)
        expected = [list(range(k, min(k + depth, BLOCKS - 1) + 1)) for k in range(BLOCKS)]
        assert found == expected, (depth, found)
        del wrapped
    module = net(gpus)
    for block in module:
        sw.fully_shard(block)
    sw.fully_shard(module)
    module[0].set_modules_to_forward_prefetch([module[1], module[2], module[3]])
    module[4].set_modules_to_backward_prefetch([module[3], module[2]])
    module.set_is_last_backward(True)
    module.set_requires_all_reduce(True)
    module.set_gradient_divide_factor(world_size)
    wrapped, found, results["named"] = train(gpus, module, rank)
    assert found[0] == [0, 1, 2, 3] and found[1] == [1, 2, 3] and found[3] == [3, 4], found
    assert all(bits_equal(a, b) for each in results.values() for a, b in zip(each, results[0], strict=True))
    for refused, sentence in (
        (lambda: module.set_gradient_divide_factor(0), "finite factor > 0, got 0"),
        (lambda: module[0].set_modules_to_forward_prefetch([nn.Tanh()]), "fully_shard was called on, got a Tanh"),
    ):
        with pytest.raises((NotImplementedError, ValueError, sw.Error), match=sentence):
            refused()


def test_depths_that_are_none_are_refused() -> None:
    for wrong in (-1, True, 1.5, "1"):
        with pytest.raises(ValueError, match="prefetch must be a number of units"):
            sw.wrap(nn.Linear(2, 2), prefetch=wrong)
