"""Bandwidths of kernels, compared with a copy that moves equally many bytes (the card's ceiling) and torch's optimizer.

For each element AdamW reads parameter, gradient and two moments and writes three of them: 28 bytes of float32. A copy
of n bytes moves 2 n. The figure is the copy's time divided by the kernel's; each row has its goal.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import shardwright as sw
import torch
from shardwright import _engine

from .report import Row, least, row

_BLOCK, _BITS, _PIECES = 256, 8, 16
_ROUNDS, _REPEAT = 9, 10
_HOST_GB_S = 45.0


def bandwidths(place: Any, rank: int, world_size: int, *, is_quick: bool) -> Iterator[Row]:
    """Run each arm alternately with its copy and compare medians."""
    numel = 1 << 10 if is_quick else 64 << 20
    link = sw.DistributedDataParallel(place.put(torch.nn.Linear(1, 1)))._engine.replica.link
    assert link is not None
    comm, stream = link.comm, link.current_stream()
    wide, back = (place.memory(torch.randn(numel, dtype=torch.float32, device="cpu")) for _ in range(2))
    half = place.memory(torch.zeros(numel, dtype=torch.bfloat16, device="cpu"))
    record_bytes = numel // _BLOCK * _engine.block_record_bytes(_BLOCK, _BITS)
    records = place.memory(torch.zeros(record_bytes, dtype=torch.uint8, device="cpu"))
    room = [place.memory(torch.zeros(14 * numel // 4, dtype=torch.float32, device="cpu")) for _ in range(2)]
    piece = 4 * numel // _PIECES
    pairs = [(back.data_ptr() + k * piece, wide.data_ptr() + k * piece, piece) for k in range(_PIECES)]

    def cast(to: torch.Tensor, source: torch.Tensor) -> Callable[[], Any]:
        names = [str(each.dtype).removeprefix("torch.") for each in (to, source)]
        given = (to.data_ptr(), names[0], source.data_ptr(), names[1], numel, 1.0)
        return lambda: _engine.device_cast(comm, *given, stream)

    coded = [(records.data_ptr(), wide.data_ptr(), 0, numel)]
    decoded = [(back.data_ptr(), 0, records.data_ptr(), 0, numel)]

    def measure(work: Callable[[], Any], moved_bytes: int) -> tuple[float, float]:
        """Return the median milliseconds of `work` and of a copy that moves `moved_bytes`."""
        left, right = (each[: moved_bytes // 8] for each in room)
        arms = (work, lambda: left.copy_(right))
        for arm in arms:
            arm()
        rounds, repeat = (1, 1) if is_quick else (_ROUNDS, _REPEAT)
        taken = [[place.milliseconds(arm, repeat) for arm in arms] for _ in range(rounds)]
        ours, copy = (statistics.median(each) for each in zip(*taken))
        return ours, copy

    def compared(case: str, work: Callable[[], Any], moved_bytes: int, goal: float) -> Row:
        ours, copy = measure(work, moved_bytes)
        note = f"{moved_bytes / ours * 1e-6:.0f} GB/s, the copy {moved_bytes / copy * 1e-6:.0f}"
        if is_quick:
            return row(case, value=copy / ours, unit="of copy", note="nothing is measured at this size")
        return least(case, copy / ours, "of copy", goal, note)

    moved = 8 * numel
    ours, _ = measure(lambda: back.copy_(wide), moved)
    yield row("copy", value=moved / ours * 1e-6, unit="GB/s")
    yield compared("PACK", lambda: comm.pack(pairs, stream), moved, 0.85)
    yield compared("CAST to bfloat16", cast(half, wide), 6 * numel, 0.85)
    yield compared("CAST from bfloat16", cast(back, half), 6 * numel, 0.85)
    code = 4 * numel + records.numel()
    yield compared(
        "QUANTIZE 8 bits", lambda: _engine.device_block_encode(comm, _BLOCK, _BITS, coded, stream), code, 0.85
    )
    yield compared(
        "DECODE 8 bits", lambda: _engine.device_block_decode(comm, _BLOCK, _BITS, decoded, 0, stream), code, 0.85
    )
    yield compared("NORM", lambda: comm.norm_sum([(wide.data_ptr(), numel, "float32")], stream), 4 * numel, 0.5)
    steps = {name: _adamw(place, numel, make) for name, make in _OPTIMIZERS.items()}
    yield compared("AdamW", steps["ours"], 28 * numel, 0.9)
    torchs, _ = measure(steps["torch"], 28 * numel)
    ours, _ = measure(steps["ours"], 28 * numel)
    case = "AdamW beside torch's"
    yield row(case, value=torchs / ours) if is_quick else least(case, torchs / ours, "times as fast", 1.0)
    pinned = place.pinned(4 * numel)
    ours, _ = measure(lambda: pinned.copy_(wide, non_blocking=True), 8)
    rate = 4 * numel / ours * 1e-6
    case = "copy to the host"
    yield row(case, value=rate, unit="GB/s") if is_quick else least(case, rate, "GB/s", _HOST_GB_S)


_OPTIMIZERS: dict[str, Callable[[list[torch.nn.Parameter]], Any]] = {
    "ours": lambda parameters: sw.optim.AdamW(parameters, lr=1e-3),
    "torch": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
}


def _adamw(place: Any, numel: int, make: Callable[[list[torch.nn.Parameter]], Any]) -> Callable[[], Any]:
    generator = torch.Generator().manual_seed(0)
    made = [
        torch.randn(numel // _PIECES, dtype=torch.float32, device="cpu", generator=generator)
        for _ in range(2 * _PIECES)
    ]
    parameters = [torch.nn.Parameter(place.memory(value)) for value in made[::2]]
    for parameter, gradient in zip(parameters, made[1::2]):
        parameter.grad = place.memory(gradient)
    return make(parameters).step
