"""One thread per wrapper that averages buckets during the backward, in the order in which they are handed over.

The reducer hands buckets over in index order, each as soon as it holds all its gradients. Incomplete buckets, and those
that only other ranks used, follow at the end of the backward, which waits for all. The thread has its own
communicators, since the backward may use the wrapper's meanwhile (SyncBatchNorm). All ranks hand over the same buckets
in the same order; times may differ.

A failure cancels the round's other buckets on this rank; the wait for the round raises it.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from .._engine import CommTimeoutError, HostComm
from ..comm.waits import Wait

#: seconds added to the exchanges' own deadline, whose errors name the cause better
_GRACE_S = 2.0
#: seconds after which a due line is logged
_MOMENT_S = 0.01
#: seconds for which an ending program waits for threads that are averaging a bucket
_LEAVE_S = 1.0
#: threads with a bucket under way
_busy: set[threading.Thread] = set()


class Runner(Protocol):
    """The work on one bucket: see HookRunner."""

    def job(self, bucket: int, is_last: bool, is_early: bool) -> Callable[[], None]: ...

    def finish_early(self, buckets: Iterable[int]) -> None: ...


class _Round:
    """The results of the buckets handed over since the last wait()."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self.under_way = 0
        self.early: list[int] = []


class BucketThread:
    """A thread for the buckets of `runner`, started at the first one, which holds a `lease` of communicators.

    The deadline of `comm`, the wrapper's communicator, bounds each wait; a wait that passes it ends the communicator.
    """

    def __init__(self, runner: Runner, comm: HostComm, label: str, lease: object) -> None:
        self._runner, self._comm, self._label, self._lease = runner, comm, label, lease
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._round = _Round()
        self._thread: threading.Thread | None = None
        end = weakref.finalize(self, self._jobs.put, None)
        end.atexit = False

    def __call__(self, bucket: int, is_last: bool, is_early: bool) -> None:
        """Hand a bucket over; its gradients and its memory belong to the thread until wait()."""
        if self._thread is None:
            self._thread = _begin(self._jobs, self._done, self._lease)
        self._round.under_way += 1
        self._round.early += [bucket] * is_early
        self._jobs.put((self._round, self._runner.job(bucket, is_last, is_early)))

    def is_under_way(self) -> bool:
        """Return True if buckets were handed over since the last wait()."""
        return self._round.under_way > 0

    def wait(self) -> None:
        """Wait until all buckets handed over are averaged. Raise an error once; the thread is then usable again."""
        while self._round.under_way:
            self._wait_for_one()
            self._round.under_way -= 1
        ended, self._round = self._round, _Round()
        if ended.failure is not None:
            raise ended.failure
        self._runner.finish_early(ended.early)

    def _wait_for_one(self) -> None:
        rank, limit_s = self._comm.rank, self._comm.timeout_s + _GRACE_S
        wait = Wait(self._comm.warn_after_s)
        while True:
            try:
                return self._done.get(timeout=min(max(limit_s - wait.waited_s, 0.0), wait.next_s + _MOMENT_S))
            except queue.Empty:
                pass
            if wait.waited_s >= limit_s:
                message = f"rank {rank}: a compressed bucket of {self._label} was not exchanged within {self._comm.timeout_s:g} s"
                self._comm.abort(message)
                raise CommTimeoutError(message)
            wait.look(
                lambda s: (
                    f"rank {rank} has waited {s:.1f} s for a compressed bucket of {self._label} to be exchanged; "
                    f"the deadline is {self._comm.timeout_s:g} s"
                )
            )


def _begin(jobs: Any, done: Any, lease: object) -> threading.Thread:
    thread = threading.Thread(target=_run, args=(jobs, done, lease), name="shardwright buckets", daemon=True)
    thread.start()
    return thread


def _run(jobs: Any, done: Any, lease: object) -> None:
    """Run jobs. Hold no reference to the wrapper between jobs, so that it can be freed."""
    me = threading.current_thread()
    while (job := jobs.get()) is not None:
        its_round, run = job
        if its_round.failure is None:
            _busy.add(me)
            try:
                run()
            except BaseException as error:
                its_round.failure = error
            _busy.discard(me)
        del job, run, its_round
        done.put(None)


@atexit.register
def _leave() -> None:
    """Wait at exit for threads that average a bucket: returning from Gloo after the interpreter's end raises SIGABRT."""
    deadline_s = time.monotonic() + _LEAVE_S
    while _busy and time.monotonic() < deadline_s:
        time.sleep(1e-3)


os.register_at_fork(after_in_child=_busy.clear)  # a forked child lacks the thread
