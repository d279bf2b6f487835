"""Signals after which a training saves and ends: SIGTERM of a launcher, SIGUSR1 before SLURM's time limit."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["SaveSignals", "check_signals"]

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
