"""PowerSGD on a GPU: compress/powersgd.py's rounds, enqueued; a pass handles all matrices of a bucket in one launch.

A verdict in GPU memory says if an average was finite; if not, it keeps later passes from changing the state and makes
the result NaN. Both exchanges of a round therefore always run. In a refused round this rank's Q is undefined.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from .._engine import (
    device_finite,
    device_powersgd_absorb,
    device_powersgd_expand,
    device_powersgd_orthonormalize,
    device_powersgd_project,
)
from ..layout.bucket import share_of
from ..layout.views import dtype_name
from .device_exchange import OnDevice
from .factor_exchange import FactorExchange
from .powersgd import PowerSGDState, rows_in_memory

#: verdicts: refused before the state changed, refused after
_REFUSED, _REFUSED_LATE = 1, 2


#: addresses of gradient, memory, left, right, basis; rows, columns, rank; seed; dtype of the memory
MatrixRow = tuple[int, int, int, int, int, int, int, int, int, str]


class Matrix:
    """One gradient as rows x cols, and its row in the engine's table."""

    def __init__(
        self, part: torch.Tensor, entry: dict[str, torch.Tensor], rows: int, cols: int, rank: int, seed: int, dtype: str
    ) -> None:
        self.part, self.entry = part, entry
        self.rows, self.cols, self.rank, self.seed = rows, cols, rank, seed
        self.left_numel = entry["left"].numel()
        self.right_numel = entry["right"].numel()
        memory = entry["memory"].data_ptr() if "memory" in entry else 0
        left, right, basis = (entry[key].data_ptr() for key in ("left", "right", "basis"))
        self.row: MatrixRow = (part.data_ptr(), memory, left, right, basis, rows, cols, rank, seed, dtype)

    def left_from(self, factor: int) -> tuple[int, int, int, int, int]:
        """Return the row with which device_powersgd_orthonormalize() writes P̂ of `factor` to the matrix's left."""
        return self.entry["left"].data_ptr(), factor, self.rows, self.rank, self.seed + 1

    def basis_from(self, factor: int) -> tuple[int, int, int, int, int]:
        """Return the row that writes Q̂ of `factor` to the matrix's basis."""
        return self.entry["basis"].data_ptr(), factor, self.cols, self.rank, self.seed


class DevicePowerSGDState(OnDevice, PowerSGDState):
    """A PowerSGDState whose exchange, state and scratch memory are on a GPU."""

    _flag = torch.empty(0, dtype=torch.int32, device="cpu")

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._factors = FactorExchange(self.wire_dtype)

    def average(self, bucket: Any) -> torch.Tensor:
        buffer: torch.Tensor = bucket.buffer()
        if self.iter < self.start_powerSGD_iter:
            self._device.average_plain(buffer, *share_of(bucket))
        else:
            flat = buffer if buffer.dtype == torch.float32 else buffer.float()
            self._average_compressed(bucket, flat, int(buffer.storage_offset()))
            if flat is not buffer:
                buffer.copy_(flat)
        self.end_bucket(bucket.is_last())
        return buffer

    def _average_compressed(self, bucket: Any, flat: torch.Tensor, base: int) -> None:
        matrices: list[Matrix] = []
        small: list[torch.Tensor] = []
        for gradient, parameter in self.members(bucket):
            offset = gradient.storage_offset() - base
            part = flat[offset : offset + gradient.numel()]
            if self.codec.shapes(self.number_of(parameter, gradient)):
                matrices.append(self._matrix(parameter, gradient, part))
            elif part.numel():
                small.append(part)
        self._average_matrices(matrices, small)

    def _matrix(self, parameter: torch.Tensor, gradient: torch.Tensor, part: torch.Tensor) -> Matrix:
        entry, is_new = self.entry(parameter, gradient)
        rows, rank = rows_in_memory(gradient), entry["left"].shape[0]
        index = sum(map(ord, self.name_of(parameter)))
        seed = (self.random_seed * 1_000_003 + index * 8191 + (0 if self.warm_start else self.iter * 131)) & (2**63 - 1)
        matrix = Matrix(part, entry, rows, part.numel() // rows, rank, seed, dtype_name(self.error_dtype))
        if is_new or not self.warm_start:
            self._begin_basis(matrix)
        return matrix

    def _begin_basis(self, matrix: Matrix) -> None:
        basis, seed = matrix.entry["basis"].zero_(), matrix.seed
        rows = [(basis.data_ptr(), basis.data_ptr(), matrix.cols, matrix.rank, seed)]
        self._run(device_powersgd_orthonormalize, rows, self._verdict())

    def _verdict(self) -> int:
        """Return the address of the verdict of a new round, 0."""
        if not self._flag.numel():
            self._flag = self._device.zeros(1, torch.int32)
        return self._flag.zero_().data_ptr()

    def _run(self, run: Any, rows: list[Any], verdict: int) -> None:
        """Enqueue a pass over `rows` on torch's current stream."""
        run(self._device.link.comm, rows, verdict, self._device.link.current_stream())

    def _check_finite(self, verdict: int, mean: torch.Tensor, refusal: int) -> None:
        link = self._device.link
        device_finite(link.comm, verdict, mean.data_ptr(), mean.numel(), refusal, link.current_stream())

    def _average_matrices(self, matrices: list[Matrix], small: list[torch.Tensor]) -> None:
        factors, verdict = self._factors, self._verdict()
        of_p, of_q = [m.left_numel for m in matrices], [m.right_numel for m in matrices]
        own = factors.begin(self.exchange, sum(of_p), small)
        if matrices:
            rows = [_row(m, out=p) for m, p in zip(matrices, addresses(own, of_p))]
            self._run(device_powersgd_project, rows, verdict)
        mean = factors.average(self.exchange)
        if not matrices:
            return
        self._check_finite(verdict, mean, _REFUSED)
        lefts = [m.left_from(p) for m, p in zip(matrices, addresses(mean, of_p))]
        self._run(device_powersgd_orthonormalize, lefts, verdict)
        own = factors.begin(self.exchange, sum(of_q))
        rights = [m.entry["right"] for m in matrices]
        places = zip(matrices, addresses(own, of_q), rights)
        rows = [_row(m, out=q, copy=right.data_ptr()) for m, q, right in places]
        self._run(device_powersgd_absorb, rows, verdict)
        mean = factors.average(self.exchange)
        self._check_finite(verdict, mean, _REFUSED_LATE)
        if factors.rounds and self.use_error_feedback:
            settled = factors.settle(self.exchange).split(of_q)
            self._device.copy([(to.view(-1), source) for to, source in zip(rights, settled)], verdict)
        means = addresses(mean, of_q)
        rows = [_row(m, right=q, out=right.data_ptr()) for m, q, right in zip(matrices, means, rights)]
        self._run(device_powersgd_expand, rows, verdict)
        self._run(device_powersgd_orthonormalize, [m.basis_from(q) for m, q in zip(matrices, means)], verdict)


def _row(
    matrix: Matrix, *, right: int = 0, out: int = 0, copy: int = 0
) -> tuple[int, int, int, int, int, int, int, int, int, int, str]:
    """Return a matrix's row for the engine. `right` replaces its factor (0: keep)."""
    gradient, memory, left, own_right, basis, rows, cols, rank, _, dtype = matrix.row
    return gradient, memory, left, right or own_right, basis, out, copy, rows, cols, rank, dtype


def addresses(message: torch.Tensor, sizes: list[int]) -> list[int]:
    """Return the addresses of consecutive parts of `sizes` floats."""
    return [message.data_ptr() + 4 * (end - size) for end, size in zip(itertools.accumulate(sizes), sizes)]
