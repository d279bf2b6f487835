"""What wrap() is asked of a module on a GPU: what the host alone has is an error with a name."""

from __future__ import annotations

import torch

from .compress import Bf16, Compressor, Fp16
from .options import Options
from .process_group import HostGroup
from .table import ParameterTable


def check_options(zero: int, options: Options) -> None:
    """Raises NotImplementedError for what the host alone has."""
    if zero == 3 and (
        options.share_parameters is True
        or options.gather is not None
        or options.write_guard in ("samples", "read-only")
    ):
        raise NotImplementedError(
            "share_parameters=True, gather='int8' and write_guard= are the host's: at zero=3 on GPUs each rank keeps its slices as they are"
        )


def check_borrowing(module: torch.nn.Module, options: Options, group: HostGroup) -> None:
    """Raises NotImplementedError where a batch normalisation over the same ranks would use torch's communicator inside a backward.

    It would in the forward and in the backward, in which ours is using it on a stream of its own.
    """
    if options.communicator != "borrow" or group.world_size == 1:
        return
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.SyncBatchNorm) and group.is_of(part.process_group):
            raise NotImplementedError(
                f"communicator='borrow' with {type(part).__name__} {name!r}: it exchanges over torch's communicator of the same ranks "
                "inside forward and backward, beside gradients: pass communicator='own', or give it a process_group of its own"
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
