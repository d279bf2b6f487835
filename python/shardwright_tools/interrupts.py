"""Signals that come while a command starts another."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def delayed() -> Iterator[None]:
    """Let Ctrl-C and a handled SIGTERM take effect at the end: a process that starts meanwhile is known by then, and can be ended."""
    is_main = threading.current_thread() is threading.main_thread()
    handled = [each for each in (signal.SIGINT, signal.SIGTERM) if is_main and callable(signal.getsignal(each))]
    came: list[int] = []
    before = [signal.signal(each, lambda number, _: came.append(number)) for each in handled]
    try:
        yield
    finally:
        for each, handler in reversed([*zip(handled, before)]):  # the one that may raise last
            signal.signal(each, handler)
        for number in came:
            signal.raise_signal(number)
