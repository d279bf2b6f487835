"""Costs of compressors on this network, for compress="auto" and headroom()."""

from __future__ import annotations

import dataclasses
import statistics
import timeit
from collections.abc import Callable
from typing import Any

import torch

from .._engine import Codec, Exchange
from ..comm.process_group import HostGroup
from ..layout.bucket import Bucket
from ..layout.memory import bytes_of
from ..options.compress import Compressor
from ..options.compressors import Bf16, Fp16, Int8, PowerSGD
from .make import make_state

_PROBE_NUMEL = 1 << 20  # elements: 4 MiB, as 1024 x 1024
LEAST_GAIN = 0.03  # fraction of a step below which a gain does not justify the rounding
_CANDIDATES: tuple[Compressor, ...] = (Bf16(), Fp16(), Int8(), PowerSGD(rank=4))


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of a compressor for a whole model: seconds of the slowest rank, and bytes that a rank sends."""

    compress: Compressor
    codec_s: float
    wire_bytes: int

    def seconds(self, bandwidth: float, hidden_s: float = 0.0) -> float:
        """Return the seconds of a step if `hidden_s` of wire time overlap the backward."""
        return self.codec_s + max(0.0, self.wire_bytes / bandwidth - hidden_s)


def hidden_beside(overlaps: bool, exchange: Exchange, numel: int, bandwidth: float, exposed_s: float) -> float:
    """Return the seconds of a plain exchange that overlap the backward; a compressed exchange may overlap as much."""
    if not overlaps:
        return 0.0
    return max(0.0, bytes_sent(exchange, 4 * numel) / bandwidth - exposed_s)


def measure_bandwidth(group: HostGroup, exchange: Exchange) -> float:
    """Return the bytes a second that a rank sends in a plain exchange; infinite for one rank. Collective."""
    flat = torch.ones(_PROBE_NUMEL, dtype=torch.float32, device="cpu")
    codec = Codec("plain")
    own_s = _median_of(lambda: codec.average(exchange, 0, flat.data_ptr(), flat.numel()))
    plain_s = slowest(group.comm, [own_s])[0]
    return bytes_sent(exchange, 4 * _PROBE_NUMEL) / plain_s if group.world_size > 1 else float("inf")


def measure_codecs(group: HostGroup, exchange: Exchange, numel: int, bandwidth: float) -> list[Cost]:
    """Time every candidate on 4 MiB over a network of `bandwidth`, and scale to `numel` elements. Collective."""
    found = []
    for compress in _CANDIDATES:
        whole_s, most_sent = slowest(group.comm, [*_time_codec(compress, exchange)])
        sent = int(most_sent)  # with several hosts only carriers send
        codec_s = max(0.0, whole_s - sent / bandwidth) * numel / _PROBE_NUMEL
        found.append(Cost(compress, codec_s, sent * numel // _PROBE_NUMEL))
    return found


def slowest(comm: Any, values: list[float]) -> list[float]:
    """Return the greatest of each value over ranks. Collective."""
    packed = bytes_of(torch.tensor(values, dtype=torch.float64, device="cpu"))
    rows = [torch.frombuffer(bytearray(row), dtype=torch.float64) for row in comm.all_gather_bytes(packed, "headroom")]
    return list(torch.stack(rows).amax(0).tolist())


def _median_of(work: Callable[[], Any]) -> float:
    work()
    return statistics.median(timeit.repeat(work, number=1, repeat=3))


def bytes_sent(exchange: Exchange, message_bytes: int) -> int:
    world_size = exchange.world_size
    return 2 * (world_size - 1) * message_bytes // world_size


def _time_codec(compress: Compressor, exchange: Exchange) -> tuple[float, float]:
    """Return the seconds, and the bytes sent by this rank, of one bucket of _PROBE_NUMEL elements."""
    state = make_state(compress, exchange)
    shape = 1024, _PROBE_NUMEL // 1024  # one matrix
    flat, parameter = (torch.ones(size, dtype=torch.float32, device="cpu") for size in (_PROBE_NUMEL, shape))
    bucket = Bucket(flat, [(shape, (shape[1], 1), 0)], [parameter])
    seconds = _median_of(lambda: state.average(bucket))
    before = state.codec.sent_bytes
    state.average(bucket)
    return seconds, float(state.codec.sent_bytes - before)
