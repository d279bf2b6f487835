"""Bytes that a forward leaves for the backward, of a transformer in eager mode with torch's fused attention.

Per token of a layer of width h, with q and k elements of queries and of keys, an MLP of width f, and elements of e bytes:

    norm, two of them    RMSNorm of Llama: 4 h (its input) + e h (normalised) + e h (its output); LayerNorm: 2 e h
    attention            e (q + 2 k) (its inputs) + e q (its output) + 4 per head (log-sum-exp)
    MLP                  4 e f with a gate (gate, its activation, up, their product), else 2 e f

The loss keeps the logits (e per word) and their log-softmax in float32, and makes gradients of both. The count of a
layer with dropout has one byte per masked element more. After Korthikanti et al., "Reducing Activation Recomputation in
Large Transformer Models" (2022), section 4, with torch's operators in the place of Megatron's.
"""

from __future__ import annotations

from .shape import Shape


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


def _outer_bytes(shape: Shape, item: int, tp: int) -> float:
    """Return the bytes per token of the last norm, the logits and their log-softmax."""
    return _norm_bytes(shape, item) + (item + 4) * shape.vocabulary / tp if shape.has_head else 0


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
    outer = _outer_bytes(shape, item, tp) if pp == 1 else 0
    return round(tokens * (kept * in_flight + outer))


def workspace_bytes(shape: Shape, tokens: int, item: int, tp: int = 1) -> int:
    """Return the bytes of the largest temporary: gradients of the logits, in float32 and as computed."""
    return round(tokens * (4 + item) * shape.vocabulary / tp) if shape.has_head else 0
