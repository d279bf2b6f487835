"""compress="auto": no compressor inside one host or between GPUs; between hosts a choice by measurement.

Plain and compressed buckets both travel during the backward, so a compressor pays only if it shortens the remaining
wait at the end of a backward. The first rounds are plain and timed. Then all ranks time the codecs once and make the
same choice. The choice assumes that a compressed bucket overlaps the backward as much as a plain one.
"""

from __future__ import annotations

import logging
import statistics
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from .._engine import Exchange
from ..compress.costs import LEAST_GAIN, hidden_beside, measure_bandwidth, measure_codecs, slowest
from ..options.options import Options
from .replica import Replica

#: compresses with a compressor from now on; of None it returns whether that is still possible
Choose = Callable[[Any], Any]
_logger = logging.getLogger("shardwright")
_ROUNDS = 5  # the first is not typical: it allocates, and sends nothing early


def begin_auto(replica: Replica, options: Options, choose: Choose) -> None:
    """Start wrap(compress="auto"). Rank 0 logs the choice in one line."""
    group = replica.group
    if not replica.backend.capabilities.sends_beside_backward:
        _say(group.rank, "none, because nothing is measured between GPUs: see docs/design/compress.md")
    elif group.host_count == 1:
        why = f"none, because all {group.world_size} ranks share one host, whose memory is faster than any codec"
        _say(group.rank, why)
    elif replica.zero:
        _say(group.rank, f"none, because only zero=0 is measured, and this is zero={replica.zero}")
    elif options.groups is not None:
        _say(group.rank, "none, because only a module without groups= is measured")
    elif options.reduce != "mean":
        _say(group.rank, f"none, because a compressor computes the mean over ranks, and reduce is {options.reduce!r}")
    else:
        replica.gradients.watcher = AutoCompression(replica, choose)


class AutoCompression:
    """A timer of a model's first rounds, which then decides whether to compress."""

    def __init__(self, replica: Replica, choose: Choose) -> None:
        self._replica, self._choose = weakref.ref(replica), choose
        self._rounds = self._first = replica.reducer.rounds
        self._ended_s = time.perf_counter()
        #: seconds of each round: from the end of the backward to its averages; and from the round before
        self.waits: list[float] = []
        self.steps: list[float] = []

    def after_round(self, wait_s: float) -> None:
        """Count a round, if there was one. All ranks call this, even without a part in it. Collective if it decides."""
        replica = self._replica()
        if replica is None or replica.reducer.rounds == self._rounds:
            return
        self._rounds = replica.reducer.rounds
        now_s = time.perf_counter()
        self.waits.append(wait_s)
        self.steps.append(now_s - self._ended_s)
        self._ended_s = now_s
        if self._rounds - self._first >= _ROUNDS:
            replica.gradients.watcher = None
            if self._choose(None):
                self._decide(replica)

    @torch.no_grad()
    def _decide(self, replica: Replica) -> None:
        comm, exchange = replica.group.comm, Exchange(replica.group.comm)
        # The last rank to arrive waits for communication alone, the others also for that rank: take the shortest wait.
        mine = [statistics.median(each[1:] or each) for each in (self.waits, self.steps)]
        shortest, step_s = slowest(comm, [-mine[0], mine[1]])
        wait_s = -shortest
        numel = sum(p.numel() for p in replica.table.parameters if p.requires_grad)
        bandwidth = measure_bandwidth(replica.group, exchange)
        codecs = measure_codecs(replica.group, exchange, numel, bandwidth)
        beside_s = hidden_beside(replica.overlaps_compression, exchange, numel, bandwidth, wait_s)
        best = min(codecs, key=lambda codec: codec.seconds(bandwidth, beside_s))
        best_s = best.seconds(bandwidth, beside_s)
        why = (
            f"the end of a backward waits {1e3 * wait_s:.1f} ms of {1e3 * step_s:.1f} ms a step for plain gradients, and would wait "
            f"{1e3 * best_s:.1f} ms for {best.compress!r} at {bandwidth / 1e9:.3g} GB/s"
        )
        pays = best_s < wait_s - LEAST_GAIN * step_s
        _say(replica.group.rank, f"{best.compress!r}, because {why}" if pays else f"none, because {why}")
        if pays:
            self._choose(best.compress)


def _say(rank: int, choice: str) -> None:
    if rank == 0:
        _logger.info("compress='auto': %s", choice)
