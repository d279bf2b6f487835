"""A gradient as the matrix that PowerSGD compresses."""

from __future__ import annotations

import torch

#: addresses of gradient, memory, left, right, basis; rows, columns, rank; seed; dtype of the memory
MatrixRow = tuple[int, int, int, int, int, int, int, int, int, str]


class Matrix:
    """One gradient as rows x cols, and its row in the engine's table."""

    def __init__(
        self,
        part: torch.Tensor,
        entry: dict[str, torch.Tensor],
        rows: int,
        cols: int,
        rank: int,
        seed: int,
        dtype: str,
    ) -> None:
        self.part = part
        self.entry = entry
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
