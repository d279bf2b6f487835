"""Communication hooks that compress, with torch's names and arguments: changing one import is enough.

    from shardwright.hooks import PowerSGDState, powerSGD_hook
    ddp.register_comm_hook(PowerSGDState(process_group=None, matrix_approximation_rank=4), powerSGD_hook)

They run in torch's DistributedDataParallel on CPU tensors, and in shardwright's. The code is in the folder compress/.
"""

from __future__ import annotations

from .compress.blocks import BlockState
from .compress.fsdp2 import compress_all_reduce
from .compress.hooks import (
    bf16_compress_hook,
    bfloat16_compress_hook,
    fp16_compress_hook,
    int4_compress_hook,
    int8_compress_hook,
    powerSGD_hook,
)
from .compress.powersgd import PowerSGDState
from .compress.state import reshard_state

__all__ = [
    "BlockState",
    "PowerSGDState",
    "bf16_compress_hook",
    "bfloat16_compress_hook",
    "compress_all_reduce",
    "fp16_compress_hook",
    "int4_compress_hook",
    "int8_compress_hook",
    "powerSGD_hook",
    "reshard_state",
]
