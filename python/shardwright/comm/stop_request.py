"""A request to stop, which some ranks receive and all ranks learn in the same round.

A signal reaches ranks at different steps, or only some ranks. A rank with a request adds its own number to the digest
of the next round (sw_reducer_note_step). The digests then differ, so all ranks look for the reason and learn of the
request after the same step. Without a signal it costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["StopRequest"]

#: odd: multiples of it are distinct for all ranks
_STEP = 0x9E3779B1


class StopRequest:
    """The request of one module's ranks. A signal handler may set `is_asked`; `is_agreed` is set in one round on all ranks."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.is_asked = self.is_agreed = False
        self._rank, self._world_size = rank, world_size
        self._is_noted = False

    def note(self, reducer: Any) -> None:
        """Add the request to the round of the next synchronised forward."""
        if not self.is_asked or self._is_noted or self.is_agreed:
            return
        self._is_noted = True
        if self._world_size == 1:
            self.is_agreed = True
            return
        reducer.note_step((self._rank + 1) * _STEP % 2**32)

    def renew(self) -> None:
        """Add the request again, on all ranks, after a join in which notes were forgotten."""
        self._is_noted = False

    def explains(self, gather: Callable[[bytes, str], list[bytes]]) -> bool:
        """Return True if digests differ because of a request. Collective."""
        gathered = gather(b"\1" if self._is_noted else b"\0", "requests to stop")
        if b"\1" not in gathered or self.is_agreed:
            return False
        self.is_agreed = True
        return True
