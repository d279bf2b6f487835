"""Signals after which a training saves and ends: SIGTERM of a launcher, SIGUSR1 before SLURM's time limit.

A signal reaches ranks at different steps, or only some ranks. All learn of it in the same round, and without a signal
that costs nothing (StopRequest; docs/design/in_place.md).
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterable
from typing import Any

logger = logging.getLogger("shardwright")
_REFUSED = {signal.SIGKILL, signal.SIGSTOP}
#: handlers that end the program
_ENDING = (signal.SIG_DFL, signal.default_int_handler)


def check_signals(given: Any) -> tuple[signal.Signals, ...]:
    """Return the signals of `save_on`; raise TypeError or ValueError for an entry that cannot be handled."""
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise TypeError(f"save_on must be a collection of signals such as (SIGTERM, SIGUSR1), got {given!r}")
    found = []
    for each in given:
        try:
            found.append(signal.Signals(each))
        except ValueError:
            raise ValueError(f"save_on has {each!r}, which is not a signal") from None
        if found[-1] in _REFUSED:
            raise ValueError(f"save_on has {found[-1].name}, which no program can handle")
    if found and threading.current_thread() is not threading.main_thread():
        raise ValueError("save_on needs the main thread, in which Python handles signals: make the Checkpointer there")
    return tuple(found)


class SaveSignals:
    """Handlers that note a signal, call `ask` once and then the program's own, but Python's for SIGINT; none after close()."""

    def __init__(self, signals: tuple[signal.Signals, ...], ask: Callable[[], None]) -> None:
        self._ask = ask
        self._is_asked = self._is_closed = False
        self._before = {number: signal.signal(number, self._note) for number in signals}

    def _note(self, number: int, frame: Any) -> None:
        if not self._is_asked and not self._is_closed:
            self._is_asked = True
            self._ask()
            logger.warning("%s: saving at the end of the step, then ending", signal.Signals(number).name)
        before = self._before.get(signal.Signals(number))
        if before in _ENDING:  # closed before a later handler: nothing else may be left that ends the program
            if self._is_closed and signal.getsignal(number) == self._note:
                signal.signal(number, before)
                signal.raise_signal(number)
        elif callable(before):
            before(number, frame)

    def close(self) -> None:
        """Restore the earlier handlers. A handler that was not set from Python cannot be restored."""
        self._is_closed = True
        for number, before in self._before.items():
            while isinstance(other := getattr(before, "__self__", None), SaveSignals) and other._is_closed:
                before = other._before.get(number)
            is_ours = signal.getsignal(number) == self._note
            if is_ours and before is not None and threading.current_thread() is threading.main_thread():
                signal.signal(number, before)


#: odd: multiples of it are distinct for all ranks
_STEP = 0x9E3779B1


class StopRequest:
    """The request of one module's ranks. A signal handler may set `is_asked`; `is_agreed` is set in one round on all ranks.

    A rank with a request adds its own number to the digest of the next round (sw_reducer_note_step). The digests then
    differ, so all ranks look for the reason.
    """

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
