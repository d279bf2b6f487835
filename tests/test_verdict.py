"""The verdict over rows of accounts: a slowed rank is named within 50 steps, quiet steps name none, and what bounds a step is what
takes it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from shardwright.observe import verdict
from shardwright.observe.rings import Row, row_of

QUIET = Path(__file__).parent / "golden" / "quiet_steps.json"


def quiet_runs() -> list[list[list[int]]]:
    """Own microseconds of steps by rank, of four equal ranks on two cores that other programs used too, and of pairs of them."""
    four: list[list[int]] = json.loads(QUIET.read_text())
    return [four, four[:2], four[2:]]


def row(
    step: int,
    *,
    data: int = 0,
    forward: int = 50,
    backward: int = 100,
    optimizer: int = 20,
    save: int = 0,
    wait: int = 0,
) -> Row:
    phases = (data, forward, backward, optimizer, save)
    return Row(step, 0, sum(phases), phases, (0, 0, wait, 0, 0), wait, 1 if wait else -1, 1, 0)


def named_at(own: dict[int, list[int]], every: int = 10) -> dict[int, int]:
    """Return the step at which each rank is named first, looked for after each tenth."""
    first: dict[int, int] = {}
    for end in range(every, len(next(iter(own.values()))) + 1, every):
        for rank in verdict.slow_ranks({r: own[r][max(end - verdict.WINDOW, 0) : end] for r in own}):
            first.setdefault(rank, end)
    return first


def test_ten_thousand_recorded_quiet_steps_name_no_rank() -> None:
    runs = quiet_runs()
    assert sum(len(run[0]) for run in runs) >= 10_000 and {len(run) for run in runs} == {2, 4}
    for run in runs:
        assert named_at({rank: [1000 * each for each in own] for rank, own in enumerate(run)}) == {}


@pytest.mark.parametrize("slow", [0, 1])
def test_a_recorded_rank_slowed_1_3_times_is_named_within_50_steps(slow: int) -> None:
    """Steps of 300 ms with the recorded noise of the machine on top."""
    for run in quiet_runs():
        own = {rank: [300_000_000 + 1000 * each for each in times[:60]] for rank, times in enumerate(run)}
        own[slow] = [int(1.3 * each) for each in own[slow]]
        found = named_at(own)
        assert found == {slow: found.get(slow)} and found[slow] <= 50, found


@pytest.mark.parametrize("world_size", [2, 3, 4, 64])
def test_the_slow_one_alone_is_named(world_size: int) -> None:
    noise = random.Random(world_size)
    own = {rank: [int(1e8 * noise.uniform(0.97, 1.03)) for _ in range(60)] for rank in range(world_size)}
    assert named_at(own) == {}
    own[1] = [int(1.3 * each) for each in own[1]]
    assert list(named_at(own)) == [1]
    (ratio, often) = verdict.slow_ranks(own)[1]
    assert ratio == pytest.approx(1.3, abs=0.05) and often == verdict.WINDOW


def test_bounds_of_the_rule() -> None:
    own = {0: [100_000_000] * 40, 1: [121_000_000] * 36 + [100_000_000] * 4}
    assert verdict.slow_ranks(own) == {1: (1.21, 36)}
    own[1][0] = 119_000_000
    assert verdict.slow_ranks(own) == {}
    assert verdict.slow_ranks({0: [100_000_000] * 39, 1: [200_000_000] * 39}) == {}
    assert verdict.slow_ranks({0: [200_000_000] * 40}) == {}
    assert verdict.slow_ranks({0: [100_000] * 40, 1: [150_000] * 40}) == {}  # a tenth of a millisecond
    assert verdict.slow_ranks({}) == {}


@pytest.mark.parametrize(
    ("times", "name"),
    [
        ({}, "compute"),
        ({"wait": 90, "backward": 100, "forward": 20}, "communication"),
        ({"data": 500}, "data"),
        ({"save": 900}, "save"),
    ],
)
def test_what_bounds_a_step_is_what_takes_it(times: dict[str, int], name: str) -> None:
    rows = [row(step, **times) for step in range(1, 41)]
    assert verdict.bound(rows)[0] == name
    assert sum(verdict.shares(rows).values()) == pytest.approx(1)
    assert f"{name}-bound: " in verdict.line(rows, 1e6, 0.4, 2**30)
    assert "1,000,000 tokens/s, MFU 40.0 %" in verdict.line(rows, 1e6, 0.4, 2**30)


def test_an_evaluation_between_two_steps_is_no_wait_for_data() -> None:
    rows = [row(step, data=10_000 if step % 20 == 0 else 1) for step in range(1, 41)]
    assert verdict.shares(rows)["data"] < verdict.DATA_LIMIT


def test_a_wait_that_no_loader_could_shorten_is_not_told() -> None:
    rows = [row(step, data=900_000, forward=5_000_000) for step in range(1, 41)]
    assert verdict.shares(rows)["data"] > verdict.DATA_LIMIT
    assert verdict.data_ns(rows) < verdict.LEAST_DATA_NS


def test_a_row_has_the_engines_layout() -> None:
    assert row_of(bytes(152)).step == 0
