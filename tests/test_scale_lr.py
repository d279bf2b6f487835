"""Law: sw.scale_lr multiplies rates by the rule's factor, ramps up to it, and goes on at another world size from there."""

from __future__ import annotations

import math
from typing import Any

import pytest
import shardwright as sw
import torch


def made(world_size: int, *, lr: Any = 0.1, **options: Any) -> tuple[Any, Any]:
    optimizer = torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(2))]}], lr=lr)
    return optimizer, sw.scale_lr(optimizer, world_size, **options)


def rates(optimizer: Any, steps: int, *schedulers: Any) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        for each in schedulers:
            each.step()
    return found


@pytest.mark.parametrize("rule, factor", [("linear", 8.0), ("sqrt", math.sqrt(8))])
def test_a_rule_multiplies_rates_at_once_or_over_the_warmup(rule: str, factor: float) -> None:
    optimizer, scheduler = made(8, rule=rule)
    assert rates(optimizer, 3, scheduler) == pytest.approx([0.1 * factor] * 3)
    optimizer, scheduler = made(8, rule=rule, warmup_steps=4)
    ramp = [1 + (factor - 1) * min(1, step / 4) for step in range(7)]
    assert rates(optimizer, 7, scheduler) == pytest.approx([0.1 * each for each in ramp])


@pytest.mark.parametrize("scheduler_first", [False, True])
@pytest.mark.parametrize("before", [2, 6])
def test_a_run_goes_on_at_another_world_size(before: int, scheduler_first: bool) -> None:
    optimizer, scheduler = made(4, warmup_steps=4)
    rates(optimizer, before, scheduler)
    reached = optimizer.param_groups[0]["lr"]
    saved = [optimizer.state_dict(), scheduler.state_dict()]

    first = int(scheduler_first)  # the optimizer's load then brings the old rates, which the next step corrects

    def continued(world_size: int, steps: int) -> list[float]:
        optimizer, scheduler = made(world_size, warmup_steps=4)
        pairs = list(zip((optimizer, scheduler), saved))
        for loads, state in pairs[::-1] if scheduler_first else pairs:
            loads.load_state_dict(state)
        return rates(optimizer, steps, scheduler)[first:]

    assert continued(4, 4) == pytest.approx(
        [0.1 * (1 + 3 * min(1, step / 4)) for step in range(before + first, before + 4)]
    )
    assert continued(8, 6) == pytest.approx([reached + (0.8 - reached) * min(1, step / 4) for step in range(first, 6)])
    assert continued(1, 2) == pytest.approx([0.1, 0.1][first:])


def test_it_composes_with_a_schedule_that_multiplies() -> None:
    optimizer, scheduler = made(4, warmup_steps=3)
    plain = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    cosine = [torch.optim.lr_scheduler.CosineAnnealingLR(each, 10) for each in (optimizer, plain)]
    ours, theirs = rates(optimizer, 6, scheduler, cosine[0]), rates(plain, 6, cosine[1])
    assert ours == pytest.approx([rate * (1 + 3 * min(1, step / 3)) for step, rate in enumerate(theirs)])


def test_rates_that_are_tensors_stay_tensors() -> None:
    optimizer, scheduler = made(4, lr=torch.tensor(0.1), warmup_steps=2)
    held = optimizer.param_groups[0]["lr"]
    assert rates(optimizer, 3, scheduler) == pytest.approx([0.1, 0.25, 0.4])
    scheduler.load_state_dict({**scheduler.state_dict(), "target": 9.0, "scale": 2.0})
    assert scheduler.get_last_lr() == [group["lr"] for group in scheduler.optimizer.param_groups]
    assert optimizer.param_groups[0]["lr"] is held and held.item() == pytest.approx(0.2)


def test_wrong_options_are_one_sentence() -> None:
    with pytest.raises(ValueError, match='rule must be "linear" or "sqrt", not \'cubic\''):
        made(2, rule="cubic")
    with pytest.raises(ValueError, match="scale_lr: world_size"):
        made(0)
    with pytest.raises(ValueError, match="scale_lr: warmup_steps"):
        made(2, warmup_steps=-1)
