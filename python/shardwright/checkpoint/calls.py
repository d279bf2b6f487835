"""OneCall: a lock that keeps the calls of a Checkpointer from overlapping."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from .._engine import CheckpointError


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
