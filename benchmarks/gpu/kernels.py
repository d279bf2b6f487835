"""Benchmark of kernels against a device-to-device copy of as many bytes, which is the card's ceiling, and against
torch's kernels.

For each float32 element AdamW reads parameter, gradient and two moments and writes three of them: 28 bytes. A cast to
16 bits moves 6 bytes per element, a record of 8-bit blocks 5 bytes and its scale, a copy of n bytes 2 n. Each result is
compared with torch's before it is timed.
"""

from __future__ import annotations

from typing import Any

import shardwright as sw
import torch
from shardwright import _engine
from shardwright_tools.gpu_check.place import Gpu
from turns import Row, Sizes, row, take_turns

_ADAMW_BYTES, _CAST_BYTES = 28, 6
_BLOCK, _BITS = 256, 8
_OF_COPY, _OF_COPY_ADAMW = 1 / 0.85, 1 / 0.9


class _Copies:
    """Copies that move a given number of bytes, in shared buffers."""

    def __init__(self, where: Gpu, most_bytes: int) -> None:
        size = most_bytes // 8 + 1
        self._from, self._to = (where.memory(torch.zeros(size, dtype=torch.float32)) for _ in range(2))

    def of(self, moved_bytes: int) -> torch.Tensor:
        numel = moved_bytes // 8
        return self._to[:numel].copy_(self._from[:numel])


def kernel_rows(where: Gpu, sizes: Sizes) -> list[Row]:
    copies = _Copies(
        where, max(_ADAMW_BYTES * sizes.kernel_numel, 8 * sizes.copies * sizes.copy_numel, 4 * sizes.norm_numel)
    )
    wrapped = sw.DistributedDataParallel(where.put(torch.nn.Linear(1, 1)))
    link = wrapped._engine.replica.link
    rows = _pack_and_norm(where, sizes, link, copies)
    rows += _adamw(where, sizes, copies)
    return rows + _cast_and_quantise(where, sizes, link, copies)


def _pack_and_norm(where: Gpu, sizes: Sizes, link: Any, copies: _Copies) -> list[Row]:
    sources = [where.memory(torch.randn(sizes.copy_numel)) for _ in range(sizes.copies)]
    targets = [where.memory(torch.empty(sizes.copy_numel)) for _ in sources]
    pairs = [(t.data_ptr(), s.data_ptr(), s.numel() * 4) for s, t in zip(sources, targets)]
    large = where.memory(torch.randn(sizes.norm_numel))
    link.comm.pack(pairs, link.current_stream())
    assert all(torch.equal(s, t) for s, t in zip(sources, targets))
    assert abs(_engine.norm_value([link.norm_sum([large])]) - float(large.double().norm())) <= 1e-9 * max(
        sizes.norm_numel, 1000
    )
    moved = 8 * sizes.copies * sizes.copy_numel
    taken = take_turns(
        where,
        {
            "pack": lambda: link.comm.pack(pairs, link.current_stream()),
            "foreach": lambda: torch._foreach_copy_(targets, sources),
            "copy": lambda: copies.of(moved),
            "norm": lambda: link.norm_sum([large]),
            "torch norm": lambda: float(torch.linalg.vector_norm(large)),
            "norm's copy": lambda: copies.of(4 * sizes.norm_numel),  # moves as many bytes as a norm reads
        },
        sizes.rounds,
        sizes.repeat,
    )
    packed, normed = (
        f"pack {sizes.copies} x {sizes.copy_numel * 4 >> 10} KiB",
        f"exact norm of {sizes.norm_numel >> 18} MiB, host waits",
    )
    return [
        row(packed, taken["pack"], taken["copy"], "one copy", goal=_OF_COPY),
        row(packed, taken["pack"], taken["foreach"], "torch._foreach_copy_"),
        row(normed, taken["norm"], taken["norm's copy"], "copy of as many bytes"),
        row(normed, taken["norm"], taken["torch norm"], "vector_norm and .item()"),
    ]


def _adamw(where: Gpu, sizes: Sizes, copies: _Copies) -> list[Row]:
    each = sizes.kernel_numel // sizes.adam_parameters
    arms, parameters = {}, {}
    for name, make in (("ours", sw.optim.AdamW), ("torch", lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=True))):
        generator = torch.Generator().manual_seed(0)
        made = [torch.randn(each, generator=generator) for _ in range(2 * sizes.adam_parameters)]
        parameters[name] = [torch.nn.Parameter(where.memory(value)) for value in made[::2]]
        for parameter, gradient in zip(parameters[name], made[1::2]):
            parameter.grad = where.memory(gradient)
        optimizer = make(parameters[name], lr=1e-3)
        arms[name] = optimizer.step
        for _ in range(3):
            optimizer.step()
    for ours, theirs in zip(parameters["ours"], parameters["torch"]):
        torch.testing.assert_close(ours.detach(), theirs.detach(), rtol=1e-5, atol=1e-6)
    arms["copy"] = lambda: copies.of(_ADAMW_BYTES * each * sizes.adam_parameters)
    taken = take_turns(where, arms, sizes.rounds, sizes.repeat)
    case = f"AdamW, {sizes.adam_parameters} x {each * 4 >> 20} MiB"
    return [
        row(case, taken["ours"], taken["copy"], "copy of as many bytes", goal=_OF_COPY_ADAMW),
        row(case, taken["ours"], taken["torch"], "torch AdamW(fused=True)", goal=1.0),
    ]


def _cast_and_quantise(where: Gpu, sizes: Sizes, link: Any, copies: _Copies) -> list[Row]:
    numel = sizes.kernel_numel
    wide = where.memory(torch.randn(numel))
    half = where.memory(torch.zeros(numel, dtype=torch.bfloat16))
    record = _engine.block_record_bytes(_BLOCK, _BITS)
    records = where.memory(torch.zeros(-(-numel // _BLOCK) * record, dtype=torch.uint8))
    back = where.memory(torch.zeros(numel))
    coded = [(records.data_ptr(), wide.data_ptr(), 0, numel)]
    decoded = [(back.data_ptr(), 0, records.data_ptr(), 0, numel)]

    def narrow() -> None:
        given = (half.data_ptr(), "bfloat16", wide.data_ptr(), "float32", numel, 1.0)
        _engine.device_cast(link.comm, *given, link.current_stream())

    def widen() -> None:
        given = (back.data_ptr(), "float32", half.data_ptr(), "bfloat16", numel, 1.0)
        _engine.device_cast(link.comm, *given, link.current_stream())

    def quantise() -> None:
        _engine.device_block_encode(link.comm, _BLOCK, _BITS, coded, link.current_stream())

    def restore() -> None:
        _engine.device_block_decode(link.comm, _BLOCK, _BITS, decoded, 0, link.current_stream())

    narrow()
    assert torch.equal(half, wide.bfloat16())
    widen()
    assert torch.equal(back, half.float())
    quantise()
    restore()
    assert (
        float((back - wide).abs().max()) <= float(wide.abs().max()) / (2 * 127) * 1.01
    )  # half a code of the largest block
    cast, code = _CAST_BYTES * numel, 4 * numel + records.numel()
    arms = {"narrow": narrow, "widen": widen, "quantise": quantise, "restore": restore}
    arms |= {
        "torch": lambda: half.copy_(wide),
        "cast's copy": lambda: copies.of(cast),
        "code's copy": lambda: copies.of(code),
    }
    taken = take_turns(where, arms, sizes.rounds, sizes.repeat)
    case = f"of {numel * 4 >> 20} MiB"
    return [
        row(f"cast to bfloat16 {case}", taken["narrow"], taken["cast's copy"], "copy of as many bytes", goal=_OF_COPY),
        row(f"cast to bfloat16 {case}", taken["narrow"], taken["torch"], "torch copy_"),
        row(f"cast from bfloat16 {case}", taken["widen"], taken["cast's copy"], "copy of as many bytes", goal=_OF_COPY),
        row(f"8-bit blocks {case}", taken["quantise"], taken["code's copy"], "copy of as many bytes", goal=_OF_COPY),
        row(
            f"8-bit blocks back {case}", taken["restore"], taken["code's copy"], "copy of as many bytes", goal=_OF_COPY
        ),
    ]
