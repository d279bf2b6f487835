"""What wrap() is asked of a module on a GPU: what the host alone has is an error with a name."""

from __future__ import annotations

import torch

from .compress import Bf16, Compressor, Fp16
from .options import Options
from .table import ParameterTable


def check_options(zero: int, options: Options) -> None:
    """Raises NotImplementedError for what the host alone has."""
    if zero == 3 and (
        options.share_parameters is True or options.gather is not None or options.write_guard is not None
    ):
        raise NotImplementedError(
            "share_parameters=True, gather='int8' and write_guard= are the host's: at zero=3 on GPUs each rank keeps its slices as they are"
        )


def wire_of(compress: Compressor | None, table: ParameterTable) -> str | None:
    """In what gradients travel between GPUs; None: as they are."""
    if compress is None:
        return None
    if not isinstance(compress, (Fp16, Bf16)):  # a hook's: see device_exchange.py
        return None
    for name, parameter in zip(table.names, table.parameters):
        if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise NotImplementedError(
                f"compress={compress!r} on GPUs: parameter {name!r} must be float32, float16 or bfloat16, not {parameter.dtype}"
            )
    return "float16" if isinstance(compress, Fp16) else "bfloat16"
