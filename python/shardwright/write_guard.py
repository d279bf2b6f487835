"""Debug modes of parameters that a host's ranks share: what finds a write that their versions do not tell of.

A write through `.data`, or by foreign code, changes the parameter for every rank of the host, in the middle of their forwards. *samples*
compares some elements of each parameter before and after each forward and before each step; *read-only* takes the right to write
away between steps, so that who writes gets a SIGSEGV where it happens (`python -X faulthandler` prints the line).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from ._engine import Error, HostComm
from .parameter_memory import ParameterMemory

#: of a parameter, spread evenly; where they begin moves by one element with each step
_SAMPLES = 64


class SampledParameters:
    """Finds writes by comparing samples.

    Parameters
    ----------
    memory : ParameterMemory
        Shared.
    names : sequence of str
        Of its parameters.
    comm : HostComm
        Ended when a write is found: the values are wrong for all ranks, and all of them get the sentence.

    Notes
    -----
    Cost of a comparison: 64 elements of each parameter are read.
    """

    def __init__(self, memory: ParameterMemory, names: Sequence[str], comm: HostComm) -> None:
        self._memory, self._names, self._comm = memory, names, comm
        self._phase = 0
        self._take()

    def _take(self) -> None:
        self._phase += 1
        self._samples = [self._sample(index) for index in range(len(self._names))]

    def _sample(self, index: int) -> torch.Tensor:
        flat = self._memory.flat(index)
        stride = max(flat.numel() // _SAMPLES, 1)
        return flat[self._phase % stride :: stride].clone()

    def check(self, when: str) -> None:
        """Error if a sample is not what it was when the last step, or full_parameters(writable=True), ended."""
        for index, before in enumerate(self._samples):
            now = self._sample(index)
            if not torch.equal(now.view(torch.uint8), before.view(torch.uint8)):
                self._fail(index, when)

    def _fail(self, index: int, when: str) -> None:
        message = (
            f"parameter {self._names[index]!r} was written to outside of the step (found {when}, by write_guard='samples'), and the "
            "host's ranks share it, so that it has changed for all: write inside `with sw.full_parameters(module, writable=True)`"
        )
        if self._comm.is_alive:
            self._comm.abort(message)
        raise Error(message)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Around what may write. All ranks are past a barrier as it ends."""
        yield
        self._take()


class ReadOnlyParameters:
    """Makes the mapping of the shared parameters read-only but for the time in which this rank may write.

    Parameters
    ----------
    memory : ParameterMemory
        Shared.
    """

    def __init__(self, memory: ParameterMemory) -> None:
        self._memory = memory
        self._depth = 0
        memory.protect(writable=False)

    def check(self, when: str) -> None:
        """Nothing: the kernel looks."""

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Around what may write."""
        self._depth += 1
        self._memory.protect(writable=True)
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._memory.protect(writable=False)
