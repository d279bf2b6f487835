"""sw.trace(): record a few steps of every rank, and write them as one file for Perfetto or chrome://tracing.

A rank records alone and sends nothing. At its end it writes a part beside the file; the rank that finds the parts of all
ranks there merges them (trace_merge.py). docs/design/account.md.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
import os
import socket
import struct
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from .._engine import Error, account_row, spans_take, spans_turn
from ..comm import account
from ..torch_compat.internals import is_profiling
from . import watch
from .rings import PHASES, AccountError, AccountFile, Row, row_of
from .trace_merge import Collective, merge_parts, part_path

_logger = logging.getLogger("shardwright")
#: STEPS:AFTER:PATH lets a program trace so many steps, after so many; `shardwright trace` sets it
VARIABLE = "SHARDWRIGHT_TRACE"
_SPAN = struct.Struct("=Q2q4i")
_CLOCK = "shardwright clock"
_KEPT_ARGS = ("Sequence number", "Fwd thread id", "stream", "bytes", "correlation", "device")


def trace(
    path: str | os.PathLike[str] = "trace.json", *, after: int = 0, steps: int | None = None, autograd: bool = True
) -> Trace:
    """Record steps of all ranks, and write one file that Perfetto and chrome://tracing open. Does not communicate.

    Parameters
    ----------
    path : path
        The merged file. Each rank writes a part beside it, which goes when the last rank has merged them.
    after : int
        Steps to leave out first, from 0 on.
    steps : int, optional
        End by itself after so many steps. Default: at close(), or at the end of a `with`.
    autograd : bool
        Record operators with torch.profiler, too. False where the program uses that itself, or under Nsight Systems.

    Returns
    -------
    Trace
        Close it on the thread that began it.

    Raises
    ------
    ValueError
        For numbers out of range, and a path without a folder.
    Error
        Before any module was wrapped.

    Notes
    -----
    Off, a trace costs a load at each event of the engine. On, a Python call in each step, and torch.profiler's cost.

    Examples
    --------
    >>> import torch, shardwright as sw
    >>> model = sw.wrap(torch.nn.Linear(4, 1))
    >>> with sw.trace("/tmp/trace.json", autograd=False):
    ...     pass
    """
    for name, value, least in (("after", after, 0), ("steps", steps, 1)):
        if (value is not None or name == "after") and (
            isinstance(value, bool) or not isinstance(value, int) or value < least
        ):
            raise ValueError(f"trace: {name} must be a whole number of steps from {least} on, got {value!r}")
    if not Path(path).absolute().parent.is_dir():
        raise ValueError(f"trace: there is no folder for {os.fspath(path)!r}: make it first")
    if account.own_rank() is None:
        raise Error("trace needs a module that is wrapped: call sw.wrap first")
    return Trace(Path(path).absolute(), after, steps, autograd)


class Trace:
    """The handle that sw.trace() returns."""

    _count = 0
    _recording = 0  # traces that record: the engine has one ring for all

    def __init__(self, path: Path, after: int, steps: int | None, autograd: bool) -> None:
        Trace._count += 1
        self._path, self._number, self._steps, self._autograd = path, Trace._count, steps, autograd
        self._left = after
        self._rows: dict[int, Row] = {}
        self._spans: list[tuple[int, ...]] = []
        self._operations: dict[int, Collective] = {}
        self._threads: dict[int, str] = {}
        self._begun_ns = self._serial = self._first_op = 0
        self._profile: Any = None
        self._clock: list[tuple[int, int]] = []
        self._ranges = False
        self.is_closed = False
        self._unsubscribe = watch.subscribe(1, self._look)
        atexit.register(self.close)
        if not self._left:
            self._begin()

    def _begin(self) -> None:
        spans_turn(True)
        Trace._recording += 1
        self._begun_ns = time.monotonic_ns()
        path = account.own_file()
        if path is None:
            _logger.warning("trace: this rank's account has no file, so the trace has no collectives")
        else:
            file = AccountFile(path)
            self._first_op = file.head().op_count
            file.close()
        if self._autograd:
            self._begin_profile()
        if torch.cuda.is_available():
            self._range(begins=True)

    def _begin_profile(self) -> None:
        profiler = torch.profiler
        if is_profiling():  # a second one ends the process
            _logger.warning("trace: autograd's part is left out: another profiler of torch's is on")
            return
        kinds = [profiler.ProfilerActivity.CPU]
        kinds += [profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        try:
            self._profile = profiler.profile(activities=kinds)
            self._profile.start()
        except RuntimeError as error:
            self._profile = None
            _logger.warning("trace: autograd's part is left out: %s", str(error).splitlines()[0])
            return
        for _ in range(5):  # marks in the profiler's clock, of which the narrowest counts
            begun_ns = time.monotonic_ns()
            with profiler.record_function(_CLOCK):
                pass
            self._clock.append((begun_ns, time.monotonic_ns()))

    def _range(self, *, begins: bool = False, ends: bool = False) -> None:
        """Let the step be an NVTX range; a torch without NVTX says so by a RuntimeError."""
        with contextlib.suppress(RuntimeError, AttributeError):
            if ends:
                torch.cuda.nvtx.range_pop()
            if begins:
                row = account_row()
                torch.cuda.nvtx.range_push(f"shardwright step {1 if row is None else row_of(row).step + 1}")

    def _look(self, rows: list[Row]) -> None:
        if self._left:
            self._left -= 1
            if not self._left:
                self._begin()
            return
        self._rows.update({row.step: row for row in rows[-1:]})
        self._collect()
        is_last = self._steps is not None and len(self._rows) >= self._steps
        if torch.cuda.is_available():
            self._range(ends=True, begins=not is_last)
            self._ranges = not is_last
        if is_last:
            self.close()

    def _collect(self) -> None:
        for serial, begun_ns, ended_ns, kind, value, thread, _ in _SPAN.iter_unpack(spans_take(self._serial)):
            self._serial = max(self._serial, serial)
            if ended_ns > self._begun_ns:
                self._spans.append((kind, value, begun_ns, ended_ns, thread))
                if thread not in self._threads:
                    with contextlib.suppress(OSError):
                        self._threads[thread] = Path(f"/proc/self/task/{thread}/comm").read_text().strip()
        with contextlib.suppress(OSError, AccountError):  # a cleaner may take the account's file
            self._collect_operations()

    def _collect_operations(self) -> None:
        path = account.own_file()
        if path is not None:
            file = AccountFile(path)
            groups: list[tuple[int, list[int]]] = [(0, []), *file.groups()]
            for each in file.operations(1000):
                if each.serial > self._first_op:
                    group, ranks = groups[each.group] if each.group < len(groups) else groups[0]
                    self._operations[each.serial] = Collective(
                        *each[:5], group, each.number, len(ranks), each.label, each.size_bytes
                    )
            # a second optimizer adds to the row of its step after the look at it
            self._rows.update({row.step: row for row in file.rows(2) if row.step in self._rows})
            file.close()

    def close(self) -> None:
        """End, and write this rank's part; the last rank merges them. An error is logged, and stops nothing."""
        if self.is_closed:
            return
        self.is_closed = True
        atexit.unregister(self.close)
        self._unsubscribe()
        if not self._begun_ns:
            _logger.warning("trace: nothing is recorded: the program ended within the steps to leave out")
            return
        if torch.cuda.is_available() and (self._ranges or not self._rows):
            self._range(ends=True)
        try:
            Trace._recording -= 1
            if not Trace._recording:
                spans_turn(False)
            self._collect()
            self._write()
        except Exception as error:
            _logger.warning("trace: no part of rank %s: %s: %s", account.own_rank(), type(error).__name__, error)
        finally:
            self._end_profile()

    def _end_profile(self) -> Any:
        """Return torch's profile, which ends now; None if there is none, or one that began later has ended it."""
        profile, self._profile = self._profile, None
        if profile is None:
            return None
        if not is_profiling():  # to end it twice would end the process
            _logger.warning("trace: autograd's part is left out: another profiler of torch's has ended it")
            return None
        profile.stop()
        return profile

    def _write(self) -> None:
        path = account.own_file()
        part: dict[str, Any] = {
            "shardwright_trace": 1,
            **{"rank": account.own_rank(), "world_size": account.own_world_size(), "number": self._number},
            "group": 0 if path is None or not path.exists() else AccountFile(path).head().group,
            **{"host": socket.gethostname(), "pid": os.getpid(), "phases": PHASES, "threads": self._threads},
            **{"clock": _clock_id(), "unix_ns": time.time_ns() - time.monotonic_ns()},
            **{"begun_ns": self._begun_ns, "ended_ns": time.monotonic_ns()},
            **{"rows": [_row(each) for each in self._rows.values()], "spans": self._spans},
            "operations": list(self._operations.values()),
            "autograd": self._autograd_events(),
        }
        mine = part_path(self._path, part["rank"])
        hidden = mine.with_name(f".{mine.name}.{os.getpid()}")
        hidden.write_text(json.dumps(part))
        hidden.replace(mine)
        merged = merge_parts(self._path, part["world_size"], (part["group"], part["number"]))
        if merged is not None:
            _logger.info("trace: %s; open it at https://ui.perfetto.dev or chrome://tracing", merged)

    def _autograd_events(self) -> list[dict[str, Any]]:
        """Return torch.profiler's events with microseconds of the monotonic clock."""
        if (profile := self._end_profile()) is None:
            return []
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "autograd.json")
            profile.export_chrome_trace(file)
            with open(file, encoding="utf-8") as opened:
                events = json.load(opened)["traceEvents"]
        marks = sorted((each for each in events if each.get("name") == _CLOCK), key=lambda each: each["ts"])
        if len(marks) != len(self._clock):
            _logger.warning("trace: autograd's part is left out: torch.profiler did not keep the marks of the clock")
            return []
        (begun, ended), mark = min(zip(self._clock, marks), key=lambda each: each[0][1] - each[0][0])
        shift = (begun + ended) / 2000 - mark["ts"] - mark["dur"] / 2
        found = []
        for each in events:
            if each["ph"] in "Xsfi" and isinstance(each["pid"], int) and each.get("name") != _CLOCK and "cat" in each:
                args = {name: value for name, value in each.pop("args", {}).items() if name in _KEPT_ARGS}
                found.append({**each, "ts": each["ts"] + shift, **({"args": args} if args else {})})
        return found

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _row(row: Row) -> list[Any]:
    late = [row.late_rank, row.late_ns]
    return [row.step, row.begun_ns, row.ended_ns, row.phases, row.exposed_ns, *late, row.size_bytes]


def _clock_id() -> str:
    """Return what processes with the same monotonic clock have in common."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/time")
    except OSError:
        return socket.gethostname()


@functools.cache
def begin_if_asked() -> None:
    """Begin the trace that VARIABLE asks for, once. ValueError for another text."""
    text = os.environ.get(VARIABLE)
    if text:
        steps, _, rest = text.partition(":")
        after, _, path = rest.partition(":")
        if not (path and steps.isascii() and steps.isdigit() and after.isascii() and after.isdigit()):
            raise ValueError(f"{VARIABLE} must be STEPS:AFTER:PATH, as in 5:2:trace.json, got {text!r}")
        trace(path, after=int(after), steps=int(steps))
