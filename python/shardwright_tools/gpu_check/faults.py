"""Checks with peers that die, are missing or are interrupted: a rank raises in time, even with a full queue."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import shardwright as sw
import torch
import torch.distributed as dist

from .correct import Given, gradients
from .report import Row, row

#: also bounds the creation of a communicator by two cold processes; a simulated GPU takes no time for that
DEADLINE_S, DEADLINE_QUICK_S = 20.0, 4.0
#: allowed time after the deadline: a second check, and the end of the communicator
_SLACK_S = 8.0


def _deadline_s(is_quick: bool) -> float:
    return DEADLINE_QUICK_S if is_quick else DEADLINE_S


def _wrapped(place: Any, rank: int, is_quick: bool) -> Any:
    """Return a model that has trained one step with its peers."""
    place.watch()
    model = sw.wrap(place.put(Given()), timeout_s=_deadline_s(is_quick))
    model(gradients(rank, 0, place.device)).backward()
    place.synchronize()
    return model


def _fill_queue(place: Any, model: Any) -> None:
    """Enqueue collectives and copies until an exception ends the loop, like a host that is far ahead of its GPU."""
    link = model._engine.replica.link
    size = 8 * link.world_size
    memory = [place.memory(torch.zeros(size, dtype=torch.float32, device="cpu")) for _ in range(2)]
    to, source = (each.data_ptr() for each in memory)
    place.synchronize()
    with place.short_queue():
        for _ in range(20_000):
            link.comm.all_gather([(to, 8 * link.world_size, "float32")], link.comm.stream)
            for _ in range(8):
                link.comm.pack([(to, source, 32)], link.comm.stream)
            link.comm.watch()
        while True:  # the queue had room for everything
            link.comm.watch()
            time.sleep(0.05)


def _timed(case: str, begun: float, error: BaseException, expected: str, is_quick: bool) -> Row:
    seconds = time.monotonic() - begun
    status = "ok" if expected in str(error) and seconds < _deadline_s(is_quick) + _SLACK_S else "wrong"
    return row(case, status, seconds, "s", note=f"{type(error).__name__}: {error}")


def full_queue(place: Any, rank: int, world_size: int, *, is_quick: bool) -> Iterator[Row]:
    """Check a missing peer: the blocked call returns, and the next one raises the timeout."""
    model, begun = _wrapped(place, rank, is_quick), time.monotonic()
    if rank == 0:
        try:
            _fill_queue(place, model)
        except sw.CommTimeoutError as error:
            yield _timed("full queue", begun, error, "was not done within", is_quick)
    dist.barrier()


def killed_peer(place: Any, rank: int, world_size: int, *, is_quick: bool) -> Iterator[Row]:
    """Check that ranks with full queues name a peer that was killed."""
    model = _wrapped(place, rank, is_quick)
    dist.barrier()
    begun = time.monotonic()
    if rank == world_size - 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        _fill_queue(place, model)
    except sw.CommError as error:
        yield _timed("killed peer", begun, error, f"rank {world_size - 1} ", is_quick)


def interrupt(place: Any, rank: int, world_size: int, *, is_quick: bool) -> Iterator[Row]:
    """Check that Ctrl-C ends a wait for peers and that they raise the reason."""
    model = _wrapped(place, rank, is_quick)
    dist.barrier()
    begun = time.monotonic()
    if rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:  # a rank with an unused parameter waits until it knows if its peers used it
            model(gradients(rank, 1, place.device), 1).backward()
        except KeyboardInterrupt as error:
            yield _timed("Ctrl-C", begun, error, "", is_quick)
    else:
        try:
            model._engine.replica.link.host.barrier("the end of rank 0")
        except sw.CommError as error:
            assert "interrupted" in str(error), error
    dist.barrier()
