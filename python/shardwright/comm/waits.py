"""Lines of waits: when a wait of Python's own is logged, and which call every rank must make.

The engine logs its own waits (csrc/comm/wait.c) through log(), in the thread that waits.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from .._engine import CommTimeoutError, account_call, account_call_end

#: a wait of this many seconds is logged, then again whenever it has doubled
WARN_AFTER_S = 30.0
#: the same while ranks start and join
START_S = 10.0

#: calls whose time is a save's in the account of a step
_SAVES = ("Checkpointer.save()", "Checkpointer.wait()", "sw.save()", "sw.save_pretrained()")

_logger = logging.getLogger("shardwright")
_calls = threading.local()
_Function = TypeVar("_Function", bound=Callable[..., Any])


def log(sentence: str) -> None:
    """Log a wait, with the call that every rank must make."""
    _logger.warning("%s%s", sentence, _remedy())


def seconds_of(warn_after_s: float | None) -> float:
    """Return the engine's form of the option: None is 0, never."""
    return float(warn_after_s or 0.0)


def start_s(warn_after_s: float | None) -> float:
    """Return the engine's form of the option while ranks join."""
    return min(seconds_of(warn_after_s), START_S)


class Wait:
    """A wait that logs a line after `warn_after_s` (0 or None: never), then whenever it has doubled."""

    def __init__(self, warn_after_s: float | None, say: Callable[[str], None] = log) -> None:
        self._begun_s, self._say = time.monotonic(), say
        self._next_s = warn_after_s or math.inf

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self._begun_s

    def look(self, sentence: Callable[[float], str]) -> None:
        """Log sentence(seconds) if a line is due."""
        waited_s = self.waited_s
        if waited_s >= self._next_s:
            while self._next_s <= waited_s:
                self._next_s *= 2
            self._say(sentence(waited_s))


@contextlib.contextmanager
def calling(name: str) -> Iterator[None]:
    """Return a context that is a call which every rank must make; waits in it say so. The outermost one counts."""
    outer = getattr(_calls, "name", "")
    _calls.name = outer or name
    if not outer:
        account_call(name, name in _SAVES)
    try:
        yield
    except CommTimeoutError as error:
        if not outer:
            error.args = (f"{error}{_remedy()}", *error.args[1:])
        raise
    finally:
        _calls.name = outer
        if not outer:
            account_call_end()


def on_every_rank(name: str) -> Callable[[_Function], _Function]:
    """Decorate a function that every rank must call: as calling()."""

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            with calling(name):
                return function(*arguments, **options)

        return call  # type: ignore[return-value]

    return decorate


def _remedy() -> str:
    name = getattr(_calls, "name", "")
    return f"; {name} is collective: call it on every rank" if name else ""
