"""A module's link to joined ranks: the announcements of training ranks at zero >= 1. See parallel/join.py."""

from __future__ import annotations

from typing import Any

from ..backend.base import Capabilities
from ..gradients.module_gradients import ModuleGradients

__all__ = ["JoinLink"]


class JoinLink:
    """Announcements of collectives to ranks that ran out of inputs. `announcer`: None outside join."""

    def __init__(
        self, gradients: ModuleGradients, reducer: Any, storage: Any, capabilities: Capabilities, zero: int
    ) -> None:
        self._gradients, self._reducer, self._storage = gradients, reducer, storage
        self._capabilities, self._zero = capabilities, zero
        self.announcer: Any = None

    @property
    def is_on(self) -> bool:
        """Return True inside join at zero >= 1."""
        return self.announcer is not None and self.announcer.is_on

    @property
    def is_joining(self) -> bool:
        """Return True inside join. Some rank may then be shadowing, and make no other collective call."""
        return self.announcer is not None and self.announcer.is_joining

    @property
    def announces_rounds(self) -> bool:
        """Return True if opening a round must be announced to joined ranks."""
        return self._zero >= 2 and not self._capabilities.tells_standing

    def connect(self, announcer: Any) -> None:
        """Announce collectives through `announcer`; None stops announcements."""
        self.announcer = announcer
        board = self._gradients.sliced_board
        if board is not None:
            board.announce = self.announce if announcer is not None else lambda *_: None
        if self.announces_rounds:
            self._reducer.set_announcer(announcer.announce_round if announcer is not None else None)
        if not self._capabilities.free_unit_order:
            self._storage.announce_units(announcer.announce_unit if announcer is not None else None)

    def announce(self, kind: str, number: float = 0, groups: Any = None) -> None:
        """Announce an operation to joined ranks inside join; do nothing outside."""
        if self.announcer is not None and self.announcer.is_on:
            self.announcer.announce(kind, number, groups)
