"""headroom: the time that a step waits for communication, and the compressor that would pay off.

A compressor saves bytes and costs arithmetic. It can save at most the *exposed* communication: the difference between a
synchronised and an unsynchronised backward. predicted(compressor) = local step + codec + bytes / bandwidth, since a
codec takes a core's time wherever it runs. Between hosts at zero=0 and 1 compressed buckets overlap the backward, so
the last term is reduced by the time that a plain exchange overlaps.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from .._engine import Error, Exchange, HostComm
from ..compress.costs import LEAST_GAIN, bytes_sent, hidden_beside, measure_bandwidth, measure_codecs, slowest
from .ddp import DistributedDataParallel


@dataclasses.dataclass(frozen=True)
class Candidate:
    """The prediction for one compressor: seconds of a step and of codecs in it, and bytes that a rank sends in it."""

    name: str
    step_s: float
    codec_s: float
    wire_bytes: int


@dataclasses.dataclass(frozen=True)
class Headroom:
    """The result of headroom(), equal on all ranks.

    Median seconds of the slowest rank with (`step_s`) and without (`local_s`) communication, and their difference
    (`exposed_s`); `bandwidth` in bytes per second; predictions, the fastest first; `choice`: "none", or the compressor that
    would pay off.
    """

    step_s: float
    local_s: float
    exposed_s: float
    bandwidth: float
    candidates: tuple[Candidate, ...]
    choice: str

    def __str__(self) -> str:
        share = 100 * self.exposed_s / self.step_s if self.step_s else 0.0
        best = self.candidates[0]
        return (
            f"compress: {self.choice} (step {1e3 * self.step_s:.2f} ms, {share:.0f} % of it waits for communication; "
            f"best compressor {best.name}: {1e3 * best.step_s:.2f} ms at {self.bandwidth / 1e9:.3g} GB/s)"
        )


def headroom(
    model: torch.nn.Module, backward: Callable[[], Any], *, repeat: int = 5, bandwidth: float | None = None
) -> Headroom:
    """Measure the exposed communication of a step and predict which compressor would pay off.

    Parameters
    ----------
    model : DistributedDataParallel
        A module wrapped by sw without a compressor.
    backward : callable
        Runs one forward and backward of `model` on this rank, without an optimizer step. headroom() clears gradients
        before and after.
    repeat : int
        Number of calls with and of calls without communication; at least 3.
    bandwidth : float, optional
        Bytes per second that a rank sends, to predict for another network. Default: measured on this network.

    Raises
    ------
    Error
        If the model is not wrapped by sw, or already has a compressor.
    ValueError
        If repeat or bandwidth are out of range.

    Notes
    -----
    Collective. Cost: 2 (repeat + 1) backwards, and each candidate's codec on 4 MiB. With a given bandwidth, plain
    gradients are assumed to overlap the backward as much as they do here.

    Examples
    --------
    >>> import torch, shardwright as sw
    >>> model = sw.wrap(torch.nn.Linear(4, 1))
    >>> sw.headroom(model, lambda: model(torch.ones(2, 4)).sum().backward()).choice
    'none'
    """
    if not isinstance(model, DistributedDataParallel):
        raise Error("headroom needs a model that sw.wrap returned")
    if repeat < 3:
        raise ValueError(f"headroom: repeat must be at least 3, got {repeat!r}")
    if bandwidth is not None and not bandwidth > 0:
        raise ValueError(f"headroom: bandwidth must be above 0 bytes a second, got {bandwidth!r}")
    replica = model._engine.replica
    if replica.compression is not None or model._engine.comm_hooks:
        raise Error("headroom measures plain gradients: this model has a compressor or a communication hook")
    comm = replica.group.comm
    step_s, local_s = _measure_backwards(model, backward, repeat, comm)
    exposed_s = max(0.0, step_s - local_s)
    numel = sum(p.numel() for p in replica.table.parameters if p.requires_grad)
    exchange = Exchange(comm)
    plain_bytes = bytes_sent(exchange, 4 * numel)
    if replica.group.host_count == 1:
        plain_bytes = replica.stats()["step_wire_bytes"]
    measured = measure_bandwidth(replica.group, exchange)
    speed = bandwidth or measured
    beside_s = hidden_beside(replica.overlaps_compression, exchange, numel, measured, exposed_s)
    if bandwidth is not None:  # assume the same overlap; the remaining bytes take their time at this bandwidth
        hidden_s = max(0.0, plain_bytes / measured - exposed_s)
        exposed_s = max(0.0, plain_bytes / bandwidth - hidden_s)
        step_s = local_s + exposed_s
    codecs = measure_codecs(replica.group, exchange, numel, measured)
    candidates = [
        Candidate(repr(c.compress), local_s + c.seconds(speed, beside_s), c.codec_s, c.wire_bytes) for c in codecs
    ]
    candidates.sort(key=lambda candidate: candidate.step_s)
    pays = comm.world_size > 1 and candidates[0].step_s < (1 - LEAST_GAIN) * step_s
    return Headroom(step_s, local_s, exposed_s, speed, tuple(candidates), candidates[0].name if pays else "none")


def _measure_backwards(model: Any, backward: Callable[[], Any], repeat: int, comm: HostComm) -> tuple[float, float]:
    """Time backwards with and without communication, alternately."""
    times: tuple[list[float], list[float]] = ([], [])
    synchronises = model.require_backward_grad_sync
    try:
        for turn in range(2 * (repeat + 1)):
            model.zero_grad(set_to_none=True)
            model.require_backward_grad_sync = turn % 2 == 0
            comm.barrier("headroom")
            start = time.perf_counter()
            backward()
            if turn >= 2:
                times[turn % 2].append(time.perf_counter() - start)
    finally:
        model.require_backward_grad_sync = synchronises
        model.zero_grad(set_to_none=True)
    both = slowest(comm, [*times[0], *times[1]])
    return statistics.median(both[:repeat]), statistics.median(both[repeat:])
