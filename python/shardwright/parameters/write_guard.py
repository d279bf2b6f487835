"""The check for writes to shared parameters that version counters do not record.

A write through `.data`, or by foreign code, changes the parameter for every rank of the host, in the middle of their
forwards. Swapping averaged weights in and out (EMA, SWA) would silently leave wrong weights on all ranks. So some
elements of each parameter are compared before and after each forward and before each step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from .._engine import Error, HostComm
from .storage import ParameterMemory

#: words of a parameter, spread evenly; their first position moves with each step
_SAMPLES = 8


class SampledParameters:
    """A guard that compares samples of shared memory, 8 words a parameter, and ends `comm` if one was written to."""

    kind = "samples"

    def __init__(self, memory: ParameterMemory, names: Sequence[str], comm: HostComm) -> None:
        self._names, self._comm = names, comm
        self._words = memory.words()
        spans = [memory.span(index) for index in range(len(names))]
        first: list[int] = []
        stride: list[int] = []
        of: list[int] = []
        for index, (begin, count) in enumerate(spans):
            step = max(count // _SAMPLES, 1)
            taken = range(begin, begin + count, step)[:_SAMPLES]
            first += taken
            stride += [step] * len(taken)
            of += [index] * len(taken)
        self._first = torch.tensor(first, dtype=torch.int64, device="cpu")
        self._stride = torch.tensor(stride, dtype=torch.int64, device="cpu")
        self._of = of  # the parameter of each sample
        self._phase = 0
        self._take()

    def _take(self) -> None:
        self._phase += 1
        self._places = self._first + self._phase % self._stride if self._of else self._first
        self._samples = self._words[self._places]
        self._is_known = True  # False while ranks write

    def check(self, when: str, *, aborts: bool = True) -> None:
        """Raise Error if a sample has changed since the last step or full_parameters(writable=True) ended."""
        if not self._is_known:
            return
        now = self._words[self._places]
        if not torch.equal(now, self._samples):
            self._fail(self._of[int((now != self._samples).nonzero()[0])], when, aborts)

    def _fail(self, index: int, when: str, aborts: bool) -> None:
        message = (
            f"parameter {self._names[index]!r} was written to outside of the step (found {when}, by write_guard='samples'), and the "
            "host's ranks share it, so that it has changed for all: write inside `with sw.full_parameters(module, writable=True)`, where averages "
            "of weights (EMA, SWA) are swapped in and out too"
        )
        if aborts and self._comm.is_alive:
            self._comm.abort(message)
        raise Error(message)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Allow writes inside, where forwards check nothing: a faster rank may be out. Ends with a barrier of all ranks."""
        self._is_known = False  # an exception leaves it so: other ranks may still write
        yield
        self._take()
