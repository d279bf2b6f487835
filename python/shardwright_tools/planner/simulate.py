"""A step of the engine against a simulated clock: docs/design/step_cost.md has the rules, and what is left out."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Iterator

from .calibration import Rates
from .choose import Work, check
from .costs import COMPRESSORS, Costs, Run
from .events import Clock, Group, Process, Shared, Signal, sleep, start
from .machine import Machine
from .shape import PlanError, Shape

_STEPS = 3


@dataclasses.dataclass(frozen=True)
class Simulated:
    step_s: float
    seconds: dict[str, float]  # the mean over ranks of what the step consists of
    link_busy: float  # the part of the step in which the first stage's data-parallel link is in use
    tokens_per_s: float
    tflops: float  # per rank, of 6 N and causal attention per token; recomputation does not count
    mfu: float | None
    classes: int
    events: int


def schedule(stage: int, stages: int, micro_batches: int, chunks: int = 1) -> list[tuple[str, int, int]]:
    """Return 1F1B of a pipeline's rank as (F or B, micro-batch, chunk); interleaved if it has several chunks.

    Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021), 2.2.
    """
    total, ahead = micro_batches * chunks, stages - stage - 1

    def nth(kind: str, k: int) -> tuple[str, int, int]:
        turn, rest = divmod(k, stages * chunks)
        chunk = rest // stages
        return kind, turn * stages + rest % stages, chunk if kind == "F" else chunks - 1 - chunk

    warm = min(total, 2 * ahead + (chunks - 1) * stages if chunks > 1 else ahead)
    steady = itertools.chain.from_iterable((nth("F", warm + i), nth("B", i)) for i in range(total - warm))
    return [*(nth("F", k) for k in range(warm)), *steady, *(nth("B", k) for k in range(total - warm, total))]


class _Simulation:
    def __init__(self, costs: Costs) -> None:
        self.costs, work, machine, rates = costs, costs.work, costs.machine, costs.rates
        self.clock = Clock()
        self.pieces = costs.pieces()
        replicas = costs.ranks // work.cp
        slow: dict[int, list[float]] = {}
        for rank, factor in costs.run.stragglers.items():
            stage, replica = divmod(rank // (work.tp * work.cp), replicas)
            speeds = slow.setdefault(replica, [1.0] * work.pp)
            speeds[stage] = max(speeds[stage], factor)
        found = collections.Counter(map(tuple, slow.values()))
        found[(1.0,) * work.pp] += replicas - len(slow)
        self.classes = [(speeds, count) for speeds, count in found.items() if count]
        is_short = rates.cores is not None and rates.cores < machine.ranks
        self.cores = Shared(self.clock, (rates.cores or 0.0) * machine.hosts) if is_short else None
        self.links = [Shared(self.clock, 1.0) for _ in range(work.pp)]
        load = machine.hosts * rates.between.cores
        carriers = (self.cores, load) if self.cores is not None and costs.crosses and load else None
        made = [[Group(self.clock, len(self.classes), link, carriers) for link in self.links] for _ in range(2)]
        self.means, self.gathers = made
        # every class asks the same
        self.buckets = functools.cache(lambda place: costs.buckets(self.pieces[place]))
        self.gathers_of = functools.cache(self._gathers)
        self.mean, self.gather = functools.cache(costs.mean), functools.cache(costs.gather)
        self.arrived: dict[tuple[object, ...], Signal] = collections.defaultdict(Signal)
        self.spent: dict[str, float] = collections.defaultdict(float)
        self.ends = [0.0] * _STEPS
        self.busy = [0.0] * _STEPS
        self.running = 0

    def rank(self, number: int, stage: int) -> Process:
        """Run a class's rank on one stage of a pipeline."""
        costs, run, work, (speeds, count) = self.costs, self.costs.run, self.costs.work, self.classes[number]
        weight, stages = count * work.tp * work.cp, work.pp * run.chunks
        slow = speeds[stage] * (costs.rates.turns if self.cores else 1.0)
        order = schedule(stage, work.pp, work.accumulate, run.chunks)
        closing = set({chunk: (micro, chunk) for kind, micro, chunk in order if kind == "B"}.values())
        places = range(stage, stages, work.pp)
        buckets = {place: self.buckets(place) for place in places}
        own = {(place, index): piece for place in places for index, piece in enumerate(self.pieces[place])}
        numel = sum(sum(piece.tensors) for piece in own.values())
        awaited, sizes = self.gathers_of(stage) if costs.in_units and costs.ranks > 1 else ([], [])
        posted = {"mean": 0, "gather": 0}
        step = 0

        def spend(what: str, signal: Signal) -> Iterator[Signal]:
            begin = self.clock.now
            yield signal
            if step == _STEPS - 1:
                self.spent[what] += weight * (self.clock.now - begin)

        def compute(what: str, seconds: float) -> Iterator[Signal]:
            if seconds > 0:
                ends = self.cores.use(seconds * slow, weight) if self.cores else sleep(self.clock, seconds * slow)
                yield from spend(what, ends)

        def post(kind: str, cost: tuple[float, float]) -> Signal:
            posted[kind] += 1
            return (self.means if kind == "mean" else self.gathers)[stage].post(posted[kind] - 1, *cost)

        self.running += 1
        updated: dict[tuple[int, int], Signal] = {}  # gathers of what the last step changed
        while step < _STEPS:
            gathers: list[Signal] = []
            means: list[tuple[float, Signal]] = []
            late: list[float] = []
            use = reached = -1
            for kind, micro, chunk in order:
                place = chunk * work.pp + stage
                before, behind = (place - 1, place + 1) if kind == "F" else (place + 1, place - 1)
                if 0 <= before < stages:
                    yield from spend("pipeline", self.arrived[step, number, kind, before, micro])
                pieces = list(enumerate(self.pieces[place]))
                for index, piece in pieces if kind == "F" else reversed(pieces):
                    if awaited:
                        use += 1
                        reached = max(reached, awaited[use])
                        while len(gathers) < min(len(sizes), reached + 1 + run.prefetch):
                            gathers.append(post("gather", self.gather(sizes[len(gathers)])))
                        if awaited[use] >= 0:
                            yield from spend("communication", gathers[awaited[use]])
                    elif (place, index) in updated:
                        yield from spend("communication", updated.pop((place, index)))
                    what, seconds = ("forward", piece.forward_s) if kind == "F" else ("backward", piece.backward_s)
                    if run.private and run.zero == 3 and costs.on_hosts:
                        yield from compute("communication", piece.parameter_bytes / (costs.rates.memory * 1e9))
                    done = 0.0
                    for part, size in buckets[place][index] if kind == "B" and (micro, chunk) in closing else ():
                        yield from compute(what, (part - done) * seconds + costs.copy_s(size))
                        done = part
                        if costs.is_late:
                            late.append(size)
                            continue
                        if run.zero >= 2 and not costs.on_hosts and len(means) > 1:
                            yield from spend("communication", means[-2][1])
                        means.append((size, post("mean", self.mean(size))))
                    yield from compute(what, (1 - done) * seconds)
                    if path := piece.path_s[kind == "B"]:
                        yield from spend("tensor", sleep(self.clock, path))
                if 0 <= behind < stages:
                    self.clock.after(costs.sent_s, self.arrived[step, number, kind, place, micro].fire)
            means += [(size, post("mean", self.mean(size))) for size in late]
            for size, mean in means:
                yield from spend("communication", mean)
                yield from compute("communication", costs.fold_s(size, 2 if run.zero < 2 else 1))
            yield from compute("optimizer", costs.optimizer_s(numel))
            held = sum(piece.parameter_bytes for piece in own.values())
            if run.zero and costs.ranks > 1 and costs.on_hosts:  # a barrier, and slices for other hosts
                yield from spend("communication", post("gather", self.gather(held)))
                yield from compute("communication", costs.fold_s(held, 1) if run.zero < 3 else 0.0)
            elif run.zero in (1, 2) and costs.ranks > 1:
                updated = {key: post("gather", self.gather(own[key].parameter_bytes)) for key in own}
                for key in list(updated) if not costs.hides_gathers else ():
                    yield from spend("communication", updated.pop(key))
            self.ends[step] = max(self.ends[step], self.clock.now)
            self.busy[step] = self.links[0].busy
            step += 1
        self.running -= 1

    def _gathers(self, stage: int) -> tuple[list[int], list[float]]:
        """Return the gather that each use of a unit awaits, or -1 if the unit is whole, and the bytes of all gathers.

        The outermost unit stays whole for the step, and a unit that runs twice in a row for both.
        """
        awaited: list[int] = []
        sizes: list[float] = []
        work, last, kept = self.costs.work, None, set()
        for kind, _, chunk in schedule(stage, work.pp, work.accumulate, self.costs.run.chunks):
            place = chunk * work.pp + stage
            pieces = list(enumerate(self.pieces[place]))
            for index, piece in pieces if kind == "F" else reversed(pieces):
                key = place, index
                is_whole = key in kept or key == last or not piece.parameter_bytes
                awaited.append(-1 if is_whole else len(sizes))
                sizes += [] if is_whole else [piece.parameter_bytes]
                if piece.is_outermost:
                    kept.add(key)
                else:
                    last = key
        return awaited, sizes

    def run(self) -> Simulated:
        costs, work, machine = self.costs, self.costs.work, self.costs.machine
        for number, stage in itertools.product(range(len(self.classes)), range(work.pp)):
            start(self.clock, self.rank(number, stage))
        self.clock.run()
        if self.running:
            raise RuntimeError(
                f"{self.running} simulated ranks wait for ever: the simulator's order of operations is wrong"
            )
        step_s = self.ends[-1] - self.ends[-2]
        tokens = machine.world // (work.tp * work.pp * work.cp) * work.micro_batch * work.sequence * work.accumulate
        flops = 6.0 * costs.shape.active_numel
        flops += 6.0 * costs.shape.layers * work.sequence * costs.shape.heads * costs.shape.head_width
        tflops = flops * tokens / step_s / machine.world / 1e12
        return Simulated(
            step_s=step_s,
            seconds={what: spent / machine.world for what, spent in self.spent.items() if spent > 0},
            link_busy=min(1.0, (self.busy[-1] - self.busy[-2]) / step_s),
            tokens_per_s=tokens / step_s,
            tflops=tflops,
            mfu=None if machine.peak is None else tflops / machine.peak,
            classes=len(self.classes),
            events=self.clock.count,
        )


def simulate(shape: Shape, machine: Machine, work: Work, run: Run, rates: Rates) -> Simulated:
    """Return the last of three simulated steps. Raises PlanError for a configuration that no ranks can have."""
    check(shape, machine, work)
    if run.zero not in (0, 1, 2, 3):
        raise PlanError(f"--zero must be 0, 1, 2 or 3, got {run.zero}")
    if not 0 <= run.prefetch <= 64:
        raise PlanError(f"--prefetch must be 0 to 64 units, got {run.prefetch}")
    name, _, rank = (run.compress or "fp16").partition(":")
    if name not in COMPRESSORS or (rank and (name != "powersgd" or not rank.isdecimal() or not 1 <= int(rank) <= 1024)):
        raise PlanError(
            f"--compress must be one of {', '.join(COMPRESSORS)}, or powersgd:RANK of 1 to 1024, got {run.compress!r}"
        )
    most = max(1, shape.layers // work.pp)
    if not 1 <= run.chunks <= most or (run.chunks > 1 and work.pp == 1):
        bound = f"1 to the layers of a stage, {most}" if work.pp > 1 else "1 without pp"
        raise PlanError(f"--chunks must be {bound}, got {run.chunks}")
    if run.chunks > 1 and work.accumulate % work.pp:
        raise PlanError(
            f"--accumulate must be a multiple of pp, {work.pp}, for an interleaved pipeline, got {work.accumulate} micro-batches"
        )
    for place, factor in run.stragglers.items():
        if not 0 <= place < machine.world or not 1 <= factor <= 1000:
            raise PlanError(
                f"--straggler must be RANK=FACTOR, a rank of 0 to {machine.world - 1} and a factor of 1 to 1000, got {place}={factor:g}"
            )
    return _Simulation(Costs(shape, machine, work, run, rates)).run()
