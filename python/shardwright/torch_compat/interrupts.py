"""Ctrl-C in a backward whose hooks run in a thread of torch's.

For tensors on a GPU torch runs hooks and final callbacks in its own thread, and the program's main thread waits in
C++, where Python's handler of SIGINT does not run. Python's C handler writes the number of each signal to a file
descriptor, though (`signal.set_wakeup_fd`). During a backward of the main thread that is a pipe of ours, which
waits in torch's threads read.

Only SIGINT with Python's own handler ends a wait, since that handler is sure to raise.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .autograd import graph_task_id


class _Ear:
    """The pipe of one process, and the signals read from it in this backward."""

    def __init__(self) -> None:
        self._pid, self._read, self._write, self._heard = 0, -1, -1, b""
        self._is_listening = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        if self._pid != os.getpid():  # a forked child's pipe would be its parent's, too
            self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            self._pid = os.getpid()
        self.take()
        self._heard, self._is_listening = b"", True
        before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        before = -1 if before == self._write else before  # an interrupt came before the `try` of an earlier backward
        try:
            yield
        finally:
            self._is_listening = False
            try:
                if before >= 0 and self.take():  # another reader, such as an event loop, misses nothing
                    with contextlib.suppress(OSError):
                        os.write(before, self._heard)
            finally:
                # Python runs its handlers here at the latest. A wait that has raised KeyboardInterrupt already thus
                # ends in one exception, not in one now and one in the program's `except`
                signal.set_wakeup_fd(before, warn_on_full_buffer=False)

    def take(self) -> bytes:
        with contextlib.suppress(BlockingIOError):
            self._heard += os.read(self._read, 4096)
        return self._heard

    @property
    def has_interrupt(self) -> bool:
        return self._is_listening and graph_task_id() >= 0 and signal.SIGINT in self.take()


_ear = _Ear()


def check_interrupt() -> None:
    """Raise KeyboardInterrupt in a thread that runs a backward for the main one if that was interrupted meanwhile."""
    if _ear.has_interrupt:
        raise KeyboardInterrupt


@functools.cache
def hear_interrupts() -> None:
    """Let check_interrupt() know of Ctrl-C in backwards from now on."""
    run: Any = getattr(torch.autograd, "_engine_run_backward", None)
    if run is not None:
        torch.autograd._engine_run_backward = _hearing(run)


def _hearing(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def call(*args: Any, **kwargs: Any) -> Any:
        is_main = threading.get_ident() == threading.main_thread().ident
        if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return run(*args, **kwargs)
        with _ear.listening():
            return run(*args, **kwargs)

    return call
