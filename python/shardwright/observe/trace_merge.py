"""The parts of a trace, one from each rank, merged into one file in the Chrome trace-event format, with aligned clocks."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Part = Mapping[str, Any]
Event = dict[str, Any]
VERSION = 1
#: tracks of a rank, after which the threads of its waits, checkpoints and operators come
_STEPS, _PHASES, _FIRST_THREAD = 1, 2, 3
_WAIT, _SAVE = 1, 2
#: two sleeps of a wait are one event if no more lies between them
_GAP_NS = 200_000
#: nanoseconds by which torch's rounding lets an operator outlast its parent
_ROUNDING_NS = 500
_DEVICES = 1_000_000


#: what a part has, beside its version
_FIELDS = {
    **dict.fromkeys(("rank", "world_size", "number", "group", "pid", "unix_ns", "begun_ns", "ended_ns"), int),
    **dict.fromkeys(("rows", "spans", "operations", "autograd", "phases"), list),
    **{"host": str, "clock": str, "threads": dict},
}


class Collective(NamedTuple):
    """A collective of a part."""

    serial: int
    posted_ns: int
    done_ns: int
    is_done: bool
    kind: str
    group: int  # 0: not known
    number: int  # of the group's collectives
    ranks: int
    label: str
    size_bytes: int


class PartError(ValueError):
    """A file that is no part of a trace, or one of another version."""


def part_path(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.name}.rank-{rank}.part")


def read_parts(path: Path) -> list[Part]:
    """Return the parts that lie beside `path`, by rank. PartError; OSError."""
    found = []
    for each in path.parent.glob(f"{glob.escape(path.name)}.rank-*.part"):
        if each.stat().st_uid != os.getuid():
            continue
        try:
            part = json.loads(each.read_text())
        except (ValueError, RecursionError):
            part = None
        if isinstance(part, dict) and part.get("shardwright_trace") == VERSION:
            wrong = [name for name, kind in _FIELDS.items() if not isinstance(part.get(name), kind)]
            if wrong:
                raise PartError(
                    f"{each} is a part of a trace without a right {', '.join(repr(name) for name in wrong)}"
                )
        if not isinstance(part, dict) or part.get("shardwright_trace") != VERSION:
            version = part.get("shardwright_trace") if isinstance(part, dict) else None
            raise PartError(
                f"{each} is {f'of version {version}' if version else 'no part of a trace'}; this shardwright reads {VERSION}"
            )
        found.append({**part, "path": each})
    return sorted(found, key=lambda part: part["rank"])


def merge_parts(path: Path, world_size: int, trace: tuple[int, int] | None) -> Path | None:
    """Merge the parts beside `path` if those of all ranks are there, and remove them. None if they are not.

    `trace`: the group and number of one trace, so that parts of another one do not count; None: whatever is there.
    """
    try:
        parts = [each for each in read_parts(path) if trace is None or (each["group"], each["number"]) == trace]
    except FileNotFoundError:  # another rank has merged them meanwhile
        return None
    if trace is not None and len(parts) < world_size or not parts:
        return None
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    hidden.write_text(json.dumps(merge(parts)))
    hidden.replace(path)
    for part in parts:
        part["path"].unlink(missing_ok=True)
    return path


def merge(parts: Sequence[Part]) -> dict[str, Any]:
    """Return the trace as an object of the Chrome trace-event format."""
    offsets, how = clock_offsets(parts)
    begun_ns = min(_begun(part) - offset for part, offset in zip(parts, offsets))
    last = _last_ranks(parts, offsets)
    events: list[Event] = []
    for part, offset in zip(parts, offsets):
        events += _Rank(part, offset + begun_ns, last).events()
    about = {"ranks": len(parts), "world_size": parts[0]["world_size"], "clocks": how}
    return {"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}


def _begun(part: Part) -> int:
    """Return the earliest time of a part: readers drop what is before 0."""
    operators = (int(each["ts"] * 1000) for each in part["autograd"] if "ts" in each)
    times = (row[1] for row in part["rows"]), (span[2] for span in part["spans"]), operators
    posted = (Collective(*values).posted_ns for values in part["operations"])
    return min(part["begun_ns"], *(min(each, default=part["begun_ns"]) for each in (*times, posted)))


# ---------------------------------------------------------------- clocks


def _matched(part: Part) -> dict[tuple[Any, ...], Collective]:
    """Return the collectives that all ranks of a group have done, by a key that is the same on each."""
    found = (Collective(*values) for values in part["operations"])
    return {
        (each.group, each.number): each for each in found if each.group and each.is_done and each.kind != "broadcast"
    }


def clock_offsets(parts: Sequence[Part]) -> tuple[list[int], str]:
    """Return for each part the nanoseconds that its clock is ahead of the first part's, and how they were found.

    No rank's collective is done before the last rank has posted its part. So each collective bounds the difference of two
    clocks from both sides, and the narrowest bounds count. Where ranks have none in common, the hosts' wall clocks do.
    """
    reference = parts[0]["clock"]
    known = {reference: 0}
    notes = []
    for clock in sorted({part["clock"] for part in parts} - {reference}):
        pairs = [
            (a, b)
            for first in parts if first["clock"] == reference
            for second in parts if second["clock"] == clock
            for a, b in _common(_matched(first), _matched(second))
        ]  # fmt: skip
        least = max((b.posted_ns - a.done_ns for a, b in pairs), default=1)
        most = min((b.done_ns - a.posted_ns for a, b in pairs), default=0)
        host = next(part["host"] for part in parts if part["clock"] == clock)
        if least <= most:
            known[clock] = (least + most) // 2
            notes.append(f"host {host} by collectives, within {(most - least) / 2000:.0f} us")
        else:
            unix_ns = next(part["unix_ns"] for part in parts if part["clock"] == clock)
            known[clock] = parts[0]["unix_ns"] - unix_ns
            notes.append(f"host {host} by its wall clock")
    return [known[part["clock"]] for part in parts], "; ".join(notes) or "one"


def _common(
    first: Mapping[Any, Collective], second: Mapping[Any, Collective]
) -> Iterator[tuple[Collective, Collective]]:
    return ((first[key], second[key]) for key in first if key in second)


def _last_ranks(parts: Sequence[Part], offsets: Sequence[int]) -> dict[tuple[int, int], tuple[int, float]]:
    """Return by rank and serial of a collective: the rank that came last, and by how many microseconds after the one before."""
    posted: dict[Any, list[tuple[int, int, int]]] = {}
    sizes = {}
    for part, offset in zip(parts, offsets):
        for key, each in _matched(part).items():
            posted.setdefault(key, []).append((each.posted_ns - offset, part["rank"], each.serial))
            sizes[key] = each.ranks
    found = {}
    for key, ranks in posted.items():
        if len(ranks) == sizes[key] > 1:
            *_, before, (time_ns, last, _) = sorted(ranks)
            for _, rank, serial in ranks:
                found[rank, serial] = (last, (time_ns - before[0]) / 1000)
    return found


# ---------------------------------------------------------------- events


class _Rank:
    """Events of one rank: a process of the trace with a track for each thread. Numbers of threads are unique in the trace."""

    def __init__(self, part: Part, zero_ns: int, last: Mapping[tuple[int, int], tuple[int, float]]) -> None:
        self.part, self._zero_ns, self._last = part, zero_ns, last
        self.pid = part["rank"] + 1  # 0 is the idle process to viewers
        self._tracks: dict[Any, int] = {}
        self._names: list[Event] = []
        self._name(self.pid, 0, "process", f"rank {part['rank']} (host {part['host']}, pid {part['pid']})", self.pid)
        self._name(self.pid, self._number(_STEPS), "thread", "steps", 1)
        self._name(self.pid, self._number(_PHASES), "thread", "phases", 2)

    def _number(self, track: int) -> int:
        return self.pid * 1000 + track

    def _name(self, pid: int, tid: int, what: str, text: str, order: int) -> None:
        for key, args in (("name", {"name": text}), ("sort_index", {"sort_index": order})):
            self._names.append({"ph": "M", "name": f"{what}_{key}", "pid": pid, "tid": tid, "args": args})

    def _track(self, key: Any, text: str, order: int, pid: int = 0) -> int:
        if key not in self._tracks:
            self._tracks[key] = self._number(_FIRST_THREAD + len(self._tracks))
            self._name(pid or self.pid, self._tracks[key], "thread", text, order)
        return self._tracks[key]

    def _us(self, time_ns: float) -> float:
        return round((time_ns - self._zero_ns) / 1000, 3)

    def _slice(self, name: str, cat: str, tid: int, begun_ns: int, ended_ns: int, args: Mapping[str, Any]) -> Event:
        times = {"ts": self._us(begun_ns), "dur": round((ended_ns - begun_ns) / 1000, 3)}
        return {"ph": "X", "name": name, "cat": cat, "pid": self.pid, "tid": tid, **times, "args": dict(args)}

    def events(self) -> list[Event]:
        made = [*self._steps(), *self._spans(), *self._collectives(), *self._operators()]
        return [*self._names, *made]

    def _steps(self) -> Iterator[Event]:
        for step, begun, ended, phases, exposed, late_rank, late_ns, size in self.part["rows"]:
            args = {f"{name}_ms": each / 1e6 for name, each in zip(self.part["phases"], phases)}
            args |= {"exposed_communication_ms": exposed / 1e6, "collective_bytes": size}
            args |= {"late_rank": late_rank, "late_ms": late_ns / 1e6} if late_rank >= 0 else {}
            yield self._slice(f"step {step}", "step", self._number(_STEPS), begun, ended, args)

    def _spans(self) -> Iterator[Event]:
        for kind, value, begun, ended, thread in _joined(self.part["spans"]):
            name = self.part["threads"].get(str(thread), self.part["threads"].get(thread, f"thread {thread}"))
            if kind == _WAIT:
                tid = self._track(("wait", thread), "waits" if thread == self.part["pid"] else f"waits of {name}", 3)
                cause = f"rank {value}" if value >= 0 else "peers"
                yield self._slice(f"wait for {cause}", "wait", tid, begun, ended, {"cause": f"{cause} comes last"})
            elif kind == _SAVE:
                tid = self._track(("save", thread), f"checkpoint ({thread})", 90)
                yield self._slice(("write blocks", "commit")[value == 1], "checkpoint", tid, begun, ended, {})
            else:
                yield self._slice(self.part["phases"][value], "phase", self._number(_PHASES), begun, ended, {})

    def _collectives(self) -> Iterator[Event]:
        """Yield a pair of async events for each collective: they overlap."""
        for each in (Collective(*values) for values in self.part["operations"]):
            args: dict[str, Any] = {"bytes": each.size_bytes, "ranks": each.ranks}
            if (self.part["rank"], each.serial) in self._last:
                rank, late_us = self._last[self.part["rank"], each.serial]
                args |= {"last_rank": rank, "later_than_the_others_us": round(late_us, 1)}
            args |= {} if each.is_done else {"unfinished": True}
            ended = max(each.done_ns if each.is_done else self.part["ended_ns"], each.posted_ns)
            key = {"cat": "collective", "id": f"{self.part['rank']}.{each.serial}", "pid": self.pid}
            key |= {"tid": self._number(_STEPS), "name": f"{each.kind} {each.label}"}
            yield {"ph": "b", "ts": self._us(each.posted_ns), **key, "args": args}
            yield {"ph": "e", "ts": self._us(ended), **key}

    def _operators(self) -> Iterator[Event]:
        own, pids = self.part["pid"], {}
        for each, begun, ended in _nested(self.part["autograd"]):
            if each["pid"] == own:
                pid, text = self.pid, "autograd" if each["tid"] == own else f"autograd ({each['tid']})"
            else:  # a GPU: its threads are streams
                pid, text = _DEVICES + 100 * self.part["rank"] + each["pid"], f"stream {each['tid']}"
                if pid not in pids:
                    pids[pid] = True
                    self._name(pid, 0, "process", f"rank {self.part['rank']}: GPU {each['pid']}", self.pid)
            tid = self._track((each["pid"], each["tid"]), text, 10, pid)
            time = {"ts": self._us(begun), **({"dur": (ended - begun) / 1000} if "dur" in each else {})}
            unique = {"id": self.part["rank"] << 32 | int(each["id"])} if "id" in each else {}  # Perfetto takes numbers
            yield {**each, **time, "pid": pid, "tid": tid, **unique}


def _nested(events: Iterable[Event]) -> Iterator[tuple[Event, int, int]]:
    """Yield events by time with begin and end. Cut one that outlasts its parent by torch's rounding alone: viewers drop such."""
    ends: dict[Any, list[int]] = {}
    times = [(round(each["ts"] * 1000), round(each.get("dur", 0) * 1000), each) for each in events]
    for begun, size, each in sorted(times, key=lambda time: (time[0], -time[1])):
        end = begun + size
        if each["ph"] == "X":
            stack = ends.setdefault((each["pid"], each["tid"]), [])
            while stack and stack[-1] <= begun:
                stack.pop()
            if stack and end - stack[-1] < _ROUNDING_NS:
                end = min(end, stack[-1])
            stack.append(end)
        yield each, begun, end


def _joined(spans: Iterable[Sequence[int]]) -> list[list[int]]:
    """Join sleeps of one wait that follow one another."""
    found: list[list[int]] = []
    newest: dict[int, list[int]] = {}
    for span in sorted(map(list, spans), key=lambda each: each[2]):
        kind, value, begun, ended, thread = span
        before = newest.get(thread)
        if kind == _WAIT and before is not None and before[1] == value and begun - before[3] < _GAP_NS:
            before[3] = max(before[3], ended)
            continue
        found.append(span)
        if kind == _WAIT:
            newest[thread] = span
    return found
