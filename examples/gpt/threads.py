"""How many threads a rank computes with: its share of the cores, or one where they are not free.

torch's threads wait for one another by spinning, after every operator: on cores that other programs use too, two of
them take up to twenty times as long as one.  So both are timed, and again when a step was slow.  A user who set
OMP_NUM_THREADS has chosen (torchrun sets it to 1).
"""

from __future__ import annotations

import math
import os
import time

import torch
from torch.nn import functional as F

ROWS, WIDTH, OPERATORS = 256, 128, 20  # of the work that is timed: small as the demo's, 10 ms on one thread
SLOW = 2.0  # times the fastest step: with several threads, worth a look
AGAIN_AFTER = 100  # steps with one thread: cores may have become free


class Threads:
    """Sets torch's number of threads, now and as training goes on."""

    def __init__(self) -> None:
        cores, ranks = len(os.sched_getaffinity(0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        self.share = 1 if "OMP_NUM_THREADS" in os.environ else max(1, cores // ranks)
        self.sentence = ""  # to be said, once
        self._said = False
        self._choose()

    def after_step(self, seconds: float) -> str:
        """Look again where that may pay; return what the user should know, as a rule nothing."""
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
    """The time of some small operators like a step's; of a part of them, extrapolated, once it is above `enough_s`."""
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
