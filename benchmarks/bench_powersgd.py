"""Benchmark of compression without a network: PowerSGD's passes over a bucket of 25 MB, and the half codecs. One
thread, CPU.

Both arms of a hook case run the whole hook on a group of one rank: nothing travels, and neither side folds. Each turn's
result plus error is the next turn's input, so every turn does the same work. The benchmark checks that each arm's
result plus its error is its first input. tests/ranks shows that first results from the same basis agree to 1e-5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import common
import torch
import torch.distributed as dist
from shardwright import _engine, hooks
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

MATRICES = 6
SIDE = 1024
NUMEL = MATRICES * SIDE * SIDE
Arms = dict[str, Callable[[], None]]


class Bucket:
    """A stand-in for GradBucket with the methods that both hooks call."""

    def __init__(self) -> None:
        self.parameters_ = [torch.nn.Parameter(torch.empty(SIDE, SIDE)) for _ in range(MATRICES)]
        self.source = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
        self.flat = self.source.clone()

    def buffer(self) -> torch.Tensor:
        return self.flat

    def gradients(self) -> list[torch.Tensor]:
        return [part.view(SIDE, SIDE) for part in self.flat.split(SIDE * SIDE)]

    def parameters(self) -> list[torch.Tensor]:
        return list(self.parameters_)

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def set_buffer(self, buffer: torch.Tensor) -> None:
        self.flat = buffer


def powersgd_arms(rank: int) -> Arms:
    ours, theirs = Bucket(), Bucket()
    state = hooks.PowerSGDState(None, rank, start_powerSGD_iter=2)
    peer = power.PowerSGDState(None, rank, start_powerSGD_iter=2)

    def run_ours() -> None:
        hooks.powerSGD_hook(state, ours).wait()

    def run_theirs() -> None:
        power.powerSGD_hook(peer, theirs).wait()

    for _ in range(3):
        run_ours()
        run_theirs()
    owed = torch.cat([error.flatten() for error in state.errors().values()])
    for result, error in ((ours.flat, owed), (theirs.flat, peer.error_dict[0])):
        if not torch.allclose(result + error, ours.source, rtol=0, atol=1e-4):
            raise AssertionError("result plus error differ from the input")
    there, back = torch.ones(NUMEL), torch.empty(NUMEL)
    return {"ours": run_ours, "torch": run_theirs, "copy": lambda: back.copy_(there)}


def half_hook_arms(dtype: torch.dtype) -> Arms:
    """Run the whole hook, torch's bfloat16 hook included, without a DistributedDataParallel."""
    ours, theirs = Bucket(), Bucket()
    name = "fp16_compress_hook" if dtype == torch.float16 else "bf16_compress_hook"
    mine, other = getattr(hooks, name), getattr(default_hooks, name)

    def run_ours() -> None:
        mine(None, ours).wait()

    def run_theirs() -> None:
        other(None, theirs).wait()

    run_ours()
    run_theirs()
    if not torch.equal(ours.flat, theirs.flat):
        raise AssertionError("on one rank both are the rounded gradient")
    return {"ours": run_ours, "torch": run_theirs}


def half_codec_arms(dtype: torch.dtype) -> Arms:
    """Time our codec alone, encode and decode, against torch's whole hook, which does the same work."""
    source, out = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0)), torch.empty(NUMEL)
    wire, name = torch.empty(NUMEL, dtype=dtype), str(dtype).removeprefix("torch.")

    def run_ours() -> None:
        _engine.half_encode(name, wire.data_ptr(), source.data_ptr(), NUMEL, 0.25)
        _engine.half_decode(name, out.data_ptr(), wire.data_ptr(), NUMEL)

    run_ours()
    expected = (source / 4).to(dtype).float()
    if not torch.equal(out, expected):
        raise AssertionError("encode and decode must be one rounding")
    back = torch.empty(NUMEL)
    return {"ours": run_ours, "torch": half_hook_arms(dtype)["torch"], "copy": lambda: back.copy_(source)}


CASES: dict[str, tuple[str, float, Callable[[], Arms]]] = {
    **{
        f"PowerSGD r={rank}, 6 x 1024^2, hook": (
            "torch powerSGD_hook",
            1.4 if rank == 1 else 4.0,
            lambda rank=rank: powersgd_arms(rank),
        )
        for rank in (1, 2, 4, 8)
    },
    "float16 hook, 25 MB": ("torch fp16_compress_hook", 2.0, lambda: half_hook_arms(torch.float16)),
    "bfloat16 hook, 25 MB": ("torch bf16_compress_hook", 2.0, lambda: half_hook_arms(torch.bfloat16)),
    "float16 codec, there and back, 25 MB": ("torch fp16_compress_hook", 2.2, lambda: half_codec_arms(torch.float16)),
    "bfloat16 codec, there and back, 25 MB": ("torch bf16_compress_hook", 2.0, lambda: half_codec_arms(torch.bfloat16)),
}


def measure(rank: int, world_size: int, rounds: int, budget_s: float) -> list[Any]:
    return [
        common.interleave(make(), dist.barrier, rounds=rounds, budget_s=budget_s / len(CASES), repeat=2)
        for _, _, make in CASES.values()
    ]


def main() -> None:
    report, quick = common.begin("powersgd", __doc__)
    (results,) = common.run_ranks(1, measure, *((7, 12.0) if quick else (25, 60.0)))
    for (case, (peer_name, goal, _)), result in zip(CASES.items(), results):
        times = common.timings([result], 2)
        extra = {"ours_ns_per_element": times["ours"].median / NUMEL * 1e9}
        if "copy" in times:  # a copy moves 8 bytes per element, PowerSGD at least 20, a half codec 6 in each direction
            least_bytes = 12 if "codec" in case else 20
            extra["share_of_streaming"] = least_bytes / 8 * times["copy"].median / times["ours"].median
        report.add_times(case, times["ours"], times["torch"], peer_name, goal=goal, larger=True, **extra)


if __name__ == "__main__":
    main()
