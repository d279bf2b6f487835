"""Commands of a user that `shardwright trace` and `shardwright scale` start: `-- torchrun ... program.py`."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from ..interrupts import delayed
from .report import Nothing

_POLL_S = 0.2
_END_S = 40.0  # longer than the 30 s that torchrun gives its workers


def words_of(program: Sequence[str], command: str) -> list[str]:
    """Return the command behind `--`. Nothing, with a sentence, if there is none, or it cannot be run."""
    words = list(program)
    if not words:
        raise Nothing(
            f"no command given: pass one, as in `shardwright {command} -- torchrun --nproc-per-node 2 program.py`"
        )
    if shutil.which(words[0]) is None:
        raise Nothing(f"the command {words[0]!r} was not found, or is not executable")
    return words


def run_child(
    words: Sequence[str], environment: Mapping[str, str], is_over: Callable[[], bool], log: IO[bytes] | None = None
) -> int | None:
    """Run a command until it ends, or is_over(), and no longer. Return its exit code; None if it was ended."""
    # a signal that ends this process unwinds, so that the command ends first
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    process: subprocess.Popen[bytes] | None = None
    try:
        with delayed():
            given = {**os.environ, **environment}
            process = subprocess.Popen(words, env=given, stdout=log, stderr=log, start_new_session=True)
        while process.poll() is None and not is_over():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_S)
        return process.poll()
    finally:
        if process is not None:
            _signal_all(process, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            _signal_all(process, signal.SIGKILL)
            process.wait()
        signal.signal(signal.SIGTERM, before)


def _signal_all(process: subprocess.Popen[bytes], number: int) -> None:
    """Signal a child and what it has started in its session; they may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
