"""compress="auto": nothing inside one host or between GPUs; between hosts what pays by the measure of the first rounds.

Buckets cross while the backward goes on, plain and compressed ones alike. So what a compressor has to beat is what is left: how long
the end of a backward waits until its gradients are averaged. The first rounds are plain, and timed; then all ranks time the codecs
once, and choose alike: as much of a compressed bucket's wire falls beside the backward as of a plain one's.
"""

from __future__ import annotations

import logging
import statistics
import time
import weakref
from typing import TYPE_CHECKING

import torch

from .compression_headroom import LEAST_GAIN, hidden_beside, measure_bandwidth, measure_codecs, slowest
from .levels import levels_of

if TYPE_CHECKING:
    from .data_parallel import DistributedDataParallel

_logger = logging.getLogger("shardwright")
_ROUNDS = 5  # the first is not like the others: it sends nothing early, and makes memory


def begin_auto(wrapped: DistributedDataParallel) -> None:
    """What wrap(compress="auto") does. What comes of it is said in one line on rank 0."""
    replica = wrapped._engine()
    group = replica.group
    if not replica.backend.capabilities.sends_beside_backward:
        _say(group.rank, "none, because between GPUs nothing is measured: see docs/design/gpu.md")
    elif group.host_count == 1:
        _say(
            group.rank,
            f"none, because all {group.world_size} ranks share one host, whose memory is faster than any codec",
        )
    elif replica.zero:
        _say(group.rank, f"none, because it is measured at zero=0 alone, and this is zero={replica.zero}")
    elif wrapped._options.reduce != "mean":
        _say(
            group.rank,
            f"none, because a compressor gives the mean over ranks, and reduce is {wrapped._options.reduce!r}",
        )
    else:
        replica.watcher = AutoCompression(wrapped)


class AutoCompression:
    """Times the rounds of a model, and after some of them compresses it or not.

    Attributes
    ----------
    waits, steps : list of float
        Seconds of each round so far: from the end of the backward to its averages; and since the round before.
    """

    def __init__(self, wrapped: DistributedDataParallel) -> None:
        self._wrapped = weakref.ref(wrapped)
        self._rounds = self._first = wrapped._engine().reducer.stats()["rounds"]
        self._ended_s = time.perf_counter()
        self.waits: list[float] = []
        self.steps: list[float] = []

    def after_round(self, wait_s: float) -> None:
        """After what may have been a round, whoever took part in it: they count alike. Collective when it decides."""
        wrapped = self._wrapped()
        if wrapped is None or wrapped._engine().reducer.stats()["rounds"] == self._rounds:
            return
        self._rounds = wrapped._engine().reducer.stats()["rounds"]
        now_s = time.perf_counter()
        self.waits.append(wait_s)
        self.steps.append(now_s - self._ended_s)
        self._ended_s = now_s
        if self._rounds - self._first >= _ROUNDS:
            wrapped._engine().watcher = None
            if not wrapped._comm_hooks:
                self._decide(wrapped)

    @torch.no_grad()
    def _decide(self, wrapped: DistributedDataParallel) -> None:
        replica = wrapped._engine()
        comm, levels = replica.group.comm, levels_of(replica.group)
        # The rank that comes last waits for communication alone, the others for it too: the shortest wait counts.
        mine = [statistics.median(each[1:] or each) for each in (self.waits, self.steps)]
        shortest, step_s = slowest(comm, [-mine[0], mine[1]])
        wait_s = -shortest
        numel = sum(p.numel() for p in replica.table.parameters if p.requires_grad)
        bandwidth = measure_bandwidth(replica, levels)
        codecs = measure_codecs(replica, levels, numel, bandwidth)
        beside_s = hidden_beside(replica, levels, numel, bandwidth, wait_s)
        best = min(codecs, key=lambda codec: codec.seconds(bandwidth, beside_s))
        best_s = best.seconds(bandwidth, beside_s)
        why = (
            f"the end of a backward waits {1e3 * wait_s:.1f} ms of {1e3 * step_s:.1f} ms a step for plain gradients, and would wait "
            f"{1e3 * best_s:.1f} ms for {best.compress!r} at {bandwidth / 1e9:.3g} GB/s"
        )
        pays = best_s < wait_s - LEAST_GAIN * step_s
        _say(replica.group.rank, f"{best.compress!r}, because {why}" if pays else f"none, because {why}")
        if pays:
            wrapped.compress_gradients(best.compress)


def _say(rank: int, what: str) -> None:
    if rank == 0:
        _logger.info("compress='auto': %s", what)
