"""Law: a trace is one file in the Chrome trace-event format with every rank's phases, waits with their cause, collectives with label
and bytes, operators and checkpoint threads, on one clock, and no rank sends a message for it."""

from __future__ import annotations

import collections
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import shardwright as sw
import torch
import torch.distributed as dist
from harness import gather, on_every_rank
from internals import PHASES, _engine, trace, trace_merge
from models import Mlp

PH = {"X", "M", "b", "e", "s", "f", "i"}


def check_format(found: dict[str, Any]) -> None:
    """The rules of the format that viewers rely on."""
    open_pairs: dict[Any, float] = {}
    tracks = collections.defaultdict(list)
    arrows: dict[int, str] = collections.defaultdict(str)
    for each in found["traceEvents"]:
        assert each["ph"] in PH and isinstance(each["name"], str), each
        assert isinstance(each["pid"], int) and isinstance(each["tid"], int) and each["pid"] > 0, each
        if each["ph"] != "M":
            assert isinstance(each["ts"], int | float) and each["ts"] >= 0 and isinstance(each["cat"], str), each
        if each["ph"] == "X":
            assert each["dur"] >= 0
            tracks[each["pid"], each["tid"]].append(each)
        elif each["ph"] in "sf":  # Perfetto's reader drops arrows whose id is a text
            assert isinstance(each["id"], int) and 0 <= each["id"] < 1 << 53, each
            arrows[each["id"]] += each["ph"]
        elif each["ph"] == "b":
            assert (each["cat"], each["id"]) not in open_pairs
            open_pairs[each["cat"], each["id"]] = each["ts"]
        elif each["ph"] == "e":
            assert open_pairs.pop((each["cat"], each["id"])) <= each["ts"]
    assert not open_pairs and set(arrows.values()) <= {"sf", "s", "f", "fs"}, "an id is of one arrow"
    for track in tracks.values():  # slices of a thread nest or follow one another, to the nanosecond
        stack: list[int] = []
        times = [(round(1000 * each["ts"]), round(1000 * each["dur"]), each) for each in track]
        for begun, size, each in sorted(times, key=lambda time: (time[0], -time[1])):
            while stack and stack[-1] <= begun:
                stack.pop()
            assert not stack or begun + size <= stack[-1], each
            stack.append(begun + size)
    json.loads(json.dumps(found, allow_nan=False))


def train(model: Any, optimizer: Any, steps: int, forward_s: float = 0.0) -> None:
    for _ in range(steps):
        loss = model(torch.ones(3, 7)).square().sum()
        time.sleep(forward_s)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def wrapped(**options: Any) -> tuple[Any, Any]:
    torch.manual_seed(1)
    model = Mlp()
    return sw.wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-3), **options)


def shared_folder(tmp: str) -> Path:
    return Path(gather(tmp)[0])


@on_every_rank()
def test_a_trace_has_what_each_rank_did(rank: int, world_size: int) -> None:
    import tempfile

    folder = shared_folder(tempfile.mkdtemp())
    model, optimizer = wrapped(zero=1)
    train(model, optimizer, 2)
    messages = _messages(model)
    with sw.trace(folder / "t.json"):
        train(model, optimizer, 3, forward_s=0.05 if rank == 0 else 0.0)
        sent = _messages(model) - messages
        sw.save(str(folder / "saved"), model, optimizer)
    dist.barrier()
    train(model, optimizer, 1)
    before = _messages(model)
    train(model, optimizer, 3)
    assert _messages(model) - before == sent
    assert [each.name for each in folder.iterdir() if "part" in each.name] == []
    found = json.loads((folder / "t.json").read_text())
    check_format(found)
    events = [each for each in found["traceEvents"] if each["pid"] == rank + 1]
    by_cat = collections.defaultdict(list)
    for each in events:
        by_cat[each.get("cat", each["name"])].append(each)
    assert len(by_cat["step"]) == 3 and {each["name"] for each in by_cat["phase"]} == set(PHASES)
    for step in by_cat["step"]:
        inside = [
            each["dur"] for each in by_cat["phase"] if step["ts"] - 0.01 <= each["ts"] < step["ts"] + step["dur"] - 0.01
        ]
        assert sum(inside) == pytest.approx(step["dur"], abs=1)
    rounds = [
        each for each in by_cat["collective"] if each["ph"] == "b" and each["name"].startswith("all_reduce bucket")
    ]
    assert len(rounds) == 3 and all(each["args"]["bytes"] > 0 for each in rounds)
    if world_size > 1:
        assert sum(each["args"]["last_rank"] == 0 for each in rounds) >= 2
        assert sum(each["args"]["later_than_the_others_us"] > 20_000 for each in rounds) >= 2
    if rank > 0:
        waits = [each for each in by_cat["wait"] if each["name"] == "wait for rank 0" and each["dur"] > 20_000]
        assert len(waits) >= 2, by_cat["wait"]
    assert {each["name"] for each in by_cat["checkpoint"]} == {"write blocks", "commit"}
    backward = [each for each in by_cat["cpu_op"] if "AddmmBackward0" in each["name"] and "evaluate" in each["name"]]
    spans = [each for each in by_cat["phase"] if each["name"] in ("forward", "backward")]
    assert len(backward) >= 6, by_cat.keys()  # operators lie in the phases that the engine saw, on one clock
    for each in backward:
        assert any(
            s["ts"] - 500 <= each["ts"] and each["ts"] + each["dur"] <= s["ts"] + s["dur"] + 500 for s in _joint(spans)
        )
    dist.barrier()


def _joint(spans: list[Any]) -> list[Any]:
    """Join a forward and the backward after it: the phase turns at the first gradient."""
    return [{"ts": a["ts"], "dur": b["ts"] + b["dur"] - a["ts"]} for a, b in zip(spans, spans[1:])]


def _messages(model: Any) -> int:
    """Return the collectives so far."""
    kinds = ("all_reduce", "all_gather", "broadcast", "barrier")
    return sum(each[kind] for each in sw.stats(model)["communicators"].values() for kind in kinds)


@on_every_rank()
def test_nothing_is_recorded_while_it_is_off(rank: int, world_size: int) -> None:
    import tempfile

    model, optimizer = wrapped()
    train(model, optimizer, 1)
    before = _engine.spans_take(0)
    train(model, optimizer, 2)
    assert _engine.spans_take(0) == before
    folder = shared_folder(tempfile.mkdtemp())
    handle = sw.trace(folder / "t.json", after=1, steps=2, autograd=False)
    train(model, optimizer, 5)
    assert handle.is_closed
    dist.barrier()
    found = json.loads((folder / "t.json").read_text())
    check_format(found)
    assert sum(each.get("cat") == "step" for each in found["traceEvents"]) == 2 * world_size


@on_every_rank(exactly=3)
def test_clocks_of_hosts_are_aligned_by_their_collectives(rank: int, world_size: int) -> None:
    """The parts of one clock, of which two get other clocks, come back to it within what is said."""
    import tempfile

    folder = shared_folder(tempfile.mkdtemp())
    model, optimizer = wrapped(zero=2)
    train(model, optimizer, 1)
    handle = sw.trace(folder / f"{rank}.json", autograd=False)
    train(model, optimizer, 6)
    handle.close()
    dist.barrier()
    if rank:
        return
    parts = [json.loads((folder / f"{r}.json.rank-{r}.part").read_text()) for r in range(3)]
    assert trace_merge.clock_offsets(parts) == ([0, 0, 0], "one")
    shifts = [0, 7_000_000_000, -3_600_000_000_000]
    for part, shift in zip(parts[1:], shifts[1:]):
        part["clock"] = f"another {shift}"
        part["host"] = f"h{shift}"
        part["operations"] = [[n, p + shift, d + shift, *rest] for n, p, d, *rest in part["operations"]]
    offsets, how = trace_merge.clock_offsets(parts)
    within_ns = [1000 * float(each.split("within ")[1].split()[0]) + 1000 for each in how.split("; ")]
    assert len(within_ns) == 2 and all(each < 20e6 for each in within_ns), how
    for offset, shift in zip(offsets[1:], sorted(shifts[1:], key=lambda s: parts[shifts.index(s)]["rank"])):
        assert abs(offset - shift) <= max(within_ns), (offset, shift, how)
    for part in parts[1:]:
        part["operations"] = []
        part["unix_ns"] = parts[0]["unix_ns"] - 5
    assert trace_merge.clock_offsets(parts)[0] == [0, 5, 5] and "wall clock" in trace_merge.clock_offsets(parts)[1]


@on_every_rank(exactly=1, spoils=True)
def test_steps_are_nvtx_ranges_where_torch_has_them(rank: int, world_size: int) -> None:
    import tempfile

    calls: list[str] = []
    model, optimizer = wrapped()
    train(model, optimizer, 1)
    step = sw.stats(model)["step"]["step"]
    torch.cuda.is_available = lambda: True
    torch.cuda.nvtx.range_push = lambda text: calls.append(text)
    torch.cuda.nvtx.range_pop = lambda: calls.append("pop")
    with sw.trace(Path(tempfile.mkdtemp()) / "t.json", autograd=False):
        train(model, optimizer, 2)
    names = [f"shardwright step {step + n}" for n in (1, 2, 3)]
    assert calls == [names[0], "pop", names[1], "pop", names[2], "pop"]


@on_every_rank(exactly=1, spoils=True)
def test_a_wrong_request_is_one_sentence(rank: int, world_size: int) -> None:
    import os
    import tempfile

    folder = Path(tempfile.mkdtemp())
    with pytest.raises(ValueError, match="steps must be a whole number of steps from 1 on, got 0"):
        sw.trace(folder / "t", steps=0)
    with pytest.raises(ValueError, match="there is no folder for"):
        sw.trace(folder / "none" / "t")
    (folder / "t.rank-0.part").write_text('{"shardwright_trace": 2}')
    with pytest.raises(trace_merge.PartError, match="is of version 2; this shardwright reads 1"):
        trace_merge.read_parts(folder / "t")
    (folder / "t.rank-0.part").write_text("{")
    with pytest.raises(trace_merge.PartError, match="no part of a trace"):
        trace_merge.read_parts(folder / "t")
    os.environ[trace.VARIABLE] = "often"
    trace.begin_if_asked.cache_clear()
    with pytest.raises(ValueError, match="must be STEPS:AFTER:PATH"):
        wrapped()


def test_joined_sleeps_keep_their_sum_of_time() -> None:
    rng = random.Random(1)
    spans, at = [], 0
    for _ in range(200):
        begun = at + rng.choice([0, 10_000, 5_000_000])
        at = begun + rng.randrange(1, 1_000_000)
        spans.append((1, rng.randrange(2), begun, at, 7))
    joined = trace_merge._joined(spans)
    assert all(a[3] <= b[2] for a, b in zip(joined, joined[1:])) and len(joined) < len(spans)
    for span in spans:
        assert any(each[1] == span[1] and each[2] <= span[2] and span[3] <= each[3] for each in joined)


def test_readers_drop_nothing_of_a_trace() -> None:
    """Perfetto drops what lies before 0, slices that outlast their parent, and arrows whose id is a text."""

    def made(rank: int, begun_us: float) -> dict[str, Any]:
        slices = [("outer", begun_us, 9.0), ("inner", begun_us + 4, 5.001), ("next", begun_us + 9, 1.0)]
        operators = [
            {"ph": "X", "name": n, "ts": t, "dur": d, "cat": "cpu_op", "pid": 7, "tid": 7} for n, t, d in slices
        ]
        arrow = {"name": "fwdbwd", "cat": "fwdbwd", "id": 1, "pid": 7, "tid": 7}
        operators += [{**arrow, "ph": "s", "ts": begun_us + 1}, {**arrow, "ph": "f", "bp": "e", "ts": begun_us + 9.5}]
        times = {"unix_ns": 0, "begun_ns": 50_000, "ended_ns": 90_000}
        spans = [[0, 0, 40_000 + rank, 60_000, 7]]
        return {
            **{"rank": rank, "world_size": 2, "number": 1, "group": 1, "pid": 7, "host": "h", "clock": "c", **times},
            **{"rows": [], "spans": spans, "operations": [], "autograd": operators, "phases": ["data"], "threads": {}},
        }

    found = trace_merge.merge([made(0, 31.0), made(1, 30.0)])
    check_format(found)
    timed = [each for each in found["traceEvents"] if each["ph"] != "M"]
    assert len(timed) == 12 and min(each["ts"] for each in timed) == 0
    assert [each["dur"] for each in timed if each["name"] == "inner"] == [5.0] * 2
    assert len({each["id"] for each in timed if each["ph"] in "sf"}) == 2
