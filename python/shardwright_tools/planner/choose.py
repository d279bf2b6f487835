"""The table of configurations, the chosen one with its reason, and the nearest one that does not fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from shardwright.layout.rank_memory import Memory

from .machine import Machine, shown_bytes
from .memory import OPTIMIZERS, PRECISIONS, activation_bytes, state_of, workspace_bytes
from .shape import PlanError, Shape

#: bytes per rank that the context of a GPU and NCCL's communicators take; on CPUs the interpreter and torch
_RUNTIME_GPU, _RUNTIME_SECOND_COMMUNICATOR, _RUNTIME_CPU = 1_500_000_000, 600_000_000, 250_000_000
#: part of the memory that is planned for: allocators fragment
_USABLE = 0.95
_BUBBLE_MOST, _MICRO_BATCHES_PER_STAGE = 0.20, 4


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of each rank: sequences per forward, tokens per sequence, forwards per step, and how it is computed."""

    micro_batch: int = 1
    sequence: int = 2048
    accumulate: int = 1
    tokens: int | None = None  # of the whole run
    optimizer: str = "adamw"
    precision: str = "bf16"
    mfu: float = 0.4  # the part of the peak rate that training reaches
    tp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1


@dataclasses.dataclass(frozen=True)
class Candidate:
    zero: int
    offload: str | None
    checkpointed: bool
    tp: int
    pp: int
    memory: Memory
    fits: bool
    over: int  # bytes beyond the memory, negative if it fits
    shared: bool = False
    homes: bool = False  # parameters lie where the state does
    steps: bool = False  # with step_in_backward=True

    @property
    def offload_value(self) -> str:
        """Return the text of wrap's offload=."""
        place = f'"{self.offload}"'
        return f'{{"parameters": {place}, "optimizer": {place}}}' if self.homes else place

    @property
    def label(self) -> str:
        parts = [f"zero={self.zero}"]
        if self.offload:
            what = "parameters and state in " if self.homes else "offload="
            parts.append(f'{what}"{self.offload}"')
        if self.checkpointed:
            parts.append("activation checkpointing")
        if self.steps:
            parts.append("step_in_backward=True")
        parts += [f"{name}={value}" for name, value in (("tp", self.tp), ("pp", self.pp)) if value > 1]
        return ", ".join(parts)


@dataclasses.dataclass(frozen=True)
class Choice:
    chosen: Candidate
    reason: str
    nearest: Candidate | None  # the last cheaper configuration that does not fit
    notes: list[str]
    seconds: dict[str, float]  # of a step: computation, communication, the part of it that computation cannot hide
    days: float | None
    global_batch_tokens: int


def _candidate(
    shape: Shape, machine: Machine, work: Work, zero: int, offload: str | None, checkpointed: bool, tp: int, pp: int,
    homes: bool = False, steps: bool = False,
) -> Candidate:  # fmt: skip
    precision = PRECISIONS[work.precision]
    ranks = machine.world // (tp * pp)
    shared = zero == 3 and not machine.on_gpu and machine.hosts == 1 and not offload
    held = state_of(
        shape,
        zero=zero,
        ranks=ranks,
        host_ranks=max(1, machine.ranks // (tp * pp)),
        precision=precision,
        optimizer=work.optimizer,
        on_gpu=machine.on_gpu,
        offload=offload,
        homes=homes,
        shared=shared,
        steps=steps,
        tp=tp,
        pp=pp,
        ep=work.ep,
    )
    tokens = -(-work.micro_batch * work.sequence // work.cp)
    kept = activation_bytes(
        shape, tokens, precision.compute, checkpointed=checkpointed, tp=tp, pp=pp, micro_batches=work.accumulate
    )
    runtime = _RUNTIME_GPU + (_RUNTIME_SECOND_COMMUNICATOR if zero == 3 else 0) if machine.on_gpu else _RUNTIME_CPU
    workspace = workspace_bytes(shape, tokens, precision.compute, tp) if kept else 0
    memory = dataclasses.replace(held, activations=kept or 0, workspace=workspace, runtime=runtime)
    over = memory.total - int(_USABLE * machine.memory)
    return Candidate(zero, offload, checkpointed, tp, pp, memory, over <= 0, over, shared, homes, steps)


def candidates(shape: Shape, machine: Machine, work: Work) -> list[Candidate]:
    """Return every stage with and without offload and activation checkpointing, at the degrees of `work`."""
    check(shape, machine, work)
    return [
        _candidate(shape, machine, work, zero, offload, checkpointed, work.tp, work.pp, homes)
        for zero in (0, 1, 2, 3)
        for offload in (None, *_offloads(machine, work))
        for homes in (False, True)[: 1 + (offload is not None and _may_leave(zero, work))]
        for checkpointed in (False, True)[: 1 + shape.is_transformer]
    ]


def _ladder(shape: Shape, machine: Machine, work: Work) -> Iterator[Candidate]:
    """Yield configurations, the cheapest in time first: stages, then recomputation, then offload, then more degrees.

    Before offload come steps in the backward, which cost less time than recomputation, but exclude clipping by the norm.
    """
    degrees = [(work.tp, work.pp)]
    if shape.is_transformer and work.tp == work.pp == 1 and machine.on_gpu:
        degrees += [(tp, 1) for tp in (2, 4, 8) if _may_slice(shape, machine, tp, 1)]
        most = degrees[-1][0]
        degrees += [(most, pp) for pp in (2, 4, 8, 16) if _may_slice(shape, machine, most, pp)]
    for tp, pp in degrees:
        for checkpointed in (False, True)[: 1 + shape.is_transformer]:
            for zero in (0, 1, 2, 3):
                yield _candidate(shape, machine, work, zero, None, checkpointed, tp, pp)
    for zero in (0, 1, 2, 3) if not machine.on_gpu and work.accumulate == 1 else ():
        yield _candidate(shape, machine, work, zero, None, shape.is_transformer, work.tp, work.pp, steps=True)
    for offload in _offloads(machine, work):
        for zero, homes in ((2, False), (3, False), (3, True))[: 2 + _may_leave(3, work)]:
            yield _candidate(shape, machine, work, zero, offload, shape.is_transformer, work.tp, work.pp, homes)


def _offloads(machine: Machine, work: Work) -> tuple[str, ...]:
    """Return the places for state beside the rank's memory: optimizers of sw.optim can use one."""
    if not work.optimizer.startswith(("adam", "sgd")):
        return ()
    return ("cpu",) if machine.on_gpu else ("nvme:/tmp",)


def _may_leave(zero: int, work: Work) -> bool:
    """Return True if parameters can be at home elsewhere: private zero=3, whose ranks only average gradients."""
    return zero == 3 and work.tp * work.pp * work.cp * work.ep == 1


def _may_slice(shape: Shape, machine: Machine, tp: int, pp: int) -> bool:
    fits = machine.ranks % tp == 0 and machine.world % (tp * pp) == 0 and shape.layers >= pp
    return fits and shape.heads % tp == 0 and shape.kv_heads % tp == 0 and shape.inner % tp == 0


def check(shape: Shape, machine: Machine, work: Work) -> None:
    degrees = {"tp": work.tp, "pp": work.pp, "cp": work.cp, "ep": work.ep}
    for name, value in degrees.items():
        if value < 1:
            raise PlanError(f"{name} must be at least 1, got {value}")
    if machine.world % (work.tp * work.pp * work.cp):
        raise PlanError(
            f"tp {work.tp} x pp {work.pp} x cp {work.cp} must divide {machine.hosts} hosts x {machine.ranks} ranks = {machine.world}"
        )
    if work.tp * work.pp * work.cp * work.ep > 1 and not shape.is_transformer:
        raise PlanError("tp, pp, cp and ep need a config.json or --layers and --width, got a module")
    for name, size in (("heads", shape.heads), ("kv heads", shape.kv_heads), ("the MLP's inner width", shape.inner)):
        if work.tp > 1 and size % work.tp:
            raise PlanError(f"tp must divide {name}, got tp {work.tp} and {size}")
    if work.pp > 1 and work.pp > shape.layers:
        raise PlanError(f"pp must be at most the number of layers, {shape.layers}, got {work.pp}")
    if work.cp > 1 and work.sequence % work.cp:
        raise PlanError(f"cp must divide the sequence, got cp {work.cp} and {work.sequence} tokens")


def choose(shape: Shape, machine: Machine, work: Work) -> Choice:
    """Return the first configuration of the ladder that fits, or the one that is nearest to fitting."""
    check(shape, machine, work)
    if work.precision not in PRECISIONS:
        raise PlanError(f"precision must be one of {', '.join(PRECISIONS)}, got {work.precision!r}")
    tried: list[Candidate] = []
    for each in _ladder(shape, machine, work):
        tried.append(each)
        if each.fits:
            break
    chosen = tried[-1] if tried[-1].fits else min(tried, key=lambda each: each.over)
    cheaper = [each for each in tried if each is not chosen]
    nearest = min(cheaper, key=lambda each: each.over, default=None)
    seconds, days, batch = _times(shape, machine, work, chosen)
    notes = [*_notes(shape, machine, work, chosen, seconds)]
    same = (work, 3, chosen.offload, chosen.checkpointed, chosen.tp, chosen.pp, chosen.homes, chosen.steps)
    more = (dataclasses.replace(machine, hosts=machine.hosts << k) for k in range(1, 9))
    enough = None if chosen.fits else next((each.hosts for each in more if _candidate(shape, each, *same).fits), None)
    reason = _reason(chosen, machine, enough)
    return Choice(chosen, reason, nearest, notes, seconds, days, batch)


_BECAUSE = {
    0: "the whole state fits on each rank, so gradients are averaged and nothing is gathered",
    1: "the optimizer's state is the largest part, and slicing it costs one gather of parameters per step",
    2: "state and gradients fit as slices; parameters stay whole, so no forward waits for a gather",
    3: "parameters fit only as slices; each unit is gathered before it runs",
}


def _reason(chosen: Candidate, machine: Machine, enough: int | None) -> str:
    memory = shown_bytes(machine.memory)
    if not chosen.fits:
        need = shown_bytes(chosen.memory.total)
        return (
            f"Nothing fits: {chosen.label} is nearest with {need} per rank, {shown_bytes(chosen.over)} over "
            f"{int(100 * _USABLE)} % of {memory}. {_remedy(chosen, enough)}"
        )
    text = f"{chosen.label}: {_BECAUSE[chosen.zero]}"
    if chosen.checkpointed:
        text += "; activations fit only if layers are computed again in the backward (about a third more time)"
    if chosen.steps:
        text += "; gradients never stand at once, as the optimizer steps in the backward: no clipping by the norm"
    if chosen.tp > 1:
        text += f"; matrices are sliced over {chosen.tp} ranks of a host, where the link is fastest"
    if chosen.pp > 1:
        text += f"; layers are cut into {chosen.pp} stages"
    if chosen.offload:
        what = "parameters and the optimizer's state leave" if chosen.homes else "the optimizer's state leaves"
        text += f"; {what} the rank's memory"
    return f"{text}. It takes {shown_bytes(chosen.memory.total)} of {memory} per rank."


def _remedy(nearest: Candidate, enough: int | None) -> str:
    memory = nearest.memory
    parts = [
        (memory.activations, "Activations are the largest part: use a smaller micro-batch, a shorter sequence or cp."),
        (memory.units, "Whole units are the largest part: cut them smaller with units=, or use tp."),
        (
            memory.model_state,
            f"Model state is the largest part: use more ranks, which each hold less of it; {enough} hosts are enough.",
        ),
    ]
    # more ranks do not help what a rank holds whole
    return max(parts if enough else parts[:2], key=lambda part: part[0])[1]


def _times(shape: Shape, machine: Machine, work: Work, chosen: Candidate) -> tuple[dict[str, float], float | None, int]:
    """Return the seconds of a step, days of the run, and tokens of a step. Bytes are those of docs/communication.md."""
    precision = PRECISIONS[work.precision]
    ranks = machine.world // (chosen.tp * chosen.pp)
    data = ranks // work.cp
    batch = data * work.micro_batch * work.sequence * work.accumulate
    numel = shape.numel / (chosen.tp * chosen.pp)
    rate = (machine.inside if machine.hosts == 1 else machine.between) * 1e9
    share = (ranks - 1) / ranks
    means = (2.0, 2.0, 1.0, 1.0)[chosen.zero] * share * numel * precision.gradient
    item = precision.copy or precision.parameter
    gathers = 0.0 if chosen.shared else (0.0, 1.0, 1.0, 2.0 * work.accumulate)[chosen.zero] * share * numel * item
    seconds = {"communication": (means + gathers) / rate}
    if machine.peak is None:
        return seconds, None, batch
    flops = 6.0 * shape.active_numel * batch * (4 / 3 if chosen.checkpointed else 1.0)
    compute = flops / (machine.world * machine.peak * 1e12 * work.mfu)
    bubble = (chosen.pp - 1) / (work.accumulate + chosen.pp - 1)
    compute /= 1 - bubble
    backward = compute * 2 / 3 / work.accumulate  # what one backward can hide
    hidden = min(means / rate, backward) + min(gathers / rate, compute if chosen.zero == 3 else compute / 3)
    seconds |= {"compute": compute, "exposed": max(0.0, (means + gathers) / rate - hidden)}
    days = None if work.tokens is None else work.tokens / batch * (compute + seconds["exposed"]) / 86400
    return seconds, days, batch


def _notes(shape: Shape, machine: Machine, work: Work, chosen: Candidate, seconds: dict[str, float]) -> Iterator[str]:
    if chosen.pp > 1:
        bubble = (chosen.pp - 1) / (work.accumulate + chosen.pp - 1)
        enough = next(m for m in range(1, 10_000) if (chosen.pp - 1) / (m + chosen.pp - 1) <= _BUBBLE_MOST)
        if bubble > _BUBBLE_MOST:
            yield (
                f"{100 * bubble:.0f} % of the pipeline is idle ((pp - 1) / (micro-batches + pp - 1)), above 20 %: use at least "
                f"{enough} micro-batches per step"
            )
        if work.accumulate < _MICRO_BATCHES_PER_STAGE * chosen.pp:
            yield (
                f"{work.accumulate} micro-batches for {chosen.pp} stages, fewer than {_MICRO_BATCHES_PER_STAGE} per stage: "
                f"use {_MICRO_BATCHES_PER_STAGE * chosen.pp}"
            )
        if shape.layers % chosen.pp:
            yield (
                f"{shape.layers} layers do not divide by {chosen.pp} stages: give the first and last stage fewer layers, since "
                "they also hold the embedding and the head"
            )
    if chosen.tp > machine.ranks:
        yield (
            f"tp={chosen.tp} crosses hosts of {machine.ranks} ranks: each layer then waits twice for {machine.between:g} GB/s "
            f"instead of {machine.inside:g}; keep tp at {machine.ranks} or less"
        )
    if work.precision == "fp16" and machine.has_bf16:
        yield "fp16 needs loss scaling, and this device has bfloat16, which does not: use --precision bf16"
    if work.precision.startswith("bf16") and not machine.has_bf16:
        yield f"{machine.gpu} has no bfloat16: use --precision fp16 with a GradScaler"
    if "exposed" in seconds and seconds["exposed"] > 0.1 * seconds["compute"]:
        more = 1 + round(seconds["communication"] / (2 / 3 * seconds["compute"] / work.accumulate))
        yield (
            f"communication-bound: {seconds['exposed']:.3g} s of {seconds['communication']:.3g} s of communication cannot hide "
            f"behind {seconds['compute']:.3g} s of computation; accumulate {more} micro-batches, or compress gradients "
            "(compress=sw.Bf16() halves the bytes; sw.PowerSGD(4) or sw.DiLoCo for slow links)"
        )
    elif "exposed" in seconds:
        yield f"compute-bound: {seconds['communication']:.3g} s of communication hide behind {seconds['compute']:.3g} s of computation"
    if 0 < shape.context < work.sequence:
        yield f"a sequence of {work.sequence} tokens is longer than the model's context of {shape.context}"
    if not shape.is_transformer:
        yield "activations are not counted: the module is no known transformer, so leave room for them"
    whole = shape.numel * PRECISIONS[work.precision].parameter // (chosen.tp * chosen.pp)
    if chosen.zero == 3 and whole > machine.memory:
        yield (
            f"the module has {shown_bytes(whole)}, more than a rank: build it on the meta device and pass weights= or init= to sw.wrap, "
            "so that no rank holds it whole (docs/large-models.md)"
        )
    if chosen.homes and machine.on_gpu:
        form = PRECISIONS[work.precision]
        item = form.parameter + form.gradient + form.master + OPTIMIZERS[work.optimizer]
        yield f"host memory holds {shown_bytes(shape.numel * item // machine.world)} of each rank: slices, their gradients, the state"
    if machine.on_gpu:
        yield "no GPU has run this code yet: bytes on GPUs follow from the layout, not from a measurement"


def as_dict(choice: Candidate) -> dict[str, Any]:
    found = dataclasses.asdict(choice)
    found["memory"] |= {"model_state": choice.memory.model_state, "total": choice.memory.total}
    return {"configuration": choice.label, **found}
