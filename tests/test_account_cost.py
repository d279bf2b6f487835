"""The account costs a step of the 11 M GPT less than 0.2 %: its calls, timed alone, times their number. (Both arms side by side:
benchmarks/bench_account.py; that a step has no Python call and no message more: test_budget's calls.)"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
#: of a step of the GPT on two ranks of the slowest machine that was measured: far below, since a machine that is twice as fast
#: halves both
STEP_NS = 100e6


@pytest.fixture
def bench(monkeypatch: Any) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield __import__("bench_account")
    for name in ("bench_account", "common"):
        sys.modules.pop(name, None)


def test_the_accounts_calls_are_a_small_part_of_a_step(bench: Any) -> None:
    """With the recorded numbers of collectives and sleeps of a step. In processor time, so on a busy machine, too."""
    (recorded,) = [row for row in rows() if "calls x count" in row["case"]]
    cost = bench.call_ns(20_000)
    assert all(each > 1 for each in cost.values()), cost
    assert bench.spent_ns(recorded, cost) < bench.SHARE_GOAL * STEP_NS, (cost, recorded)


def test_what_was_recorded_is_within_the_goals(bench: Any) -> None:
    found = {row["case"].removeprefix(f"gpt step W=2 {bench.ARM} "): row for row in rows()}
    assert found.keys() == {"calls x count", "watcher", "wall time", "processor time"}
    assert found["calls x count"]["ratio"] <= bench.SHARE_GOAL and found["watcher"]["ratio"] <= bench.LOOK_GOAL
    assert found["processor time"]["ratio"] <= bench.SIDE_GOAL
    assert found["processor time"]["samples"] >= 100


def rows() -> list[dict[str, Any]]:
    return [
        row
        for line in (BENCHMARKS / "results" / "account.jsonl").read_text().splitlines()
        if "case" in (row := json.loads(line))
    ]
