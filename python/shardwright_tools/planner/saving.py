"""How often to save, how many checkpoints to keep, and the disk space that they take."""

from __future__ import annotations

import dataclasses
import math
import os

from .failures import daly
from .memory import OPTIMIZERS, PRECISIONS
from .shape import PlanError, Shape

#: failures per GPU and day: 419 unexpected interruptions of 16,384 GPUs in 54 days ("The Llama 3 Herd of Models", 2024, table 5)
_FAILURES_PER_RANK_DAY = 419 / 16_384 / 54
_LOCAL = ("/tmp", "/var/tmp", "/dev/shm", "/run", "/scratch", "/mnt/local", "/local")


@dataclasses.dataclass(frozen=True)
class SavePlan:
    """The interval between saves, its cost, and the disk space of the checkpoints."""

    every_s: float
    mtbf_s: float
    save_s: float
    lost: float  # the part of the time that saves and repeated work take
    checkpoint_bytes: int
    keep_last: int
    keep_every: int | None
    disk_bytes: int  # of all that are kept, and the one being written
    notes: tuple[str, ...]


def save_plan(
    shape: Shape,
    *,
    optimizer: str,
    precision: str,
    ranks: int,
    mtbf_s: float | None = None,  # default: Llama 3's rate of failures per GPU
    save_s: float | None = None,  # default: a twentieth of the write, which runs behind training
    disk_rate: float = 1e9,
    keep_last: int = 3,
    keep_every: int | None = None,
    milestones: int = 0,
    folder: str | None = None,
) -> SavePlan:
    """Return the interval that loses least time: sqrt(2 C M) after Young (1974), with Daly's correction.

    C is the training time that a save costs, M the mean time between failures. J. T. Daly, "A higher order estimate of
    the optimum checkpoint interval for restart dumps" (2006).
    """
    held = PRECISIONS[precision]
    size = shape.numel * (held.parameter + held.master + OPTIMIZERS[optimizer])
    mtbf = mtbf_s if mtbf_s is not None else 86400 / (_FAILURES_PER_RANK_DAY * ranks)
    write_s = size / disk_rate
    cost = save_s if save_s is not None else max(0.05, write_s / 20)
    if mtbf <= 0 or cost <= 0:
        raise PlanError(
            f"the time between failures and the cost of a save must be positive, got {mtbf:g} s and {cost:g} s"
        )
    every = daly(cost, mtbf)
    notes = []
    if every < write_s:
        notes.append(
            f"a write takes {write_s:.0f} s at {disk_rate / 1e9:g} GB/s, longer than the interval: the interval is the write's time. "
            "Use memory_every= for steps in between, or a faster disk"
        )
        every = write_s
    if folder is not None and (path := os.path.abspath(folder)).startswith(tuple(f"{each}/" for each in _LOCAL)):
        notes.append(
            f"{path} is on a disk of one host, or one that a restart clears: save to a folder that all hosts share"
        )
    kept = keep_last + milestones
    return SavePlan(
        every_s=every,
        mtbf_s=mtbf,
        save_s=cost,
        lost=cost / every + every / (2 * mtbf),
        checkpoint_bytes=size,
        keep_last=keep_last,
        keep_every=keep_every,
        disk_bytes=size * (kept + 1),
        notes=tuple(notes),
    )


def learning_rate(base: float, base_batch: int, batch: int, rule: str) -> tuple[float, str]:
    """Return the learning rate for another global batch, and the rule's source."""
    if rule not in ("linear", "sqrt"):
        raise PlanError(f"the rule must be linear or sqrt, got {rule!r}")
    if min(base, base_batch, batch) <= 0:
        raise PlanError("learning rate and batches must be positive")
    factor = batch / base_batch
    if rule == "linear":
        source = "linear scaling with gradual warm-up, for SGD: Goyal et al., Accurate, Large Minibatch SGD, 2017"
        return base * factor, source
    source = "square-root scaling, for Adam: Malladi et al., On the SDEs and Scaling Rules for Adaptive Gradient Algorithms, 2022"
    return base * math.sqrt(factor), source
