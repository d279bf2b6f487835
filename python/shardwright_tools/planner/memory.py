"""Bytes per rank of a model's state, as in describe(), and those that a forward leaves for the backward.

Activations are of a transformer in eager mode with torch's fused attention. Per token of a layer of width h, with q and
k elements of queries and of keys, an MLP of width f, and elements of e bytes:

    norm, two of them    RMSNorm of Llama: 4 h (its input) + e h (normalised) + e h (its output); LayerNorm: 2 e h
    attention            e (q + 2 k) (its inputs) + e q (its output) + 4 per head (log-sum-exp)
    MLP                  4 e f with a gate (gate, its activation, up, their product), else 2 e f

The loss keeps the logits (e per word) and their log-softmax in float32, and makes gradients of both. The count of a
layer with dropout has one byte per masked element more. After Korthikanti et al., "Reducing Activation Recomputation in
Large Transformer Models" (2022), section 4, with torch's operators in the place of Megatron's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from shardwright.layout.rank_memory import Memory

from .shape import PlanError, Shape, Unit

_MIB = 1 << 20
_ALIGNMENT = 128
CAP_BYTES = 25 * _MIB
#: largest bucket on hosts at zero >= 2
SLICED_CAP_BYTES = 8 * _MIB
#: units of the private form on hosts are mapped in chunks
_CHUNK_BYTES = 2 * _MIB


@dataclasses.dataclass(frozen=True)
class Precision:
    """Bytes per element of a run's parameters, gradients, computation, masters, and copies for computation."""

    parameter: int
    gradient: int
    compute: int
    master: int
    copy: int  # made by precision=; 0 if parameters compute as they are
    call: str
    convert: str = ""


PRECISIONS = {
    "fp32": Precision(4, 4, 4, 0, 0, ""),
    "bf16": Precision(4, 4, 2, 0, 2, 'precision="bf16"'),
    "bf16-parameters": Precision(2, 2, 2, 4, 0, "", "model.to(torch.bfloat16)"),
    "fp16": Precision(4, 4, 2, 0, 2, 'precision="fp16"'),
}
#: bytes of state per element, next to masters; each is what a step of the class makes (tests compare)
OPTIMIZERS = {"adamw": 8, "adam": 8, "sgd": 0, "sgd-momentum": 4, "adagrad": 4, "rmsprop": 4}


def cut_buckets(
    groups: Iterable[Sequence[int]], item: int, cap_bytes: int, slices: int, first_caps: Sequence[int] = ()
) -> list[int]:
    """Return the bytes of each bucket as csrc/tensor/layout.c cuts them; no bucket holds parameters of two groups."""
    step = _ALIGNMENT * slices
    buckets: list[int] = []
    for group in groups:
        filled = 0
        for numel in reversed(group):
            filled = -(-filled // _ALIGNMENT) * _ALIGNMENT + numel * item
            if filled >= min([cap_bytes, *first_caps[len(buckets) : len(buckets) + 1]]):
                buckets.append(-(-filled // step) * step)
                filled = 0
        if filled:
            buckets.append(-(-filled // step) * step)
    return buckets


def gradient_bytes(
    buckets: Sequence[int], *, zero: int, slices: int, cap_bytes: int, on_gpu: bool, steps: bool = False
) -> int:
    """Return the bytes of gradient memory per rank. At zero >= 2 whole buckets pass through a ring.

    `steps`: with step_in_backward=True they do so at every stage, and slices of means lie in a ring, too.
    """
    if (zero < 2 and not steps) or not buckets:
        return sum(buckets)
    first, *rest = sorted(buckets, reverse=True)
    second = (rest[0] if rest else 0) if on_gpu else min(cap_bytes, first)
    ring = min(sum(buckets), first + second)
    if steps:
        at = end = 0
        for each in buckets:
            at = each + (0 if at + each > ring else at)
            end = max(end, at)
        return end + (end // slices if slices > 1 else 0)
    return ring + sum(each // slices for each in buckets)


def _unit_bytes(units: Sequence[Unit], numel: dict[str, int], item: int, on_gpu: bool) -> int:
    """Return the bytes of whole units: the outermost, and the inner ones that are whole at a time, largest first."""
    outer, *inner = units
    sizes = sorted((numel[unit.name] * item for unit in inner for _ in range(min(unit.count, 2))), reverse=True)
    if on_gpu:  # one runs while the next is gathered
        return numel[outer.name] * item + sum(sizes[:2])
    return sum(-(-size // _CHUNK_BYTES) * _CHUNK_BYTES for size in (numel[outer.name] * item, *sizes[:1]))


def state_of(
    shape: Shape,
    *,
    zero: int,
    ranks: int,
    host_ranks: int,
    precision: Precision,
    optimizer: str,
    on_gpu: bool,
    offload: str | None = None,
    homes: bool = False,
    shared: bool = False,
    steps: bool = False,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    cap_bytes: int = CAP_BYTES,
) -> Memory:
    """Return the bytes of a rank's model state. `ranks` average gradients; `host_ranks` of them are on one host.

    `shared`: at zero=3 on CPUs, one copy of the parameters per host instead of gathered units. `homes`: parameters lie where
    `offload` says, too; those of a GPU with their averaged gradients. `steps`: with step_in_backward=True.
    """
    if optimizer not in OPTIMIZERS:
        raise PlanError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {optimizer!r}")
    if ep > 1 and (not shape.experts or shape.experts % ep or ranks % ep):
        raise PlanError(f"ep must divide the experts ({shape.experts}) and the data-parallel ranks ({ranks}), got {ep}")

    def local(unit: Unit, tensors: Sequence[int]) -> list[int]:
        dense = unit.numel - unit.experts
        kept = dense - unit.sliced + unit.sliced / tp + unit.experts / (tp * ep)
        return [max(1, round(numel * kept / unit.numel)) if numel else 0 for numel in tensors]

    outer, *inner = shape.units
    units = [outer, *(dataclasses.replace(unit, count=-(-unit.count // pp)) for unit in inner)]
    tensors = {unit.name: local(unit, unit.tensors) for unit in units}
    numel = {name: sum(each) for name, each in tensors.items()}
    whole = sum(unit.count * numel[unit.name] for unit in units)
    groups = [tensors[unit.name] for unit in units for _ in range(unit.count)]
    cap = min(cap_bytes, SLICED_CAP_BYTES) if (zero >= 2 or steps) and not on_gpu else cap_bytes
    released = zero == 3 and not shared
    slices = ranks if zero else 1
    joined = groups if released and on_gpu else [[each for group in groups for each in group]]
    buckets = cut_buckets(joined, precision.gradient, cap, max(slices, 1))
    stepped = whole // slices
    gradients = gradient_bytes(buckets, zero=zero, slices=max(slices, 1), cap_bytes=cap, on_gpu=on_gpu, steps=steps)
    leaves = offload and (on_gpu or offload.startswith("nvme"))
    masters, moments = (0, 0) if leaves else (stepped * precision.master, stepped * OPTIMIZERS[optimizer])
    if released:
        parameters = 0 if homes else whole * precision.parameter // ranks
        item = precision.copy or precision.parameter
        held = _unit_bytes(units, numel, item, on_gpu)
        held += (
            whole * precision.copy // ranks if precision.copy and not on_gpu and not homes else 0
        )  # slices as they are gathered
    else:
        sharers = host_ranks if zero == 3 else 1
        parameters = whole * precision.parameter // sharers
        held = whole * precision.copy // sharers
    in_flight = gradients if steps else gradients - sum(each // slices for each in buckets) if zero >= 2 else 0
    return Memory(
        parameters=parameters,
        units=held,
        gradients=in_flight if homes and on_gpu else gradients,
        state=masters + moments,
        buffers=48 * _MIB if offload and offload.startswith("nvme") else 64 * _MIB if offload and on_gpu else 0,
        buckets=in_flight,
        masters=masters,
    )


def layer_bytes(shape: Shape, item: int, tp: int = 1) -> float:
    """Return the bytes per token that one layer keeps. `item`: bytes of an element as it computes."""
    queries, keys = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
    attention = item * (2 * queries + 2 * keys) + 4 * shape.heads
    attention += item * (queries + keys) if shape.view_of_qkv else 0
    attention += (4 + item) * (queries + keys) if shape.head_norms else 0
    mlp = shape.inner_kept * item * (shape.inner * max(1, shape.active) + shape.shared_inner)
    if shape.experts:  # a token's copies on the way to its experts and back, and the router's weights
        mlp += 2 * item * shape.width * shape.active + 8 * shape.experts
    return 2 * _norm_bytes(shape, item) + (attention + mlp) / tp


def _norm_bytes(shape: Shape, item: int) -> int:
    return (shape.norm_kept[0] + shape.norm_kept[1] * item) * shape.width


def activation_bytes(
    shape: Shape,
    tokens: int,
    item: int,
    *,
    checkpointed: bool = False,
    tp: int = 1,
    pp: int = 1,
    micro_batches: int = 1,
) -> int | None:
    """Return the bytes that `tokens` tokens of a micro-batch leave, on the first stage of a pipeline; None for a module
    that is no known transformer. `checkpointed`: only inputs of layers are kept, and one layer is recomputed at a time.
    """
    if not shape.is_transformer:
        return None
    layers = -(-shape.layers // pp)
    layer = layer_bytes(shape, item, tp)
    kept = layers * item * shape.width + layer if checkpointed else layers * layer
    in_flight = min(pp, micro_batches)  # 1F1B: the first stage has as many forwards ahead of its backward
    outer = 0.0  # of the last norm, the logits and their log-softmax
    if pp == 1 and shape.has_head:
        outer = _norm_bytes(shape, item) + (item + 4) * shape.vocabulary / tp
    return round(tokens * (kept * in_flight + outer))


def workspace_bytes(shape: Shape, tokens: int, item: int, tp: int = 1) -> int:
    """Return the bytes of the largest temporary: gradients of the logits, in float32 and as computed."""
    return round(tokens * (4 + item) * shape.vocabulary / tp) if shape.has_head else 0
