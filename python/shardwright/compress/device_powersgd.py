"""PowerSGD on a GPU: compress/powersgd.py's rounds, enqueued.

A pass handles all matrices of a bucket in one launch. The host reads nothing. A verdict in GPU memory says if an
average was finite; if not, it keeps later passes from changing the state and makes the result NaN. Both exchanges of a
round therefore always run. In a refused round this rank's Q is undefined, and no rank uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._engine import (
    device_finite,
    device_powersgd_absorb,
    device_powersgd_expand,
    device_powersgd_orthonormalize,
    device_powersgd_project,
)
from .device_exchange import DeviceExchange, OnDevice
from .factor_exchange import FactorExchange
from .matrix import Matrix
from .powersgd import PowerSGDState, addresses

#: verdicts: refused before the state changed, refused after
_REFUSED, _REFUSED_LATE = 1, 2


class _Passes:
    """The passes over a bucket's matrices, in the order of torch's current stream."""

    def __init__(self, exchange: DeviceExchange, verdict: torch.Tensor) -> None:
        self.exchange = exchange
        self._comm, self._stream = exchange.link.comm, exchange.link.current_stream()
        self._verdict = verdict.zero_().data_ptr()

    def project(self, rows: list[Any]) -> None:
        device_powersgd_project(self._comm, rows, self._verdict, self._stream)

    def absorb(self, rows: list[Any]) -> None:
        device_powersgd_absorb(self._comm, rows, self._verdict, self._stream)

    def expand(self, rows: list[Any]) -> None:
        device_powersgd_expand(self._comm, rows, self._verdict, self._stream)

    def orthonormalize(self, factors: list[tuple[int, int, int, int, int]]) -> None:
        device_powersgd_orthonormalize(self._comm, factors, self._verdict, self._stream)

    def judge(self, values: torch.Tensor, refusal: int) -> None:
        device_finite(self._comm, self._verdict, values.data_ptr(), values.numel(), refusal, self._stream)

    def keep(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy the pairs unless the round is refused."""
        self.exchange.copy([(to.view(-1), source.view(-1)) for to, source in pairs], self._verdict)


class DevicePowerSGDState(OnDevice, PowerSGDState):
    """A PowerSGDState whose exchange, state and scratch memory are on a GPU."""

    _verdict = torch.empty(0, dtype=torch.float32, device="cpu")
    _scratch = torch.empty(0, dtype=torch.float32, device="cpu")

    def _begin_basis(self, matrix: Matrix) -> None:
        basis, seed = matrix.entry["basis"].zero_(), matrix.seed
        self._passes().orthonormalize([(basis.data_ptr(), basis.data_ptr(), matrix.cols, matrix.rank, seed)])

    def _passes(self) -> _Passes:
        """Return the passes of a new round, with verdict 0."""
        if not self._verdict.numel():
            self._verdict = self._device.zeros(1, torch.int32)
        return _Passes(self._device, self._verdict)

    def _average_matrices(self, matrices: list[Matrix], small: list[torch.Tensor]) -> None:
        factors, passes = self._factors, self._passes()
        if not matrices:
            factors.begin(self.exchange, 0, small)
            factors.average(self.exchange)
        elif not self.alternate:
            self._exchange_both(factors, passes, matrices, small)
        elif self._is_turn_of_p():
            self._exchange_turn_of_p(factors, passes, matrices, small)
        else:
            self._exchange_turn_of_q(factors, passes, matrices, small)

    def _exchange_both(
        self, factors: FactorExchange, passes: _Passes, matrices: list[Matrix], small: list[torch.Tensor]
    ) -> None:
        of_p, of_q = [m.left_numel for m in matrices], [m.right_numel for m in matrices]
        own = factors.begin(self.exchange, sum(of_p), small)
        passes.project([_row(m, out=p) for m, p in zip(matrices, addresses(own, of_p))])
        mean = factors.average(self.exchange)
        passes.judge(mean, _REFUSED)
        passes.orthonormalize([m.left_from(p) for m, p in zip(matrices, addresses(mean, of_p))])
        own = factors.begin(self.exchange, sum(of_q))
        rights = [m.entry["right"] for m in matrices]
        places = zip(matrices, addresses(own, of_q), rights)
        passes.absorb([_row(m, out=q, copy=right.data_ptr()) for m, q, right in places])
        mean = factors.average(self.exchange)
        passes.judge(mean, _REFUSED_LATE)
        if factors.rounds and self.use_error_feedback:
            passes.keep(list(zip(rights, factors.settle(self.exchange).split(of_q))))
        means = addresses(mean, of_q)
        passes.expand([_row(m, right=q, out=right.data_ptr()) for m, q, right in zip(matrices, means, rights)])
        passes.orthonormalize([m.basis_from(q) for m, q in zip(matrices, means)])

    # alternating: see compress/powersgd_in_turns.py ----------------------------------------------------------------------------

    def _exchange_turn_of_p(
        self, factors: FactorExchange, passes: _Passes, matrices: list[Matrix], small: list[torch.Tensor]
    ) -> None:
        sizes = [m.left_numel for m in matrices]
        own = factors.begin(self.exchange, sum(sizes), small)
        passes.project([_row(m, out=p) for m, p in zip(matrices, addresses(own, sizes))])
        own, mean = self._average_turn(factors, passes, own)
        passes.absorb([_row(m) for m in matrices])  # updates only the memory
        kept = []
        for matrix, mine, average in zip(matrices, own.split(sizes), mean.split(sizes)):
            entry = matrix.entry
            kept += [(entry["left"], mine), (entry["right"], entry["basis"]), (entry["turn"], average)]
        passes.keep(kept)
        passes.expand([_row(m, memory=0, left=p) for m, p in zip(matrices, addresses(mean, sizes))])
        passes.orthonormalize([m.basis_from(m.entry["right"].data_ptr()) for m in matrices])

    def _exchange_turn_of_q(
        self, factors: FactorExchange, passes: _Passes, matrices: list[Matrix], small: list[torch.Tensor]
    ) -> None:
        sizes, of_p = [m.right_numel for m in matrices], [m.left_numel for m in matrices]
        own = factors.begin(self.exchange, sum(sizes), small)
        lefts = self._reserve(sum(of_p)).split(of_p)
        passes.project(
            [_row(m, out=p.data_ptr()) for m, p in zip(matrices, lefts)]
        )  # to compute v; P itself is overwritten
        passes.orthonormalize(
            [m.left_from(m.entry["turn"].data_ptr(), left.data_ptr()) for m, left in zip(matrices, lefts)]
        )
        places = zip(matrices, lefts, addresses(own, sizes))
        passes.absorb([_row(m, memory=0, left=left.data_ptr(), out=q) for m, left, q in places])
        own, mean = self._average_turn(factors, passes, own)
        passes.absorb([_row(m) for m in matrices])
        kept = []
        for matrix, mine, left in zip(matrices, own.split(sizes), lefts):
            kept += [(matrix.entry["right"], mine), (matrix.entry["left"], left)]
        passes.keep(kept)
        means = addresses(mean, sizes)
        passes.expand([_row(m, memory=0, right=q) for m, q in zip(matrices, means)])
        passes.orthonormalize([m.basis_from(q) for m, q in zip(matrices, means)])

    def _average_turn(
        self, factors: FactorExchange, passes: _Passes, own: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the contribution of this rank's factors to the mean, and the ranks' mean."""
        mean = factors.average(self.exchange)
        passes.judge(mean, _REFUSED)
        return (factors.settle(self.exchange) if factors.rounds else own), mean

    def _reserve(self, numel: int) -> torch.Tensor:
        if self._scratch.numel() < numel:
            self._scratch = self.exchange.floats(numel)
        return self._scratch[:numel]


def _row(
    matrix: Matrix, *, memory: int | None = None, left: int = 0, right: int = 0, out: int = 0, copy: int = 0
) -> tuple[int, int, int, int, int, int, int, int, int, int, str]:
    """Return a matrix's row for the engine. `memory` replaces the matrix's error memory (0: none; None: keep), `left`
    and `right` its factors (0: keep).
    """
    gradient, own_memory, own_left, own_right, basis, rows, cols, rank, _, dtype = matrix.row
    kept = own_memory if memory is None else memory
    return gradient, kept, left or own_left, right or own_right, basis, out, copy, rows, cols, rank, dtype
