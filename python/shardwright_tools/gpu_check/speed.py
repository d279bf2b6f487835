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

from .plan import LARGE
from .report import Row, least, row

_BLOCK, _BITS, _PIECES, _SLICES = 256, 8, 16, 8
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

    def compared(
        case: str, work: Callable[[], Any], moved_bytes: int, goal: float, is_right: Callable[[], bool] | None = None
    ) -> Row:
        work()
        if is_right is not None and not is_right():
            return row(case, "wrong", note="its result differs from torch's")
        ours, copy = measure(work, moved_bytes)
        note = f"{moved_bytes / ours * 1e-6:.0f} GB/s, the copy {moved_bytes / copy * 1e-6:.0f}"
        if is_quick:
            return row(case, value=copy / ours, unit="of copy", note="nothing is measured at this size")
        return least(case, copy / ours, "of copy", goal, note)

    moved = 8 * numel
    ours, _ = measure(lambda: back.copy_(wide), moved)
    yield row("copy", value=moved / ours * 1e-6, unit="GB/s")
    back.zero_()
    yield compared("PACK", lambda: comm.pack(pairs, stream), moved, 0.85, lambda: torch.equal(back, wide))
    yield compared(
        "CAST to bfloat16", cast(half, wide), 6 * numel, 0.85, lambda: torch.equal(half, wide.to(torch.bfloat16))
    )
    yield compared(
        "CAST from bfloat16", cast(back, half), 6 * numel, 0.85, lambda: torch.equal(back, half.to(torch.float32))
    )

    def encode() -> None:
        _engine.device_block_encode(comm, _BLOCK, _BITS, coded, stream)

    def decode() -> None:
        _engine.device_block_decode(comm, _BLOCK, _BITS, decoded, 0, stream)

    def is_near() -> bool:
        """Check that no element is further off than half a code of the block with the largest range."""
        return float((back - wide).abs().max()) <= float(wide.abs().max()) / (2 * 127) * 1.01

    code = 4 * numel + records.numel()
    yield compared("QUANTIZE 8 bits", encode, code, 0.85)
    yield compared("DECODE 8 bits", decode, code, 0.85, is_near)
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


def large(place: Any, rank: int, world_size: int, *, is_quick: bool) -> Iterator[Row]:
    """Compare kernels with torch on one array above 4 GiB, where offsets of 32 bits are too short."""
    numel = (1 << 10 if is_quick else 1 << 30) + 1025
    link = sw.DistributedDataParallel(place.put(torch.nn.Linear(1, 1)))._engine.replica.link
    assert link is not None
    comm, stream = link.comm, link.current_stream()
    wide, back = (place.memory(torch.zeros(numel, dtype=torch.float32, device="cpu")) for _ in range(2))
    wide.normal_(generator=torch.Generator(wide.device).manual_seed(0))

    def compared(case: str, is_right: bool) -> Row:
        note = "" if is_right else "its result differs from torch's"
        return row(f"{case} above 4 GiB", "ok" if is_right else "wrong", 4 * numel / 2**30, "GiB", note=note)

    comm.pack([(back.data_ptr(), wide.data_ptr(), 4 * numel)], stream)
    yield compared(LARGE[0], torch.equal(back, wide))
    each = numel // _SLICES
    slices = wide[: each * _SLICES].view(_SLICES, each)
    addresses = back.data_ptr(), wide.data_ptr(), wide.data_ptr()
    _engine.device_fold(comm, *addresses, each, 4 * each, 0, _SLICES, "float32", False, stream)
    total = slices[0].clone()
    for each_slice in slices[1:]:
        total += each_slice
    yield compared(LARGE[1], torch.equal(back[:each], total))
    half = place.memory(torch.zeros(numel, dtype=torch.bfloat16, device="cpu"))
    _engine.device_cast(comm, half.data_ptr(), "bfloat16", wide.data_ptr(), "float32", numel, 1.0, stream)
    yield compared(LARGE[2], torch.equal(half, wide.to(torch.bfloat16)))
    ours = _engine.norm_value([link.norm_sum([wide])])
    theirs = float(torch.linalg.vector_norm(wide, dtype=torch.float64))
    yield compared(LARGE[3], abs(ours - theirs) <= 1e-9 * theirs)
    ends = slice(0, 512), slice(numel - 512, numel)
    found = []
    for make in _OPTIMIZERS.values():
        back.copy_(wide)
        parameter = torch.nn.Parameter(back)
        parameter.grad = wide
        optimizer = make([parameter])
        optimizer.step()
        found.append([parameter.detach()[end].clone() for end in ends])
        del optimizer
    yield compared(LARGE[4], all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(*found)))


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
