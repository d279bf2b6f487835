"""A request to stop that some ranks got, and that all learn in the same round.

A signal reaches ranks at different steps, or some ranks alone. A rank that has one adds a number of its own to the
digest of the next round (sw_reducer_note_step). Then digests differ, all ranks look for the reason together, and know after
the same step. Without a signal it costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["StopRequest"]

#: odd: multiples of it are distinct for all ranks
_STEP = 0x9E3779B1


class StopRequest:
    """The request of one module's ranks.

    Attributes
    ----------
    is_asked : bool
        This rank was asked to stop. A signal handler may set it.
    is_agreed : bool
        Some rank was, and all know. It is set in the same round on all ranks.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.is_asked = self.is_agreed = False
        self._rank, self._world_size = rank, world_size
        self._is_noted = False

    def note(self, reducer: Any) -> None:
        """Before a forward that synchronises: tell the other ranks in its round."""
        if not self.is_asked or self._is_noted or self.is_agreed:
            return
        self._is_noted = True
        if self._world_size == 1:
            self.is_agreed = True
            return
        reducer.note_step((self._rank + 1) * _STEP % 2**32)

    def renew(self) -> None:
        """Tell again: ranks have forgotten what they had noted, after a join. On all ranks."""
        self._is_noted = False

    def explains(self, gather: Callable[[bytes, str], list[bytes]]) -> bool:
        """Return True if a request is why digests differ. Collective."""
        said = gather(b"\1" if self._is_noted else b"\0", "requests to stop")
        if b"\1" not in said or self.is_agreed:
            return False
        self.is_agreed = True
        return True
