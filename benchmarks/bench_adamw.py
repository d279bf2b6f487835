"""Benchmark of the fused optimizers against torch's, and of the exact norm against a plain sum, on one CPU thread.

Each arm has its own tensors and does the same work. A check of equal results comes first; then the arms are sampled in
turns.
"""

from __future__ import annotations

import ctypes
import math
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import shardwright as sw
import torch
import torch.distributed as dist
from shardwright import _engine

LARGE = 16 << 20
PARTS = [LARGE // 16] * 16  # several arrays, so that no arm depends on the address of one
SMALL = [256, 1024, 64 * 24, 2048] * 100
OPTIONS = {"lr": 1e-3, "weight_decay": 0.01}
Arms = dict[str, Callable[[], None]]


def tensors(sizes: list[int], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return parameters with gradients; every call returns the same values."""
    made = []
    for index, size in enumerate(sizes):
        generator = torch.Generator().manual_seed(index)
        p = torch.randn(size, generator=generator).to(dtype).requires_grad_()
        p.grad = torch.randn(size, generator=generator).to(dtype)
        made.append(p)
    return made


def verify(arms: Arms, results: dict[str, list[torch.Tensor]]) -> Arms:
    """Check that three steps of each arm give the same bits."""
    for _ in range(3):
        for work in arms.values():
            work()
    ours, theirs = results.values()
    for a, b in zip(ours, theirs):
        if not torch.equal(a.detach(), b.detach()):
            raise AssertionError(f"{int((a != b).sum())} of {a.numel()} elements differ from torch's")
    return arms


def memory_pass(library: str, *, adam: bool, copy: bool = False) -> Callable[[], None]:
    """Return a pass over new arrays of sizes PARTS that moves as many bytes as a step."""
    loop = getattr(ctypes.CDLL(library), "plain_adam" if adam else "plain_sgd")
    arrays = [[torch.zeros(size) for _ in range(4 if adam else 3)] for size in PARTS]
    copies = [torch.zeros(size, dtype=torch.bfloat16) if copy else None for size in PARTS]
    rows = []
    for size, row, half in zip(PARTS, arrays, copies):
        addresses = [each.data_ptr() for each in row]
        if adam:
            addresses.append(0 if half is None else half.data_ptr())
        rows.append([*map(ctypes.c_void_p, addresses), ctypes.c_size_t(size)])
    kept = (arrays, copies)

    def run() -> None:
        assert kept
        for row in rows:
            loop(*row)

    return run


def plain_arms(name: str, sizes: list[int], library: str, **options: Any) -> Arms:
    """Step float32 parameters with float32 gradients."""
    ours, theirs = tensors(sizes), tensors(sizes)
    a = getattr(sw.optim, name)(ours, **options)
    b = getattr(torch.optim, name)(theirs, fused=True, **options)
    arms = verify({"ours": a.step, "torch": b.step}, {"ours": ours, "torch": theirs})
    return {**arms, "memory": memory_pass(library, adam=name == "AdamW")} if sizes == PARTS else arms


def copy_arms(library: str) -> Arms:
    """Step float32 parameters and write a bfloat16 copy of them. Our kernel writes the copy in the same pass."""
    ps, qs = tensors(PARTS), tensors(PARTS)
    ours, theirs = ([p.detach().bfloat16() for p in ps] for _ in range(2))  # another copy would be taken for a write
    m, v, step = [torch.zeros_like(p) for p in ps], [torch.zeros_like(p) for p in ps], [torch.zeros(()) for _ in ps]
    scalars = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01, "decoupled": True}
    optimizer = torch.optim.AdamW(qs, fused=True, **OPTIONS)
    grads = [p.grad for p in ps if p.grad is not None]

    def fused_and_copy() -> None:
        optimizer.step()
        torch._foreach_copy_(theirs, [q.detach() for q in qs])

    def one_pass() -> None:
        _engine.adam_step(ps, grads, m, v, None, step, ours, **scalars)

    arms = verify({"ours": one_pass, "torch": fused_and_copy}, {"ours": ours, "torch": theirs})
    return {**arms, "memory": memory_pass(library, adam=True, copy=True)}


def small_arms(dtype: Any) -> Arms:
    """Step float32 parameters with moments in `dtype`, against ours in float32."""
    small, wide = tensors([4 * each for each in PARTS]), tensors([4 * each for each in PARTS])
    a = sw.optim.AdamW(small, state_dtype=dtype, **OPTIONS)
    b = sw.optim.AdamW(wide, **OPTIONS)
    for _ in range(3):
        a.step()
        b.step()
    apart = sum((p - q).abs().sum().item() for p, q in zip(small, wide)) / sum(p.numel() for p in small)
    if apart > 3 * OPTIONS["lr"] / 10:  # of three steps of lr
        raise AssertionError(f"moments in {dtype} move a parameter {apart} from where float32 does, on average")
    return {"ours": a.step, "float32": b.step}


def master_arms() -> Arms:
    """Step a bfloat16 model through float32 masters. torch widens the gradients, steps the masters and rounds them
    back.
    """
    ps, qs = tensors(PARTS, torch.bfloat16), tensors(PARTS, torch.bfloat16)
    masters = [q.detach().float().requires_grad_() for q in qs]
    for master in masters:
        master.grad = torch.empty_like(master)
    ours, theirs = sw.optim.AdamW(ps, **OPTIONS), torch.optim.AdamW(masters, fused=True, **OPTIONS)

    def three_passes() -> None:
        torch._foreach_copy_([master.grad for master in masters], [q.grad for q in qs])
        theirs.step()
        torch._foreach_copy_([q.detach() for q in qs], [master.detach() for master in masters])

    return verify({"ours": ours.step, "torch": three_passes}, {"ours": ps, "torch": qs})


def norm_arms(dtype: torch.dtype, library: str) -> Arms:
    x = torch.randn(LARGE, generator=torch.Generator().manual_seed(0)).to(dtype)
    plain = getattr(ctypes.CDLL(library), f"plain_{str(dtype).removeprefix('torch.')}")
    plain.restype, plain.argtypes = ctypes.c_double, (ctypes.c_void_p, ctypes.c_size_t)
    few = x[:4096]
    if sw.optim.global_norm([few]) != math.sqrt(math.fsum(float(value) ** 2 for value in few)):
        raise AssertionError("the norm is not that of the exact sum")
    if not math.isclose(sw.optim.global_norm([x]), math.sqrt(plain(x.data_ptr(), LARGE)), rel_tol=1e-12):
        raise AssertionError("the norms differ")
    return {"ours": lambda: sw.optim.global_norm([x]), "plain": lambda: plain(x.data_ptr(), LARGE)}


CASES: dict[str, tuple[str, float, int]] = {  # (peer, least speedup, calls per sample)
    "AdamW float32, 16 x 1 Mi": ("torch fused=True", 1.0, 2),
    "AdamW + bfloat16 copy, 16 x 1 Mi": ("torch fused=True, then foreach copy", 1.5, 2),
    "AdamW bfloat16 model, masters, 16 x 1 Mi": ("torch: widen gradient, fused=True, round back", 1.5, 2),
    "AdamW float32, 400 tensors of 256-2048": ("torch fused=True", 1.5, 20),
    "SGD momentum 0.9 float32, 16 x 1 Mi": ("torch fused=True", 1.0, 2),
    "norm float32, 16 Mi": ("plain sum in double, C", 1 / 1.1, 8),
    "norm bfloat16, 16 Mi": ("plain sum in double, C", 1 / 1.1, 8),
}


SMALL_STATE: dict[Any, tuple[str, tuple[str, float, int]]] = {  # by dtype
    dtype: (
        f"AdamW float32, moments in {name}, 16 x 4 Mi, two ranks at once",
        ("ours with float32 moments", goal, 1),
    )
    for dtype, name, goal in ((torch.bfloat16, "bfloat16", 1.25), ("int8", "int8", 1.0))
}


def measure_small(rank: int, world_size: int, rounds: int, budget_s: float, dtype: Any) -> Any:
    return common.interleave(small_arms(dtype), dist.barrier, rounds=rounds, budget_s=budget_s / len(CASES), repeat=1)


def measure(rank: int, world_size: int, rounds: int, budget_s: float, library: str) -> list[Any]:
    makers: list[Callable[[], Arms]] = [
        lambda: plain_arms("AdamW", PARTS, library, **OPTIONS),
        lambda: copy_arms(library),
        master_arms,
        lambda: plain_arms("AdamW", SMALL, library, **OPTIONS),
        lambda: plain_arms("SGD", PARTS, library, lr=1e-3, momentum=0.9),
        lambda: norm_arms(torch.float32, library),
        lambda: norm_arms(torch.bfloat16, library),
    ]
    results = []
    for make, (_, _, repeat) in zip(makers, CASES.values()):
        results.append(
            common.interleave(make(), dist.barrier, rounds=rounds, budget_s=budget_s / len(CASES), repeat=repeat)
        )
    return results


def main() -> None:
    report, quick = common.begin("adamw", __doc__)
    effort = (7, 7.0) if quick else (25, 40.0)  # (rounds, seconds)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        library = str(Path(folder) / "plain.so")
        flags = ["-O3", "-march=native", "-std=c11", "-shared", "-fPIC"]
        loops = [str(Path(__file__).with_name(name)) for name in ("plain_norm.c", "plain_pass.c")]
        subprocess.run(["gcc", *flags, "-o", library, *loops], check=True)
        (results,) = common.run_ranks(1, measure, *effort, library)
    measured = [
        *zip(CASES.items(), ([each] for each in results)),
        *((case, common.run_ranks(2, measure_small, *effort, dtype)) for dtype, case in SMALL_STATE.items()),
    ]
    for (case, (peer_name, goal, repeat)), of_ranks in measured:
        times = common.timings(of_ranks, repeat)
        peer = next(times[name] for name in ("torch", "plain", "float32") if name in times)
        extra = {}
        if "memory" in times:  # not of the median: other processes share the memory bandwidth
            extra["share_of_memory"] = min(times["memory"].every) / min(times["ours"].every)
        report.add_times(case, times["ours"], peer, peer_name, goal=round(goal, 3), larger=True, **extra)


if __name__ == "__main__":
    main()
