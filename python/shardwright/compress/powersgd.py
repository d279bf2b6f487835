"""PowerSGD over a bucket: one message with P and all small parameters, one with Q."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import torch

from .._engine import (
    powersgd_absorb,
    powersgd_decompress,
    powersgd_error,
    powersgd_init_basis,
    powersgd_is_finite,
    powersgd_project,
    powersgd_stride,
)
from ..comm.exchange import average_plain, check_place
from ..layout.bucket import share_of
from ..layout.views import dtype_name
from ..options.compressors import check_powersgd
from .factor_exchange import FactorExchange
from .state import CompressionState

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


class PowerSGDState(CompressionState):
    """Settings and state of powerSGD_hook, with torch's arguments.

    Parameters
    ----------
    process_group : ProcessGroup or None
        None: the default group.
    matrix_approximation_rank : int
        In [1, 256]. A matrix uses min(rank, rows, columns).
    start_powerSGD_iter : int
        Rounds at the start that are averaged without compression; may be 0.
    min_compression_rate : float
        A matrix is compressed if (rows + columns) * rank * rate < rows * columns.
    use_error_feedback, warm_start : bool
    random_seed : int
        The seed of the first basis; equal on all ranks.
    orthogonalization_epsilon, compression_stats_logging_frequency, batch_tensors_with_same_shape
        Accepted like torch's, without effect.
    wire_dtype : torch.dtype
        The dtype of factors on the wire: float32, bfloat16 or float16. Their rounding error is fed back; small
        parameters travel in float32. In float16 a factor beyond 65504 counts as not finite.
    error_dtype : torch.dtype
        The dtype of the memory between rounds: float32; or bfloat16, which halves the memory and rounds it by up to
        2^-9 each round.
    named_parameters : iterable of (str, Parameter), optional
        Names for state_dict().

    Notes
    -----
    Values out of range raise ValueError. Each rank keeps its own error, (I - P Pᵀ) v, so the error does not grow with
    other ranks' contributions. It is never stored: the memory holds v. If a bucket's P is not finite on some rank, the
    state is unchanged on every rank and the compressed gradients are NaN. If P is finite but Q overflows, the state
    restarts. Memory: one element of error_dtype an element, and 2 rank (rows + columns) float32.
    """

    kind = "PowerSGD"

    def __init__(
        self,
        process_group: Any = None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,  # noqa: N803, torch's name
        min_compression_rate: float = 2,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        wire_dtype: torch.dtype = torch.float32,
        error_dtype: torch.dtype = torch.float32,
    ) -> None:
        check_powersgd(locals())
        super().__init__(process_group, named_parameters)
        self._q = torch.empty(0, dtype=torch.float32, device="cpu")
        self._factors = FactorExchange(wire_dtype)
        self.wire_dtype, self.error_dtype = wire_dtype, error_dtype
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.orthogonalization_epsilon = orthogonalization_epsilon
        self.random_seed = random_seed
        self.compression_stats_logging_frequency = compression_stats_logging_frequency
        self.batch_tensors_with_same_shape = batch_tensors_with_same_shape

    def settings(self) -> dict[str, Any]:
        dtypes = {"wire_dtype": self.wire_dtype, "error_dtype": self.error_dtype}
        halves = {key: str(dtype) for key, dtype in dtypes.items() if dtype != torch.float32}
        return {
            **halves,
            "matrix_approximation_rank": self.matrix_approximation_rank,
            "min_compression_rate": self.min_compression_rate,
            "use_error_feedback": self.use_error_feedback,
            "warm_start": self.warm_start,
            "alternate": False,  # of a form that is gone: states of the two cannot be exchanged
        }

    def uses_entries(self) -> bool:
        return self.iter > self.start_powerSGD_iter

    def dtype_of(self, key: str) -> torch.dtype:
        return self.error_dtype if key == "memory" else torch.float32

    def errors(self) -> dict[str, torch.Tensor]:
        """Return this rank's error by parameter, rows x columns in float32, for tests and inspection."""
        found = {}
        for name, entry in self._entries.items():
            if "memory" not in entry:
                continue
            rows, cols = entry["memory"].shape
            error = torch.empty(rows, cols, dtype=torch.float32, device="cpu")
            held = [entry[key].cpu() for key in ("memory", "left", "right", "basis")]
            memory, left, right, basis = (tensor.data_ptr() for tensor in held)
            rank, dtype = entry["left"].shape[0], dtype_name(self.error_dtype)
            powersgd_error([(0, memory, left, right, basis, rows, cols, rank, 0, dtype)], [error.data_ptr()])
            found[name] = error
        return found

    def average(self, bucket: Any) -> torch.Tensor:
        buffer = bucket.buffer()
        check_place(self.exchange, buffer)
        if self.iter < self.start_powerSGD_iter:
            average_plain(self.exchange, buffer, *share_of(bucket))
        else:
            flat = buffer if buffer.dtype == torch.float32 else buffer.float()
            self._average_compressed(bucket, flat, buffer.storage_offset())
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
            rows = _rows_in_memory(gradient)
            cols = gradient.numel() // rows if rows else 0
            rank = min(rows, cols, self.matrix_approximation_rank)
            if (rows + cols) * rank * self.min_compression_rate < rows * cols:
                matrices.append(self._matrix(parameter, part, rows, rank))
            elif part.numel():
                small.append(part)
        self._average_matrices(matrices, small)

    def _average_matrices(self, matrices: list[Matrix], small: list[torch.Tensor]) -> None:
        table = [matrix.row for matrix in matrices]
        finite = self._exchange_p(table, matrices, small)
        if not (finite and (not matrices or self._exchange_q(table, matrices))):
            for matrix in matrices:
                matrix.part.fill_(math.nan)

    def _matrix(self, parameter: torch.Tensor, part: torch.Tensor, rows: int, rank: int) -> Matrix:
        cols = part.numel() // rows
        left, right = (rank, powersgd_stride(rows)), (rank, powersgd_stride(cols))
        shapes: dict[str, tuple[int, ...]] = {"left": left, "right": right, "basis": right}
        if self.use_error_feedback:
            shapes["memory"] = (rows, cols)
        entry, is_new = self.entry(parameter, shapes)
        index = sum(map(ord, self.name_of(parameter)))  # equal on all ranks and in all runs, unlike hash()
        seed = (self.random_seed * 1_000_003 + index * 8191 + (0 if self.warm_start else self.iter * 131)) & (2**63 - 1)
        matrix = Matrix(part, entry, rows, cols, rank, seed, dtype_name(self.error_dtype))
        if is_new or not self.warm_start:
            self._begin_basis(matrix)
        return matrix

    def _begin_basis(self, matrix: Matrix) -> None:
        powersgd_init_basis([matrix.row])

    def _exchange_p(self, table: list[Any], matrices: list[Matrix], small: list[torch.Tensor]) -> bool:
        """Make P orthonormal and compute this rank's Q, unless some P is not finite. Average small parameters."""
        of_p, of_q = [m.left_numel for m in matrices], [m.right_numel for m in matrices]
        factors = self._factors.begin(self.exchange, sum(of_p), small)
        powersgd_project(table, addresses(factors, of_p))
        whole = self._factors.average(self.exchange)
        if not powersgd_is_finite(whole.data_ptr(), whole.numel()):
            return False
        if self._q.numel() < sum(of_q):
            self._q = torch.empty(sum(of_q), dtype=torch.float32, device="cpu")
        powersgd_absorb(table, addresses(whole, of_p), addresses(self._q, of_q))
        return True

    def _exchange_q(self, table: list[Any], matrices: list[Matrix]) -> bool:
        sizes = [matrix.right_numel for matrix in matrices]
        own = self._q[: sum(sizes)]
        self._factors.begin(self.exchange, own.numel()).copy_(own)
        whole = self._factors.average(self.exchange)
        if not powersgd_is_finite(whole.data_ptr(), own.numel()):
            for matrix in matrices:  # finite gradients whose sums overflow would overflow forever if kept
                for key in {"memory", "right"} & matrix.entry.keys():
                    matrix.entry[key].zero_()
            return False
        if self._factors.rounds and self.use_error_feedback:
            for matrix, right in zip(matrices, self._factors.settle(self.exchange).split(sizes)):
                matrix.entry["right"].view(-1).copy_(right)
        powersgd_decompress(table, addresses(whole, sizes))
        return True


def addresses(message: torch.Tensor, sizes: list[int]) -> list[int]:
    """Return the addresses of consecutive parts of `sizes` floats."""
    return [message.data_ptr() + 4 * (end - size) for end, size in zip(itertools.accumulate(sizes), sizes)]


def _rows_in_memory(gradient: torch.Tensor) -> int:
    """Return the size of the outermost dimension in memory order; 0 with less than two dimensions, or with gaps."""
    if gradient.dim() == 0 or gradient.numel() == 0:
        return 0
    strides = gradient.stride()
    order = sorted(range(gradient.dim()), key=lambda d: (-strides[d], gradient.shape[d] == 1))
    ordered = gradient.permute(order)
    return ordered.shape[0] if ordered.is_contiguous() else 0
