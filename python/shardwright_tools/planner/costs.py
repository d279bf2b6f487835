"""Seconds and bytes of a simulated step's parts: units, rings, carriers, folds, and buckets as the engine cuts them."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from .calibration import Link, Rates
from .choose import Work
from .machine import Machine
from .memory import CAP_BYTES, OPTIMIZERS, PRECISIONS, SLICED_CAP_BYTES, Precision, cut_buckets
from .shape import PlanError, Shape

_MIB = 1 << 20
#: caps of the first buckets between hosts, so that the wire starts sooner
_FIRST_CAPS = (_MIB, 2 * _MIB, 4 * _MIB)
#: below this rate, GB/s, carriers pack float32 means to this part of their bytes
_PACKS_BELOW, _PACKED = 0.3, 0.88
#: compressor -> (bytes per element on the wire, bytes per element that its passes move)
COMPRESSORS = {
    "fp16": (2.0, 12.0),
    "bf16": (2.0, 12.0),
    "int8": (1.125, 16.0),
    "int4": (0.625, 20.0),
    "powersgd": (0.0, 24.0),
}


@dataclasses.dataclass(frozen=True)
class Run:
    """The configuration to simulate, beside the degrees in Work."""

    zero: int
    checkpointed: bool = False
    prefetch: int = 1  # units gathered ahead at zero=3 on GPUs
    compress: str | None = None  # a key of COMPRESSORS; "powersgd:8" has rank 8
    chunks: int = 1  # virtual stages of each pipeline rank
    private: bool = False  # CPU ranks that gather units from slices at zero=3
    stragglers: Mapping[int, float] = dataclasses.field(default_factory=dict)  # rank -> times as slow
    cap_bytes: int = CAP_BYTES
    averages_late: bool | None = None  # all means after the last backward; None: as the engine does


class Piece(NamedTuple):
    """A unit as a rank runs it: seconds per micro-batch, and what the rank has of it."""

    forward_s: float
    backward_s: float
    path_s: tuple[float, float]  # tensor and context parallelism in forward and backward, which nothing hides
    parameter_bytes: float
    tensors: tuple[int, ...]  # elements of each gradient
    is_outermost: bool = False


def ring(size: float, ranks: int, per_host: int, inside: Link, between: Link, part: float = 1.0) -> tuple[float, float]:
    """Return (latency, transfer) seconds of a reduce-scatter or an all-gather of `size` bytes.

    Each host has `per_host` of the ranks, whose cards have `part` of its bandwidth.
    """
    hosts = -(-ranks // per_host)
    crossings = hosts - 1
    latency = (ranks - 1 - crossings) * inside.latency_us + crossings * between.latency_us
    rate = inside.bandwidth if hosts == 1 else min(inside.bandwidth, between.bandwidth * part)
    return latency * 1e-6, (ranks - 1) / ranks * size / (rate * 1e9)


def tree_latency(ranks: int, per_host: int, inside: Link, between: Link) -> float:
    """Return the latency of an all-reduce over a tree of hosts, each a chain: up and down."""
    hosts = -(-ranks // per_host)
    return 2e-6 * ((per_host - 1) * inside.latency_us + math.ceil(math.log2(hosts)) * between.latency_us)


@dataclasses.dataclass(frozen=True)
class Costs:
    shape: Shape
    machine: Machine
    work: Work
    run: Run
    rates: Rates

    @functools.cached_property
    def ranks(self) -> int:
        """Ranks that average gradients."""
        return self.machine.world // (self.work.tp * self.work.pp)

    @property
    def on_hosts(self) -> bool:
        return not self.machine.on_gpu

    @property
    def crosses(self) -> bool:
        """CPU ranks of several hosts: carriers exchange what their hosts have folded."""
        return self.on_hosts and self.machine.hosts > 1

    @property
    def in_units(self) -> bool:
        return self.run.zero == 3 and not self.on_hosts

    @property
    def hides_gathers(self) -> bool:
        """True if updated slices are gathered behind the next forward, which begins with casts under a precision policy."""
        return self.run.prefetch > 0 and not self._precision.copy

    @property
    def is_late(self) -> bool:
        if self.run.averages_late is not None:
            return self.run.averages_late
        compressed = self.run.compress is not None and not self.crosses
        return self.work.pp > 1 or compressed  # PipelineStage averages after the last backward

    # units ---------------------------------------------------------------------------------------------------------

    def pieces(self) -> list[list[Piece]]:
        """Return the units of each stage of the pipeline, chunk by chunk: the embedding, layers, the head."""
        shape, work = self.shape, self.work
        outer, *inner = shape.units
        tokens = work.micro_batch * work.sequence / work.cp
        scores = 2.0 * work.sequence * shape.heads * shape.head_width  # causal: half of two products
        head = shape.vocabulary * shape.width if shape.has_head else 0
        is_tied = head and outer.numel < 2 * head
        top = 0 if is_tied and work.pp == 1 else head
        expert = shape.active / shape.experts if shape.experts else 1.0
        # (operations, gradients' elements) of each
        parts: list[tuple[float, tuple[int, ...]]] = [
            (0.0 if head or inner else 2.0 * outer.numel, (outer.numel - top,))
        ]
        for unit in inner:
            active = unit.numel - unit.experts * (1 - expert)
            mine = tuple(-(-each // work.tp) for each in unit.tensors)
            parts += [(2.0 * active + scores, mine)] * unit.count
        parts.append((2.0 * head, (top,) if top else ()))
        if work.tp > 1:
            parts[0], parts[-1] = (
                (n, tuple(-(-each // work.tp) for each in mine)) for n, mine in (parts[0], parts[-1])
            )
        forward, ratio = self._speed(sum(operations for operations, _ in parts) * tokens / work.tp)
        total = sum(operations for operations, _ in parts) or 1.0
        item = self._precision.parameter
        if self._precision.copy and self.in_units:  # units are gathered as they compute
            item = self._precision.copy
        made = []
        for index, (operations, mine) in enumerate(parts):
            is_outermost = index in (0, len(parts) - 1)
            held = sum(mine) * item
            if is_outermost and work.pp == 1:  # one unit, gathered at its first use
                held = sum(parts[0][1] + parts[-1][1]) * item if index == 0 else 0
            seconds = forward * operations / total
            path = (0.0, 0.0) if is_outermost else self._path_s
            made.append(Piece(seconds, seconds * ratio, path, held, mine, is_outermost))
        return self._cut(made)

    def _speed(self, operations: float) -> tuple[float, float]:
        """Return the seconds of a whole model's forward, and how many times as long its backward takes."""
        if self.rates.compute is not None:
            forward, backward, _ = self.rates.compute
            return forward, backward / forward
        if self.machine.peak is None:
            raise PlanError("--simulate needs --peak, the TFLOP/s of a rank, or a --calibration with compute")
        return operations / (self.machine.peak * 1e12 * self.work.mfu), 2.0 + self.run.checkpointed

    def _cut(self, pieces: list[Piece]) -> list[list[Piece]]:
        """Cut layers into stages of equal numbers; those in the middle take what does not divide."""
        stages, layers = self.work.pp * self.run.chunks, len(pieces) - 2
        sizes = [layers // stages] * stages
        for stage in sorted(range(stages), key=lambda s: abs(2 * s - stages + 1))[: layers % stages]:
            sizes[stage] += 1
        ends = [1, *(1 + end for end in itertools.accumulate(sizes))]
        ends[0], ends[-1] = 0, len(pieces)
        return [pieces[first:end] for first, end in itertools.pairwise(ends)]

    @property
    def _precision(self) -> Precision:
        return PRECISIONS[self.work.precision]

    def _ring(self, size: float, ranks: int, per_host: int) -> tuple[float, float]:
        """Return a ring's cost; each card has its own part of a host's network, CPU ranks have all of it."""
        part = min(1.0, per_host / self.machine.ranks) if self.machine.on_gpu else 1.0
        return ring(size, ranks, per_host, self.rates.inside, self.rates.between, part)

    @functools.cached_property
    def _path_s(self) -> tuple[float, float]:
        """Return the seconds of a layer's forward and backward in which it waits for its tp and cp peers."""
        work, shape, again = self.work, self.shape, 1 + self.run.checkpointed
        forward = backward = 0.0
        if work.tp > 1:
            size = work.micro_batch * work.sequence / work.cp * shape.width * self._precision.compute
            forward = 4 * sum(self._ring(size, work.tp, min(work.tp, self.machine.ranks)))  # two all-reduces
            backward = forward * again
        if work.cp > 1:
            size = 2 * work.micro_batch * work.sequence * shape.kv_heads * shape.head_width * self._precision.compute
            per_host = max(1, min(work.cp, self.machine.ranks // work.tp))
            once = sum(self._ring(size / work.tp, work.cp, per_host))
            forward, backward = forward + once, backward + (1 + again) * once
        return forward, backward

    @property
    def sent_s(self) -> float:
        """Return the seconds until the next stage has a micro-batch's activations, of which each tp rank sends a part."""
        work, hosts = self.work, self.machine.hosts
        size = work.micro_batch * work.sequence / work.cp * self.shape.width * self._precision.compute / work.tp
        link = self.rates.inside if hosts == 1 else self.rates.between
        part = 1 / self.machine.ranks if self.machine.on_gpu and hosts > 1 else 1.0
        return link.latency_us * 1e-6 + size / (link.bandwidth * part * 1e9)

    # means, gathers, the optimizer -----------------------------------------------------------------------------------

    def buckets(self, pieces: Sequence[Piece]) -> list[list[tuple[float, float]]]:
        """Return, for each unit of a stage, the buckets that its gradients complete: (part of its backward, bytes)."""
        run, item = self.run, self._precision.gradient
        if self.ranks == 1:
            return [[] for _ in pieces]
        slices = self.ranks if run.zero else 1
        if self.in_units:  # a bucket per unit
            sizes = cut_buckets([piece.tensors for piece in reversed(pieces)], item, 1 << 62, slices)
        else:
            sliced = self.on_hosts and run.zero >= 2
            cap = min(run.cap_bytes, SLICED_CAP_BYTES) if sliced or self.crosses else run.cap_bytes
            tensors = [numel for piece in pieces for numel in piece.tensors]
            sizes = cut_buckets([tensors], item, cap, slices, _FIRST_CAPS if self.crosses else ())
        made = [sum(piece.tensors) * item for piece in pieces]
        scale = sum(made) / (sum(sizes) or 1)  # cuts lie in gradients, without the padding
        cuts = collections.deque(zip((end * scale for end in itertools.accumulate(sizes)), sizes))
        found: list[list[tuple[float, float]]] = []
        begin = 0.0
        for size in reversed(made):
            here = []
            while cuts and size and cuts[0][0] <= begin + size * (1 + 1e-9):
                end, bucket = cuts.popleft()
                here.append((min(1.0, (end - begin) / size), float(bucket)))
            found.append(here)
            begin += size
        return found[::-1]

    def mean(self, size: float) -> tuple[float, float]:
        """Return (latency, transfer) seconds of a bucket's mean. On one host ranks only meet, and fold: fold_s."""
        passes = 2 if self.run.zero < 2 else 1
        if self.on_hosts:
            return self._carried(size, passes, is_mean=True)
        per_host = min(self.ranks, max(1, self.machine.ranks // self.work.tp))
        latency, transfer = self._ring(size * self._form, self.ranks, per_host)
        if self.run.compress is not None and per_host < self.ranks:  # slices go between all ranks, past the ring
            transfer *= per_host * (self.ranks - per_host) / (self.ranks - 1)
        latency *= passes
        if passes == 2 and self.run.compress is None:
            latency = min(latency, tree_latency(self.ranks, per_host, self.rates.inside, self.rates.between))
        return latency, passes * transfer

    def gather(self, size: float) -> tuple[float, float]:
        """Return (latency, transfer) seconds of an all-gather of `size` bytes of parameters."""
        if self.on_hosts:
            return self._carried(size, 1, is_mean=False)
        return self._ring(size, self.ranks, min(self.ranks, max(1, self.machine.ranks // self.work.tp)))

    def _carried(self, size: float, passes: int, *, is_mean: bool) -> tuple[float, float]:
        link, hosts = self.rates.between, self.machine.hosts
        if hosts == 1:
            return 0.0, 0.0
        sent = passes * (hosts - 1) / hosts * size
        if is_mean and self.run.compress is None and self._precision.gradient == 4 and link.bandwidth < _PACKS_BELOW:
            sent *= _PACKED
        elif is_mean:
            sent *= self._form
        folded = size * self.machine.ranks / (self.rates.memory * 1e9) if is_mean and self.machine.ranks > 1 else 0.0
        return passes * link.latency_us * 1e-6, max(sent / (link.bandwidth * 1e9), folded)

    def fold_s(self, size: float, passes: int) -> float:
        """Return the seconds of a rank's core for its part of a mean, or of updated slices, on a single host of CPU ranks."""
        if not self.on_hosts or self.crosses:
            return 0.0
        return passes * (self.ranks - 1) / self.ranks * size / (self.rates.inside.bandwidth * 1e9)

    def copy_s(self, size: float) -> float:
        """Return the seconds in which gradients of `size` bytes reach their bucket, and its compressor's passes."""
        passes = 1.0
        if self.run.compress is not None:
            passes += COMPRESSORS[self.run.compress.partition(":")[0]][1] / 2 / self._precision.gradient
        return passes * size / (self.rates.memory * 1e9)

    @functools.cached_property
    def _form(self) -> float:
        """Bytes on the wire for each byte of gradients."""
        if self.run.compress is None:
            return 1.0
        name, _, rank = self.run.compress.partition(":")
        if name != "powersgd":
            return COMPRESSORS[name][0] / self._precision.gradient
        tensors = [each for unit in self.shape.units for each in unit.tensors]
        kept = sum(min(each, int(rank or 4) * 2 * each**0.5) for each in tensors)  # as if matrices were square
        return 4 * kept / sum(tensors) / self._precision.gradient

    def optimizer_s(self, numel: int) -> float:
        """Return the seconds of a step over a rank's slice of `numel` elements."""
        slices = self.ranks if self.run.zero else 1
        if self.rates.compute is not None:
            return self.rates.compute[2] * numel / self.shape.numel / slices
        moved = self._precision.gradient + 2 * (OPTIMIZERS[self.work.optimizer] + max(4, self._precision.master))
        return numel / slices * (moved + self._precision.copy) / 2 / (self.rates.memory * 1e9)
