"""The number of threads of a rank: its part of the cores, or one thread if they are not free.

torch's threads spin after every operator while they wait for one another. On cores that other programs use, two threads
take up to twenty times as long as one. Both are therefore timed, and again after a slow step. OMP_NUM_THREADS, if set,
decides instead (torchrun sets it to 1).
"""

from __future__ import annotations

import math
import os
import time

import torch
from torch.nn import functional as F

ROWS, WIDTH, OPERATORS = 256, 128, 20  # the timed work: small as the demo's, 10 ms on one thread
SLOW = 2.0  # a step this many times slower than the fastest one is slow
AGAIN_AFTER = 100  # steps with one thread, since cores may have become free


class Threads:
    """The setting of torch's number of threads, at the start and during training."""

    def __init__(self) -> None:
        cores, ranks = len(os.sched_getaffinity(0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self.share = 1 if "OMP_NUM_THREADS" in os.environ else max(1, cores // ranks)
        self.sentence = ""  # printed once
        self._said = False
        self._choose()

    def after_step(self, seconds: float) -> str:
        """Measure again if that may pay; return a sentence for the user, usually an empty one."""
        self._steps += 1
        self._fastest_s = min(self._fastest_s, seconds)
        alone = torch.get_num_threads() == 1
        if self.share > 1 and (self._steps >= AGAIN_AFTER if alone else seconds > SLOW * self._fastest_s):
            self._choose()
        sentence, self.sentence = self.sentence, ""
        return sentence

    def _choose(self) -> None:
        self._steps, self._fastest_s = 0, math.inf
        if self.share == 1:
            return
        one_s = seconds_with(1, math.inf)
        slowdown = seconds_with(self.share, one_s) / one_s
        torch.set_num_threads(self.share if slowdown < 1 else 1)
        if slowdown >= 1 and not self._said:
            self._said = True
            self.sentence = (
                f"1 thread instead of {self.share}, which are {slowdown:.1f} times as slow while other programs use these cores"
                " (OMP_NUM_THREADS decides)"
            )


def seconds_with(threads: int, enough_s: float) -> float:
    """Return the time of some small operators like a step's; above `enough_s`, extrapolate from a part of them."""
    torch.set_num_threads(threads)
    x, weight = torch.ones(ROWS, WIDTH), torch.ones(WIDTH, 4 * WIDTH)
    F.gelu(x @ weight)  # starts the threads
    began = time.perf_counter()
    for done in range(1, OPERATORS + 1):
        F.gelu(x @ weight)
        took_s = time.perf_counter() - began
        if took_s > enough_s:
            break
    return took_s / done * OPERATORS
