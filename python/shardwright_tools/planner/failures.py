"""Failures and recovery of a long run: the part of the time that trains, and the interval between saves that makes it largest."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence

from .shape import PlanError

_FAILURES = 20_000
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclasses.dataclass(frozen=True)
class Recovery:
    every_s: float  # the best interval that was simulated
    goodput: float  # the part of the time that trains, at it
    young_s: float
    young_goodput: float
    daly_s: float
    daly_goodput: float
    restart_s: float


def times_between(mtbf_s: float, count: int = _FAILURES, seed: int = 0) -> list[float]:
    """Return exponential times between failures."""
    numbers = random.Random(seed)
    return [numbers.expovariate(1 / mtbf_s) for _ in range(count)]


def goodput(gaps: Sequence[float], every_s: float, save_s: float, restart_s: float, write_s: float = 0.0) -> float:
    """Return the part of the time that trains, if a save is made after each `every_s` seconds of training.

    A save holds training for `save_s` and counts `write_s` after that. A failure ends what comes after the last save that
    counts; each gap begins with a restart, in which the next failure may come.
    """
    period = every_s + save_s
    kept = sum(max(0.0, (gap - restart_s - write_s) // period) for gap in gaps)
    return kept * every_s / sum(gaps)


def young(save_s: float, mtbf_s: float) -> float:
    """Return J. W. Young's interval, "A first order approximation to the optimum checkpoint interval" (1974)."""
    return math.sqrt(2 * save_s * mtbf_s)


def daly(save_s: float, mtbf_s: float) -> float:
    """Return J. T. Daly's interval of training between saves, "A higher order estimate ..." (2006), equation 37."""
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    x = save_s / (2 * mtbf_s)
    return young(save_s, mtbf_s) * (1 + math.sqrt(x) / 3 + x / 9) - save_s


def recover(mtbf_s: float, save_s: float, restart_s: float, write_s: float = 0.0) -> Recovery:
    """Return the best interval over simulated failures, beside Young's and Daly's."""
    if min(mtbf_s, save_s) <= 0 or min(restart_s, write_s) < 0:
        raise PlanError(
            "times between failures and of a save must be positive, of a restart and a write at least 0, "
            f"got {mtbf_s:g}, {save_s:g}, {restart_s:g} and {write_s:g} s"
        )
    gaps = times_between(mtbf_s)

    def at(every: float) -> float:
        return goodput(gaps, every, save_s, restart_s, write_s)

    first, second = young(save_s, mtbf_s), daly(save_s, mtbf_s)
    least = max(first / 20, write_s)  # one save is written at a time
    low, high = math.log(least), math.log(max(2 * mtbf_s, 4 * first, 2 * least))  # there is one top, flat in this scale
    for _ in range(16):
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        low, high = (low, right) if at(math.exp(left)) > at(math.exp(right)) else (left, high)
    best = math.exp((low + high) / 2)
    return Recovery(best, at(best), first, at(first), second, at(second), restart_s)
