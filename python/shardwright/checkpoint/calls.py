"""One call at a time: what two threads may not do with one Checkpointer, nor a signal's handler in the midst of a call."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from .._engine import CheckpointError


class OneCall:
    """Collective calls have one order on all ranks, which no two threads can keep: the second is refused, and does not wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside, self._thread = "", 0

    @contextlib.contextmanager
    def of(self, name: str, *, waits: bool = False) -> Iterator[None]:
        """Raises CheckpointError while another call is under way, in another thread (unless it `waits` for that) or under a signal's
        handler."""
        is_ours = False
        try:
            is_ours = self._lock.acquire(blocking=waits and self._thread != threading.get_ident())
            if not is_ours:
                raise CheckpointError(
                    f"{name} came while {self._inside} of the same Checkpointer was under way, in another thread or below a signal's "
                    "handler: one call at a time, but for progress (a handler sets a flag, and the training saves after its step)"
                )
            self._inside, self._thread = name, threading.get_ident()
            yield
        finally:
            if is_ours:
                self._thread = 0
                self._lock.release()
