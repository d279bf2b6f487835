"""The comparison of the engine's GPU kernels with their references (csrc_check), for the tools."""

from typing import Any

from ._engine import DeviceComm

def device_kernel_cases() -> dict[str, int]:
    """Return the number of cases of each kernel, by its name."""

def device_kernel_check(
    comm: DeviceComm, kernel: str, first: int = 0, step: int = 1, strict: bool = False
) -> dict[str, Any]:
    """Compare a kernel with its reference on the GPU: cases first, first + step, ..., each on three grids.

    Returns ``{"cases", "launches", "differences", "sentences"}``; `sentences` describes the first differences. `strict`, for
    compute-sanitizer: each case has new device memory that holds only what the kernel is declared to read. ``Error`` when a call of the
    driver's fails.
    """
