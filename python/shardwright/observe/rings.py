"""Reading accounts of steps: the structs of csrc/comm/account.h, of this process or in files of other ranks."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

PHASES = ("data", "forward", "backward", "optimizer", "save")
KINDS = ("barrier", "all_reduce", "reduce_scatter", "all_gather", "broadcast")
#: the links whose bytes a row has
LINKS = ("shared_memory", "tcp", "nccl")
VERSION = 2
_ROW = struct.Struct("=Qqq5q5qqiIQ3Q")
_OP = struct.Struct("=QqqIIHHIIIQ72s")
_HEAD = struct.Struct("=8s6I4iQqq64sQQIiIIqqqQQ")
_TEXT = struct.Struct("=q504s")
#: behind the two texts: earlier starts, the count of groups, and each of them
_STARTS, _GROUP = struct.Struct("=qqqQQ"), struct.Struct("=Q128s")
_MAGIC = b"swstep\0\0"


class AccountError(ValueError):
    """A file that is no account, or one of another version."""


class Row(NamedTuple):
    """A step: nanoseconds by phase, and the part of each asleep in waits; the rank that was waited for most."""

    step: int
    begun_ns: int
    ended_ns: int
    phases: tuple[int, ...]
    waits: tuple[int, ...]
    late_ns: int
    late_rank: int
    forwards: int
    size_bytes: int
    link_bytes: tuple[int, ...] = (0, 0, 0)

    @property
    def total_ns(self) -> int:
        return self.ended_ns - self.begun_ns

    @property
    def exposed_ns(self) -> int:
        """Return the waits that held the step, saves apart."""
        return sum(self.waits[:-1])

    @property
    def own_ns(self) -> int:
        """Return this rank's own time: without waits and saves."""
        return sum(self.phases[:-1]) - self.exposed_ns

    def as_dict(self) -> dict[str, Any]:
        """Return seconds by name, for stats() and trackers."""
        seconds = {f"{name}_s": each * 1e-9 for name, each in zip(PHASES, self.phases)}
        return {
            "step": self.step,
            "step_s": self.total_ns * 1e-9,
            **seconds,
            "exposed_communication_s": self.exposed_ns * 1e-9,
            "own_s": self.own_ns * 1e-9,
            "late_rank": None if self.late_rank < 0 else self.late_rank,
            "late_s": self.late_ns * 1e-9,
            "collective_bytes": self.size_bytes,
            **{f"{link}_bytes": each for link, each in zip(LINKS, self.link_bytes)},
        }


class Operation(NamedTuple):
    """A collective: `is_done` once this rank's part of it is."""

    serial: int
    posted_ns: int
    done_ns: int
    is_done: bool
    kind: str
    group: int
    number: int
    size_bytes: int
    label: str

    @property
    def name(self) -> str:
        return f"{self.kind} '{self.label}'"


class Head(NamedTuple):
    """The state of a rank. Times are of the host's monotonic clock."""

    pid: int
    rank: int
    world_size: int
    stack_signal: int
    start_ticks: int
    clock_ns: int
    unix_ns: int
    host: str
    steps: int
    op_count: int
    phase: str
    wait_rank: int
    wait_group: int
    ended: bool
    phase_begun_ns: int
    wait_begun_ns: int
    wait_turn_ns: int
    wait_serial: int
    group: int
    call: str
    call_begun_ns: int
    reason: str
    reason_ns: int
    first_unix_ns: int
    kept_unix_ns: int
    lost_ns: int
    restarts: int

    def unix_ns_of(self, monotonic_ns: int) -> int:
        """Return a time of its host's monotonic clock since 1970."""
        return self.unix_ns + monotonic_ns - self.clock_ns


def row_of(data: bytes) -> Row:
    """Return a row of the engine's bytes."""
    step, begun, ended, *rest = _ROW.unpack(data)
    return Row._make([step, begun, ended, tuple(rest[:5]), tuple(rest[5:10]), *rest[10:14], tuple(rest[14:])])


class AccountFile:
    """One rank's file, mapped to be read. AccountError if it is not an account of this version; OSError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            try:
                self._data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            except ValueError:
                raise AccountError(f"{path} is empty: no account of steps") from None
        if len(self._data) < _HEAD.size or self._data[: len(_MAGIC)] != _MAGIC:
            self._data.close()
            raise AccountError(f"{path} is no account of steps")
        version, self._begin, self._row_bytes, self._rows, self._op_bytes, self._ops = _HEAD.unpack_from(self._data)[
            1:7
        ]
        self._ops_begin = -(-(self._begin + self._row_bytes * self._rows) // 4096) * 4096
        size = self._ops_begin + self._op_bytes * self._ops
        if version != VERSION or len(self._data) < size or (self._row_bytes, self._op_bytes) != (_ROW.size, _OP.size):
            self._data.close()
            raise AccountError(
                f"{path} is an account of version {version}, and this shardwright reads version {VERSION}"
            )

    def close(self) -> None:
        self._data.close()

    def head(self) -> Head:
        _, *_, pid, rank, world_size, signal, ticks, clock, unix, host = _HEAD.unpack_from(self._data)[:15]
        steps, count, phase, wait_rank, wait_group, ended, *times = _HEAD.unpack_from(self._data)[15:]
        call_ns, call = _TEXT.unpack_from(self._data, _HEAD.size)
        reason_ns, reason = _TEXT.unpack_from(self._data, _HEAD.size + _TEXT.size)
        return Head._make(
            [
                *(pid, rank, world_size, signal, ticks, clock, unix, _text(host), steps, count),
                *(PHASES[min(phase, 4)], wait_rank, wait_group, bool(ended), *times),
                *(_text(call) if call_ns else "", call_ns, _text(reason) if reason_ns else "", reason_ns),
                *_STARTS.unpack_from(self._data, _HEAD.size + 2 * _TEXT.size)[:4],
            ]
        )

    def groups(self) -> list[tuple[int, list[int]]]:
        """Return the groups that this rank has met, and the ranks of each; entry n - 1 is group n of operations and waits."""
        at = _HEAD.size + 2 * _TEXT.size
        count, at, found = _STARTS.unpack_from(self._data, at)[4], at + _STARTS.size, []
        for _ in range(count):
            group, data = _GROUP.unpack_from(self._data, at)
            bits, at = int.from_bytes(data, "little"), at + _GROUP.size
            found.append((group, [rank for rank in range(bits.bit_length()) if bits >> rank & 1]))
        return found

    def rows(self, most: int, after: int = 0) -> list[Row]:
        """Return the last `most` rows, those of steps above `after` only; a row that is being written is left out."""
        last = _HEAD.unpack_from(self._data)[15]
        found = []
        for step in range(max(last - min(most, self._rows), after, 0) + 1, last + 1):
            at = self._begin + (step - 1) % self._rows * self._row_bytes
            row = row_of(self._data[at : at + self._row_bytes])
            if row.step == step and self._data[at : at + 8] == step.to_bytes(8, "little"):
                found.append(row)
        return found

    def operations(self, most: int) -> list[Operation]:
        """Return the last `most` collectives, the oldest first."""
        last = _HEAD.unpack_from(self._data)[16]
        found = []
        for serial in range(max(last - min(most, self._ops), 0) + 1, last + 1):
            at = self._ops_begin + (serial - 1) % self._ops * self._op_bytes
            number, posted_ns, done_ns, posted, done, kind, group, order, _, _, size, label = _OP.unpack_from(
                self._data, at
            )
            if number == serial:
                is_done = 0 < posted <= done
                name = KINDS[kind] if kind < len(KINDS) else "collective"
                times = (serial, posted_ns, done_ns, is_done)
                found.append(Operation(*times, name, group, order, size, _text(label)))
        return found


def _text(data: bytes) -> str:
    return data.partition(b"\0")[0].decode("utf-8", "replace")
