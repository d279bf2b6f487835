"""PowerSGD with one exchange a bucket: P and Q alternate, each against the other's orthonormal basis of the previous
round.

    P:  P_w = v Q̂;   g = mean(P_w) Q̂ᵀ;   error v - P_w Q̂ᵀ
    Q:  Q_w = vᵀ P̂;  g = P̂ mean(Q_w)ᵀ;   error v - P̂ Q_wᵀ;   P̂ = orthonormal mean(P_w), Q̂ = orthonormal mean(Q_w)

Both errors are projections of this rank's own v. The state changes only once the average is known to be finite.

References
----------
Zhang, Li, Shi, Chu, Li, Evaluation and Optimization of Gradient Compression for Distributed Deep Learning, ICDCS 2023
(ACP-SGD).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from .._engine import powersgd_absorb, powersgd_decompress, powersgd_is_finite, powersgd_project
from ..comm.exchange import Exchange
from .factor_exchange import FactorExchange

if TYPE_CHECKING:
    from .matrix import Matrix


class Turns:
    """The rounds of one state. Scratch memory is kept between rounds."""

    def __init__(self, wire_dtype: torch.dtype) -> None:
        self._factors = FactorExchange(wire_dtype)
        self._scratch = torch.empty(0, dtype=torch.float32, device="cpu")
        self._spare = self._scratch

    def average(
        self, exchange: Exchange, matrices: Sequence[Matrix], small: Sequence[torch.Tensor], *, of_p: bool
    ) -> bool:
        """Average the gradients of `matrices` through low rank, and `small` exactly, in place.

        Return False if the average of the factors is not finite: the state is unchanged, and the gradients are
        undefined.
        """
        sizes = [matrix.left_numel if of_p else matrix.right_numel for matrix in matrices]
        head = sum(sizes)
        floats = self._factors.begin(exchange, head, small)
        lefts, own = self._reserve(matrices, head)
        table = [matrix.row for matrix in matrices]
        projected = _split(floats, sizes) if of_p else lefts
        powersgd_project(table, _addresses(projected))  # also overwrites the gradient with v
        if not of_p:
            self._against_p(matrices, lefts, _split(floats, sizes))
        own.copy_(floats)
        whole = self._factors.average(exchange)
        if not powersgd_is_finite(whole.data_ptr(), head):
            return False
        if self._factors.rounds:
            own = self._factors.settle(exchange)
        factors = zip(matrices, _split(own, sizes), _split(whole, sizes), lefts)
        for matrix, mine, mean, left in factors:
            entry = matrix.entry
            entry["memory"].copy_(_within(matrix.part, entry["memory"].dtype).view_as(entry["memory"]))
            (entry["left"] if of_p else entry["right"]).view(-1).copy_(mine)
            if of_p:
                entry["right"].copy_(entry["basis"])
                entry["turn"].view(-1).copy_(mean)
                powersgd_decompress([matrix.row_with(left=mean.data_ptr())], [entry["right"].data_ptr()])
            else:
                entry["left"].view(-1).copy_(left)
                powersgd_decompress([matrix.row], [mean.data_ptr()])
        return True

    def _against_p(
        self, matrices: Sequence[Matrix], lefts: Sequence[torch.Tensor], out: Sequence[torch.Tensor]
    ) -> None:
        """Compute Q_w = vᵀ P̂ in scratch memory, without touching the state."""
        for matrix, left, q in zip(matrices, lefts, out):
            left.copy_(matrix.entry["turn"].view(-1))
            spare = self._spare.data_ptr()
            row = matrix.row_with(memory=0, left=spare, right=spare + 4 * matrix.left_numel)
            powersgd_absorb([row], [left.data_ptr()], [q.data_ptr()])

    def _reserve(self, matrices: Sequence[Matrix], head: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Return memory for a left factor of each matrix, and for all of this rank's factors of this turn."""
        sizes = [matrix.left_numel for matrix in matrices]
        spare = max((matrix.left_numel + matrix.right_numel for matrix in matrices), default=0)
        total = sum(sizes) + head + spare
        if self._scratch.numel() < total:
            self._scratch = torch.empty(total, dtype=torch.float32, device="cpu")
        lefts, own, self._spare, _ = self._scratch.split([sum(sizes), head, spare, self._scratch.numel() - total])
        return _split(lefts, sizes), own


def _split(flat: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    return list(flat.split(sizes)) if sizes else []


def _addresses(parts: Sequence[torch.Tensor]) -> list[int]:
    return [part.data_ptr() for part in parts]


def _within(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Clamp `part` in place so that it stays finite in `dtype`; the result overwrites it later."""
    if dtype == torch.float32:
        return part
    most = torch.finfo(dtype).max
    return part.clamp_(-most, most)
