"""The choice of a module's backend."""

from __future__ import annotations

from ...backend.base import Backend
from ...layout.param_table import ParameterTable


def choose_backend(table: ParameterTable) -> type[Backend]:
    """Return the class of the backend of a module's parameters."""
    if table.is_on_gpu:
        from .cuda_backend import CudaBackend

        return CudaBackend
    from .host_backend import HostBackend

    return HostBackend
