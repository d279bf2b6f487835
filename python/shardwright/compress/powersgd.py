"""PowerSGD's settings and state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .._engine import Codec
from ..layout.views import dtype_name
from ..options.compressors import check_powersgd
from .state import CompressionState, owed


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
        codec = Codec(
            "powersgd",
            wire=dtype_name(wire_dtype),
            error_feedback=use_error_feedback,
            warm_start=warm_start,
            rank=matrix_approximation_rank,
            least_rate=min_compression_rate,
            first_round=start_powerSGD_iter,
            seed=random_seed % 2**64,
            memory=dtype_name(error_dtype),
        )
        super().__init__(codec, process_group, named_parameters)
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

    def dtype_of(self, key: str) -> torch.dtype:
        return self.error_dtype if key == "memory" else torch.float32

    def rows_of(self, gradient: torch.Tensor) -> int:
        return rows_in_memory(gradient)

    def errors(self) -> dict[str, torch.Tensor]:
        """Return this rank's error by parameter, rows x columns in float32, for tests and inspection."""
        return {name: owed(entry).float() for name, entry in self.entries().items() if "memory" in entry}


def rows_in_memory(gradient: torch.Tensor) -> int:
    """Return the size of the outermost dimension in memory order; 0 with less than two dimensions, or with gaps."""
    if gradient.dim() == 0 or gradient.numel() == 0:
        return 0
    strides = gradient.stride()
    order = sorted(range(gradient.dim()), key=lambda d: (-strides[d], gradient.shape[d] == 1))
    ordered = gradient.permute(order)
    return ordered.shape[0] if ordered.is_contiguous() else 0
