"""The calls of a Checkpointer: one at a time, and saves by time (`save(step, every_s=1800)`) at the same steps on all ranks."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator

from .._engine import CheckpointError
from .peers import Peers


class OneCall:
    """A lock that refuses an overlapping call: two threads cannot issue collectives in the same order on all ranks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside, self._thread = "", 0

    @contextlib.contextmanager
    def of(self, name: str, *, waits: bool = False) -> Iterator[None]:
        """Enter the call `name`. Raise CheckpointError if a call runs; with `waits`, wait for another thread's call."""
        is_ours = False
        try:
            is_ours = self._lock.acquire(blocking=waits and self._thread != threading.get_ident())
            if not is_ours:
                raise CheckpointError(
                    f"{name} came while {self._inside} of the same Checkpointer was under way, in another thread or below a signal "
                    "handler: make one call at a time (a handler sets a flag, and the training saves after its step)"
                )
            self._inside, self._thread = name, threading.get_ident()
            yield
        finally:
            if is_ours:
                self._thread = 0
                self._lock.release()


class Interval:
    """The time since the last save, and when to ask next. Calls are counted, so steps may begin anywhere.

    Rank 0's clock decides, since clocks differ. A question per step would be a message per step, so each answer also says
    after how many calls to ask again: half of those that rank 0 expects before the time has come. An interval of n steps
    takes about log2(n) messages, and a save comes at most one step late unless steps became slower by more than half.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._since = self._asked = time.monotonic()
        self._calls = self._asked_at = 0
        self._next = 1

    @staticmethod
    def checked(every_s: float | None, every: int) -> float | None:
        """Return the option. Raise ValueError if it is no time, or given together with `every`."""
        if every_s is None:
            return None
        if isinstance(every_s, bool) or not isinstance(every_s, (int, float)) or not 0 < every_s < math.inf:
            raise ValueError(f"every_s must be a positive number of seconds, got {every_s!r}")
        if every != 1:
            raise ValueError(f"save takes every= or every_s=, not both: got every={every} and every_s={every_s}")
        return float(every_s)

    def is_due(self, every_s: float) -> bool:
        """Return True on all ranks if `every_s` seconds have passed on rank 0. Collective in the same calls of all ranks."""
        self._calls += 1
        if self._calls < self._next:
            return False
        now = time.monotonic()
        first = self._calls == 1  # nothing is known of the time that a step takes
        if first:
            self._since = now
        left_s = every_s - (now - self._since)
        taken_s = (now - self._asked) / max(1, self._calls - self._asked_at)
        expected = 1 if first else int(min(left_s / max(taken_s, 1e-9) / 2, 1e6))
        wait = self._peers.exchange(0 if left_s <= 0 else max(1, expected), "is it time to save")[0]
        self._asked, self._asked_at = now, self._calls
        self._next = self._calls + max(1, wait)
        return bool(wait == 0)

    def restart(self) -> None:
        """Count from now: a save has begun."""
        self._since = time.monotonic()
