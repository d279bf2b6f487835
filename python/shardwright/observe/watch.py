"""Looks at the account during a run: the line of every K steps, slow ranks, the wait for data, samplers.

The engine calls `Watch.look` after each _EVERY-th step, outside of the step's phases; between two looks nothing runs. A
host's lowest rank reads its peers' accounts in their files, so nothing is sent: a host that does not share the folder
of the run compares its own ranks alone.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import operator
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data.distributed import DistributedSampler
from torch.utils.weak import WeakIdKeyDictionary

from .._engine import account_row, account_watch
from ..comm import account
from . import goodput, verdict
from .rings import AccountError, AccountFile, Row, row_of

_logger = logging.getLogger("shardwright.watch")

#: the variable with the steps between two lines of rank 0; 0: no line
EVERY = "SHARDWRIGHT_REPORT_EVERY"
#: steps between two looks, and between two lines
_EVERY, _LINE_EVERY = 10, 100

_LIST_ITERATOR: type = type(iter([]))
#: tokens per second and MFU of rows
Throughput = Callable[[list[Row]], tuple[float | None, float | None]]


def line_every() -> int:
    """Return the steps between two lines. ValueError for a variable that is no whole number."""
    text = os.environ.get(EVERY, str(_LINE_EVERY))
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{EVERY} must be a whole number of steps, or 0 for no lines, got {text!r}")
    return int(text)


class Watch:
    """The watcher of this process. `subscribers`: (every, call, throughput or None); the newest throughput is in the line."""

    def __init__(self) -> None:
        self.subscribers: list[tuple[int, Callable[[list[Row]], None], Throughput | None]] = []
        self.line_every = line_every()
        self.forget()

    def forget(self) -> None:
        """Begin again: in a forked child, whose account is a new one."""
        self._first_step_ns = 0
        self._own: dict[int, dict[int, int]] = {}
        self._named: set[int] = set()
        self._warned_of_data = False

    def arm(self) -> None:
        """Let the engine call look() as often as some part needs."""
        account_watch(math.gcd(_EVERY, self.line_every, *(every for every, *_ in self.subscribers)), self.look)

    def look(self, step: int) -> None:
        """Look at the steps that have ended. An error, of which no frame is kept, stops nothing."""
        try:
            self._look(step)
        except Exception as error:
            _logger.debug("no look at step %d: %s: %s", step, type(error).__name__, error)

    def _look(self, step: int) -> None:
        if not self._first_step_ns:
            self._first_step_ns = next((row.begun_ns for row in self.own_rows(step)), 0)
        for every, call, _ in list(self.subscribers):
            if step % every == 0:
                call(self.own_rows(every))
        if step % _EVERY == 0:
            self._compare()
        is_due = self.line_every and step % self.line_every == 0 and account.own_rank() == 0
        if is_due and _logger.isEnabledFor(logging.INFO):
            rows = self.own_rows(self.line_every)
            path = account.own_file()
            found = next((each[2](rows) for each in reversed(self.subscribers) if each[2]), (None, None))
            more = "" if path is None else goodput.text(AccountFile(path).head(), self._first_step_ns)
            _logger.info("%s", verdict.line(rows, *found, share_of_memory(), gpu_memory(), more))

    def own_rows(self, most: int) -> list[Row]:
        """Return the last rows of this rank; the last one alone where it has no file."""
        path, row = account.own_file(), account_row()
        if path is not None:
            return AccountFile(path).rows(most)
        return [] if row is None else [row_of(row)]

    def _compare(self) -> None:
        rows = self.own_rows(verdict.WINDOW)
        if len(rows) == verdict.WINDOW and not self._warned_of_data and account.own_rank() == 0:
            loading = verdict.shares(rows)["data"]
            if loading > verdict.DATA_LIMIT and verdict.data_ns(rows) > verdict.LEAST_DATA_NS:
                self._warned_of_data = True
                _logger.warning(
                    "%.0f %% of a step waits for data: %s. This is logged once", 100 * loading, verdict.DATA_REMEDY
                )
        peers = dict(sorted(self._peers(), key=lambda each: each[0]))
        if len(peers) > 1:
            self._name_slow(peers)

    def _peers(self) -> Iterator[tuple[int, AccountFile]]:
        """Yield the ranks of this one's group whose accounts lie beside its own, and their files, if it is the lowest of them."""
        own = account.own_file()
        group = 0 if own is None else AccountFile(own).head().group
        for path in sorted(own.parent.glob("rank-*"), key=_rank_of) if own is not None and group else ():
            if path.suffix != ".stacks":
                with contextlib.suppress(OSError, AccountError):  # it ends, or is being made
                    file = AccountFile(path)
                    if file.head().group == group:
                        yield file.head().rank, file
                        if path != own and file.head().rank < (account.own_rank() or 0):
                            return  # another rank compares

    def _name_slow(self, peers: dict[int, AccountFile]) -> None:
        for rank, file in peers.items():
            known = self._own.setdefault(rank, {})
            known.update({row.step: row.own_ns for row in file.rows(verdict.WINDOW, after=max(known, default=0))})
        steps = sorted(set.intersection(*(set(self._own[rank]) for rank in peers)))[-verdict.WINDOW :]
        found = verdict.slow_ranks({rank: [self._own[rank][step] for step in steps] for rank in peers})
        for rank, (ratio, often) in found.items():
            if rank not in self._named:
                head = peers[rank].head()
                _logger.warning(
                    "rank %d (pid %d on host %s) is slow: its own time, without waits, was %.2f times that of the others "
                    "in %d of the last %d steps, and they wait for it",
                    *(rank, head.pid, head.host, ratio, often, verdict.WINDOW),
                )
        self._named = set(found)
        for known in self._own.values():
            for step in [each for each in known if steps and each < steps[0]]:
                del known[step]


def _rank_of(path: Path) -> int:
    return int(path.name.split(".")[0].removeprefix("rank-"))


@functools.cache
def begin() -> Watch:
    """Watch this process' steps from now on."""
    watch = Watch()
    watch.arm()
    _watch_samplers()
    goodput.begin()
    os.register_at_fork(after_in_child=watch.forget)
    return watch


def subscribe(
    every: int, call: Callable[[list[Row]], None], throughput: Throughput | None = None
) -> Callable[[], None]:
    """Call `call` with the last `every` rows after each `every`-th step. Return what ends that."""
    watch, entry = begin(), (every, call, throughput)
    watch.subscribers.append(entry)
    watch.arm()

    def end() -> None:
        if entry in watch.subscribers:
            watch.subscribers.remove(entry)
            watch.arm()

    return end


def share_of_memory() -> int | None:
    """Return this process' share of memory in bytes (PSS), None where the kernel does not tell. Cost: milliseconds."""
    try:
        text = Path("/proc/self/smaps_rollup").read_text()
    except OSError:
        return None
    return next((1024 * int(each.split()[1]) for each in text.splitlines() if each.startswith("Pss:")), None)


def gpu_memory() -> str:
    """Return this rank's memory of its GPU in words; "" where torch has none in use. Cost: about 0.1 ms."""
    if not torch.cuda.is_initialized():
        return ""
    stats = torch.cuda.memory_stats()
    used, kept = (stats.get(f"{name}_bytes.all.current", 0) / 2**20 for name in ("allocated", "reserved"))
    return f"GPU memory {used:,.0f} MiB allocated, {kept:,.0f} reserved, {stats.get('num_alloc_retries', 0)} retries"


def _watch_samplers() -> None:
    """Warn once of a DistributedSampler that shuffles two whole epochs, more than a look at a batch, with one number."""
    before: Any = DistributedSampler.__iter__
    epochs = WeakIdKeyDictionary()  # sampler -> (its epoch, how often it was given whole before, the last iterator)
    warned = False

    @functools.wraps(before)
    def begin_epoch(self: Any) -> Any:
        nonlocal warned
        epoch, wholes, given = epochs.get(self, (None, 0, None))
        wholes = wholes + (operator.length_hint(given, 1) == 0) if epoch == self.epoch else 0
        if self.shuffle and wholes >= 2 and not warned:
            warned = True
            _logger.warning(
                "a DistributedSampler begins another epoch with number %d, so epochs have the same order: call "
                "sampler.set_epoch(epoch) before each. This is logged once",
                self.epoch,
            )
        iterator = before(self)
        epochs[self] = (
            self.epoch,
            wholes,
            iterator if isinstance(iterator, _LIST_ITERATOR) else None,
        )  # another may hold self
        return iterator

    DistributedSampler.__iter__ = begin_epoch  # type: ignore[method-assign]
